"""A draft model: any decoder with the target's vocabulary drafts a chain, token by token.

Speculative sampling of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) when drafts are sampled,
assisted generation (Transformers) when they are greedy. The drafter keeps a cache of its own (see `own_cache`).

Letters: B batch rows, N drafted tokens.
"""
from typing import Any

from flax import struct
import jax.numpy as jnp

from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import length as length_lib
from specjax.proposers import own_cache


@struct.dataclass
class State:
  """Of a batch."""
  own: own_cache.OwnCache
  length: Any  # of the length rule


@struct.dataclass
class DraftModel(autoregressive.Chained):
  """Drafts up to `num_tokens` tokens with `model`, an instance of `models.base.Target` with the target's ids.

  Attributes:
    model: the drafter; its weights are leaves. Rows whose text is as long as its context draft nothing any more, and
      are counted in `Counters.steps_beyond_draft_context`.
    num_tokens: N.
    drawing: greedy drafts, which are points, or draws from q; see `autoregressive.Drawing`.
    length: when to draft less; see `length.LengthRule`.

  Raises:
    ValueError: for a number of tokens below 1, or drawing options that make no sense; by `init` for a drafter with
      another number of ids. Whether the ids mean the same is asked of tokenizers, `checkpoints.vocabulary_map`.
  """
  model: Any
  num_tokens: int = struct.field(pytree_node=False, default=5)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  @property
  def draft_context(self) -> int:
    return self.model.max_context

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.same_vocabulary(target, self.model)
    return State(own=own_cache.empty(self.model, batch, capacity, self.num_tokens, self.max_nodes),
                 length=self.length.init(batch, self.num_tokens))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache
    most = jnp.minimum(autoregressive.room(context, self.num_tokens, self.draft_context),
                       self.length.limit(state.length, self.num_tokens))
    committed, logits = own_cache.catch_up(self.model, state.own.cache, context, most > 0)

    advance = own_cache.advance(self.model, committed, context.length, self.num_tokens)
    chain = autoregressive.draft_chain(advance, state.own.block, logits, context, keys, self.drawing, self.num_tokens,
                                       most, self.length, state.length)
    fed = jnp.minimum(chain.count, jnp.maximum(chain.steps - 1, 0))  # the last token of the longest row never is
    slot = jnp.arange(self.max_nodes, dtype=jnp.int32)[None] - 1
    slots = jnp.where(slot < fed[:, None], slot, -1)
    return chain.tree(context.pending), state.replace(own=own_cache.OwnCache(committed, chain.extra, slots))

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: what was accepted enters the cache; a prompt is fed when it is needed."""
    del target
    if committed.path is None:
      return state
    return State(own=state.own.accept(committed),
                 length=self.length.observe(state.length, committed.drafted, base.accepted_of_chain(committed)))
