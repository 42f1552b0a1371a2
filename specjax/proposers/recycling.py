"""Token recycling: drafts a tree of the tokens that were most probable behind each token when it was last seen.

Method of Token Recycling (arXiv 2408.08696; `Luowaterbi/TokenRecycling`): a matrix has for every id the K most probable
next ids, as the target gave them at the latest node with that id in any verified tree, rejected nodes as well. From the
pending token a tree of a fixed shape is read off the matrix level by level: the child of rank r of a node is entry r of
the row of the node's token.

What differs from the original: a row of the matrix that was never written has no entries, where there they are id 0;
the shape is the best one of its size for a table of acceptance (see `static_trees`); a batch row has a matrix of its
own while it runs, so that rows stay independent, and `remember` merges them for the next requests. Of equal tokens in
one tree the node that stands last writes the row, that is the least probable place; the original leaves this open.

Letters: B batch rows, V vocabulary, K successors kept of each token, T nodes (root included).
"""
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import static_trees
from specjax.proposers import base
from specjax.proposers import slots

# How often the successor of each rank is the next token, where there are any: SmolLM2-135M, greedy, 451 places of
# chat, summaries, code edits and mathematics, with trees of 64 nodes; the last three are smoothed.
ACCEPTANCE = (0.366, 0.118, 0.071, 0.038, 0.018, 0.017, 0.015, 0.013)


@struct.dataclass
class State:
  """Of a batch."""
  matrix: jax.Array  # i32[B, V, K]; -1 where a token was never seen
  tokens: jax.Array  # i32[B, T]; of the latest tree


@struct.dataclass
class Recycling(base.Defaults):
  """Token recycling with trees of up to `num_nodes` nodes. Make it with `recycling`.

  Nodes that are not in the matrix, end-of-sequence ids and all below them are left out, and so is what lies deeper than
  the row's budget. Memory: a matrix of V * K numbers, 1.5 MiB for 49152 ids and 8 successors, for the proposer and for
  each row.

  Attributes:
    matrix: i32[V, K], what is known of past requests; -1: nothing.
    num_nodes: T, the root included; 16 for a CPU, where width costs time. The paper drafts 80 on a GPU.
    depth: the greatest depth of a node.
    acceptance: how often the successor of each rank is the next token; at most K ranks.

  Raises:
    ValueError: for sizes below 1 or a table that is none; by `init` for a matrix of another vocabulary or of fewer
      successors than the table has ranks.
  """
  matrix: jax.Array
  num_nodes: int = struct.field(pytree_node=False, default=16)
  depth: int = struct.field(pytree_node=False, default=6)
  acceptance: tuple[float, ...] = struct.field(pytree_node=False, default=ACCEPTANCE)

  def __post_init__(self):
    if self.num_nodes < 2 or self.depth < 1:
      raise ValueError(f"num_nodes={self.num_nodes}, depth={self.depth}: needed are 2 nodes, the root and one draft, "
                       "or more, and a depth of 1 or more; for no drafts use the plain method")
    self.shape()  # which checks the table

  def shape(self) -> static_trees.Shape:
    """The tree that is drafted where the matrix knows all of it."""
    return _shape(tuple(self.acceptance), self.num_nodes, self.depth)

  @property
  def max_nodes(self) -> int:
    return len(self.shape().parents)

  @property
  def max_depth(self) -> int:
    return int(static_trees.depths(self.shape().parents).max())

  @property
  def node_ids(self) -> int:
    """See `base.Proposer`: K."""
    return self.matrix.shape[1]

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    del capacity
    vocabulary, successors = self.matrix.shape
    if vocabulary != target.vocab_size or successors < len(self.acceptance):
      raise ValueError(f"matrix of shape {self.matrix.shape}: this target needs {target.vocab_size} rows, one for each "
                       f"id, and this table of acceptance at least {len(self.acceptance)} successors; make the "
                       "proposer with `recycling`")
    return State(matrix=jnp.broadcast_to(self.matrix, (batch, *self.matrix.shape)).astype(jnp.int32),
                 tokens=jnp.zeros((batch, self.max_nodes), jnp.int32))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    parents, ranks = (np.asarray(x) for x in self.shape())
    depths = static_trees.depths(parents)
    row = jnp.arange(context.length.shape[0])[:, None]
    tokens = jnp.zeros((row.shape[0], len(parents)), jnp.int32).at[:, 0].set(context.pending)
    keep = jnp.zeros(tokens.shape, bool).at[:, 0].set(context.active)
    for depth in range(1, depths.max() + 1):
      level = np.flatnonzero(depths == depth)
      above = parents[level]
      found = state.matrix[row, tokens[:, above], ranks[level]]
      ends = (found[:, :, None] == context.rules.eos[:, None]).any(-1)
      # The step emits one token more than it accepts.
      usable = (found >= 0) & ~ends & (depth < context.budget)[:, None]
      tokens = tokens.at[:, level].set(jnp.maximum(found, 0))
      keep = keep.at[:, level].set(keep[:, above] & usable)
    tree, _ = slots.pack(tokens, jnp.asarray(parents, jnp.int32), keep, len(parents))
    return tree, state.replace(tokens=tree.tokens)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: every node that was verified writes the row of its token."""
    del target
    if committed.path is None:
      return state
    batch, width = state.tokens.shape
    node = jnp.arange(width)
    verified = (node <= committed.drafted[:, None]) & (committed.count > 0)[:, None]
    equal = state.tokens[:, :, None] == state.tokens[:, None]
    overwritten = (equal & verified[:, None] & (node[None] > node[:, None])).any(-1)
    where = jnp.where(verified & ~overwritten, state.tokens, state.matrix.shape[1])
    matrix = state.matrix.at[jnp.arange(batch)[:, None], where].set(committed.node_ids[:, :width], mode="drop")
    return state.replace(matrix=matrix)

  def remember(self, state, outputs):
    """See `base.Proposer.remember`: what the requests changed, a later batch row over an earlier one."""
    del outputs
    before = np.asarray(self.matrix)
    merged = before.copy()
    for learned in np.asarray(state.matrix):
      changed = (learned != before).any(-1)
      merged[changed] = learned[changed]
    return self.replace(matrix=jnp.asarray(merged))

  def forget(self):
    """See `base.Proposer.forget`."""
    return self.replace(matrix=jnp.full(self.matrix.shape, -1, jnp.int32))


def recycling(vocabulary: int, *, successors: int = 8, **options) -> Recycling:
  """A proposer that knows nothing yet, for a target of `vocabulary` ids.

  Args:
    vocabulary: V. successors: K. options: fields of `Recycling`; the table of acceptance is cut to K ranks.

  Raises:
    ValueError: for a K that is below 1 or above V, and see `Recycling`.
  """
  if not 1 <= successors <= vocabulary:
    raise ValueError(f"successors={successors}: allowed are 1 to {vocabulary}, the target's ids")
  options["acceptance"] = tuple(options.get("acceptance", ACCEPTANCE))[:successors]
  return Recycling(matrix=jnp.full((vocabulary, successors), -1, jnp.int32), **options)


@functools.lru_cache
def _shape(acceptance, nodes, depth):
  return static_trees.best_first(acceptance, nodes, depth)
