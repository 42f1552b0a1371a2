"""A proposal as a tree of tokens in static arrays. A chain is a tree; plain decoding is a tree of one node.

Node 0 is the root: the *pending* token, the last emitted one, whose keys and values are not in the cache yet. Drafted
nodes follow in topological order (`parents[i] < i`), the valid ones first, so that the smallest width that holds a
batch's drafts is a slice. Arrays of parent pointers follow `google-deepmind/mctx`; the ancestor mask is that of
tree attention (SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774).

A drafted node is a *point* draft, its law one-hot at its token, or a *sampled* one, drawn from the law `q` that stands
at its parent. Siblings stand in the order in which they were drawn.

Letters: B batch rows, T nodes (root included), N = T - 1 drafted nodes, D greatest depth, V vocabulary.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax import draft_laws


@struct.dataclass
class TokenTree:
  """Drafted tokens of a batch.

  `q` at a node is the law that its sampled children were drawn from, after every processor: independently of each
  other (`replacement`), or each from what earlier sampled siblings left of it. Without `sampled` all nodes are points.
  """
  tokens: jax.Array   # i32[B, T]; column 0 is the pending token
  parents: jax.Array  # i32[B, T]; parents[:, 0] == 0, parents[:, i] < i
  size: jax.Array     # i32[B]; nodes 0 .. size-1 are valid; 1 means nothing drafted
  sampled: jax.Array | None = None          # bool[B, T]; which nodes were drawn from q
  q: draft_laws.DraftLaw | None = None      # at node i the law of i's sampled children
  resume: cache_lib.Resume | None = None    # lower layers of the nodes, by a drafter that shares them with the target
  replacement: bool = struct.field(pytree_node=False, default=True)

  @property
  def width(self) -> int:
    return self.tokens.shape[1]

  @property
  def valid(self) -> jax.Array:
    """bool[B, T]."""
    return jnp.arange(self.width)[None] < self.size[:, None]

  @property
  def drafted(self) -> jax.Array:
    """bool[B, T]: valid nodes, the root apart."""
    return self.valid & (jnp.arange(self.width) > 0)[None]

  def narrow(self, width: int) -> "TokenTree":
    """The first `width` nodes; the caller knows that no valid node is lost."""
    return self.replace(tokens=self.tokens[:, :width], parents=self.parents[:, :width],
                        sampled=None if self.sampled is None else self.sampled[:, :width],
                        q=None if self.q is None else self.q.narrow(width),
                        resume=None if self.resume is None else self.resume.narrow(width))

  def widen(self, width: int) -> "TokenTree":
    """Padded to `width` nodes; the added ones are not valid."""
    extra = ((0, 0), (0, width - self.width))
    return self.replace(tokens=jnp.pad(self.tokens, extra), parents=jnp.pad(self.parents, extra),
                        sampled=None if self.sampled is None else jnp.pad(self.sampled, extra),
                        q=None if self.q is None else self.q.widen(width),
                        resume=None if self.resume is None else self.resume.widen(width))


def root_only(pending: jax.Array) -> TokenTree:
  """Plain decoding: a tree of one node. `pending` i32[B]."""
  chex.assert_rank(pending, 1)
  return TokenTree(tokens=pending[:, None], parents=jnp.zeros_like(pending)[:, None], size=jnp.ones_like(pending))


def chain(pending: jax.Array, draft: jax.Array, count: jax.Array, q: draft_laws.DraftLaw | None = None) -> TokenTree:
  """A chain: `pending` i32[B], `draft` i32[B, N] of which the first `count` i32[B] are valid.

  With `q`, of N or N + 1 nodes, drafted token i was drawn from the law at node i; without it all are point drafts.
  """
  chex.assert_equal_shape([pending, count])
  chex.assert_rank(draft, 2)
  tokens = jnp.concatenate([pending[:, None], draft], axis=1)
  parents = jnp.broadcast_to(jnp.maximum(jnp.arange(tokens.shape[1], dtype=jnp.int32) - 1, 0), tokens.shape)
  if q is None:
    return TokenTree(tokens=tokens, parents=parents, size=count + 1)
  sampled = jnp.broadcast_to(jnp.arange(tokens.shape[1]) > 0, tokens.shape)
  return TokenTree(tokens=tokens, parents=parents, size=count + 1, sampled=sampled, q=q.widen(tokens.shape[1]))


def check(tree: TokenTree, vocabulary: int) -> TokenTree:
  """Refuses a tree that no verifier can judge; for concrete arrays, on the host. Returns the tree.

  Raises:
    ValueError: names the row and node: a parent that does not come first, a token outside the vocabulary, a sampled
      node without q, a law that does not sum to 1 or names an id twice, or one that gives its own token no chance.
  """
  tokens, parents, size = (np.asarray(x) for x in (tree.tokens, tree.parents, tree.size))
  sampled = None if tree.sampled is None else np.asarray(tree.sampled)
  if sampled is not None and tree.q is None and sampled.any():
    raise ValueError("the tree has sampled nodes but no q: a verifier needs the law that they were drawn from; give q, "
                     "or sampled=None if the tokens were chosen and not drawn")
  q = None if sampled is None or tree.q is None else np.asarray(tree.q.dense(vocabulary))
  for row in range(len(size)):
    if not 1 <= size[row] <= tree.width:
      raise ValueError(f"row {row} has size {size[row]}; allowed are 1 to {tree.width}, the tree's nodes")
    for node in range(1, size[row]):
      where, parent, token = f"node {node} of row {row}", parents[row, node], tokens[row, node]
      if not 0 <= parent < node:
        raise ValueError(f"{where} has parent {parent}; a parent comes before its children")
      if not 0 <= token < vocabulary:
        raise ValueError(f"{where} drafts id {token}; ids are 0 to {vocabulary - 1}")
      if q is None or not sampled[row, node]:
        continue
      if isinstance(tree.q, draft_laws.SparseLaw):
        ids = np.asarray(tree.q.ids)[row, parent][np.asarray(tree.q.probs)[row, parent] > 0]
        if len(set(ids.tolist())) < len(ids):
          raise ValueError(f"q at node {parent} of row {row} names ids twice: {sorted(ids.tolist())}; each id once")
      law = q[row, parent]
      if not (abs(law.sum() - 1) <= 1e-3 and law.min() >= 0):  # as well where it is no number
        raise ValueError(f"q at node {parent} of row {row} sums to {law.sum():.6g} and its least entry is "
                         f"{law.min():.6g}; it must be a law")
      if law[token] <= 0:
        raise ValueError(f"{where} was drawn as id {token}, to which q gives probability {law[token]:.6g}: q is not "
                         "the law that it was drawn from")
  return tree


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


def path_to(tree: TokenTree, node: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
  """The path from the root to one node a row.

  Args:
    tree: the proposal. node: i32[B]. depth: static bound of the tree's depth, D.

  Returns:
    path i32[B, D + 1], node ids from the root on, the last one repeated; and the node's depth i32[B].
  """
  mask = ancestors(tree.parents, depth)
  above = jnp.take_along_axis(mask, node[:, None, None], axis=1)[:, 0]
  level = above.sum(-1).astype(jnp.int32) - 1
  place = jnp.minimum(jnp.arange(depth + 1, dtype=jnp.int32)[None], level[:, None])
  here = above[:, None] & (depths(mask)[:, None] == place[:, :, None])
  return jnp.argmax(here, -1).astype(jnp.int32), level
