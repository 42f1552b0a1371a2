"""What a run counts: one step by hand, invariants over random steps, pooled ratios and what is undefined."""
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import counters as counters_lib

ROWS, DEPTH, WIDTHS = 5, 3, 3
count_step = jax.jit(counters_lib.count_step)


def step(counters, *, active, drafted, reach, accepted, emitted, strayed=0.0, width_index=1):
  arrays = dict(drafted=drafted, reach=reach, accepted=accepted, emitted=emitted)
  strayed = jnp.broadcast_to(jnp.asarray(strayed, jnp.float32), (len(active),))
  return count_step(counters, active=jnp.asarray(active, bool), strayed=strayed,
                    width_index=jnp.int32(width_index),
                    **{name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()})


def totals(counters):
  return {name: np.asarray(x).sum(0).tolist() for name, x in vars(counters).items() if x is not None}


def test_one_step_by_hand():
  zero = counters_lib.zero_counters(ROWS, DEPTH, WIDTHS)
  # Rows: all accepted; first rejected; cut on a draft (2 emitted of 3 accepted); nothing drafted; not running.
  out = step(zero, active=[1, 1, 1, 1, 0], drafted=[3, 2, 3, 0, 3], reach=[3, 2, 3, 0, 3], accepted=[3, 0, 3, 0, 3],
             emitted=[4, 1, 2, 1, 4])
  assert out.steps.tolist() == [1, 1, 1, 1, 0]
  assert out.output_tokens.tolist() == [4, 1, 2, 1, 0]
  assert out.drafted_tokens.tolist() == [3, 2, 3, 0, 0]
  assert out.accepted_tokens.tolist() == [3, 0, 2, 0, 0]
  assert out.drafted_per_position.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
  assert out.trials_per_position.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
  assert out.accepted_per_position.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
  assert out.steps_per_width.tolist() == [[0, 1, 0]] * 4 + [[0, 0, 0]]
  assert all(x.dtype == jnp.int32 for x in jax.tree.leaves(out.replace(strayed=())))


def test_invariants_over_random_steps():
  rng = np.random.default_rng(0)
  counters = counters_lib.zero_counters(ROWS, DEPTH, WIDTHS)
  cut_on_a_draft = np.zeros(ROWS, int)
  for _ in range(200):
    active = rng.uniform(size=ROWS) < 0.8
    drafted = rng.integers(0, DEPTH + 1, ROWS)
    accepted = np.minimum(rng.integers(0, DEPTH + 1, ROWS), drafted)
    emitted = np.maximum(1, accepted + 1 - (rng.uniform(size=ROWS) < 0.2) * rng.integers(0, 3, ROWS))
    cut_on_a_draft += active & (emitted <= accepted)
    counters = step(counters, active=active, drafted=drafted, reach=drafted, accepted=accepted, emitted=emitted,
                    width_index=rng.integers(WIDTHS))
  c = jax.tree.map(np.asarray, counters)
  assert (0 <= c.accepted_tokens).all() and (c.accepted_tokens <= c.drafted_tokens).all()
  assert (c.output_tokens == c.accepted_tokens + c.steps - cut_on_a_draft).all() and cut_on_a_draft.all()
  assert (np.diff(c.accepted_per_position, axis=1) <= 0).all()
  assert (np.diff(c.drafted_per_position, axis=1) <= 0).all()
  assert (c.accepted_per_position.sum(1) == c.accepted_tokens).all()
  assert (c.drafted_per_position.sum(1) == c.drafted_tokens).all()
  assert (c.accepted_per_position <= c.trials_per_position).all()
  assert (c.trials_per_position <= c.drafted_per_position).all()
  assert (c.trials_per_position[:, 1:] <= c.accepted_per_position[:, :-1]).all()
  assert (c.steps_per_width.sum(1) == c.steps).all()
  ratios = counters_lib.ratios(totals(counters))
  assert 1 <= ratios["tokens_per_step"] <= DEPTH + 1 and 0 <= ratios["acceptance_rate"] <= 1
  json.dumps(ratios, allow_nan=False)


def test_ratios_by_hand():
  ratios = counters_lib.ratios(dict(
      steps=10, output_tokens=22, drafted_tokens=24, accepted_tokens=12, drafted_per_position=[8, 8, 8],
      trials_per_position=[8, 6, 4], accepted_per_position=[6, 4, 2], steps_per_width=[2, 8, 0], strayed=1.1))
  assert ratios == {"tokens_per_step": 2.2, "acceptance_rate": 0.5, "accepted_per_position": [0.75, 0.5, 0.25],
                    "conditional_per_position": [0.75, 4 / 6, 0.5], "total_variation_bound": 0.05}


def test_ratios_are_pooled_and_not_averaged():
  """Engine bug P4: a mean of ratios. Seven short requests that accept all and a long one that accepts little."""
  counters = counters_lib.zero_counters(8, DEPTH, WIDTHS)
  counters = step(counters, active=[1] * 8, drafted=[3] * 8, reach=[3] * 8, accepted=[3] * 7 + [0],
                  emitted=[4] * 7 + [1])
  for _ in range(19):
    counters = step(counters, active=[0] * 7 + [1], drafted=[3] * 8, reach=[3] * 8, accepted=[0] * 8, emitted=[1] * 8)
  ratios = counters_lib.ratios(totals(counters))
  assert ratios["acceptance_rate"] == 21 / (3 * 27) and ratios["tokens_per_step"] == (28 + 20) / 27


def test_a_ratio_without_a_denominator_is_null():
  """Engine bugs P1 and P2: nan% in logs. Nothing drafted, no steps, or a proposer that never drafts."""
  plain = step(counters_lib.zero_counters(2, 0, 1), active=[1, 1], drafted=[0, 0], reach=[0, 0], accepted=[0, 0],
               emitted=[1, 1], width_index=0)
  ratios = counters_lib.ratios(totals(plain))
  assert ratios == {"tokens_per_step": 1.0, "acceptance_rate": None, "accepted_per_position": None,
                    "conditional_per_position": None, "total_variation_bound": 0.0}
  assert json.loads(json.dumps(ratios, allow_nan=False)) == ratios
  nothing = counters_lib.ratios(totals(counters_lib.zero_counters(2, DEPTH, WIDTHS)))
  assert set(nothing.values()) == {None}
  idle = step(counters_lib.zero_counters(2, DEPTH, WIDTHS), active=[1, 1], drafted=[0, 0], reach=[0, 0],
              accepted=[0, 0], emitted=[1, 1], width_index=0)
  assert counters_lib.ratios(totals(idle))["acceptance_rate"] is None


def test_positions_that_no_draft_reached_are_null_or_zero_but_never_nan():
  short = step(counters_lib.zero_counters(1, DEPTH, WIDTHS), active=[1], drafted=[1], reach=[1], accepted=[1],
               emitted=[2])
  ratios = counters_lib.ratios(totals(short))
  assert ratios["accepted_per_position"] == [1.0, 0.0, 0.0]
  assert ratios["conditional_per_position"] == [1.0, None, None]
  json.dumps(ratios, allow_nan=False)


@pytest.mark.parametrize("emitted,trials", [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (4, [1, 1, 1])])
def test_drafts_behind_a_cut_are_no_trials(emitted, trials):
  """A draft that a stop cut off was neither accepted nor rejected."""
  out = step(counters_lib.zero_counters(1, DEPTH, WIDTHS), active=[1], drafted=[3], reach=[3], accepted=[3],
             emitted=[emitted])
  assert out.trials_per_position.tolist() == [trials]
  assert out.accepted_tokens.tolist() == [min(3, emitted)]


def test_what_a_lossy_rule_strays_is_summed_over_running_rows():
  counters = counters_lib.zero_counters(2, DEPTH, WIDTHS)
  for running in ([1, 1], [1, 0]):
    counters = step(counters, active=running, drafted=[3, 3], reach=[3, 3], accepted=[1, 1], emitted=[2, 2],
                    strayed=[0.25, 0.5])
  assert counters.strayed.tolist() == [0.5, 0.5]
  assert counters_lib.ratios(totals(counters))["total_variation_bound"] == 1.0 / 6
