"""One pass over what a drafter lacks of the text and masks behind it, whose laws are those of all depths.

Behind the last known entry, the anchor, stand N - 1 masks. The anchor gives the law of depth 1, mask j that of depth j
+ 2. A mask sees the text up to the anchor, the masks before it and itself; nothing of the text sees a mask, and no
mask is ever kept (PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469).

Letters: B batch rows, S entries of the text, M = N - 1 masks, E width.
"""
import jax
import jax.numpy as jnp


def layout(start: jax.Array, count: jax.Array, size: int, masks: int) -> tuple[jax.Array, jax.Array]:
  """Positions i32[B, S + M] and who sees whom, bool[B, S + M, S + M], of S = `size` entries of which each row knows the
  first `count` i32[B], at `start` i32[B] of the text, and M = `masks`.
  """
  entry, mask = jnp.arange(size, dtype=jnp.int32), jnp.arange(masks, dtype=jnp.int32)
  of_all = lambda x, *shape: jnp.broadcast_to(x, (start.shape[0], *shape))
  positions = start[:, None] + jnp.concatenate([of_all(entry, size), count[:, None] + mask], 1)
  tokens = jnp.pad(jnp.tril(jnp.ones((size, size), bool)), ((0, 0), (0, masks)))
  known = of_all((entry < count[:, None])[:, None], masks, size)
  own = of_all(jnp.tril(jnp.ones((masks, masks), bool)), masks, masks)
  return positions, jnp.concatenate([of_all(tokens, size, size + masks), jnp.concatenate([known, own], 2)], 1)


def depths(hidden: jax.Array, count: jax.Array, masks: int) -> jax.Array:
  """Hidden states f[B, 1 + M, E] of the anchor and the masks, of those of the whole pass f[B, S + M, E]."""
  size = hidden.shape[1] - masks
  anchor = jnp.take_along_axis(hidden[:, :size], jnp.clip(count - 1, 0, size - 1)[:, None, None], axis=1)
  return jnp.concatenate([anchor, hidden[:, size:]], axis=1)
