"""Drafts what it was handed: tokens that somebody on the host knows beforehand, such as what a grammar leaves no choice
about. Put it first in a `Fallback`, so that the next proposer drafts where nothing was handed over.

Letters: B batch rows, N drafted tokens.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import continuations


@struct.dataclass
class State:
  """What to draft next. Whoever knows it replaces the arrays between two steps; a draft is made once."""
  tokens: jax.Array  # i32[B, N]
  count: jax.Array   # i32[B]; how many of them, 0: nothing


@struct.dataclass
class Given(base.Stateless):
  """Chains of up to `num_tokens` tokens that stand in its state. Point drafts, verified as any other.

  Raises:
    ValueError: for num_tokens below 1.
  """
  num_tokens: int = struct.field(pytree_node=False, default=7)

  def __post_init__(self):
    if self.num_tokens < 1:
      raise ValueError(f"num_tokens={self.num_tokens}: it must be 1 or more; leave the proposer out for no drafts")

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    del target, capacity
    return State(tokens=jnp.zeros((batch, self.num_tokens), jnp.int32), count=jnp.zeros((batch,), jnp.int32))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    count = continuations.cut(state.tokens, state.count, context)
    return tree_lib.chain(context.pending, state.tokens, count), state.replace(count=jnp.zeros_like(state.count))
