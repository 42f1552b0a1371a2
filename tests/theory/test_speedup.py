"""The cost model: golden values of papers, times between measured points, and the best length, tree and batch."""
import itertools

import numpy as np
import pytest

from specjax import static_trees
from specjax.theory import collectives
from specjax.theory import hardware
from specjax.theory import plan
from specjax.theory import public_models
from specjax.theory import speedup

SEQUOIA = (0.6, 0.2, 0.1, 0.05)


def times(widths=None):
  """T(w, B, S) = 10 + w B + S / 100 at the corners of a box."""
  points = [speedup.Point(w, b, s, 10 + w * b + s / 100)
            for w, b, s in itertools.product((1, 4, 8, 16), (1, 8), (100, 1000))]
  return speedup.StepTimes(points, widths)


@pytest.mark.parametrize("alpha, gamma, operations, gain", [
    (.6, 2, 1.53, 1.96), (.7, 3, 1.58, 2.53), (.8, 2, 1.23, 2.44), (.8, 5, 1.63, 3.69), (.9, 2, 1.11, 2.71),
    (.9, 10, 1.60, 6.86)])
def test_table_1_of_leviathan(alpha, gamma, operations, gain):
  """Row 22: drafts that cost nothing."""
  assert round(speedup.closed_operations(alpha, gamma, 0), 2) == operations
  assert round(speedup.closed_speedup(alpha, gamma, 0), 2) == gain


@pytest.mark.parametrize("alpha, cost, gamma, gain", [
    (.8, .05, 8, 3.092), (.7, .05, 6, 2.353), (.9, .02, 19, 6.365), (.5, .1, 2, 1.458), (.8, .2, 4, 1.868)])
def test_best_draft_length_in_closed_form(alpha, cost, gamma, gain):
  """Row 23; with a pass that costs the same at any width the measured model says the same."""
  found = speedup.closed_best_length(alpha, cost)
  assert found[0] == gamma and found[1] == pytest.approx(gain, abs=5e-4)
  flat = speedup.StepTimes([speedup.Point(1, 1, 1, 1.0), speedup.Point(64, 1, 1, 1.0)])
  tokens = lambda n: sum(alpha ** i for i in range(n + 1))
  best = speedup.best_length(tokens, 40, flat, speedup.DraftCost(each=cost))
  assert best.length == gamma and best.speedup == pytest.approx(gain, abs=5e-4)


@pytest.mark.parametrize("nodes, value", [(4, 2.176), (8, 2.7456), (16, 3.30936), (64, 4.420118)])
def test_sequoias_tree_where_passes_cost_the_same(nodes, value):
  """Row 24 out of `best_tree`: drafts free, one width; and row 25, the chain of 16 nodes beside it."""
  flat = speedup.StepTimes([speedup.Point(1, 1, 1, 1.0), speedup.Point(nodes, 1, 1, 1.0)], (1, nodes))
  best = speedup.best_tree(SEQUOIA, nodes, nodes, flat, speedup.DraftCost())
  assert best.speedup == pytest.approx(value, abs=1e-5)
  assert len(best.shape.parents) == nodes
  chain = static_trees.Shape((0, *range(15)), (0,) * 16)
  assert static_trees.expected_tokens(*chain, SEQUOIA) == pytest.approx(2.499295, abs=1e-6)


@pytest.mark.parametrize("batch, value", [(1, 3.689), (2, 2.587), (4, 1.686), (8, 1.202), (16, 1.029)])
def test_rows_in_lockstep(batch, value):
  """Row 31."""
  assert speedup.lockstep_tokens(.8, 5, batch) == pytest.approx(value, abs=5e-4)


def test_times_between_points():
  line = times()
  for width, batch, length in ((1, 1, 100), (8, 8, 1000), (6, 1, 550), (12, 1, 300), (32, 1, 100), (1, 1, 3000)):
    assert line.ms(width, batch, length) == pytest.approx(10 + width * batch + length / 100)
  assert line.ms(4, 5, 100) == pytest.approx(10 + 20 + 1)  # between batches
  assert line.ms(1, 1, 5) == line.ms(1, 1, 100)            # nothing is measured below


def test_a_pass_is_one_of_a_width_that_there_is():
  assert times((1, 4, 8, 16)).ms(5, 1, 100) == pytest.approx(10 + 8 + 1)
  with pytest.raises(ValueError, match="nodes=17.*over 16"):
    times((1, 4, 8, 16)).ms(17)


def test_noise_never_makes_a_wider_pass_cheaper():
  noisy = speedup.StepTimes([speedup.Point(w, 1, 1, ms) for w, ms in ((1, 10), (4, 14), (8, 12), (16, 20))])
  found = [noisy.ms(w) for w in range(1, 20)]
  assert found == sorted(found)
  assert (noisy.ms(4), noisy.ms(8)) == (13, 13)  # nearest in squares
  assert noisy.ms(1) == 10 and noisy.ms(16) == 20


def test_points_are_needed():
  with pytest.raises(ValueError, match="at least one"):
    speedup.StepTimes([])
  with pytest.raises(ValueError, match="more than 0"):
    speedup.StepTimes([speedup.Point(1, 1, 1, 0.0)])


def test_prefill_takes_from_the_gain():
  request = speedup.Request(10, prefill_ms=100)
  assert request.speedup(2.0, 10.0, 10.0) == pytest.approx(200 / 150)
  assert speedup.ENDLESS.speedup(2.0, 10.0, 10.0) == pytest.approx(2)
  own = speedup.Request(10, prefill_ms=100, method_prefill_ms=150)
  assert own.speedup(2.0, 10.0, 10.0) == pytest.approx(200 / 200)


def test_the_best_length_is_the_best_of_all():
  line, cost = times((1, 4, 8, 16)), speedup.DraftCost(fixed=0.5, each=0.3)
  tokens = lambda n: sum(.8 ** i for i in range(n + 1))
  best = speedup.best_length(tokens, 15, line, cost)
  gains = [speedup.predict(tokens(n), n + 1, n, line, cost) for n in range(16)]
  assert best.speedup == max(gains) and gains[best.length] == max(gains) and best.length > 0
  dear = speedup.best_length(tokens, 15, line, speedup.DraftCost(each=50.0))
  assert (dear.length, dear.speedup) == (0, pytest.approx(1))


def test_the_best_tree_is_not_the_largest_where_width_costs():
  steep = speedup.StepTimes([speedup.Point(w, 1, 1, 10 + 2 * w) for w in (1, 4, 8, 16, 64)], (1, 4, 8, 16, 64))
  best = speedup.best_tree(SEQUOIA, 64, 6, steep, speedup.DraftCost(each=0.1))
  assert 1 < len(best.shape.parents) < 64
  costs = {w: 10 + 2 * w for w in (1, 4, 8, 16, 64)}
  wanted = static_trees.sequoia(SEQUOIA, 64, 6, 0.1, costs)
  assert best.speedup == pytest.approx(12 / static_trees.cost_per_token(wanted, SEQUOIA, 0.1, costs))
  assert speedup.best_tree((0.01,), 64, 6, steep, speedup.DraftCost(each=5.0)).shape is None


def test_break_even_batch():
  """T = 10 + wB: six tokens for four nodes win as long as (10 + 4B) / 2 < 10 + B, that is below B = 5."""
  line = speedup.StepTimes([speedup.Point(w, b, 1, 10.0 + w * b) for w in (1, 4) for b in (1, 64)])
  found = speedup.break_even_batch(2.0, 4, 3, line, speedup.DraftCost())
  assert found == 5
  wins = lambda rows: speedup.predict(2.0, 4, 3, line, speedup.DraftCost(), batch=rows) > 1
  assert wins(found - 1) and not wins(found)
  assert speedup.break_even_batch(8.0, 4, 3, line, speedup.DraftCost()) is None
  assert speedup.break_even_batch(1.0, 4, 3, line, speedup.DraftCost()) == 1


def test_the_ceiling_is_above_every_acceptance():
  line, cost = times(), speedup.DraftCost(each=1.0)
  top = speedup.ceiling(8, line, cost)
  for alpha in np.linspace(0, 1, 11):
    tokens = lambda n, alpha=alpha: sum(alpha ** i for i in range(n + 1))
    assert speedup.best_length(tokens, 8, line, cost).speedup <= top + 1e-12
  assert speedup.ceiling(8, line, speedup.DraftCost(each=1e3)) == pytest.approx(1)


def test_tokens_needed():
  line = times()
  needed = speedup.tokens_needed(4, 3, line, speedup.DraftCost(each=2.0))
  assert speedup.predict(needed, 4, 3, line, speedup.DraftCost(each=2.0)) == pytest.approx(1)


def test_times_on_paper_are_those_of_the_plan():
  deployment = plan.Deployment(public_models.find("llama-3.1-8b").config, hardware.find("h100"),
                               collectives.Layout(collectives.Mesh()))
  found = speedup.StepTimes.of_roofline(deployment, (1, 64), (1, 256), (1024,))
  assert found.ms(1, 1, 1024) == pytest.approx(1e3 * deployment.step(1, 1024, 1).total)
  assert found.ms(64, 256, 1024) == pytest.approx(1e3 * deployment.step(256, 1024, 64).total)
  # Nearly free at batch 1, arithmetic at 256: where drafting stops paying.
  assert found.ms(64, 1, 1024) < 1.1 * found.ms(1, 1, 1024)
  assert speedup.break_even_batch(4.5, 64, 7, found, speedup.DraftCost(), length=1024) < 256

