"""Training and drafting see the same inputs: on one text a head gives the same law by both paths.

Published trainers went wrong exactly here: a second shift, positions that stand still, labels off by one, a block that
sees its own answers (SpecForge 448, 424, 473, 427 and 455). Such a head trains well and drafts badly (SpecForge 533:
right 98 times in 100 in training, and 10 when served).
"""
import dataclasses
import heapq

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import starting
from specjax import static_trees
from specjax import verifiers
from specjax.proposers import base
from specjax.testing import tiny
from specjax.training import batches
from specjax.training import dflash
from specjax.training import dspark
from specjax.training import eagle
from specjax.training import eagle3
from specjax.training import hydra
from specjax.training import medusa
from specjax.training import mtp
from specjax.training import peagle
from specjax.training import shifts

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = tiny.decoder(layers=3, vocab=24, max_context=256)
LAYERS = (1, 2, 3)
SIZE = 40  # of every text, padded
IDS = np.array([0, 1, 2, 3, 5, 6, 7, 9, 10, 12, 13, 15, 16, 18, 20, 21])
PROMPTS = ([5, 1, 0, 7], [3, 9, 2, 11, 4, 4, 8, 1, 0, 6, 13, 22, 17], [14, 3])
STEPS = (0, 1, 4)  # of decoding before the draft that is looked at
RULE = verifiers.Rejection()
DRAWN = proposers.Drawing(sampled=True)


def noisy(head, seed=1):
  """With weights that nothing was left out of: zeros and identities hide shifts."""
  rng = np.random.default_rng(seed)
  shake = lambda x: (np.asarray(x) + 0.3 * rng.standard_normal(x.shape)).astype(x.dtype)
  return jax.tree.map(lambda x: shake(x) if np.issubdtype(x.dtype, np.floating) else x, head)


@struct.dataclass
class Asker(base.Defaults):
  """What the verify half of a step asks of a proposer: it is compiled once for all heads."""
  max_nodes, max_depth, features, samples = 4, 3, LAYERS, True


verify = jax.jit(lambda state, tree: decode.verify(TARGET, Asker(), RULE, state, tree))
commit = jax.jit(lambda proposer, state, outcome: decode.commit(TARGET, proposer, state, outcome))


def drafted(proposer, prompts=PROMPTS, steps=STEPS, least=1):
  """Text, drafted tokens and their laws f[N, V] of every row after each number of `steps`: the rows decode together."""
  found = []
  state = drivers.start(TARGET, proposer, prompts, sampling.SamplingParams(temperature=1.0), max_new_tokens=40,
                        verifier=RULE)
  for step in range(max(steps) + 1):
    tree, own = starting.draft(TARGET, proposer, state)
    if step in steps:
      text, length, drawn = jax.device_get((state.tokens, state.length, tree))
      for row, size in enumerate(drawn.size):
        assert size > least
        found.append((text[row, :length[row]].tolist(), drawn.tokens[row, 1:size].tolist(),
                      np.asarray(drawn.q.dense(TARGET.vocab_size))[row, :size - 1]))
    if step < max(steps):  # as `decode.step` goes on
      outcome = verify(state.replace(proposer=()), tree)
      state = commit(proposer, state.replace(proposer=own), outcome)
  return found


def as_batch(texts):
  """Texts as a batch, their features computed in one pass."""
  tokens = np.zeros((len(texts), SIZE), np.int32)  # padding must change nothing
  for row, text in enumerate(texts):
    tokens[row, :len(text)] = text
  features, hidden, top = compute(tokens)
  return batches.Batch(tokens=tokens, length=np.array([len(text) for text in texts], np.int32),
                       start=np.ones(len(texts), np.int32), features=features, hidden=hidden, top=top)


@jax.jit
def compute(tokens):
  count = tokens.shape[0]
  mask = jnp.tril(jnp.ones((count, SIZE, SIZE), bool))
  place = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), tokens.shape)
  out = TARGET.forward(tokens, place, mask, TARGET.init_cache(count, 1), features=LAYERS)
  return jnp.concatenate(out.features, -1), out.hidden, jnp.argmax(TARGET.logits(out.hidden), -1).astype(jnp.int32)


passes = jax.jit(eagle3.passes, static_argnums=3)
eagle_passes = jax.jit(eagle.passes, static_argnums=3)
mtp_passes = jax.jit(mtp.passes, static_argnums=3)
head_logits = jax.jit(medusa.head_logits)
hydra_logits = jax.jit(hydra.head_logits)
blocks = jax.jit(dflash.blocks)
places = jax.jit(dspark.places)
depths = jax.jit(peagle.depths)


def laws(logits, ids):
  """f[N, U] as laws over the target's ids."""
  share = np.exp(logits - logits.max(-1, keepdims=True))
  found = np.zeros((len(logits), TARGET.vocab_size))
  found[:, ids] = share / share.sum(-1, keepdims=True)
  return found


@pytest.mark.parametrize("change", [{}, {"recurs_normed": True}, {"residual_normed": True, "first_position": 1}],
                         ids=["plain", "recurs normed", "residual normed"])
def test_eagle3_sees_in_training_what_it_sees_in_drafting(change):
  head = noisy(eagle3.init(TARGET, IDS, LAYERS, jax.random.key(0)))
  head = head.replace(config=dataclasses.replace(head.config, **change))
  found = drafted(proposers.Eagle(head=head, num_tokens=3, drawing=DRAWN))
  if not change:
    # Alone, where features are written in another way, and behind a prefill of two chunks.
    found += drafted(proposers.Eagle(head=head, num_tokens=3, drawing=DRAWN), [sum(PROMPTS, [])], [0])
  logits = np.asarray(passes(head, TARGET.weights.embedding, as_batch([text + tokens for text, tokens, _ in found]), 3))
  for row, (text, tokens, q) in enumerate(found):
    entry = len(text) - 2  # the token behind it is the pending one
    np.testing.assert_allclose(laws(logits[:len(tokens), row, entry], IDS), q, atol=2e-5)


def test_eagle_sees_in_training_what_it_sees_in_drafting():
  """Two layers, the second with a norm: every layer must see the same of what was drafted before."""
  head = tiny.eagle(TARGET, tuple(IDS.tolist()))  # noise in all of it; with more, what recurs grows without bounds
  found = drafted(proposers.Eagle(head=head, num_tokens=3, drawing=DRAWN))
  batch = eagle.read(jax.device_get(as_batch([text + tokens for text, tokens, _ in found])))
  made = eagle_passes(head, shifts.frozen(TARGET, IDS), batch, 3)
  for row, (text, tokens, q) in enumerate(found):
    logits = np.stack([np.asarray(logits[row, len(text) - 2]) for _, logits in made[:len(tokens)]])
    np.testing.assert_allclose(laws(logits, IDS), q, atol=2e-5)


@pytest.mark.parametrize("gated", [False, True], ids=["Llama's layer", "Qwen3-Next's layer"])
def test_a_module_of_multi_token_prediction_sees_in_training_what_it_sees_in_drafting(gated):
  head = mtp.init(TARGET, IDS, jax.random.key(0))
  if gated:  # of which positions turn a part of each head
    c = head.config.shape
    head = head.replace(layer=head.layer.replace(
        gate=head.layer.attention_out.T, query_norm=jnp.ones(c.head_width), key_norm=jnp.ones(c.head_width)),
        config=dataclasses.replace(head.config, shape=dataclasses.replace(c, rotary_width=2)))
  head = noisy(head)
  proposer = proposers.Eagle(head=head, num_tokens=3, drawing=DRAWN)
  found = drafted(proposer)
  if not gated:
    found += drafted(proposer, [sum(PROMPTS, [])], [0])  # alone, and behind a prefill of two chunks
  made = mtp_passes(head, shifts.frozen(TARGET, IDS), as_batch([text + tokens for text, tokens, _ in found]), 3)
  for row, (text, tokens, q) in enumerate(found):
    logits = np.stack([np.asarray(logits[row, len(text) - 2]) for logits in made[:len(tokens)]])
    np.testing.assert_allclose(laws(logits, IDS), q, atol=2e-5)


def first_peagle(**changes):
  head = peagle.init(TARGET, IDS, LAYERS, layers=2, depths=3, mask_id=23, key=jax.random.key(0))
  config = dataclasses.replace(head.config, **changes)
  return head.replace(first=head.first.replace(config=config))


@pytest.mark.parametrize("change", [{}, {"residual_normed": True, "first_position": 1}],
                         ids=["plain", "residual normed"])
def test_peagle_sees_in_training_what_it_sees_in_drafting(change):
  """Two layers; behind entries that were padding in one pass, and a prefill of two chunks."""
  head = noisy(first_peagle(**change))
  found = drafted(proposers.PEagle(head=head, num_tokens=3, drawing=DRAWN))
  if not change:
    found += drafted(proposers.PEagle(head=head, num_tokens=3, drawing=DRAWN), [sum(PROMPTS, [])], [0])
    found += drafted(proposers.PEagle(head=head, num_tokens=1, drawing=DRAWN), steps=(0, 1))  # without masks
  logits = np.asarray(depths(head, TARGET.weights.embedding, as_batch([text + tokens for text, tokens, _ in found])))
  for row, (text, tokens, q) in enumerate(found):
    np.testing.assert_allclose(laws(logits[:len(tokens), row, len(text) - 2], IDS), q, atol=2e-5)


def test_a_mask_of_peagle_sees_nothing_behind_its_anchor():
  """Neither tokens nor features: its law is that of a text which ends there."""
  head = noisy(first_peagle())
  batch = as_batch([PROMPTS[1]] * 3)
  behind = np.arange(SIZE) >= 7
  batch = batch.replace(
      features=np.asarray(batch.features) + np.array([0, 1, 0])[:, None, None] * behind[:, None],
      tokens=(np.asarray(batch.tokens) + np.array([0, 0, 1])[:, None] * behind).astype(np.int32))
  for i, (one, features, tokens) in enumerate(np.asarray(depths(head, TARGET.weights.embedding, batch))):
    np.testing.assert_array_equal(one[:7], features[:7], err_msg=f"depth {i}")
    np.testing.assert_array_equal(one[:6], tokens[:6], err_msg=f"depth {i}")
    assert not np.allclose(one[7:], features[7:]) and not np.allclose(one[6], tokens[6])


@pytest.mark.parametrize("own", [False, True], ids=["target's head", "own matrix"])
def test_medusa_sees_in_training_what_it_sees_in_drafting(own):
  head = noisy(medusa.init(TARGET, IDS, 3, own_vocabulary=own))
  found = drafted(proposers.Medusa(head=head, num_tokens=3, drawing=DRAWN))
  batch = as_batch([text + tokens for text, tokens, _ in found])
  logits = np.asarray(head_logits(head, np.asarray(TARGET.weights.head)[IDS], batch))
  for row, (text, tokens, q) in enumerate(found):
    np.testing.assert_allclose(laws(logits[:len(tokens), row, len(text) - 2], IDS), q, atol=2e-5)


@pytest.mark.parametrize("prefix, own", [(True, False), (False, True)], ids=["prefix attention", "own matrix"])
def test_hydra_sees_in_training_what_it_sees_in_drafting(prefix, own):
  head = noisy(hydra.init(TARGET, IDS, 3, blocks=2, prefix=prefix, own_vocabulary=own))
  proposer = proposers.Hydra(head=head, num_tokens=3, drawing=DRAWN)
  found = drafted(proposer)
  if prefix:
    found += drafted(proposer, [sum(PROMPTS, [])], [0])  # alone, and behind a prefill of two chunks
  logits = hydra_logits(head, shifts.frozen(TARGET, IDS), as_batch([text + tokens for text, tokens, _ in found]))
  for row, (text, tokens, q) in enumerate(found):
    np.testing.assert_allclose(laws(np.asarray(logits)[:len(tokens), row, len(text) - 2], IDS), q, atol=2e-5)


def test_a_head_of_hydra_sees_no_hidden_state_and_no_token_behind_its_own():
  head = noisy(hydra.init(TARGET, IDS, 3, blocks=2))
  frozen, batch = shifts.frozen(TARGET, IDS), as_batch([PROMPTS[1]] * 3)
  behind = np.arange(SIZE) >= 7
  batch = batch.replace(
      hidden=np.asarray(batch.hidden) + np.array([0, 1, 0])[:, None, None] * behind[:, None],
      tokens=(np.asarray(batch.tokens) + np.array([0, 0, 1])[:, None] * behind).astype(np.int32))
  for i, (one, hidden, tokens) in enumerate(np.asarray(hydra_logits(head, frozen, batch))):
    np.testing.assert_array_equal(one[:7], hidden[:7], err_msg=f"head {i}")
    np.testing.assert_array_equal(one[:6 - i], tokens[:6 - i], err_msg=f"head {i}")
    assert not np.allclose(one[7:], hidden[7:]) and not np.allclose(one[6 - i], tokens[6 - i])


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
def test_dflash_sees_in_training_what_it_sees_in_drafting(causal):
  head = noisy(dflash.init(TARGET, IDS, LAYERS, layers=2, block=4, mask_id=23, key=jax.random.key(0), causal=causal))
  found = drafted(proposers.DFlash(head=head, num_tokens=3, drawing=DRAWN))
  anchors = np.array([[len(text) - 1, len(text) - 2] for text, _, _ in found], np.int32)  # another beside it
  given = dflash.Anchored(as_batch([text + tokens + [23] * 3 for text, tokens, _ in found]), anchors)
  hidden = np.asarray(blocks(head, TARGET.weights.embedding, given))
  logits = hidden[:, 0, 1:] @ np.asarray(TARGET.weights.head)[IDS].T
  for row, (_, tokens, q) in enumerate(found):
    np.testing.assert_allclose(laws(logits[row, :len(tokens)], IDS), q, atol=2e-5)


def test_dspark_sees_in_training_what_it_sees_in_drafting():
  """And its confidence head, which ends a chain where drafting it lost hope."""
  head = noisy(dspark.init(TARGET, IDS, LAYERS, layers=2, block=3, mask_id=23, rank=4, key=jax.random.key(0)))
  found = drafted(proposers.DSpark(head=head, num_tokens=3, drawing=DRAWN))
  anchors = np.array([[len(text) - 1, len(text) - 2] for text, _, _ in found], np.int32)
  given = dflash.Anchored(as_batch([text + tokens + [23] * 3 for text, tokens, _ in found]), anchors)
  hidden, previous = (x[:, 0] for x in places(head, TARGET.weights.embedding, given))
  logits = np.asarray(head.follow(hidden @ TARGET.weights.head[IDS].T, previous))
  for row, (_, tokens, q) in enumerate(found):
    np.testing.assert_allclose(laws(logits[row, :len(tokens)], IDS), q, atol=2e-5)
  chances = np.asarray(jax.nn.sigmoid(head.acceptance(hidden, previous)))
  middling = float(np.median(chances[:len(PROMPTS)]))
  short = drafted(proposers.DSpark(head=head, num_tokens=3, drawing=DRAWN, confidence=middling), steps=(0,), least=0)
  hopeful = [int(np.cumprod(chances[row, :len(tokens)] >= middling).sum()) for row, (_, tokens, _) in enumerate(found)]
  assert [tokens for _, tokens, _ in short] == [tokens[:n] for n, (_, tokens, _) in zip(hopeful, found[:len(PROMPTS)])]
  assert len(set(hopeful[:len(PROMPTS)])) > 1


def log_law(kind, head, text, path):
  """log q f[U] behind a text and drafted tokens, as training computes it."""
  batch, entry = as_batch([text + path]), len(text) - 2
  if kind == "eagle3":
    logits = passes(head, TARGET.weights.embedding, batch, 3)[len(path)][0, entry]
  elif kind == "eagle":
    logits = eagle_passes(head, shifts.frozen(TARGET, IDS), batch.replace(features=batch.hidden), 3)[len(path)][1][0, entry]
  elif kind == "mtp":
    logits = mtp_passes(head, shifts.frozen(TARGET, IDS), batch, 3)[len(path)][0, entry]
  elif kind == "peagle":
    logits = depths(head, TARGET.weights.embedding, batch)[len(path)][0, entry]
  elif kind == "hydra":
    logits = hydra_logits(head, shifts.frozen(TARGET, IDS), batch)[len(path)][0, entry]
  elif kind == "medusa":
    logits = head_logits(head, np.asarray(TARGET.weights.head)[IDS], batch)[len(path)][0, entry]
  elif kind == "dspark":
    hidden, previous = places(head, TARGET.weights.embedding, dflash.Anchored(batch, np.array([[entry + 1]], np.int32)))
    logits = head.follow(hidden[0, 0, len(path)] @ TARGET.weights.head[IDS].T, previous[0, 0, len(path)])
  else:
    hidden = blocks(head, TARGET.weights.embedding, dflash.Anchored(batch, np.array([[entry + 1]], np.int32)))
    logits = np.asarray(TARGET.weights.head)[IDS] @ np.asarray(hidden[0, 0, 1 + len(path)])
  return np.asarray(jax.nn.log_softmax(logits))


def grown(law, nodes=16, depth=3, beam=3):
  """EAGLE-2's tree over laws of paths, as the set of its paths."""
  pool, level = [], [(0.0, [])]
  for _ in range(depth):
    found = []
    for score, path in level:
      log_q = law(path)
      found += [(score + log_q[i], [*path, int(IDS[i])]) for i in np.argsort(-log_q)[:beam]]
    pool, level = pool + found, sorted(found, reverse=True)[:beam]
  return {tuple(path) for _, path in sorted(pool, reverse=True)[:nodes - 1]}


def opened(law, nodes=17, depth=3, beam=3):
  """JetSpec's tree, by its heap: the best node is opened and gets all its children, as long as there is room."""
  found, heap = [], [(0.0, 0, ())]
  while heap and len(found) < nodes - 1:
    score, _, path = heapq.heappop(heap)
    if len(path) < depth:
      log_q = law(list(path))
      for i in np.argsort(-log_q)[:min(beam, nodes - 1 - len(found))]:
        found.append((*path, int(IDS[i])))
        heapq.heappush(heap, (score - log_q[i], len(found), found[-1]))
  return set(found)


def shaped(law, shape):
  """A fixed shape filled with the choices of each rank."""
  paths = [[]]
  for parent, rank in zip(shape.parents[1:], shape.ranks[1:]):
    paths.append([*paths[parent], int(IDS[np.argsort(-law(paths[parent]))[rank]])])
  return set(map(tuple, paths[1:]))


SHAPE = static_trees.best_first((0.5, 0.3, 0.1), 8, 3)
TREES = {  # kind: first weights and the proposer of a tree, of SHAPE or grown
    "eagle3": (lambda: eagle3.init(TARGET, IDS, LAYERS, jax.random.key(0)),
               lambda head: proposers.EagleTree(head=head, nodes=16, depth=3, beam=3)),
    "eagle": (lambda: eagle.init(TARGET, IDS, jax.random.key(0)),
              lambda head: proposers.EagleFixedTree(head=head, parents=SHAPE.parents)),
    "mtp": (lambda: mtp.init(TARGET, IDS, jax.random.key(0)),
            lambda head: proposers.EagleTree(head=head, nodes=16, depth=3, beam=3)),
    "medusa": (lambda: medusa.init(TARGET, IDS, 3), lambda head: proposers.Medusa(head=head, shape=SHAPE)),
    "hydra": (lambda: hydra.init(TARGET, IDS, 3, blocks=2), lambda head: proposers.Hydra(head=head, shape=SHAPE)),
    "dflash": (lambda: dflash.init(TARGET, IDS, LAYERS, layers=2, block=4, mask_id=23, key=jax.random.key(0)),
               lambda head: proposers.DFlash(head=head, num_tokens=3, nodes=16, beam=3)),
    "jetspec": (lambda: dflash.init(TARGET, IDS, LAYERS, layers=2, block=4, mask_id=23, key=jax.random.key(0),
                                    causal=True),
                lambda head: proposers.JetSpec(head=head, num_tokens=3, nodes=17, beam=3)),
    "dspark": (lambda: dspark.init(TARGET, IDS, LAYERS, layers=2, block=3, mask_id=23, rank=4, key=jax.random.key(0)),
               lambda head: proposers.DSpark(head=head, num_tokens=3, nodes=16, beam=3)),
    "peagle": (first_peagle, lambda head: proposers.PEagle(head=head, num_tokens=3, nodes=16, beam=3))}


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_is_made_of_the_laws_of_its_paths(kind):
  """Each node behind the features and tokens of its own ancestors, not of a neighbour in the beam (SGLang 8726)."""
  first, propose = TREES[kind]
  head = noisy(first())
  proposer = propose(head)
  state = drivers.start(TARGET, proposer, PROMPTS, max_new_tokens=40)
  tree = jax.device_get(starting.draft(TARGET, proposer, state)[0])
  for row, text in enumerate(PROMPTS):
    law = lambda path: log_law(kind, head, text, path)
    paths = [()]
    for node in range(1, tree.size[row]):
      paths.append((*paths[tree.parents[row, node]], int(tree.tokens[row, node])))
    assert set(paths[1:]) == (shaped(law, SHAPE) if kind in ("eagle", "medusa", "hydra") else
                              opened(law) if kind == "jetspec" else grown(law))
    assert max(map(len, paths)) == 3  # from the second level on parents differ


def test_a_dflash_block_sees_nothing_of_what_it_is_asked_for():
  head = noisy(dflash.init(TARGET, IDS, LAYERS, layers=2, block=4, mask_id=23, key=jax.random.key(0)))
  text = PROMPTS[1]
  texts = [text, text[:7] + [1] * (len(text) - 7), text[:5] + [1] + text[6:]]
  one, behind, before = blocks(head, TARGET.weights.embedding,
                               dflash.Anchored(as_batch(texts), np.full((3, 1), 6, np.int32)))
  np.testing.assert_array_equal(one, behind)
  assert not np.allclose(one, before)


def test_a_pass_of_eagle3_sees_no_feature_behind_its_entry():
  head = noisy(eagle3.init(TARGET, IDS, LAYERS, jax.random.key(0)))
  batch = as_batch([PROMPTS[1]] * 2)
  batch = batch.replace(features=batch.features + (np.arange(2)[:, None] * (np.arange(SIZE) >= 7))[..., None])
  for i, (one, two) in enumerate(np.asarray(passes(head, TARGET.weights.embedding, batch, 3))):
    np.testing.assert_array_equal(one[:7], two[:7], err_msg=f"pass {i}")
    assert not np.allclose(one[7:], two[7:])
