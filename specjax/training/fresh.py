"""First weights of a model that is trained from nothing, drawn on the host from a seed; all float32, norms 1.

Decoders: normal with deviation 0.02 everywhere, as Transformers' `initializer_range` has it for Llama and Mixtral.
Encoder-decoders: as Mesh TensorFlow's T5 and Transformers' `modeling_t5` have it, a matrix by what enters it: deviation
1 for the embedding, E ** -0.5 for what reads the residual stream, (E * C) ** -0.5 for queries, since scores are not
scaled, (H * C) ** -0.5 and M ** -0.5 for what writes to it, E ** -0.5 for relative positions.

Letters: V vocabulary, E model width, H query heads, K key/value heads, C head width, M feed-forward width, X experts.
"""
import jax.numpy as jnp
import numpy as np

from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.encoder_decoder import EncoderDecoder
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.models.encoder_decoder_weights import CrossWeights
from specjax.models.encoder_decoder_weights import EncoderDecoderWeights
from specjax.models.weights import DecoderWeights
from specjax.models.weights import LayerWeights

_DEVIATION = 0.02


def decoder(config: DecoderConfig, seed: int) -> Decoder:
  """A decoder with Llama's parts, or with Mixtral's mixtures of experts.

  Raises:
    ValueError: the configuration has parts that these families lack.
  """
  c, normal = config, _normal(seed)
  shown = {"family": c.family, "norm": c.norm, "pre_norm": c.pre_norm, "post_norm": c.post_norm, "qk_norm": c.qk_norm,
           "positions": c.positions, "qkv_bias": c.qkv_bias, "out_bias": c.out_bias, "mlp_bias": c.mlp_bias}
  plain = {"norm": "rms", "pre_norm": True, "positions": "rotary"}
  for name, value in shown.items():
    if name != "family" and value != plain.get(name, "" if name == "qk_norm" else False):
      raise ValueError(f"{name}={value!r}: first weights are drawn for the parts of Llama and Mixtral alone")
  matrix = lambda *shape: normal(_DEVIATION, *shape)
  layers = []
  for index in range(c.layers):
    if c.mixed(index):
      x, m = c.moe.experts, c.moe.width
      mixed = dict(gate_up=None, down=None, router=matrix(x, c.width), experts_gate_up=matrix(x, 2 * m, c.width),
                   experts_down=matrix(x, c.width, m))
    else:
      mixed = dict(gate_up=matrix((1 + c.gated) * c.mlp_width, c.width), down=matrix(c.width, c.mlp_width))
    layers.append(LayerWeights(
        attention_norm=jnp.ones(c.width), qkv=matrix((c.heads + 2 * c.kv_heads) * c.head_width, c.width), qkv_bias=None,
        attention_out=matrix(c.width, c.heads * c.head_width), mlp_norm=jnp.ones(c.width), **mixed))
  return Decoder(config=c, weights=DecoderWeights(
      embedding=matrix(c.vocab_size, c.width), layers=tuple(layers), final_norm=jnp.ones(c.width),
      head=None if c.tied else matrix(c.vocab_size, c.width)))


def encoder_decoder(config: EncoderDecoderConfig, seed: int) -> EncoderDecoder:
  """An encoder-decoder of T5's family."""
  c, normal = config, _normal(seed)
  inner = c.heads * c.head_width

  def query():
    return normal((c.width * c.head_width) ** -0.5, inner, c.width)

  def read(rows):
    return normal(c.width ** -0.5, rows, c.width)

  def out(columns):
    return normal(columns ** -0.5, c.width, columns)

  def layer():
    return LayerWeights(
        attention_norm=jnp.ones(c.width), qkv=jnp.concatenate([query(), read(2 * inner)]), qkv_bias=None,
        attention_out=out(inner), mlp_norm=jnp.ones(c.width), gate_up=read((1 + c.gated) * c.mlp_width),
        down=out(c.mlp_width))

  def cross():
    return CrossWeights(norm=jnp.ones(c.width), query=query(), key_value=read(2 * inner), out=out(inner))

  positions = lambda: normal(c.width ** -0.5, c.buckets, c.heads)
  return EncoderDecoder(config=c, weights=EncoderDecoderWeights(
      embedding=normal(1.0, c.vocab_size, c.width), encoder=tuple(layer() for _ in range(c.encoder_layers)),
      encoder_bias=positions(), encoder_norm=jnp.ones(c.width), layers=tuple(layer() for _ in range(c.layers)),
      cross=tuple(cross() for _ in range(c.layers)), bias=positions(), final_norm=jnp.ones(c.width),
      head=None if c.tied else normal(1.0, c.vocab_size, c.width)))


def _normal(seed):
  rng = np.random.default_rng(seed)
  return lambda deviation, *shape: jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(deviation))
