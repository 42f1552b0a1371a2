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

from specjax.models import rope

_HIDDEN = -1e30  # finite: a row that may see nothing (padding) must not become NaN


def linear(weight: jax.Array, columns: jax.Array, bias: jax.Array | None = None) -> jax.Array:
  """`weight` f[out, in] times `columns` f[in, N], plus `bias` f[out]: f[out, N].

  The barriers keep XLA on a CPU from turning the product of several columns back into one with the weight on the
  right.
  """
  hold = jax.lax.optimization_barrier if columns.shape[1] > 1 and jax.default_backend() == "cpu" else lambda x: x
  return plus(hold(jnp.einsum("oi,in->on", weight, hold(columns))), bias)


def plus(columns: jax.Array, bias: jax.Array | None) -> jax.Array:
  """f[out, N] plus a `bias` f[out], if there is one."""
  return columns if bias is None else columns + bias[:, None]


def rms_norm(columns: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
  """RMSNorm (arXiv 1910.07467) of every column of f[E, N], in float32."""
  wide = columns.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + epsilon)
  return (wide * scale).astype(columns.dtype) * weight[:, None]


def layer_norm(columns: jax.Array, weight: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
  """LayerNorm (arXiv 1607.06450) of every column of f[E, N], in float32."""
  wide = columns.astype(jnp.float32)
  wide = wide - jnp.mean(wide, axis=0, keepdims=True)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + epsilon)
  return (wide * scale).astype(columns.dtype) * weight[:, None] + bias[:, None]


def rms_norm_heads(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
  """RMSNorm of f[heads, C, B, T], each head alone under one `weight` f[C], or all together under f[heads * C]."""
  heads, size, *rest = x.shape
  if weight.shape[0] != size:
    return rms_norm(x.reshape(heads * size, -1), weight, epsilon).reshape(x.shape)
  columns = x.swapaxes(0, 1).reshape(size, -1)
  return rms_norm(columns, weight, epsilon).reshape(size, heads, *rest).swapaxes(0, 1)


def activate(x: jax.Array, kind: str) -> jax.Array:
  """The activation of a feed-forward by its name in the configuration."""
  if kind == "relu":
    return jax.nn.relu(x)
  return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=kind == "gelu_tanh")


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
  """`x` kept within (-cap, cap) by cap * tanh(x / cap), as Gemma 2 has it (arXiv 2408.00118); None leaves it."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def rotary_angles(positions: jax.Array, width: int, theta: float,
                  scaling: rope.RopeScaling | None = None) -> tuple[jax.Array, jax.Array]:
  """cos and sin of the rotary angles (arXiv 2104.09864): f32[C / 2, B, T] each, from `positions` i32[B, T]."""
  frequency, attention = rope.frequencies(theta, width, scaling)
  angle = frequency[:, None, None] * positions.astype(jnp.float32)
  if attention == 1.0:
    return jnp.cos(angle), jnp.sin(angle)
  return attention * jnp.cos(angle), attention * jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> jax.Array:
  """Applies rotary positions to f[heads, C, B, T]; `layout` says which elements are a pair (see DecoderConfig). Angles of
  fewer than C elements turn the first ones."""
  turned = 2 * cos.shape[0]
  if turned < x.shape[1]:
    return jnp.concatenate([rotate(x[:, :turned], cos, sin, layout), x[:, turned:]], axis=1)
  heads, size, *rest = x.shape
  axis = 1 if layout == "half" else 2  # where the two elements of a pair lie once they have an axis of their own
  pairs = x.reshape(heads, *((2, size // 2) if axis == 1 else (size // 2, 2)), *rest)
  cos, sin = jnp.expand_dims(cos, axis - 1).astype(x.dtype), jnp.expand_dims(sin, axis - 1).astype(x.dtype)
  # (a, b) -> (a cos - b sin, b cos + a sin), with (b, a) as a reversal: joining two halves costs more on a CPU.
  signed = jnp.concatenate([-sin, sin], axis - 1)
  return (pairs * cos + jnp.flip(pairs, axis) * signed).reshape(x.shape)


def attend(query: jax.Array, cached_keys: jax.Array, cached_values: jax.Array, keys: jax.Array, values: jax.Array,
           visible: jax.Array, mask: jax.Array, cap: float | None = None,
           bias: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
  """Attention over the committed cache joined with the in-flight block, under one softmax.

  Args:
    query: f[B, K, G, T, C], already scaled.
    cached_keys: f[B, K, C, S]. cached_values: f[B, K, S, C].
    keys: f[B, K, C, F]. values: f[B, K, F, C]. In flight: the T nodes, behind those of earlier passes.
    visible: bool[B, S], committed slots, or bool[B, T, S] where nodes see different ones. mask: bool[B, T, F],
      ancestor-or-self.
    cap: see `soft_cap`; of the scores.
    bias: added to the scores, f32[B, H, T, S] of committed slots and f32[B, H, T, F] of nodes in flight.

  Returns:
    f[B, K, G, T, C].
  """
  batch, kv, group, width, size = query.shape
  slots = cached_keys.shape[-1]
  rows = query.reshape(batch, kv, group * width, size)  # one product a key/value head, whatever the group
  scores = functools.partial(jnp.einsum, "bkqc,bkcs->bkqs", rows, preferred_element_type=jnp.float32)
  old = soft_cap(scores(cached_keys), cap).reshape(batch, kv, group, width, slots)
  new = soft_cap(scores(keys), cap).reshape(batch, kv, group, width, -1)
  if bias is not None:
    old, new = old + bias[0].reshape(old.shape), new + bias[1].reshape(new.shape)
  old = jnp.where(visible[:, None, None, None] if visible.ndim == 2 else visible[:, None, None], old, _HIDDEN)
  new = jnp.where(mask[:, None, None], new, _HIDDEN)
  greatest = jnp.maximum(old.max(-1), new.max(-1))[..., None]
  old, new = jnp.exp(old - greatest), jnp.exp(new - greatest)
  total = (old.sum(-1) + new.sum(-1))[..., None]
  weigh = lambda share, value: jnp.einsum("bkqs,bksc->bkqc", share.reshape(batch, kv, group * width, -1).astype(
      query.dtype), value)
  out = (weigh(old, cached_values) + weigh(new, values)).reshape(query.shape)
  return (out / total).astype(query.dtype)


def attend_all(query: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array,
               bias: jax.Array | None = None) -> jax.Array:
  """Attention of every node over the same keys: an encoder's own, or a decoder's over what the encoder gave.

  Args:
    query: f[B, H, T, C], already scaled. keys: f[B, H, C, P]. values: f[B, H, P, C].
    visible: bool[B, P]. bias: f32[H, T, P], added to the scores; None for none.

  Returns:
    f[B, H, T, C].
  """
  scores = jnp.einsum("bhtc,bhcp->bhtp", query, keys, preferred_element_type=jnp.float32)
  scores = scores if bias is None else scores + bias
  weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _HIDDEN), axis=-1)
  return jnp.einsum("bhtp,bhpc->bhtc", weights.astype(query.dtype), values)
