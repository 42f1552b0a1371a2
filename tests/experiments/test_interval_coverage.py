"""How often the 95% intervals hold the truth, on synthetic requests whose true speedup or difference is known.

Nominal 95% must be 93 to 97% from 24 requests on. With 8 there are too few to tell for any law: at
least 85%, and for truth values up to all of them, of which 8 pairs have few different sums.
2000 runs a case: the standard error of a coverage is 0.5%.
"""
import numpy as np
import pytest

from experiments.harness import statistics

RUNS = 2000
BANDS = {8: (0.85, 1.0), 24: (0.93, 0.97), 100: (0.93, 0.97)}


def coverage(intervals, truth):
  low, high = np.transpose(intervals)
  return np.mean((low <= truth) & (truth <= high))


def requests(rng, n):
  """Both arms of RUNS runs, (tokens, seconds) [RUNS, n, 2] each: most outputs are cut at 128 tokens, the time of a
  token varies a little, the gain more."""
  tokens = np.minimum(128, rng.geometric(1 / 150, (RUNS, n)) + 8)
  easy = rng.normal(size=(RUNS, n))
  base = tokens * 0.04 * np.exp(0.05 * rng.normal(size=(RUNS, n))) + 0.1
  gain = np.exp(0.3 + 0.25 * easy + 0.05 * rng.normal(size=(RUNS, n)))
  return np.stack([tokens, base], -1), np.stack([tokens, (base - 0.1) / gain + 0.1], -1)


@pytest.mark.parametrize("n", BANDS)
def test_speedup(n):
  base, other = requests(np.random.default_rng(n), n)
  rate, faster = (np.divide(*side.sum((0, 1))) for side in requests(np.random.default_rng(1), 1000))  # of 2 million
  found = coverage([statistics.speedup_interval(a, b) for a, b in zip(base, other)], faster / rate)
  assert BANDS[n][0] <= found <= BANDS[n][1]


@pytest.mark.parametrize("n", [3, 4, 6])
def test_speedup_of_few(n):
  """Student's interval of the logarithm: at least nine in ten, from three requests on."""
  base, other = requests(np.random.default_rng(n), n)
  rate, faster = (np.divide(*side.sum((0, 1))) for side in requests(np.random.default_rng(1), 1000))
  found = coverage([statistics.speedup_interval(a, b) for a, b in zip(base, other)], faster / rate)
  assert 0.90 <= found <= 0.98


def passes(rng, n):
  """Truth values: half of the requests pass, a third are decided anew in the second arm, at the same rate."""
  base, anew = rng.random((RUNS, n)) < 0.5, rng.random((RUNS, n)) < 1 / 3
  return base, np.where(anew, rng.random((RUNS, n)) < 0.5, base), 0.0


def scores(rng, n):
  """Scores of which half are the same in both arms and half differ, by 0.02 in the mean of all."""
  base, same = rng.beta(2, 4, (RUNS, n)), rng.random((RUNS, n)) < 0.5
  return base, base + np.where(same, 0, rng.normal(0.04, 0.1, (RUNS, n))), 0.02


def skewed(rng, n):
  """Differences that are rarely large and always of one sign: a gamma law of shape 1/2, whose skewness is 2.8."""
  base = rng.beta(2, 4, (RUNS, n))
  return base, base - rng.gamma(0.5, 0.06, (RUNS, n)), -0.03


def of_differences(kind, n):
  base, other, truth = kind(np.random.default_rng(n), n)
  return coverage([statistics.difference_interval(a, b) for a, b in zip(base, other)], truth)


@pytest.mark.parametrize("n", BANDS)
@pytest.mark.parametrize("kind", [passes, scores])
def test_difference(kind, n):
  assert BANDS[n][0] <= of_differences(kind, n) <= BANDS[n][1]


@pytest.mark.parametrize("n, least", [(24, 0.88), (100, 0.92)])
def test_a_very_skewed_difference_is_held_less_often(n, least):
  """What the intervals cannot do: a mean that rests on a few large values is missed when a sample has none of them."""
  assert least <= of_differences(skewed, n) < 0.95
