"""The weights of a decoder as a plain pytree. Every matrix is kept [out, in]: see `layers.linear` for why."""
from typing import Optional

from flax import struct
import jax


@struct.dataclass
class LayerWeights:
  """One block. Query, key and value are one matrix, and so are gate and up: fewer, larger products.

  What a family does not have is None (see `config.DecoderConfig`).
  """
  attention_norm: Optional[jax.Array]  # f[E]
  qkv: jax.Array                       # f[(H + 2K) * C, E]; rows: queries by head, then keys, then values
  qkv_bias: Optional[jax.Array]        # f[(H + 2K) * C]
  attention_out: jax.Array             # f[E, H * C]
  mlp_norm: Optional[jax.Array]        # f[E]
  gate_up: Optional[jax.Array]         # f[2 * M, E]; rows: gate, then up; f[M, E], up alone, where nothing is gated
  down: Optional[jax.Array]            # f[E, M]
  attention_norm_bias: Optional[jax.Array] = None  # f[E]; of LayerNorm
  query_norm: Optional[jax.Array] = None           # f[C], or f[H * C] over all heads
  key_norm: Optional[jax.Array] = None             # f[C], or f[K * C]
  attention_out_bias: Optional[jax.Array] = None   # f[E]
  attention_post_norm: Optional[jax.Array] = None  # f[E]
  mlp_norm_bias: Optional[jax.Array] = None        # f[E]
  gate_up_bias: Optional[jax.Array] = None         # f[2 * M] or f[M]
  down_bias: Optional[jax.Array] = None            # f[E]
  mlp_post_norm: Optional[jax.Array] = None        # f[E]
  router: Optional[jax.Array] = None               # f[X, E]; of a mixture of experts, as are the next two
  experts_gate_up: Optional[jax.Array] = None      # f[X, 2 * M, E]; rows as in gate_up, which is then None
  experts_down: Optional[jax.Array] = None         # f[X, E, M]; in place of down
  shared_gate_up: Optional[jax.Array] = None       # f[2 * M, E]; of the expert that all tokens go through, if any
  shared_down: Optional[jax.Array] = None          # f[E, M]
  shared_share: Optional[jax.Array] = None         # f[1, E]; its gate


@struct.dataclass
class DecoderWeights:
  """All of a decoder. `head` is None when it is the embedding (tied)."""
  embedding: jax.Array             # f[V, E]
  layers: tuple[LayerWeights, ...]
  final_norm: jax.Array            # f[E]
  head: Optional[jax.Array]        # f[V, E] or None
  final_norm_bias: Optional[jax.Array] = None  # f[E]; of LayerNorm
  positions: Optional[jax.Array] = None        # f[P, E]; learned positions, P the greatest context
