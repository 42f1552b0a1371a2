"""A draft model that grows a tree by its own confidence, anew in every step: EAGLE-2's rule over any decoder.

See `growth` for the rule (arXiv 2406.16858). The drafter runs over a beam of k nodes a level in one compiled loop, with
nothing on the host; the best nodes of all levels are verified. Nodes are chosen by their probability and not drawn, so
they are points.

Letters: B batch rows, T nodes, k width of the beam, D levels, F = (D - 1) k slots.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import growth
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import own_cache


@struct.dataclass
class DynamicTree(base.Defaults):
  """Drafts the `nodes` - 1 most probable nodes of a pool of `depth` levels, grown from a beam of `beam` nodes.

  Attributes:
    model: the drafter.
    nodes: T, the root included. EAGLE-2's own numbers are 60 nodes, 6 to 7 levels and a beam of 10, for accelerators.
    depth: D. beam: k.
    min_log_probability: nodes whose path is less probable to the drafter are left out. A leaf.

  Raises:
    ValueError: for fewer than 2 nodes, 1 level or a beam of 1.
  """
  model: Any
  nodes: int = struct.field(pytree_node=False, default=16)
  depth: int = struct.field(pytree_node=False, default=4)
  beam: int = struct.field(pytree_node=False, default=4)
  min_log_probability: jax.Array | float = -jnp.inf

  def __post_init__(self):
    for name, least in (("nodes", 2), ("depth", 1), ("beam", 1)):
      if getattr(self, name) < least:
        raise ValueError(f"{name}={getattr(self, name)}: it must be {least} or more")

  @property
  def max_nodes(self) -> int:
    return self.nodes

  @property
  def max_depth(self) -> int:
    return min(self.depth, self.nodes - 1)

  @property
  def chains(self) -> bool:
    return self.beam == 1 or self.nodes == 2

  @property
  def draft_context(self) -> int:
    return self.model.max_context + 2 - self.max_depth

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.same_vocabulary(target, self.model)
    if self.beam > target.vocab_size:
      raise ValueError(f"beam={self.beam}: at most {target.vocab_size}, the target's token ids")
    return own_cache.empty(self.model, batch, capacity, (self.max_depth - 1) * self.beam, self.nodes)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    levels = autoregressive.room(context, self.max_depth)
    wanted = (levels > 0) & (context.length < self.draft_context)  # all levels have a place in the drafter's context
    committed, logits = own_cache.catch_up(self.model, state.cache, context, wanted)
    children = lambda logits: growth.without_ends(*growth.children(logits, self.beam), context.rules.eos)
    ids, log_q = children(logits)
    pool, beam = growth.start(ids, jnp.where(wanted[:, None], log_q, -jnp.inf), self.max_depth)
    batch = wanted.shape[0]

    def grow(carry):
      pool, beam, block = carry
      itself = jnp.broadcast_to(jnp.eye(self.beam, dtype=bool), (batch, self.beam, self.beam))
      positions = jnp.broadcast_to(context.length[:, None] - 1 + beam.level, beam.tokens.shape)
      out = self.model.forward(beam.tokens, positions, jnp.concatenate([beam.above, itself], axis=2), committed,
                               before=block)
      block = block.put(out.in_flight, beam.first_slot)
      pool, beam = growth.expand(pool, beam, *children(self.model.logits(out.hidden)))
      return pool, beam, block

    block = state.block
    if self.max_depth > 1:
      goes_on = lambda carry: (carry[1].level < self.max_depth) & (carry[1].alive.any(-1) & wanted).any()
      pool, beam, block = jax.lax.while_loop(goes_on, grow, (pool, beam, block))
    least = jnp.broadcast_to(jnp.asarray(self.min_log_probability, jnp.float32), (batch,))
    tree, places = growth.rerank(pool, context.pending, self.nodes, min_score=least, max_level=levels)
    slots = growth.fed_slots(pool, places)
    return tree, own_cache.OwnCache(cache=committed, block=block, slots=slots)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: what was accepted enters the cache; a prompt is fed when it is needed."""
    del target
    return state if committed.path is None else state.accept(committed)
