"""The draft head of EAGLE-1, which EAGLE-2 and HASS draft with as well: it predicts the target's next feature.

The feature at token t is the target's last hidden state *behind its final norm*, what its own head takes: Transformers'
`hidden_states[-1]`, from which SafeAILab's data are made. One matrix takes the embedding of token t + 1 and the
feature, in this order, to the width of one; decoder layers follow, the first of them without a norm before its
attention, the last without one behind it. Their output stands for the feature at token t + 1: the target's own head,
which is frozen, makes logits of it, and it recurs as it is.
EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), SafeAILab/EAGLE `cnets1.py`; HASS (arXiv 2408.15766).

Letters: B batch rows, T entries, E width of head and target, L layers of the head, H query heads, K key/value heads,
C head width, U draft ids, V target vocabulary.
"""
import dataclasses

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import base
from specjax.models import draft_layer
from specjax.models import layers
from specjax.models import recurrent_head


@dataclasses.dataclass(frozen=True)
class EagleConfig:
  """Static facts of a head: the shape of its layers, vocab_size V, draft_vocab U, and max_context, tokens that it was
  made for."""
  shape: draft_layer.LayerShape
  vocab_size: int
  draft_vocab: int
  max_context: int


@struct.dataclass
class EagleHead(recurrent_head.RecurrentHead):
  """Weights, each matrix [out, in], and configuration."""
  fuse: jax.Array               # f[E, 2 * E]; columns: embedding, then feature
  fuse_bias: jax.Array | None   # f[E]
  layers: tuple[draft_layer.DraftLayer, ...]  # L; what enters their attention is E wide
  input_norms: tuple[jax.Array, ...]          # (L - 1) x f[E]; of every layer but the first
  ids: jax.Array | None         # i32[U]; the target's id of each draft id, ascending; None if U = V
  config: EagleConfig = struct.field(pytree_node=False)
  embedding: jax.Array | None = None  # f[V, E]; None: the target's own

  shares_head = True

  @property
  def depth(self) -> int:
    """L."""
    return len(self.layers)

  @property
  def features(self) -> tuple[int, ...]:
    """No layer's input is read: the feature is the hidden state behind the final norm."""
    return ()

  def check(self, target) -> None:
    """Raises ValueError for a target that this head was not made for."""
    c = self.config
    given = (base.known_ids(target), target.config.width)
    # A published head may count rows of the vocabulary that only fill it up.
    if given[1] != c.shape.width or given[0] > c.vocab_size:
      raise ValueError(f"the head is for a target of {c.vocab_size} token ids and width {c.shape.width}, and this one "
                       f"has {given[0]} and {given[1]}")

  def fused(self, features: jax.Array) -> jax.Array:
    """The features of committed tokens f[B, T, E], which enter as they are."""
    return features

  def apply(self, embedded: jax.Array, feature: jax.Array, positions: jax.Array, attends):
    """The layers, over entries whose attention is up to `attends`.

    Args:
      embedded: f[B, T, E], of the token behind each entry. feature: f[B, T, E], the target's or recurring.
      positions: i32[B, T], the entries' indices in the text.
      attends: index of a layer -> the attention of `draft_layer.apply`.

    Returns:
      hidden f[B, T, E], what `logits` takes; the feature that recurs, which is the same; the entries' in-flight block.
    """
    chex.assert_equal_shape([embedded, feature])
    shape, lead = self.config.shape, positions.shape
    both = jnp.concatenate([recurrent_head.as_columns(embedded), recurrent_head.as_columns(feature)])
    x, angles = layers.linear(self.fuse, both, self.fuse_bias), draft_layer.rotary(shape, positions)
    keys, values = [], []
    for i, (layer, norm) in enumerate(zip(self.layers, (None, *self.input_norms), strict=True)):
      into = x if norm is None else layers.rms_norm(x, norm, shape.norm_eps)
      x, made, held = draft_layer.apply(shape, layer, x, into, angles, attends(i))
      keys.append(made)
      values.append(held)
    hidden = recurrent_head.as_rows(x, lead)
    return hidden, hidden, cache_lib.InFlight(tuple(keys), tuple(values))

  def logits(self, hidden: jax.Array, shared: jax.Array) -> jax.Array:
    """f32[B, T, U] with the target's head at `ids`, `shared` f[U, E]."""
    return recurrent_head.project(shared, hidden)
