"""Recursive rejection on a tree: at each node its children are tried in turn, each against what the last one left.

A child x drawn from q is accepted with probability min(1, r(x) / q(x)), where r starts as p and becomes the normalised
(r - q)+ after every rejection; the last r is the law of the new token, not p and not the first residual. With
replacement this is the multi-step speculative sampling of SpecInfer (arXiv 2305.09781); without, q loses the token of
every earlier sibling and is normalised again, as in Sequoia (arXiv 2402.12374), MCSD (arXiv 2401.06706) and EAGLE-1:
k children that are all of q's support are then accepted for certain. Which of the two holds is a fact of the draft
(`TokenTree.replacement`).

Where a node has both sampled and point children the sampled ones come first, whatever their order: a point is then
worth all that is left at its token, which is what makes greedy multi-draft optimal (see `greedy_multi`). Siblings are
independent of each other given their parent, so any fixed order is lossless.
"""
import dataclasses

import jax
import jax.numpy as jnp

from specjax.verifiers import base
from specjax.verifiers import siblings


@dataclasses.dataclass(frozen=True)
class Recursive(base.ByLaw):
  """See the module. Lossless on any tree, of sampled and point drafts."""

  def stops(self, p, tree, depth):
    """See `base.ByLaw`; `rest` is the law that sampled children left at every node and the point children."""
    earlier = siblings.before(tree)
    left, edge, sampled = p, jnp.zeros(tree.tokens.shape, p.dtype), base.is_sampled(tree)
    refused = jnp.ones_like(edge)  # the chance that no child so far was accepted
    if tree.q is not None:
      body = lambda node, carry: _try(node, carry, tree, earlier, sampled)
      left, edge, refused = jax.lax.fori_loop(1, tree.width, body, (left, edge, refused))
    alive = siblings.points(tree, earlier, tree.drafted & ~sampled)
    at_parent = jnp.take_along_axis(refused, tree.parents, axis=1) * base.at_parent(left, tree)
    return siblings.stop_at(jnp.where(alive, at_parent, edge), tree, depth), (left, alive)

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    left, alive = rest
    here = base.at_node(left, node)
    return siblings.without_children(here, tree, alive, node)


def _try(node, carry, tree, earlier, sampled):
  """Tries one sampled node of every row against what its earlier siblings left of its parent's law."""
  left, edge, refused = carry
  rows = jnp.arange(tree.size.shape[0])
  pick = lambda x: jax.lax.dynamic_index_in_dim(x, node, axis=1, keepdims=False)
  parent, token, here = pick(tree.parents), pick(tree.tokens), pick(sampled)
  r = left[rows, parent]
  q = siblings.law_of(tree, node, earlier, left.shape[-1], left.dtype)
  accept = jnp.where(here, jnp.minimum(base.ratio(r[rows, token], q[rows, token]), 1), 0)
  before = refused[rows, parent]
  rest = base.normalise(jnp.maximum(r - q, 0), r)
  return (left.at[rows, parent].set(jnp.where(here[:, None], rest, r)), edge.at[:, node].set(before * accept),
          refused.at[rows, parent].set(before * (1 - accept)))
