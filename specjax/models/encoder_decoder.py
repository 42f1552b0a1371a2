"""An encoder-decoder target: T5, T5 v1.1 and mT5 (arXiv 1910.10683, 2010.11934).

A request's text is the encoder's inputs, the decoder's start token and the output, in one row: proposers that look text
up search the inputs too, and a decoder-only drafter reads them as its prompt. The encoder runs once, in `encode`, which
stands for the prefill; the decoder's layers then hold keys and values of its outputs in `cache.Cross`, for good. What
the decoder itself commits is as in any other target, at positions behind the inputs.

Queries are not scaled, norms are RMSNorms without bias, and positions are `relative`, so that only distances count.
Inside, activations are columns f[E, B * T], one a token: see `layers`.

Letters: B batch rows, T nodes, S slots, P inputs, V vocabulary, E model width, L layers, H heads, C head width.
"""
import dataclasses
import functools

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import base
from specjax.models import encoder_decoder_config as config_lib
from specjax.models import encoder_decoder_weights as weights_lib
from specjax.models import layers
from specjax.models import relative
from specjax.models import windows


@struct.dataclass
class EncoderDecoder:
  """Weights are leaves, the configuration is static. Implements `base.EncodingTarget`."""
  weights: weights_lib.EncoderDecoderWeights
  config: config_lib.EncoderDecoderConfig = struct.field(pytree_node=False)

  @property
  def vocab_size(self) -> int:
    return self.config.num_tokens

  @property
  def max_context(self) -> int:
    return self.config.max_context

  @property
  def eos_ids(self) -> tuple[int, ...]:
    return self.config.eos_ids

  @property
  def opening(self) -> tuple[int, ...]:
    """See `base.EncodingTarget.opening`."""
    return (self.config.start_id,)

  @property
  def head(self) -> jax.Array:
    """The output head f[V, E], padding rows included."""
    return self.weights.embedding if self.weights.head is None else self.weights.head

  def init_cache(self, batch: int, slots: int, inputs: int | None = None, skipped: int = 0) -> cache_lib.KVCache:
    """See `base.EncodingTarget.init_cache`."""
    c, dtype = self.config, self.weights.embedding.dtype
    room = cache_lib.empty_cache(batch, c.layers, c.heads, slots if inputs is None else inputs, c.head_width, dtype)
    cache = cache_lib.empty_cache(batch, c.layers, c.heads, slots - skipped, c.head_width, dtype)
    return cache.replace(cross=cache_lib.Cross(keys=room.keys, values=room.values, skipped=skipped,
                                               inputs=jnp.zeros((batch,), jnp.int32)))

  def keep(self, layers: tuple[int, ...]) -> "EncoderDecoder":
    """The same model with some of the decoder's layers only: weights are shared, in order of `layers`."""
    wrong = [i for i in layers if not 0 <= i < self.config.layers]
    if wrong or not layers:
      raise ValueError(f"layers={layers}: at least one is needed, each from 0 to {self.config.layers - 1}")
    pick = lambda values: tuple(values[i] for i in layers)
    return self.replace(weights=self.weights.replace(layers=pick(self.weights.layers), cross=pick(self.weights.cross)),
                        config=dataclasses.replace(self.config, layers=len(layers)))

  def encode(self, cache: cache_lib.KVCache, tokens: jax.Array, inputs: jax.Array) -> cache_lib.KVCache:
    """See `base.EncodingTarget.encode`."""
    chex.assert_equal_shape([cache.length, inputs])
    c, w, (batch, size) = self.config, self.weights, tokens.shape
    with jax.named_scope("encoder"):
      x = _embed(w, tokens)
      visible = jnp.arange(size, dtype=jnp.int32)[None] < inputs[:, None]
      bias = relative.both_ways(w.encoder_bias, size, c.max_distance)
      for layer in w.encoder:
        x = _encoder_block(c, layer, x, visible, bias)
      x = layers.rms_norm(x, w.encoder_norm, c.norm_eps)
      keys, values = [], []
      for cross in w.cross:
        both = layers.linear(cross.key_value, x).reshape(2, c.heads, c.head_width, batch, size)
        keys.append(both[0].transpose(2, 0, 1, 3))
        values.append(both[1].transpose(2, 0, 3, 1))
    return cache.replace(length=inputs, cross=cache.cross.fill(keys, values, inputs))

  def forward(self, tokens, positions, mask, cache, *, before=None, resume=None, features=()) -> base.ForwardOutput:
    """See `base.Target.forward`. Positions count the encoder's inputs, and `cache` has read them."""
    chex.assert_equal_shape([tokens, positions])
    earlier = 0 if before is None else before.nodes
    chex.assert_shape(mask, (*tokens.shape, earlier + tokens.shape[1]))
    c, w = self.config, self.weights
    rows = lambda x: x.T.reshape(*tokens.shape, c.width)
    with jax.named_scope("forward"):
      slot = jnp.arange(cache.keys[0].shape[3], dtype=jnp.int32)
      distance = (positions - cache.cross.inputs[:, None])[:, :, None] - slot
      bias = tuple(relative.backward(w.bias, back, c.max_distance) for back in (distance, windows.distances(mask)))
      visible = slot[None] < cache.written[:, None]
      read = jnp.arange(cache.cross.slots, dtype=jnp.int32)[None] < cache.cross.inputs[:, None]
      keys, values, seen = [], [], {}
      if resume is None:
        x = _embed(w, tokens)
      else:
        x = resume.hidden.reshape(-1, c.width).T
        keys, values = list(resume.in_flight.keys), list(resume.in_flight.values)
      below = [i for i in features if i < len(keys) or i > c.layers]
      if below:
        raise ValueError(f"features={features}: layer {below[0]} is not run here; layers {len(keys)} to {c.layers} are")
      for i in range(len(keys), c.layers):
        seen[i] = x
        above = None if before is None else (before.keys[i], before.values[i])
        x, k, v = _decoder_block(c, w.layers[i], w.cross[i], x, visible, mask, bias, (cache.keys[i], cache.values[i]),
                                 read, (cache.cross.keys[i], cache.cross.values[i]), above)
        keys.append(k)
        values.append(v)
      seen[c.layers] = x
      hidden = rows(layers.rms_norm(x, w.final_norm, c.norm_eps))
    return base.ForwardOutput(hidden=hidden, in_flight=cache_lib.InFlight(tuple(keys), tuple(values)),
                              features=tuple(rows(seen[i]) for i in features))

  def logits(self, hidden: jax.Array) -> jax.Array:
    """See `base.Target.logits`."""
    with jax.named_scope("head"):
      columns = hidden.reshape(-1, hidden.shape[-1]).T
      if self.config.scaled_head:
        columns = columns * jnp.asarray(self.config.width ** -0.5, columns.dtype)
      logits = layers.linear(self.head, columns).T.reshape(*hidden.shape[:-1], -1)
      # Turned from columns once, not once for every reader.
      return jax.lax.optimization_barrier(logits[..., :self.config.num_tokens].astype(jnp.float32))


def _embed(w, tokens):
  """The residual stream that enters the first layer, f[E, B * T]."""
  return jnp.take(w.embedding, tokens.reshape(-1), axis=0, mode="clip").T


def _feed_forward(c, layer, x):
  out = layers.linear(layer.gate_up, layers.rms_norm(x, layer.mlp_norm, c.norm_eps))
  if c.gated:
    gate, up = jnp.split(out, 2, axis=0)
    out = layers.activate(gate, c.activation) * up
  else:
    out = layers.activate(out, c.activation)
  return x + layers.linear(layer.down, out)


def _qkv(c, layer, x, batch):
  """Queries f[B, H, T, C], keys f[B, H, C, T] and values f[B, H, T, C] of f[E, B * T]."""
  qkv = layers.linear(layer.qkv, layers.rms_norm(x, layer.attention_norm, c.norm_eps))
  query, keys, values = qkv.reshape(3, c.heads, c.head_width, batch, -1)
  return query.transpose(2, 0, 3, 1), keys.transpose(2, 0, 1, 3), values.transpose(2, 0, 3, 1)


def _joined(weight, attended):
  """The output projection of f[B, H, T, C]: f[E, B * T]."""
  batch, heads, width, size = attended.shape
  return layers.linear(weight, attended.transpose(1, 3, 0, 2).reshape(heads * size, batch * width))


# One traced function that every layer calls: tracing and lowering costs one layer, not all of them.
@functools.partial(jax.jit, static_argnums=0)
def _encoder_block(c: config_lib.EncoderDecoderConfig, layer, x, visible, bias):
  """One layer of the encoder: x f[E, B * P] -> x."""
  with jax.named_scope("attention"):
    query, keys, values = _qkv(c, layer, x, visible.shape[0])
    x = x + _joined(layer.attention_out, layers.attend_all(query, keys, values, visible, bias))
  with jax.named_scope("mlp"):
    return _feed_forward(c, layer, x)


@functools.partial(jax.jit, static_argnums=0)
def _decoder_block(c: config_lib.EncoderDecoderConfig, layer, cross, x, visible, mask, bias, cached, read, crossed,
                   before=None):
  """One layer of the decoder: x f[E, B * T] -> x, keys f[B, H, C, T], values f[B, H, T, C]; `before` are keys and
  values in flight, `crossed` those of the encoder's outputs, of which `read` bool[B, P] are there."""
  batch = mask.shape[0]
  with jax.named_scope("attention"):
    query, keys, values = _qkv(c, layer, x, batch)
    all_keys, all_values = keys, values
    if before is not None:
      all_keys = jnp.concatenate([before[0].astype(keys.dtype), keys], axis=3)
      all_values = jnp.concatenate([before[1].astype(values.dtype), values], axis=2)
    out = layers.attend(query[:, :, None], *cached, all_keys, all_values, visible, mask, bias=bias)
    x = x + _joined(layer.attention_out, out[:, :, 0])
  with jax.named_scope("cross"):
    query = layers.linear(cross.query, layers.rms_norm(x, cross.norm, c.norm_eps))
    query = query.reshape(c.heads, c.head_width, batch, -1).transpose(2, 0, 3, 1)
    x = x + _joined(cross.out, layers.attend_all(query, *crossed, read))
  with jax.named_scope("mlp"):
    return _feed_forward(c, layer, x), keys, values
