"""What cannot be honoured is refused by both drivers before anything is compiled, and says what to change."""
from flax import struct
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import verifiers
from specjax.constraints import Automaton
from specjax.sampling import SamplingParams

TARGET = testing.DummyTarget(vocab=10, max_context=32)
PROMPTS = [[1, 2, 3], [4]]
TREE = testing.NoisySelf(parents=(0, 0, 0, 1))
ONLY_ENDS = np.array([[1] * 9 + [-1], [-1] * 9 + [1]], np.int32)  # one id, then the end, id 9


@struct.dataclass
class WithoutLaw(testing.NoisySelf):
  """Says that its drafts were drawn, but not from what."""

  def propose(self, *args):
    tree, state = super().propose(*args)
    return tree.replace(q=None), state


@struct.dataclass
class Wide(proposers.NGram):
  """More nodes than the widest step."""
  num_tokens: int = struct.field(pytree_node=False, default=64)


def refused(message, proposer=proposers.Plain(), params=None, **kwargs):
  """Raised by both drivers, with nothing run: the count of programs says that nothing was compiled."""
  for driver in (drivers.generate, lambda *args, **kwargs: next(drivers.stream(*args, **kwargs))):
    programs = drivers.compiled_programs()
    with pytest.raises(ValueError, match=message):
      driver(TARGET, proposer, PROMPTS, params, **{"max_new_tokens": 8, **kwargs})
    assert drivers.compiled_programs() == programs


@pytest.mark.parametrize("verifier", [verifiers.Rejection(), verifiers.Block(), verifiers.LossyLenient(),
                                      verifiers.LossyCascade()], ids=lambda v: type(v).__name__)
def test_rules_for_chains_refuse_trees(verifier):
  refused(rf"{type(verifier).__name__} verifies chains only, and NoisySelf drafts trees \(4 nodes in a depth of 2\); "
          "use Point, Recursive or Traversal, or a drafter of chains", TREE, verifier=verifier)


@pytest.mark.parametrize("verifier", [v() for v in verifiers.BY_NAME.values() if v.needs_q],
                         ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("proposer", [proposers.NGram(num_tokens=2), testing.always_wrong(2)],
                         ids=lambda p: type(p).__name__)
def test_rules_for_sampled_drafts_refuse_point_drafts(verifier, proposer):
  refused(rf"{type(verifier).__name__} needs sampled drafts and the law q .* {type(proposer).__name__} makes point "
          "drafts; use Point, or a drafter that samples", proposer, verifier=verifier)


def test_every_rule_says_what_it_takes():
  """The two lists above are not empty, and plain decoding, which has nothing to judge, takes every rule."""
  kinds = [v() for v in verifiers.BY_NAME.values()]
  assert {type(v).__name__ for v in kinds if v.needs_q} == {"KSeq", "GreedyMulti", "LossyCascade"}
  assert {type(v).__name__ for v in kinds if v.chain_only} == {"Rejection", "Block", "LossyLenient", "LossyCascade"}
  for verifier in kinds:
    drivers.start(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=8, verifier=verifier)


def test_kseq_refuses_drafts_without_replacement():
  proposer = testing.NoisySelf(parents=(0, 0, 0), rule="without_replacement")
  refused("KSeq cannot verify the drafts of NoisySelf: kseq needs sampled drafts with q, siblings drawn with "
          "replacement; use recursive or traversal", proposer, verifier=verifiers.KSeq())


# Point and coupled read no q: there the first trace of a step refuses.
@pytest.mark.parametrize("verifier", [verifiers.Rejection(), verifiers.Recursive(), verifiers.KSeq()],
                         ids=lambda v: type(v).__name__)
def test_sampled_drafts_without_their_law(verifier):
  refused("WithoutLaw marks drafts as sampled but gives no q, the law that they were drawn from",
          WithoutLaw(parents=(0, 0, 1)), verifier=verifier)


def test_a_proposer_wider_than_every_step():
  refused(r"a proposer of 65 nodes \(root included\) is wider than the widest step, 64", Wide())


@pytest.mark.parametrize("name,value,message", [
    ("temperature", [0.5, -0.1], r"temperature=-0\.1\d* in row 1: it must be 0 \(greedy\) or more"),
    ("temperature", [np.nan, 1], "temperature=nan in row 0"),
    ("top_k", [3, -1], r"top_k=-1 in row 1: it must be 0 \(keep all\) or more"),
    ("top_k", [3, 2.5], r"top_k=2\.5 in row 1"),
    ("top_p", [0.5, 0.0], r"top_p=0\.0 in row 1: it must be in "),
    ("top_p", [1.5, 1.0], r"top_p=1\.5 in row 0"),
    ("min_p", [0.5, 1.5], r"min_p=1\.5 in row 1: it must be in \[0, 1\]"),
    ("seed", [0, -1], r"seed=-1 in row 1"),
    ("repetition_penalty", [1.0, 0.0], r"repetition_penalty=0\.0 in row 1: it must be greater than 0"),
    ("presence_penalty", [2.5, 0.0], r"presence_penalty=2\.5 in row 0: it must be in \[-2, 2\]"),
    ("frequency_penalty", [0.0, -3.0], r"frequency_penalty=-3\.0 in row 1: it must be in \[-2, 2\]"),
    ("logit_bias", [None, {10: 1.0}], "logit_bias holds id 10 in row 1: it must be in 0 to 9"),
    ("logit_bias", {3: np.inf}, "logit_bias of id 3 is inf in row 0: it must be a finite number"),
    ("banned_ids", [None, [3, -1]], "banned_ids holds id -1 in row 1"),
    ("banned_ids", [None, list(range(10))], "the ids of row 1 are all banned"),
    ("allowed_ids", [[1], []], r"allowed_ids=\[\] in row 1 leaves nothing to draw"),
    ("allowed_ids", [[1], [12]], "allowed_ids holds id 12 in row 1"),
    ("min_new_tokens", [0, -2], r"min_new_tokens=-2 in row 1"),
    ("min_new_tokens", [8, 9], r"min_new_tokens=9 in row 1 is more than max_new_tokens=8; lower the one or raise the"),
    ("temperature", [0.1, 0.2, 0.3], r"temperature has shape \(3,\); allowed are one value or one a row, \(2,\)"),
])
def test_parameters_name_the_row(name, value, message):
  refused(message, params=SamplingParams(**{name: value}))


@pytest.mark.parametrize("params,kwargs,message", [
    (dict(allowed_ids=[2, 9], banned_ids=[None, [2]], min_new_tokens=[0, 1]), dict(eos_ids=(9,)),
     r"min_new_tokens=1 in row 1: all that may be drawn are end ids,? \[9\]"),
    (dict(allowed_ids=[None, [3, 9]], min_new_tokens=[2, 2]), dict(eos_ids=(3, 9)),
     r"min_new_tokens=2 in row 1: all that may be drawn are end ids,? \[3, 9\]"),
    (dict(min_new_tokens=[4, 7]), dict(max_new_tokens=[4, 6]),
     r"min_new_tokens=7 in row 1 is more than max_new_tokens=6"),
    (dict(min_new_tokens=[1, 2]), dict(eos_ids=(9,), constraint=Automaton(jnp.asarray(ONLY_ENDS))),
     r"state 1, reached after 1 tokens in row 1, allows end ids only, but min_new_tokens=2 forbids them before"),
    (dict(banned_ids=[None, [9]]), dict(eos_ids=(9,), constraint=Automaton(jnp.asarray(ONLY_ENDS))),
     r"state 1, reached after 1 tokens in row 1, allows no id that banned_ids, allowed_ids and logit_bias leave"),
    (dict(), dict(eos_ids=(), constraint=Automaton(jnp.asarray(ONLY_ENDS[:, :8]))),
     r"transitions have shape \(2, 8\).*of shape \(states, 10\)"),
    (dict(), dict(eos_ids=(9,), constraint=Automaton(jnp.asarray(ONLY_ENDS), jnp.asarray([0, 2]))),
     r"start=2 in row 1: it must be a state in 0 to 1"),
    (dict(), dict(logprobs=-1), "logprobs=-1: it must be between 0 and the vocabulary's size, 10"),
    (dict(), dict(logprobs=11), "logprobs=11: it must be between 0 and the vocabulary's size, 10"),
    (dict(), dict(stop_sequences=[[]]), "stop sequences"),
])
def test_what_does_not_go_together(params, kwargs, message):
  refused(message, params=SamplingParams(**params), **kwargs)


def test_every_id_that_may_be_drawn_ends_the_row():
  """Without an allowed list, too: all ids that do not end the row are banned."""
  refused("min_new_tokens=1 in row 1", params=SamplingParams(min_new_tokens=[0, 1], banned_ids=list(range(9))),
          eos_ids=(9,))


def test_the_whole_vocabulary_may_be_reported():
  state = drivers.start(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=8, logprobs=10)
  assert state.logprobs.top_ids.shape[-1] == 10


@pytest.mark.parametrize("make", [
    lambda: testing.NoisySelf(rule="other"), lambda: testing.NoisySelf(parents=(0, 1)),
    lambda: proposers.NGram(max_ngram=1, min_ngram=2), lambda: verifiers.LossyTypical(epsilon=0),
    lambda: verifiers.LossyLenient(0), lambda: verifiers.LossyCascade("other"),
    lambda: verifiers.LossyCascade(alpha=-1)])
def test_configurations_that_mean_nothing(make):
  with pytest.raises(ValueError, match="allowed|must|needed|comes before"):
    make()


@pytest.mark.parametrize("eos_ids", [[99], [-1], [[1], [2, 3]], [1.5, "x"]])
def test_end_ids_that_no_token_has(eos_ids):
  refused("eos_ids holds .*: it is a list of ids, 0 to ", proposers.Plain(), eos_ids=eos_ids)
