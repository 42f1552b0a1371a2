"""The draft head of P-EAGLE: EAGLE-3's, with masks in place of its own outputs, so that one pass drafts all depths.

P-EAGLE (arXiv 2602.01469; the type `peagle` of vllm-project/speculators). The entry of the pending token reads the
target's fused features and that token, as in EAGLE-3 (see `eagle3`). The entries behind it, for the second and further
drafts, read the embedding of a mask's token id and features that were learned, the same at every depth. Nothing recurs.
Behind EAGLE-3's layer may stand ordinary ones, which see features alone; published heads have four layers in all.

Letters: B batch rows, T entries, E width of the head, D width of the target, F = features * D, U draft vocabulary.
"""
from flax import struct
import jax

from specjax import cache as cache_lib
from specjax.models import draft_layer
from specjax.models import eagle3
from specjax.models import layers
from specjax.models import recurrent_head


@struct.dataclass
class PEagleHead(recurrent_head.RecurrentHead):
  """Weights, each matrix [out, in], and static facts.

  Attributes:
    first: an EAGLE-3 head without ids of its own and with `recurs_normed` false: fusion, first layer, last norm and
      vocabulary. Its own embedding, if it has one, was trained with it.
    layers: behind the first one; what enters their attention is E wide. input_norms: f[E] each.
    hidden: f[F]; the features of every mask, which are fused as true ones are.
    ids: i32[U]; the target's id of each draft id, ascending; None if U = V.
    mask_id: the token of every mask, a row of the embedding. depths: tokens that it was trained to draft.
  """
  first: eagle3.Eagle3Head
  layers: tuple[draft_layer.DraftLayer, ...]
  input_norms: tuple[jax.Array, ...]
  hidden: jax.Array
  ids: jax.Array | None
  mask_id: int = struct.field(pytree_node=False)
  depths: int = struct.field(pytree_node=False)

  @property
  def config(self) -> eagle3.Eagle3Config:
    """Of the first layer; the others have its shape."""
    return self.first.config

  @property
  def features(self) -> tuple[int, ...]:
    """The target's layers that are read."""
    return self.first.features

  @property
  def embedding(self) -> jax.Array | None:
    """f[V, E]; None: the target's own."""
    return self.first.embedding

  @property
  def fuse(self) -> jax.Array:
    """f[E, F]."""
    return self.first.fuse

  @property
  def depth(self) -> int:
    """Layers."""
    return 1 + len(self.layers)

  def check(self, target) -> None:
    """Raises ValueError for a target that this head was not made for."""
    self.first.check(target)
    rows = (target.weights.embedding if self.embedding is None else self.embedding).shape[0]
    if not 0 <= self.mask_id < rows:
      raise ValueError(f"the head's mask has token id {self.mask_id}, and the embedding has {rows} rows")

  def fused(self, features: jax.Array) -> jax.Array:
    """The features of committed tokens, f[B, T, F], as the layers take them: f[B, T, E]."""
    return self.first.fused(features)

  def mask(self) -> jax.Array:
    """The feature of a mask as the layers take it: f[E]."""
    return self.fused(self.hidden[None, None])[0, 0]

  def apply(self, embedded: jax.Array, feature: jax.Array, positions: jax.Array, attends):
    """All layers; arguments and results as of `eagle3.Eagle3Head.apply`, `attends` for each of them."""
    c = self.config
    _, rows, block = self.first.apply(embedded, feature, positions, attends)
    x, keys, values = recurrent_head.as_columns(rows), list(block.keys), list(block.values)
    angles = draft_layer.rotary(c.shape, positions + c.first_position)
    for i, (layer, norm) in enumerate(zip(self.layers, self.input_norms, strict=True)):
      into = layers.rms_norm(x, norm, c.shape.norm_eps)
      x, k, v = draft_layer.apply(c.shape, layer, x, into, angles, attends(1 + i))
      keys.append(k)
      values.append(v)
    hidden = layers.rms_norm(x, self.first.norm, c.shape.norm_eps)
    as_rows = lambda columns: recurrent_head.as_rows(columns, positions.shape)
    return as_rows(hidden), as_rows(x), cache_lib.InFlight(tuple(keys), tuple(values))

  def logits(self, hidden: jax.Array) -> jax.Array:
    """f32[B, T, U] over the draft ids."""
    return self.first.logits(hidden)
