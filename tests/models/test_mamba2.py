"""Mamba-2 beside Transformers: logits, trees, and the state that only accepted tokens enter.

The tiny checkpoints have one group of heads and a convolution over 4 tokens, and two groups and 3 tokens. Convolutions
reach from every node of a tree into the committed text, so that a tap of a node that is no ancestor shows.
"""
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drivers
from specjax import proposers
from specjax import verifiers
from specjax.models import ssd
from specjax.models.mamba2 import Mamba2
from specjax.proposers import layer_search
from specjax.sampling import SamplingParams
from specjax.testing import tiny

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
GOLDEN = dict(np.load(FIXTURES / "golden_recurrent.npz"))
NAMES = ("mamba2", "mamba2_groups")
GROUPS = "mamba2_groups"
SLOTS = 64
# Two branches below a root, each in the other's way: parents come first, and neighbours are strangers.
PARENTS = (-1, 0, 0, 1, 2, 3, 4, 6)
TRUE, OTHER = (0, 2, 4, 6, 7), (0, 1, 3, 5)

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(params=NAMES, scope="module")
def name(request):
  return request.param


@functools.cache
def loaded(name) -> Mamba2:
  return specjax.load(str(FIXTURES / "recurrent" / name))[0]


@jax.jit
def run(target, tokens, positions, mask, cache, count):
  out = target.forward(tokens, positions, mask, cache)
  return target.logits(out.hidden), cache.commit(out.in_flight, count), out.in_flight


def close(logits, wanted):
  error = np.abs(np.asarray(logits) - wanted).max() / np.abs(wanted).max()
  assert error < 2e-4, error


def chunks(target, texts, cache, width, lengths=None):
  """Logits of texts that are read `width` tokens at a time, of each row up to its length, and the cache."""
  lengths = np.full(len(texts), texts.shape[1]) if lengths is None else np.asarray(lengths)
  found, mask = [], jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (len(texts), width, width))
  for at in range(0, texts.shape[1], width):
    part = np.pad(texts[:, at:at + width], ((0, 0), (0, max(0, at + width - texts.shape[1]))))
    positions = cache.length[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    count = jnp.asarray(np.clip(lengths - at, 0, min(width, texts.shape[1] - at)), jnp.int32)
    logits, cache, _ = run(target, part, positions, mask, cache, count)
    found.append(np.asarray(logits))
  return np.concatenate(found, 1)[:, :texts.shape[1]], cache


def seen(parents):
  """Ancestor-or-self of a tree, and the depths of its nodes."""
  mask = np.eye(len(parents), dtype=bool)
  for i, parent in enumerate(parents):
    mask[i] |= mask[parent] if parent >= 0 else False
  return mask, mask.sum(1) - 1


@functools.cache
def tree(name):
  """Three rows behind 12, 17 and 1 tokens, and a tree of which one branch is what Transformers has seen next."""
  target, rows, lengths = loaded(name), [0, 1, 0], [12, 17, 1]
  ids = GOLDEN[f"{name}_ids"]
  _, cache = chunks(target, ids[rows], target.init_cache(3, SLOTS), 6, lengths)
  assert cache.length.tolist() == lengths
  tokens = np.stack([(ids[row, :8] + length) % 90 + 3 for row, length in zip(rows, lengths)])
  for i, (row, length) in enumerate(zip(rows, lengths)):
    tokens[i, list(TRUE)] = ids[row, length:length + 5]
  mask, depth = seen(PARENTS)
  positions = (np.asarray(lengths)[:, None] + depth[None]).astype(np.int32)
  return cache, tokens, positions, np.broadcast_to(mask, (3, 8, 8)), [
      GOLDEN[f"{name}_logits"][row, length:length + 5] for row, length in zip(rows, lengths)]


def same_state(cache, other, tolerance=2e-5):
  """Whether the states of two caches agree, within rounding."""
  near = lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * np.abs(np.asarray(b)).max()
  return all(jax.tree.leaves(jax.tree.map(near, cache.layers, other.layers)))


@pytest.mark.parametrize("width", [24, 11, 1])
def test_logits_are_those_of_transformers(name, width):
  """Whole, in chunks of which the last is not full, and token by token; a row alone is the row among others."""
  target, ids = loaded(name), GOLDEN[f"{name}_ids"]
  logits, cache = chunks(target, ids, target.init_cache(2, SLOTS), width)
  close(logits, GOLDEN[f"{name}_logits"])
  assert cache.length.tolist() == [24, 24]
  if width == 11:
    close(chunks(target, ids[1:], target.init_cache(1, SLOTS), width)[0], GOLDEN[f"{name}_logits"][1:])


def test_every_path_of_a_tree_is_a_text_of_its_own(name):
  target, (cache, tokens, positions, mask, wanted) = loaded(name), tree(name)
  logits, after, _ = run(target, tokens, positions, mask, cache, jnp.zeros(3, jnp.int32))
  for row in range(3):
    close(logits[row][np.asarray(TRUE)], wanted[row])
  ids = GOLDEN[f"{name}_ids"]
  other = np.concatenate([ids[:1, :12], tokens[:1, OTHER]], 1)
  close(logits[0][np.asarray(OTHER)], chunks(target, other, target.init_cache(1, SLOTS), 16)[0][0, 12:])
  # A pass moves nothing: where no node is counted the state is what it was, to the bit.
  assert after.length.tolist() == [12, 17, 1]
  jax.tree.map(np.testing.assert_array_equal, after.layers, cache.layers)


@pytest.mark.parametrize("fault", ["taps of the nodes in front", "all nodes seen"])
def test_a_tree_that_is_read_as_a_chain_is_another_text(monkeypatch, fault):
  """What the test above must see: a convolution over neighbours in the tree's order, a state that all nodes enter."""
  target, (cache, tokens, positions, mask, wanted) = loaded(GROUPS), tree(GROUPS)
  chain = jnp.broadcast_to(jnp.tril(jnp.ones((8, 8), bool)), (3, 8, 8))
  if fault == "all nodes seen":
    mask = chain
  else:
    honest = ssd.sources
    monkeypatch.setattr(ssd, "sources", lambda mask, taps: honest(chain, taps))
  out = target.forward(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(mask), cache)
  logits = np.asarray(target.logits(out.hidden))
  assert all(np.abs(logits[row, [4, 6, 7]] - wanted[row][2:]).max() > 0.1 for row in range(3))


def test_nodes_of_earlier_passes_are_ancestors_like_others(name):
  """The tree level by level, in a block that is filled as the levels come, is the tree in one pass."""
  target, (cache, tokens, positions, mask, _) = loaded(name), tree(name)
  wanted, _, whole = run(target, tokens, positions, mask, cache, jnp.zeros(3, jnp.int32))
  block, forward = cache.empty_block(8), jax.jit(target.forward)
  # Levels of one width, so that one program is enough: two nodes each, of which the first pass repeats the root.
  for nodes in ((0, 0), (1, 2), (3, 4), (5, 6), (7, 7)):
    place = np.asarray(nodes)
    before = mask[:, place] & (np.arange(8) < place[0])
    own = np.broadcast_to(np.eye(2, dtype=bool), (3, 2, 2))
    out = forward(tokens[:, place], positions[:, place], np.concatenate([before, own], 2), cache, before=block)
    close(target.logits(out.hidden), np.asarray(wanted)[:, place])
    block = block.put(out.in_flight.narrow(len(set(nodes))), jnp.int32(nodes[0]))
  for new, old in zip(jax.tree.leaves(block), jax.tree.leaves(whole)):
    np.testing.assert_allclose(new, old, atol=2e-5)


def test_commit_carries_every_row_as_far_as_it_got(name):
  """Nothing, a part and all of a path: as reading it one by one, whatever the nodes behind hold."""
  target, (cache, tokens, positions, mask, _) = loaded(name), tree(name)
  _, _, block = run(target, tokens, positions, mask, cache, jnp.zeros(3, jnp.int32))
  counts = np.asarray([5, 2, 0])
  path = block.take(jnp.broadcast_to(jnp.asarray(TRUE), (3, 5)))
  spoilt = np.arange(5)[None] >= counts[:, None]
  poison = lambda x: jnp.where(spoilt.reshape(3, 5, *[1] * (x.ndim - 2)), jnp.nan, x)
  after = cache.commit(jax.tree.map(poison, path), jnp.asarray(counts, jnp.int32))
  _, wanted = chunks(target, tokens[:, TRUE], cache, 1, counts)
  assert after.length.tolist() == wanted.length.tolist() == [17, 19, 1] and same_state(after, wanted)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2], b[2]), after.layers, cache.layers)
  assert not same_state(after, cache.commit(path, jnp.asarray([5, 3, 0], jnp.int32)))  # one node more shows


def _advanced(target, proposer, prompts, params=None, new=24):
  """The end of a batch, with its cache."""
  state = drivers.start(target, proposer, prompts, params, max_new_tokens=new, eos_ids=())
  return drivers.advance(target, proposer, state, np.int32(99), verifier=verifiers.Point())


def test_recurrent_state_is_never_of_rejected_nodes(drafter):
  """vLLM 39273: drafts rejected at every place, in rows of other lengths, leave the state that of the text alone."""
  target, ids = loaded(GROUPS), GOLDEN[f"{GROUPS}_ids"]
  prompts = [ids[0].tolist(), ids[1, :7].tolist(), ids[1].tolist()]
  plain = _advanced(target, drafter(prompts, np.zeros((3, 24), int), limit=0), prompts)
  texts = np.stack([np.asarray(plain.tokens)[row, len(prompt):len(prompt) + 24] for row, prompt in enumerate(prompts)])
  assert np.array_equal(texts[0, :16], GOLDEN[f"{GROUPS}_continuation"][0])
  for face in (dict(wrong_from=0), dict(wrong_from=[0, 2, 5]), dict()):
    state = _advanced(target, drafter(prompts, texts, **face), prompts)
    assert np.array_equal(state.tokens, plain.tokens)
    # The last token of a row is never read; a row that ended in the middle of a draft has read no more than others.
    assert state.cache.length.tolist() == plain.cache.length.tolist() == [47, 30, 47]
    assert same_state(state.cache, plain.cache, 1e-4)
  whole = np.zeros((3, 47), int)
  for row, (prompt, text) in enumerate(zip(prompts, texts)):
    whole[row, :len(prompt) + 23] = [*prompt, *text[:-1]]
  _, fresh = chunks(target, whole, target.init_cache(3, SLOTS), 47, [47, 30, 47])
  assert same_state(plain.cache, fresh, 1e-4)
  _, stray = chunks(target, np.where(np.arange(47) == 40, 5, whole), target.init_cache(3, SLOTS), 47, [47, 30, 47])
  assert not same_state(plain.cache, stray, 1e-2)


PARAMS = SamplingParams(temperature=[0.0, 0.8, 1.1], top_p=[1.0, 0.9, 1.0], top_k=[0, 0, 9], seed=[3, 4, 5])


def test_the_two_detectors(drafter):
  """One program is plain, always wrong, and knows the text, greedy and drawn, in rows of other lengths."""
  target, ids = loaded(GROUPS), GOLDEN[f"{GROUPS}_ids"]
  prompts = [ids[0].tolist(), ids[1, :7].tolist(), ids[1].tolist()]
  go = lambda texts, **face: specjax.generate(target, drafter(prompts, texts, **face), prompts, PARAMS,
                                              max_new_tokens=16, eos_ids=())
  plain = go(np.zeros((3, 16), int), limit=0)
  assert np.array_equal(plain.tokens[0], GOLDEN[f"{GROUPS}_continuation"][0])
  wrong, mixed, knows = go(plain.tokens, wrong_from=0), go(plain.tokens, wrong_from=[2, 99, 0]), go(plain.tokens)
  for result in (wrong, mixed, knows):
    assert np.array_equal(result.tokens, plain.tokens)
  assert wrong.counters.accepted_tokens.sum() == 0 < wrong.counters.drafted_tokens.min()
  assert np.array_equal(knows.counters.accepted_tokens, knows.counters.drafted_tokens)
  assert knows.counters.steps.tolist() == [3] * 3 and wrong.counters.steps.tolist() == [16] * 3


@pytest.mark.parametrize("make, steps", [
    pytest.param(lambda: proposers.NGram(min_ngram=1), 16, id="ngram"),
    pytest.param(lambda: proposers.EarlyExit(exit_layer=2), 16, id="early_exit"),
    pytest.param(lambda: proposers.DynamicTree(model=loaded(GROUPS), nodes=7, depth=3, beam=2), 5, id="grown_tree"),
    pytest.param(lambda: proposers.Hierarchical(small=proposers.NGram(min_ngram=1), middle=loaded(GROUPS),
                                                num_tokens=3), 4, id="middle_model")])
def test_drafted_text_is_that_of_transformers(make, steps):
  """Also where the drafter carries a state of its own; one that is the target is right wherever it drafts enough."""
  result = specjax.generate(loaded(GROUPS), make(), GOLDEN[f"{GROUPS}_ids"].tolist(), max_new_tokens=16)
  assert np.array_equal(result.tokens, GOLDEN[f"{GROUPS}_continuation"])
  assert result.counters.drafted_tokens.sum() > 0 and result.counters.steps.max() <= steps


def test_heads_read_its_features():
  """A head of another model drafts badly; the text stays."""
  llama = specjax.load(str(FIXTURES / "tiny_llama_untied"))[0]
  proposer = proposers.Eagle(head=tiny.eagle3(llama, tuple(range(3, 60))), num_tokens=3)
  result = specjax.generate(loaded(GROUPS), proposer, GOLDEN[f"{GROUPS}_ids"].tolist(), max_new_tokens=16)
  assert np.array_equal(result.tokens, GOLDEN[f"{GROUPS}_continuation"]) and result.counters.drafted_tokens.min() > 30


def test_a_recurrent_model_drafts_for_a_decoder():
  golden = np.load(FIXTURES / "golden_tiny.npz")
  proposer = proposers.DraftModel(model=loaded("mamba2"), num_tokens=3)
  llama = specjax.load(str(FIXTURES / "tiny_llama"))[0]
  result = specjax.generate(llama, proposer, golden["tiny_llama_ids"].tolist(), max_new_tokens=16)
  assert np.array_equal(result.tokens, golden["tiny_llama_continuation"]) and result.counters.drafted_tokens.sum() > 0


def test_a_draft_model_that_is_the_target_is_always_right():
  """At any temperature: it draws by the target's law; and its greedy text is Transformers'."""
  proposer = proposers.DraftModel(model=loaded(GROUPS), num_tokens=3, drawing=proposers.Drawing(sampled=True))
  result = specjax.generate(loaded(GROUPS), proposer, GOLDEN[f"{GROUPS}_ids"].tolist(),
                            SamplingParams(temperature=[0.0, 1.2], seed=[1, 2]), max_new_tokens=16, eos_ids=(),
                            verifier=verifiers.Rejection())
  assert np.array_equal(result.tokens[0], GOLDEN[f"{GROUPS}_continuation"][0])
  assert not np.array_equal(result.tokens[1], GOLDEN[f"{GROUPS}_continuation"][1])
  assert np.array_equal(result.counters.accepted_tokens, result.counters.drafted_tokens)
  assert result.counters.drafted_tokens.min() == 12


def test_the_size_of_a_cache_does_not_depend_on_the_text():
  target = loaded("mamba2")
  short, long = target.init_cache(2, 64), target.init_cache(2, 1 << 16)
  size = lambda cache: sum(x.nbytes for x in jax.tree.leaves(cache))
  assert size(short) == size(long) and long.slots == 1 << 16 and short.grow(128).slots == 128
  assert short.of_layers((1,)).layers == short.layers[1:] and short.cross is None
  with pytest.raises(ValueError, match="a cache of 64 slots cannot become one of 32"):
    short.grow(32)
  block = short.empty_block(3)
  assert block.nodes == 3 and block.widen(5).nodes == 5 and block.narrow(2).nodes == 2


def test_refusals():
  target = loaded("mamba2")
  with pytest.raises(ValueError, match=r"layers=\(2,\): .*0 to 1"):
    target.keep((2,))
  with pytest.raises(ValueError, match="the search for layers is for models with attention.*Mamba2"):
    layer_search.search(target, [[5, 6, 7]], 8, 8)
  tokens = jnp.zeros((1, 1), jnp.int32)
  with pytest.raises(ValueError, match=r"features=\(3,\): layer 3 is not run here"):
    target.forward(tokens, tokens, jnp.ones((1, 1, 1), bool), target.init_cache(1, 8), features=(3,))
