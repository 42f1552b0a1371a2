"""What drafting gains: measured step times and an acceptance, put together.

The identity behind everything here (papers of speculative decoding write it in many ways):

  speedup = (prefill + n T(1)) / (prefill' + n / tau * (T_draft + T(w)))

with n output tokens, tau tokens a step, T(w) = T(w, B, S) a pass over w nodes of B rows behind S slots. Short outputs
behind long prompts gain less than long ones, because prefill is not drafted.

`StepTimes` holds measured points of T and interpolates between them, or those of a roofline on paper
(`theory.plan.Deployment`). The questions asked of it: the best draft length, the best tree (Sequoia, arXiv 2402.12374,
with these times in the place of its hardware model), the batch from which drafting loses, and what no acceptance could
make good. At the end of the module stand the closed forms of Leviathan et al. (arXiv 2211.17192).

Letters: B batch rows, S slots, w nodes of a pass (root included), D depth of a draft; times in milliseconds.
"""
from collections.abc import Callable, Iterable, Sequence
import dataclasses

import numpy as np
from numpy import typing as npt

from specjax import static_trees


@dataclasses.dataclass(frozen=True)
class Point:
  """One measured time of a target pass, milliseconds."""
  width: int
  batch: int
  length: int
  ms: float


class StepTimes:
  """T(w, B, S), piecewise linear between measured points and monotone in each of the three.

  Outside of what was measured the nearest line goes on; a time never falls where nodes, rows or slots are added, since
  what says so is noise.
  """

  def __init__(self, points: Iterable[Point], widths: Sequence[int] | None = None):
    """
    Args:
      points: measured. widths: those that the engine runs: a pass over n nodes is one of the least width that holds
        them; None: a pass over n nodes costs T(n).

    Raises:
      ValueError: no point, or a time that is not positive.
    """
    self.points = tuple(points)
    if not self.points or min(point.ms for point in self.points) <= 0:
      raise ValueError(f"points={self.points}: at least one is needed, and every time is more than 0")
    self.widths = None if widths is None else tuple(sorted(widths))
    self._curves = {}  # by batch, by length: (widths, times)
    for point in self.points:
      self._curves.setdefault(point.batch, {}).setdefault(point.length, []).append((point.width, point.ms))
    for lengths in self._curves.values():
      for length, curve in lengths.items():
        merged = {}
        for width, ms in curve:
          merged.setdefault(width, []).append(ms)
        lengths[length] = sorted(merged), monotone([float(np.median(merged[w])) for w in sorted(merged)])

  @classmethod
  def of_roofline(cls, deployment, widths: Sequence[int], batches: Sequence[int],
                  lengths: Sequence[int]) -> "StepTimes":
    """Those of a model on a slice of accelerators on paper, see `theory.plan.Deployment`."""
    return cls((Point(w, b, s, 1e3 * deployment.step(b, s, w).total) for w in widths for b in batches for s in lengths),
               widths)

  def ms(self, nodes: int, batch: int = 1, length: int = 0) -> float:
    """Milliseconds of a pass over `nodes` nodes, root included.

    Raises:
      ValueError: more nodes than the widest of `widths`.
    """
    width = nodes
    if self.widths is not None:
      width = next((w for w in self.widths if w >= nodes), None)
      if width is None:
        raise ValueError(f"nodes={nodes}: the widest pass is over {self.widths[-1]}; draft fewer tokens")
    at = lambda curves: _line(sorted(curves), monotone([_line(*curves[s], width) for s in sorted(curves)]), length)
    batches = sorted(self._curves)
    return _line(batches, monotone([at(self._curves[b]) for b in batches]), batch)

  def ridge(self, batch: int = 1, length: int = 0) -> float | None:
    """Nodes at which a pass over the memory takes as long as the arithmetic of its nodes: T(1) over what a further node
    costs at the widest measured passes. None where one width was measured, or a node costs nothing there."""
    widths = sorted({point.width for point in self.points})
    if len(widths) < 2:
      return None
    slope = (self.ms(widths[-1], batch, length) - self.ms(widths[-2], batch, length)) / (widths[-1] - widths[-2])
    return self.ms(1, batch, length) / slope if slope > 0 else None


@dataclasses.dataclass(frozen=True)
class DraftCost:
  """Milliseconds that a drafter takes: `fixed` a step, whatever it drafts, and `each` a pass. A model drafts a token a
  pass, or a level of a tree; a block drafter and a lookup have no passes."""
  fixed: float = 0.0
  each: float = 0.0

  def ms(self, depth: int) -> float:
    """Of a draft of `depth` tokens; 0 for none."""
    return self.fixed + self.each * depth if depth else 0.0


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked: output tokens, and the milliseconds before the first step, by plain decoding and by a method that
  has a prompt of its own to read."""
  output_tokens: float
  prefill_ms: float = 0.0
  method_prefill_ms: float | None = None

  def speedup(self, tokens_per_step: float, step_ms: float, plain_ms: float) -> float:
    """Of the whole request."""
    ours = self.prefill_ms if self.method_prefill_ms is None else self.method_prefill_ms
    plain = self.prefill_ms + self.output_tokens * plain_ms
    return plain / (ours + self.output_tokens / tokens_per_step * step_ms)


ENDLESS = Request(1e9)  # so many tokens that prefill does not count: the speedup of decoding


@dataclasses.dataclass(frozen=True)
class Choice:
  """The best of several settings: `length` drafted tokens (0: none) of a chain, or a tree, and what they bring."""
  length: int
  speedup: float
  shape: static_trees.Shape | None = None


def predict(tokens_per_step: float, nodes: int, depth: int, times: StepTimes, draft: DraftCost, *, batch: int = 1,
            length: int = 0, request: Request = ENDLESS) -> float:
  """Speedup over plain decoding of steps of `nodes` nodes, `depth` deep, that emit `tokens_per_step`."""
  plain = times.ms(1, batch, length)
  return request.speedup(tokens_per_step, times.ms(nodes, batch, length) + draft.ms(depth), plain)


def best_length(tokens: Callable[[int], float], most: int, times: StepTimes, draft: DraftCost, *, batch: int = 1,
                length: int = 0, request: Request = ENDLESS) -> Choice:
  """The chain of 0 to `most` drafted tokens with the greatest speedup; `tokens` gives tokens a step of each length, as
  `acceptance.Law.tokens` does. The shortest of equal ones."""
  options = [Choice(n, predict(tokens(n), n + 1, n, times, draft, batch=batch, length=length, request=request))
             for n in range(most + 1)]
  return max(options, key=lambda each: (each.speedup, -each.length))


def best_tree(table: npt.ArrayLike, most_nodes: int, most_depth: int, times: StepTimes, draft: DraftCost, *,
              batch: int = 1, length: int = 0, request: Request = ENDLESS) -> Choice:
  """Sequoia's tree for measured times: best-first for each width and depth, and of these the one that gains most.

  Args:
    table: acceptance by rank f[K], or by depth and rank f[D, K].
    most_nodes: T, the root included, at most. most_depth: levels.
  """
  widths = times.widths or sorted({point.width for point in times.points})
  options = [Choice(0, predict(1.0, 1, 0, times, draft, batch=batch, length=length, request=request))]
  for nodes in sorted({min(width, most_nodes) for width in widths} - {1}):
    for depth in range(1, most_depth + 1):
      shape = static_trees.best_first(table, nodes, depth)
      levels = int(static_trees.depths(shape.parents).max())
      gain = predict(static_trees.expected_tokens(*shape, table), len(shape.parents), levels, times, draft, batch=batch,
                     length=length, request=request)
      options.append(Choice(levels, gain, shape))
  return max(options, key=lambda each: (each.speedup, -each.length))


def break_even_batch(tokens_per_step: float, nodes: int, depth: int, times: StepTimes, draft: DraftCost, *,
                     length: int = 0, most: int = 4096) -> int | None:
  """The batch from which on drafting loses and never wins again up to `most`; None where it wins at `most`."""
  wins = lambda rows: predict(tokens_per_step, nodes, depth, times, draft, batch=rows, length=length) > 1
  grid = [2 ** i for i in range(most.bit_length())]
  won = [rows for rows in grid if wins(rows)]
  if not won:
    return 1
  if won[-1] == grid[-1]:
    return None
  low, high = won[-1], 2 * won[-1]
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if wins(middle) else (low, middle)
  return high


def ceiling(most: int, times: StepTimes, draft: DraftCost, *, batch: int = 1, length: int = 0,
            request: Request = ENDLESS) -> float:
  """The greatest speedup of chains of up to `most` tokens, were every token accepted: what no drafter exceeds."""
  return best_length(lambda n: n + 1.0, most, times, draft, batch=batch, length=length, request=request).speedup


def tokens_needed(nodes: int, depth: int, times: StepTimes, draft: DraftCost, *, batch: int = 1,
                  length: int = 0) -> float:
  """Tokens of a step from which it is worth its time: (T_draft + T(w)) / T(1)."""
  return (times.ms(nodes, batch, length) + draft.ms(depth)) / times.ms(1, batch, length)


def closed_speedup(alpha: float, gamma: int, cost: float) -> float:
  """Leviathan's theorem 3.8: drafts of `gamma` tokens, each accepted with `alpha`, each costing `cost` plain steps, and
  passes over all of them that cost what a plain step does."""
  return sum(alpha ** i for i in range(gamma + 1)) / (gamma * cost + 1)


def closed_operations(alpha: float, gamma: int, cost: float) -> float:
  """Their theorem 3.11: arithmetic operations over those of plain decoding, a drafted token costing `cost` of it."""
  return (gamma * cost + gamma + 1) / sum(alpha ** i for i in range(gamma + 1))


def closed_best_length(alpha: float, cost: float, most: int = 256) -> tuple[int, float]:
  """The gamma of greatest `closed_speedup`, and that speedup."""
  gamma = max(range(most + 1), key=lambda n: closed_speedup(alpha, n, cost))
  return gamma, closed_speedup(alpha, gamma, cost)


def lockstep_tokens(alpha: float, gamma: int, batch: int) -> float:
  """Tokens of a step and row where all rows of a batch are cut to what the worst of them accepts: why rows advance on
  their own here."""
  return sum(alpha ** (i * batch) for i in range(gamma + 1))


def monotone(values: Sequence[float]) -> list[float]:
  """The non-decreasing list that is nearest in squares (pooled adjacent violators)."""
  pools = []  # [mean, size]
  for value in values:
    pools.append([float(value), 1])
    while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
      mean, size = pools.pop()
      other, count = pools[-1]
      pools[-1] = [(mean * size + other * count) / (size + count), size + count]
  return [mean for mean, size in pools for _ in range(size)]


def _line(places, values, at) -> float:
  """Through the points, going on as the last two do; flat below the first."""
  if len(places) > 1 and at > places[-1]:
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    return values[-1] + slope * (at - places[-1])
  return float(np.interp(at, places, values))
