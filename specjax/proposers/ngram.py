"""Prompt lookup: drafts what followed the last occurrence of the text's longest suffix n-gram.

Method of `apoorvumang/prompt-lookup-decoding`, on the device and over prompt and output. Reference versions differ in
which of several matches they take (vLLM and Transformers the earliest, llama.cpp the latest): `match` chooses, latest
by default. A continuation may run up to the end of the known text but not beyond. Unlike the original, a match close
to the end is used for the tokens that it has, and a draft that holds an end-of-sequence id keeps what stands before
it: the id itself would come as the new token at no cost.

Letters: B batch rows, S tokens of the buffer, N drafted tokens.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.proposers import base

MATCHES = ("latest", "earliest")


@struct.dataclass
class NGram(base.Stateless):
  """Prompt lookup with n-grams of `min_ngram` to `max_ngram` tokens and drafts of up to `num_tokens`.

  Drafts end before an end-of-sequence id and one token short of the row's budget: no step can use more.

  Raises:
    ValueError: for a length below 1, min_ngram > max_ngram or an unknown match rule.
  """
  max_ngram: int = struct.field(pytree_node=False, default=3)
  min_ngram: int = struct.field(pytree_node=False, default=2)
  num_tokens: int = struct.field(pytree_node=False, default=7)
  match: str = struct.field(pytree_node=False, default="latest")

  def __post_init__(self):
    if not 1 <= self.min_ngram <= self.max_ngram:
      raise ValueError(f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: needed is 1 <= min_ngram <= max_ngram")
    if self.num_tokens < 1:
      raise ValueError(f"num_tokens={self.num_tokens}: it must be 1 or more; for no drafts use the plain method")
    if self.match not in MATCHES:
      raise ValueError(f"match={self.match!r}: allowed are {', '.join(MATCHES)}")

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    draft, count = lookup(context.tokens, context.length, self.min_ngram, self.max_ngram, self.num_tokens, self.match)
    # The step emits one token more than it accepts, so a draft of the whole budget would verify one for nothing.
    count = jnp.clip(count, 0, jnp.maximum(context.budget - 1, 0))
    ends = (draft[:, :, None] == context.rules.eos[:, None]).any(-1)
    count = jnp.where(ends.any(-1), jnp.minimum(count, jnp.argmax(ends, -1)), count)
    count = jnp.where(context.active, count, 0).astype(jnp.int32)
    return tree_lib.chain(context.pending, draft, count), state


def lookup(tokens: jax.Array, length: jax.Array, min_ngram: int, max_ngram: int, num_tokens: int,
           match: str) -> tuple[jax.Array, jax.Array]:
  """The continuation of the longest suffix n-gram that occurs earlier.

  Args:
    tokens: i32[B, S], of which the first `length` i32[B] are known.
    min_ngram, max_ngram: shortest and longest n-gram looked for.
    num_tokens: N. match: which occurrence of the longest n-gram, "latest" or "earliest".

  Returns:
    draft i32[B, N] and count i32[B], 0 where nothing matches.
  """
  slots = tokens.shape[1]
  end = jnp.arange(slots, dtype=jnp.int32)[None]  # an n-gram is named by its last place
  last = length[:, None] - 1
  agrees = end < last  # the suffix itself is no match
  best = jnp.full(length.shape, -1, jnp.int32)
  for size in range(1, max_ngram + 1):
    back = size - 1
    wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
    shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :slots]
    agrees = agrees & (shifted == wanted) & (end >= back) & (last >= back)
    if size >= min_ngram:
      found = jnp.where(agrees, end, -1).max(-1) if match == "latest" else jnp.where(agrees, end, slots).min(-1)
      best = jnp.where(agrees.any(-1), found, best)
  place = best[:, None] + 1 + jnp.arange(num_tokens, dtype=jnp.int32)[None]
  draft = jnp.take_along_axis(tokens, jnp.minimum(place, slots - 1), axis=1)
  return draft, jnp.where(best >= 0, jnp.minimum(num_tokens, length - best - 1), 0).astype(jnp.int32)
