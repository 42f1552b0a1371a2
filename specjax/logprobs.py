"""Logarithms of the probabilities of emitted tokens, under two laws that are both named.

`processed` is the law that the token was drawn from, after penalties, masks, temperature and filters: 0 at
temperature 0, where that law is one-hot. `raw` is the target's own, the softmax of its logits. The `top` alternatives
are those of the raw law.

Letters: B batch rows, N tokens, V vocabulary, A alternatives kept a token.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import greatest
from specjax import sampling
from specjax import vocabulary


@struct.dataclass
class Logprobs:
  """Of N tokens a row; natural logarithms."""
  processed: jax.Array  # f32[B, N]
  raw: jax.Array        # f32[B, N]
  top_ids: jax.Array    # i32[B, N, A]; most probable ids of the raw law, the most probable first
  top_raw: jax.Array    # f32[B, N, A]


def empty(rows: int, tokens: int, top: int) -> Logprobs:
  """Buffers for `tokens` tokens a row and `top` alternatives each."""
  zeros = lambda *shape: jnp.zeros((rows, tokens, *shape), jnp.float32)
  return Logprobs(processed=zeros(), raw=zeros(), top_ids=jnp.zeros((rows, tokens, top), jnp.int32), top_raw=zeros(top))


def of_tokens(logits: jax.Array, adjusted: jax.Array, params: sampling.SamplingParams, mode: jax.Array,
              tokens: jax.Array, top: int) -> Logprobs:
  """Of `tokens` i32[B, N], each drawn at its own node.

  Args:
    logits: f[B, N, V], the target's own. adjusted: f32[B, N, V], after `processors.adjust`.
    params, mode: see `sampling.law`. top: A.
  """
  pick = lambda x: vocabulary.pick(x, tokens[..., None])[..., 0]
  logits = logits.astype(jnp.float32)
  scale = jax.nn.logsumexp(logits, axis=-1)
  best, ids = greatest.greatest(logits, top) if top else jax.lax.top_k(logits, 0)
  return Logprobs(processed=jnp.log(pick(sampling.law(adjusted, params, mode))), raw=pick(logits) - scale,
                  top_ids=ids.astype(jnp.int32), top_raw=best - scale[..., None])
