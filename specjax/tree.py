"""A proposal as a tree of tokens in static arrays. A chain is a tree; plain decoding is a tree of one node.

Node 0 is the root: the *pending* token, the last emitted one, whose keys and values are not in the cache yet. Drafted
nodes follow in topological order (`parents[i] < i`), the valid ones first, so that the smallest width that holds a
batch's drafts is a slice. Arrays of parent pointers follow `google-deepmind/mctx`; the ancestor mask is that of
tree attention (SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774).

Letters: B batch rows, T nodes (root included), N = T - 1 drafted nodes, D greatest depth.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class TokenTree:
  """Drafted tokens of a batch. Every node is a point draft: its law is one-hot at its token."""
  tokens: jax.Array   # i32[B, T]; column 0 is the pending token
  parents: jax.Array  # i32[B, T]; parents[:, 0] == 0, parents[:, i] < i
  size: jax.Array     # i32[B]; nodes 0 .. size-1 are valid; 1 means nothing drafted

  @property
  def width(self) -> int:
    return self.tokens.shape[1]

  @property
  def valid(self) -> jax.Array:
    """bool[B, T]."""
    return jnp.arange(self.width)[None] < self.size[:, None]

  def narrow(self, width: int) -> "TokenTree":
    """The first `width` nodes; the caller knows that no valid node is lost."""
    return TokenTree(tokens=self.tokens[:, :width], parents=self.parents[:, :width], size=self.size)

  def widen(self, width: int) -> "TokenTree":
    """Padded to `width` nodes; the added ones are not valid."""
    extra = ((0, 0), (0, width - self.width))
    return TokenTree(tokens=jnp.pad(self.tokens, extra), parents=jnp.pad(self.parents, extra), size=self.size)


def root_only(pending: jax.Array) -> TokenTree:
  """Plain decoding: a tree of one node. `pending` i32[B]."""
  chex.assert_rank(pending, 1)
  return TokenTree(tokens=pending[:, None], parents=jnp.zeros_like(pending)[:, None], size=jnp.ones_like(pending))


def chain(pending: jax.Array, draft: jax.Array, count: jax.Array) -> TokenTree:
  """A chain: `pending` i32[B], `draft` i32[B, N] of which the first `count` i32[B] are valid."""
  chex.assert_equal_shape([pending, count])
  chex.assert_rank(draft, 2)
  tokens = jnp.concatenate([pending[:, None], draft], axis=1)
  parents = jnp.maximum(jnp.arange(tokens.shape[1], dtype=jnp.int32) - 1, 0)
  return TokenTree(tokens=tokens, parents=jnp.broadcast_to(parents, tokens.shape), size=count + 1)


def ancestors(parents: jax.Array, depth: int) -> jax.Array:
  """Ancestor-or-self mask bool[B, T, T]: entry [b, i, j] says that node j is on the path from the root to i.

  `depth` is a static bound of the tree's depth; the pointers are followed that often, so a chain of depth D costs D
  small gathers.
  """
  chex.assert_rank(parents, 2)
  batch, width = parents.shape
  self_mask = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
  mask, at = self_mask, parents
  for _ in range(min(depth, width - 1)):
    mask = mask | (at[:, :, None] == jnp.arange(width)[None, None])
    at = jnp.take_along_axis(parents, at, axis=1)
  return mask


def depths(mask: jax.Array) -> jax.Array:
  """Depth of every node, i32[B, T], from its ancestor mask: the root has depth 0."""
  return mask.sum(-1).astype(jnp.int32) - 1


def follow(tree: TokenTree, drawn: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
  """Walks from the root along the children that equal the token drawn at their parent.

  Args:
    tree: the proposal.
    drawn: i32[B, T], the token drawn at every node.
    depth: static bound of the tree's depth, D.

  Returns:
    path i32[B, D + 1], node ids from the root on, the last one repeated; accepted i32[B], how many drafted nodes are
    on it. Among equal siblings the first is followed.
  """
  chex.assert_equal_shape([tree.tokens, drawn])
  width = tree.width
  node = jnp.arange(width, dtype=jnp.int32)[None]
  wanted = jnp.take_along_axis(drawn, tree.parents, axis=1)
  agrees = tree.valid & (tree.tokens == wanted) & (node > 0)
  current = jnp.zeros(tree.tokens.shape[0], jnp.int32)
  accepted = jnp.zeros_like(current)
  path = [current]
  for step in range(depth):
    if step < width - 1:
      candidate = jnp.where(agrees & (tree.parents == current[:, None]), node, width).min(-1)
      accepted = accepted + (candidate < width)
      current = jnp.where(candidate < width, candidate, current)
    path.append(current)
  return jnp.stack(path, axis=1), accepted
