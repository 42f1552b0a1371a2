"""Jacobi decoding: drafts a chain of guesses and takes what the target says behind each of them as the next guesses.

The fixed-point iteration of Santilli et al. (arXiv 2305.10427): all tokens of a block are guessed, one forward pass
gives the target's most probable token behind every guess, and these are the guesses of the next pass. A prefix of k
tokens is the greedy text after k passes at the latest, so a block of n tokens takes n passes or fewer. Here the block
moves: what has become text is emitted in the same step, by the verifier, so texts are exact at any temperature, and the
guesses move up by as many places. At a temperature the guesses are the most probable tokens, not draws.

A place without a guess, at first all of them, takes a token from a scattered place of the row's text. The original
starts with padding, others (CLLM, arXiv 2403.00835; Lookahead) with random tokens of the prompt.

Letters: B batch rows, N drafted tokens, S tokens of the buffer.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree as tree_lib
from specjax.proposers import base

NO_TOKEN = -1  # a guess that is still to be made


@struct.dataclass
class Jacobi(base.Defaults):
  """Jacobi decoding with a block of `num_tokens` guesses.

  Drafts end before an end-of-sequence id and one token short of the row's budget. The state is i32[B, N], the guesses
  for the places behind the pending token, `NO_TOKEN` where there is none yet.

  Raises:
    ValueError: for a length below 1.
  """
  num_tokens: int = struct.field(pytree_node=False, default=7)

  def __post_init__(self):
    if self.num_tokens < 1:
      raise ValueError(f"num_tokens={self.num_tokens}: it must be 1 or more; for no drafts use the plain method")

  @property
  def max_nodes(self) -> int:
    return self.num_tokens + 1

  @property
  def max_depth(self) -> int:
    return self.num_tokens

  @property
  def node_ids(self) -> int:
    """See `base.Proposer`: the most probable id."""
    return 1

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    del target, capacity
    return jnp.full((batch, self.num_tokens), NO_TOKEN, jnp.int32)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    places = context.length[:, None] + jnp.arange(self.num_tokens, dtype=jnp.int32)
    guesses = jnp.where(state == NO_TOKEN, scattered(context.tokens, context.length, places), state)
    ends = (guesses[:, :, None] == context.rules.eos[:, None]).any(-1)
    count = jnp.where(ends, jnp.arange(self.num_tokens, dtype=jnp.int32), self.num_tokens).min(-1)
    # The step emits one token more than it accepts.
    count = jnp.minimum(count, jnp.where(context.active, jnp.maximum(context.budget - 1, 0), 0))
    return tree_lib.chain(context.pending, guesses, count), guesses

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`.

    Guesses that were not verified, behind an end or by a batch that does not draft, move up as they are.
    """
    del target
    if committed.path is None:
      return state
    place = jnp.arange(1, self.num_tokens + 1, dtype=jnp.int32)[None]
    pick = lambda x, at: jnp.take_along_axis(x, jnp.clip(at, 0, x.shape[1] - 1), axis=1)
    # The new root stands `count` places below the old one. Behind node i the target was asked for the place i + 1.
    node = committed.count[:, None] + place - 1
    old = jnp.where(node < self.num_tokens, pick(state, node), NO_TOKEN)
    new = jnp.where(node <= committed.drafted[:, None], pick(committed.node_ids[..., 0], node), old)
    return jnp.where(committed.count[:, None] > 0, new, state)


def scattered(tokens: jax.Array, length: jax.Array, places: jax.Array) -> jax.Array:
  """A token of the known text for each of some places, by a hash of the place: i32[B, N].

  Args:
    tokens: i32[B, S], of which the first `length` i32[B] are known. places: i32[B, N], not negative.
  """
  mixed = (places.astype(jnp.uint32) + np.uint32(1)) * np.uint32(0x9E3779B1)
  mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA77)
  mixed = mixed ^ (mixed >> 13)
  return jnp.take_along_axis(tokens, (mixed % length.astype(jnp.uint32)[:, None]).astype(jnp.int32), axis=1)
