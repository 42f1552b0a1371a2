"""Acceptance from counters: intervals that hold what they should, and laws that find the one that made the counts."""
import numpy as np
import pytest

from specjax import static_trees
from specjax.theory import acceptance


def counts(rates, steps, seed=0):
  """Trials and accepted tokens by position of `steps` drafts that are accepted with `rates` one after the other."""
  alive = np.random.default_rng(seed).random((steps, len(rates))) < rates
  reached = np.cumprod(np.pad(alive, ((0, 0), (1, 0)), constant_values=1), axis=1)
  return reached[:, :-1].sum(0), reached[:, 1:].sum(0)


def test_wilson():
  assert acceptance.wilson(0, 0) == (0.0, 1.0)
  np.testing.assert_allclose(acceptance.wilson(8, 10), (0.4901625, 0.9433178), atol=1e-6)  # Wilson 1927, z = 1.96
  low, high = acceptance.wilson(0, 20)
  assert low == 0 and 0.1 < high < 0.2
  assert acceptance.wilson(20, 20)[1] == 1


def test_wilson_covers_the_rate():
  for rate in (0.1, 0.5, 0.95):
    drawn = np.random.default_rng(1).binomial(60, rate, size=4000)
    inside = [low <= rate <= high for low, high in (acceptance.wilson(each, 60) for each in drawn)]
    assert 0.93 < np.mean(inside) < 0.98


def test_requests_are_what_is_drawn_again():
  """Tokens of a request are accepted alike, so few requests of many tokens say less than Wilson's interval believes."""
  trials, accepted = np.full((8, 1), 500), np.array([[50], [450], [60], [440], [55], [445], [65], [435]])
  low, high = acceptance.bootstrap(trials, accepted)
  narrow = acceptance.wilson(accepted.sum(), trials.sum())
  assert low[0] < narrow[0] - 0.1 and high[0] > narrow[1] + 0.1
  np.testing.assert_array_equal(acceptance.bootstrap([[4, 0]], [[2, 0]]), ([0.5, 0.0], [0.5, 1.0]))


def test_the_geometric_law_is_the_pooled_rate():
  trials, accepted = counts([0.7] * 6, 4000)
  law = acceptance.fit(trials, accepted, "geometric")
  assert law.rates[0] == accepted.sum() / trials.sum() == pytest.approx(0.7, abs=0.02)
  assert law.tokens(3) == pytest.approx(1 + sum(law.rates[0] ** i for i in (1, 2, 3)))
  assert acceptance.best(trials, accepted).kind == "geometric"


def test_unlike_contexts_make_acceptance_rise_with_the_position():
  rng = np.random.default_rng(0)
  trials, accepted = np.zeros(8, int), np.zeros(8, int)
  for alpha in rng.beta(1.5, 1.0, size=6000):
    tried, right = counts([alpha] * 8, 1, seed=rng)
    trials, accepted = trials + tried, accepted + right
  law = acceptance.best(trials, accepted)
  assert law.kind == "beta_geometric"
  assert law.beta == (pytest.approx(1.5, rel=0.1), pytest.approx(1.0, rel=0.1))
  wanted = [(1.5 + d) / (2.5 + d) for d in range(12)]
  np.testing.assert_allclose(law.conditional(12), wanted, atol=0.02)
  geometric = acceptance.fit(trials, accepted, "geometric")
  assert law.tokens(16) > geometric.tokens(16)  # what one rate for all gets wrong


def test_free_rates_keep_each_position_and_pool_what_is_rare():
  law = acceptance.fit([100, 90, 5, 3], [90, 9, 4, 2], "free")
  np.testing.assert_allclose(law.conditional(5), [0.9, 0.1, 6 / 8, 6 / 8, 6 / 8])
  trials, accepted = counts([0.95, 0.3, 0.3, 0.9], 3000)
  assert acceptance.best(trials, accepted).kind == "free"


def test_everything_and_nothing_accepted():
  for kind in acceptance.KINDS:
    assert acceptance.fit([50, 50], [50, 50], kind).tokens(2) == pytest.approx(3, abs=1e-2)
    assert acceptance.fit([50, 0], [0, 0], kind).tokens(2) == pytest.approx(1, abs=1e-2)


def test_no_law_of_nothing():
  with pytest.raises(ValueError, match="nothing was drafted"):
    acceptance.fit([0, 0], [0, 0], "free")
  with pytest.raises(ValueError, match="no more are accepted"):
    acceptance.fit([2], [3], "free")
  with pytest.raises(ValueError, match="kind='linear'.*free, geometric"):
    acceptance.fit([2], [1], "linear")


def test_trees_from_ranks():
  law = acceptance.Law("geometric", rates=(0.6,))
  table = law.table(4, (0.6, 0.2, 0.1, 0.05))
  shape = static_trees.best_first(table, 16, 15)
  assert acceptance.tree_tokens(shape, table) == pytest.approx(
      static_trees.expected_tokens(*shape, (0.6, 0.2, 0.1, 0.05)))
  assert law.table(1, (0.6, 0.6)).sum() <= 1


def test_the_upper_end_is_above_what_was_seen():
  trials, accepted = np.array([40, 10, 2]), np.array([10, 2, 0])
  seen = acceptance.fit(trials, accepted, "free").tokens(6)
  assert acceptance.upper_tokens(trials, accepted, 6) > seen + 0.1
  assert acceptance.upper_tokens([0], [0], 4) == 5  # nothing is known
  many = acceptance.upper_tokens(trials * 1000, accepted * 1000, 6)
  assert seen <= many < seen + 0.05
