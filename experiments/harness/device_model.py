"""Decoders of real sizes with random weights, made on the device: what a device check runs where no checkpoint is.

Rates of such a model say what a step costs, never what a drafter is worth. Shapes are those of the models named; every
matrix is drawn by one compiled program a shape, so that nothing of the model's size stands on the host.

Letters: B batch rows, S slots, V vocabulary, E model width.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax import starting
from specjax.models import config
from specjax.models import decoder
from specjax.models import weights

_llama = functools.partial(config.DecoderConfig, norm_eps=1e-5, rope_theta=500000.0, max_context=8192, eos_ids=())
CONFIGS = {
    "tiny": _llama(vocab_size=512, num_tokens=512, width=64, layers=2, heads=4, kv_heads=2, head_width=16,
                   mlp_width=192),
    # SmolLM2-135M, Llama-3.2-1B and 3B, Llama-3.1-8B.
    "135m": _llama(vocab_size=49152, num_tokens=49152, width=576, layers=30, heads=9, kv_heads=3, head_width=64,
                   mlp_width=1536),
    "1b": _llama(vocab_size=128256, num_tokens=128256, width=2048, layers=16, heads=32, kv_heads=8, head_width=64,
                 mlp_width=8192),
    "3b": _llama(vocab_size=128256, num_tokens=128256, width=3072, layers=28, heads=24, kv_heads=8, head_width=128,
                 mlp_width=8192),
    "8b": _llama(vocab_size=128256, num_tokens=128256, width=4096, layers=32, heads=32, kv_heads=8, head_width=128,
                 mlp_width=14336, tied=False),
}
SIZES = (*CONFIGS, "auto")
_SHARE = 0.7  # of a device's memory for weights; the rest is for the cache, logits and what a program needs


def choose(size: str, memory: int | None, backend: str, dtype) -> str:
  """The name in `CONFIGS` of a size of `SIZES`. "auto" is the greatest of 1b, 3b and 8b whose weights leave room in
  `memory` bytes, 1b where that is not known or too little; and on a CPU tiny."""
  if size != "auto":
    return size
  if backend == "cpu":
    return "tiny"
  fits = [name for name in ("1b", "3b", "8b") if memory and weight_bytes(CONFIGS[name], dtype) <= _SHARE * memory]
  return fits[-1] if fits else "1b"


def weight_bytes(c: config.DecoderConfig, dtype) -> int:
  """Bytes of all weights of such a decoder."""
  return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(
      jax.eval_shape(lambda: make(c, dtype).weights)))


def read_bytes(target: decoder.Decoder) -> int:
  """Bytes of weights that every step reads: all but an embedding that is not the head as well, from which a step takes
  a row a token."""
  total = sum(x.nbytes for x in jax.tree.leaves(target.weights))
  return total - (0 if target.weights.head is None else target.weights.embedding.nbytes)


def cache_bytes(state: decode.DecodeState) -> int:
  """Bytes of keys and values that every step reads: all slots of the bucket."""
  return sum(x.nbytes for x in (*state.cache.keys, *state.cache.values))


def make(c: config.DecoderConfig, dtype) -> decoder.Decoder:
  """A decoder of plain layers with random weights f[out, in] of `dtype`, scaled by in ** -0.5, on one device."""
  draws = iter(range(10**6))

  def matrix(*shape):
    return _matrix(next(draws), shape=shape, dtype=jnp.dtype(dtype))

  norm = lambda: jnp.ones(c.width, dtype)
  blocks = tuple(weights.LayerWeights(
      attention_norm=norm(), qkv=matrix((c.heads + 2 * c.kv_heads) * c.head_width, c.width), qkv_bias=None,
      attention_out=matrix(c.width, c.heads * c.head_width), mlp_norm=norm(),
      gate_up=matrix(2 * c.mlp_width, c.width), down=matrix(c.width, c.mlp_width)) for _ in range(c.layers))
  return decoder.Decoder(config=c, weights=weights.DecoderWeights(
      embedding=matrix(c.vocab_size, c.width), layers=blocks, final_norm=norm(),
      head=None if c.tied else matrix(c.vocab_size, c.width)))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _matrix(number, *, shape, dtype):
  """The matrix of a number."""
  return jax.random.normal(jax.random.key(number), shape, dtype) * jnp.asarray(shape[1] ** -0.5, dtype)


def ready(target, proposer, verifier, *, rows: int, context: int, room: int) -> decode.DecodeState:
  """A state behind texts of `context` tokens, with a budget of `room`, whose prefill was left out: keys and values are
  zeros, which take as long to read as any."""
  prompt = (np.arange(context) % target.vocab_size).tolist()
  given = starting.asked(target, [prompt] * rows, max_new_tokens=room, eos_ids=())
  state, _ = starting.begin(target, proposer, given, verifier=verifier)
  # A buffer of its own: the state is donated.
  return state.replace(cache=state.cache.replace(length=jnp.asarray(given.lengths - 1)))
