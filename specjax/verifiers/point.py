"""Verification of point drafts: draw the next token at every node and follow the children that equal it.

At each node one token y ~ p is drawn; the child equal to y is accepted, and where no child is, y itself is the new
token. This is lossless for any processor, because what is emitted is always the draw, and has the acceptance of
one-hot rejection: p of the children. At temperature 0 it is greedy verification. The rule is the sampler match of
mlx-lm and JetSpec and the naive sampling of SpecInfer (arXiv 2305.09781); it wastes probability only for sampled
drafts. The token at a position comes from the row's token stream, so the text is that of plain decoding.
"""
import dataclasses

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax import tree as tree_lib
from specjax.verifiers import base


@dataclasses.dataclass(frozen=True)
class Point:
  """See the module. Lossless for point drafts on any tree."""

  def law(self, p, tree, depth):
    """See `base.Verifier.law`. Equal siblings count once: only the first of them can be followed."""
    del depth
    width = tree.width
    node = jnp.arange(width)
    # same[b, i, j]: j is an earlier valid child of the same parent with the same token as i.
    same = ((tree.parents[:, :, None] == tree.parents[:, None]) & (tree.tokens[:, :, None] == tree.tokens[:, None])
            & (node[None, :, None] > node[None, None]) & tree.valid[:, None] & (node > 0)[None, None])
    alive = tree.valid & (node > 0)[None] & ~same.any(-1)
    at_parent = jnp.take_along_axis(p, tree.parents[:, :, None], axis=1)
    edge = jnp.where(alive, jnp.take_along_axis(at_parent, tree.tokens[:, :, None], axis=2)[..., 0], 0.0)
    reach = jnp.zeros_like(edge).at[:, 0].set(1.0)
    for i in range(1, width):  # parents come first
      above = jnp.take_along_axis(reach, tree.parents[:, i:i + 1], axis=1)[:, 0]
      reach = reach.at[:, i].set(above * edge[:, i])
    row = jnp.arange(p.shape[0])[:, None]
    taken = jnp.zeros(p.shape, bool).at[row, tree.parents, tree.tokens].max(alive)
    left = jnp.where(taken, 0.0, p)
    mass = left.sum(-1)
    return reach * mass, jnp.where(mass[..., None] > 0, left / jnp.where(mass > 0, mass, 1.0)[..., None], p)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `base.Verifier.draw`."""
    with jax.named_scope("verify"):
      drawn = sampling.draw(logits, params, uniforms, mode)
      path, accepted = tree_lib.follow(tree, drawn, depth)
      token = jnp.take_along_axis(drawn, path[:, -1:], axis=1)[:, 0]
      return base.Verdict(path=path, accepted=accepted, token=token)
