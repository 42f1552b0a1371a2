"""What a pass over t tokens costs a target with mixtures of experts: the terms of MoESD, fitted to measured times.

MoESD (arXiv 2505.19645, algorithm 1): time = bias + k1 G(t) + k2 N(t) + k3 G(t_e), with N the distinct experts that a
pass goes through, t_e the tokens of an expert that has any, and G(t) the roofline of a product over t tokens: s ** t up
to the ridge, and from there on the straight line that continues it. The bias is what a pass costs at any width, k1 what
all tokens share (attention, router, head), k2 the weights of an expert, k3 the work inside experts.

Here N is measured, not taken from the formula for tokens that choose at random, because real tokens beside each other
share experts: t_e = k t / N. All k are at least 0. s and the ridge are taken from a grid, whose every point is a linear
fit.

Letters: k experts of a token.
"""
from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

_SCALES = (1.0, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.4)
_RIDGES = (1, 4, 8, 16, 32, 64)


def roofline(tokens, scale: float, ridge: float) -> np.ndarray:
  """G(t): nearly flat while a product is bound by its weights, a straight line when it is bound by arithmetic."""
  tokens = np.asarray(tokens, np.float64)
  knee = scale ** ridge
  return np.where(tokens <= ridge, scale ** np.minimum(tokens, ridge), knee + knee * np.log(scale) * (tokens - ridge))


@dataclasses.dataclass(frozen=True)
class ExpertCost:
  """A fitted cost; milliseconds.

  Attributes:
    bias, dense, expert, grouped: of a pass, k1, k2 (for each distinct expert of a layer) and k3.
    scale, ridge: s, and the tokens up to which G is s ** t.
    chosen: k.
    error: median of |fitted - measured| / measured over the points of the fit.
  """
  bias: float
  dense: float
  expert: float
  grouped: float
  scale: float
  ridge: float
  chosen: int
  error: float

  def milliseconds(self, tokens, distinct) -> np.ndarray:
    """Of passes over `tokens` that go through `distinct` experts a layer, the mean."""
    return _terms(tokens, distinct, self.chosen, self.scale, self.ridge) @ np.array(
        [self.bias, self.dense, self.expert, self.grouped])


def fit(tokens: Sequence[float], distinct: Sequence[float], milliseconds: Sequence[float], chosen: int) -> ExpertCost:
  """The cost that fits measured passes best, in relative error.

  Args:
    tokens: of each pass. distinct: experts of a layer that it went through, the mean over layers. milliseconds: its
      time. Passes over as many tokens should differ in their experts, or the two cannot be told apart.
    chosen: k.

  Raises:
    ValueError: fewer than 6 passes, or times that are not positive.
  """
  times = np.asarray(milliseconds, np.float64)
  if len(times) < 6 or not np.all(times > 0):
    raise ValueError(f"{len(times)} passes of {times.tolist()} ms: at least 6 are needed, of positive times")
  from scipy import optimize
  best = None
  for scale, ridge in itertools.product(_SCALES, _RIDGES):
    # Of relative errors: the widest passes would else decide alone.
    terms = _terms(tokens, distinct, chosen, scale, ridge)
    weights, residual = optimize.nnls(terms / times[:, None], np.ones(len(times)))
    if best is None or residual < best[0] - 1e-9:
      best = residual, scale, ridge, weights, terms
  _, scale, ridge, weights, terms = best
  error = float(np.median(np.abs(terms @ weights - times) / times))
  return ExpertCost(*map(float, weights), scale=scale, ridge=ridge, chosen=chosen, error=error)


def _terms(tokens, distinct, chosen, scale, ridge):
  tokens, distinct = np.asarray(tokens, np.float64), np.asarray(distinct, np.float64)
  return np.stack([np.ones_like(tokens), roofline(tokens, scale, ridge), distinct,
                   roofline(chosen * tokens / distinct, scale, ridge)], axis=-1)
