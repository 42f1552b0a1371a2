"""The parts of a decoder layer, as pure functions. Each is what XLA runs fastest for one to a few dozen tokens.

Activations are columns, f[width, N], with N = B * T tokens side by side. A product is then `weight @ columns`, which on
a CPU takes about half the time of `rows @ weight.T` for 4 to 16 tokens, and what stands between two products runs over
whole vectors without a transposition (BUILD.md, Speed). Accelerators take either order at the same speed.

Letters: B batch rows, T nodes, N = B * T, S slots, E model width, H query heads, K key/value heads, G = H / K,
C head width.
"""
import functools

import jax
import jax.numpy as jnp

_HIDDEN = -1e30  # finite: a row that may see nothing (padding) must not become NaN


def linear(weight: jax.Array, columns: jax.Array, bias: jax.Array | None = None) -> jax.Array:
  """`weight` f[out, in] times `columns` f[in, N], plus `bias` f[out]: f[out, N].

  The barriers keep XLA on a CPU from turning the product of several columns back into one with the weight on the
  right.
  """
  hold = jax.lax.optimization_barrier if columns.shape[1] > 1 and jax.default_backend() == "cpu" else lambda x: x
  out = hold(jnp.einsum("oi,in->on", weight, hold(columns)))
  return out if bias is None else out + bias[:, None]


def rms_norm(columns: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
  """RMSNorm (arXiv 1910.07467) of every column of f[E, N], in float32."""
  wide = columns.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + epsilon)
  return (wide * scale).astype(columns.dtype) * weight[:, None]


def rotary_angles(positions: jax.Array, width: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """cos and sin of the rotary angles (arXiv 2104.09864): f32[C / 2, B, T] each, from `positions` i32[B, T]."""
  frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  angle = frequency[:, None, None] * positions.astype(jnp.float32)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> jax.Array:
  """Applies rotary positions to f[heads, C, B, T]; `layout` says which elements are a pair (see DecoderConfig)."""
  heads, size, *rest = x.shape
  axis = 1 if layout == "half" else 2  # where the two elements of a pair lie once they have an axis of their own
  pairs = x.reshape(heads, *((2, size // 2) if axis == 1 else (size // 2, 2)), *rest)
  cos, sin = jnp.expand_dims(cos, axis - 1).astype(x.dtype), jnp.expand_dims(sin, axis - 1).astype(x.dtype)
  # (a, b) -> (a cos - b sin, b cos + a sin), with (b, a) as a reversal: joining two halves costs more on a CPU.
  signed = jnp.concatenate([-sin, sin], axis - 1)
  return (pairs * cos + jnp.flip(pairs, axis) * signed).reshape(x.shape)


def attend(query: jax.Array, cached_keys: jax.Array, cached_values: jax.Array, keys: jax.Array, values: jax.Array,
           visible: jax.Array, mask: jax.Array) -> jax.Array:
  """Attention over the committed cache joined with the in-flight block, under one softmax.

  Args:
    query: f[B, K, G, T, C], already scaled.
    cached_keys: f[B, K, C, S]. cached_values: f[B, K, S, C].
    keys: f[B, K, C, F]. values: f[B, K, F, C]. In flight: the T nodes, behind those of earlier passes.
    visible: bool[B, S], committed slots. mask: bool[B, T, F], ancestor-or-self.

  Returns:
    f[B, K, G, T, C].
  """
  batch, kv, group, width, size = query.shape
  slots = cached_keys.shape[-1]
  rows = query.reshape(batch, kv, group * width, size)  # one product a key/value head, whatever the group
  scores = functools.partial(jnp.einsum, "bkqc,bkcs->bkqs", rows, preferred_element_type=jnp.float32)
  old = scores(cached_keys).reshape(batch, kv, group, width, slots)
  new = scores(keys).reshape(batch, kv, group, width, -1)
  old = jnp.where(visible[:, None, None, None], old, _HIDDEN)
  new = jnp.where(mask[:, None, None], new, _HIDDEN)
  greatest = jnp.maximum(old.max(-1), new.max(-1))[..., None]
  old, new = jnp.exp(old - greatest), jnp.exp(new - greatest)
  total = (old.sum(-1) + new.sum(-1))[..., None]
  weigh = lambda share, value: jnp.einsum("bkqs,bksc->bkqc", share.reshape(batch, kv, group * width, -1).astype(
      query.dtype), value)
  out = (weigh(old, cached_values) + weigh(new, values)).reshape(query.shape)
  return (out / total).astype(query.dtype)
