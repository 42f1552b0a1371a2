"""Traversal verification of a tree: from the leaves up, so that a whole path is judged before its parts.

Weng et al. (NeurIPS 2025, arXiv 2505.12398). A node starts with the acceptance a = min(1, a_parent r(x) / q(x)), where
r is what earlier siblings left of its parent's law. Visiting a child changes its parent: with the excess (a r - q)+ of
mass R, r becomes the normalised excess, a becomes R / (R + 1 - a), and without replacement q loses the child's token.
In depth-first order, children first and in the order drawn, the first node that passes with its final a ends the path,
and its r is the law of the new token. Equals block verification on a chain and recursive rejection at depth 1.
"""
import dataclasses

import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.verifiers import base
from specjax.verifiers import siblings


@dataclasses.dataclass(frozen=True)
class Traversal(base.ByLaw):
  """See the module. Lossless on any tree, of sampled and point drafts."""

  def stops(self, p, tree, depth):
    """See `base.ByLaw`; `rest` is the final r of every node."""
    earlier = siblings.before(tree)
    accept = jnp.zeros(tree.tokens.shape, p.dtype).at[:, 0].set(1)
    body = lambda node, carry: _visit(node, carry, tree, earlier)
    left, accept = jax.lax.fori_loop(1, tree.width, body, (p, accept))
    accept = jnp.where(tree.valid, accept, 0)
    refused = jnp.where(_visited_before(tree, earlier, depth), (1 - accept)[:, None], 1).prod(-1)
    return accept * refused, left

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    return base.at_node(rest, node)


def _visit(node, carry, tree, earlier):
  """Gives one node of every row its acceptance, and its parent what is left behind it.

  Depth-first order is not needed for this: a node's acceptance depends on its ancestors and on their earlier children
  alone, which all have lower ids.
  """
  left, accept = carry
  rows = jnp.arange(tree.size.shape[0])
  pick = lambda x: jax.lax.dynamic_index_in_dim(x, node, axis=1, keepdims=False)
  parent, token, here = pick(tree.parents), pick(tree.tokens), pick(tree.drafted)
  a, r = accept[rows, parent], left[rows, parent]
  q = siblings.law_of(tree, node, earlier, left.shape[-1], left.dtype)
  own = jnp.where(here, jnp.minimum(base.ratio(a * r[rows, token], q[rows, token]), 1), 0)
  excess = jnp.maximum(a[:, None] * r - q, 0)
  mass = excess.sum(-1)
  after = jnp.where(mass > 0, mass / jnp.where(mass > 0, mass + (1 - a), 1), a == 1)
  rest = base.normalise(excess, r)
  return (left.at[rows, parent].set(jnp.where(here[:, None], rest, r)),
          accept.at[rows, parent].set(jnp.where(here, after, a)).at[:, node].set(own))


def _visited_before(tree, earlier, depth):
  """bool[B, T, T]: entry [b, i, j] says that j is judged before i: a node below it, or one below an earlier sibling of
  a node on i's path."""
  mask = tree_lib.ancestors(tree.parents, depth)
  below = jnp.swapaxes(mask, 1, 2) & ~jnp.eye(tree.width, dtype=bool)
  count = lambda x: x.astype(jnp.float32)
  beside = jnp.einsum("biu,buw,bjw->bij", count(mask), count(earlier), count(mask)) > 0
  return (below | beside) & tree.valid[:, None]
