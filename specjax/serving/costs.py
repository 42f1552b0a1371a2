"""What steps cost, learned while they run: the median of the latest times, per batch, slots, limit and width.

Letters: W widths of a proposer.
"""
import collections
import statistics

import numpy as np

_LATEST = 24          # times that a median is taken of
_A_NODE = 0.06        # cost of one more node a row, in plain steps, before anything was measured


class Costs:
  """Seconds of steps of `widths`, under drafting that was held down to a limit."""

  def __init__(self, widths: tuple[int, ...]):
    self.widths = widths
    self._under = collections.defaultdict(lambda: collections.deque(maxlen=_LATEST))  # (batch, slots, limit)
    self._at = collections.defaultdict(lambda: collections.deque(maxlen=_LATEST))     # (batch, slots, drafting, width)

  def add(self, batch: int, slots: int, limit: int, width: int, seconds: float) -> None:
    """One step of `batch` rows, no row of which might draft more than `limit` tokens, verified at `width`."""
    self._under[batch, slots, limit].append(seconds)
    self._at[batch, slots, limit > 0, width].append(seconds)

  def under(self, batch: int, slots: int, limit: int) -> float:
    """Seconds of a step with this limit; measured, or by the ratio to plain steps in another shape, or assumed."""
    known = self._under.get((batch, slots, limit))
    if known:
      return statistics.median(known)
    if limit == 0:
      return 1.0 if not self._under else self._nearest(batch, slots, 0) or 1.0
    ratio = self._ratio(batch, limit)
    return self.under(batch, slots, 0) * (1 + _A_NODE * limit if ratio is None else ratio)

  def of_widths(self, batch: int, slots: int) -> np.ndarray:
    """Seconds of a step at each width, while rows may draft: f32[W]."""
    times = [self._at.get((batch, slots, True, width)) for width in self.widths]
    plain = self._at.get((batch, slots, True, 1)) or self._at.get((batch, slots, False, 1))
    base = statistics.median(plain) if plain else 1.0
    seconds = [statistics.median(known) if known else base * (1 + _A_NODE * (width - 1))
               for known, width in zip(times, self.widths)]
    return np.maximum.accumulate(np.array(seconds, np.float32))  # more nodes never cost less: what says so is noise

  def _nearest(self, batch, slots, limit):
    shapes = [(abs(np.log2(b / batch)) + abs(np.log2(s / slots)), b, s)
              for (b, s, at), known in self._under.items() if at == limit and known]
    return statistics.median(self._under[(*min(shapes)[1:], limit)]) if shapes else None

  def _ratio(self, batch, limit):
    """The ratio of this limit's steps to plain ones in the nearest batch in which both were measured. Nodes cost less
    in smaller batches; that they cost more in larger ones is found out by trying."""
    both = [(abs(np.log2(b / batch)), b, s) for (b, s, at), known in list(self._under.items())
            if at == limit and known and self._under.get((b, s, 0))]
    if not both:
      return None
    _, b, s = min(both)
    ratio = statistics.median(self._under[b, s, limit]) / statistics.median(self._under[b, s, 0])
    return 1 + (ratio - 1) * min(1.0, batch / b)
