"""Trees of a fixed shape in which nodes may be missing: *slots*, laid out once, of which each row keeps some.

Letters: B batch rows, S slots (the root's is 0), D greatest depth, T nodes.
"""
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree as tree_lib


def pack(tokens: jax.Array, parents: jax.Array, keep: jax.Array, nodes: int) -> tuple[tree_lib.TokenTree, jax.Array]:
  """The tree of the kept slots, in their order. All are point drafts.

  Args:
    tokens: i32[B, S]. parents: i32[S] or i32[B, S], the slot of each slot's parent, before it.
    keep: bool[B, S]; with a slot its parent is kept. The root is kept always.
    nodes: T; slots beyond that many are left out, which never leaves a node without its parent.

  Returns:
    The tree, and the node of each slot, i32[B, S], -1 for those that have none.
  """
  chex.assert_equal_shape([tokens, keep])
  keep = keep | (jnp.arange(keep.shape[1]) == 0)
  node = jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1
  keep = keep & (node < nodes)
  above = jnp.take_along_axis(node, jnp.broadcast_to(parents, node.shape), axis=1)
  row = jnp.arange(node.shape[0])[:, None]
  put = lambda x: jnp.zeros((x.shape[0], nodes), jnp.int32).at[row, jnp.where(keep, node, nodes)].set(x, mode="drop")
  tree = tree_lib.TokenTree(tokens=put(tokens), parents=put(above).at[:, 0].set(0), size=keep.sum(-1, dtype=jnp.int32))
  return tree, jnp.where(keep, node, -1)


def paths(parents: Sequence[int]) -> np.ndarray:
  """The slots from the root's child down to each slot, i32[S, D]; the root's own, 0, behind the end."""
  chains = []
  for slot, parent in enumerate(parents):
    chains.append([*chains[parent], slot] if slot else [])
  out = np.zeros((len(parents), max(map(len, chains))), np.int32)
  for slot, chain in enumerate(chains):
    out[slot, :len(chain)] = chain
  return out


def first_equal(tokens: jax.Array, parents: Sequence[int], keep: jax.Array) -> jax.Array:
  """The first kept slot with the same tokens on its path from the root: i32[B, S], the slot itself if there is none.

  A verifier that walks down a tree follows one of two equal siblings and never sees what hangs below the other, so
  equal paths must share their nodes.

  Args:
    tokens: i32[B, S], none negative. parents: of the slots, static. keep: bool[B, S]; with a slot its parent.
  """
  along = paths(parents)
  spelled = jnp.where(along > 0, tokens[:, along], -1)  # [B, S, D]
  same = (spelled[:, :, None] == spelled[:, None]).all(-1)
  candidates = (same & keep[:, None]) | jnp.eye(len(parents), dtype=bool)
  return jnp.argmax(candidates, -1).astype(jnp.int32)
