"""T5, BART, Marian, Whisper and kin beside Transformers: the encoder runs once; padding and drafts change nothing.

Inputs are 80, 17 and 41 tokens, more than the distances that T5's own buckets tell apart. BART's decoder begins with
two tokens, mBART's with a language, and Marian never writes the token that its decoder begins with. Whisper hears 80
frames, which are 40 inputs.
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
from specjax.checkpoints import bart
from specjax.checkpoints import t5
from specjax.checkpoints import whisper
from specjax.models import encoder_decoder
from specjax.models import relative

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
GOLDEN = dict(np.load(FIXTURES / "golden_encoder_decoder.npz"))
NAMES = ("t5", "t5_v11", "bart", "mbart", "marian", "whisper")

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(params=NAMES, scope="module")
def name(request):
  return request.param


@functools.cache
def loaded(name):
  return specjax.load(str(FIXTURES / "encoder_decoder" / name))[0]


def prompts_of(name):
  if name == "whisper":
    return list(GOLDEN["whisper_inputs"])
  return [row[:length].tolist() for row, length in zip(GOLDEN[f"{name}_inputs"], GOLDEN[f"{name}_lengths"])]


def read(target, name, rows=(0, 1, 2), size=80, garbage=0):
  """A cache that has read the inputs of some rows, with garbage in all other slots and behind the inputs."""
  inputs, lengths = GOLDEN[f"{name}_inputs"][list(rows), :size], GOLDEN[f"{name}_lengths"][list(rows)]
  if name != "whisper":
    inputs = np.where(np.arange(inputs.shape[1])[None] < lengths[:, None], inputs, garbage)
  cache = jax.tree.map(lambda x: x + 1e9 if x.ndim == 4 else x, target.init_cache(len(rows), 128, 96))
  return jax.jit(target.encode)(cache, jnp.asarray(inputs), jnp.asarray(lengths))


@functools.partial(jax.jit, static_argnames="count")
def run(target, tokens, positions, mask, cache, count=None):
  out = target.forward(tokens, positions, mask, cache)
  taken = jnp.full(cache.length.shape, tokens.shape[1] if count is None else count, jnp.int32)
  return target.logits(out.hidden), cache.commit(out.in_flight, taken)


def close(logits, wanted):
  """Up to ids that are never emitted, whose logits Transformers leaves as they are."""
  logits = np.asarray(logits)
  never = np.isneginf(logits)
  rows = {tuple(np.flatnonzero(row).tolist()) for row in never.reshape(-1, never.shape[-1])}
  assert len(rows) == 1 and rows <= {(), (0,), (90, 94)}
  logits, wanted = np.where(never, 0, logits), np.where(never, 0, wanted)
  error = np.abs(logits - wanted).max() / np.abs(wanted).max()
  assert error < 2e-4, error


def chunks(target, texts, cache, width):
  """Logits of the decoder's texts, read `width` tokens at a time."""
  found = []
  for at in range(0, texts.shape[1], width):
    part = jnp.asarray(texts[:, at:at + width])
    positions = cache.length[:, None] + jnp.arange(part.shape[1], dtype=jnp.int32)[None]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((part.shape[1],) * 2, bool)), (len(texts), *(part.shape[1],) * 2))
    logits, cache = run(target, part, positions, mask, cache)
    found.append(np.asarray(logits))
  return np.concatenate(found, 1), cache


@pytest.mark.parametrize("width", [30, 11, 1])
def test_logits_are_those_of_transformers(name, width):
  """Three rows of other lengths of inputs; the decoder's text whole, in chunks and token by token."""
  target = loaded(name)
  logits, cache = chunks(target, GOLDEN[f"{name}_ids"], read(target, name), width)
  close(logits, GOLDEN[f"{name}_logits"])
  assert cache.length.tolist() == (GOLDEN[f"{name}_lengths"] + 30).tolist() and cache.written.tolist() == [30, 30, 30]


def test_a_row_alone_is_the_row_among_others(name):
  """Neither the neighbours, nor what stands behind the inputs, nor how many slots there are for them."""
  target = loaded(name)
  for row, size in ((1, 17), (2, 64)):
    cache = read(target, name, rows=(row,), size=size, garbage=row + 40)
    close(chunks(target, GOLDEN[f"{name}_ids"][[row]], cache, 30)[0], GOLDEN[f"{name}_logits"][[row]])


def test_every_path_of_a_tree_is_a_text_of_its_own(name):
  """A tree behind 9, 3 and 12 of the decoder's tokens; one branch is the text that Transformers has seen, the other is
  compared with a pass over itself. Its nodes are far enough down that distances in flight fill several buckets."""
  target, ids = loaded(name), GOLDEN[f"{name}_ids"]
  lengths = np.asarray([9, 3, 12])
  cache = read(target, name)
  begin = cache.length
  for at in range(0, 12, 4):
    positions = cache.length[:, None] + jnp.arange(4, dtype=jnp.int32)[None]
    part = np.take_along_axis(ids, np.asarray(positions - begin[:, None]), axis=1)
    out = jax.jit(target.forward)(part, positions, jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (3, 4, 4)), cache)
    cache = cache.commit(out.in_flight, jnp.asarray(np.clip(lengths - at, 0, 4), jnp.int32))
  assert cache.written.tolist() == lengths.tolist()
  true = np.stack([ids[row, length:length + 8] for row, length in enumerate(lengths)])
  tokens = np.concatenate([true[:, :1], (true[:, 1:3] + 1) % 90 + 3, true[:, 1:]], 1)
  parents = [-1, 0, 1, 0, 3, 4, 5, 6, 7, 8]
  mask, depth = np.eye(10, dtype=bool), []
  for i, parent in enumerate(parents):
    mask[i] |= mask[parent] if parent >= 0 else False
    depth.append(0 if parent < 0 else depth[parent] + 1)
  positions = np.asarray(cache.length)[:, None] + np.asarray(depth)[None]
  logits, _ = run(target, tokens, positions.astype(np.int32), np.broadcast_to(mask, (3, 10, 10)), cache)
  for row, length in enumerate(lengths):
    close(np.asarray(logits)[row, [0, *range(3, 10)]], GOLDEN[f"{name}_logits"][row, length:length + 8])
  other = np.concatenate([ids[0, :9], tokens[0, :3]])[None]
  close(logits[0][2], chunks(target, other, read(target, name, rows=(0,)), 12)[0][0, -1])


@pytest.mark.parametrize("name", ["t5", "t5_v11", "bart"])
def test_nodes_of_an_earlier_pass_count_their_distance(name):
  """A chain run node by node, the earlier nodes in flight, is the chain in one pass."""
  target, ids = loaded(name), GOLDEN[f"{name}_ids"]
  cache = read(target, name)
  block = cache.empty_block(8)
  forward = jax.jit(target.forward)
  for i in range(8):
    mask = jnp.broadcast_to(jnp.append(jnp.arange(8) < i, True), (3, 1, 9))
    out = forward(ids[:, i:i + 1], cache.length[:, None] + i, mask, cache, before=block)
    block = block.put(out.in_flight, jnp.int32(i))
    close(target.logits(out.hidden)[:, 0], GOLDEN[f"{name}_logits"][:, i])


@pytest.mark.parametrize("name", ["t5", "t5_v11"])
def test_buckets_are_those_of_transformers(name):
  config, away = loaded(name).config, np.arange(-200, 201)
  bucket = lambda count, distance: relative.buckets(count, config.max_distance)[
      np.clip(distance, 0, config.max_distance)]
  both, backward = GOLDEN[f"{name}_buckets"]
  half = config.buckets // 2
  assert np.array_equal(bucket(half, np.abs(away)) + half * (away > 0), both)
  assert np.array_equal(bucket(config.buckets, -away), backward)
  with pytest.raises(ValueError, match="8 buckets for distances up to 4"):
    relative.buckets(8, 4)


def test_the_two_detectors(name, drafter):
  """One program is plain, always wrong, and knows the text: all write what Transformers writes."""
  target, wanted, prompts = loaded(name), GOLDEN[f"{name}_continuation"], prompts_of(name)
  shown = [[-1] * 40] * 3 if name == "whisper" else prompts
  opened = [[*prompt, *target.opening] for prompt in shown]  # a row's text, as drafters see it
  plain = specjax.generate(target, drafter(opened, wanted * 0, limit=0), prompts, max_new_tokens=24)
  assert np.array_equal(plain.tokens, wanted)
  wrong = specjax.generate(target, drafter(opened, wanted, wrong_from=0), prompts, max_new_tokens=24)
  knows = specjax.generate(target, drafter(opened, wanted), prompts, max_new_tokens=24)
  assert np.array_equal(wrong.tokens, wanted) and np.array_equal(knows.tokens, wanted)
  assert wrong.counters.accepted_tokens.sum() == 0 < wrong.counters.drafted_tokens.sum()
  assert np.array_equal(knows.counters.accepted_tokens, knows.counters.drafted_tokens)
  assert knows.counters.steps.max() == 4  # 24 tokens, 7 a step


@pytest.mark.parametrize("proposer", [
    pytest.param(lambda: ("t5_v11", proposers.NGram(min_ngram=1)), id="ngram"),
    pytest.param(lambda: ("t5_v11", proposers.EarlyExit(exit_layer=1)), id="early_exit"),
    pytest.param(lambda: ("t5_v11", proposers.LayerSkip(skipped=(0,))), id="layer_skip"),
    pytest.param(lambda: ("t5_v11", proposers.DraftModel(model=loaded("t5"), num_tokens=3)), id="draft_model"),
    pytest.param(lambda: ("t5_v11", proposers.DraftModel(model=specjax.load(str(FIXTURES / "tiny_llama"))[0],
                                                         num_tokens=3)), id="decoder_only_draft_model"),
    pytest.param(lambda: ("t5_v11", proposers.DynamicTree(model=loaded("t5"), nodes=8, depth=3, beam=2)),
                 id="dynamic_tree"),
    pytest.param(lambda: ("t5_v11", proposers.Hierarchical(small=proposers.NGram(min_ngram=1, num_tokens=3),
                                                           middle=loaded("t5"), num_tokens=3)), id="hierarchical"),
    pytest.param(lambda: ("whisper", proposers.NGram(min_ngram=1)), id="whisper-ngram"),
    pytest.param(lambda: ("bart", proposers.EarlyExit(exit_layer=1)), id="bart-early_exit"),
    pytest.param(lambda: ("marian", proposers.DraftModel(model=loaded("marian").keep((1,)), num_tokens=3)),
                 id="marian-draft_model")])
def test_drafted_text_is_that_of_transformers(proposer):
  name, proposer = proposer()
  result = specjax.generate(loaded(name), proposer, prompts_of(name), max_new_tokens=24)
  assert np.array_equal(result.tokens, GOLDEN[f"{name}_continuation"])
  assert result.counters.drafted_tokens.sum() > 0


def test_a_drafter_with_an_encoder_that_is_the_target_is_always_right():
  """So its own encoder has read the same inputs, of every row."""
  target = loaded("t5_v11")
  result = specjax.generate(target, proposers.DraftModel(model=target, num_tokens=3), prompts_of("t5_v11"),
                            max_new_tokens=24)
  assert np.array_equal(result.tokens, GOLDEN["t5_v11_continuation"])
  assert np.array_equal(result.counters.accepted_tokens, result.counters.drafted_tokens)
  assert result.counters.drafted_tokens.min() > 12


def test_encoders_run_once_a_request():
  counts = {"target": 0, "drafter": 0}

  class Counted(encoder_decoder.EncoderDecoder):
    """Counts runs of its encoder, not traces."""

    def encode(self, cache, tokens, inputs):
      name = "target" if self.config.layers == 2 and self.config.encoder_layers == 3 else "drafter"

      def count(_):
        counts[name] += 1
      jax.debug.callback(count, tokens[0, 0])
      return encoder_decoder.EncoderDecoder.encode(self, cache, tokens, inputs)

  counted = lambda model: Counted(model.weights, model.config)
  jax.tree_util.register_pytree_node(Counted, lambda x: ((x.weights,), x.config), lambda c, w: Counted(w[0], c))
  proposer = proposers.DraftModel(model=counted(loaded("t5")), num_tokens=3)
  result = specjax.generate(counted(loaded("t5_v11")), proposer, prompts_of("t5_v11"), max_new_tokens=24)
  jax.effects_barrier()
  assert counts == {"target": 1, "drafter": 1} and result.counters.steps.max() > 3
  assert 0 < result.timings.encode_seconds < result.timings.first_token


def test_lookup_finds_the_encoders_inputs():
  """A draft that stands in the inputs only; behind them are the start token and what has been written."""
  target = loaded("t5")
  state = drivers.start(target, proposers.NGram(), [[20, 21, 22, 23, 24, 25]], max_new_tokens=20,
                        written=[[40, 21, 22]])
  assert state.tokens[0, :10].tolist() == [20, 21, 22, 23, 24, 25, 0, 40, 21, 22]
  assert state.length.tolist() == [10] and state.cache.length.tolist() == [9] and state.cache.written.tolist() == [3]
  drafted = lambda source: proposers.NGram(source=source, num_tokens=3).propose(
      target, state.cache, (), state.context(), state.keys)[0]
  assert drafted("text").tokens[0, :4].tolist() == [22, 23, 24, 25]
  assert drafted("output").size.tolist() == [1]


def test_what_has_been_written_is_read_as_if_it_had_been_generated():
  target, wanted = loaded("t5_v11"), GOLDEN["t5_v11_continuation"]
  state = drivers.start(target, proposers.Plain(), prompts_of("t5_v11"), max_new_tokens=4,
                        written=[row[:n].tolist() for row, n in zip(wanted, (20, 3, 7))])
  state = drivers.advance(target, proposers.Plain(), state, np.int32(4), verifier=specjax.verifiers.Point())
  for row, (start, n) in enumerate(zip(np.asarray(state.start), (20, 3, 7))):
    assert state.tokens[row, start:start + 4].tolist() == wanted[row, n:n + 4].tolist()


def test_long_inputs_leave_the_decoder_few_slots():
  """300 inputs: no slot of the decoder's own keys is kept for 256 of them, also after the cache has grown."""
  target = loaded("t5")
  cache = target.init_cache(1, 512, 512, 256)
  assert cache.keys[0].shape[3] == 256 and cache.slots == 512 and cache.grow(1024).keys[0].shape[3] == 768
  assert cache.of_layers((1,)).cross.keys[0].shape[3] == 512
  prompt = np.random.default_rng(0).integers(3, 95, 300).tolist()
  plain = specjax.generate(target, proposers.Plain(), [prompt], max_new_tokens=230, eos_ids=())
  whole = target.encode(target.init_cache(1, 640, 320), jnp.asarray([prompt + [7] * 20]), jnp.asarray([300]))
  logits = chunks(target, np.asarray([[0, *plain.token_ids[0][:-1]]]), whole, 230)[0][0]
  chosen = logits[np.arange(230), plain.token_ids[0]]
  assert (logits.max(-1) - chosen).max() < 1e-3  # each the best, but for rounding


def test_penalties_count_what_the_decoder_wrote():
  """As in Transformers: ids that only the encoder has read are not penalised."""
  target = loaded("t5")
  first = int(GOLDEN["t5_continuation"][0, 0])
  prompt = prompts_of("t5")[0]
  assert first not in target.opening
  params = specjax.SamplingParams(repetition_penalty=1e4)
  result = specjax.generate(target, proposers.Plain(), [[*prompt, first]], params, max_new_tokens=6)
  free = specjax.generate(target, proposers.Plain(), [[*prompt, first]], max_new_tokens=1)
  assert result.tokens[0, 0] == free.tokens[0, 0]
  assert len(set(result.token_ids[0])) == 6  # none twice


def test_refusals():
  target = loaded("t5")
  with pytest.raises(ValueError, match="prompt 0 is empty"):
    drivers.start(target, proposers.Plain(), [[]])
  with pytest.raises(ValueError, match="written holds 2 lists of ids for 1 prompts"):
    drivers.start(target, proposers.Plain(), [[5]], written=[[1], [2]])
  llama = specjax.load(str(FIXTURES / "tiny_llama"))[0]
  with pytest.raises(ValueError, match=r"begins with \(0,\) behind its encoder's inputs.*target have \(\)"):
    drivers.start(llama, proposers.DraftModel(model=target), [[5]])
  with pytest.raises(ValueError, match="layers=.*0 to 1"):
    target.keep((2,))


def test_encoder_and_decoder_hold_100_tokens_each():
  """Each counts its own: 100 inputs, and behind BART's opening of two tokens 98 others."""
  target = loaded("bart")
  start = lambda size, new, **more: drivers.start(target, proposers.Plain(), [[5] * size], max_new_tokens=new, **more)
  assert start(100, 98).limit.tolist() == [200]
  with pytest.raises(ValueError, match="prompt 0 has 101 tokens, and the target's encoder reads at most 100; shorten"):
    start(101, 1)
  with pytest.raises(ValueError, match="max_new_tokens=99 in row 0: .*at most 100 tokens and begins with 2; .* to 98"):
    start(1, 99)
  with pytest.raises(ValueError, match="begins with 5; lower it to 95"):
    start(1, 96, written=[[7, 8, 9]])
  assert target.max_context == 200


def test_a_language_is_chosen_by_what_the_decoder_begins_with():
  """mBART with another opening reads it as Transformers reads it, and writes another text."""
  target = loaded("mbart").with_opening(1, 95)
  assert target.opening == (1, 95) and loaded("mbart").opening == (95,)
  first = [GOLDEN["mbart_inputs"][0].tolist()]
  result = specjax.generate(target, proposers.Plain(), first, max_new_tokens=6)
  text = np.asarray([[1, 95, *result.token_ids[0][:-1]]])
  logits = chunks(target, text, read(target, "mbart", rows=(0,)), 7)[0][0, 1:]
  assert logits.argmax(-1).tolist() == result.token_ids[0] != GOLDEN["mbart_continuation"][0, :6].tolist()
  with pytest.raises(ValueError, match=r"opening=\(96,\): ids are 0 to 95"):
    target.with_opening(96)
  with pytest.raises(ValueError, match=r"opening=\(\): the decoder begins with 1 to 99 tokens"):
    target.with_opening()


def test_ids_that_are_never_emitted_are_not_drawn():
  """Marian's padding, with a bias that would draw it every time; its logit is -inf in what others read as well."""
  target = loaded("marian")
  params = specjax.SamplingParams(temperature=1.0, logit_bias={0: 1e4})
  result = specjax.generate(target, proposers.Plain(), prompts_of("marian"), params, max_new_tokens=12)
  assert 0 not in result.tokens and target.config.banned_ids == (0,)


def test_ids_that_may_not_come_first():
  """Transformers' text, which the detectors hold, begins with none of them, though one has the greatest logit."""
  target = loaded("whisper")
  greatest = GOLDEN["whisper_logits"][:, len(target.opening) - 1].argmax(-1)
  assert set(greatest.tolist()) & set(target.config.banned_first)
  assert not set(GOLDEN["whisper_continuation"][:, 0].tolist()) & set(target.config.banned_first)
  assert set(GOLDEN["whisper_continuation"][:, 1:].ravel().tolist()) & set(target.config.banned_first)
  behind = drivers.start(target, proposers.Plain(), prompts_of("whisper"), max_new_tokens=3,
                         written=GOLDEN["whisper_continuation"][:, :2].tolist())
  behind = drivers.advance(target, proposers.Plain(), behind, np.int32(3), verifier=specjax.verifiers.Point())
  assert behind.tokens[:, 46:49].tolist() == GOLDEN["whisper_continuation"][:, 2:5].tolist()


def test_sounds_that_are_refused():
  target = loaded("whisper")
  start = lambda prompt, proposer=proposers.Plain(), **more: drivers.start(target, proposer, [prompt], **more)
  heard = np.zeros((8, 80), np.float32)
  for wrong, named in (([5, 6], r"int64\[2\]"), (heard[:, :79], r"float32\[8, 79\]"),
                       (heard * np.nan, "finite floats")):
    with pytest.raises(ValueError, match=f"prompt 0 is .*{named}"):
      start(wrong)
  with pytest.raises(ValueError, match="max_new_tokens=57 in row 0: .*at most 60 tokens and begins with 4; .* to 56"):
    start(heard, max_new_tokens=57)
  for proposer in (proposers.DraftModel(model=target), proposers.DraftModel(model=loaded("t5"))):
    with pytest.raises(ValueError, match="this target or drafter hears sound"):
      start(heard, proposer=proposer, max_new_tokens=4)
  with pytest.raises(ValueError, match="this target or drafter hears sound"):
    drivers.start(loaded("t5"), proposers.DraftModel(model=target), [[5]], max_new_tokens=4)


def test_the_table_of_families_is_complete():
  text = (FIXTURES.parents[1] / "README.md").read_text(encoding="utf-8")
  rows = text.split("And one encoder-decoder")[1].split("\n## ")[0].splitlines()
  assert {row.split("`")[1] for row in rows if row.startswith("| `") and "model_type" not in row} == {
      *t5.FAMILIES, *bart.FAMILIES, *whisper.FAMILIES}
