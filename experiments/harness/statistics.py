"""Statistics of measured requests: percentiles, paired bootstrap intervals, repeated spans.

The plain percentile interval of a bootstrap is too narrow for few requests: it knows neither that the sample's own
spread falls short by n/(n-1), nor that the spread is estimated. Its levels are therefore moved out, so that for a mean
of normal values it has Student's width (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 5.3,
the expanded percentile interval). Below 8 requests a speedup's interval is Student's. What both give is held by
tests/experiments/test_interval_coverage.py.
"""
import functools

import numpy as np
from scipy import stats

REPEATING = 0.2  # a request repeats itself when at least this share of its output stands in repeated spans
LEAST_FOR_BOOTSTRAP = 8
_LEAST_FOR_ANY = 3
_RESAMPLES = 2000


def percentiles(values) -> dict | None:
  """p50, p95 and p99 of the values that are not None; None if there are none."""
  known = [v for v in values if v is not None]
  if not known:
    return None
  return {f"p{q}": float(np.percentile(known, q)) for q in (50, 95, 99)}


def speedup(base, other) -> float | None:
  """Ratio of pooled throughputs: both are lists of (tokens, seconds), one a request, in the same order."""
  if not len(base) or not len(other):
    return None
  base, other = np.sum(base, axis=0), np.sum(other, axis=0)
  if not (base[0] and other[0] and base[1] and other[1]):
    return None
  return float(other[0] / other[1] / (base[0] / base[1]))


def speedup_interval(base, other) -> list[float] | None:
  """95% interval of `speedup` over requests, paired: by a bootstrap from 8 on, below that Student's, see `_student`; None
  below 3 requests."""
  if len(base) < _LEAST_FOR_ANY or len(base) != len(other):
    return None
  if len(base) < LEAST_FOR_BOOTSTRAP:
    return _student(base, other)
  sums = _resampled(len(base)) @ np.concatenate([np.asarray(base, float), np.asarray(other, float)], axis=1)
  return _interval(sums[:, 2] / sums[:, 3] / (sums[:, 0] / sums[:, 1]), len(base))


def _student(base, other):
  """For requests too few for a bootstrap, Student's interval of the logarithm of `speedup`, whose variance is that of its
  linear part (the delta method for a ratio of sums, as surveys use it); None where there is no speedup.

  It is wide, 4.3 standard errors to each side of 3 requests, and presumes that requests scatter about normally.
  """
  n = len(base)
  if speedup(base, other) is None:
    return None
  both = np.concatenate([np.asarray(base, float), np.asarray(other, float)], axis=1)
  parts = (both / both.sum(0)) @ [-1, 1, 1, -1]
  half = stats.t.ppf(0.975, n - 1) * np.sqrt(n / (n - 1) * np.sum(parts ** 2))
  return [float(x) for x in np.exp(np.log(speedup(base, other)) + np.array([-half, half]))]


def mean_difference(base, other) -> float | None:
  """Mean of other - base over pairs; None without any."""
  return float(np.mean(np.subtract(other, base, dtype=float))) if len(base) and len(base) == len(other) else None


def difference_interval(base, other) -> list[float] | None:
  """95% interval of `mean_difference` by a bootstrap over requests, paired; None below 8 pairs.

  Where no pair differs it is [0, 0]: the pairs at hand say nothing of how rare a difference may be.

  Args:
    base, other: numbers or truth values, one a request, in the same order.
  """
  if len(base) < LEAST_FOR_BOOTSTRAP or len(base) != len(other):
    return None
  return _interval(_resampled(len(base)) @ np.subtract(other, base, dtype=float) / len(base), len(base))


@functools.lru_cache(maxsize=8)
def _resampled(n):
  """How often each of n requests stands in each resample, f64[2000, n]: times the values it is the resamples' sums."""
  pick = np.random.default_rng(0).integers(n, size=(_RESAMPLES, n))
  cells = pick + n * np.arange(_RESAMPLES)[:, None]
  return np.bincount(cells.ravel(), minlength=_RESAMPLES * n).reshape(_RESAMPLES, n).astype(float)


def _interval(values, n):
  """The expanded percentile interval of a statistic's resampled values; n requests were drawn from."""
  tail = stats.norm.cdf(np.sqrt(n / (n - 1)) * stats.t.ppf(0.025, n - 1))
  return [float(x) for x in np.quantile(values, [tail, 1 - tail])]


def repeated_tokens(tokens) -> int:
  """How many tokens stand inside a span that repeats three times or more in a row."""
  tokens = np.asarray(tokens)
  inside = np.zeros(len(tokens), bool)
  for period in range(1, len(tokens) // 3 + 1):
    same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
    edges = np.flatnonzero(np.diff(same.astype(int)))
    for begin, end in zip(edges[::2], edges[1::2]):  # tokens begin+period .. end+period equal those a period before
      if end - begin >= 2 * period:
        inside[begin:end + period] = True
  return int(inside.sum())
