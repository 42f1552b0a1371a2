"""Batches of a corpus with its features, in an order that follows from a seed: step n is the same batch in every run.

Letters: B sequences of a batch, S tokens of each, D width of the target, F feature width.
"""
import dataclasses
import zlib

from flax import struct
import jax
import numpy as np

from specjax.training import corpus
from specjax.training import features

_OPENING = 64  # tokens of plain text that stand for a prompt


@struct.dataclass
class Batch:
  """Sequences of about one length, filled up with rows of length 0. NumPy arrays until a jitted function takes them."""
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
    folders: of the corpora. layers: whose features. width: D.
    tokens: of a batch, about. max_tokens: sequences are cut there.
    held_out: one in so many sequences is for evaluation only, which follows from its prompt, so that a prompt that was
      answered twice is on one side; 0 for none.
    limit: train on so many tokens, at most, of all kinds alike: for curves of acceptance against data.
  """
  folders: tuple[str, ...]
  layers: tuple[int, ...]
  width: int
  tokens: int = 2048
  max_tokens: int = 384
  held_out: int = 50
  limit: int | None = None

  def __post_init__(self):
    places, held, total = [], [], 0
    for folder, index in ((folder, index) for folder in self.folders for index in corpus.indices(folder)):
      sequences = corpus.read(folder, index)
      for which, start in enumerate(sequences.starts):
        ids = sequences[which]
        place = (folder, index, which, min(len(ids), self.max_tokens))
        total += len(ids)
        asked = sequences.prompt(which) if start else ids[:_OPENING]
        if self.held_out and zlib.crc32(asked.tobytes()) % self.held_out == 0:
          held.append(place)
        else:
          places.append((zlib.crc32(ids.tobytes()), place))
    # By a number that has nothing to do with the order of files, whose kinds of text differ.
    places = [place for _, place in sorted(places, key=lambda pair: pair[0])] if self.limit else [p for _, p in places]
    within = np.cumsum([place[-1] for place in places]) <= (self.limit or np.inf)
    places = [place for place, fits in zip(places, within) if fits]
    used = sum(place[-1] for place in places)
    if not places:
      raise ValueError(f"{', '.join(self.folders)}: there are no sequences to train on")
    for name, value in (("places", places), ("held", held), ("training_tokens", used),
                        ("corpus_tokens", total), ("_files", {}), ("_plans", {})):
      object.__setattr__(self, name, value)

  def answers(self):
    """Of every sequence that is trained on, what the target wrote, or all of plain text: i32[] each."""
    for folder, index, which, length in self.places:
      sequences = self._sequences(folder, index)
      yield sequences[which][sequences.starts[which]:length]

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
      groups = features.batches([self.places[i][-1] for i in order], self.tokens)
      groups = [([self.places[order[i]] for i in rows], size) for rows, size in groups]
      self._plans[epoch, seed] = [groups[i] for i in rng.permutation(len(groups))]
    return self._plans[epoch, seed]

  def _sequences(self, folder, index):
    if (folder, index) not in self._files:
      self._files[folder, index] = corpus.read(folder, index)
    return self._files[folder, index]

  def _load(self, rows, size):
    total = len(self.layers) * self.width
    tokens, top = np.zeros((2, len(rows), size), np.int32)
    values = np.zeros((len(rows), size, total + self.width), np.float16)
    starts, lengths = np.zeros((2, len(rows)), np.int32)
    for row, (folder, index, which, length) in enumerate(rows):
      if row and rows[row] == rows[row - 1]:
        continue  # fills the batch up: empty, so that no sequence counts twice
      sequences = self._sequences(folder, index)
      if ("features", folder, index) not in self._files:
        self._files["features", folder, index] = features.read(folder, index, self.layers)
      file = self._files["features", folder, index]
      begin = sequences.offsets[which]
      tokens[row, :length] = sequences[which][:length]
      top[row, :length] = file.top[begin:begin + length]
      values[row, :length] = file.values[begin:begin + length]
      starts[row], lengths[row] = sequences.starts[which], length
    return Batch(tokens=tokens, length=lengths, start=starts, features=values[..., :total], hidden=values[..., total:],
                 top=top)
