"""Synthetic acceptance: what is measured is the law that was given, whatever the tokens; and all of it says so."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import rules
from specjax import counters as counters_lib
from specjax import decode
from specjax import drivers
from specjax import keys
from specjax import proposers
from specjax import SamplingParams
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import synthetic
from specjax.testing import DummyTarget
from specjax.theory import closed_forms
from specjax.verifiers import synthetic as rule

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = DummyTarget(vocab=32)
ROWS, STEPS = 256, 24
SAME, FALLING = (0.7, 0.7, 0.7), (0.9, 0.6, 0.3)


@functools.cache
def run(proposer, temperature=0.0, target=TARGET):
  """The state behind `STEPS` steps, none of which meets the end of a budget; one program."""
  params = SamplingParams(temperature=temperature)
  state = drivers.start(target, proposer, [[1 + row % 7, 2, 3] for row in range(ROWS)], params, max_new_tokens=200,
                        verifier=proposer.verifier, key=jax.random.key(5))
  return jax.device_get(drivers.advance(target, proposer, state, np.int32(STEPS), verifier=proposer.verifier).replace(
      keys=None))


def pooled(state):
  return {name: np.asarray(value).sum(0) for name, value in vars(state.counters).items() if value is not None}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("law", [FALLING, SAME])
def test_acceptance_is_the_law(law, temperature):
  totals = pooled(run(synthetic.Synthetic(acceptance=law), temperature))
  trials, accepted = totals["trials_per_position"], totals["accepted_per_position"]
  assert totals["steps"] == trials[0] == ROWS * STEPS > 6000
  assert (trials[1:] == accepted[:-1]).all()
  for wanted, tried, passed in zip(law, trials, accepted, strict=True):
    assert abs(passed / tried - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / tried)
  # Tokens of a step: 1 and the accepted ones, whose law is that of the place at which the chain ends.
  ends = np.append(1 - np.array(law), 1) * np.append(1, np.cumprod(law))
  mean = 1 + (ends * np.arange(len(ends))).sum()
  deviation = np.sqrt((ends * (1 + np.arange(len(ends)) - mean) ** 2).sum())
  measured = counters_lib.ratios(totals)
  assert abs(measured["tokens_per_step"] - mean) <= 4 * deviation / np.sqrt(ROWS * STEPS)
  stated = rule.LossySynthetic(acceptance=law).tokens_per_step
  assert stated == pytest.approx(mean, rel=1e-12)
  if law == SAME:
    assert stated == pytest.approx(1 + closed_forms.expected_accepted(law[0], len(law)), rel=1e-12)
  assert measured["total_variation_bound"] > 0.1  # the report says that the text is not the target's


def test_new_tokens_are_the_targets_and_accepted_ones_the_drafts():
  """Behind every step stands what the target would say there, and accepted tokens count up from the pending one."""
  state, rows = run(synthetic.Synthetic(acceptance=SAME)), 16
  tokens, drafted, length = (np.asarray(x)[:rows] for x in (state.tokens, state.drafted, state.length))
  width = int(length.max())
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (rows, width, width))
  out = TARGET.forward(jnp.asarray(tokens[:, :width]), positions, mask, TARGET.init_cache(rows, 8))
  best = np.asarray(jnp.argmax(TARGET.logits(out.hidden), -1))
  kinds = set()
  for row in range(rows):
    for place in range(3, length[row]):
      wanted = (tokens[row, place - 1] + 1) % 32 if drafted[row, place] else best[row, place - 1]
      assert tokens[row, place] == wanted
      kinds.add(bool(drafted[row, place]))
  assert kinds == {False, True}


def test_the_path_does_not_depend_on_tokens_and_rows_have_their_own_uniforms():
  proposer, other = synthetic.Synthetic(acceptance=SAME), DummyTarget(vocab=32, salt=np.uint32(9))
  one, two = run(proposer), run(proposer, target=other)
  assert (one.tokens[:, :4] != two.tokens[:, :4]).any()
  # A row's uniforms go by its position: with equal lengths after a step the next draw is the same.
  np.testing.assert_array_equal(one.length, two.length)
  assert len(set(one.length.tolist())) > 5


@functools.partial(jax.jit, static_argnames="verifier")
def drawn(verifier, logits, tree, params, uniforms):
  return verifier.law(jax.nn.softmax(logits), tree, 3), verifier.draw(logits, tree, params, params.mode(), uniforms, 3)


@pytest.mark.parametrize("law", [(0.75, 0.5, 0.25), (1.0, 0.0, 1.0), (1.0, 1.0, 1.0)])
def test_draws_have_the_law_that_is_stated(law):
  """The draw's stops and new tokens over a grid of u, against `law`; rows with fewer drafts included."""
  verifier, size = rule.LossySynthetic(acceptance=law), 64
  logits = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
  logits = jnp.broadcast_to(logits, (3 * size, 4, 8))
  counts = np.repeat([0, 1, 3], size)
  tree = tree_lib.chain(jnp.zeros(3 * size, jnp.int32), jnp.zeros((3 * size, 3), jnp.int32), jnp.asarray(counts))
  grid = jnp.asarray(np.tile((np.arange(size) + 0.5) / size, 3), jnp.float32)
  uniforms = keys.Uniforms(token=jnp.full((3 * size, 4), 0.5), stop=grid)
  (stop, following), verdict = drawn(verifier, logits, tree, SamplingParams(temperature=1.0).batch(3 * size), uniforms)
  np.testing.assert_allclose(following, jax.nn.softmax(logits), rtol=1e-5)
  accepted = np.asarray(verdict.accepted)
  for part, count in enumerate([0, 1, 3]):
    rows = slice(part * size, (part + 1) * size)
    reach = np.append(1, np.cumprod(law[:count]))
    np.testing.assert_allclose(stop[part * size, :count + 1], reach * (1 - np.append(law[:count], 0)), atol=1e-6)
    np.testing.assert_allclose(np.bincount(accepted[rows], minlength=4) / size, stop[part * size], atol=1e-6)
  np.testing.assert_array_equal(verdict.path, np.minimum(np.arange(4), accepted[:, None]))
  # What it may stray is what passed unseen: of every node on the path that had a child, the child's probability.
  bound = [sum(law[:min(a + 1, count)]) for a, count in zip(accepted, counts)]
  np.testing.assert_allclose(verdict.strayed, bound, rtol=1e-6)


def test_drafts_that_cost_something_read_it_and_are_the_same():
  free, paid = synthetic.Synthetic(acceptance=SAME), synthetic.with_cost(SAME, 4096)
  assert (free.draft_bytes, paid.draft_bytes) == (0, 4096)
  state = drivers.start(TARGET, free, [[1, 2, 3]], max_new_tokens=8, verifier=free.verifier)
  draft = jax.jit(decode.draft)
  wanted = np.asarray(draft(TARGET, free, state)[0].tokens)
  assert wanted.tolist() == [[3, 4, 5, 6]]
  np.testing.assert_array_equal(draft(TARGET, paid, state)[0].tokens, wanted)
  seen = np.asarray(draft(TARGET, paid.replace(read=paid.read.at[-1].set(2e30)), state)[0].tokens)
  np.testing.assert_array_equal(seen[:, 1:], wanted[:, 1:] + 1)  # the last number was read
  with pytest.raises(ValueError, match="draft_bytes=3"):
    synthetic.with_cost(SAME, 3)


def test_it_says_that_it_is_synthetic_and_stands_in_no_registry():
  verifier = synthetic.Synthetic(acceptance=(0.5,)).verifier
  assert not verifier.lossless and verifier.chain_only
  assert rules.name_of(verifier) == "LossySynthetic"
  assert rule.LossySynthetic not in verifiers.BY_NAME.values()
  assert "Synthetic" not in proposers.__all__


@pytest.mark.parametrize("make", [synthetic.Synthetic, rule.LossySynthetic])
@pytest.mark.parametrize("law, part", [((0.5, 1.5), "position 1 has 1.5"), ((-0.1,), "position 0 has -0.1"),
                                       ((0.5, float("nan")), "position 1 has nan"), ((), "1 to 63"),
                                       ((0.5,) * 64, "1 to 63"), ([0.5], "tuple")])
def test_what_is_no_law_is_refused(make, law, part):
  with pytest.raises(ValueError, match=part):
    make(acceptance=law)


def test_a_law_of_another_length_than_the_drafts_is_refused():
  with pytest.raises(ValueError, match="2 positions, and the proposer's chains have 3"):
    drivers.generate(TARGET, synthetic.Synthetic(acceptance=(0.5,) * 3), [[1, 2]], max_new_tokens=4,
                     verifier=rule.LossySynthetic(acceptance=(0.5, 0.5)))
