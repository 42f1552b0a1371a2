"""Lookup that weighs every draft: the latest longest match is copied as far as that is worth its cost.

Prompt lookup (`ngram`) drafts the same number of tokens behind any match. Here each token has an estimate of its
acceptance, from the length of the match and from how many earlier occurrences go on as it does (`renewal.copy_confidence`),
corrected by what such estimates were worth so far in this row; and `renewal.Renewal` drafts up to the width that brings
the most tokens for its time, or nothing. The text itself says afterwards whether a draft would have been right, verified
or not, so a row that stopped drafting needs no tries to learn of better times.

Letters: B batch rows, S places of the text, M occurrences, N drafted tokens.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import continuations
from specjax.proposers import length as length_lib
from specjax.proposers import renewal

# Of the widths that a step of 8 nodes has. A rate a little above plain decoding's 1: see `renewal.Renewal`.
RULE = renewal.Renewal(least_rate=1.3, rate_memory=1.0, rate_weight=64.0, probe_tokens=0, widths=(1, 4, 8))


@struct.dataclass
class State:
  """Of a batch."""
  length: Any            # of the rule
  draft: jax.Array       # i32[B, N]; the latest draft before it was cut
  count: jax.Array       # i32[B]; its tokens
  confidence: jax.Array  # f32[B, N]


@struct.dataclass
class AutoLookup(base.Defaults):
  """Copies up to `num_tokens` tokens behind the latest of the longest matches of at most `max_match` tokens.

  A match close to the text's end is taken as a period and continued beyond it. Drafts end before an end-of-sequence id
  and one token short of the row's budget.

  Attributes:
    num_tokens: N. max_match: longest match that is told from longer ones.
    occurrences: M, how many of the matches are counted, the longest and latest.
    rule: a `renewal.Renewal` whose widths are those of the step; its costs should be measured on the machine and model.

  Raises:
    ValueError: for a number below 1, or a match beyond `continuations.MAX_MATCH`.
  """
  num_tokens: int = struct.field(pytree_node=False, default=7)
  max_match: int = struct.field(pytree_node=False, default=24)
  occurrences: int = struct.field(pytree_node=False, default=32)
  rule: Any = RULE

  def __post_init__(self):
    for name in ("num_tokens", "max_match", "occurrences"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)}: it must be 1 or more")
    if self.max_match > continuations.MAX_MATCH:
      raise ValueError(f"max_match={self.max_match}: it must be at most {continuations.MAX_MATCH}")

  @property
  def max_nodes(self) -> int:
    return self.num_tokens + 1

  @property
  def max_depth(self) -> int:
    return self.num_tokens

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    del target, capacity
    return State(length=self.rule.init(batch, self.num_tokens), draft=jnp.zeros((batch, self.num_tokens), jnp.int32),
                 count=jnp.zeros((batch,), jnp.int32), confidence=jnp.zeros((batch, self.num_tokens), jnp.float32))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    draft, count, confidence = self.copy(context)
    worth = length_lib.cut(self.rule, state.length, count, confidence)
    return tree_lib.chain(context.pending, draft, worth), state.replace(draft=draft, count=count, confidence=confidence)

  def copy(self, context: base.Context) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What follows the match, i32[B, N], how many tokens of it may be drafted, i32[B], and the estimated acceptance of
    each where those before it are accepted, f32[B, N]."""
    last = context.length - 1
    ends = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None] < last[:, None]
    wanted = continuations.latest_tokens(context.tokens, context.length, self.max_match)
    matched = continuations.match_lengths(context.tokens, ends, wanted)
    place, matched = continuations.best_places(matched, min(self.occurrences, context.tokens.shape[1]))
    found = continuations.follow(context.tokens, context.length, place, matched, self.num_tokens, context, overlap=True)
    draft, count, match = found.tokens[:, :, 0], found.known[:, 0], found.matched[:, 0]
    # Of the longest matches, those that went on as the draft does, token by token.
    alike = (found.matched == match[:, None]) & (match[:, None] > 0)
    same = jnp.cumprod((found.tokens == draft[:, :, None]).astype(jnp.int32), axis=1) * alike[:, None]
    same = same.sum(-1)
    seen = jnp.concatenate([alike.sum(-1, keepdims=True), same[:, :-1]], axis=1)
    length = jnp.where(match > 0, match, 0)[:, None] + jnp.arange(self.num_tokens)
    confidence = renewal.copy_confidence(jnp.where(match[:, None] > 0, length, 0), seen, same)
    return draft, jnp.where(match > 0, count, 0), confidence

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: the text judges the draft, whatever was verified of it."""
    del target
    if committed.path is None:
      return state
    judged, agreed = renewal.judge(state.draft, state.count, committed.following, committed.count)
    learnt = self.rule.observe(state.length, committed.drafted, base.accepted_of_chain(committed),
                               confidence=state.confidence, judged=judged, agreed=agreed)
    return state.replace(length=learnt, count=jnp.zeros_like(state.count))
