"""The weights of a decoder as a plain pytree. Every matrix is kept [out, in]: see `layers.linear` for why."""
from typing import Optional

from flax import struct
import jax


@struct.dataclass
class LayerWeights:
  """One block. Query, key and value are one matrix, and so are gate and up: fewer, larger products."""
  attention_norm: jax.Array      # f[E]
  qkv: jax.Array                 # f[(H + 2K) * C, E]; rows: queries by head, then keys, then values
  qkv_bias: Optional[jax.Array]  # f[(H + 2K) * C] or None
  attention_out: jax.Array       # f[E, H * C]
  mlp_norm: jax.Array            # f[E]
  gate_up: jax.Array             # f[2 * M, E]; rows: gate, then up
  down: jax.Array                # f[E, M]


@struct.dataclass
class DecoderWeights:
  """All of a decoder. `head` is None when it is the embedding (tied)."""
  embedding: jax.Array             # f[V, E]
  layers: tuple[LayerWeights, ...]
  final_norm: jax.Array            # f[E]
  head: Optional[jax.Array]        # f[V, E] or None
