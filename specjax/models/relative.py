"""Relative positions as T5 has them: a learned number a head for each bucket of distances, added to the scores.

Sources: arXiv 1910.10683, section 2.1; buckets as Mesh TensorFlow's `transformer_layers` and Transformers'
`modeling_t5` compute them. Buckets are constants, worked out on the host in float32: at distances where the logarithm
is a whole number, one that is an ulp off would put a token into another bucket.

Letters: B batch rows, T nodes, S slots, P inputs, H heads.
"""
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


@functools.lru_cache
def buckets(count: int, max_distance: int) -> np.ndarray:
  """The bucket of each distance from 0 to `max_distance`, i32[max_distance + 1]; of all beyond it the last.

  The first half of the `count` buckets are single distances, the others grow with the logarithm.

  Raises:
    ValueError: for fewer than 2 buckets, or a `max_distance` that the single distances reach.
  """
  exact = count // 2
  if exact < 1 or max_distance <= exact:
    raise ValueError(f"{count} buckets for distances up to {max_distance}: needed are 2 or more, and a distance beyond "
                     f"{exact}, half of them")
  distance = np.arange(max_distance + 1)
  ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
  grown = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(count - exact)
  grown = np.minimum(exact + grown.astype(np.int32), count - 1)
  return np.where(distance < exact, distance, grown).astype(np.int32)


def backward(table: jax.Array, distance: jax.Array, max_distance: int) -> jax.Array:
  """What a decoder adds to its scores: f32[B, H, T, S].

  Args:
    table: f[buckets, H]. distance: i32[B, T, S], tokens back; what lies ahead counts as 0, and is not seen.
    max_distance: beyond it all distances are alike.
  """
  values = table.astype(jnp.float32)[buckets(table.shape[0], max_distance)].T  # by head and distance
  return jnp.moveaxis(jnp.take(values, jnp.clip(distance, 0, max_distance), axis=1), 0, 1)


def both_ways(table: jax.Array, size: int, max_distance: int) -> jax.Array:
  """What an encoder of `size` inputs adds to its scores: f32[H, P, P]. Half of `table` f[buckets, H] is of what lies
  behind a token or is itself, the other half of what lies ahead."""
  half = table.shape[0] // 2
  ahead = np.arange(size)[None] - np.arange(size)[:, None]
  bucket = buckets(half, max_distance)[np.minimum(np.abs(ahead), max_distance)] + half * (ahead > 0)
  return jnp.moveaxis(table.astype(jnp.float32)[jnp.asarray(bucket)], 2, 0)
