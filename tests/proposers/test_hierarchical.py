"""Drafts of a middle model that a small proposer drafted for: their law, the law of the text, and who is told what."""
import functools
import re

import jax
import numpy as np
import pytest

import dummy_law
import verified_texts
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import hierarchical
from specjax.proposers import mixture
from specjax.sampling import SamplingParams
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
SAMPLED = proposers.Drawing(sampled=True)
TARGET = verified_texts.TARGET  # 5 ids
MIDDLE, SMALL, OTHER = (TARGET.replace(salt=np.uint32(salt)) for salt in (7, 8, 9))
PROMPT, N = [1, 2, 3], 3
draft = jax.jit(decode.draft)

# Small drafts of two tokens for three: a chain by the rule for chains, and a tree of drawn and chosen tokens.
CHAIN = hierarchical.Hierarchical(small=proposers.DraftModel(model=SMALL, num_tokens=2, drawing=SAMPLED), middle=MIDDLE,
                                  num_tokens=N, drawing=SAMPLED)
TREE = CHAIN.replace(small=mixture.Mixture((proposers.DraftModel(model=SMALL, num_tokens=2),
                                            proposers.DraftModel(model=OTHER, num_tokens=2, drawing=SAMPLED))))


# --- what is drafted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", [CHAIN, TREE], ids=["chain", "tree"])
def test_drafts_are_samples_of_the_middle_model_with_its_laws(proposer):
  """All of them: three tokens, however many inner rounds they took, and also those drawn from a residual."""
  rows, asked = 2000, dict(temperature=0.8, top_k=4, repetition_penalty=1.3)
  make = lambda **kwargs: drivers.start(TARGET, proposer, [PROMPT] * rows, SamplingParams(**asked), **kwargs)
  tree, state = draft(TARGET, proposer, make(max_new_tokens=9))
  tokens, q = np.asarray(tree.tokens), np.asarray(tree.q.probs)
  assert (tree.size == N + 1).all() and tree.sampled[:, 1:].all()
  some = jax.tree.map(lambda x: x[:40], tree)
  tree_lib.check(some, TARGET.vocab_size)
  first = state.first
  assert set(first.accepted.tolist()) == {0, 1, 2}  # rounds end everywhere
  code = tokens[:, 1:] @ (TARGET.vocab ** np.arange(N)[::-1])
  assert dummy_law.p_value(np.bincount(code, minlength=TARGET.vocab ** N),
                           dummy_law.text_law(MIDDLE, PROMPT, N, **asked)) > 1e-3
  for row in range(0, 40):
    for node in range(N):
      wanted = dummy_law.law(MIDDLE, [*PROMPT, *tokens[row, 1:node + 1]], len(PROMPT), **asked)[0]
      np.testing.assert_allclose(q[row, node], wanted, atol=1e-5)
  # A drawn end of sequence is the last token, and budgets bound the number of tokens.
  ended = jax.device_get(draft(TARGET, proposer, make(max_new_tokens=[9, 2, 1, 3] * (rows // 4), eos_ids=(2,)))[0])
  until = lambda words: next((place + 1 for place, word in enumerate(words) if word == 2), N)
  count = ended.size - 1
  for row in range(rows):
    own = ended.tokens[row, 1:].tolist()
    assert count[row] == min(until(own[:count[row]]), [N, 1, 0, 2][row % 4])
    if row % 4 == 0:
      assert own[:count[row]] == tokens[row, 1:until(tokens[row, 1:]) + 1].tolist()
  assert set(count[::4].tolist()) == {1, 2, 3}
  # Rows in another order are the same rows.
  order = np.arange(rows)[::-1]
  asked["seed"] = order
  np.testing.assert_array_equal(draft(TARGET, proposer, make(max_new_tokens=9))[0].tokens, tokens[order])


def test_text_has_the_law_of_the_target():
  """The two-line property: an exact inner loop and an exact outer rule, over steps and rounds that draw apart."""
  rows, asked = 8000, dict(temperature=0.9, top_k=4)
  result = drivers.generate(TARGET, CHAIN, [PROMPT] * rows, SamplingParams(**asked), max_new_tokens=5,
                            verifier=verifiers.Block())
  code = result.tokens[:, :3] @ (TARGET.vocab ** np.arange(3)[::-1])
  seen = np.bincount(code, minlength=TARGET.vocab ** 3)
  assert dummy_law.p_value(seen, dummy_law.text_law(TARGET, PROMPT, 3, **asked)) > 1e-3
  assert dummy_law.p_value(seen, dummy_law.text_law(MIDDLE, PROMPT, 3, **asked)) == 0
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()


# --- points ---------------------------------------------------------------------------------------------------------

TEXT = testing.DummyTarget(vocab=6, order=2, sharpness=6.0)
PROMPTS, NEW = [[1, 2, 3], [4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [2]], [60, 53, 40]
POINT = hierarchical.Hierarchical(small=proposers.DraftModel(model=TEXT, num_tokens=2), middle=TEXT, num_tokens=5)


@pytest.mark.parametrize("temperature", [0.0, [0.8, 0.9, 0.0]])
def test_text_is_that_of_plain_decoding(temperature):
  """A middle model that is the target is right about greedy text, and here and there about sampled text."""
  params = SamplingParams(temperature=temperature)
  plain = drivers.generate(TEXT, proposers.Plain(), PROMPTS, params, max_new_tokens=NEW)
  result = drivers.generate(TEXT, POINT, PROMPTS, params, max_new_tokens=NEW)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  accepted, drafted = result.counters.accepted_tokens, result.counters.drafted_tokens
  assert (0 < accepted).all()
  assert (accepted == drafted).all() if temperature == 0 else (accepted < drafted)[:2].all()


@pytest.mark.parametrize("middle", [0, 1])
def test_a_sampled_middle_model_that_is_the_target_is_accepted_whole(middle):
  """Whoever drafts for it: lookup, which draws nothing. Another middle model is not."""
  proposer = hierarchical.Hierarchical(small=proposers.NGram(min_ngram=1, num_tokens=2), num_tokens=5, drawing=SAMPLED,
                                       middle=TEXT.replace(salt=np.uint32(1 + middle)))
  result = drivers.generate(TEXT, proposer, PROMPTS, SamplingParams(temperature=0.9), max_new_tokens=NEW,
                            verifier=verifiers.Rejection())
  accepted, drafted = result.counters.accepted_tokens, result.counters.drafted_tokens
  assert (accepted < drafted).all() if middle else (accepted == drafted).all()


def test_caches_hold_the_accepted_text():
  """Step by step, drafts accepted whole and in part: the middle model's cache is the target's, which here writes the
  same, and a small model that is the middle one is never wrong about it."""
  step = functools.partial(drivers.advance, TEXT, POINT, max_steps=np.int32(1), verifier=verifiers.Point())
  params = SamplingParams(temperature=[0.0, 1.0, 0.0])
  state = drivers.start(TEXT, POINT, PROMPTS, params, max_new_tokens=NEW)
  text = drivers.advance.lower(TEXT, POINT, state, np.int32(1), verifier=verifiers.Point()).as_text()
  assert "while" in text and not re.search("callback|infeed|outfeed", text, re.IGNORECASE)
  fed = set()
  for _ in range(6):
    before = np.asarray(state.length)
    state = step(state=state)
    own, small, length = state.proposer.cache, state.proposer.small.own.cache, np.asarray(state.length)
    assert state.proposer.first.accepted.tolist() == [2, 2, 2]
    for row, emitted in enumerate((length - before).tolist()):
      assert own.length[row] == before[row] - 1 + min(emitted, 5)
      assert small.length[row] == before[row] + min(emitted - 1, 1)  # its second drafted token is never fed
      for cache in (own, small):
        known = int(cache.length[row])
        np.testing.assert_array_equal(cache.keys[0][row, ..., :known], state.cache.keys[0][row, ..., :known])
      fed.add(emitted)
  assert 6 in fed and fed - {6}


@pytest.mark.parametrize("make,message", [
    (lambda: POINT.replace(num_tokens=0), "num_tokens=0: it must be 1 or more"),
    (lambda: POINT.replace(drawing=proposers.Drawing(top_k=3)), "draft top_k=3"),
    (lambda: POINT.init(TARGET, 1, 8), "the drafter has 6 token ids and the target 5"),
    (lambda: POINT.replace(small=proposers.Plain()).init(TEXT, 1, 8), "small=Plain never drafts"),
    (lambda: _draft(TEXT, TEXT, testing.NoisySelf()), "the small proposer runs layers of the model that it drafts for"),
    (lambda: _draft(*[tiny.decoder(layers=2)] * 2, proposers.EarlyExit(1)), "the small proposer runs layers"),
])
def test_errors(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def _draft(target, middle, small):
  proposer = POINT.replace(small=small, middle=middle)
  jax.eval_shape(decode.draft, target, proposer, drivers.start(target, proposer, PROMPTS, max_new_tokens=9))


@pytest.mark.parametrize("trait,message", [({"node_ids": 2}, "reads the verifier's most probable ids at every node"),
                                           ({"features": (1,)}, "reads the target's features"),
                                           ({"host": True}, "drafts on the host")])
def test_what_a_small_proposer_may_not_be(trait, message):
  small = type("Kind", (proposers.NGram,), trait)()
  with pytest.raises(ValueError, match=f"small=Kind {message}"):
    POINT.replace(small=small).init(TEXT, 1, 8)
