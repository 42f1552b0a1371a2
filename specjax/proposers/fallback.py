"""Fallback: the first of several proposers that has a draft, row by row.

A cheap drafter such as prompt lookup goes first and a model drafts only for the rows where it found nothing. To a later
proposer a row that has its draft is a row that has ended: what it computes for no row it does not compute at all, if it
is written that way (see `own_cache`). A proposer learns of acceptance only from drafts of its own.

Letters: B batch rows, T nodes.
"""
import functools

from flax import struct
import jax
import jax.numpy as jnp

from specjax import draft_laws
from specjax import tree as tree_lib
from specjax.proposers import several


@struct.dataclass
class State:
  """Of a batch."""
  states: tuple     # of the proposers
  owner: jax.Array  # i32[B]; whose draft each row has; the last one's if nobody has any


@struct.dataclass
class Fallback(several.Several):
  """Tries `proposers` in order; a tree has the sampled nodes and the law q of the one that drafted it.

  Raises:
    ValueError: for fewer than two proposers, or one that drafts on the host; when drafts are traced, for one that runs
      the target's lower layers (its trees resume where others do not), or siblings drawn with replacement by one and
      without by another.
  """
  proposers: tuple

  @property
  def max_nodes(self) -> int:
    return max(p.max_nodes for p in self.proposers)

  @property
  def chains(self) -> bool:
    return all(p.chains for p in self.proposers)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return State(states=tuple(p.init(target, batch, capacity) for p in self.proposers),
                 owner=jnp.zeros((batch,), jnp.int32))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    missing, owner = context.active, jnp.zeros_like(state.owner)
    trees, states = [], []
    for place, (proposer, own) in enumerate(zip(self.proposers, state.states, strict=True)):
      owner = jnp.where(missing, place, owner)
      tree, own = proposer.propose(target, cache, own, context.replace(active=missing), keys)
      missing = missing & (tree.size == 1)
      trees.append(tree)
      states.append(own)
    return choose(trees, owner, self.max_nodes, target.vocab_size), State(states=tuple(states), owner=owner)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    states = []
    for place, (proposer, own) in enumerate(zip(self.proposers, state.states, strict=True)):
      seen = committed
      if committed.path is not None:
        mine = state.owner == place
        seen = committed.replace(drafted=jnp.where(mine, committed.drafted, 0),
                                 path=jnp.where(mine[:, None], committed.path, 0), node_ids=several.first_ids(
                                     committed.node_ids, proposer.node_ids))
      states.append(proposer.observe(target, own, seen))
    return state.replace(states=tuple(states))


def choose(trees: list[tree_lib.TokenTree], owner: jax.Array, width: int, vocabulary: int) -> tree_lib.TokenTree:
  """Of each row the tree of its `owner` i32[B], all of `width` nodes.

  Raises:
    ValueError: for trees that resume in the target, or that draw siblings with and without replacement.
  """
  if any(tree.resume is not None for tree in trees):
    raise ValueError("a proposer that runs the target's lower layers cannot be one of several: all nodes of a step "
                     "must resume at one layer; use it alone")
  laws = [tree for tree in trees if tree.sampled is not None]
  if len({tree.replacement for tree in laws}) > 1:
    raise ValueError("one proposer draws siblings with replacement and another without; a tree can do one of both")
  trees = [tree.widen(width) for tree in trees]
  pick = lambda arrays: functools.reduce(
      lambda kept, new: jnp.where((owner == new[0]).reshape(-1, *[1] * (new[1].ndim - 1)), new[1], kept),
      list(enumerate(arrays))[1:], arrays[0])
  sampled = q = None
  if laws:
    sampled = pick([jnp.zeros(tree.tokens.shape, bool) if tree.sampled is None else tree.sampled for tree in trees])
    zeros = jnp.zeros((*trees[0].tokens.shape, vocabulary), jnp.float32)
    q = draft_laws.DenseLaw(pick([zeros if tree.q is None else tree.q.dense(vocabulary) for tree in trees]))
    if len(laws) == 1 and isinstance(laws[0].q, draft_laws.SparseLaw):
      q = laws[0].q.widen(width)  # nobody else's is read
  return tree_lib.TokenTree(tokens=pick([tree.tokens for tree in trees]), parents=pick([tree.parents for tree in trees]),
                            size=pick([tree.size for tree in trees]), sampled=sampled, q=q,
                            replacement=laws[0].replacement if laws else True)
