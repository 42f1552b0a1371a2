"""Learned heads: what they draft follows from the text alone, whatever happened on the way to it.

The reference is the same head on a fresh start with the whole text as prompt, where every entry comes from the target's
own features. A head that kept features of its own making, or keys of a rejected draft, or lost count of a row while it
slept, drafts something else (vLLM 14649, SGLang 8726, EAGLE 90 and 250).
"""
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import starting
from specjax import static_trees
from specjax import verifiers
from specjax.proposers import base
from specjax.proposers import length
from specjax.testing import tiny
from specjax.training import own_passes
from specjax.training import hydra as training_hydra
from specjax.training import medusa as training_medusa

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET, WIDE = tiny.decoder(vocab=24, max_context=256), tiny.decoder(vocab=27, max_context=256)
IDS = tuple(i for i in range(24) if i % 5)  # some ids are never drafted
EAGLE3, MEDUSA, DFLASH = tiny.eagle3(TARGET, IDS), tiny.medusa(TARGET, IDS), tiny.dflash(TARGET, IDS)
DSPARK, EAGLE, MTP = tiny.dspark(TARGET, IDS), tiny.eagle(TARGET, IDS), tiny.mtp(TARGET, IDS)
PEAGLE = tiny.peagle(TARGET, IDS)
HYDRA, HYDRA_PLAIN = tiny.hydra(TARGET, IDS), tiny.hydra(TARGET, IDS, prefix=False)
DRAWN = proposers.Drawing(sampled=True)
HEADS = {
    "EAGLE": proposers.Eagle(head=EAGLE, num_tokens=3),
    "EAGLE tree": proposers.EagleTree(head=EAGLE, nodes=7, depth=3, beam=3),
    "EAGLE fixed tree": proposers.EagleFixedTree(head=EAGLE, parents=(0, 0, 0, 1, 1, 2, 3)),
    "EAGLE-3": proposers.Eagle(head=EAGLE3, num_tokens=3),
    "EAGLE-3 tree": proposers.EagleTree(head=EAGLE3, nodes=7, depth=3, beam=3),
    "MTP": proposers.Eagle(head=MTP, num_tokens=3),
    "MTP tree": proposers.EagleTree(head=MTP, nodes=7, depth=3, beam=3),
    "Medusa": proposers.Medusa(head=MEDUSA, num_tokens=3),
    "Medusa tree": proposers.Medusa(head=MEDUSA, shape=static_trees.best_first((0.5, 0.2, 0.1), 7, 3)),
    "Hydra": proposers.Hydra(head=HYDRA_PLAIN, num_tokens=3),
    "Hydra++": proposers.Hydra(head=HYDRA, num_tokens=3),
    "Hydra++ tree": proposers.Hydra(head=HYDRA, shape=static_trees.best_first((0.5, 0.2, 0.1), 7, 3)),
    "DFlash": proposers.DFlash(head=DFLASH, num_tokens=3),
    "DFlash tree": proposers.DFlash(head=DFLASH, num_tokens=3, nodes=7, beam=3),
    "JetSpec": proposers.JetSpec(head=DFLASH, num_tokens=3, nodes=8, beam=3),
    "DSpark": proposers.DSpark(head=DSPARK, num_tokens=3, confidence=0.4),
    "DSpark tree": proposers.DSpark(head=DSPARK, num_tokens=3, nodes=7, beam=3),
    "P-EAGLE": proposers.PEagle(head=PEAGLE, num_tokens=3),
    "P-EAGLE tree": proposers.PEagle(head=PEAGLE, num_tokens=3, nodes=7, beam=3),
}
PROMPTS = [[5, 1, 0, 7, 7, 3], [3, 9, 2, 11, 4, 4, 8, 1, 0, 6, 13, 22, 17], [14, 3]]
NEW = 30


@struct.dataclass
class Sleepy(base.Defaults):
  """Lets a proposer draft only in steps whose text length, in a cycle of `period`, is not below `asleep`."""
  inner: Any
  period: int = 1  # leaves: all histories are one program
  asleep: int = 0

  max_nodes = property(lambda self: self.inner.max_nodes)
  max_depth = property(lambda self: self.inner.max_depth)
  features = property(lambda self: self.inner.features)

  def init(self, target, batch, capacity):
    return self.inner.init(target, batch, capacity)

  def propose(self, target, cache, state, context, keys):
    awake = context.length % self.period >= self.asleep
    return self.inner.propose(target, cache, state, context.replace(active=context.active & awake), keys)

  def observe(self, target, state, committed):
    return self.inner.observe(target, state, committed)


def drafts_of(tree, row):
  size = int(tree.size[row])
  return tuple(np.asarray(tree.tokens[row, :size]).tolist()), tuple(np.asarray(tree.parents[row, :size]).tolist())


def run(proposer, prompts, steps):
  """Per row, drafts by text."""
  state = drivers.start(TARGET, proposer, prompts, max_new_tokens=NEW)
  found = [{} for _ in prompts]
  for _ in range(steps):
    tree, _ = starting.draft(TARGET, proposer, state)
    for row, (length, active) in enumerate(zip(state.length.tolist(), state.active.tolist())):
      if active:
        found[row][tuple(np.asarray(state.tokens[row, :length]).tolist())] = drafts_of(tree, row)
    state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Point())
  return found


@functools.cache
def awake(name):
  """The drafts of a whole run, and its texts."""
  return run(Sleepy(inner=HEADS[name]), PROMPTS, 14)


@functools.cache
def plain():
  return drivers.generate(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=NEW).tokens


def fresh(name, texts):
  """What a head drafts behind texts that it has just been given, three at a time."""
  found = []
  for begin in range(0, len(texts), 3):
    group = texts[begin:begin + 3]
    group = group + [group[-1]] * (3 - len(group))
    budget = [NEW + next(len(p) for p in PROMPTS if list(text[:len(p)]) == p) - len(text) for text in group]
    state = drivers.start(TARGET, Sleepy(inner=HEADS[name]), [list(text) for text in group], max_new_tokens=budget)
    tree, _ = starting.draft(TARGET, Sleepy(inner=HEADS[name]), state)
    found += [drafts_of(tree, row) for row in range(3)]
  return found[:len(texts)]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("history", ["awake", "asleep now and then", "asleep long"])
def test_drafts_follow_from_the_text_alone(name, history):
  cycle = {"awake": None, "asleep now and then": (3, 1), "asleep long": (24, 20)}[history]
  found = awake(name) if cycle is None else run(Sleepy(HEADS[name], *cycle), PROMPTS, 20)
  drafts = {text: draft for row in found for text, draft in row.items() if len(draft[0]) > 1}
  texts = sorted(drafts)[::2]  # half of them: every row, every stage
  assert len(texts) > 3
  for text, draft in zip(texts, fresh(name, texts)):
    assert drafts[text] == draft, f"{len(text)} tokens"


@pytest.mark.parametrize("name", HEADS)
def test_the_text_is_the_targets_and_some_drafts_are_right(name):
  result = drivers.generate(TARGET, Sleepy(inner=HEADS[name]), PROMPTS, max_new_tokens=NEW)
  np.testing.assert_array_equal(result.tokens, plain())
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()


@pytest.mark.parametrize("name", HEADS)
def test_only_ids_of_the_draft_vocabulary_are_drafted(name):
  for row in awake(name):
    for tokens, _ in row.values():
      assert set(tokens[1:]) <= set(IDS)


@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_of_one_token_drafts_nothing_at_first(name):
  """No features are known behind it: its only token is the pending one."""
  proposer = Sleepy(inner=HEADS[name])
  state = drivers.start(TARGET, proposer, [[5], PROMPTS[0], [3]], max_new_tokens=8)
  assert (np.asarray(starting.draft(TARGET, proposer, state)[0].size) > 1).tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "MTP", "DFlash", "Hydra++", "P-EAGLE"])
def test_a_head_drafts_up_to_its_own_context_only(name):
  """Positions that it was not made for (buun-llama-cpp 32: a drafter beyond its context collapses)."""
  proposer = HEADS[name]
  config = dataclasses.replace(proposer.head.config, max_context=20)
  head = (proposer.head.replace(first=proposer.head.first.replace(config=config)) if name == "P-EAGLE" else
          proposer.head.replace(config=config))
  proposer = proposer.replace(head=head)
  result = drivers.generate(TARGET, proposer, PROMPTS, max_new_tokens=NEW)
  np.testing.assert_array_equal(result.tokens, plain())
  assert (result.counters.steps_beyond_draft_context > 0).all()
  for row in run(proposer, PROMPTS, 12):
    for text, draft in row.items():
      # Greatest position that is run; a layer of prefix attention sees no drafted token.
      deepest = len(text) - 1 + {"DFlash": DFLASH.config.block - 1, "Hydra++": -1, "P-EAGLE": 1}.get(name, 2)
      assert len(draft[0]) == 1 or deepest < 20 + name.startswith(("EAGLE", "MTP"))


@pytest.mark.parametrize("name", HEADS)
def test_no_draft_reaches_beyond_the_last_place_of_the_targets_context(name):
  """Positions that the target was not made for (vLLM 15901); and the text goes on up to that place, where EAGLE's own
  code stops in silence, as many tokens short of its fixed 2048 as a tree has."""
  prompts = [(np.arange(size) * 7 % 23).tolist() for size in (246, 251, 254)]
  new = [TARGET.max_context - len(prompt) for prompt in prompts]
  proposer = Sleepy(inner=HEADS[name])
  state, deepest = drivers.start(TARGET, proposer, prompts, max_new_tokens=new), np.zeros(3, int)
  while np.asarray(state.active).any():
    tree, _ = starting.draft(TARGET, proposer, state)
    for row in np.flatnonzero(np.asarray(state.active)):
      depths = static_trees.depths(np.asarray(tree.parents[row, :int(tree.size[row])]))
      deepest[row] = max(deepest[row], int(state.length[row]) - 1 + max(depths))
    state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Point())
  # The last place is for the token behind the drafts. A fixed shape is drafted whole: what is too deep is not written.
  fixed = name in ("Medusa tree", "Hydra++ tree", "EAGLE fixed tree")
  assert deepest.min() >= TARGET.max_context - 2 and deepest.max() <= TARGET.max_context - 2 + fixed * (proposer.max_depth - 1)
  wanted = drivers.generate(TARGET, proposers.Plain(), prompts, max_new_tokens=new)
  for row, prompt in enumerate(prompts):
    assert np.asarray(state.tokens[row, len(prompt):]).tolist() == wanted.token_ids[row]


@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash"])
def test_an_entry_of_eagle3_holds_the_token_behind_it_and_one_of_dflash_does_not(name):
  """vLLM 15901: of a text that goes on in another way the last entry is not to be used again."""
  proposer, prompts = Sleepy(inner=HEADS[name]), [PROMPTS[0] + [last] for last in (3, 9, 3)]
  state = drivers.start(TARGET, proposer, prompts, max_new_tokens=NEW)
  cache = starting.draft(TARGET, proposer, state)[1].cache
  known = len(PROMPTS[0])  # entries: all tokens but the pending one
  assert cache.length.tolist() == [known] * 3
  first, other, same = np.concatenate([np.swapaxes(cache.keys[0], 2, 3), cache.values[0]], -1)[:, :, :known]
  np.testing.assert_array_equal(first, same)
  np.testing.assert_array_equal(first[:, :-1], other[:, :-1])
  assert np.array_equal(first[:, -1], other[:, -1]) == (name == "DFlash")


@pytest.mark.parametrize("name", ["EAGLE-3", "Medusa tree"])
def test_a_row_of_a_large_batch_is_that_row_alone(name):
  """Text and drafts of 33 rows of unlike lengths (TGI 1411: garbage from Medusa where the batch is large)."""
  rng, proposer = np.random.default_rng(1), Sleepy(inner=HEADS[name])
  prompts = [rng.integers(0, 23, size).tolist() for size in rng.integers(2, 20, 33)]
  found = run(proposer, prompts, 4)
  for row in (0, 16, 32):
    assert found[row] == run(proposer, [prompts[row]], 4)[0]


def test_end_of_sequence_is_never_a_node_of_a_grown_tree():
  everything = tuple(range(24))
  for proposer in (proposers.EagleTree(head=tiny.eagle3(TARGET, everything), nodes=16, depth=3, beam=4),
                   proposers.DFlash(head=tiny.dflash(TARGET, everything), num_tokens=3, nodes=16, beam=4),
                   proposers.JetSpec(head=tiny.dflash(TARGET, everything), num_tokens=3, nodes=16, beam=4)):
    state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW, eos_ids=[1, 2, 3, 4, 6])
    tree, _ = starting.draft(TARGET, proposer, state)
    assert not np.isin(np.asarray(tree.tokens)[:, 1:][np.asarray(tree.valid)[:, 1:]], [1, 2, 3, 4, 6]).any()


def test_features_of_several_proposers_are_computed_once_and_each_reads_its_own():
  other = tiny.dflash(TARGET, IDS, seed=3)
  other = other.replace(config=dataclasses.replace(other.config, features=(0, 3, 4)))
  both = proposers.Fallback((proposers.NGram(min_ngram=1, num_tokens=3), HEADS["EAGLE-3"], proposers.DFlash(
      head=other, num_tokens=3)))
  assert both.features == (0, 1, 2, 3, 4)
  np.testing.assert_array_equal(drivers.generate(TARGET, both, PROMPTS, max_new_tokens=NEW).tokens, plain())


@pytest.mark.parametrize("name, proposer", [
    ("EAGLE", proposers.Eagle(head=EAGLE, num_tokens=3, drawing=DRAWN)),
    ("EAGLE fixed tree", proposers.EagleFixedTree(head=EAGLE, parents=(0, 0, 1), children="without_replacement")),
    ("EAGLE-3", proposers.Eagle(head=EAGLE3, num_tokens=3, drawing=DRAWN)),
    ("MTP", proposers.Eagle(head=MTP, num_tokens=3, drawing=DRAWN)),
    ("Medusa", proposers.Medusa(head=MEDUSA, num_tokens=3, drawing=DRAWN)),
    ("Hydra++", proposers.Hydra(head=HYDRA, num_tokens=3, drawing=DRAWN)),
    ("DFlash", proposers.DFlash(head=DFLASH, num_tokens=3, drawing=DRAWN)),
    ("DSpark", proposers.DSpark(head=DSPARK, num_tokens=3, drawing=DRAWN)),
    ("P-EAGLE", proposers.PEagle(head=PEAGLE, num_tokens=3, drawing=DRAWN))])
def test_drawn_drafts_keep_the_law_that_they_were_drawn_from(name, proposer):
  """A thousand rows of one text draw their first token: frequencies are those of q at the root (vLLM 40149)."""
  del name
  rows = 1000
  state = drivers.start(TARGET, proposer, [PROMPTS[0]] * rows, sampling.SamplingParams(
      temperature=1.3, top_k=9, seed=list(range(rows))), max_new_tokens=8,
                        verifier=verifiers.Block() if proposer.chains else verifiers.Traversal())
  tree, _ = starting.draft(TARGET, proposer, state)
  q = np.asarray(jax.jit(lambda tree: tree.q.row(jnp.zeros((rows,), jnp.int32), 24))(tree))
  np.testing.assert_allclose(q, q[:1].repeat(rows, 0), atol=1e-6)
  assert (q[0] > 0).sum() <= 9 and abs(q[0].sum() - 1) < 1e-5
  counts = np.bincount(np.asarray(tree.tokens)[:, 1], minlength=24)
  expected = q[0] * rows
  assert (counts[expected == 0] == 0).all()
  kept = expected > 0
  assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 30  # 8 degrees of freedom: beyond .9997


def test_texts_that_hydra_drafted_have_the_law_of_the_target():
  """Their first two tokens: accepted at depth 1 and 2, or drawn again behind what was refused. The head for depth 2 sees
  the draw above it, so its q is conditional as the target's p is."""
  rows, prompt = 1500, PROMPTS[0]
  asked = dict(temperature=1.3, top_k=5)
  proposer = proposers.Hydra(head=HYDRA, num_tokens=3, drawing=DRAWN)
  result = drivers.generate(TARGET, proposer, [prompt] * rows, sampling.SamplingParams(seed=list(range(rows)), **asked),
                            max_new_tokens=4, verifier=verifiers.Block())
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()
  texts = np.array([[*prompt, token] for token in range(24)], np.int32)
  place = jnp.broadcast_to(jnp.arange(texts.shape[1], dtype=jnp.int32), texts.shape)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((texts.shape[1],) * 2, bool)), (24, *(texts.shape[1],) * 2))
  logits = np.asarray(TARGET.logits(TARGET.forward(texts, place, mask, TARGET.init_cache(24, 1)).hidden), np.float64) / 1.3
  logits = np.where(logits >= np.sort(logits)[..., -5, None], logits, -np.inf)
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  counts = np.bincount(result.tokens[:, 0] * 24 + result.tokens[:, 1], minlength=24 ** 2)
  assert dummy_law.p_value(counts, (p[0, -2][:, None] * p[:, -1]).ravel()) > 1e-3


def small(proposer):
  return drivers.generate(TARGET, proposer, PROMPTS, max_new_tokens=NEW)


@pytest.mark.parametrize("changes", [{"num_tokens": 2}, {"shape": static_trees.best_first((0.5, 0.2), 5, 2)}],
                         ids=["chain", "tree"])
def test_medusa_drafts_fewer_tokens_than_it_has_heads(changes):
  """Published files hold five heads with a matrix each; a draft of two or three is the default."""
  head = training_medusa.init(TARGET, np.asarray(IDS), 3, own_vocabulary=True)
  result = small(proposers.Medusa(head=head, **changes))
  np.testing.assert_array_equal(result.tokens, plain())
  assert result.counters.accepted_tokens.sum() > 0


def test_hydra_with_matrices_and_biases_of_its_own_and_a_single_token_a_draft():
  head = training_hydra.init(TARGET, np.asarray(IDS), 2, blocks=1, prefix=False, own_vocabulary=True)
  result = small(proposers.Hydra(head=head, num_tokens=1))
  np.testing.assert_array_equal(result.tokens, plain())
  assert result.counters.accepted_tokens.sum() > 0
  far = tuple(bias.at[4].set(1e3) for bias in head.vocabulary_bias)  # one id is all that it drafts
  proposer = proposers.Hydra(head=head.replace(vocabulary_bias=far), num_tokens=1)
  tree, _ = starting.draft(TARGET, proposer, drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW))
  assert (np.asarray(tree.tokens)[:, 1] == IDS[4]).all()


def test_siblings_of_hydras_tree_have_children_of_their_own_path():
  """Of one depth Medusa drafts the same tokens everywhere; a head of Hydra sees which path it stands on."""
  shape = static_trees.fixed((3, 1))
  proposer = proposers.Hydra(head=HYDRA, shape=shape)
  state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW)
  tokens = np.asarray(starting.draft(TARGET, proposer, state)[0].tokens)
  text = state.proposer.text
  rows = np.asarray(TARGET.weights.head)[np.asarray(IDS)]
  embedding = np.asarray(TARGET.weights.embedding)
  seen = set()
  for row, prompt in enumerate(PROMPTS):
    hidden = text.values[row, None, :len(prompt) - 1]
    place = jnp.arange(len(prompt) - 1, dtype=jnp.int32)[None]
    read = HYDRA.apply_prefix(hidden, place, lambda q, k, v: own_passes.attend(q, k, v, []))[0][0, -1]
    above = jnp.concatenate([read, embedding[prompt[-1]]])
    first = np.argsort(-np.asarray(HYDRA.logits(0, HYDRA.state(0, above[None]), rows))[0], kind="stable")[:3]
    np.testing.assert_array_equal(tokens[row, 1:4], np.asarray(IDS)[first])
    for child, drafted in zip(tokens[row, 1:4], tokens[row, 4:]):
      inputs = jnp.concatenate([above, embedding[child]])[None]
      assert IDS[int(jnp.argmax(HYDRA.logits(1, HYDRA.state(1, inputs), rows)))] == drafted
    seen.add(len(set(tokens[row, 4:].tolist())))
  assert max(seen) > 1


@pytest.mark.parametrize("make", [
    lambda: proposers.EagleTree(head=tiny.eagle3(WIDE, tuple(range(27))), nodes=16, depth=3, beam=4),
    lambda: proposers.EagleFixedTree(head=tiny.eagle(WIDE, tuple(range(27))), parents=(0, 0, 0, 0, 0, 1, 1, 2, 2)),
    lambda: proposers.Medusa(head=tiny.medusa(WIDE, tuple(range(27))), shape=static_trees.fixed((4, 2))),
    lambda: proposers.Hydra(head=tiny.hydra(WIDE, tuple(range(27))), shape=static_trees.fixed((4, 2))),
    lambda: proposers.DFlash(head=tiny.dflash(WIDE, tuple(range(27))), num_tokens=3, nodes=16, beam=4),
    lambda: proposers.DFlash(head=tiny.dflash(WIDE, tuple(range(27))), num_tokens=3),
    lambda: proposers.DSpark(head=tiny.dspark(WIDE, tuple(range(27))), num_tokens=3, nodes=16, beam=4),
    lambda: proposers.PEagle(head=tiny.peagle(WIDE, tuple(range(27))), num_tokens=3, nodes=16, beam=4),
    lambda: proposers.PEagle(head=tiny.peagle(WIDE, tuple(range(27))), num_tokens=3)],
    ids=["EAGLE-3 tree", "EAGLE fixed tree", "Medusa tree", "Hydra++ tree", "DFlash tree", "DFlash", "DSpark tree",
         "P-EAGLE tree", "P-EAGLE"])
def test_rows_that_only_fill_the_vocabulary_up_are_never_drafted(make):
  """Qwen's heads count 151,936 rows where its tokenizer knows 151,669 ids."""
  target = WIDE.replace(config=dataclasses.replace(WIDE.config, num_tokens=9))
  proposer = make()
  state = drivers.start(target, proposer, [[1, 2, 3], [4, 5, 6, 7, 8]], max_new_tokens=8)
  tree, _ = starting.draft(target, proposer, state)
  assert (np.asarray(tree.size) > 1).all() and np.asarray(tree.tokens).max() < 9


def test_a_head_with_ids_that_the_target_never_emits_is_refused():
  target = WIDE.replace(config=dataclasses.replace(WIDE.config, num_tokens=9))
  for proposer in (proposers.Eagle(head=tiny.eagle(WIDE, (1, 2, 9))),
                   proposers.Eagle(head=tiny.eagle3(WIDE, (1, 2, 9))),
                   proposers.Medusa(head=tiny.medusa(WIDE, (1, 9))),
                   proposers.Hydra(head=tiny.hydra(WIDE, (1, 9))),
                   proposers.DSpark(head=tiny.dspark(WIDE, (1, 9)), num_tokens=3),
                   proposers.PEagle(head=tiny.peagle(WIDE, (1, 9)), num_tokens=3),
                   proposers.DFlash(head=tiny.dflash(WIDE, (1, 9)), num_tokens=3)):
    with pytest.raises(ValueError, match="drafts id 9, and the ids of this target are 0 to 8"):
      jax.eval_shape(lambda: proposer.init(target, 1, 64))  # known while tracing too


@pytest.mark.parametrize("name", ["EAGLE-3", "Medusa", "DFlash"])
def test_a_head_of_another_target_is_refused(name):
  """Wherever shapes tell; that features of one width are those of another basis (vllm-ascend 12886) they do not."""
  given = {"width": (dict(width=32), "for a target of 24 token ids and width 16, and this one has 24 and 32"),
           "ids": (dict(vocab_size=25, num_tokens=25), "24 token ids and width 16, and this one has 25 and 16"),
           "layers": (dict(layers=2), r"reads layers \(1, 2, 3\), and the target has 2")}
  for what, (changes, message) in given.items():
    if (name, what) != ("Medusa", "layers"):  # which reads none
      with pytest.raises(ValueError, match=message):
        HEADS[name].init(TARGET.replace(config=dataclasses.replace(TARGET.config, **changes)), 1, 64)


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "MTP", "Medusa", "Hydra++", "DFlash", "DSpark", "P-EAGLE"])
def test_a_request_that_leaves_no_draft_id_gets_no_draw(name):
  """There is no law to draw from: q would be no number, and verifiers only seem to get on with that."""
  left = sorted(set(range(24)) - set(IDS))
  proposer = HEADS[name].replace(drawing=DRAWN)
  params = sampling.SamplingParams(temperature=1.0, allowed_ids=left)
  state = drivers.start(TARGET, proposer, PROMPTS, params, max_new_tokens=8, verifier=verifiers.Block())
  tree, _ = starting.draft(TARGET, proposer, state)
  assert (np.asarray(tree.size) == 1).all()


def test_long_prompts_and_buckets_that_grow():
  """A prefill of two chunks, and a text that leaves its bucket of slots while its row drafts."""
  target = tiny.decoder(vocab=24, max_context=1024)
  proposer = proposers.Eagle(head=tiny.eagle3(target, IDS), num_tokens=3)
  prompt = (np.arange(240) * 7 % 23).tolist()
  wanted = drivers.generate(target, proposers.Plain(), [prompt], max_new_tokens=40)
  state = drivers.start(target, proposer, [prompt], max_new_tokens=40)
  while int(state.length[0]) < 262:
    state = drivers.advance(target, proposer, drivers.make_room(target, proposer, state), np.int32(1),
                            verifier=verifiers.Point())
  assert state.tokens.shape[1] == 512
  text = np.asarray(state.tokens[0, :int(state.length[0])]).tolist()
  assert text[240:] == wanted.token_ids[0][:len(text) - 240]
  anew = drivers.start(target, proposer, [text], max_new_tokens=280 - len(text))
  drafts = [drafts_of(starting.draft(target, proposer, given)[0], 0) for given in (state, anew)]
  assert drafts[0] == drafts[1] and len(drafts[0][0]) == 4


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE fixed tree", "EAGLE-3", "EAGLE-3 tree", "MTP", "MTP tree", "Medusa",
                                  "Hydra", "Hydra++", "Hydra++ tree", "DFlash", "JetSpec", "DSpark", "DSpark tree",
                                  "P-EAGLE", "P-EAGLE tree"])
def test_where_no_row_drafts_no_product_with_the_vocabulary_is_left(name):
  """Behind a lookup that has a draft a head costs nothing: its products stand inside of branches."""
  state = drivers.start(TARGET, HEADS[name], PROMPTS, max_new_tokens=NEW)
  outside = jax.make_jaxpr(decode.draft)(TARGET, HEADS[name], state).jaxpr
  names = [equation.primitive.name for equation in outside.eqns]
  assert "cond" in names and "dot_general" not in names
  sizes = [v.aval.size for e in outside.eqns for v in e.outvars if hasattr(v.aval, "size") and e.primitive.name in
           ("dot_general", "scatter", "exp")]
  assert not sizes or max(sizes) < 24 * len(PROMPTS)


def test_rules_of_chains_are_refused_for_trees():
  for make in (lambda rule: proposers.Medusa(head=MEDUSA, shape=static_trees.fixed((2, 1)), length=rule),
               lambda rule: proposers.Hydra(head=HYDRA, shape=static_trees.fixed((2, 1)), length=rule),
               lambda rule: proposers.DFlash(head=DFLASH, num_tokens=3, nodes=6, length=rule)):
    with pytest.raises(ValueError, match="Heuristic.* ends a chain"):
      make(length.Heuristic())


def test_trees_refuse_draws_and_depths_without_heads():
  with pytest.raises(ValueError, match="number of heads"):
    proposers.Medusa(head=MEDUSA, num_tokens=4)
  with pytest.raises(ValueError, match="draws a chain"):
    proposers.Medusa(head=MEDUSA, shape=static_trees.best_first((0.5, 0.2), 4, 2), drawing=DRAWN)
  with pytest.raises(ValueError, match="number of heads"):
    proposers.Hydra(head=HYDRA, shape=static_trees.fixed((1, 1, 1, 1)))
  with pytest.raises(ValueError, match="draws a chain"):
    proposers.Hydra(head=HYDRA, shape=static_trees.fixed((2, 1)), drawing=DRAWN)
  with pytest.raises(ValueError, match="places of the block"):
    proposers.DFlash(head=DFLASH, num_tokens=4)
  with pytest.raises(ValueError, match="draws a chain"):
    proposers.DFlash(head=DFLASH, num_tokens=3, nodes=6, drawing=DRAWN)
  with pytest.raises(ValueError, match="nodes=None: JetSpec drafts a tree"):
    proposers.JetSpec(head=DFLASH, num_tokens=3, nodes=None)
  with pytest.raises(ValueError, match="must be 1 to 3, the places of the block"):
    proposers.DSpark(head=DSPARK, num_tokens=4)
  with pytest.raises(ValueError, match="must be 1 to 3, the depths that the head was trained for"):
    proposers.PEagle(head=PEAGLE, num_tokens=4)
  with pytest.raises(ValueError, match="draws a chain"):
    proposers.PEagle(head=PEAGLE, num_tokens=3, nodes=6, drawing=DRAWN)
  for wrong, said in ((dict(confidence=1.0), "confidence=1.0"), (dict(confidence=0.5, nodes=6), "leave the tree out")):
    with pytest.raises(ValueError, match=said):
      proposers.DSpark(head=DSPARK, num_tokens=3, **wrong)
  with pytest.raises(ValueError, match="no confidence head"):
    proposers.DSpark(head=DSPARK.replace(confidence=None), num_tokens=3, confidence=0.5)
  with pytest.raises(ValueError, match="beam=0"):
    proposers.EagleTree(head=EAGLE3, beam=0)
  with pytest.raises(ValueError, match="a node has 5 children; at most 2"):
    few = tiny.eagle(TARGET, (3, 4))
    proposers.EagleFixedTree(head=few, parents=(0,) * 6).init(TARGET, 1, 64)
  for proposer in (HEADS["EAGLE"], HEADS["EAGLE-3"], HEADS["MTP"], HEADS["Medusa"], HEADS["Hydra++"], HEADS["DFlash"]):
    with pytest.raises(ValueError, match="width"):
      wide = TARGET.replace(config=dataclasses.replace(TARGET.config, width=32))
      proposer.init(wide, 1, 64)


def test_a_compiled_draft_of_a_head_never_leaves_the_device():
  for proposer in HEADS.values():
    state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW)
    text = jax.jit(decode.draft).lower(TARGET, proposer, state).as_text()
    assert not any(word in text for word in ("callback", "infeed", "outfeed", "send", "recv"))
