"""Hydra's heads: Medusa's, each of which also sees the tokens that were drafted before its own.

Hydra (arXiv 2402.05109, zankner/Hydra): behind token t head i, from 0, predicts token t + 2 + i from what the target
computed at token t and from the embeddings of the tokens t + 1 to t + 1 + i, side by side in this order: the pending
token first, then those drafted. Its first block brings them to the width of the target, R z + r + SiLU(W z + b); the
blocks behind it are Medusa's, one module used again, and so is the vocabulary matrix, here with a bias.

In Hydra++ the heads read, instead of the target's hidden state, what one more decoder layer makes of the hidden states
of all tokens up to t, its *prefix attention*. Its entry t is the hidden state at token t, its position t; drafted tokens
never enter it.

Letters: B batch rows, T entries, N heads, M rows of inputs, E width of the target, U draft ids, V vocabulary.
"""
import dataclasses

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import draft_layer
from specjax.models import layers
from specjax.models import medusa


@dataclasses.dataclass(frozen=True)
class HydraConfig:
  """Static facts: heads N, blocks of each, width E, vocab_size V, draft_vocab U.

  Attributes:
    prefix: shape of the layer of prefix attention; None without one.
    max_context: tokens that this layer was made for; None without one.
    accuracy: as of `models.medusa.MedusaConfig`.
  """
  heads: int
  blocks: int
  width: int
  vocab_size: int
  draft_vocab: int
  prefix: draft_layer.LayerShape | None = None
  max_context: int | None = None
  accuracy: tuple[tuple[float, ...], ...] | None = None


@struct.dataclass
class Prefix:
  """Weights of the layer of prefix attention: a whole Llama layer, and the norm behind it."""
  attention_norm: jax.Array      # f[E]
  layer: draft_layer.DraftLayer  # I = E
  norm: jax.Array                # f[E]


@struct.dataclass
class Joining:
  """Weights of a head's first block, which takes (i + 2) E components of head i."""
  linear: jax.Array         # f[E, (i + 2) E]
  bias: jax.Array           # f[E]
  residual: jax.Array       # f[E, (i + 2) E]
  residual_bias: jax.Array  # f[E]


@struct.dataclass
class HydraHead:
  """Weights, each matrix [out, in]."""
  joining: tuple[Joining, ...]              # N
  linear: tuple[jax.Array, ...]             # N x f[E, E], of the blocks behind; () if there are none
  bias: tuple[jax.Array, ...]               # N x f[E]
  vocabulary: tuple[jax.Array, ...] | None  # N x f[U, E]; None: the target's head, its rows `ids`
  vocabulary_bias: tuple[jax.Array, ...] | None  # N x f[U]; None where there is no matrix
  ids: jax.Array | None                     # i32[U]; the target's id of each draft id, ascending; None if U = V
  prefix: Prefix | None
  config: HydraConfig = struct.field(pytree_node=False)

  def check(self, target) -> None:
    """Raises ValueError for a target that these heads were not made for."""
    medusa.check_sizes(self.config, target)

  def init_cache(self, batch: int, slots: int) -> cache_lib.KVCache:
    """An empty cache of the layer of prefix attention."""
    s = self.config.prefix
    return cache_lib.empty_cache(batch, 1, s.kv_heads, slots, s.head_width, self.prefix.norm.dtype)

  def apply_prefix(self, hidden: jax.Array, positions: jax.Array, attend):
    """The layer of prefix attention over the target's hidden states f[B, T, E], behind its final norm, at `positions`
    i32[B, T]; `attend` as of `draft_layer.apply`.

    Returns:
      What the heads read, f[B, T, E], and keys and values of the entries.
    """
    shape = self.config.prefix
    x = hidden.reshape(-1, hidden.shape[-1]).T
    into = layers.rms_norm(x, self.prefix.attention_norm, shape.norm_eps)
    x, keys, values = draft_layer.apply(shape, self.prefix.layer, x, into, draft_layer.rotary(shape, positions), attend)
    return layers.rms_norm(x, self.prefix.norm, shape.norm_eps).T.reshape(hidden.shape), keys, values

  def forward_prefix(self, hidden: jax.Array, positions: jax.Array, mask: jax.Array, cache: cache_lib.KVCache):
    """`apply_prefix` while decoding: entries see the committed cache, and each other as `mask` bool[B, T, T] allows.

    Returns:
      What the heads read, f[B, T, E], and the entries' in-flight block.
    """
    visible = jnp.arange(cache.slots)[None] < cache.length[:, None]
    attend = lambda query, keys, values: layers.attend(query, cache.keys[0], cache.values[0], keys, values, visible,
                                                       mask)
    out, keys, values = self.apply_prefix(hidden, positions, attend)
    return out, cache_lib.InFlight((keys,), (values,))

  def state(self, head: int, inputs: jax.Array) -> jax.Array:
    """What head i = `head` makes of `inputs` f[M, (i + 2) E], what it reads and the tokens' embeddings: f[M, E]."""
    chex.assert_shape(inputs, (None, (head + 2) * self.config.width))
    first, z = self.joining[head], inputs.T
    x = layers.linear(first.residual, z, first.residual_bias) + jax.nn.silu(layers.linear(first.linear, z, first.bias))
    for _ in range(self.config.blocks - 1):
      x = medusa.block(self.linear[head], self.bias[head], x)
    return x.T

  def logits(self, head: int, states: jax.Array, shared: jax.Array | None) -> jax.Array:
    """f32[M, U] of head `head` from its `states` f[M, E]; `shared` f[U, E], the target's head at `ids`, is for heads
    without a matrix of their own."""
    if self.vocabulary is None:
      out = layers.linear(shared, states.T).T
    else:
      out = layers.linear(self.vocabulary[head], states.T, self.vocabulary_bias[head]).T
    return jax.lax.optimization_barrier(out.astype(jnp.float32))
