"""Arrival processes: their laws, and that a seed gives the same times again."""
import itertools

import numpy as np
import pytest

from specjax.serving import arrivals


def first(process, count):
  return np.array(list(itertools.islice(process.times(), count)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_mean_and_the_variance_of_the_gamma_law(burstiness):
  """With 20000 intervals the mean is within 4 standard errors; of the variance a tenth is far outside of its noise."""
  count, rate = 20000, 5.0
  intervals = np.diff(first(arrivals.Gamma(rate=rate, burstiness=burstiness, seed=3), count), prepend=0.0)
  assert (intervals >= 0).all()
  assert abs(intervals.mean() * rate - 1) < 4 / np.sqrt(burstiness * count)
  assert intervals.var() * rate ** 2 * burstiness == pytest.approx(1, rel=0.1)


def test_a_poisson_process_counts_as_one():
  """Its counts in windows vary as much as their mean, those of a bursty process more, those of an even one less."""
  def dispersion(process):
    times = first(process, 20000)
    counts = np.bincount((times / 5).astype(int))[:-1]
    return counts.var() / counts.mean()
  assert dispersion(arrivals.poisson(2.0, seed=1)) == pytest.approx(1, abs=0.15)
  assert dispersion(arrivals.Gamma(2.0, burstiness=0.25, seed=1)) > 2
  assert dispersion(arrivals.Gamma(2.0, burstiness=8, seed=1)) < 0.5


def test_a_seed_gives_the_same_times_and_another_one_others():
  process = arrivals.poisson(3.0, seed=7)
  np.testing.assert_array_equal(first(process, 700), first(process, 700))  # more than are drawn together
  np.testing.assert_array_equal(first(process, 10), first(arrivals.Gamma(3.0, 1.0, 7), 10))
  assert (first(process, 10) != first(arrivals.poisson(3.0, seed=8), 10)).all()


def test_infinite_burstiness_is_a_beat():
  np.testing.assert_allclose(first(arrivals.Gamma(4.0, burstiness=float("inf")), 4), [0.25, 0.5, 0.75, 1.0])


def test_bursts_and_at_once_and_closed():
  assert first(arrivals.Bursts(size=3, period=2.0), 7).tolist() == [0, 0, 0, 2, 2, 2, 4]
  assert first(arrivals.AtOnce(), 5).tolist() == [0] * 5 and arrivals.AtOnce().concurrency is None
  closed = arrivals.Closed(concurrency=2)
  assert first(closed, 5).tolist() == [0] * 5 and closed.concurrency == 2
  assert first(arrivals.Recorded((0.0, 0.5, 0.5)), 9).tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("make, named", [
    (lambda: arrivals.poisson(0.0), "rate=0.0"),
    (lambda: arrivals.poisson(float("inf")), "AtOnce"),
    (lambda: arrivals.poisson(float("nan")), "rate=nan"),
    (lambda: arrivals.Gamma(1.0, burstiness=0.0), "burstiness=0.0"),
    (lambda: arrivals.Bursts(size=0, period=1.0), "size=0"),
    (lambda: arrivals.Bursts(size=2, period=0.0), "period=0.0"),
    (lambda: arrivals.Closed(concurrency=0), "concurrency=0"),
    (lambda: arrivals.Closed(concurrency=1.5), "concurrency=1.5"),
    (lambda: arrivals.Recorded((1.0, 0.5)), "never decrease"),
    (lambda: arrivals.Recorded((-1.0,)), "never decrease"),
])
def test_what_is_no_process_is_refused(make, named):
  with pytest.raises(ValueError, match=named):
    make()
