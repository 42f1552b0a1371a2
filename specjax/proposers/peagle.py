"""P-EAGLE: an EAGLE-3 head drafts all depths in one pass, masks standing for the tokens that it does not know yet.

P-EAGLE (arXiv 2602.01469; vLLM's parallel drafting). The pass runs over the entries that the head's cache lacks and, in
the same batch of nodes, over the masks behind them (see `masked_pass`); the entries are kept, the masks never. As a
chain, greedy or drawn from each depth's law; or as a tree, best first over those laws (`parallel`), where vLLM drafts
greedy chains only.

Letters: B batch rows, N depths, U draft ids.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import draft_ids
from specjax.proposers import eagle
from specjax.proposers import length as length_lib
from specjax.proposers import masked_pass
from specjax.proposers import own_cache
from specjax.proposers import parallel


@struct.dataclass
class PEagle(eagle.Headed, parallel.ChainOrTree):
  """Drafts a chain of up to `num_tokens` tokens, or a tree of `nodes` nodes.

  Attributes:
    head: a `models.peagle.PEagleHead`; its weights are leaves.
    num_tokens: of a chain, and greatest depth of a tree; at most the depths that the head was trained for.
    nodes: T, root included; None drafts a chain. beam: most children of a node.
    drawing, length: of a chain; as of `DraftModel`.

  Raises:
    ValueError: for more tokens than the head was trained for, fewer than 2 nodes, drawing options that make no sense,
      or draws for a tree; by `init` for another target than the head's.
  """
  head: Any
  num_tokens: int = struct.field(pytree_node=False, default=3)
  nodes: int | None = struct.field(pytree_node=False, default=None)
  beam: int = struct.field(pytree_node=False, default=3)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  def __post_init__(self):
    if hasattr(self.head, "config"):  # else put together from something else inside a transformation
      self.check_options(self.head.depths, "the depths that the head was trained for", self.head.config.draft_vocab)

  @property
  def draft_context(self) -> int:
    # All masks have a position, whether or not their depth is drafted.
    return max(self.head.config.max_context + 3 - max(self.max_depth, 3), 0)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return super().init(target, batch, capacity).replace(length=self.length.init(batch, self.max_depth))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    head, masks = self.head, self.max_depth - 1
    room = jnp.where(context.length < self.draft_context, autoregressive.room(context, self.max_depth), 0)
    most = jnp.minimum(room, self.length.limit(state.length, self.max_depth))
    most = jnp.where(context.length > 1, most, 0)  # a prompt of one token has no features yet
    if self.samples:
      known = draft_ids.known(head.ids, target)
      most = jnp.where(autoregressive.possible(known, context, self.drawing), most, 0)

    def entries(cache, size):
      """Embeddings of the tokens behind the next `size` entries, and their features."""
      place = cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
      tokens = jnp.take_along_axis(context.tokens, jnp.minimum(place + 1, context.tokens.shape[1] - 1), axis=1)
      return head.embed(target.weights.embedding, tokens), head.fused(state.features.window(cache.length, size))

    def run(cache, size):
      return (), _pass(head, entries(cache, size), cache, jnp.full_like(cache.length, size), 0)[1]

    def finish(cache, size, count):
      embedded, feature = entries(cache, size)
      batch = embedded.shape[0]
      token = head.embed(target.weights.embedding, jnp.full((batch, masks), head.mask_id, jnp.int32))
      mask = jnp.broadcast_to(head.mask(), (batch, masks, feature.shape[-1])).astype(feature.dtype)
      hidden, block = _pass(head, (jnp.concatenate([embedded, token], 1), jnp.concatenate([feature, mask], 1)), cache,
                            count, masks)
      logits = head.logits(masked_pass.depths(hidden, count, masks))
      if head.ids is None:
        logits = draft_ids.whole(logits, target)
      return block.narrow(size), self.laws(logits)

    committed, made = own_cache.feed(run, None, state.cache, context.length - 1, most > 0, finish=finish)
    tree = self.drafted(made, head.ids, context, keys, most, state.length, target.vocab_size)
    return tree, state.replace(cache=committed)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the features."""
    state = super().observe(target, state, committed)
    if committed.path is None:
      return state
    return state.replace(length=self.length.observe(state.length, committed.drafted, base.accepted_of_chain(committed)))


def _pass(head, given, cache, count, masks):
  """Hidden states and in-flight block of entries and the masks behind them."""
  positions, seen = masked_pass.layout(cache.length, count, given[0].shape[1] - masks, masks)
  hidden, _, block = head.forward(*given, positions, jax.lax.optimization_barrier(seen), cache)
  return hidden, block
