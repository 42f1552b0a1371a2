"""What steps cost, learned while they run: the median of the latest times, per batch, slots, limit and width.

Letters: W widths of a proposer.
"""
import collections
import copy
import statistics

import numpy as np

_LATEST = 24          # times that a median is taken of
_A_NODE = 0.06        # cost of one more node a row, in plain steps, before anything was measured


class Costs:
  """Seconds of steps of `widths`, under drafting that was held down to a limit."""

  def __init__(self, widths: tuple[int, ...]):
    self.widths = widths
    self._under: dict[tuple, collections.deque] = {}  # by (batch, slots, limit); none of them is empty
    self._at: dict[tuple, collections.deque] = {}     # by (batch, slots, drafting, width)

  def add(self, batch: int, slots: int, limit: int, width: int, seconds: float) -> None:
    """One step of `batch` rows, no row of which might draft more than `limit` tokens, verified at `width`."""
    latest = lambda times, key: times.setdefault(key, collections.deque(maxlen=_LATEST))
    latest(self._under, (batch, slots, limit)).append(seconds)
    latest(self._at, (batch, slots, limit > 0, width)).append(seconds)

  def copy(self) -> "Costs":
    """The same times, to be added to without the other's knowing."""
    return copy.deepcopy(self)

  def measured(self, batch: int, slots: int, limit: int) -> int:
    """How often a step with this limit was timed in this shape, of those that are kept."""
    return len(self._under.get((batch, slots, limit), ()))

  def under(self, batch: int, slots: int, limit: int) -> float:
    """Seconds of a step with this limit: measured, or of a plain step by the ratio of the two in another batch.

    Nodes that were never timed cost little, so that they are tried, and the estimate is corrected.
    """
    known = self._under.get((batch, slots, limit))
    if known:
      return statistics.median(known)
    if limit:
      return self.under(batch, slots, 0) * self._ratio(batch, limit)
    return self._nearest(batch, slots)

  def of_widths(self, batch: int, slots: int) -> np.ndarray:
    """Seconds of a step at each width, while rows may draft: f32[W]."""
    times = [self._at.get((batch, slots, True, width)) for width in self.widths]
    plain = self._at.get((batch, slots, True, 1)) or self._at.get((batch, slots, False, 1))
    base = statistics.median(plain) if plain else 1.0
    seconds = [statistics.median(known) if known else base * (1 + _A_NODE * (width - 1))
               for known, width in zip(times, self.widths)]
    return np.maximum.accumulate(np.array(seconds, np.float32))  # more nodes never cost less: what says so is noise

  def _nearest(self, batch, slots):
    """Seconds of a plain step in the nearest shape in which one was measured; 1 if none was."""
    shapes = [(abs(np.log2(b / batch)) + abs(np.log2(s / slots)), b, s) for b, s, at in self._under if not at]
    return statistics.median(self._under[(*min(shapes)[1:], 0)]) if shapes else 1.0

  def _ratio(self, batch, limit):
    """The ratio of this limit's steps to plain ones in the nearest batch in which both were measured. Nodes cost less
    in smaller batches; that they cost more in larger ones is found out by trying."""
    both = [(abs(np.log2(b / batch)), b, s) for b, s, at in self._under if at == limit and (b, s, 0) in self._under]
    if not both:
      return 1 + _A_NODE * limit
    _, b, s = min(both)
    ratio = statistics.median(self._under[b, s, limit]) / statistics.median(self._under[b, s, 0])
    return 1 + (ratio - 1) * min(1.0, batch / b)
