"""Drafting on the tokens that two vocabularies share: q, what the drafter reads, and the text that comes of it."""
import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
import tiny_tokenizers
import verified_texts
from specjax import cache as cache_lib
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.models import base as models
from specjax.proposers import shared_tokens
from specjax.sampling import SamplingParams
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
OURS = tiny_tokenizers.byte_level(["a", "b", "ab", " ", "x", " a", "\n"], ["</s>"], eos="</s>")
THEIRS = tiny_tokenizers.sentencepiece(["b", "z", " ", "a", " b"], ["<s>", "<eos>"], prefix=False, bos="<s>",
                                       eos="<eos>", opens=True)
# By hand: how each id of the target reads to the drafter ("x" and the newline it does not know), and what is shared.
SPELT = [[3], [0], [3, 0], [2], [5], [2, 3], [5], [6]]
SHARED = {0: 3, 1: 0, 3: 2}
TARGET = testing.DummyTarget(vocab=8, max_context=400)
DRAFTER = testing.DummyTarget(vocab=7, salt=np.uint32(5))
PROMPTS = [[0, 1, 2], [2, 5, 4, 7, 3, 1] * 15, [6]]
draft = jax.jit(decode.draft)


def make(model=DRAFTER, target=OURS, drafter=THEIRS, **options):
  return shared_tokens.shared_tokens(model, target, drafter, **{"num_tokens": 3, **options})


SAMPLED = make(drawing=proposers.Drawing(sampled=True))


def reference(text, temperature=1.0, top_k=0):
  """The drafter's law on the target's ids behind a text of the target's ids: f64[8]."""
  ids = [THEIRS.bos_id] + [index for token in text for index in SPELT[token]]
  raw = dummy_law.logits(DRAFTER, [ids])[0]
  law = np.full(TARGET.vocab, -np.inf)
  for ours, theirs in SHARED.items():
    law[ours] = raw[theirs]
  if top_k:
    law[law < np.sort(law)[-top_k]] = -np.inf
  return dummy_law.softmax(law / temperature)


def check_laws(tree, texts, asked):
  """q at every drafted node; returns how many there are."""
  checked = 0
  for row, text in enumerate(texts):
    path = list(text)
    for node in range(1, int(tree.size[row])):
      np.testing.assert_allclose(np.asarray(tree.q.probs)[row, node - 1], reference(path, **asked[row]), atol=2e-6)
      path.append(int(tree.tokens[row, node]))
      checked += 1
  return checked


@struct.dataclass
class Seldom:
  """A length rule that drafts in every `every`-th step only; in the others the drafter must not run."""
  every: jax.Array | int = 4
  reads_laws = False

  def init(self, batch, num_tokens):
    del num_tokens
    return jnp.zeros((batch,), jnp.int32)

  def limit(self, state, num_tokens):
    return jnp.where((state + 1) % self.every == 0, num_tokens, 0)

  def go_on(self, state, drafted, survival, confidence, entropy):
    raise AssertionError("it reads no laws")

  def observe(self, state, drafted, accepted):
    del drafted, accepted
    return state + 1


@pytest.mark.parametrize("every", [1, 4], ids=["always", "seldom"])
def test_what_is_drafted_behind_every_text(every):
  """Step by step against an independent reading of the whole text in the drafter's ids: tokens that take several ids,
  or that it cannot spell, accepted drafts and rejected ones, a prompt of more than a chunk, rows of any length."""
  proposer = SAMPLED.replace(length=Seldom(np.int32(every)))
  asked = [dict(temperature=1.0), dict(temperature=0.7, top_k=2), dict(temperature=1.3)]
  params = SamplingParams(temperature=[1.0, 0.7, 1.3], top_k=[0, 2, 0])
  state = drivers.start(TARGET, proposer, PROMPTS, params, max_new_tokens=60, eos_ids=(), verifier=verifiers.Block())
  checked, drafting = 0, 0
  for _ in range(12):
    tree, after = draft(TARGET, proposer, state)
    tree_lib.check(tree, TARGET.vocab)
    texts = [row[:length].tolist() for row, length in zip(np.asarray(state.tokens), np.asarray(state.length))]
    found = check_laws(tree, texts, asked)
    checked, drafting = checked + found, drafting + (found > 0)
    if not found:  # neither was anything read
      np.testing.assert_array_equal(after.text.read, state.proposer.text.read)
    state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Block())
  assert checked == 9 * drafting and drafting == 12 // every
  assert 0 < state.counters.accepted_tokens.sum() < state.counters.drafted_tokens.sum()
  seen = {token for row, length in zip(np.asarray(state.tokens), np.asarray(state.length)) for token in row[:length]}
  assert seen == set(range(8))


# --- golden ---------------------------------------------------------------------------------------------------------


@struct.dataclass
class Fixed:
  """A model of one law, whatever the text."""
  probs: tuple[float, ...] = struct.field(pytree_node=False)
  max_context = 64
  eos_ids = ()

  @property
  def vocab_size(self):
    return len(self.probs)

  def init_cache(self, batch, slots):
    return cache_lib.empty_cache(batch, 1, 1, slots, 1, jnp.float32)

  def forward(self, tokens, positions, mask, cache, *, before=None):
    shape = lambda *axes: (jnp.zeros((tokens.shape[0], 1, *axes)),)
    return models.ForwardOutput(hidden=jnp.zeros((*tokens.shape, 1)), in_flight=cache_lib.InFlight(
        shape(1, tokens.shape[1]), shape(tokens.shape[1], 1)))

  def logits(self, hidden):
    return jnp.broadcast_to(jnp.log(jnp.asarray(self.probs)), (*hidden.shape[:-1], len(self.probs)))


def test_golden_acceptance():
  """Target (.3, .4, .3) on a, b, c; drafter (.5, .2, .3) on a, b, z: q~ is (5/7, 2/7, 0) and .585714 are accepted,
  where verifying in the union of both vocabularies would accept .5."""
  ours, theirs = (tiny_tokenizers.byte_level(tokens) for tokens in (["a", "b", "c"], ["a", "b", "z"]))
  target, p = Fixed((0.3, 0.4, 0.3)), np.array([0.3, 0.4, 0.3])
  proposer = make(Fixed((0.5, 0.2, 0.3)), ours, theirs, num_tokens=1, drawing=proposers.Drawing(sampled=True))
  rows = 8192
  state = drivers.start(target, proposer, [[0]] * rows, SamplingParams(temperature=1.0), max_new_tokens=2,
                        verifier=verifiers.Rejection())
  q = np.asarray(draft(target, proposer, state)[0].q.probs)[0, 0]
  np.testing.assert_allclose(q, [5 / 7, 2 / 7, 0], atol=1e-6)
  alpha = np.minimum(p, q).sum()
  assert round(float(alpha), 6) == 0.585714 and round(np.minimum(p, [0.5, 0.2, 0]).sum(), 6) == 0.5
  state = drivers.advance(target, proposer, state, np.int32(1), verifier=verifiers.Rejection())
  accepted = float(state.counters.accepted_tokens.mean())
  assert abs(accepted - alpha) < 4 * np.sqrt(alpha * (1 - alpha) / rows)
  first = np.bincount(np.asarray(state.tokens)[:, 1], minlength=3)
  assert dummy_law.p_value(first, p) > 1e-3


# --- the law of the text, and the text itself -----------------------------------------------------------------------

SMALL = [tiny_tokenizers.byte_level(tokens) for tokens in (["a", "b", "ab", "x", " "], [" ", "z", "b", "a"])]


def test_the_text_has_the_targets_law():
  """Temperature, top-k and penalties, by both rules that read q of a chain; a rule that must fail does."""
  proposer = make(testing.DummyTarget(vocab=4, salt=np.uint32(3), max_context=24), *SMALL,
                  drawing=proposers.Drawing(sampled=True), num_tokens=2)
  members = (verifiers.Rejection(), verifiers.Block(), verifiers.LossyLenient(0.3))
  result, texts = verified_texts.run(proposer, members)
  found = [min(verified_texts.p_values(text)) for text in texts]
  assert min(found[:2]) > 1e-3 and found[2] < 1e-6, found
  accepted, drafted = verified_texts.per_group(result)
  assert (0 < accepted).all() and (accepted < drafted).all()


def test_greedy_drafts_leave_the_plain_text():
  params = SamplingParams(temperature=[0.0, 0.8, 0.8], frequency_penalty=0.2)
  plain, result = (drivers.generate(TARGET, proposer, PROMPTS, params, max_new_tokens=80) for proposer in
                   (proposers.Plain(), make()))
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()


@struct.dataclass
class Renamed:
  """The dummy target with its ids renamed: a drafter that is right about everything, in ids of its own."""
  names: jax.Array  # i32[V]; our id of each of its ids
  inner: testing.DummyTarget = TARGET

  def __getattr__(self, name):
    return getattr(self.inner, name)

  def forward(self, tokens, *args, **kwargs):
    return self.inner.forward(self.names[tokens], *args, **kwargs)

  def logits(self, hidden):
    return self.inner.logits(hidden)[..., self.names]


def test_a_renamed_self_is_accepted_whole():
  """Any wrong id, position or slot of the drafter's cache would show."""
  order = [6, 2, 0, 5, 1, 4, 3]
  ours = ["a", "b", "ab", " ", "x", " a", "\n"]
  theirs = tiny_tokenizers.sentencepiece([{"ab": "x", "x": "ab"}.get(ours[i], ours[i]) for i in order], ["</s>"],
                                         prefix=False)
  names = [{2: 4, 4: 2}.get(i, i) for i in order] + [7]
  proposer = make(Renamed(jnp.asarray(names)), OURS, theirs)
  result = drivers.generate(TARGET, proposer, PROMPTS, max_new_tokens=41)
  assert result.counters.accepted_tokens.tolist() == result.counters.drafted_tokens.tolist() == [30] * 3


# --- limits ---------------------------------------------------------------------------------------------------------


def test_only_shared_tokens_are_drafted_and_nothing_where_there_are_none():
  """A request that allows no shared token has no law to draw from; its neighbours draft as ever."""
  allowed = [None, [2, 4, 6], [2, 3, 4]]
  params = SamplingParams(temperature=1.0, allowed_ids=[list(range(8)) if ids is None else ids for ids in allowed])
  result = drivers.generate(TARGET, SAMPLED, [PROMPTS[0]] * 3, params, max_new_tokens=30, verifier=verifiers.Block())
  c = result.counters
  assert c.drafted_tokens[1] == 0 < c.accepted_tokens[0] < c.drafted_tokens[0] and c.accepted_tokens[2] > 0
  drafted = [set(tokens[flags].tolist()) for tokens, flags in zip(result.tokens, result.drafted)]
  assert drafted[0] <= set(SHARED) and drafted[2] == {3}
  assert set(result.tokens[1].tolist()) == {2, 4, 6} and set(result.tokens[2].tolist()) == {2, 3, 4}


def test_a_text_that_outgrows_the_drafter_is_drafted_no_further():
  """80 ids of context: rows stop there, at any alignment, and their text goes on as if nothing had been."""
  proposer = make(dataclasses.replace(DRAFTER, max_context=80))
  prompts = [[2, 0, 1] * 10, [0] * 76, [2] * 30]
  plain = drivers.generate(TARGET, proposers.Plain(), prompts, max_new_tokens=100)
  result = drivers.generate(TARGET, proposer, prompts, max_new_tokens=100)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  c = result.counters
  assert c.accepted_tokens.sum() > 0 and (c.drafted_tokens > 0).all() and (c.drafted_tokens < 150).all()
  assert (c.steps_beyond_draft_context > 0).all()


def test_room_for_the_text_in_the_drafters_ids():
  for options, slots in ((dict(), 384), (dict(expansion=0.5), 128), (dict(model=dataclasses.replace(
      DRAFTER, max_context=300)), 300)):
    state = make(**options).init(TARGET, 2, 256)
    assert state.text.ids.shape == (2, slots) and state.own.cache.slots == slots


def test_the_first_token_of_a_document_is_the_drafters_own():
  """A target's first token is no second one to a drafter that wants one of its own before any text."""
  ours = tiny_tokenizers.byte_level(["a", "b", " "], ["<|begin|>"], bos="<|begin|>")
  target = testing.DummyTarget(vocab=4)
  proposer = make(target=ours)
  for prompt, ids in (([3], [5]), ([3, 0, 1], [5, 3, 0]), ([0, 3, 1], [5, 3, 5, 0])):
    state = drivers.start(target, proposer, [prompt], max_new_tokens=20)
    text = draft(target, proposer, state)[1].text
    assert text.ids[0, :int(text.length[0])].tolist() == ids and text.read.tolist() == [len(prompt)]


@pytest.mark.parametrize("options,message", [
    (dict(num_tokens=0), "num_tokens=0"), (dict(expansion=0.0), "expansion=0.0"),
    (dict(drawing=proposers.Drawing(temperature=0.5)), "draft temperature=0.5")])
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    make(**options)


def test_pairs_that_cannot_work_are_refused():
  with pytest.raises(ValueError, match="share no token.*Retokenised"):
    make(target=tiny_tokenizers.byte_level(["x", "y"]))
  with pytest.raises(ValueError, match="6 ids and its tokenizer 7"):
    make(dataclasses.replace(DRAFTER, vocab=6))
  with pytest.raises(ValueError, match="translates 8 ids and the target has 9"):
    drivers.start(testing.DummyTarget(vocab=9), make(), [[1]], max_new_tokens=4)


# --- the same tokenizer with other heads ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(40, 36), (36, 40)], ids=str)
def test_heads_padded_to_other_sizes_share_their_ids(rows):
  """vllm#10913, mlc-llm#3212: a pair of one tokenizer whose heads are padded differently, the padding louder than all
  ids. It drafts id for id, is right about everything, and no padding is drafted or emitted."""
  models_of = []
  for size in rows:
    made = tiny.decoder(layers=1, vocab=40)
    loud = made.weights.head.at[32:].multiply(50.0)
    weights = made.weights.replace(head=loud[:size], embedding=made.weights.embedding[:size])
    models_of.append(made.replace(weights=weights, config=dataclasses.replace(made.config, vocab_size=size,
                                                                              num_tokens=32)))
  target, drafter = models_of
  proposer = proposers.DraftModel(drafter, num_tokens=3)
  result = drivers.generate(target, proposer, [[1, 2, 31], [7] * 5], max_new_tokens=29)
  assert result.tokens.max() < 32 and len(set(result.tokens.ravel().tolist())) > 3
  assert result.counters.accepted_tokens.tolist() == result.counters.drafted_tokens.tolist() == [21, 21]
