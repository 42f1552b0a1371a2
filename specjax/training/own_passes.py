"""Passes of a head over its own outputs, so that it meets them in training as it does in drafting.

EAGLE-3's training-time test (arXiv 2503.01840), and before it the context alignment of HASS (arXiv 2408.15766). Pass 0
runs over the target's features; pass i over what pass i - 1 made of them, one token further: its entry t stands for the
i-th token drafted behind token t + 1. Such an entry sees the entries of true features up to t, and of the passes before
it those at its own place; its position is t + i, its token x[t + 1 + i] (see `shifts`).

Letters: B sequences, S entries, E width of the head, D of the target, K key/value heads, G query heads of each, C head
width.
"""
import jax
import jax.numpy as jnp

from specjax.training import batches
from specjax.training import shifts

_HIDDEN = -1e30


def run(params, embedding: jax.Array, batch: batches.Batch, count: int, *, through: bool = True) -> list[jax.Array]:
  """What the head makes logits of, f[B, S, E], in each of `count` passes. Entry t of pass i is the i-th draft behind
  token t + 1, if the tokens drafted before it are those of the text.

  Args:
    params: a `models.recurrent_head.RecurrentHead`. embedding: f[V, D], the target's.
    batch: its features are those that the head reads.
    through: whether gradients of a pass reach the passes that its features came from.
  """
  place = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
  feature = params.fused(batch.features.astype(jnp.float32))
  made, earlier = [], []
  for i in range(count):
    tokens = shifts.ahead(batch.tokens, 1 + i)
    attends = lambda layer: lambda query, keys, values: attend(
        query, keys, values, [(block.keys[layer], block.values[layer]) for block in earlier])
    hidden, feature, block = params.apply(params.embed(embedding, tokens), feature,
                                          jnp.broadcast_to(place + i, tokens.shape), attends)
    earlier = [*earlier, block]
    made.append(hidden)
    feature = feature if through else jax.lax.stop_gradient(feature)
  return made


def attend(query, keys, values, earlier):
  """Attention of one pass: causal over the entries of pass 0, and at its own place over those of every pass up to it.

  Args:
    query: f[B, K, G, S, C], scaled. keys: f[B, K, C, S]. values: f[B, K, S, C].
    earlier: keys and values of the passes before, pass 0 first.
  """
  first_keys, first_values = earlier[0] if earlier else (keys, values)
  scores = jnp.einsum("bkgsc,bkcf->bkgsf", query, first_keys)
  causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
  scores = jnp.where(causal, scores, _HIDDEN)
  own = [(keys, values), *earlier[1:]] if earlier else []
  at_place = [jnp.einsum("bkgsc,bkcs->bkgs", query, k)[..., None] for k, _ in own]
  weights = jax.nn.softmax(jnp.concatenate([scores, *at_place], -1), -1)
  out = jnp.einsum("bkgsf,bkfc->bkgsc", weights[..., :scores.shape[-1]], first_values)
  for i, (_, v) in enumerate(own):
    out = out + weights[..., scores.shape[-1] + i, None] * v[:, :, None]
  return out
