"""A draft model that drafts a tree of fixed shape, level by level: the most probable children, or draws of them.

Trees of the most probable tokens are points (SpecInfer, arXiv 2305.09781). Draws are independent, or without replacement
by the Gumbel top-k trick as in Sequoia (arXiv 2402.12374), whose best shape for measured acceptance and costs is
`static_trees.sequoia`. A level is one pass of the drafter over all its nodes that have children.

Letters: B batch rows, T nodes, N nodes of a level, V vocabulary.
"""
import dataclasses
from typing import Any

from flax import struct
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
from specjax.proposers import own_cache

CHILDREN = ("top_k", "independent", "without_replacement")


@struct.dataclass
class DraftTree(base.Defaults):
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

  def __post_init__(self):
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
  def draft_context(self) -> int:
    return self.model.max_context + 2 - self.max_depth

  def _slots(self):
    """By node, its slot in the block: nodes with children in the order in which they are fed. i32[T], -1 for others."""
    slots = np.full(self.max_nodes, -1, np.int32)
    fed = [node for level in static_trees.levels(self.parents)[1:] for node in level.nodes]
    slots[fed] = np.arange(len(fed))
    return slots

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.same_vocabulary(target, self.model)
    return own_cache.empty(self.model, batch, capacity, int(self._slots().max()) + 1, self.max_nodes)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache
    # No row drafts a part of the tree: one whose drafter lacks room for all levels drafts nothing.
    wanted = (autoregressive.room(context, self.max_depth) > 0) & (context.length < self.draft_context)
    committed, logits = own_cache.catch_up(self.model, state.cache, context, wanted)
    batch, width = context.length.shape[0], self.max_nodes
    tokens = jnp.zeros((batch, width), jnp.int32).at[:, 0].set(context.pending)
    q = jnp.zeros((batch, width, self.model.vocab_size), jnp.float32) if self.samples else None
    nothing = lambda: (tokens, q, state.block)
    grown = lambda: self._grow(committed, logits, tokens, q, state.block, context, keys)
    tokens, q, block = jax.lax.cond(wanted.any(), grown, nothing)
    spread = lambda x: jnp.broadcast_to(jnp.asarray(x), (batch, width))
    tree = tree_lib.TokenTree(
        tokens=tokens, parents=spread(np.asarray(self.parents, np.int32)),
        size=jnp.where(wanted, width, 1).astype(jnp.int32),
        sampled=spread(np.arange(width) > 0) if self.samples else None,
        q=draft_laws.DenseLaw(q) if self.samples else None, replacement=self.children != "without_replacement")
    slots = jnp.where(wanted[:, None], spread(self._slots()), -1)
    return tree, own_cache.OwnCache(cache=committed, block=block, slots=slots)

  def _grow(self, cache, logits, tokens, q, block, context, keys):
    """Tokens, laws and block of all levels."""
    batch, slots = tokens.shape[0], self._slots()
    params = self.drawing.params(context.params)
    above = _ancestors(self.parents)
    logits = logits[:, None]
    for level in static_trees.levels(self.parents):
      if level.nodes != (0,):
        seen = np.zeros((len(level.nodes), block.keys[0].shape[3]), bool)
        for row, node in enumerate(level.nodes):
          seen[row, [slots[i] for i in above[node] if i]] = True
        # Behind a barrier: XLA folds a constant mask once for every layer.
        mask = jax.lax.optimization_barrier(jnp.asarray(np.concatenate([seen, np.eye(len(level.nodes), dtype=bool)], 1)))
        nodes = np.asarray(level.nodes)
        depth = len(above[level.nodes[0]])
        positions = jnp.broadcast_to(context.length[:, None] - 1 + depth, (batch, len(nodes)))
        out = self.model.forward(tokens[:, nodes], positions, jnp.broadcast_to(mask, (batch, *mask.shape)), cache,
                                 before=block)
        block, logits = block.put(out.in_flight, int(slots[nodes[0]])), self.model.logits(out.hidden)
      tokens, q = self._children(level, logits, tokens, q, params, context, keys)
    return tokens, q, block

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
                                   eos=context.rules.eos, path_tokens=tokens,
                                   mask=tree_lib.ancestors(parents, self.max_depth))
    return processors.adjust(spread, params, prefixes)[:, nodes]

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: what was accepted enters the cache; a prompt is fed when it is needed."""
    del target
    return state if committed.path is None else state.accept(committed)


def _ancestors(parents):
  """By node, its ancestors, the root last; as many as its depth."""
  above = [[]]
  for node in range(1, len(parents)):
    above.append([parents[node], *above[parents[node]]])
  return above
