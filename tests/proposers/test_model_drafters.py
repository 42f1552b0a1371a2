"""Draft models: every draft equals what plain NumPy drafts from the text alone, whatever happened in the steps before.

That holds the drafter's own cache to account: what it was fed, when, and what of its drafts was accepted. The drafter is
another dummy target, over so few ids that some of its drafts are accepted by chance.
"""
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import static_trees
from specjax import testing
from specjax import verifiers
from specjax.proposers import length
from specjax.sampling import SamplingParams
import verified_texts

pytestmark = pytest.mark.usefixtures("quick_compile")
VOCAB, EOS = 3, 2
TARGET = testing.DummyTarget(vocab=VOCAB, max_context=512)
MODEL = testing.DummyTarget(salt=np.uint32(50), vocab=VOCAB, max_context=512)
PROMPTS = [[1, 0, 1], [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 2, 0, 1], [1]]
NEW = [40, 33, 37]
SHAPE = (0, 0, 0, 1, 1, 2, 3)
CHAIN = proposers.DraftModel(model=MODEL, num_tokens=3)
TREE = proposers.DraftTree(model=MODEL, parents=SHAPE)
DYNAMIC = proposers.DynamicTree(model=MODEL, nodes=7, depth=3, beam=2)
MASK = 0  # a token that texts hold as well: it is a mask only where it stands behind them
PARD = proposers.Pard(model=MODEL, mask_id=MASK, num_tokens=3)
DRAFTERS = {"chain": CHAIN, "tree": TREE, "dynamic": DYNAMIC, "PARD": PARD, "PARD tree": PARD.replace(nodes=7, beam=2)}
draft = jax.jit(decode.draft)


# --- what a drafter must draft, from the text alone -----------------------------------------------------------------


def log_law(text):
  return np.log(dummy_law.softmax(dummy_law.logits(MODEL, [text])[0]))


def best(text, count):
  return np.argsort(-log_law(text), kind="stable")[:count].tolist()


def slow_chain(text, budget, eos, tokens=3, behind=lambda path: path):
  path = []
  while len(path) < min(tokens, budget - 1):
    token = best(text + behind(path), 1)[0]
    if token in eos:
      break
    path.append(token)
  return {tuple(path[:i + 1]) for i in range(len(path))}


def slow_tree(text, budget, eos):
  if budget < 2:
    return set()
  paths = [()]
  for node in range(1, len(SHAPE)):
    rank = sum(parent == SHAPE[node] for parent in SHAPE[1:node])
    above = paths[SHAPE[node]]
    paths.append((*above, best([*text, *above], 4)[rank]))
  return set(paths[1:])


def slow_dynamic(text, budget, eos, nodes=7, depth=3, beam=2, behind=lambda path: path):
  pool, level = [], [(0.0, ())]
  for _ in range(depth):
    found = []
    for score, path in level:
      seen = [*text, *behind(path)]
      law = log_law(seen)
      found += [(score + law[token], (*path, token)) for token in best(seen, beam) if token not in eos]
    pool += found
    level = sorted(found, key=lambda entry: -entry[0])[:beam]
  pool = [entry for entry in pool if len(entry[1]) < budget]
  return {path for _, path in sorted(pool, key=lambda entry: -entry[0])[:nodes - 1]}


masks = lambda path: [MASK] * len(path)  # in whose place a law of PARD sees masks
SLOW = {"chain": slow_chain, "tree": slow_tree, "dynamic": slow_dynamic,
        "PARD": functools.partial(slow_chain, behind=masks), "PARD tree": functools.partial(slow_dynamic, behind=masks)}


def paths_of(tree, row):
  """The texts of a row's drafted nodes."""
  paths = [()]
  for node in range(1, int(tree.size[row])):
    paths.append((*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])))
  return set(paths[1:])


@struct.dataclass
class Late(proposers.base.Defaults):
  """Lets a drafter sleep until a row has `since` tokens."""
  inner: object
  since: jax.Array

  max_nodes = property(lambda self: self.inner.max_nodes)
  max_depth = property(lambda self: self.inner.max_depth)

  def init(self, target, batch, capacity):
    return self.inner.init(target, batch, capacity)

  def propose(self, target, cache, state, context, keys):
    awake = context.length >= self.since
    return self.inner.propose(target, cache, state, context.replace(active=context.active & awake), keys)

  def observe(self, target, state, committed):
    return self.inner.observe(target, state, committed)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_draft_is_that_of_the_text_alone(name):
  """Row by row and step by step, from the start or after 1, 3 or 20 steps asleep; and the text is the plain one."""
  kinds = set()
  for asleep, eos in ((0, ()), (1, ()), (3, ()), (20, ()), (0, (EOS,))):
    plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=NEW, eos_ids=eos)
    since = jnp.asarray([len(p) + asleep for p in PROMPTS], jnp.int32)
    proposer = Late(inner=DRAFTERS[name], since=since)
    state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW, eos_ids=eos)
    while np.asarray(state.active).any():
      tree, _ = draft(TARGET, proposer, state)
      tokens, lengths, limits = (np.asarray(x) for x in (state.tokens, state.length, state.limit))
      for row in range(len(PROMPTS)):
        text = tokens[row, :lengths[row]].tolist()
        awake = bool(state.active[row]) and lengths[row] >= since[row]
        wanted = SLOW[name](text, int(limits[row] - lengths[row]), eos) if awake else set()
        assert paths_of(tree, row) == wanted, (asleep, row, text)
      before = np.asarray(state.counters.accepted_tokens), np.asarray(state.counters.drafted_tokens)
      state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=verifiers.Point())
      after = np.asarray(state.counters.accepted_tokens), np.asarray(state.counters.drafted_tokens)
      kinds |= {(int(a), d > 0) for a, d in zip(after[0] - before[0], after[1] - before[1])}
    for row, (begin, end) in enumerate(zip(np.asarray(state.start), np.asarray(state.length))):
      assert np.asarray(state.tokens)[row, begin:end].tolist() == plain.token_ids[row]
  assert {(0, True), (1, True), (2, True), (3, True)} <= kinds  # refused, in part, and accepted whole


def test_a_drafter_that_is_the_target_is_always_right():
  for proposer in (CHAIN, TREE, DYNAMIC):
    proposer = proposer.replace(model=TARGET)
    result = drivers.generate(TARGET, proposer, PROMPTS, max_new_tokens=NEW, eos_ids=())
    depth = proposer.max_depth
    full = [(new - 1) // (depth + 1) * depth for new in NEW]
    assert (result.counters.accepted_tokens >= full).all() and (result.counters.steps <= 12).all()


# --- draws ----------------------------------------------------------------------------------------------------------

BIG = verified_texts.TARGET
WAYS = {
    "chain": (proposers.DraftModel(model=BIG.replace(salt=np.uint32(5)), num_tokens=3,
                                   drawing=proposers.Drawing(sampled=True)),
              (verifiers.Rejection(), verifiers.Block(), verifiers.Traversal())),
    "independent": (proposers.DraftTree(model=BIG.replace(salt=np.uint32(5)), parents=SHAPE, children="independent"),
                    (verifiers.Recursive(), verifiers.Traversal(), verifiers.KSeq())),
    "without_replacement": (proposers.DraftTree(model=BIG.replace(salt=np.uint32(5)), parents=SHAPE,
                                                children="without_replacement"),
                            (verifiers.Recursive(), verifiers.Traversal())),
}


@pytest.mark.parametrize("name", WAYS)
def test_sampled_drafts_leave_the_law_of_the_target(name):
  proposer, members = WAYS[name]
  result, texts = verified_texts.run(proposer, members)
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()
  assert min(min(verified_texts.p_values(text)) for text in texts) > 1e-3


@pytest.mark.parametrize("name", WAYS)
def test_q_is_the_law_that_was_drawn_from(name):
  """Of the first token by counts over seeds, and everywhere against NumPy: after penalties and top-k of the request and
  the drafter's own temperature."""
  proposer, _ = WAYS[name]
  rows, asked = 2048, dict(temperature=1.4, top_k=3, repetition_penalty=1.3, frequency_penalty=0.2)
  proposer = proposer.replace(drawing=proposers.Drawing(sampled=True, temperature=1.4))
  params = SamplingParams(**{**asked, "temperature": 0.9})
  state = drivers.start(BIG, proposer, [[1, 2, 3]] * rows, params, max_new_tokens=9)
  tree = draft(BIG, proposer, state)[0]
  law = lambda path: dummy_law.law(proposer.model, [1, 2, 3, *path], 3, **asked)[0]
  q, tokens, parents = np.asarray(tree.q.dense(BIG.vocab)), np.asarray(tree.tokens), np.asarray(tree.parents)[0]
  for row in range(12):
    paths = [()]
    for node in range(1, tree.width):
      paths.append((*paths[parents[node]], tokens[row, node]))
    for node in set(parents[1:]):
      np.testing.assert_allclose(q[row, node], law(paths[node]), atol=1e-5)
  first = np.bincount(tokens[:, 1], minlength=BIG.vocab)
  assert dummy_law.p_value(first, law(())) > 1e-3
  children = [node for node in range(1, tree.width) if parents[node] == 0]
  if name == "independent":
    pairs = np.bincount(tokens[:, 1] * BIG.vocab + tokens[:, 2], minlength=BIG.vocab ** 2)
    assert dummy_law.p_value(pairs, np.outer(law(()), law(())).ravel()) > 1e-3
  if name == "without_replacement":
    p = law(())
    pairs = np.bincount(tokens[:, 1] * BIG.vocab + tokens[:, 2], minlength=BIG.vocab ** 2)
    left = np.divide(p[None], 1 - p[:, None]) * (1 - np.eye(len(p)))
    assert dummy_law.p_value(pairs, (p[:, None] * left).ravel()) > 1e-3
  assert len(children) == (1 if name == "chain" else 2)


# --- when not to draft ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_beyond_the_drafters_context_stop_drafting_and_are_counted(name):
  """vLLM 5342, SGLang 3574: a crash; here the text goes on, and the last drafts are those of a drafter without a limit."""
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=NEW, eos_ids=())
  limited = DRAFTERS[name].replace(model=MODEL.replace(max_context=24))
  result = drivers.generate(TARGET, limited, PROMPTS, max_new_tokens=NEW, eos_ids=())
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  # Steps behind the last place for a whole tree draft nothing and emit one token each.
  beyond, last = result.counters.steps_beyond_draft_context, limited.draft_context
  assert last == 24 if name == "chain" else last == 24 + 2 - limited.max_depth
  assert (beyond > 0).all() and (beyond <= np.asarray(NEW) + [len(p) for p in PROMPTS] - last).all()
  assert (result.counters.drafted_tokens > 0).all()
  free = drivers.generate(TARGET, DRAFTERS[name], PROMPTS, max_new_tokens=NEW, eos_ids=())
  assert not free.counters.steps_beyond_draft_context.any()


def test_a_rule_that_is_unsure_stops_the_chain():
  """The confidence is that of the drafter's law at the place of the next token."""
  rule = length.Confidence(threshold=jnp.float32(0.7))
  proposer = CHAIN.replace(length=rule)
  state = drivers.start(TARGET, proposer, [[i % 3, i // 3 % 3, i // 9] for i in range(27)], max_new_tokens=9,
                        eos_ids=())
  tree = draft(TARGET, proposer, state)[0]
  counts = set()
  for row in range(27):
    text, path = np.asarray(state.tokens)[row, :3].tolist(), []
    while len(path) < 3 and log_law(text + path).max() >= np.log(0.7):
      path.append(best(text + path, 1)[0])
    assert int(tree.size[row]) == 1 + len(path) and paths_of(tree, row) == {tuple(path[:i + 1]) for i in range(len(path))}
    counts.add(len(path))
  assert counts == {0, 1, 2, 3}


def test_a_heuristic_learns_from_acceptance():
  right = CHAIN.replace(model=TARGET, num_tokens=6, length=length.Heuristic())
  result = drivers.generate(TARGET, right, PROMPTS[:1], max_new_tokens=36, eos_ids=())
  assert result.counters.drafted_per_position[0].tolist() == [5] * 5 + [5]  # starts at full length and stays there
  wrong = CHAIN.replace(num_tokens=6, length=length.Heuristic())
  drafted = drivers.generate(TARGET, wrong, PROMPTS[:1], max_new_tokens=36, eos_ids=()).counters.drafted_per_position[0]
  assert drafted[0] > drafted[2] > drafted[5] >= 1


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_drafter_of_another_vocabulary_is_refused():
  for proposer in (CHAIN, TREE, DYNAMIC, PARD):
    proposer = proposer.replace(model=MODEL.replace(vocab=4))
    with pytest.raises(ValueError, match="drafter has 4 token ids and the target 3"):
      drivers.generate(TARGET, proposer, PROMPTS, max_new_tokens=4)


@pytest.mark.parametrize("make, message", [
    (lambda: proposers.DraftModel(model=MODEL, num_tokens=0), "num_tokens=0"),
    (lambda: proposers.DraftModel(model=MODEL, drawing=proposers.Drawing(temperature=0.5)), "draft temperature=0.5"),
    (lambda: proposers.DraftModel(model=MODEL, drawing=proposers.Drawing(sampled=True, top_p=0.0)), "draft top_p=0.0"),
    (lambda: proposers.DraftModel(model=MODEL, drawing=proposers.Drawing(sampled=True, temperature=-1.0)), "draft temp"),
    (lambda: proposers.DraftTree(model=MODEL, children="best"), "children='best'"),
    (lambda: proposers.DraftTree(model=MODEL, parents=(0,)), "two nodes or more"),
    (lambda: proposers.DraftTree(model=MODEL, parents=(0, 2, 0)), "a parent comes before"),
    (lambda: proposers.DraftTree(model=MODEL, drawing=proposers.Drawing(top_k=4)), "draft top_k=4"),
    (lambda: proposers.DynamicTree(model=MODEL, nodes=1), "nodes=1"),
    (lambda: proposers.DynamicTree(model=MODEL, beam=0), "beam=0"),
    (lambda: proposers.DynamicTree(model=MODEL, beam=9).init(TARGET, 1, 8), "beam=9"),
    (lambda: proposers.Pard(model=MODEL, mask_id=0, num_tokens=0), "num_tokens=0: it must be 1 or more"),
    (lambda: proposers.Pard(model=MODEL, mask_id=3), "mask_id=3: it must be 0 to 2"),
    (lambda: proposers.Pard(model=MODEL, mask_id=0, nodes=1), "nodes=1"),
    (lambda: proposers.Pard(model=MODEL, mask_id=0, nodes=4, drawing=proposers.Drawing(sampled=True)), "draws a chain"),
    (lambda: proposers.EarlyExit(exit_layer=0), "exit_layer=0"),
    (lambda: proposers.EarlyExit(exit_layer=1).init(TARGET, 1, 8), "DummyTarget has none"),
])
def test_bad_options(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_shapes_of_static_trees_are_taken_as_they_are():
  shape = static_trees.best_first([0.6, 0.2, 0.1], 8, 3)
  proposer = proposers.DraftTree(model=TARGET, parents=shape.parents)
  result = drivers.generate(TARGET, proposer, PROMPTS, max_new_tokens=NEW, eos_ids=())
  assert result.counters.accepted_tokens.sum() > 60


@functools.cache
def compiled(name):
  proposer = DRAFTERS[name]
  state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=NEW)
  return drivers.advance.lower(TARGET, proposer, state, np.int32(1), verifier=verifiers.Point()).compile().as_text()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_never_leaves_the_device(name):
  text = compiled(name)
  for word in ("callback", "infeed", "outfeed", "send(", "recv("):
    assert word not in text
