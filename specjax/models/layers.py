"""The parts of a decoder layer, as pure functions. Each is what XLA runs fastest for one to a few dozen tokens.

Letters: B batch rows, T nodes, S slots, E model width, H query heads, K key/value heads, G = H / K, C head width.
"""
import functools

import jax
import jax.numpy as jnp

_HIDDEN = -1e30  # finite: a row that may see nothing (padding) must not become NaN


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
  """`x` f[..., in] times `weight` f[out, in], plus `bias` f[out]: f[..., out].

  On a CPU several tokens are multiplied weight first, `weight @ x.T`, behind barriers that keep XLA from turning it
  back: reading the weight along its rows takes about half the time for 4 to 16 tokens (BUILD.md, Speed).
  """
  flat = x.reshape(-1, x.shape[-1])
  if flat.shape[0] > 1 and jax.default_backend() == "cpu":
    columns = jax.lax.optimization_barrier(flat.T)
    out = jax.lax.optimization_barrier(jnp.einsum("oi,it->ot", weight, columns)).T
  else:
    out = jnp.einsum("ti,oi->to", flat, weight)
  out = out.reshape(*x.shape[:-1], weight.shape[0])
  return out if bias is None else out + bias


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
  """RMSNorm (arXiv 1910.07467) over the last axis, in float32."""
  wide = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
  return (wide * scale).astype(x.dtype) * weight


def rotary_angles(positions: jax.Array, width: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """cos and sin of the rotary angles: f32[B, T, C / 2] each, from `positions` i32[B, T] (arXiv 2104.09864)."""
  frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  angle = positions.astype(jnp.float32)[..., None] * frequency
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> jax.Array:
  """Applies rotary positions to f[B, T, heads, C]; `layout` says which elements are a pair (see DecoderConfig)."""
  cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
  if layout == "half":
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  a, b = x[..., 0::2], x[..., 1::2]
  return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def attend(query: jax.Array, cached_keys: jax.Array, cached_values: jax.Array, keys: jax.Array, values: jax.Array,
           visible: jax.Array, mask: jax.Array) -> jax.Array:
  """Attention over the committed cache joined with the in-flight block, under one softmax.

  Args:
    query: f[B, K, G, T, C], already scaled.
    cached_keys: f[B, K, C, S]. cached_values: f[B, K, S, C]. keys: f[B, K, C, T]. values: f[B, K, T, C].
    visible: bool[B, S], committed slots. mask: bool[B, T, T], ancestor-or-self.

  Returns:
    f[B, K, G, T, C].
  """
  batch, kv, group, width, size = query.shape
  slots = cached_keys.shape[-1]
  rows = query.reshape(batch, kv, group * width, size)  # one product a key/value head, whatever the group
  scores = functools.partial(jnp.einsum, "bkqc,bkcs->bkqs", rows, preferred_element_type=jnp.float32)
  old = scores(cached_keys).reshape(batch, kv, group, width, slots)
  new = scores(keys).reshape(batch, kv, group, width, width)
  old = jnp.where(visible[:, None, None, None], old, _HIDDEN)
  new = jnp.where(mask[:, None, None], new, _HIDDEN)
  greatest = jnp.maximum(old.max(-1), new.max(-1))[..., None]
  old, new = jnp.exp(old - greatest), jnp.exp(new - greatest)
  total = (old.sum(-1) + new.sum(-1))[..., None]
  weigh = lambda share, value: jnp.einsum("bkqs,bksc->bkqc", share.reshape(batch, kv, group * width, -1).astype(
      query.dtype), value)
  out = (weigh(old, cached_values) + weigh(new, values)).reshape(query.shape)
  return (out / total).astype(query.dtype)
