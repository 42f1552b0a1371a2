"""The weights of a Mamba-2 as a plain pytree. Every matrix is kept [out, in], as in `weights`."""
from typing import Optional

from flax import struct
import jax


@struct.dataclass
class Mamba2Layer:
  """One block. C is the number of channels, I = H * P that of the elements of all heads (see `mamba2_config`)."""
  norm: jax.Array           # f[E]
  project_in: jax.Array     # f[I + C + H, E]; rows: gates, inputs, keys and queries by group, steps
  project_in_bias: Optional[jax.Array]   # f[I + C + H]
  conv: jax.Array           # f[C, W]; the weight of a token's own input last
  conv_bias: Optional[jax.Array]         # f[C]
  step_bias: jax.Array      # f32[H]
  decay_log: jax.Array      # f32[H]; the state decays by exp(-step * exp(decay_log))
  skip: jax.Array           # f32[H]; of the input itself
  gated_norm: jax.Array     # f[I]
  project_out: jax.Array    # f[E, I]
  project_out_bias: Optional[jax.Array]  # f[E]


@struct.dataclass
class Mamba2Weights:
  """All of a Mamba-2. `head` is None when it is the embedding (tied)."""
  embedding: jax.Array  # f[V, E]
  layers: tuple[Mamba2Layer, ...]
  final_norm: jax.Array  # f[E]
  head: Optional[jax.Array]  # f[V, E] or None
