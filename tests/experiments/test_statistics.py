"""Percentiles, pooled speedups and their intervals, repeated spans: hand examples, a slow reference, coverage."""
import random

import numpy as np
import pytest

from experiments.harness import statistics


def test_percentiles_of_nothing_are_none():
  assert statistics.percentiles([]) is None
  assert statistics.percentiles([None, None]) is None


def test_percentiles_leave_none_out():
  assert statistics.percentiles([None, 3.0, None]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
  found = statistics.percentiles([*range(101), None])
  assert found == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
  assert all(type(value) is float for value in found.values())


def test_zero_is_a_value():
  assert statistics.percentiles([0, None, 2])["p50"] == 1.0


def test_speedup_is_pooled():
  # Two requests: one short at a ratio of 4, one long at 1. The mean of ratios is 2.5, the pooled one near 1.
  base, other = [(10, 4.0), (1000, 100.0)], [(10, 1.0), (1000, 100.0)]
  assert statistics.speedup(base, other) == pytest.approx(104 / 101)


def test_an_interval_of_few_requests():
  """By hand: logarithms of two equal and one doubled rate; none where there are fewer than three, or no time."""
  base, other = [(10, 1.0)] * 3, [(10, 1.0), (10, 1.0), (10, 0.5)]
  low, high = statistics.speedup_interval(base, other)
  parts = np.array([1 / 3 - 0.4, 1 / 3 - 0.4, 1 / 3 - 0.2])
  half = 4.302652729911275 * np.sqrt(1.5 * np.sum(parts ** 2))
  assert (low, high) == pytest.approx((1.2 * np.exp(-half), 1.2 * np.exp(half)))
  assert statistics.speedup_interval(base, base) == pytest.approx([1, 1])
  assert statistics.speedup_interval(base[:2], other[:2]) is None
  assert statistics.speedup_interval([(10, 0.0)] * 3, other) is None


def test_speedup_compares_rates_not_times():
  assert statistics.speedup([(10, 1.0)], [(20, 1.0)]) == pytest.approx(2)
  assert statistics.speedup([(10, 1.0)], [(10, 2.0)]) == pytest.approx(0.5)


@pytest.mark.parametrize("base, other", [([], []), ([(1, 1.0)], []), ([], [(1, 1.0)]), ([(0, 1.0)], [(1, 1.0)]),
                                         ([(1, 0.0)], [(1, 1.0)]), ([(1, 1.0)], [(0, 1.0)]), ([(1, 1.0)], [(1, 0.0)])])
def test_speedup_without_tokens_or_time_is_none(base, other):
  assert statistics.speedup(base, other) is None


def test_no_interval_below_three_requests_and_of_differences_below_eight():
  pairs = [(10, 1.0)] * 8
  for count in range(9):
    found = statistics.speedup_interval(pairs[:count], pairs[:count])
    assert found is None if count < 3 else found == pytest.approx([1, 1])
    assert (statistics.difference_interval([1] * count, [1] * count) is None) == (count < 8)


def test_no_interval_for_lists_that_do_not_pair():
  assert statistics.speedup_interval([(10, 1.0)] * 9, [(10, 1.0)] * 8) is None


def test_interval_is_paired():
  # Every request gains exactly 1.5, whatever its length: resampling both arms apart would give a wide interval.
  rng = np.random.default_rng(1)
  seconds = rng.lognormal(sigma=1.5, size=12)
  base, other = [(100, s) for s in seconds], [(100, s / 1.5) for s in seconds]
  assert statistics.speedup_interval(base, other) == pytest.approx([1.5, 1.5])


def _arms(rng, requests, ratio, noise):
  length = rng.integers(20, 200, requests)
  rate = 40 * rng.lognormal(sigma=0.3, size=requests)
  base = length / rate * rng.lognormal(sigma=noise, size=requests)
  other = length / rate / ratio * rng.lognormal(sigma=noise, size=requests)
  return list(zip(length, base)), list(zip(length, other))


def test_interval_covers_the_true_ratio_as_often_as_it_says():
  rng = np.random.default_rng(0)
  inside = 0
  for _ in range(120):
    low, high = statistics.speedup_interval(*_arms(rng, 30, 1.7, 0.2))
    inside += low <= 1.7 <= high
  assert 0.86 <= inside / 120 < 1  # 95%, a little less for a bootstrap of 30, with three standard errors


def test_interval_holds_the_measured_speedup_and_is_reproducible():
  base, other = _arms(np.random.default_rng(3), 20, 1.2, 0.2)
  low, high = statistics.speedup_interval(base, other)
  assert low < statistics.speedup(base, other) < high
  assert statistics.speedup_interval(base, other) == [low, high]


def _slowly(tokens):
  """Repeated tokens by definition: those inside three or more equal blocks in a row."""
  inside = set()
  for begin in range(len(tokens)):
    for period in range(1, (len(tokens) - begin) // 3 + 1):
      block = tokens[begin:begin + period]
      if tokens[begin + period:begin + 2 * period] == block == tokens[begin + 2 * period:begin + 3 * period]:
        inside.update(range(begin, begin + 3 * period))
  return len(inside)


@pytest.mark.parametrize("text, expected", [
    ("", 0), ("a", 0), ("aa", 0), ("aaa", 3), ("aaaa", 4), ("abababab", 8), ("ababab", 6), ("abababa", 7),
    ("abcabc", 0), ("abcabcab", 0), ("abcabcabc", 9), ("xyaaaz", 3), ("aaabbb", 6), ("aaab", 3), ("baaa", 3),
    ("xabababy", 6), ("aaaxbcbcbcyzzz", 12), ("abcdefgh", 0), ("aabaabaab", 9), ("aabb", 0)])
def test_repeated_tokens_on_hand_examples(text, expected):
  tokens = list(map(ord, text))
  assert _slowly(tokens) == expected
  assert statistics.repeated_tokens(tokens) == expected


def test_repeated_tokens_agree_with_the_definition():
  rng = random.Random(0)
  for _ in range(1500):
    tokens = [rng.randrange(rng.choice([1, 2, 2, 3, 5])) for _ in range(rng.randrange(40))]
    if rng.random() < 0.5:  # plant a repetition, whole or cut
      block = [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
      tokens[rng.randrange(len(tokens) + 1):0] = (block * 4)[:rng.randrange(len(block), 4 * len(block) + 1)]
    assert statistics.repeated_tokens(tokens) == _slowly(tokens), tokens


@pytest.mark.parametrize("period", [20, 64, 65, 100])
def test_long_spans_count_too(period):
  """A paragraph said three times is a repetition, whatever its length."""
  tokens = random.Random(period).sample(range(1000), period)
  assert statistics.repeated_tokens(tokens * 2) == 0
  assert statistics.repeated_tokens(tokens * 3) == 3 * period
