"""Every family of decoders beside Transformers: tiny random checkpoints and the values that it computes from them.

Windows are 8 tokens and texts 24 to 40, so that rings turn over several times.
"""
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import proposers
from specjax.checkpoints import families
from specjax.checkpoints import gguf_families
from specjax.models import windows
from specjax.models.decoder import Decoder

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
FOLDERS = {path.name: path for path in sorted((FIXTURES / "families").iterdir())}
GOLDEN = dict(np.load(FIXTURES / "golden_families.npz"))
SLOTS = 64

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(params=FOLDERS, scope="module")
def name(request):
  return request.param


@functools.cache
def loaded(name) -> Decoder:
  return specjax.load(str(FOLDERS[name]))[0]


@functools.partial(jax.jit, static_argnames="count")
def run(target, tokens, positions, mask, cache, count=None):
  out = target.forward(tokens, positions, mask, cache)
  taken = jnp.full(cache.length.shape, tokens.shape[1] if count is None else count, jnp.int32)
  return target.logits(out.hidden), cache.commit(out.in_flight, taken)


def close(logits, wanted):
  """The greatest error, relative to the greatest logit, as the parity table gives it."""
  error = np.abs(np.asarray(logits) - wanted).max() / np.abs(wanted).max()
  assert error < 2e-4, error


def causal(batch, width):
  return jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))


def chunks(target, texts, cache, width):
  """Logits of texts that are read `width` tokens at a time."""
  found = []
  for at in range(0, texts.shape[1], width):
    part = jnp.asarray(texts[:, at:at + width])
    positions = cache.length[:, None] + jnp.arange(part.shape[1], dtype=jnp.int32)[None]
    logits, cache = run(target, part, positions, causal(len(texts), part.shape[1]), cache)
    found.append(np.asarray(logits))
  return np.concatenate(found, 1), cache


def dirty(target, batch):
  """An empty cache with garbage in its slots."""
  return jax.tree.map(lambda x: x + 1e9 if x.ndim == 4 else x, target.init_cache(batch, SLOTS))


@pytest.mark.parametrize("width", [24, 11, 1])
def test_logits_are_those_of_transformers(name, width):
  """Whole, in chunks longer than a window, and token by token."""
  target, ids = loaded(name), GOLDEN[f"{name}_ids"]
  logits, cache = chunks(target, ids, dirty(target, 2), width)
  close(logits, GOLDEN[f"{name}_logits"])
  assert cache.length.tolist() == [24, 24]


def test_every_path_of_a_tree_is_a_text_of_its_own(name):
  """Rows of other lengths, and a tree of which both branches are texts that Transformers has seen."""
  target, ids, wanted = loaded(name), GOLDEN[f"{name}_ids"], GOLDEN[f"{name}_logits"]
  # Row 0 is text 0 up to 12, row 1 text 1 up to 17; row 2 is text 0 up to 12 again, alone in its length of chunks.
  cache = dirty(target, 3)
  lengths, rows = [12, 17, 12], [0, 1, 0]
  for at in range(0, 20, 5):
    part = np.stack([ids[row, at:at + 5] for row in rows])
    positions = cache.length[:, None] + jnp.arange(5, dtype=jnp.int32)[None]
    out = jax.jit(target.forward)(part, positions, causal(3, 5), cache)
    cache = cache.commit(out.in_flight, jnp.asarray([max(0, min(5, length - at)) for length in lengths], jnp.int32))
  assert cache.length.tolist() == lengths
  # Nodes: the root, a branch of other tokens, and the text's own tokens behind the root.
  true = np.stack([ids[row, length:length + 4] for row, length in zip(rows, lengths)])
  tokens = np.concatenate([true[:, :1], (true[:, 1:3] + 1) % 90 + 3, true[:, 1:]], 1)
  parents = [-1, 0, 1, 0, 3, 4]
  mask, depth = np.eye(6, dtype=bool), []
  for i, parent in enumerate(parents):
    mask[i] |= mask[parent] if parent >= 0 else False
    depth.append(0 if parent < 0 else depth[parent] + 1)
  positions = np.asarray(lengths)[:, None] + np.asarray(depth)[None]
  logits, _ = run(target, tokens, positions.astype(np.int32), np.broadcast_to(mask, (3, 6, 6)), cache)
  for i, (row, length) in enumerate(zip(rows, lengths)):
    close(logits[i][np.asarray([0, 3, 4, 5])], wanted[row, length:length + 4])
  # The other branch is the text in which it was committed.
  other = np.concatenate([ids[0, :12], tokens[0, :3]])[None]
  close(logits[0][2], chunks(target, other, dirty(target, 1), 15)[0][0, -1])


def test_the_two_detectors_over_five_windows(name, drafter):
  """One program is plain, always wrong, and knows the text: all write what Transformers writes, and go on alike."""
  target, wanted = loaded(name), GOLDEN[f"{name}_continuation"]
  prompts = GOLDEN[f"{name}_ids"].tolist()
  unknown = np.zeros((2, 48), np.int32)
  plain = specjax.generate(target, drafter(prompts, unknown, limit=0), prompts, max_new_tokens=48, eos_ids=())
  assert np.array_equal(np.asarray(plain.tokens)[:, :16], wanted)
  texts = np.asarray(plain.tokens)[:, :48]
  wrong = specjax.generate(target, drafter(prompts, texts, wrong_from=0), prompts, max_new_tokens=48, eos_ids=())
  knows = specjax.generate(target, drafter(prompts, texts), prompts, max_new_tokens=48, eos_ids=())
  assert np.array_equal(plain.tokens, wrong.tokens) and np.array_equal(plain.tokens, knows.tokens)
  assert wrong.counters.accepted_tokens.sum() == 0 < wrong.counters.drafted_tokens.sum()
  assert np.array_equal(knows.counters.accepted_tokens, knows.counters.drafted_tokens)
  sizes = [x.shape[3] for x in target.init_cache(1, SLOTS).keys]
  assert sizes == [SLOTS if target.config.window(i) is None else 8 for i in range(target.config.layers)]


@pytest.mark.parametrize("make", [
    pytest.param(lambda target: proposers.NGram(), id="ngram"),
    pytest.param(lambda target: proposers.EarlyExit(exit_layer=1), id="early_exit"),
    pytest.param(lambda target: proposers.DraftModel(model=target.keep((0,)), num_tokens=3), id="draft_model")])
def test_drafted_text_is_that_of_transformers(name, make):
  """Drafters of the family itself: its lowest layer, in the target and as a model with a cache of its own."""
  result = specjax.generate(loaded(name), make(loaded(name)), GOLDEN[f"{name}_ids"].tolist(), max_new_tokens=16)
  assert np.array_equal(np.asarray(result.tokens)[:, :16], GOLDEN[f"{name}_continuation"])


@pytest.mark.parametrize("name, draft", [("gemma3", "mistral"), ("mistral", "gemma2"), ("gpt2", "gpt_neox")])
def test_one_family_drafts_for_another(name, draft):
  """Draft models of other families, with rings and positions of their own."""
  proposer = proposers.DraftModel(model=loaded(draft), num_tokens=3)
  result = specjax.generate(loaded(name), proposer, GOLDEN[f"{name}_ids"].tolist(), max_new_tokens=16)
  assert np.array_equal(np.asarray(result.tokens)[:, :16], GOLDEN[f"{name}_continuation"])
  assert result.counters.drafted_tokens.sum() > 0


def test_what_a_window_sees():
  """Slots and nodes by their positions, beside the rule spelt out."""
  for window, slots, length in [(8, 8, 3), (8, 8, 29), (8, 6, 4), (3, 3, 100)]:
    seen = np.asarray(windows.seen_slots(jnp.asarray([length]), jnp.asarray([[length, length + 2]]), window, slots))
    for node, position in enumerate((length, length + 2)):
      held = [max((q for q in range(length) if q % window == slot), default=None) for slot in range(slots)]
      assert seen[0, node].tolist() == [q is not None and position - q < window for q in held]
  mask = jnp.asarray([[1, 1, 0, 1, 0, 1], [1, 0, 1, 0, 0, 0]], bool)[None]
  assert windows.seen_nodes(mask, 3)[0].tolist() == [[False, True, False, True, False, True],
                                                     [True, False, True, False, False, False]]


def test_the_readmes_table_is_what_is_here():
  """A row a model type, each with a fixture; the GGUF column names every architecture that is read."""
  text = (FIXTURES.parents[1] / "README.md").read_text(encoding="utf-8")
  decoders = text.partition("### Families")[2].partition("And one encoder-decoder")[0]
  rows = [line.split("|") for line in decoders.splitlines()
          if line.startswith("| `") and "model_type" not in line]
  kinds = {json.loads((path / "config.json").read_text())["model_type"] for path in FOLDERS.values()}
  assert {row[1].strip(" `") for row in rows} == kinds == set(families.FAMILIES)
  assert {row[3].split("`")[1] for row in rows if "`" in row[3]} == set(gguf_families.FAMILIES)
