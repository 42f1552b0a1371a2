"""Proposers that draft in Python between the halves of a step: the text, counters and errors of the device driver."""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import draft_laws
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import base
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=4, max_context=300)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [0] * 7, [0, 1, 2, 3, 3, 2, 1, 0, 1, 2]]
PARAMS = SamplingParams(temperature=[0.0, 0.8, 1.3], top_p=0.95, seed=[5, 6, 7])
NUM_TOKENS = 6


def lookup(text, most):
  """What followed the latest earlier occurrence of the last three tokens, or two: a plain loop."""
  for size in (3, 2):
    for end in range(len(text) - 1, size - 1, -1):
      if text[end - size:end] == text[len(text) - size:]:
        return text[end:end + most]
  return []


@struct.dataclass
class HostLookup(base.Stateless):
  """Prompt lookup in Python; its state counts what it was told, and how often it drafted."""
  num_tokens: int = struct.field(pytree_node=False, default=NUM_TOKENS)
  host = True

  def init(self, target, batch, capacity):
    return {"seen": jnp.zeros((batch,), jnp.int32), "drafts": jnp.zeros((batch,), jnp.int32)}

  def propose(self, target, cache, state, context, keys):
    draft, count = np.zeros((len(context.length), self.num_tokens), np.int32), np.zeros(len(context.length), np.int32)
    for row in range(len(count)):
      if context.active[row]:
        found = lookup(context.tokens[row, :int(context.length[row])].tolist(),
                       min(self.num_tokens, int(context.budget[row]) - 1))
        draft[row, :len(found)], count[row] = found, len(found)
    tree = tree_lib.chain(context.pending, jnp.asarray(draft), jnp.asarray(count))
    return tree, {**state, "drafts": state["drafts"] + (count > 0)}

  def observe(self, target, state, committed):
    return {**state, "seen": state["seen"] + committed.count}

  def remember(self, state, outputs):
    return np.asarray(state["drafts"]).tolist(), outputs


ON_DEVICE = proposers.NGram(max_ngram=3, min_ngram=2, num_tokens=NUM_TOKENS)


def run(proposer, rows=(0, 1, 2), driver=drivers.generate, **kwargs):
  params = SamplingParams(**{name: [getattr(PARAMS, name)[row] for row in rows] for name in ("temperature", "seed")},
                          top_p=PARAMS.top_p)
  return driver(TARGET, proposer, [PROMPTS[row] for row in rows], params, **{"max_new_tokens": 60, **kwargs})


@pytest.mark.parametrize("rows,logprobs", [((1,), 2), ((0, 1, 2), None)], ids=str)
def test_the_host_driver_is_the_device_driver(rows, logprobs):
  """Texts, flags, counters and log-probabilities, for a drafter that exists on both sides; each says where it ran."""
  host, device = (run(proposer, rows, logprobs=logprobs, eos_ids=()) for proposer in (HostLookup(), ON_DEVICE))
  assert (host.driver, device.driver) == ("host", "device")
  assert host.finish_reasons == device.finish_reasons
  for a, b in zip(*(jax.tree.leaves((r.tokens, r.lengths, r.drafted, r.counters, r.logprobs)) for r in (host, device))):
    np.testing.assert_array_equal(a, b)
  assert 0 < host.counters.accepted_tokens.sum() < host.counters.drafted_tokens.sum()


def test_the_text_is_plain():
  np.testing.assert_array_equal(run(HostLookup()).tokens, run(proposers.Plain()).tokens)


def test_time_spent_in_drafting_is_told_apart():
  host, device = run(HostLookup()), run(ON_DEVICE)
  assert 0 < host.timings.draft_seconds < host.timings.total
  assert device.timings.draft_seconds == 0.0
  np.testing.assert_array_equal(host.timings.first_tokens, device.timings.first_tokens)


def test_stream_is_generate():
  whole = run(HostLookup(), max_new_tokens=[60, 9, 23], stop_sequences=[[3, 3, 3]])
  ids, reasons, steps = [[], [], []], [None] * 3, 0
  for delta in run(HostLookup(), driver=drivers.stream, max_new_tokens=[60, 9, 23], stop_sequences=[[3, 3, 3]]):
    ids[delta.row] += delta.token_ids
    reasons[delta.row] = delta.finish_reason
    steps += 1
  assert ids == whole.token_ids and tuple(reasons) == whole.finish_reasons
  assert steps == whole.counters.steps.sum()


def test_rows_cross_buckets_and_fill_the_context():
  prompts = [[1, 2, 3] * 83, [2, 1] * 100, [3]]
  results = [drivers.generate(TARGET, proposer, prompts, PARAMS, max_new_tokens=[51, 100, 299]) for proposer in
             (HostLookup(), proposers.Plain())]
  np.testing.assert_array_equal(results[0].tokens, results[1].tokens)
  assert results[0].lengths.tolist() == [51, 100, 299] and results[0].drafted.any()


def test_the_last_state_is_given_back():
  """What a proposer learnt stands in the result, for its `remember`, whatever the driver; prompts are observed, too."""
  result = run(HostLookup())
  assert result.proposer_state["seen"].tolist() == [
      len(prompt) - 1 + int(length) for prompt, length in zip(PROMPTS, result.lengths)]
  drafts, outputs = HostLookup().remember(result.proposer_state, result.token_ids)
  assert outputs == result.token_ids and all(0 < n for n in drafts)
  assert run(ON_DEVICE).proposer_state == ()


def test_a_warm_start_compiles_nothing():
  drivers.warm_up(TARGET, HostLookup(), PROMPTS, PARAMS, max_new_tokens=260)
  programs = drivers.compiled_programs()
  result = drivers.generate(TARGET, HostLookup(), PROMPTS, PARAMS, max_new_tokens=260)
  assert result.lengths.tolist() == [260] * 3 and drivers.compiled_programs() == programs


def test_the_host_is_left_between_the_halves_only():
  """The device part is one program without a way back to the host."""
  state = drivers.start(TARGET, HostLookup(), PROMPTS, PARAMS, max_new_tokens=60)
  tree, _ = decode.draft(TARGET, HostLookup(), state)
  text = drivers.conclude.lower(TARGET, HostLookup(), state, tree, verifier=verifiers.Point()).compile().as_text()
  assert "callback" not in text and "outfeed" not in text and "infeed" not in text


# --- sampled drafts -------------------------------------------------------------------------------------------------


@struct.dataclass
class HostSampler(HostLookup):
  """Draws one token from a law of its own with NumPy, and says so; `lie` is added to what it says of id 0."""
  lie: float = struct.field(pytree_node=False, default=0.0)
  samples = True

  def propose(self, target, cache, state, context, keys):
    rows = len(context.length)
    law = np.array([0.4, 0.3, 0.2, 0.1])
    draw = np.random.default_rng(int(context.length.sum()))
    drawn = np.stack([draw.choice(4, self.num_tokens, p=law) for _ in range(rows)]).astype(np.int32)
    count = np.where(context.active, np.clip(np.asarray(context.budget) - 1, 0, self.num_tokens), 0).astype(np.int32)
    q = np.broadcast_to(law + self.lie * np.eye(4)[0], (rows, self.num_tokens, 4)).astype(np.float32)
    return tree_lib.chain(context.pending, jnp.asarray(drawn), jnp.asarray(count),
                          draft_laws.DenseLaw(jnp.asarray(q))), state


def test_sampled_drafts_of_the_host_are_verified_with_their_law():
  result = run(HostSampler(num_tokens=2), verifier=verifiers.Rejection())
  assert (0 < result.counters.accepted_tokens).all()
  assert (result.counters.accepted_tokens < result.counters.drafted_tokens).all()
  greedy, *sampled = (result.tokens == run(proposers.Plain()).tokens).all(1)
  assert greedy and not any(sampled)  # seeds make the same draws for points only


def test_a_warm_up_refuses_a_law_that_is_none():
  with pytest.raises(ValueError, match="sums to 1.5"):
    drivers.warm_up(TARGET, HostSampler(num_tokens=2, lie=0.5), PROMPTS, PARAMS, max_new_tokens=30,
                    verifier=verifiers.Rejection())


def test_point_drafts_of_the_host_are_refused_by_rules_that_need_q():
  programs = drivers.compiled_programs()
  with pytest.raises(ValueError, match="KSeq needs sampled drafts .* HostLookup makes point drafts"):
    run(HostLookup(), verifier=verifiers.KSeq())
  assert drivers.compiled_programs() == programs
