"""The draft length that counts and times ask for: against a simulation of chains cut at every length, and hand counts."""
import numpy as np
import pytest

from experiments.harness import advice_lengths
from specjax.theory import speedup


def counters(drafts, accepted, depth, limit):
  """Counters of steps that draft so many tokens and accept so many of these, cut at `limit`."""
  drafts, accepted = np.minimum(drafts, limit), np.minimum(accepted, limit)
  at_least = lambda values: [int(np.sum(values > d)) for d in range(depth)]
  # A position is judged where all before it were accepted and it was drafted.
  trials = [int(np.sum((drafts > d) & (accepted >= d))) for d in range(depth)]
  return {"counters": {"steps": len(drafts), "drafted_per_position": at_least(drafts), "trials_per_position": trials,
                       "accepted_per_position": at_least(accepted)}}


def steps(rng, count, alpha, depth, share=1.0):
  drafts = np.where(rng.random(count) < share, depth, 0)
  return drafts, np.minimum(drafts, rng.geometric(1 - alpha, count) - 1)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_a_cut_chain_is_counted_exactly(alpha):
  """Tokens and nodes of a step at every length are those of the same steps, cut."""
  drafts, accepted = steps(np.random.default_rng(1), 400, alpha, 7, share=0.6)
  counted = advice_lengths.Counted.of([counters(drafts, accepted, 7, 7)])
  for length in range(1, 8):
    cut = advice_lengths.Counted.of([counters(drafts, accepted, 7, length)])
    assert counted.tokens(length) == pytest.approx(1 + np.minimum(accepted, length).mean())
    assert counted.tokens(length) == cut.tokens(7)
    assert counted.nodes(length).tolist() == np.bincount(np.minimum(drafts, length), minlength=length + 1).tolist()


def test_longer_chains_follow_the_law_of_shorter_ones():
  rng = np.random.default_rng(2)
  short = advice_lengths.Counted.of([counters(*steps(rng, 20000, 0.7, 3), 3, 3)]).longer(8)
  long = advice_lengths.Counted.of([counters(*steps(rng, 20000, 0.7, 8), 8, 8)])
  for length in range(1, 9):
    assert short.tokens(length) == pytest.approx(long.tokens(length), rel=0.03)
  assert short.longer(5) is short


@pytest.mark.parametrize("alpha, per_node, each, wanted", [
    (0.8, 0.0, 0.1, None), (0.3, 0.0, 0.2, None), (0.5, 0.0, 0.05, None), (0.2, 0.5, 0.0, 1)])
def test_the_best_length_is_that_of_the_closed_form(alpha, per_node, each, wanted):
  """Flat passes and a fixed cost of a drafted token: Leviathan's gamma. Dear passes: the shortest chain."""
  drafts, accepted = steps(np.random.default_rng(3), 40000, alpha, 10)
  length, gain = advice_lengths.best([counters(drafts, accepted, 10, 10)], 10, lambda nodes: 1 + per_node * (nodes - 1),
                                     speedup.DraftCost(each=each), 10)
  closed = speedup.closed_best_length(alpha, each, 10)[0] if wanted is None else wanted
  assert abs(length - closed) <= (wanted is None) and gain > 1
  assert closed in (1, 2, 3, 4, 5, 6)


def test_a_lookup_pays_for_steps_that_find_nothing():
  """One step in ten drafts four tokens and has all accepted; looking costs a tenth of a plain step in all of them."""
  drafts = np.where(np.arange(100) % 10 == 0, 4, 0)
  counted = advice_lengths.Counted.of([counters(drafts, drafts, 4, 4)])
  found = advice_lengths.speedups(counted, [4], lambda nodes: 10.0 if nodes == 1 else 16.0,
                                  speedup.DraftCost(fixed=1.0))
  assert found[4] == pytest.approx(1.4 * 10 / (0.9 * 10 + 0.1 * 16 + 1))


def test_nothing_drafted_says_nothing():
  nothing = np.zeros(5, int)
  assert advice_lengths.best([counters(nothing, nothing, 3, 3)], 3, lambda nodes: 1.0, speedup.DraftCost(), 8) is None
