"""A draft model that drafts a tree of fixed shape, see `fixed_tree`.

Letters: T nodes.
"""
from typing import Any

from flax import struct
import jax.numpy as jnp

from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import fixed_tree
from specjax.proposers import own_cache


@struct.dataclass
class DraftTree(fixed_tree.FixedTree):
  """Drafts a tree of the shape `parents` with `model`, as `DraftModel` drafts a chain.

  Attributes:
    model: the drafter.
    parents: T parent nodes, `parents[0]` 0 and every parent before its children; see `static_trees`.
    children: "top_k", the most probable tokens in order, or "independent" or "without_replacement", draws from q.
    drawing: temperature and filters of draws.

  Raises:
    ValueError: for a shape that is no tree, an unknown rule, or options of draws where nothing is drawn.
  """
  model: Any
  parents: tuple[int, ...] = struct.field(pytree_node=False, default=(0, 0, 0, 1, 1, 2, 3, 3))
  children: str = struct.field(pytree_node=False, default="top_k")
  drawing: autoregressive.Drawing = autoregressive.Drawing()

  @property
  def draft_context(self) -> int:
    return self.model.max_context + 2 - self.max_depth

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.same_vocabulary(target, self.model)
    return own_cache.empty(self.model, batch, capacity, self.fed_nodes, self.max_nodes)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache
    # No row drafts a part of the tree: one whose drafter lacks room for all levels drafts nothing.
    wanted = (autoregressive.room(context, self.max_depth) > 0) & (context.length < self.draft_context)
    committed, logits = own_cache.catch_up(self.model, state.cache, context, wanted)

    def run(level, slot, depth, tokens, mask, block):
      del level
      positions = jnp.broadcast_to(context.length[:, None] - 1 + depth, tokens.shape)
      out = self.model.forward(tokens, positions, mask, committed, before=block)
      return self.model.logits(out.hidden), block.put(out.in_flight, slot)

    tree, block = self.draft(run, state.block, logits, context, keys, wanted, keep=lambda block: block)
    slots = jnp.where(wanted[:, None], jnp.broadcast_to(self.slots, tree.tokens.shape), -1)
    return tree, own_cache.OwnCache(cache=committed, block=block, slots=slots)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: what was accepted enters the cache; a prompt is fed when it is needed."""
    del target
    return state if committed.path is None else state.accept(committed)
