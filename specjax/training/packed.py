"""Rows of plain documents, side by side, for a decoder that is trained from nothing: step n is the same in every run.

A row holds documents one behind the other, each with the end of sequence behind it. A document that does not fit goes
on in the next row. Documents of one row do not see each other (`Rows.document`).

Letters: B rows of a batch, S tokens of each.
"""
from collections.abc import Sequence
import dataclasses

from flax import struct
import jax
import numpy as np


@struct.dataclass
class Rows:
  """NumPy arrays until a jitted function takes them."""
  tokens: jax.Array    # i32[B, S]
  document: jax.Array  # i32[B, S]; numbers that differ between the documents of a row, 0 where there is none


@dataclasses.dataclass(frozen=True)
class RowData:
  """Where batches of rows come from.

  Attributes:
    documents: token ids of each. held: those of documents that are for evaluation only.
    eos: id that is put behind a document.
    size: S. tokens: of a batch, about.
  """
  documents: Sequence[np.ndarray]
  held: Sequence[np.ndarray]
  eos: int
  size: int
  tokens: int

  def __post_init__(self):
    rows = max(self.tokens // self.size, 1)
    total = sum(len(ids) + 1 for ids in self.documents)
    if total < rows * self.size:
      raise ValueError(f"{total} tokens of text do not fill one batch of {rows} rows of {self.size}: give more text, "
                       "or a smaller batch")
    for name, value in (("rows", rows), ("training_tokens", total), ("_orders", {}),
                        ("corpus_tokens", total + sum(len(ids) + 1 for ids in self.held))):
      object.__setattr__(self, name, value)

  def epoch_steps(self) -> int:
    """Batches of one pass over the documents; what is left behind the last one is not used in that pass."""
    return self.training_tokens // (self.rows * self.size)

  def batch(self, step: int, seed: int) -> Rows:
    """The batch of a step: documents in an order of the epoch's own."""
    epoch, index = divmod(step, self.epoch_steps())
    if (epoch, seed) not in self._orders:
      order = np.random.default_rng((seed, epoch)).permutation(len(self.documents))
      self._orders.clear()  # of epochs that are over
      self._orders[epoch, seed] = _joined([self.documents[i] for i in order], self.eos)
    count = self.rows * self.size
    return _cut(*(line[index * count:(index + 1) * count] for line in self._orders[epoch, seed]), self.size)

  def evaluation(self) -> list[Rows]:
    """The held-out documents, the last batch filled up."""
    if not self.held:
      return []
    count = self.rows * self.size
    lines = [np.pad(line, (0, -len(line) % count)) for line in _joined(self.held, self.eos)]
    return [_cut(*(line[at:at + count] for line in lines), self.size) for at in range(0, len(lines[0]), count)]


def _joined(documents, eos):
  """Tokens and document numbers from 1, i32[N] each."""
  tokens = np.concatenate([np.append(np.asarray(ids, np.int32), np.int32(eos)) for ids in documents])
  return tokens, np.repeat(np.arange(1, len(documents) + 1, dtype=np.int32), [len(ids) + 1 for ids in documents])


def _cut(tokens, document, size):
  return Rows(tokens=tokens.reshape(-1, size), document=document.reshape(-1, size))
