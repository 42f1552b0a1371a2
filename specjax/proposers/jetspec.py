"""JetSpec: a causal DFlash block drafts a tree, opened best first until its nodes are used up.

JetSpec (arXiv 2606.18394, hao-ai-lab/JetSpec, whose builder `accum_logp` this is). The laws of the depths do not
depend on the path, so the children of every node of a depth are the same ids. The node with the greatest product of
probabilities is opened next and gets all its `beam` children, the last one as many as there is room for; so a deep
path that is sure is followed as far as the block goes, and a node that is opened costs its whole family. `DFlash` with
`nodes` keeps the most probable nodes instead, from a beam on every level.

It differs in that an end of sequence is no draft, as the step would draw it at no cost: its place stays empty.

Letters: B batch rows, N depths, k children, T nodes.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import growth
from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import dflash


@struct.dataclass
class JetSpec(dflash.DFlash):
  """Drafts a tree of `nodes` nodes.

  Attributes:
    head: a `models.dflash.DFlashHead`; JetSpec's are causal.
    num_tokens: greatest depth; at most one less than the block has places.
    nodes: T, root included. JetSpec runs 128 or 256 on accelerators. beam: k; 7 there.

  Raises:
    ValueError: as `DFlash`, and without nodes.
  """
  nodes: int | None = struct.field(pytree_node=False, default=16)
  beam: int = struct.field(pytree_node=False, default=7)

  def __post_init__(self):
    if self.nodes is None and hasattr(self.head, "config"):
      raise ValueError("nodes=None: JetSpec drafts a tree of 2 nodes or more; for chains use DFlash")
    super().__post_init__()

  def drafted(self, made, ids, context, keys, most, length_state, vocabulary):
    """See `parallel.ChainOrTree.drafted`."""
    del keys, length_state, vocabulary
    return open_best(made, ids, context, most, self.nodes)


def open_best(best: tuple[jax.Array, jax.Array], ids, context: base.Context, levels: jax.Array,
              nodes: int) -> tree_lib.TokenTree:
  """The tree of T = `nodes` nodes of depth up to `levels` i32[B]; points. A row of 0 levels drafts nothing.

  `best` are the ids i32[B, N, k] of each depth and their log-probabilities, see `growth.children`; `ids` i32[U] or None
  takes them to the target's.
  """
  found, log_q = best
  batch, _, width = found.shape
  found = found if ids is None else ids[found]
  found, log_q = growth.without_ends(found, log_q, context.rules.eos)
  row = jnp.arange(batch)
  families = -(-(nodes - 1) // width)
  room = 1 + families * width  # the last family may not fit
  root = jnp.arange(room) == 0
  grown = {"tokens": jnp.where(root, context.pending[:, None], 0), "parents": jnp.zeros((batch, room), jnp.int32),
           "depths": jnp.zeros((batch, room), jnp.int32), "opened": jnp.zeros((batch, room), bool),
           "scores": jnp.broadcast_to(jnp.where(root, 0.0, -jnp.inf).astype(jnp.float32), (batch, room))}

  def open_one(family, grown):
    may = ~grown["opened"] & (grown["depths"] < levels[:, None])
    score = jnp.where(may, grown["scores"], -jnp.inf)
    node = jnp.argmax(score, 1).astype(jnp.int32)  # of equal ones the first
    depth = grown["depths"][row, node]
    new = {"tokens": found[row, depth], "parents": jnp.broadcast_to(node[:, None], (batch, width)),
           "depths": jnp.broadcast_to(depth[:, None] + 1, (batch, width)),
           "scores": (score[row, node][:, None] + log_q[row, depth]).astype(jnp.float32)}
    put = lambda x, value: jax.lax.dynamic_update_slice(x, value.astype(x.dtype), (0, 1 + family * width))
    written = {name: put(grown[name], value) for name, value in new.items()}
    return written | {"opened": grown["opened"].at[row, node].set(True)}

  grown = jax.lax.fori_loop(0, families, open_one, grown)
  here = (grown["scores"] > -jnp.inf)[:, :nodes]
  order = jnp.argsort(~here, axis=1, stable=True)  # what is drafted to the front
  place = jnp.cumsum(here, 1, dtype=jnp.int32) - 1
  pick = lambda x: jnp.where(jnp.take_along_axis(here, order, 1), jnp.take_along_axis(x, order, 1), 0)
  return tree_lib.TokenTree(tokens=pick(grown["tokens"][:, :nodes]).astype(jnp.int32),
                            parents=pick(jnp.take_along_axis(place, grown["parents"][:, :nodes], 1)),
                            size=here.sum(1, dtype=jnp.int32))
