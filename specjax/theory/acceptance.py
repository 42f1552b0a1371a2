"""How often a drafted token is accepted, from a run's counters: rates by position, their intervals, and laws fitted to
them.

The counters of a run say for each position of a draft how often it was judged behind accepted ones (`trials`) and how
often it was accepted. A *law* gives the conditional acceptance a_d of every position from them, beyond the last
position that was seen too, so that a draft of any length can be asked what it brings:

- free: each position its own rate; further ones take the pooled rate of the last ones that were judged often.
- geometric: one rate for all, Leviathan's alpha (arXiv 2211.17192).
- beta_geometric: requests and contexts differ, each with its own alpha drawn from Beta(a, b). Of those that accepted d
  tokens more are easy ones, so that a_d = (a + d) / (a + b + d) rises with the position. It is what pooled counters of
  unlike contexts show, and the geometric law cannot.

Letters: R requests, D positions of a draft.
"""
from collections.abc import Sequence
import dataclasses
import math

import numpy as np
from numpy import typing as npt

from specjax import static_trees

KINDS = ("free", "geometric", "beta_geometric")
_TRUSTED = 8  # judged so often, a position's own rate is taken; rarer ones share a rate
_Z95 = 1.959963984540054


def wilson(accepted: float, trials: float, z: float = _Z95) -> tuple[float, float]:
  """Wilson's interval of a rate, 95% by default: (0, 1) without a trial. It stays inside [0, 1] and is right for rates
  near its ends, where drafts often are. Trials count as independent of each other: see `bootstrap`."""
  if not trials:
    return 0.0, 1.0
  rate, square = accepted / trials, z * z / trials
  middle = rate + square / 2
  half = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials))
  return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def bootstrap(trials: npt.ArrayLike, accepted: npt.ArrayLike, *, resamples: int = 2000, level: float = 0.95,
              seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """The interval of every position's rate when requests are drawn again, with replacement: f[D], f[D].

  Tokens of a request are accepted alike, so that it is requests that are independent; with many tokens of few requests
  this interval is the wider and the right one. A resample without a trial at a position counts as both 0 and 1 there.

  Args:
    trials, accepted: i[R, D], of each request.
  """
  trials, accepted = (np.atleast_2d(np.asarray(x, np.float64)) for x in (trials, accepted))
  _check(trials, accepted)
  pick = np.random.default_rng(seed).integers(len(trials), size=(resamples, len(trials)))
  tried, right = trials[pick].sum(1), accepted[pick].sum(1)
  rate = lambda missing: np.where(tried > 0, right / np.maximum(tried, 1), missing)
  edge = 100 * (1 - level) / 2
  return np.percentile(rate(0.0), edge, axis=0), np.percentile(rate(1.0), 100 - edge, axis=0)


@dataclasses.dataclass(frozen=True)
class Law:
  """Acceptance of every position behind accepted ones.

  Attributes:
    kind: of `KINDS`.
    rates: free: of each position, the last one for all that follow; geometric: alpha alone.
    beta: (a, b) of a beta_geometric law.
    loss: minus the log-likelihood of the counts it was fitted to; smaller is better.
  """
  kind: str
  rates: tuple[float, ...] = ()
  beta: tuple[float, float] = (1.0, 1.0)
  loss: float = 0.0

  def conditional(self, length: int) -> np.ndarray:
    """a_1 .. a_length: f64[length]."""
    if self.kind == "beta_geometric":
      a, b = self.beta
      position = np.arange(length)
      return (a + position) / (a + b + position)
    return np.array([self.rates[min(d, len(self.rates) - 1)] for d in range(length)], np.float64)

  def survival(self, length: int) -> np.ndarray:
    """Probability that the first d drafted tokens are all accepted, d = 1 .. length: f64[length]."""
    return np.cumprod(self.conditional(length))

  def tokens(self, length: int) -> float:
    """Tokens of a step with a chain of `length` drafted tokens, the new one included."""
    return 1 + float(self.survival(length).sum())

  def table(self, length: int, ranks: Sequence[float]) -> np.ndarray:
    """A table f64[length, K] of acceptance by depth and rank for `tree_tokens`: first children by this law, those of
    the ranks behind in the proportions of `ranks` f[K], and no more in sum than 1."""
    share = np.asarray(ranks, np.float64) / ranks[0]
    table = self.conditional(length)[:, None] * share
    return table / np.maximum(table.sum(1, keepdims=True), 1)


def fit(trials: Sequence[float], accepted: Sequence[float], kind: str) -> Law:
  """The law of a kind that makes the counts most likely.

  Args:
    trials, accepted: f[D], pooled over requests.

  Raises:
    ValueError: no trial at all, more accepted than tried, or a kind that is not in `KINDS`.
  """
  tried, right = np.asarray(trials, np.float64), np.asarray(accepted, np.float64)
  _check(tried, right)
  if not tried.sum():
    raise ValueError(f"trials={tried.tolist()}: nothing was drafted, so nothing is known of acceptance")
  if kind == "geometric":
    law = Law(kind, rates=(float(right.sum() / tried.sum()),))
  elif kind == "beta_geometric":
    law = Law(kind, beta=_beta(tried, right))
  elif kind == "free":
    law = Law(kind, rates=_free(tried, right))
  else:
    raise ValueError(f"kind={kind!r}: it is one of {', '.join(KINDS)}")
  return dataclasses.replace(law, loss=_loss(law.conditional(len(tried)), tried, right))


def best(trials: Sequence[float], accepted: Sequence[float]) -> Law:
  """The law with the least Akaike criterion: the likelihood against the numbers it needs. Errors as of `fit`."""
  needed = {"free": len([t for t in trials if t]), "geometric": 1, "beta_geometric": 2}
  laws = [fit(trials, accepted, kind) for kind in ("geometric", "beta_geometric", "free")]
  return min(laws, key=lambda law: law.loss + needed[law.kind])


def tree_tokens(shape: static_trees.Shape, table: npt.ArrayLike) -> float:
  """Tokens of a step with a tree, the new one included; `table` f[K] by rank or f[D, K] by depth and rank."""
  return static_trees.expected_tokens(*shape, table)


def upper_tokens(trials: Sequence[float], accepted: Sequence[float], length: int, z: float = _Z95) -> float:
  """Tokens of a step with a chain of `length`, were every position accepted as often as the upper end of its interval
  allows. Positions that were not seen take the upper end of the pooled rate, or 1 where that is unknown too."""
  tried, right = np.asarray(trials, np.float64), np.asarray(accepted, np.float64)
  _check(tried, right)
  pooled = wilson(right.sum(), tried.sum(), z)[1]
  upper = [wilson(right[d], tried[d], z)[1] if d < len(tried) and tried[d] >= _TRUSTED else pooled
           for d in range(length)]
  return 1 + float(np.cumprod(upper).sum())


def _free(tried, right):
  rates, seen = [], [d for d in range(len(tried)) if tried[d] >= _TRUSTED]
  last = seen[-1] + 1 if seen else 0
  rates = [float(right[d] / tried[d]) if tried[d] else 0.0 for d in range(last)]
  rest = tried[last:].sum()
  if rest:
    rates.append(float(right[last:].sum() / rest))
  return tuple(rates)


def _beta(tried, right):
  """(a, b), by the mean a / (a + b) and the strength a + b; all is accepted or nothing: as strong as possible."""
  from scipy import optimize

  def parameters(x):
    mean, strength = 1 / (1 + np.exp(-np.clip(x[0], -9, 9))), np.exp(np.clip(x[1], -4, 9))
    return mean * strength, (1 - mean) * strength

  def loss(x):
    a, b = parameters(x)
    position = np.arange(len(tried))
    return _loss((a + position) / (a + b + position), tried, right)

  starts = [(centre, strength) for centre in (-1.0, 1.0) for strength in (0.0, 4.0)]
  found = min((optimize.minimize(loss, start, method="Nelder-Mead") for start in starts), key=lambda each: each.fun)
  return tuple(float(x) for x in parameters(found.x))


def _loss(rates, tried, right):
  tiny = 1e-12
  return float(-(right * np.log(np.maximum(rates, tiny)) + (tried - right) * np.log(np.maximum(1 - rates, tiny))).sum())


def _check(trials, accepted):
  if trials.shape != accepted.shape or np.any(accepted > trials) or np.any(accepted < 0):
    raise ValueError(f"trials={trials.tolist()}, accepted={accepted.tolist()}: one of each a position, and of the "
                     "trials no more are accepted than there are")
