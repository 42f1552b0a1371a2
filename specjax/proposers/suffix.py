"""Suffix decoding: drafts what mostly followed the text's end before, in this text and in earlier outputs.

Method of SuffixDecoding (arXiv 2411.04975; `snowflakedb/ArcticInference`): behind every suffix of the text that was
there before, a trie with counts of what followed; a draft as long as the match allows; of all suffixes the one whose
draft has the greatest sum of estimated probabilities. There the tries are trees on the host; here nothing is kept but
the tokens, and `continuations` counts on the device what a draft needs, over the best occurrences of the text's end.

`Suffix(escape=0, store_escape=0, factor=1)` is the published rule. The default estimates probabilities with an escape
for what was never seen, which makes the score a better judge of how much to draft, and lets a draft be longer than its
match.

Letters: B batch rows, S tokens of the buffer, G tokens of the store, T nodes.
"""
from collections.abc import Sequence

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.proposers import base
from specjax.proposers import continuations


@struct.dataclass
class Store:
  """Earlier outputs, the oldest first, -1 after each."""
  tokens: jax.Array  # i32[G]
  filled: jax.Array  # i32[]; how many of them are in use

  @classmethod
  def empty(cls, size: int) -> "Store":
    """Room for `size` tokens; raises ValueError below 2, an output of one token and its end."""
    if size < 2:
      raise ValueError(f"a store of {size} tokens: it must be 2 or more; for none leave the store out")
    return cls(tokens=jnp.full((size,), -1, jnp.int32), filled=jnp.zeros((), jnp.int32))

  def append(self, outputs: Sequence[Sequence[int]]) -> "Store":
    """With more outputs; the oldest tokens make room. On the host; the arrays keep their shapes.

    Raises:
      ValueError: for a negative id.
    """
    kept = [np.asarray(self.tokens)[:int(self.filled)]]
    for output in outputs:
      output = np.asarray(output, np.int32).reshape(-1)
      if (output < 0).any():
        raise ValueError(f"an output holds id {output.min()}; ids are 0 or greater: leave padding out")
      kept += [output, np.array([-1], np.int32)] if output.size else []
    size = self.tokens.shape[0]
    kept = np.concatenate(kept)[-size:]
    return Store(tokens=jnp.asarray(np.pad(kept, (0, size - kept.size), constant_values=-1)),
                 filled=jnp.asarray(kept.size, jnp.int32))


@struct.dataclass
class Suffix(base.Stateless):
  """Suffix decoding over the row's own text, prompt and output, and over a store of earlier outputs.

  A match of p tokens, p from `min_match` to `max_match`, drafts `factor * p + offset` tokens at most. Counts are taken
  over the `occurrences` best occurrences of the text's end, so they are exact for a suffix that occurs no more often.
  What the estimates are, and how a draft is chosen by them: see `continuations.best_draft`. Drafts end before an
  end-of-sequence id and one token short of the row's budget.

  Attributes:
    store: earlier outputs, read by all rows; None for the row's own text only. See `with_store` and `remember`.
    num_tokens: drafted tokens, at most. tree: a tree of them instead of a chain.
    min_probability: least estimated probability of a drafted token, given the text.
    escape, store_escape: see `continuations.best_draft`; 0 trusts the counts. A match in another output says less than
      one in the text itself.
    min_score: least estimate of accepted tokens for which a row drafts at all.
    overlap: a match close to the text's end is taken as a period and continued beyond it.

  Raises:
    ValueError: for an option out of range.
  """
  store: Store | None = None
  num_tokens: int = struct.field(pytree_node=False, default=7)
  tree: bool = struct.field(pytree_node=False, default=False)
  min_match: int = struct.field(pytree_node=False, default=1)
  max_match: int = struct.field(pytree_node=False, default=24)
  factor: float = struct.field(pytree_node=False, default=4.0)
  offset: float = struct.field(pytree_node=False, default=0.0)
  min_probability: float = struct.field(pytree_node=False, default=0.1)
  escape: float = struct.field(pytree_node=False, default=1.7)
  store_escape: float = struct.field(pytree_node=False, default=8.0)
  min_score: float = struct.field(pytree_node=False, default=0.0)
  occurrences: int = struct.field(pytree_node=False, default=32)
  overlap: bool = struct.field(pytree_node=False, default=False)

  def __post_init__(self):
    continuations.check_options(self)
    if not 1 <= self.min_match <= self.max_match <= continuations.MAX_MATCH:
      raise ValueError(f"min_match={self.min_match}, max_match={self.max_match}: needed is 1 <= min_match <= max_match "
                       f"<= {continuations.MAX_MATCH}")
    for name in ("factor", "store_escape", "min_score"):
      if not 0 <= getattr(self, name) < float("inf"):
        raise ValueError(f"{name}={getattr(self, name)}: it must be 0 or greater, and finite")

  @property
  def max_depth(self) -> int:
    """See `base.Proposer`. The last node of a tree is kept for a second branch, else it would be a chain."""
    return self.num_tokens - 1 if self.tree else self.num_tokens

  def with_store(self, size: int) -> "Suffix":
    """With an empty store of `size` tokens for `remember` to fill."""
    return self.replace(store=Store.empty(size))

  def remember(self, state, outputs: Sequence[Sequence[int]]) -> "Suffix":
    """With the `outputs` of requests that have ended in its store, if there is one: lists of token ids.

    No program is compiled again for it.
    """
    del state
    return self if self.store is None else self.replace(store=self.store.append(outputs))

  def forget(self) -> "Suffix":
    """With an empty store of the same size."""
    return self if self.store is None else self.with_store(self.store.tokens.shape[0])

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    return self.draft(context).tree(), state

  def draft(self, context: base.Context) -> continuations.Draft:
    """What `propose` drafts, with the estimated probability of every node for a rule that cuts by it."""
    last = context.length - 1
    drafted = self._from(context.tokens, last, context.length, context, self.escape, self.overlap)
    if self.store is not None:
      filled = jnp.broadcast_to(self.store.filled, last.shape)
      look = lambda: self._from(self.store.tokens[None], filled, filled, context, self.store_escape, False)
      others = jax.lax.cond(self.store.filled > 0, look, lambda: jax.tree.map(jnp.zeros_like, drafted))
      drafted = drafted.where(drafted.score >= others.score, others)
    return drafted.only(drafted.score >= self.min_score)

  def _from(self, text, before, known, context, escape, overlap):
    """The best draft out of one text, i32[B, S] or i32[1, G], `known` i32[B] tokens of it, by matches that end before
    a place, i32[B]."""
    ends = jnp.arange(text.shape[1], dtype=jnp.int32)[None] < before[:, None]
    wanted = continuations.latest_tokens(context.tokens, context.length, self.max_match)
    matched = continuations.match_lengths(text, ends, wanted)
    place, matched = continuations.best_places(matched, self.occurrences)
    found = continuations.follow(text, known, place, matched, self.max_depth, context, overlap=overlap)
    lengths = np.arange(self.max_match, self.min_match - 1, -1, dtype=np.int32)
    limits = np.clip(np.floor(self.factor * lengths + self.offset + 1e-6), 0, self.num_tokens).astype(np.int32)
    return continuations.best_draft(
        found, context.pending, jnp.asarray(lengths), jnp.asarray(limits), max_nodes=self.max_nodes,
        min_probability=self.min_probability, escape=escape, chain=not self.tree)
