"""The weights of an encoder-decoder as a plain pytree. Every matrix is kept [out, in], as in `weights`."""
from typing import Optional

from flax import struct
import jax

from specjax.models.weights import LayerWeights


@struct.dataclass
class CrossWeights:
  """The part of a decoder's layer that reads the encoder's outputs."""
  norm: jax.Array       # f[E]
  query: jax.Array      # f[H * C, E]
  key_value: jax.Array  # f[2 * H * C, E]; rows: keys by head, then values
  out: jax.Array        # f[E, H * C]


@struct.dataclass
class EncoderDecoderWeights:
  """All of an encoder-decoder. `head` is None when it is the embedding (tied)."""
  embedding: jax.Array                 # f[V, E]; of encoder and decoder
  encoder: tuple[LayerWeights, ...]
  encoder_bias: jax.Array              # f[buckets, H]; of all its layers
  encoder_norm: jax.Array              # f[E]
  layers: tuple[LayerWeights, ...]     # of the decoder
  cross: tuple[CrossWeights, ...]      # of the decoder's layers
  bias: jax.Array                      # f[buckets, H]; of all its layers
  final_norm: jax.Array                # f[E]
  head: Optional[jax.Array]            # f[V, E] or None
