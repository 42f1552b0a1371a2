"""A decoder with random weights: a dense one in NumPy, chunks and steps against it, and the two detectors.

Three tiny configurations hold every part that the families differ in.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import verifiers
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.weights import DecoderWeights
from specjax.models.weights import LayerWeights
from specjax.sampling import SamplingParams

COMMON = dict(vocab_size=40, num_tokens=37, width=16, layers=2, head_width=6, mlp_width=24, max_context=512, eos_ids=())
CONFIGS = {
    "llama": DecoderConfig(**COMMON, heads=4, kv_heads=2, norm_eps=1e-5, rope_theta=10000.0),
    "qwen2": DecoderConfig(**COMMON, heads=3, kv_heads=1, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True, tied=False,
                           family="qwen2"),
    "interleaved": DecoderConfig(**COMMON, heads=2, kv_heads=2, norm_eps=1e-5, rope_theta=500.0,
                                 rope_layout="interleaved"),
}
PROMPTS = [[1, 2, 3, 4, 5], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6] * 3]
NEW = 20


def make_decoder(c: DecoderConfig, seed=0, dtype=np.float32) -> Decoder:
  rng = np.random.default_rng(seed)
  matrix = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 0.4, dtype)
  norm = lambda: jnp.asarray(1 + 0.2 * rng.standard_normal(c.width), dtype)
  rows = (c.heads + 2 * c.kv_heads) * c.head_width
  layers = tuple(LayerWeights(
      attention_norm=norm(), qkv=matrix(rows, c.width), qkv_bias=matrix(rows) if c.qkv_bias else None,
      attention_out=matrix(c.width, c.heads * c.head_width), mlp_norm=norm(), gate_up=matrix(2 * c.mlp_width, c.width),
      down=matrix(c.width, c.mlp_width)) for _ in range(c.layers))
  embedding, head = matrix(c.vocab_size, c.width), None if c.tied else matrix(c.vocab_size, c.width)
  weights = DecoderWeights(embedding=embedding, layers=layers, final_norm=norm(), head=head)
  # Rows of the head beyond the tokenizer's ids would win every draw if they were not cut off.
  loud = lambda x: x.at[c.num_tokens:].set(x[:c.vocab_size - c.num_tokens] * 50)
  return Decoder(weights=weights.replace(embedding=loud(embedding), head=None if c.tied else loud(head)), config=c)


def dense_logits(target: Decoder, text) -> np.ndarray:
  """The textbook forward pass over a whole text in float64: [tokens, num_tokens]."""
  c, w = target.config, jax.tree.map(lambda x: np.asarray(x, np.float64), target.weights)
  norm = lambda x, weight: x / np.sqrt((x ** 2).mean(-1, keepdims=True) + c.norm_eps) * weight
  count, size = len(text), c.head_width
  frequency = c.rope_theta ** (-np.arange(size // 2) * 2 / size)
  turn = np.exp(1j * np.arange(count)[:, None] * frequency)

  def rotate(x):
    first, second = (slice(0, size // 2), slice(size // 2, None)) if c.rope_layout == "half" else (
        slice(0, None, 2), slice(1, None, 2))
    turned, out = (x[:, first] + 1j * x[:, second]) * turn, np.empty_like(x)
    out[:, first], out[:, second] = turned.real, turned.imag
    return out

  x = w.embedding[text]
  for layer in w.layers:
    qkv = norm(x, layer.attention_norm) @ layer.qkv.T + (0 if layer.qkv_bias is None else layer.qkv_bias)
    head = lambda i: qkv[:, i * size:(i + 1) * size]
    mixed = []
    for h in range(c.heads):
      k = h // (c.heads // c.kv_heads)
      scores = rotate(head(h)) @ rotate(head(c.heads + k)).T / np.sqrt(size)
      scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
      scores = np.exp(scores - scores.max(-1, keepdims=True))
      mixed.append(scores / scores.sum(-1, keepdims=True) @ head(c.heads + c.kv_heads + k))
    x = x + np.concatenate(mixed, -1) @ layer.attention_out.T
    gate, up = np.split(norm(x, layer.mlp_norm) @ layer.gate_up.T, 2, -1)
    x = x + gate / (1 + np.exp(-gate)) * up @ layer.down.T
  return (norm(x, w.final_norm) @ (w.embedding if w.head is None else w.head).T)[:, :c.num_tokens]


@functools.partial(jax.jit, static_argnames="with_logits")
def forward(target, tokens, positions, mask, cache, with_logits=True):
  out = target.forward(tokens, positions, mask, cache)
  return out, target.logits(out.hidden) if with_logits else None


@pytest.fixture(params=CONFIGS, scope="module")
def target(request):
  return make_decoder(CONFIGS[request.param])


def test_one_pass_is_the_dense_forward(target):
  """Two rows at once, from an empty cache that holds garbage."""
  texts = np.random.default_rng(1).integers(0, 37, (2, 14)).astype(np.int32)
  garbage = jax.tree.map(lambda x: x + 1e9 if x.ndim == 4 else x, target.init_cache(2, 32))
  positions = jnp.broadcast_to(jnp.arange(14, dtype=jnp.int32), (2, 14))
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((14, 14), bool)), (2, 14, 14))
  out, logits = forward(target, texts, positions, mask, garbage)
  for row in range(2):
    np.testing.assert_allclose(logits[row], dense_logits(target, texts[row]), atol=1e-4)
  c = target.config
  assert logits.shape == (2, 14, 37) and logits.dtype == jnp.float32
  assert out.in_flight.keys[0].shape == (2, c.kv_heads, c.head_width, 14)
  assert out.in_flight.values[-1].shape == (2, c.kv_heads, 14, c.head_width)


def test_chunks_and_a_tree_are_the_dense_forward(target):
  """A ragged prefix committed in chunks, then a tree behind it: each node is a text of its own."""
  rng = np.random.default_rng(2)
  texts = [rng.integers(0, 37, length).tolist() for length in (13, 6)]
  cache = jax.tree.map(lambda x: x + 1e9 if x.ndim == 4 else x, target.init_cache(2, 32))
  causal = jnp.broadcast_to(jnp.tril(jnp.ones((5, 5), bool)), (2, 5, 5))
  for at in (0, 5, 10):
    chunk = [text[at:at + 5] for text in texts]
    tokens = jnp.asarray([part + [36] * (5 - len(part)) for part in chunk], jnp.int32)
    positions = cache.length[:, None] + jnp.arange(5, dtype=jnp.int32)[None]
    out, _ = forward(target, tokens, positions, causal, cache)
    cache = cache.commit(out.in_flight, jnp.asarray([len(part) for part in chunk], jnp.int32))
  assert cache.length.tolist() == [13, 6]
  nodes, parents = rng.integers(0, 37, (2, 5)).astype(np.int32), [0, 0, 0, 1, 3]
  paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
  assert all(paths[i][-2] == parents[i] for i in range(1, 5))
  mask = np.zeros((2, 5, 5), bool)
  for node, path in enumerate(paths):
    mask[:, node, path] = True
  depth = np.array([len(path) - 1 for path in paths])
  positions = cache.length[:, None] + jnp.asarray(depth, jnp.int32)
  _, logits = forward(target, nodes, positions, mask, cache)
  for row, text in enumerate(texts):
    for node, path in enumerate(paths):
      wanted = dense_logits(target, text + nodes[row, path].tolist())[-1]
      np.testing.assert_allclose(logits[row, node], wanted, atol=1e-4)


PARAMS = SamplingParams(temperature=[0.0, 0.8, 1.1], top_p=[1.0, 0.9, 1.0], top_k=[0, 0, 9], seed=[3, 4, 5])


def test_the_two_detectors(target, drafter):
  """Always wrong gives the plain text and accepts nothing; the self drafter is accepted 1.0; rows may differ."""
  plain = drivers.generate(target, proposers.Plain(), PROMPTS, PARAMS, max_new_tokens=NEW).tokens
  assert plain.max() < 37 and len(set(plain.ravel().tolist())) > 5
  go = lambda **face: drivers.generate(target, drafter(PROMPTS, plain, num_tokens=3, **face), PROMPTS, PARAMS,
                                       max_new_tokens=NEW)
  same, wrong, mixed, narrow = go(), go(wrong_from=0), go(wrong_from=[2, 99, 0]), go(limit=1)
  for result in (same, wrong, mixed, narrow):
    np.testing.assert_array_equal(result.tokens, plain)
  assert same.counters.accepted_tokens.tolist() == same.counters.drafted_tokens.tolist() == [15] * 3
  assert wrong.counters.accepted_tokens.tolist() == [0] * 3 and wrong.counters.steps.tolist() == [NEW] * 3
  assert mixed.counters.steps.tolist() == [7, 5, NEW] and narrow.counters.steps.tolist() == [10] * 3


def test_greedy_text_is_that_of_the_dense_forward(target):
  row = drivers.generate(target, proposers.Plain(), PROMPTS, PARAMS, max_new_tokens=NEW).tokens[0].tolist()
  logits = dense_logits(target, PROMPTS[0] + row)[len(PROMPTS[0]) - 1:-1]
  two = np.sort(logits)[:, -2:]
  assert (two[:, 1] - two[:, 0]).min() > 1e-4  # no near tie decides this test
  assert logits.argmax(-1).tolist() == row


# --- one configuration is enough for what follows -------------------------------------------------------------------

LLAMA = CONFIGS["llama"]


@pytest.mark.usefixtures("quick_compile_here")
def test_a_row_alone_and_the_end_of_the_context(drafter):
  """A batch of one over the bucket of 256 slots up to the last slot of the context."""
  target = make_decoder(dataclasses.replace(LLAMA, max_context=300))
  prompt = np.random.default_rng(3).integers(0, 37, 251).tolist()
  params = SamplingParams(temperature=0.9, seed=1)
  plain = drivers.generate(target, proposers.Plain(), [prompt], params, max_new_tokens=49)
  assert plain.lengths.tolist() == [49]
  for wrong_from in (99, 0, 2):
    proposer = drafter([prompt], plain.tokens, wrong_from=wrong_from, num_tokens=3)
    result = drivers.generate(target, proposer, [prompt], params, max_new_tokens=49)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert result.counters.accepted_tokens[0] == 2 * (49 // 3)


def test_swapped_weights_do_not_compile(drafter):
  outputs, sizes = [], []
  for seed in (0, 1, 2):
    target = make_decoder(LLAMA, seed)
    outputs.append(drivers.generate(target, proposers.Plain(), PROMPTS, max_new_tokens=NEW).tokens.tolist())
    sizes.append(drivers.compiled_programs())
  assert sizes[0] == sizes[1] == sizes[2] and outputs[0] != outputs[1] != outputs[2]


@pytest.fixture(scope="module")
def compiled_step():
  """The compiled loop of a decoder whose cache, 2048 slots in 6 layers, is most of what it holds."""
  c = DecoderConfig(**{**COMMON, "layers": 6, "max_context": 2048}, heads=4, kv_heads=2, norm_eps=1e-5,
                    rope_theta=10000.0)
  target, proposer = make_decoder(c), proposers.NGram(num_tokens=3)
  state = drivers.start(target, proposer, [PROMPTS[0]], max_new_tokens=2000)
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 2048 - x.shape[1])))
  state = state.replace(tokens=pad(state.tokens), drafted=pad(state.drafted), cache=state.cache.grow(2048))
  cache_bytes = sum(x.nbytes for x in state.cache.keys + state.cache.values)
  return drivers.advance.lower(target, proposer, state, np.int32(4), verifier=verifiers.Point()).compile(), cache_bytes


def test_the_step_holds_one_cache(compiled_step):
  """The cache is donated, written in place, and no branch of the width switch copies it."""
  compiled, cache_bytes = compiled_step
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= cache_bytes
  assert memory.output_size_in_bytes - memory.alias_size_in_bytes < cache_bytes / 10
  assert memory.temp_size_in_bytes < cache_bytes / 2


def test_the_step_never_meets_the_host(compiled_step):
  text = compiled_step[0].as_text().lower()
  assert not [word for word in ("callback", "infeed", "outfeed", " send(", " recv(") if word in text]


@pytest.mark.parametrize("kwargs,message", [
    (dict(heads=4, kv_heads=3), "heads=4 is not a multiple of kv_heads=3"),
    (dict(heads=4, kv_heads=2, rope_layout="x"), "rope_layout='x': allowed are 'half', 'interleaved'"),
    (dict(heads=4, kv_heads=2, activation="relu"), "activation='relu': allowed are 'silu', 'gelu', 'gelu_tanh'"),
    (dict(heads=4, kv_heads=2, windows=(4,)), "1 windows for 2 layers"),
    (dict(heads=4, kv_heads=2, windows=(4, 0)), "each is a positive number"),
    (dict(heads=4, kv_heads=2, parallel=True, post_norm=True), "parallel"),
    (dict(heads=4, kv_heads=2, head_width=5), "5 of 5 elements of a head cannot be turned"),
])
def test_a_configuration_that_cannot_be_is_refused(kwargs, message):
  with pytest.raises(ValueError, match=message):
    DecoderConfig(**{**COMMON, "norm_eps": 1e-5, "rope_theta": 1e4, **kwargs})


def test_bfloat16_weights_keep_their_dtype():
  target = make_decoder(LLAMA, dtype=jnp.bfloat16)
  cache = target.init_cache(1, 8)
  out, logits = forward(target, jnp.asarray([[1, 2]], jnp.int32), jnp.asarray([[0, 1]], jnp.int32),
                        jnp.tril(jnp.ones((1, 2, 2), bool)), cache)
  assert cache.keys[0].dtype == out.hidden.dtype == out.in_flight.keys[0].dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  assert make_decoder(LLAMA).init_cache(1, 8).values[0].dtype == jnp.float32
