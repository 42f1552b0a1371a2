"""Early exit: drafts equal those of the lower layers run over the whole text anew, and verification may go on above them."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as cache_lib
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import verifiers
from specjax.sampling import SamplingParams
from specjax.testing import tiny

TARGET = tiny.decoder()
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13], [14]]
NEW = [24, 20, 17]
EXIT = 2
PROPOSER = proposers.EarlyExit(exit_layer=EXIT, num_tokens=3)
draft = jax.jit(decode.draft)


@jax.jit
def lower_logits(tokens):
  """Of the first layers, behind every token of i32[N], from an empty cache."""
  lower = TARGET.keep(tuple(range(EXIT)))
  count = tokens.shape[0]
  mask = jnp.tril(jnp.ones((1, count, count), bool))
  out = lower.forward(tokens[None], jnp.arange(count, dtype=jnp.int32)[None], mask, lower.init_cache(1, 8))
  return lower.logits(out.hidden)[0]


def behind(text):
  padded = np.zeros(64, np.int32)
  padded[:len(text)] = text
  return np.asarray(lower_logits(jnp.asarray(padded)))[len(text) - 1]


def test_the_text_is_the_plain_one_and_drafts_are_the_lower_layers():
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=NEW)
  state = drivers.start(TARGET, PROPOSER, PROMPTS, max_new_tokens=NEW)
  while np.asarray(state.active).any():
    tree, _ = draft(TARGET, PROPOSER, state)
    for row in np.flatnonzero(np.asarray(state.active)):
      path = np.asarray(tree.tokens)[row, 1:int(tree.size[row])].tolist()
      text = np.asarray(state.tokens)[row, :int(state.length[row])].tolist()
      assert len(path) == min(3, int(state.limit[row] - state.length[row]) - 1)
      for i, token in enumerate(path):
        assert token == int(np.argmax(behind(text + path[:i])))
    state = drivers.advance(TARGET, PROPOSER, state, np.int32(1), verifier=verifiers.Point())
  for row, (begin, end) in enumerate(zip(np.asarray(state.start), np.asarray(state.length))):
    assert np.asarray(state.tokens)[row, begin:end].tolist() == plain.token_ids[row]
  accepted, drafted = np.asarray(state.counters.accepted_tokens).sum(), np.asarray(state.counters.drafted_tokens).sum()
  assert 0 < accepted < drafted


@pytest.mark.parametrize("width", [1, 4])
def test_a_pass_resumed_is_the_whole_pass(width):
  """Of what the drafter computed hidden states, keys and values are taken over; nothing below is run again."""
  state = drivers.start(TARGET, PROPOSER, PROMPTS, max_new_tokens=NEW)
  tree = draft(TARGET, PROPOSER, state)[0].narrow(width)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (3, width, width))
  positions = state.length[:, None] - 1 + jnp.arange(width)
  whole = TARGET.forward(tree.tokens, positions, mask, state.cache)
  resumed = TARGET.forward(tree.tokens, positions, mask, state.cache, resume=tree.resume)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), whole, resumed)
  silenced = TARGET.replace(weights=TARGET.weights.replace(embedding=TARGET.weights.embedding * jnp.nan))
  again = silenced.forward(tree.tokens, positions, mask, state.cache, resume=tree.resume)
  assert np.isfinite(again.hidden).all()


def test_sampled_drafts_carry_the_law_of_the_lower_layers():
  proposer = PROPOSER.replace(drawing=proposers.Drawing(sampled=True))
  params = SamplingParams(temperature=0.7, top_k=5)
  result = drivers.generate(TARGET, proposer, PROMPTS, params, max_new_tokens=NEW, verifier=verifiers.Rejection())
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()
  rows = 512
  state = drivers.start(TARGET, proposer, [PROMPTS[0]] * rows, params, max_new_tokens=9)
  tree = draft(TARGET, proposer, state)[0]
  q, tokens = np.asarray(tree.q.dense(TARGET.vocab_size)), np.asarray(tree.tokens)
  law = lambda text: np.asarray(sampling.process(jnp.asarray(behind(text))[None, None], params.batch(1)))[0, 0]
  for row in range(4):
    for node in range(3):
      np.testing.assert_allclose(q[row, node], law(PROMPTS[0] + tokens[row, 1:node + 1].tolist()), atol=1e-4)
  seen = np.bincount(tokens[:, 1], minlength=24) / rows
  assert abs(seen - law(PROMPTS[0])).max() < 4 * 0.5 / np.sqrt(rows)


def test_nothing_drafted_still_resumes():
  """A rule that never drafts: the root's lower layers are the drafter's, the text stays."""
  from specjax.proposers import length
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=NEW)
  result = drivers.generate(TARGET, PROPOSER.replace(length=length.Confidence(threshold=jnp.float32(2.0))), PROMPTS,
                            max_new_tokens=NEW)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert not result.counters.drafted_tokens.any()


def test_layers_are_checked():
  with pytest.raises(ValueError, match="exit_layer=4: allowed are 1 to 3"):
    drivers.generate(TARGET, PROPOSER.replace(exit_layer=4), PROMPTS, max_new_tokens=4)
  with pytest.raises(ValueError, match="layers="):
    TARGET.keep((0, 9))


def test_resume_is_narrowed_and_widened_with_its_tree():
  block = cache_lib.InFlight(keys=(jnp.arange(12.0).reshape(1, 1, 3, 4),), values=(jnp.arange(12.0).reshape(1, 1, 4, 3),))
  resume = cache_lib.Resume(hidden=jnp.arange(8.0).reshape(1, 4, 2), in_flight=block)
  for other in (resume.narrow(2), resume.widen(6).narrow(2)):
    np.testing.assert_array_equal(other.hidden, resume.hidden[:, :2])
    np.testing.assert_array_equal(other.in_flight.keys[0], block.keys[0][..., :2])
    np.testing.assert_array_equal(other.in_flight.values[0], block.values[0][:, :, :2])
  assert resume.widen(6).hidden.shape == (1, 6, 2) and resume.widen(6).in_flight.values[0].shape == (1, 1, 6, 3)
