"""The decoder layer that draft heads are made of: EAGLE's one layer, and those of block drafters.

What enters the attention and what is added to it are two things here, as heads differ in both (see `eagle3`). The same
function serves decoding and training: how nodes attend is an argument.

Letters: B batch rows, T nodes, N = B * T, E width of the head, I width of what enters the attention, H query heads,
K key/value heads, G = H / K, C head width, M feed-forward width.
"""
import dataclasses
from typing import Callable

from flax import struct
import jax
import jax.numpy as jnp

from specjax.models import layers


@dataclasses.dataclass(frozen=True)
class LayerShape:
  """Static sizes and constants of a head's layers: width E, heads H, kv_heads K, head_width C, mlp_width M.

  Of the C components of a head the first `rotary_width` carry positions; None for all of them.

  Raises:
    ValueError: for heads that are no multiple of kv_heads, an odd head_width, or a rotary_width that is odd or wider.
  """
  width: int
  heads: int
  kv_heads: int
  head_width: int
  mlp_width: int
  norm_eps: float
  rope_theta: float
  rotary_width: int | None = None

  def __post_init__(self):
    if self.rotary_width is not None and not (self.rotary_width % 2 == 0 < self.rotary_width <= self.head_width):
      raise ValueError(f"rotary_width={self.rotary_width}: it must be even, and 2 to head_width={self.head_width}")
    if self.heads % self.kv_heads or self.head_width % 2:
      raise ValueError(f"heads={self.heads}, kv_heads={self.kv_heads}, head_width={self.head_width}: heads must be a "
                       "multiple of kv_heads, and the width of a head even")


@struct.dataclass
class DraftLayer:
  """Weights of one layer, each matrix [out, in]."""
  qkv: jax.Array             # f[(H + 2K) * C, I]; rows: queries by head, then keys, then values
  attention_out: jax.Array   # f[E, H * C]
  mlp_norm: jax.Array        # f[E]
  gate_up: jax.Array         # f[2 * M, E]; rows: gate, then up
  down: jax.Array            # f[E, M]
  query_norm: jax.Array | None = None  # f[C]; RMSNorm of every query head before the rotation (Qwen3)
  key_norm: jax.Array | None = None    # f[C]
  qkv_bias: jax.Array | None = None    # f[(H + 2K) * C]
  gate: jax.Array | None = None        # f[H * C, I]; its sigmoid scales what the attention gives (Qwen3-Next)


def rotary(shape: LayerShape, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """cos and sin for `positions` i32[B, T]."""
  return layers.rotary_angles(positions, shape.rotary_width or shape.head_width, shape.rope_theta)


def apply(shape: LayerShape, layer: DraftLayer, x: jax.Array, into: jax.Array, angles, attend: Callable):
  """One layer over columns.

  Args:
    x: f[E, N], what the attention's output is added to. into: f[I, N], what queries, keys and values are made of.
    angles: of `rotary`.
    attend: (query f[B, K, G, T, C], scaled, keys f[B, K, C, T], values f[B, K, T, C]) -> f[B, K, G, T, C].

  Returns:
    x f[E, N], and the keys and values.
  """
  batch, width = angles[0].shape[1:]
  heads, kv, size = shape.heads, shape.kv_heads, shape.head_width
  qkv = layers.linear(layer.qkv, into, layer.qkv_bias).reshape(heads + 2 * kv, size, batch, width)
  query, keys, values = jnp.split(qkv, (heads, heads + kv))
  query = _turn(shape, _norm_heads(query, layer.query_norm, shape.norm_eps), angles)
  keys = _turn(shape, _norm_heads(keys, layer.key_norm, shape.norm_eps), angles).transpose(2, 0, 1, 3)
  values = values.transpose(2, 0, 3, 1)
  query = (query * size ** -0.5).reshape(kv, heads // kv, size, batch, width).transpose(3, 0, 1, 4, 2)
  out = attend(query, keys, values).transpose(1, 2, 4, 0, 3).reshape(heads * size, batch * width)
  if layer.gate is not None:
    out = out * jax.nn.sigmoid(layers.linear(layer.gate, into))
  x = x + layers.linear(layer.attention_out, out)
  gate, up = jnp.split(layers.linear(layer.gate_up, layers.rms_norm(x, layer.mlp_norm, shape.norm_eps)), 2, axis=0)
  return x + layers.linear(layer.down, jax.nn.silu(gate) * up), keys, values


def keys_and_values(shape: LayerShape, layer: DraftLayer, into: jax.Array, angles):
  """Keys and values alone, of `into` f[I, N]: what a block drafter makes of the target's features."""
  batch, width = angles[0].shape[1:]
  rows = shape.heads * shape.head_width
  bias = None if layer.qkv_bias is None else layer.qkv_bias[rows:]
  kv = layers.linear(layer.qkv[rows:], into, bias).reshape(2 * shape.kv_heads, shape.head_width, batch, width)
  keys, values = jnp.split(kv, 2)
  keys = _turn(shape, _norm_heads(keys, layer.key_norm, shape.norm_eps), angles)
  return keys.transpose(2, 0, 1, 3), values.transpose(2, 0, 3, 1)


def _turn(shape, x, angles):
  """f[heads, C, B, T] with rotary positions in its first `rotary_width` components."""
  size = shape.rotary_width or shape.head_width
  turned = layers.rotate(x[:, :size], *angles, "half")
  return turned if size == shape.head_width else jnp.concatenate([turned, x[:, size:]], axis=1)


def _norm_heads(x, weight, epsilon):
  """RMSNorm over C of f[heads, C, B, T]; as it is without a weight."""
  if weight is None:
    return x
  wide = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + epsilon)
  return (wide * scale).astype(x.dtype) * weight[None, :, None, None]
