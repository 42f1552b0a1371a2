"""DFlash's drafter: a block of masks becomes a draft in one pass, over keys and values made of the target's features.

DFlash (arXiv 2602.06036, z-lab/dflash): the block is the pending token and masks behind it; every layer of the drafter
attends, in both directions within the block, to the block and to the text, whose keys and values are projections of the
target's fused features at committed tokens. Place j of the block predicts its own token, j tokens behind the pending one.
With a causal block (JetSpec, arXiv 2606.18394) place j sees those before it only. Embedding and head are the target's.

Letters: B batch rows, T tokens of the text, J places of a block, E width, F = features * E, L layers of the drafter,
U draft ids, V vocabulary.
"""
import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import draft_layer
from specjax.models import layers


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
  """Static facts of a drafter.

  Attributes:
    shape: of its layers; width E is the target's. layers: L.
    features: the target's layers whose input is fused, in order.
    block: J, the pending token included. mask_id: the token of the other places.
    vocab_size: V. draft_vocab: U. max_context: tokens that it was made for.
    causal: whether a place of the block sees those behind it as well (False) or not (True).
  """
  shape: draft_layer.LayerShape
  layers: int
  features: tuple[int, ...]
  block: int
  mask_id: int
  vocab_size: int
  draft_vocab: int
  max_context: int
  causal: bool = False


@struct.dataclass
class DFlashHead:
  """Weights, each matrix [out, in]."""
  fuse: jax.Array          # f[E, F]
  fused_norm: jax.Array    # f[E]
  layers: tuple[draft_layer.DraftLayer, ...]
  input_norms: tuple[jax.Array, ...]  # f[E] each; of the block alone, before the attention
  norm: jax.Array          # f[E]
  ids: jax.Array | None    # i32[U]; the target's id of each draft id, ascending; None if U = V
  config: DFlashConfig = struct.field(pytree_node=False)

  @property
  def features(self) -> tuple[int, ...]:
    """The target's layers that are read."""
    return self.config.features

  def check(self, target) -> None:
    """Raises ValueError for a target that this drafter was not made for."""
    c = self.config
    # A published drafter may count rows of the vocabulary that only fill it up.
    if target.config.width != c.shape.width or target.config.num_tokens > c.vocab_size:
      raise ValueError(f"the drafter is for a target of {c.vocab_size} token ids and width {c.shape.width}, and this one "
                       f"has {target.config.num_tokens} and {target.config.width}")
    if max(c.features) > target.config.layers:
      raise ValueError(f"the drafter reads layers {c.features}, and the target has {target.config.layers}")

  def init_cache(self, batch: int, slots: int) -> cache_lib.KVCache:
    """An empty cache: of the text only, a block is never kept."""
    s = self.config.shape
    return cache_lib.empty_cache(batch, self.config.layers, s.kv_heads, slots, s.head_width, self.fuse.dtype)

  def text(self, features: jax.Array, positions: jax.Array) -> cache_lib.InFlight:
    """Keys and values of committed tokens, from their features f[B, T, F]; `positions` i32[B, T]."""
    s = self.config.shape
    fused = layers.rms_norm(layers.linear(self.fuse, features.reshape(-1, features.shape[-1]).T), self.fused_norm,
                            s.norm_eps)
    angles = draft_layer.rotary(s, positions)
    made = [draft_layer.keys_and_values(s, layer, fused, angles) for layer in self.layers]
    return cache_lib.InFlight(tuple(k for k, _ in made), tuple(v for _, v in made))

  def block(self, embedded: jax.Array, positions: jax.Array, attends) -> jax.Array:
    """What `logits` takes of every place, f[B, J, E].

    Args:
      embedded: f[B, J, E], of the pending token and the masks. positions: i32[B, J].
      attends: layer index -> the attention of `draft_layer.apply`.
    """
    s, angles = self.config.shape, draft_layer.rotary(self.config.shape, positions)
    x = embedded.reshape(-1, embedded.shape[-1]).T
    for i, (layer, norm) in enumerate(zip(self.layers, self.input_norms, strict=True)):
      x, _, _ = draft_layer.apply(s, layer, x, layers.rms_norm(x, norm, s.norm_eps), angles, attends(i))
    return layers.rms_norm(x, self.norm, s.norm_eps).T.reshape(embedded.shape)

  def forward(self, embedded: jax.Array, positions: jax.Array, cache: cache_lib.KVCache) -> jax.Array:
    """`block` while decoding: over the text in `cache` and the block itself."""
    batch, size = positions.shape
    visible = jnp.arange(cache.slots)[None] < cache.length[:, None]
    seen = jnp.ones((size, size), bool)
    # Behind a barrier: XLA folds a constant mask once for every layer.
    mask = jnp.broadcast_to(jax.lax.optimization_barrier(jnp.tril(seen) if self.config.causal else seen),
                            (batch, size, size))
    return self.block(embedded, positions, lambda i: lambda query, keys, values: layers.attend(
        query, cache.keys[i], cache.values[i], keys, values, visible, mask))

  def logits(self, hidden: jax.Array, shared: jax.Array) -> jax.Array:
    """f32[B, J, U] with the target's head at `ids`, `shared` f[U, E]."""
    out = layers.linear(shared, hidden.reshape(-1, hidden.shape[-1]).T).T.reshape(*hidden.shape[:-1], -1)
    return jax.lax.optimization_barrier(out.astype(jnp.float32))
