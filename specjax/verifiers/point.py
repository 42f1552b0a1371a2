"""Verification of point drafts: draw the next token at every node and follow the children that equal it.

At each node one token y ~ p is drawn; the child equal to y is accepted, and where no child is, y itself is the new
token. This is lossless for any processor and any draft, because what is emitted is always the draw, and has the
acceptance of one-hot rejection: p of the children. At temperature 0 it is greedy verification. The rule is the sampler
match of mlx-lm and JetSpec and the naive sampling of SpecInfer (arXiv 2305.09781); it wastes probability only for
sampled drafts. The token at a position comes from the row's token stream, so the text is that of plain decoding.
"""
import dataclasses

import jax
import jax.numpy as jnp

from specjax import keys
from specjax import sampling
from specjax.verifiers import base
from specjax.verifiers import siblings


@dataclasses.dataclass(frozen=True)
class Point(base.ByLaw):
  """See the module. Lossless on any tree; sampled nodes are treated as points."""
  purposes = (keys.TOKEN,)

  def stops(self, p, tree, depth):
    """See `base.ByLaw`. Equal siblings count once: only the first of them can be followed."""
    alive = siblings.points(tree, siblings.before(tree), tree.drafted)
    return siblings.stop_at(jnp.where(alive, base.at_parent(p, tree), 0), tree, depth), alive

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    here = base.at_node(p, node)
    return siblings.without_children(here, tree, rest, node)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `base.Verifier.draw`: the sampler's own draws decide, so no law is looked at."""
    with jax.named_scope("verify"):
      return base.match(self.drawn(logits, params, uniforms, mode), tree, depth)

  def drawn(self, logits, params, uniforms, mode):
    """The token drawn at every node, i32[B, T]; arguments as in `draw`."""
    return sampling.draw(logits, params, uniforms.token, mode)
