"""A decoder-only target with parts chosen by configuration: Llama and its kin, Gemma, OLMo 2, GPT-2, GPT-NeoX,
Mixtral and other mixtures of experts.

Inside, activations are columns f[E, B * T], one a token: see `layers`.

Letters: B batch rows, T nodes, S slots, V vocabulary, E model width, L layers, H query heads, K key/value heads,
G = H / K, C head width, M feed-forward width, X experts, k experts of a token.
"""
import dataclasses
import functools
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import base
from specjax.models import config as config_lib
from specjax.models import configured
from specjax.models import layers
from specjax.models import moe
from specjax.models import splits as splits_lib
from specjax.models import weights as weights_lib
from specjax.models import windows


@struct.dataclass
class Decoder(configured.Configured):
  """A decoder: weights are leaves, the configuration is static. Implements `base.Target`."""
  weights: weights_lib.DecoderWeights
  config: config_lib.DecoderConfig = struct.field(pytree_node=False)
  layout: Any = struct.field(pytree_node=False, default=None)  # see `configured.Configured`

  @property
  def routing(self) -> base.Routing | None:
    """See `base.Routing`; None without mixtures of experts."""
    c = self.config
    if c.moe is None:
      return None
    size = 3 * c.moe.width * c.width * self.weights.embedding.dtype.itemsize
    return base.Routing(layers=sum(map(c.mixed, range(c.layers))), experts=c.moe.experts, chosen=c.moe.chosen,
                        expert_bytes=size)

  def init_cache(self, batch: int, slots: int) -> cache_lib.KVCache:
    c = self.config
    return cache_lib.empty_cache(batch, c.layers, c.kv_heads, slots, c.head_width, self.weights.embedding.dtype,
                                 c.windows)

  def keep(self, layers: tuple[int, ...]) -> "Decoder":
    """The same decoder with some of its layers only: weights are shared, in order of `layers`."""
    self.check_layers(layers)
    c, mixture = self.config, self.config.moe
    if mixture is not None:
      dense = tuple(at for at, i in enumerate(layers) if not c.mixed(i))
      mixture = None if len(dense) == len(layers) else dataclasses.replace(mixture, dense=dense)
    windows_left = tuple(c.window(i) for i in layers) if c.windows else ()
    return self.replace(weights=self.weights.replace(layers=tuple(self.weights.layers[i] for i in layers)),
                        config=dataclasses.replace(c, layers=len(layers), windows=windows_left, moe=mixture))

  def forward(self, tokens, positions, mask, cache, *, before=None, resume=None, features=(),
              experts=False, routers=False) -> base.ForwardOutput:
    """See `base.Target.forward`. With `experts` the experts that nodes go through are returned as well, with `routers`
    the logits that chose them."""
    chex.assert_equal_shape([tokens, positions])
    earlier = 0 if before is None else before.nodes
    chex.assert_shape(mask, (*tokens.shape, earlier + tokens.shape[1]))
    c, block = self.config, _block if self.layout is None else self.layout.divided(_block)
    columns = lambda rows: rows.reshape(-1, rows.shape[-1]).T
    rows = lambda x: x.T.reshape(*tokens.shape, -1)
    with jax.named_scope("forward"):
      scope = functools.cache(lambda window, slots: _scope(c, window, positions, mask, cache.length, slots))
      keys, values, seen, chosen, routed = [], [], {}, [], []
      if resume is None:
        x = self._embed(tokens, positions)
      else:
        x, keys, values = columns(resume.hidden), list(resume.in_flight.keys), list(resume.in_flight.values)
      below = [i for i in features if i < len(keys) or i > c.layers]
      if below:
        raise ValueError(f"features={features}: layer {below[0]} is not run here; layers {len(keys)} to {c.layers} are")
      for i in range(len(keys), c.layers):
        seen[i] = x
        above = None if before is None else (before.keys[i], before.values[i])
        sees = scope(c.window(i), cache.keys[i].shape[3])
        x, k, v, through = block(c, self.weights.layers[i], x, *sees, cache.keys[i], cache.values[i], above)
        if experts and through is not None:
          chosen.append(through[0].reshape(*tokens.shape, -1))
        if routers and through is not None:
          routed.append(rows(through[1]))
        keys.append(k)
        values.append(v)
      seen[c.layers] = x
      hidden = rows(_norm(c, x, self.weights.final_norm, self.weights.final_norm_bias))
    return base.ForwardOutput(hidden=hidden, in_flight=cache_lib.InFlight(tuple(keys), tuple(values)),
                              features=tuple(rows(seen[i]) for i in features), experts=tuple(chosen),
                              routers=tuple(routed))

  def logits(self, hidden: jax.Array) -> jax.Array:
    """See `base.Target.logits`."""
    with jax.named_scope("head"):
      columns = layers.linear(self.head, hidden.reshape(-1, hidden.shape[-1]).T)
      logits = columns.T.reshape(*hidden.shape[:-1], -1).astype(jnp.float32)
      logits = self.of_known_ids(layers.soft_cap(logits, self.config.logit_cap))
      # Turned from columns once, not once for every reader.
      return jax.lax.optimization_barrier(logits)


  def _embed(self, tokens, positions):
    """The residual stream that enters the first layer, f[E, B * T]."""
    x = jnp.take(self.weights.embedding, tokens.reshape(-1), axis=0, mode="clip")
    if self.config.embedding_scale != 1.0:
      x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
    if self.weights.positions is not None:
      x = x + jnp.take(self.weights.positions, positions.reshape(-1), axis=0, mode="clip")
    return x.T


def _scope(c: config_lib.DecoderConfig, window, positions, mask, length, slots):
  """What layers of a window share: cos and sin of the rotary angles, visible slots, and the mask in flight."""
  if c.positions == "learned":
    angles = None, None
  elif window is not None and c.local_rope_theta is not None:
    angles = layers.rotary_angles(positions, c.turned, c.local_rope_theta)
  else:
    angles = layers.rotary_angles(positions, c.turned, c.rope_theta, c.rope_scaling)
  if window is None:
    return *angles, jnp.arange(slots)[None] < length[:, None], mask
  return *angles, windows.seen_slots(length, positions, window, slots), windows.seen_nodes(mask, window)


def _norm(c: config_lib.DecoderConfig, x, weight, bias=None):
  """The configuration's norm of f[E, N]; without a weight there is none."""
  if weight is None:
    return x
  return layers.rms_norm(x, weight, c.norm_eps) if c.norm == "rms" else layers.layer_norm(x, weight, bias, c.norm_eps)


# One traced function that every layer calls: tracing and lowering a step costs one layer, not L.
@functools.partial(jax.jit, static_argnums=0, static_argnames="splits")
def _block(c: config_lib.DecoderConfig, layer, x, cos, sin, visible, mask, cached_keys, cached_values, before=None, *,
           splits: splits_lib.Splits = splits_lib.WHOLE):
  """One layer: x f[E, B * T] -> x, keys f[B, K, C, T], values f[B, K, T, C], and the experts i32[B * T, k] that nodes
  go through with the router's logits f[X, B * T], None where there are none; `before` are keys and values in flight.
  Where a layer is divided, `c` and the arrays are this device's part, but for `c.moe`."""
  batch, width = mask.shape[:2]
  heads, kv, size = c.heads, c.kv_heads, c.head_width
  with jax.named_scope("attention"):
    entering = _norm(c, x, layer.attention_norm, layer.attention_norm_bias)
    qkv = layers.linear(layer.qkv, entering, layer.qkv_bias).reshape(heads + 2 * kv, size, batch, width)
    turned = qkv[:heads + kv]
    if layer.query_norm is not None:
      turned = jnp.concatenate([layers.rms_norm_heads(turned[:heads], layer.query_norm, c.norm_eps),
                                layers.rms_norm_heads(turned[heads:], layer.key_norm, c.norm_eps)])
    if cos is not None:
      turned = layers.rotate(turned, cos, sin, c.rope_layout)
    scale = size ** -0.5 if c.query_scale is None else c.query_scale
    query = (turned[:heads] * scale).reshape(kv, heads // kv, size, batch, width).transpose(3, 0, 1, 4, 2)
    keys = turned[heads:].transpose(2, 0, 1, 3)
    values = qkv[heads + kv:].transpose(2, 0, 3, 1)
    all_keys, all_values = keys, values
    if before is not None:
      all_keys = jnp.concatenate([before[0].astype(keys.dtype), keys], axis=3)
      all_values = jnp.concatenate([before[1].astype(values.dtype), values], axis=2)
    out = layers.attend(query, cached_keys, cached_values, all_keys, all_values, visible, mask, c.attention_cap)
    out = layers.linear(layer.attention_out, out.transpose(1, 2, 4, 0, 3).reshape(heads * size, batch * width))
    out = layers.plus(splits_lib.total(out, splits.attention), layer.attention_out_bias)
    attended = x + _norm(c, out, layer.attention_post_norm)
  with jax.named_scope("mlp"):
    out = _norm(c, x if c.parallel else attended, layer.mlp_norm, layer.mlp_norm_bias)
    through = None
    if layer.router is not None:
      out, chosen, logits = moe.mixture(c.moe, layer, out, c.activation, splits)
      through = chosen, logits
    else:
      out = layers.linear(layer.gate_up, out, layer.gate_up_bias)
      if c.gated:
        gate, up = jnp.split(out, 2, axis=0)
        out = layers.activate(gate, c.activation) * up
      else:
        out = layers.activate(out, c.activation)
      out = layers.plus(splits_lib.total(layers.linear(layer.down, out), splits.mlp), layer.down_bias)
    x = attended + _norm(c, out, layer.mlp_post_norm)
  return x, keys, values, through
