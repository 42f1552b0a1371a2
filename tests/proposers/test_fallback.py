"""Fallback: whose draft a row has, what each proposer is asked and told, and that later ones rest where they can."""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=6, order=2, max_context=256)
PROMPTS = [[1, 2, 3], [4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], [2]]
NEW = [60, 53, 40]
LOOKUP = proposers.NGram(max_ngram=4, min_ngram=3, num_tokens=7)
MODEL = proposers.DraftModel(model=TARGET, num_tokens=3)
WRONG = proposers.DraftModel(model=TARGET.replace(salt=np.uint32(9)), num_tokens=3)


@struct.dataclass
class Told(proposers.base.Defaults):
  """Drafts `token` in rows of even length (`parity` 0) or odd; writes down what it was asked and told."""
  token: int = struct.field(pytree_node=False)
  parity: int = struct.field(pytree_node=False)
  max_nodes = 2
  max_depth = 1

  def init(self, target, batch, capacity):
    return {name: jnp.zeros((batch,), jnp.int32) for name in ("asked", "drafted", "accepted", "paths")}

  def propose(self, target, cache, state, context, keys):
    drafts = context.active & (context.length % 2 == self.parity) & (context.budget > 1)
    draft = jnp.full((*context.length.shape, 1), self.token, jnp.int32)
    return tree_lib.chain(context.pending, draft, drafts.astype(jnp.int32)), state | {
        "asked": state["asked"] + context.active}

  def observe(self, target, state, committed):
    if committed.path is None:
      return state
    return state | {"drafted": state["drafted"] + committed.drafted,
                    "accepted": state["accepted"] + proposers.base.accepted_of_chain(committed),
                    "paths": state["paths"] + (committed.path > 0).sum(1)}


def test_each_is_asked_for_what_is_missing_and_told_of_its_own():
  proposer = proposers.Fallback((Told(token=4, parity=0), Told(token=2, parity=1)))
  state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW, eos_ids=())
  state = drivers.advance(TARGET, proposer, state, np.int32(500), verifier=verifiers.Point())
  first, second = jax.device_get(state.proposer.states)
  steps = np.asarray(state.counters.steps)
  # Always; the second only where the first had nothing. A batch drafts when half of its rows do, so a draft may go unused.
  assert (first["asked"] >= steps).all() and (second["asked"] < first["asked"]).all()
  assert (second["asked"] <= first["asked"] - first["drafted"]).all()
  np.testing.assert_array_equal(first["drafted"] + second["drafted"], state.counters.drafted_tokens)
  np.testing.assert_array_equal(first["accepted"] + second["accepted"], state.counters.accepted_tokens)
  assert (first["drafted"] > 0).any() and (second["drafted"] > 0).any()
  assert (first["accepted"] + second["accepted"] > 0).all()
  assert ((first["paths"] > 0) == (first["accepted"] > 0)).all()


def test_the_first_draft_wins_row_by_row():
  proposer = proposers.Fallback((LOOKUP, MODEL))
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=NEW, eos_ids=())
  state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW, eos_ids=())
  draft, owners = jax.jit(decode.draft), set()
  while np.asarray(state.active).any():
    tree, after = draft(TARGET, proposer, state)
    lookup, _ = draft(TARGET, LOOKUP, state)
    for row in np.flatnonzero(np.asarray(state.active & (state.limit - state.length > 1))):
      size = int(lookup.size[row])
      assert int(after.owner[row]) == (size == 1)
      if size > 1:
        assert tree.tokens[row, :int(tree.size[row])].tolist() == lookup.tokens[row, :size].tolist()
      owners.add((int(row), size > 1))
    state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Point())
  assert {True, False} == {kind for _, kind in owners}
  for row, (begin, end) in enumerate(zip(np.asarray(state.start), np.asarray(state.length))):
    assert np.asarray(state.tokens)[row, begin:end].tolist() == plain.token_ids[row]


def test_a_model_behind_a_lookup_is_as_right_as_alone():
  """Its cache was not fed while the lookup drafted: the self drafter must still be right in every draft of its own."""
  proposer, own = proposers.Fallback((LOOKUP, MODEL)), 0
  state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW, eos_ids=())
  while np.asarray(state.active).any():
    before = jax.device_get(state.counters)
    state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Point())
    drafted, accepted = (np.asarray(getattr(state.counters, name)) - getattr(before, name)
                         for name in ("drafted_tokens", "accepted_tokens"))
    mine = (np.asarray(state.proposer.owner) == 1) & (drafted > 0)
    assert (drafted == accepted)[mine].all()
    own += mine.sum()
  assert own > 4


def test_seeds_give_the_plain_text():
  params = SamplingParams(temperature=0.8, seed=[3, 4, 5])
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, params, max_new_tokens=NEW, eos_ids=())
  result = drivers.generate(TARGET, proposers.Fallback((LOOKUP, WRONG)), PROMPTS, params, max_new_tokens=NEW, eos_ids=())
  np.testing.assert_array_equal(result.tokens, plain.tokens)


def test_points_and_draws_in_one_tree():
  """Rows of points beside sampled rows, under a rule that needs q of the second only."""
  drawn = MODEL.replace(drawing=proposers.Drawing(sampled=True))
  proposer = proposers.Fallback((LOOKUP, drawn))
  state = drivers.start(TARGET, proposer, PROMPTS, SamplingParams(temperature=0.9), max_new_tokens=NEW,
                        verifier=verifiers.Rejection())
  tree, after = jax.jit(decode.draft)(TARGET, proposer, state)
  tree_lib.check(tree, TARGET.vocab)
  assert proposer.samples and set(after.owner.tolist()) == {0, 1}
  np.testing.assert_array_equal(np.asarray(tree.sampled[:, 1]), np.asarray(after.owner) == 1)
  result = drivers.generate(TARGET, proposer, PROMPTS, SamplingParams(temperature=0.9), max_new_tokens=NEW,
                            verifier=verifiers.Rejection())
  assert result.counters.accepted_tokens.sum() > 20


def test_what_cannot_be_one_of_several():
  with pytest.raises(ValueError, match="two or more"):
    proposers.Fallback((LOOKUP,))
  independent = proposers.DraftTree(model=TARGET, children="independent")
  without = proposers.DraftTree(model=TARGET, children="without_replacement")
  with pytest.raises(ValueError, match="with replacement and another without"):
    drivers.generate(TARGET, proposers.Fallback((independent, without)), PROMPTS, max_new_tokens=4)
