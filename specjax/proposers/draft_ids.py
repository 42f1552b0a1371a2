"""Heads that draft some of the target's ids only: from their logits to the target's vocabulary and back.

Letters: B batch rows, U draft ids, V vocabulary, E width of the target.
"""
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import base as models


def whole(logits: jax.Array, target) -> jax.Array:
  """Logits f[..., R] of a head with all ids of the target as the target has them: f[..., V], without rows of a
  vocabulary that only fill it up, or with minus infinity there, where V counts them."""
  size, known = target.vocab_size, models.known_ids(target)
  logits = logits[..., :size]
  if logits.shape[-1] < size:
    fill = [(0, 0)] * (logits.ndim - 1) + [(0, size - logits.shape[-1])]
    logits = jnp.pad(logits, fill, constant_values=-jnp.inf)
  return logits if known == size else jnp.where(jnp.arange(size) < known, logits, -jnp.inf)


def spread(logits: jax.Array, ids: jax.Array | None, vocabulary: int) -> jax.Array:
  """Logits of draft ids f[..., U] -> of the target's ids f[..., V], -inf where there is none; `ids` i32[U] or None."""
  if ids is None:
    return logits[..., :vocabulary]
  return jnp.full((*logits.shape[:-1], vocabulary), -jnp.inf, logits.dtype).at[..., ids].set(logits)


def known(ids: jax.Array | None, target) -> jax.Array:
  """bool[V]: the ids that can be drafted."""
  every = jnp.arange(target.vocab_size) < models.known_ids(target)
  return every if ids is None else jnp.zeros_like(every).at[ids].set(True)


def shared_rows(target, ids: jax.Array | None) -> jax.Array | None:
  """The rows of the target's head that are drafted from, f[U, E]; None where it is all of them."""
  return None if ids is None else jnp.take(target.head, ids, axis=0)


def check(target, ids: jax.Array | None) -> None:
  """Raises ValueError for draft ids that the target never emits: rows of its head that only fill it up."""
  if ids is None or isinstance(ids, jax.core.Tracer):
    return
  greatest = int(np.asarray(ids).max())  # by NumPy: inside a traced function JAX would trace it
  if greatest >= models.known_ids(target):
    raise ValueError(f"the head drafts id {greatest}, and the ids of this target are 0 to {models.known_ids(target) - 1}")
