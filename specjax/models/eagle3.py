"""The draft head of EAGLE-3: one layer over the target's fused features and the embedding of the next token.

Entry t of a text joins the target's features at token t, from three of its layers, with the embedding of token t + 1
(see `recurrent_head`).
EAGLE-3 (arXiv 2503.01840, SafeAILab/EAGLE), and the dialects of SpecForge and of speculators, including EAGLE-3.1:
they differ in norms and in what recurs, see `Eagle3Config`.

Letters: B batch rows, T entries, E width of the head, D width of the target, F = features * D, V target vocabulary,
U draft vocabulary.
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
class Eagle3Config:
  """Static facts of a head.

  Attributes:
    shape: of its layer.
    target_width: D.
    features: the target's layers whose input is fused, in order of the columns of `fuse`; L stands for the output of the
      last one.
    vocab_size: V. draft_vocab: U.
    recurs_normed: what recurs is the output behind the final norm (speculators' `norm_output`), not the one before it.
    residual_normed: the residual is the feature behind its norm (`norm_before_residual`).
    first_position: rotary position of entry 0: 0, or 1 in speculators' heads.
    max_context: tokens that it was made for.
  """
  shape: draft_layer.LayerShape
  target_width: int
  features: tuple[int, ...]
  vocab_size: int
  draft_vocab: int
  max_context: int
  recurs_normed: bool = False
  residual_normed: bool = False
  first_position: int = 0


@struct.dataclass
class Eagle3Head(recurrent_head.RecurrentHead):
  """Weights, each matrix [out, in], and configuration; what does not exist in a dialect is None."""
  fuse: jax.Array                # f[E, F]
  token_norm: jax.Array          # f[E]; of the embedding
  feature_norm: jax.Array        # f[E]; of the feature
  layer: draft_layer.DraftLayer  # I = 2E: embedding first, feature second
  norm: jax.Array                # f[E]; before the vocabulary
  head: jax.Array                # f[U, E]
  ids: jax.Array | None          # i32[U]; the target's id of each draft id, ascending; None if U = V
  config: Eagle3Config = struct.field(pytree_node=False)
  embedding: jax.Array | None = None            # f[V, E]; None: the target's own
  fuse_norm: jax.Array | None = None            # f[F]; of all features together, before `fuse` (`norm_before_fc`)
  fuse_norms: tuple[jax.Array, ...] | None = None  # f[D] each; of every feature alone (EAGLE-3.1's `fc_norm`)

  depth = 1  # layers

  @property
  def features(self) -> tuple[int, ...]:
    """The target's layers that are read."""
    return self.config.features

  def check(self, target) -> None:
    """Raises ValueError for a target that this head was not made for."""
    c = self.config
    given = (base.known_ids(target), target.config.width)
    if given[1] != c.target_width or given[0] > c.vocab_size:
      raise ValueError(f"the head is for a target of {c.vocab_size} token ids and width {c.target_width}, and this one "
                       f"has {given[0]} and {given[1]}")
    if max(c.features) > target.config.layers:
      raise ValueError(f"the head reads layers {c.features}, and the target has {target.config.layers}")
    if self.embedding is None and c.shape.width != c.target_width:
      raise ValueError(f"the head has width {c.shape.width} and no embedding of its own, and the target's is "
                       f"{c.target_width} wide")

  def fused(self, features: jax.Array) -> jax.Array:
    """The features of committed tokens, f[B, T, F], as the layer takes them: f[B, T, E]."""
    columns = recurrent_head.as_columns(features)
    eps = self.config.shape.norm_eps
    if self.fuse_norms is not None:
      parts = jnp.split(columns, len(self.fuse_norms))
      columns = jnp.concatenate([layers.rms_norm(x, w, eps) for x, w in zip(parts, self.fuse_norms, strict=True)])
    if self.fuse_norm is not None:
      columns = layers.rms_norm(columns, self.fuse_norm, eps)
    return recurrent_head.as_rows(layers.linear(self.fuse, columns), features.shape[:2])

  def apply(self, embedded: jax.Array, feature: jax.Array, positions: jax.Array, attends):
    """The layer, over entries whose attention is up to `attends`.

    Args:
      embedded: f[B, T, E], of the token behind each entry. feature: f[B, T, E], fused or recurring.
      positions: i32[B, T], the entries' indices in the text.
      attends: index of a layer, which is 0 -> the attention of `draft_layer.apply`.

    Returns:
      hidden f[B, T, E], what `logits` takes; the feature that recurs f[B, T, E]; the entries' in-flight block.
    """
    chex.assert_equal_shape([embedded, feature])
    c, eps = self.config, self.config.shape.norm_eps
    g = recurrent_head.as_columns(feature)
    normed = layers.rms_norm(g, self.feature_norm, eps)
    into = jnp.concatenate([layers.rms_norm(recurrent_head.as_columns(embedded), self.token_norm, eps), normed])
    angles = draft_layer.rotary(c.shape, positions + c.first_position)
    x, keys, values = draft_layer.apply(c.shape, self.layer, normed if c.residual_normed else g, into, angles,
                                        attends(0))
    hidden = recurrent_head.as_rows(layers.rms_norm(x, self.norm, eps), positions.shape)
    recurring = hidden if c.recurs_normed else recurrent_head.as_rows(x, positions.shape)
    return hidden, recurring, cache_lib.InFlight((keys,), (values,))

  def logits(self, hidden: jax.Array) -> jax.Array:
    """f32[B, T, U] over the draft ids."""
    return recurrent_head.project(self.head, hidden)
