"""The greatest entries of a long last axis, such as a vocabulary: what `jax.lax.top_k` returns, without reading it all
through a sort.

Two levels: the entries sought lie in as many blocks as there are entries, those with the greatest maxima, so only these
are sorted. A maximum is vectorized, a sort is not.

Letters: V vocabulary, K entries.
"""
import jax
import jax.numpy as jnp

from specjax import vocabulary


def greatest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The `count` greatest of f[..., V] in descending order, equal ones by index: values f[..., K], indices i32[..., K].

  Raises:
    ValueError: for a count below 1 or above V.
  """
  length = x.shape[-1]
  if not 1 <= count <= length:
    raise ValueError(f"count={count}: allowed are 1 to {length}, the length of the last axis")
  if (layout := vocabulary.division(x)) is not None:
    return layout.by_parts(lambda part, x: _of_parts(part, x, count), (x,), ())
  # Both levels sort about as much: V / block maxima, then count * block entries.
  block = max(8, 1 << round((length / count) ** 0.5).bit_length() - 1)
  if length <= 2 * block * count:
    return jax.lax.top_k(x, count)
  whole = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % block)], constant_values=-jnp.inf)
  maxima = whole.reshape(*x.shape[:-1], -1, block).max(-1)
  # Blocks in order of place, so that among equal entries the lower index comes first.
  chosen = jnp.sort(jax.lax.top_k(maxima, count)[1], -1)
  index = (chosen[..., None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(*x.shape[:-1], -1)
  pick = lambda x, at: jnp.take_along_axis(x, at, -1, mode="promise_in_bounds")
  # Read from `x`: the filled copy is then never written to memory.
  inside = jnp.where(index < length, pick(x, jnp.minimum(index, length - 1)), -jnp.inf)
  values, place = jax.lax.top_k(inside, count)
  return values, pick(index, place)


def _of_parts(part, x, count):
  """Of the greatest entries of every part, in order of the parts, so that of equal ones the lower index comes first."""
  values, index = greatest(x, min(count, part.size))
  values, place = jax.lax.top_k(part.joined(values), count)
  return values, jnp.take_along_axis(part.joined(index + part.first), place, -1)
