"""PARD: an ordinary draft model that was trained on masks drafts all depths in one pass.

PARD (arXiv 2504.18583, AMD-AGI/PARD; vLLM's parallel drafting of draft models). Behind the tokens that the model's
cache lacks, the pending one last, stand N - 1 mask tokens; the logits of the pending one and of the masks are the laws
of the N depths (see `masked_pass`). The cache holds committed tokens only: what was drafted was never fed, and the
masks are dropped. As a chain, greedy or drawn from each depth's law; or as a tree, best first over those laws
(`parallel`), where PARD's own code drafts greedy chains.
Such models are trained with PARD's own code; here they are read and draft.

Letters: B batch rows, N depths.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import length as length_lib
from specjax.proposers import masked_pass
from specjax.proposers import own_cache
from specjax.proposers import parallel


@struct.dataclass
class State:
  """Of a batch."""
  cache: cache_lib.Cache  # of the draft model; committed tokens
  length: Any               # of the length rule


@struct.dataclass
class Pard(parallel.ChainOrTree):
  """Drafts a chain of up to `num_tokens` tokens, or a tree of `nodes` nodes, with `model`.

  Attributes:
    model: an instance of `models.base.Target` with the target's ids that was trained on masks; its weights are leaves.
    mask_id: the token of every mask, a row of the model's embedding (`checkpoints.pard_token`).
    num_tokens: of a chain, and greatest depth of a tree. PARD trains 8 depths and drafts up to 12.
    nodes: T, root included; None drafts a chain. beam: most children of a node.
    drawing, length: of a chain; as of `DraftModel`.

  Raises:
    ValueError: for a number of tokens below 1, fewer than 2 nodes, drawing options that make no sense, draws for a
      tree, or a mask that the model's embedding does not have; by `init` for a drafter with another number of ids.
  """
  model: Any
  mask_id: int = struct.field(pytree_node=False)
  num_tokens: int = struct.field(pytree_node=False, default=7)
  nodes: int | None = struct.field(pytree_node=False, default=None)
  beam: int = struct.field(pytree_node=False, default=3)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  def __post_init__(self):
    if not hasattr(self.model, "vocab_size"):
      return  # put together from something else inside a transformation
    self.check_options(None, "", self.model.vocab_size)
    # A published mask is often one of the rows that only fill the embedding up.
    rows = self.model.config.vocab_size if hasattr(self.model, "config") else self.model.vocab_size
    if not 0 <= self.mask_id < rows:
      raise ValueError(f"mask_id={self.mask_id}: it must be 0 to {rows - 1}, a row of the draft model's embedding")

  @property
  def draft_context(self) -> int:
    # All masks have a position, whether or not their depth is drafted.
    limit = self.model.max_context
    return max(min(limit, limit + 2 - self.max_depth), 0)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.same_vocabulary(target, self.model)
    return State(cache=self.model.init_cache(batch, min(capacity, self.model.max_context)),
                 length=self.length.init(batch, self.max_depth))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    model, masks = self.model, self.max_depth - 1
    room = jnp.where(context.length < self.draft_context, autoregressive.room(context, self.max_depth), 0)
    most = jnp.minimum(room, self.length.limit(state.length, self.max_depth))

    def forward(cache, size, count, masks):
      place = cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
      tokens = jnp.take_along_axis(context.tokens, jnp.minimum(place, context.tokens.shape[1] - 1), axis=1)
      tokens = jnp.pad(tokens, ((0, 0), (0, masks)), constant_values=self.mask_id)
      positions, seen = masked_pass.layout(cache.length, count, size, masks)
      # Behind a barrier: XLA folds a constant mask once for every layer.
      return model.forward(tokens, positions, jax.lax.optimization_barrier(seen), cache)

    def run(cache, size):
      return (), forward(cache, size, jnp.full_like(cache.length, size), 0).in_flight

    def finish(cache, size, count):
      out = forward(cache, size, count, masks)
      logits = model.logits(masked_pass.depths(out.hidden, count, masks))
      return out.in_flight.narrow(size), self.laws(logits)

    committed, made = own_cache.feed(run, None, state.cache, context.length, most > 0, finish=finish)
    tree = self.drafted(made, None, context, keys, most, state.length, target.vocab_size)
    return tree, state.replace(cache=committed)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: what was accepted is fed with the next draft."""
    del target
    if committed.path is None:
      return state
    return state.replace(length=self.length.observe(state.length, committed.drafted, base.accepted_of_chain(committed)))
