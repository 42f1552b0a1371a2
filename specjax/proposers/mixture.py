"""Mixture: the drafts of several proposers in one tree, as branches below one root.

Where two proposers draft the same tokens they share the nodes: trees of points are merged into a trie, in which what
one of them drafts behind a common beginning stands beside the other's continuation. A tree with nodes that were drawn
from a law q is merged with nothing, since a verifier must see each node as it was drawn. It comes first, so that a
point is worth what its drawn siblings leave; and as one law stands at a node, one proposer may draw.

A proposer learns of acceptance in the numbers of its own nodes: those that the accepted path has in common with its
tree, whoever else drafted them too.

Letters: B batch rows, W nodes of a proposer's own tree, M nodes of all trees, T nodes of the mixture, N path places.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import several
from specjax.proposers import slots


@struct.dataclass
class State:
  """Of a batch."""
  states: tuple  # of the proposers
  nodes: tuple   # i32[B, W] each; the mixture's node that each of a proposer's nodes became, -1 for none


@struct.dataclass
class Mixture(several.Several):
  """Drafts with all of `proposers` in every step.

  Attributes:
    proposers: two or more; at most one that draws its tokens.
    node_budget: nodes of a tree, root included; None: of all trees together. Where a row has more, points are left out:
      the last proposer's first, and of each its last nodes.

  Raises:
    ValueError: for fewer than two proposers, two that draw, one that drafts on the host, or a budget that cannot hold
      the deepest draft and a node beside it, or all that is drawn (what is left out must not depend on what was drawn);
      when drafts are traced, for one that runs the target's lower layers.
  """
  proposers: tuple
  node_budget: int | None = struct.field(pytree_node=False, default=None)

  def __post_init__(self):
    super().__post_init__()
    if not isinstance(self.proposers, tuple):
      return  # put together from something else inside a transformation
    drawing = [p for p in self.proposers if p.samples]
    if len(drawing) > 1:
      raise ValueError(f"{' and '.join(type(p).__name__ for p in drawing)} both draw their tokens, and a node has one "
                       "law q: let all but one take greedy tokens")
    least = max([self.max_depth + 2, *(p.max_nodes for p in drawing)])
    if self.node_budget is not None and self.node_budget < least:
      raise ValueError(f"node_budget={self.node_budget}: allowed are {least} nodes or more, root included: the deepest "
                       "draft and a node beside it, and all that is drawn")

  @property
  def max_nodes(self) -> int:
    nodes = 1 + sum(p.max_nodes - 1 for p in self.proposers)
    return nodes if self.node_budget is None else min(nodes, self.node_budget)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return State(states=tuple(p.init(target, batch, capacity) for p in self.proposers),
                 nodes=tuple(jnp.zeros((batch, p.max_nodes), jnp.int32) for p in self.proposers))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    made = [p.propose(target, cache, own, context, keys) for p, own in zip(self.proposers, state.states, strict=True)]
    trees = [tree for tree, _ in made]
    self._check(trees)
    tree, nodes = merge(trees, self.max_nodes)
    return tree, State(states=tuple(own for _, own in made), nodes=tuple(nodes))

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    states = tuple(p.observe(target, own, committed if committed.path is None else own_part(committed, nodes, p))
                   for p, own, nodes in zip(self.proposers, state.states, state.nodes, strict=True))
    return state.replace(states=states)

  def _check(self, trees):
    names = [type(p).__name__ for p in self.proposers]
    resumed = [name for name, tree in zip(names, trees) if tree.resume is not None]
    if resumed:
      raise ValueError(f"{resumed[0]} runs the target's lower layers and cannot be one of several: all nodes of a step "
                       "must resume at one layer; use it alone")


def merge(trees: list[tree_lib.TokenTree], width: int) -> tuple[tree_lib.TokenTree, list[jax.Array]]:
  """One tree of at most `width` = T nodes a row.

  Args:
    trees: below the same roots; at most one that has sampled nodes, of at most T nodes. Its nodes keep their numbers.

  Returns:
    The tree, and of each of `trees` which node each of its nodes became: i32[B, W], -1 for those that are not valid,
    and from the first on that found no room: a proposer's verified nodes are its first ones.
  """
  order = sorted(range(len(trees)), key=lambda k: trees[k].sampled is None)  # stable
  first = trees[order[0]]
  # All nodes in a row, root first: node i > 0 of a tree stands at its offset + i.
  tokens, parents, valid, offsets = [first.tokens[:, :1]], [first.parents[:, :1]], [first.valid[:, :1]], []
  for k in order:
    offsets.append(sum(x.shape[1] for x in tokens) - 1)
    above = trees[k].parents[:, 1:]
    tokens.append(trees[k].tokens[:, 1:])
    parents.append(jnp.where(above > 0, above + offsets[-1], 0))
    valid.append(trees[k].valid[:, 1:])
  tokens, parents, valid = (jnp.concatenate(x, axis=1) for x in (tokens, parents, valid))
  apart = 0 if first.sampled is None else first.width  # nodes before this one are merged with nothing
  same, above = _representatives(tokens, parents, valid, apart)

  tree, place = slots.pack(tokens, above, valid & (same == jnp.arange(tokens.shape[1])), width)
  became = jnp.where(valid, jnp.take_along_axis(place, same, axis=1), -1)
  if first.sampled is not None:
    own = first.widen(width)
    tree = tree.replace(sampled=own.sampled & own.valid, q=own.q, replacement=first.replacement)
  nodes = [None] * len(trees)
  for k, offset in zip(order, offsets):
    own = jnp.concatenate([became[:, :1], became[:, offset + 1:offset + trees[k].width]], axis=1)
    nodes[k] = jnp.where(jnp.cumprod(own >= 0, axis=1) > 0, own, -1)
  return tree, nodes


def _representatives(tokens, parents, valid, apart):
  """The first node that has the same path of tokens, and the one of each node's parent: i32[B, M] twice.

  Nodes below `apart` stand for themselves, and for nobody else.
  """
  node = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  pick = lambda x, i: jax.lax.dynamic_index_in_dim(x, i, axis=1)

  def visit(i, carry):
    same, above = carry
    parent = jnp.take_along_axis(same, pick(parents, i), axis=1)
    equal = (above == parent) & (tokens == pick(tokens, i)) & valid & (node < i) & (node >= jnp.maximum(apart, 1))
    equal = equal & (i >= apart)
    first = jnp.where(equal.any(1, keepdims=True), jnp.argmax(equal, axis=1, keepdims=True).astype(jnp.int32), i)
    put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, i, axis=1)
    return put(same, first), put(above, parent)

  start = jnp.broadcast_to(node, tokens.shape)
  return jax.lax.fori_loop(1, tokens.shape[1], visit, (start, jnp.zeros_like(start)))


def own_part(committed: base.Committed, nodes: jax.Array, proposer: base.Proposer) -> base.Committed:
  """What was committed as one proposer sees it, whose nodes became `nodes` i32[B, W] of the tree that was verified.

  Of a path that leaves its tree the rest is 0, the root.
  """
  drafted = jnp.arange(nodes.shape[1]) > 0
  on_path = (nodes[:, None] == committed.path[:, :, None]) & drafted
  verified = (nodes >= 0) & (nodes <= committed.drafted[:, None])
  ids = None
  if proposer.node_ids:
    ids = jnp.take_along_axis(committed.node_ids, jnp.maximum(nodes, 0)[:, :, None], axis=1)[..., :proposer.node_ids]
    ids = jnp.where(verified[:, :, None], ids, -1)
  return committed.replace(path=jnp.argmax(on_path, axis=2).astype(jnp.int32), node_ids=ids,
                           drafted=(verified & drafted).sum(1).astype(jnp.int32))
