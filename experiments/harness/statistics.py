"""Statistics of measured requests: percentiles, paired bootstrap intervals, repeated spans."""
import numpy as np

REPEATING = 0.2  # a request repeats itself when at least this share of its output stands in repeated spans
_LEAST_FOR_INTERVAL = 8
_RESAMPLES = 2000


def percentiles(values) -> dict | None:
  """p50, p95 and p99 of the values that are not None; None if there are none."""
  known = [v for v in values if v is not None]
  if not known:
    return None
  return {f"p{q}": float(np.percentile(known, q)) for q in (50, 95, 99)}


def speedup(base, other) -> float | None:
  """Ratio of pooled throughputs: both are lists of (tokens, seconds), one a request, in the same order."""
  if not base or not other:
    return None
  base, other = np.sum(base, axis=0), np.sum(other, axis=0)
  if not (base[0] and other[0] and base[1] and other[1]):
    return None
  return float(other[0] / other[1] / (base[0] / base[1]))


def speedup_interval(base, other) -> list[float] | None:
  """95% interval of `speedup` by a bootstrap over requests, paired; None below 8 requests."""
  if len(base) < _LEAST_FOR_INTERVAL or len(base) != len(other):
    return None
  base, other = np.asarray(base, float), np.asarray(other, float)
  pick = np.random.default_rng(0).integers(len(base), size=(_RESAMPLES, len(base)))
  pooled_base, pooled_other = base[pick].sum(1), other[pick].sum(1)
  ratio = pooled_other[:, 0] / pooled_other[:, 1] / (pooled_base[:, 0] / pooled_base[:, 1])
  return [float(x) for x in np.percentile(ratio, [2.5, 97.5])]


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
