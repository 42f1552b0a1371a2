"""A tree of fixed shape, drafted level by level: the most probable children, or draws of them.

Trees of the most probable tokens are points (SpecInfer, arXiv 2305.09781). Draws are independent, or without
replacement by the Gumbel top-k trick as in Sequoia (arXiv 2402.12374), whose best shape for measured acceptance and
costs is `static_trees.sequoia`. A level is one pass of the drafter over all its nodes that have children; which drafter
that is, the proposer says.

Letters: B batch rows, T nodes, N nodes of a level, F nodes with children, V vocabulary.
"""
import dataclasses
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import draft_laws
from specjax import keys as keys_lib
from specjax import level_draws
from specjax import processors
from specjax import sampling
from specjax import static_trees
from specjax import tree as tree_lib
from specjax.proposers import autoregressive
from specjax.proposers import base

CHILDREN = ("top_k", "independent", "without_replacement")


class FixedTree(base.Defaults):
  """A mixin for proposers of a tree of the shape `parents`, whose `children` are taken as `drawing` says: three fields
  of theirs."""

  def __post_init__(self):
    """Raises ValueError for a shape that is no tree, an unknown rule, or options of draws where nothing is drawn."""
    if self.children not in CHILDREN:
      raise ValueError(f"children={self.children!r}: allowed are {', '.join(CHILDREN)}")
    if len(self.parents) < 2:
      raise ValueError(f"parents={self.parents}: a tree has two nodes or more")
    static_trees.depths(self.parents)
    if isinstance(self.drawing, autoregressive.Drawing):
      dataclasses.replace(self.drawing, sampled=self.samples).check()

  @property
  def max_nodes(self) -> int:
    return len(self.parents)

  @property
  def max_depth(self) -> int:
    return int(static_trees.depths(self.parents).max())

  @property
  def samples(self) -> bool:
    return self.children != "top_k"

  @property
  def chains(self) -> bool:
    return len(set(self.parents[1:])) == len(self.parents) - 1

  @property
  def slots(self) -> np.ndarray:
    """By node, its slot in the block: nodes with children in the order in which they are fed. i32[T], -1 for others."""
    slots = np.full(self.max_nodes, -1, np.int32)
    fed = [node for level in static_trees.levels(self.parents)[1:] for node in level.nodes]
    slots[fed] = np.arange(len(fed))
    return slots

  @property
  def fed_nodes(self) -> int:
    """F, the slots of the block."""
    return int(self.slots.max()) + 1

  def draft(self, run: Callable, extra: Any, logits: jax.Array, context: base.Context, keys: jax.Array,
            wanted: jax.Array, keep: Callable = lambda extra: ()) -> tuple[tree_lib.TokenTree, Any]:
    """The tree, the whole of it in rows that are `wanted` bool[B] and its root in others.

    Args:
      run: (level, slot, depth, tokens i32[B, N], mask bool[B, N, F + N], extra) -> (logits f[B, N, V], extra): runs the
        drafter over the nodes of a `static_trees.Level`, which go into the block from `slot` on; `mask` says which
        nodes of the block each sees, and itself. Level, slot and depth are static.
      extra: what it starts from. logits: f[B, V], behind the pending token; not read if no row is wanted.
      keep: of `extra`, what is returned; its shapes must not change.
    """
    batch, width = context.length.shape[0], self.max_nodes
    tokens = jnp.zeros((batch, width), jnp.int32).at[:, 0].set(context.pending)
    q = jnp.zeros((batch, width, logits.shape[-1]), jnp.float32) if self.samples else None
    grown = lambda: self._grow(run, extra, logits, tokens, q, context, keys, keep)
    drafted, law, kept = jax.lax.cond(wanted.any(), grown, lambda: (tokens, q, keep(extra)))
    spread = lambda x: jnp.broadcast_to(jnp.asarray(x), (batch, width))
    tree = tree_lib.TokenTree(
        tokens=drafted, parents=spread(np.asarray(self.parents, np.int32)),
        size=jnp.where(wanted, width, 1).astype(jnp.int32),
        sampled=spread(np.arange(width) > 0) if self.samples else None,
        q=draft_laws.DenseLaw(law) if self.samples else None, replacement=self.children != "without_replacement")
    return tree, kept

  def _grow(self, run, extra, logits, tokens, q, context, keys, keep):
    """Tokens, laws and what is kept, of all levels."""
    batch, slots = tokens.shape[0], self.slots
    params = self.drawing.params(context.params)
    above = _ancestors(self.parents)
    logits = logits[:, None]
    for level in static_trees.levels(self.parents):
      if level.nodes != (0,):
        seen = np.zeros((len(level.nodes), self.fed_nodes), bool)
        for row, node in enumerate(level.nodes):
          seen[row, [slots[i] for i in above[node] if i]] = True
        # Behind a barrier: XLA folds a constant mask once for every layer.
        itself = np.eye(len(level.nodes), dtype=bool)
        mask = jax.lax.optimization_barrier(jnp.asarray(np.concatenate([seen, itself], 1)))
        nodes = np.asarray(level.nodes)
        logits, extra = run(level, int(slots[nodes[0]]), len(above[nodes[0]]), tokens[:, nodes],
                            jnp.broadcast_to(mask, (batch, *mask.shape)), extra)
      tokens, q = self._children(level, logits, tokens, q, params, context, keys)
    return tokens, q, keep(extra)

  def _children(self, level, logits, tokens, q, params, context, keys):
    """The children of one level's nodes, from the logits f[B, N, V] at these."""
    logits = self._adjusted(level, logits, tokens, params, context)
    children, root = np.asarray(level.children), context.length - 1
    if self.children == "top_k":
      return tokens.at[:, children].set(level_draws.most_probable(logits, level.counts)), q
    law = sampling.law(logits, params, params.mode())
    q = q.at[:, np.asarray(level.nodes)].set(law)
    if self.children == "independent":
      draws = [keys_lib.step_uniform(keys, root, keys_lib.DRAFT, int(child)) for child in children]
      drawn = level_draws.independent(law, jnp.stack(draws, axis=1), level.counts)
    else:
      index = jnp.broadcast_to(jnp.asarray(level.nodes, jnp.int32), (tokens.shape[0], len(level.nodes)))
      drawn = level_draws.without_replacement(law, keys_lib.step_noise(keys, root, index, law.shape[-1]), level.counts)
    return tokens.at[:, children].set(drawn), q

  def _adjusted(self, level, logits, tokens, params, context):
    """As the request's processors leave them; each node's text is the known one and its path."""
    if not params.adjusts:
      return logits
    batch, nodes = tokens.shape[0], np.asarray(level.nodes)
    parents = jnp.broadcast_to(jnp.asarray(self.parents, jnp.int32), tokens.shape)
    spread = jnp.zeros((batch, self.max_nodes, logits.shape[-1]), logits.dtype).at[:, nodes].set(logits)
    prefixes = processors.Prefixes(tokens=context.tokens, length=context.length, start=context.start,
                                   eos=context.rules.eos, begin=context.inputs, path_tokens=tokens,
                                   mask=tree_lib.ancestors(parents, self.max_depth))
    return processors.adjust(spread, params, prefixes)[:, nodes]


def _ancestors(parents):
  """By node, its ancestors, the root last; as many as its depth."""
  above = [[]]
  for node in range(1, len(parents)):
    above.append([parents[node], *above[parents[node]]])
  return above
