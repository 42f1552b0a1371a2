"""Prompt lookup: drafts what followed the last occurrence of the text's longest suffix n-gram.

Method of `apoorvumang/prompt-lookup-decoding`, on the device and over prompt and output, or one of them. Reference
versions differ in which of several matches they take (vLLM and Transformers the earliest, llama.cpp the latest):
`match` chooses, latest by default. A continuation may run up to the end of the known text, and beyond it only with
`overlap`. Unlike the original, a match close to the end is used for the tokens that it has, and a draft that holds an
end-of-sequence id keeps what stands before it: the id itself would come as the new token at no cost.

Letters: B batch rows, S tokens of the buffer, N drafted tokens.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import continuations

MATCHES = ("latest", "earliest")
SOURCES = ("text", "prompt", "output")


@struct.dataclass
class NGram(base.Stateless):
  """Prompt lookup with n-grams of `min_ngram` to `max_ngram` tokens and drafts of up to `num_tokens`.

  Drafts end before an end-of-sequence id and one token short of the row's budget: no step can use more.

  Attributes:
    min_ngram, max_ngram, num_tokens: as above.
    match: which occurrence of the longest n-gram is continued, "latest" or "earliest".
    source: where occurrences and what follows them lie: "text" (prompt and output), "prompt" or "output".
    overlap: a draft that reaches the end of the text goes on in its own tokens, as a text of that period would.

  Raises:
    ValueError: for a length below 1, min_ngram > max_ngram, an unknown match rule or source, or an overlap of a prompt.
  """
  max_ngram: int = struct.field(pytree_node=False, default=3)
  min_ngram: int = struct.field(pytree_node=False, default=2)
  num_tokens: int = struct.field(pytree_node=False, default=7)
  match: str = struct.field(pytree_node=False, default="latest")
  source: str = struct.field(pytree_node=False, default="text")
  overlap: bool = struct.field(pytree_node=False, default=False)

  def __post_init__(self):
    if not 1 <= self.min_ngram <= self.max_ngram:
      raise ValueError(f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: needed is 1 <= min_ngram <= max_ngram")
    if self.num_tokens < 1:
      raise ValueError(f"num_tokens={self.num_tokens}: it must be 1 or more; for no drafts use the plain method")
    if self.match not in MATCHES:
      raise ValueError(f"match={self.match!r}: allowed are {', '.join(MATCHES)}")
    if self.source not in SOURCES:
      raise ValueError(f"source={self.source!r}: allowed are {', '.join(SOURCES)}")
    if self.overlap and self.source == "prompt":
      raise ValueError("overlap=True with source='prompt': a prompt does not grow, so no draft goes on from its end; "
                       "use source='text', or leave overlap out")

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    begin = context.start if self.source == "output" else jnp.zeros_like(context.length)
    end = context.start if self.source == "prompt" else context.length
    draft, count = lookup(context.tokens, context.length, self.min_ngram, self.max_ngram, self.num_tokens, self.match,
                          begin=begin, end=end, overlap=self.overlap)
    return tree_lib.chain(context.pending, draft, continuations.cut(draft, count, context)), state


def lookup(tokens: jax.Array, length: jax.Array, min_ngram: int, max_ngram: int, num_tokens: int, match: str, *,
           begin: jax.Array, end: jax.Array, overlap: bool = False) -> tuple[jax.Array, jax.Array]:
  """The continuation of the longest suffix n-gram that occurs earlier.

  Args:
    tokens: i32[B, S], of which the first `length` i32[B] are known.
    min_ngram, max_ngram: shortest and longest n-gram looked for.
    num_tokens: N. match: which occurrence of the longest n-gram, "latest" or "earliest".
    begin, end: i32[B], the places [begin, end) of occurrences and of what follows them.
    overlap: go on behind the end of the text, in the draft's own tokens; only where `end` is the length.

  Returns:
    draft i32[B, N] and count i32[B], 0 where nothing matches.
  """
  slots = tokens.shape[1]
  at = jnp.arange(slots, dtype=jnp.int32)[None]  # an n-gram is named by its last place
  last = length[:, None] - 1
  agrees = at < jnp.minimum(last, end[:, None] - 1)  # the suffix itself is no match, nor is one that nothing follows
  best = jnp.full(length.shape, -1, jnp.int32)
  for size in range(1, max_ngram + 1):
    back = size - 1
    wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
    shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :slots]
    agrees = agrees & (shifted == wanted) & (at >= begin[:, None] + back) & (last >= back)
    if size >= min_ngram:
      found = jnp.where(agrees, at, -1).max(-1) if match == "latest" else jnp.where(agrees, at, slots).min(-1)
      best = jnp.where(agrees.any(-1), found, best)
  ahead = jnp.arange(num_tokens, dtype=jnp.int32)[None]
  if overlap:
    ahead = ahead % jnp.maximum(last - best[:, None], 1)
  draft = jnp.take_along_axis(tokens, jnp.minimum(best[:, None] + 1 + ahead, slots - 1), axis=1)
  left = num_tokens if overlap else jnp.minimum(num_tokens, end - best - 1)
  return draft, jnp.where(best >= 0, left, 0).astype(jnp.int32)
