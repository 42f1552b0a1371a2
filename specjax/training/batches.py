"""Batches of a corpus with its features, in an order that follows from a seed: step n is the same batch in every run.

Letters: B sequences of a batch, S tokens of each, D width of the target, F feature width.
"""
import dataclasses

from flax import struct
import jax
import numpy as np

from specjax.training import corpus
from specjax.training import features


@struct.dataclass
class Batch:
  """Sequences of about one length. NumPy arrays until a jitted function takes them."""
  tokens: jax.Array    # i32[B, S]
  length: jax.Array    # i32[B]
  start: jax.Array     # i32[B]; tokens of the prompt
  features: jax.Array  # f16[B, S, F]
  hidden: jax.Array    # f16[B, S, D]; behind the target's final norm
  top: jax.Array       # i32[B, S]; the target's most probable id after each token


@dataclasses.dataclass(frozen=True)
class Data:
  """Where batches come from.

  Attributes:
    folder: of the corpus. layers: whose features. width: D.
    tokens: of a batch, about. max_tokens: sequences are cut there.
    held_out: every `held_out`-th sequence is for evaluation only; 0 for none.
    limit: train on so many tokens, at most: for curves of acceptance against data.
  """
  folder: str
  layers: tuple[int, ...]
  width: int
  tokens: int = 2048
  max_tokens: int = 384
  held_out: int = 50
  limit: int | None = None

  def __post_init__(self):
    places, held, used = [], [], 0
    for index in corpus.indices(self.folder):
      sequences = corpus.read(self.folder, index)
      for which in range(len(sequences)):
        length = min(len(sequences[which]), self.max_tokens)
        if self.held_out and which % self.held_out == self.held_out - 1:
          held.append((index, which, length))
        elif self.limit is None or used < self.limit:
          places.append((index, which, length))
          used += length
    if not places:
      raise ValueError(f"{self.folder} has no sequences to train on")
    for name, value in (("places", places), ("held", held), ("training_tokens", used), ("_files", {}), ("_plans", {})):
      object.__setattr__(self, name, value)

  def epoch_steps(self) -> int:
    """Batches of one pass over the data."""
    return len(self._plan(0, 0))

  def batch(self, step: int, seed: int) -> Batch:
    """The batch of a step; epochs differ in their order and in which sequences stand together."""
    epoch, begin = 0, 0
    while step >= begin + len(self._plan(epoch, seed)):
      begin += len(self._plan(epoch, seed))
      epoch += 1
    return self._load(*self._plan(epoch, seed)[step - begin])

  def evaluation(self) -> list[Batch]:
    """The held-out sequences."""
    groups = features.batches([length for *_, length in self.held], self.tokens)
    return [self._load([self.held[i] for i in rows], size) for rows, size in groups]

  def _plan(self, epoch, seed):
    if (epoch, seed) not in self._plans:
      rng = np.random.default_rng((seed, epoch))
      order = rng.permutation(len(self.places))
      groups = features.batches([self.places[i][2] for i in order], self.tokens)
      groups = [([self.places[order[i]] for i in rows], size) for rows, size in groups]
      self._plans[epoch, seed] = [groups[i] for i in rng.permutation(len(groups))]
    return self._plans[epoch, seed]

  def _load(self, rows, size):
    total = len(self.layers) * self.width
    tokens, top = np.zeros((2, len(rows), size), np.int32)
    values = np.zeros((len(rows), size, total + self.width), np.float16)
    starts = np.zeros(len(rows), np.int32)
    for row, (index, which, length) in enumerate(rows):
      if index not in self._files:
        self._files[index] = (corpus.read(self.folder, index), features.read(self.folder, index, self.layers))
      sequences, file = self._files[index]
      begin = sequences.offsets[which]
      tokens[row, :length] = sequences[which][:length]
      top[row, :length] = file.top[begin:begin + length]
      values[row, :length] = file.values[begin:begin + length]
      starts[row] = sequences.starts[which]
    return Batch(tokens=tokens, length=np.asarray([length for *_, length in rows], np.int32), start=starts,
                 features=values[..., :total], hidden=values[..., total:], top=top)
