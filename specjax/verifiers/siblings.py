"""What rules for trees share: the order of siblings, the law of each of them, and the children that are points.

Letters: B batch rows, T nodes, V vocabulary.
"""
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax import vocabulary as vocabulary_lib
from specjax.verifiers import base


def before(tree: tree_lib.TokenTree) -> jax.Array:
  """bool[B, T, T]: entry [b, i, j] says that the valid node j is an earlier sibling of i."""
  node = jnp.arange(tree.width)
  return ((tree.parents[:, :, None] == tree.parents[:, None]) & (node[None, :, None] > node[None, None])
          & tree.drafted[:, None])


def along_paths(values: jax.Array, tree: tree_lib.TokenTree, depth: int) -> jax.Array:
  """f[B, T]: the product of `values` f[B, T] over each node's path, the root apart."""
  on_path = tree_lib.ancestors(tree.parents, depth).at[:, :, 0].set(False)
  return jnp.where(on_path, values[:, None], 1).prod(-1)


def law_of(tree: tree_lib.TokenTree, node: jax.Array, earlier: jax.Array, vocabulary: int, dtype) -> jax.Array:
  """The law that one node of every row was drawn from, its earlier siblings known: f[B, V].

  A point's is one-hot. Without replacement, what sampled siblings took is taken out and the rest normalised; the sum is
  taken anew, because one minus what was taken is mostly rounding when little is left. Where nothing is left the law is
  zero, and so is every chance of acceptance.

  Args:
    tree: the proposal. node: i32, the same for all rows. earlier: of `before`.
  """
  pick = lambda x: jax.lax.dynamic_index_in_dim(x, node, axis=1, keepdims=False)
  point = jax.nn.one_hot(pick(tree.tokens), vocabulary, dtype=dtype)
  if tree.q is None:
    return point
  sampled = base.is_sampled(tree)
  law = tree.q.row(pick(tree.parents), vocabulary).astype(dtype)
  if not tree.replacement:
    law = vocabulary_lib.without(law, jnp.where(pick(earlier) & sampled, tree.tokens, vocabulary))
    mass = law.sum(-1, keepdims=True)
    law = law / jnp.where(mass > 0, mass, 1)
  return jnp.where(pick(sampled)[:, None], law, point)


def points(tree: tree_lib.TokenTree, earlier: jax.Array, of: jax.Array) -> jax.Array:
  """bool[B, T]: nodes among `of` bool[B, T] that are the first of their token among those siblings."""
  equal = tree.tokens[:, :, None] == tree.tokens[:, None]
  return of & ~(earlier & of[:, None] & equal).any(-1)


def without_children(weights: jax.Array, tree: tree_lib.TokenTree, children: jax.Array, node: jax.Array) -> jax.Array:
  """`weights` f[B, V] at one node a row, i32[B], with the tokens of its `children` bool[B, T] taken out."""
  taken = jnp.where(children & (tree.parents == node[:, None]), tree.tokens, weights.shape[-1])
  return vocabulary_lib.without(weights, taken)


def stop_at(edge: jax.Array, tree: tree_lib.TokenTree, depth: int) -> jax.Array:
  """Where the path ends, f[B, T], when node i is accepted with probability `edge` f[B, T] once its parent was."""
  edge = jnp.where(tree.drafted, edge, 0)
  to_children = jnp.zeros_like(edge).at[jnp.arange(edge.shape[0])[:, None], tree.parents].add(edge)
  reach = along_paths(edge, tree, depth)
  return jnp.where(tree.valid, reach * jnp.maximum(1 - to_children, 0), 0)
