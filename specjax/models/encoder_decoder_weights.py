"""The weights of an encoder-decoder as a plain pytree. Every matrix is kept [out, in], as in `weights`."""
from typing import Optional

from flax import struct
import jax

from specjax.models.weights import LayerWeights


@struct.dataclass
class CrossWeights:
  """The part of a decoder's layer that reads the encoder's outputs. What a family does not have is None."""
  norm: jax.Array       # f[E]
  query: jax.Array      # f[H * C, E]
  key_value: jax.Array  # f[2 * H * C, E]; rows: keys by head, then values
  out: jax.Array        # f[E, H * C]
  norm_bias: Optional[jax.Array] = None       # f[E]; of LayerNorm
  query_bias: Optional[jax.Array] = None      # f[H * C]
  key_value_bias: Optional[jax.Array] = None  # f[2 * H * C]
  out_bias: Optional[jax.Array] = None        # f[E]


@struct.dataclass
class EncoderDecoderWeights:
  """All of an encoder-decoder. `head` is None when it is the embedding (tied), and so is what a family does not have.

  Norms and their biases in `LayerWeights` are those in front of attention and feed-forward, or those behind each sum:
  see `EncoderDecoderConfig.post_norm`.
  """
  embedding: jax.Array                 # f[V, E]; of encoder and decoder
  encoder: tuple[LayerWeights, ...]
  layers: tuple[LayerWeights, ...]     # of the decoder
  cross: tuple[CrossWeights, ...]      # of the decoder's layers
  head: Optional[jax.Array] = None                         # f[V, E]
  logits_bias: Optional[jax.Array] = None                  # f[V]
  encoder_bias: Optional[jax.Array] = None                 # f[buckets, H]; relative positions, of all encoder layers
  bias: Optional[jax.Array] = None                         # f[buckets, H]; of all the decoder's layers
  conv1: Optional[jax.Array] = None                        # f[E, M, 3]; of an encoder that reads sound
  conv1_bias: Optional[jax.Array] = None                   # f[E]
  conv2: Optional[jax.Array] = None                        # f[E, E, 3]
  conv2_bias: Optional[jax.Array] = None                   # f[E]
  encoder_positions: Optional[jax.Array] = None            # f[max_inputs, E]; added to the encoder's embeddings
  positions: Optional[jax.Array] = None                    # f[max_outputs, E]; to the decoder's
  encoder_embedding_norm: Optional[jax.Array] = None       # f[E]; of what enters the first layer
  encoder_embedding_norm_bias: Optional[jax.Array] = None  # f[E]
  embedding_norm: Optional[jax.Array] = None               # f[E]
  embedding_norm_bias: Optional[jax.Array] = None          # f[E]
  encoder_norm: Optional[jax.Array] = None                 # f[E]; of what leaves the last layer
  encoder_norm_bias: Optional[jax.Array] = None            # f[E]
  final_norm: Optional[jax.Array] = None                   # f[E]
  final_norm_bias: Optional[jax.Array] = None              # f[E]
