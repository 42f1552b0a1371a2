"""Batches of inputs and answers for an encoder-decoder that is trained from nothing: step n is the same in every run.

Pairs of a data set take turns with pieces of plain text, of which spans are cut out anew each time (`spans`). Batches
have few shapes: lengths are filled up to one of `_SIZES` or to the greatest there may be.

Letters: B pairs of a batch, P inputs, T tokens of an answer.
"""
from collections.abc import Sequence
import dataclasses

from flax import struct
import jax
import numpy as np

from specjax.training import spans

_SIZES = 64, 256


@struct.dataclass
class Pairs:
  """Filled up with pairs of length 0. NumPy arrays until a jitted function takes them."""
  inputs: jax.Array          # i32[B, P]; of the encoder
  inputs_length: jax.Array   # i32[B]
  answers: jax.Array         # i32[B, T]; without what the decoder begins with
  answers_length: jax.Array  # i32[B]


@dataclasses.dataclass(frozen=True)
class Examples:
  """Token ids without an end of sequence.

  Attributes:
    pairs: inputs and answer of each. pieces: of plain text.
  """
  pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
  pieces: Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class PairData:
  """Where batches of pairs come from.

  Attributes:
    examples: to train on. held: for evaluation only.
    span_share: of the steps that learn from pieces; 0 where there are none, 1 where there are no pairs.
    eos: id that ends inputs and answers. sentinels: ids that stand for spans, in order.
    tokens: of a batch, inputs and answers, about.
    max_tokens: greatest P and T; inputs and answers are cut there.
  """
  examples: Examples
  held: Examples
  span_share: float
  eos: int
  sentinels: tuple[int, ...]
  tokens: int
  max_tokens: int

  def __post_init__(self):
    if not 0 <= self.span_share <= 1:
      raise ValueError(f"span_share={self.span_share}: it is the share of steps on plain text, from 0 to 1")
    for kind, share, flag in (("pairs", 1 - self.span_share, "smaller"), ("pieces", self.span_share, "greater")):
      if share and not getattr(self.examples, kind):
        other = "greater" if kind == "pairs" else "smaller"
        raise ValueError(f"span_share={self.span_share}: the data has no {kind} to train on; give some, or a {other} "
                         f"share ({1 if kind == 'pairs' else 0})")
    if self.span_share and not self.sentinels:
      raise ValueError(f"span_share={self.span_share}: the tokenizer has no sentinels (<extra_id_0> and so on); 0 is "
                       "left")
    count = lambda some: sum(len(a) + len(b) for a, b in some.pairs) + sum(map(len, some.pieces))
    for name, value in (("training_tokens", count(self.examples)), ("_plans", {}),
                        ("corpus_tokens", count(self.examples) + count(self.held))):
      object.__setattr__(self, name, value)

  def batch(self, step: int, seed: int) -> Pairs:
    """The batch of a step. Both kinds go through all they have before one comes again."""
    pieces = int((step + 1) * self.span_share) > int(step * self.span_share)
    turn = int(step * self.span_share) if pieces else step - int(step * self.span_share)
    epoch, begin = 0, 0
    while turn >= begin + len(self._plan(pieces, epoch, seed)):
      begin += len(self._plan(pieces, epoch, seed))
      epoch += 1
    rows, shape = self._plan(pieces, epoch, seed)[turn - begin]
    rng = np.random.default_rng((seed, step))
    return self._filled([self._example(self.examples, pieces, i, rng) for i in rows], shape)

  def shapes(self, seed: int) -> dict[tuple[int, int, int], int]:
    """A step for each shape (B, P, T) that the first epoch of either kind has."""
    found, step = {}, 0
    length = sum(len(self._plan(kind, 0, seed)) for kind, share in ((False, 1 - self.span_share),
                                                                   (True, self.span_share)) if share)
    while step < 2 * length:
      batch = self.batch(step, seed)
      found.setdefault((*batch.inputs.shape, batch.answers.shape[1]), step)
      step += 1
    return found

  def evaluation(self) -> list[Pairs]:
    """The held-out examples of the kinds that are trained on; spans are always the same."""
    found = []
    for pieces in (False, True):
      if self.span_share in ((0,) if pieces else (1,)):
        continue
      count = len(self.held.pieces if pieces else self.held.pairs)
      for rows, shape in self._grouped(self.held, pieces, range(count)):
        found.append(self._filled([self._example(self.held, pieces, i, np.random.default_rng(i)) for i in rows], shape))
    return found

  def _plan(self, pieces, epoch, seed):
    """Batches of an epoch of one kind: indices and (P, T)."""
    if (pieces, epoch, seed) not in self._plans:
      rng = np.random.default_rng((seed, epoch, int(pieces)))
      count = len(self.examples.pieces if pieces else self.examples.pairs)
      groups = self._grouped(self.examples, pieces, rng.permutation(count))
      self._plans[pieces, epoch, seed] = [groups[i] for i in rng.permutation(len(groups))]
    return self._plans[pieces, epoch, seed]

  def _grouped(self, examples, pieces, order):
    found, waiting = [], {}
    for which in order:
      if pieces:
        length = len(examples.pieces[which])
        gone, count = spans.sizes(length, len(self.sentinels))
        lengths = length - gone + count, gone + count
      else:
        lengths = map(len, examples.pairs[which])
      shape = tuple(self._size(length + 1) for length in lengths)
      waiting.setdefault(shape, []).append(int(which))
      if len(waiting[shape]) == self._rows(shape):
        found.append((waiting.pop(shape), shape))
    return found + [(rows, shape) for shape, rows in waiting.items()]

  def _size(self, length):
    return min((size for size in _SIZES if length <= size < self.max_tokens), default=self.max_tokens)

  def _rows(self, shape):
    return max(self.tokens // sum(shape), 1)

  def _example(self, examples, pieces, which, rng):
    return spans.corrupt(examples.pieces[which], self.sentinels, rng) if pieces else examples.pairs[which]

  def _filled(self, examples, shape):
    """A batch of one shape, each side cut so that the end of sequence fits."""
    sides, lengths = [], []
    for side, size in enumerate(shape):
      tokens, count = np.zeros((self._rows(shape), size), np.int32), np.zeros(self._rows(shape), np.int32)
      for row, example in enumerate(examples):
        ids = [*example[side][:size - 1], self.eos]
        tokens[row, :len(ids)], count[row] = ids, len(ids)
      sides.append(tokens)
      lengths.append(count)
    return Pairs(inputs=sides[0], inputs_length=lengths[0], answers=sides[1], answers_length=lengths[1])
