"""An encoder-decoder target with parts chosen by configuration: T5, T5 v1.1 and mT5 (arXiv 1910.10683, 2010.11934),
BART (1910.13461), mBART (2001.08210), Marian's translators (1804.00344) and Whisper (2212.04356).

A request's text is the encoder's inputs, the decoder's opening and the output, in one row: proposers that look text up
search the inputs too, and a decoder-only drafter reads them as its prompt. The encoder runs once, in `encode`, which
stands for the prefill; the decoder's layers then hold keys and values of its outputs in `cache.Cross`, for good. What
the decoder itself commits is as in any other target, at positions behind the inputs. Whisper's encoder reads sound:
its inputs have no ids, and a row's text has -1 in their places.

Positions are `relative`, so that only distances count, or rows of a table; the decoder's begin at its opening. Inside,
activations are columns f[E, B * T], one a token: see `layers`.

Letters: B batch rows, T nodes, S slots, P inputs, V vocabulary, E model width, L layers, H heads, C head width.
"""
import dataclasses
import functools
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax.models import base
from specjax.models import configured
from specjax.models import encoder_decoder_config as config_lib
from specjax.models import encoder_decoder_weights as weights_lib
from specjax.models import layers
from specjax.models import relative
from specjax.models import windows


@struct.dataclass
class EncoderDecoder(configured.Configured):
  """Weights are leaves, the configuration is static. Implements `base.EncodingTarget`."""
  weights: weights_lib.EncoderDecoderWeights
  config: config_lib.EncoderDecoderConfig = struct.field(pytree_node=False)
  layout: Any = struct.field(pytree_node=False, default=None)  # see `configured.Configured`

  @property
  def max_inputs(self) -> int:
    """See `base.EncodingTarget.max_inputs`."""
    return self.config.max_inputs

  @property
  def max_outputs(self) -> int:
    """See `base.EncodingTarget.max_outputs`."""
    return self.config.max_outputs

  @property
  def sound(self) -> tuple[int, int] | None:
    """See `base.EncodingTarget.sound`."""
    return (self.config.mels, 2 * self.config.max_inputs) if self.config.mels else None

  @property
  def banned_first(self) -> tuple[int, ...]:
    """See `base.EncodingTarget.banned_first`."""
    return self.config.banned_first

  @property
  def opening(self) -> tuple[int, ...]:
    """See `base.EncodingTarget.opening`."""
    return self.config.opening

  def with_opening(self, *ids: int) -> "EncoderDecoder":
    """The same model whose decoder begins with these ids, of all rows: how the language that mBART writes is chosen.

    Args:
      ids: the start token first; of mBART-50 that is </s>, and the language's id follows.

    Raises:
      ValueError: no id, or one outside the vocabulary.
    """
    return self.replace(config=dataclasses.replace(self.config, opening=tuple(map(int, ids))))

  def init_cache(self, batch: int, slots: int, inputs: int | None = None, skipped: int = 0) -> cache_lib.KVCache:
    """See `base.EncodingTarget.init_cache`."""
    c, dtype = self.config, self.weights.embedding.dtype
    room = cache_lib.empty_cache(batch, c.layers, c.heads, slots if inputs is None else inputs, c.head_width, dtype)
    cache = cache_lib.empty_cache(batch, c.layers, c.heads, slots - skipped, c.head_width, dtype)
    return cache.replace(cross=cache_lib.Cross(keys=room.keys, values=room.values, skipped=skipped,
                                               inputs=jnp.zeros((batch,), jnp.int32)))

  def keep(self, layers: tuple[int, ...]) -> "EncoderDecoder":
    """The same model with some of the decoder's layers only: weights are shared, in order of `layers`."""
    self.check_layers(layers)
    pick = lambda values: tuple(values[i] for i in layers)
    return self.replace(weights=self.weights.replace(layers=pick(self.weights.layers), cross=pick(self.weights.cross)),
                        config=dataclasses.replace(self.config, layers=len(layers)))

  def encode(self, cache: cache_lib.KVCache, tokens: jax.Array, inputs: jax.Array) -> cache_lib.KVCache:
    """See `base.EncodingTarget.encode`."""
    chex.assert_equal_shape([cache.length, inputs])
    c, w, batch = self.config, self.weights, tokens.shape[0]
    size = c.max_inputs if c.mels else tokens.shape[1]
    with jax.named_scope("encoder"):
      place = jnp.arange(size, dtype=jnp.int32)[None]
      if c.mels:
        x = _heard(w, tokens)
      else:
        x = _embed(c, w.embedding, tokens, w.encoder_positions, jnp.broadcast_to(place, tokens.shape))
      x = _norm(c, x, w.encoder_embedding_norm, w.encoder_embedding_norm_bias)
      visible = place < inputs[:, None]
      bias = None if w.encoder_bias is None else relative.both_ways(w.encoder_bias, size, c.max_distance)
      for layer in w.encoder:
        x = _encoder_block(c, layer, x, visible, bias)
      x = _norm(c, x, w.encoder_norm, w.encoder_norm_bias)
      keys, values = [], []
      for cross in w.cross:
        both = layers.linear(cross.key_value, x, cross.key_value_bias).reshape(2, c.heads, c.head_width, batch, size)
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
      place, bias = positions - cache.cross.inputs[:, None], None
      if w.bias is not None:
        distance = place[:, :, None] - slot
        bias = tuple(relative.backward(w.bias, back, c.max_distance) for back in (distance, windows.distances(mask)))
      visible = slot[None] < cache.written[:, None]
      read = jnp.arange(cache.cross.slots, dtype=jnp.int32)[None] < cache.cross.inputs[:, None]
      keys, values, seen = [], [], {}
      if resume is None:
        x = _embed(c, w.embedding, tokens, w.positions, place)
        x = _norm(c, x, w.embedding_norm, w.embedding_norm_bias)
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
      hidden = rows(_norm(c, x, w.final_norm, w.final_norm_bias))
    return base.ForwardOutput(hidden=hidden, in_flight=cache_lib.InFlight(tuple(keys), tuple(values)),
                              features=tuple(rows(seen[i]) for i in features))

  def logits(self, hidden: jax.Array) -> jax.Array:
    """See `base.Target.logits`."""
    c, bias = self.config, self.weights.logits_bias
    with jax.named_scope("head"):
      columns = hidden.reshape(-1, hidden.shape[-1]).T
      if c.scaled_head:
        columns = columns * jnp.asarray(c.width ** -0.5, columns.dtype)
      logits = layers.linear(self.head, columns, bias).T.reshape(*hidden.shape[:-1], -1)
      logits = self.of_known_ids(logits.astype(jnp.float32))
      if c.banned_ids:
        logits = jnp.where(np.isin(np.arange(self.vocab_size), c.banned_ids), -jnp.inf, logits)
      # Turned from columns once, not once for every reader.
      return jax.lax.optimization_barrier(logits)


def _embed(c, embedding, tokens, table, positions):
  """The embeddings of tokens i32[B, T], with the rows of `table` at their positions if there is one: f[E, B * T]."""
  x = jnp.take(embedding, tokens.reshape(-1), axis=0, mode="clip")
  if c.embedding_scale != 1.0:
    x = x * jnp.asarray(c.embedding_scale, x.dtype)
  if table is not None:
    x = x + jnp.take(table, positions.reshape(-1), axis=0, mode="clip")
  return x.T


def _heard(w, mels):
  """The encoder's residual stream f[E, B * P] of sound f[B, M, 2 * P]: two convolutions over three frames, the second
  of which leaves out every other place, and the positions."""
  x, batch = jnp.moveaxis(mels.astype(w.conv1.dtype), 1, 0), mels.shape[0]
  for weight, bias, step in ((w.conv1, w.conv1_bias, 1), (w.conv2, w.conv2_bias, 2)):
    frames = x.shape[2]
    x = jnp.pad(x, ((0, 0), (0, 0), (1, 1)))
    x = jnp.stack([x[:, :, i:i + frames:step] for i in range(3)], axis=1)
    columns = layers.linear(weight.reshape(weight.shape[0], -1), x.reshape(weight.shape[1] * 3, -1), bias)
    x = layers.activate(columns, "gelu").reshape(weight.shape[0], batch, -1)
  return (x + w.encoder_positions.T[:, None]).reshape(x.shape[0], -1)


def _norm(c, x, weight, bias):
  """The configuration's norm of f[E, N]; without a weight there is none."""
  if weight is None:
    return x
  return layers.rms_norm(x, weight, c.norm_eps) if c.norm == "rms" else layers.layer_norm(x, weight, bias, c.norm_eps)


def _entering(c, x, weight, bias):
  """What attention or a feed-forward reads of the residual stream."""
  return x if c.post_norm else _norm(c, x, weight, bias)


def _joined(c, x, out, weight, bias):
  """The residual stream with what attention or a feed-forward adds."""
  return _norm(c, x + out, weight, bias) if c.post_norm else x + out


def _feed_forward(c, layer, x):
  norm = layer.mlp_norm, layer.mlp_norm_bias
  out = layers.linear(layer.gate_up, _entering(c, x, *norm), layer.gate_up_bias)
  if c.gated:
    gate, up = jnp.split(out, 2, axis=0)
    out = layers.activate(gate, c.activation) * up
  else:
    out = layers.activate(out, c.activation)
  return _joined(c, x, layers.linear(layer.down, out, layer.down_bias), *norm)


def _scaled(c, query):
  return query * c.head_width ** -0.5 if c.scaled_queries else query


def _qkv(c, layer, x, batch):
  """Queries f[B, H, T, C], keys f[B, H, C, T] and values f[B, H, T, C] of f[E, B * T]."""
  qkv = layers.linear(layer.qkv, _entering(c, x, layer.attention_norm, layer.attention_norm_bias), layer.qkv_bias)
  query, keys, values = qkv.reshape(3, c.heads, c.head_width, batch, -1)
  return _scaled(c, query).transpose(2, 0, 3, 1), keys.transpose(2, 0, 1, 3), values.transpose(2, 0, 3, 1)


def _out(weight, attended, bias):
  """The output projection of f[B, H, T, C]: f[E, B * T]."""
  batch, heads, width, size = attended.shape
  return layers.linear(weight, attended.transpose(1, 3, 0, 2).reshape(heads * size, batch * width), bias)


def _attended(c, layer, x, attended):
  """The residual stream with what a layer's own attention adds."""
  return _joined(c, x, _out(layer.attention_out, attended, layer.attention_out_bias), layer.attention_norm,
                 layer.attention_norm_bias)


# One traced function that every layer calls: tracing and lowering costs one layer, not all of them.
@functools.partial(jax.jit, static_argnums=0)
def _encoder_block(c: config_lib.EncoderDecoderConfig, layer, x, visible, bias):
  """One layer of the encoder: x f[E, B * P] -> x."""
  with jax.named_scope("attention"):
    query, keys, values = _qkv(c, layer, x, visible.shape[0])
    x = _attended(c, layer, x, layers.attend_all(query, keys, values, visible, bias))
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
    x = _attended(c, layer, x, out[:, :, 0])
  with jax.named_scope("cross"):
    query = layers.linear(cross.query, _entering(c, x, cross.norm, cross.norm_bias), cross.query_bias)
    query = _scaled(c, query).reshape(c.heads, c.head_width, batch, -1).transpose(2, 0, 3, 1)
    out = _out(cross.out, layers.attend_all(query, *crossed, read), cross.out_bias)
    x = _joined(c, x, out, cross.norm, cross.norm_bias)
  with jax.named_scope("mlp"):
    return _feed_forward(c, layer, x), keys, values
