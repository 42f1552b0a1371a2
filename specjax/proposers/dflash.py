"""DFlash: a block of masks becomes a draft in one pass over the target's features.

DFlash (arXiv 2602.06036, z-lab/dflash). The drafter's cache holds keys and values of the *text*, made of the target's
features at committed tokens; a block attends to it and is never kept. So one pass drafts all depths, whatever their
number. As a chain, greedy or drawn from each place's law; or as a tree, best first over those laws (`parallel`).

Letters: B batch rows, J places of a block, T nodes, F feature width, U draft ids, V vocabulary.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import base as models
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import draft_ids
from specjax.proposers import length as length_lib
from specjax.proposers import own_cache
from specjax.proposers import own_features
from specjax.proposers import parallel


@struct.dataclass
class State:
  """Of a batch."""
  features: own_features.OwnFeatures
  cache: cache_lib.KVCache   # of the text
  shared: jax.Array | None   # f[U, E]; rows of the target's head; None where the whole of it is taken
  length: Any


@struct.dataclass
class DFlash(parallel.ChainOrTree):
  """Drafts a chain of up to `num_tokens` tokens, or a tree of `nodes` nodes.

  Attributes:
    head: a `models.dflash.DFlashHead`; its weights are leaves.
    num_tokens: of a chain, and greatest depth of a tree; at most one less than the block has places.
    nodes: T, root included; None drafts a chain. beam: most children of a node.
    drawing, length: of a chain; as of `DraftModel`.

  Raises:
    ValueError: for more tokens than the block has places, fewer than 2 nodes, drawing options that make no sense, or
      draws for a tree; by `init` for another target than the drafter's.
  """
  head: Any
  num_tokens: int = struct.field(pytree_node=False, default=7)
  nodes: int | None = struct.field(pytree_node=False, default=None)
  beam: int = struct.field(pytree_node=False, default=3)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  def __post_init__(self):
    if not hasattr(self.head, "config"):
      return  # put together from something else inside a transformation
    what = "the places of the block" + (" behind the first" if self.skipped else "")
    self.check_options(self.head.config.block - self.skipped, what, self.head.config.draft_vocab)

  @property
  def skipped(self) -> int:
    """Places at the beginning of a block that draft nothing."""
    return 1

  @property
  def drafter(self):
    """What makes the block."""
    return self.head

  @property
  def features(self) -> tuple[int, ...]:
    return tuple(sorted(set(self.head.features)))

  @property
  def draft_context(self) -> int:
    # All places of the block are positions, used or not.
    return max(self.head.config.max_context + 1 - self.head.config.block, 0)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.layers_of(target, "DFlash")
    models.decoder_only(target, "DFlash")
    self.head.check(target)
    draft_ids.check(target, self.head.ids)
    width = len(self.head.features) * target.config.width
    return State(features=own_features.empty(batch, capacity, width, target.weights.embedding.dtype),
                 cache=self.head.init_cache(batch, min(capacity, self.head.config.max_context)),
                 shared=draft_ids.shared_rows(target, self.head.ids), length=self.length.init(batch, self.max_depth))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    head, drafter = self.head, self.drafter
    size, depth, skipped = drafter.config.block, self.max_depth, self.skipped
    room = jnp.where(context.length < self.draft_context, autoregressive.room(context, depth), 0)
    most = jnp.minimum(room, self.length.limit(state.length, self.max_depth))
    most = jnp.where(context.length > 1, most, 0)  # a prompt of one token has no features yet
    if self.samples:
      known = draft_ids.known(head.ids, target)
      most = jnp.where(autoregressive.possible(known, context, self.drawing), most, 0)
    wanted = most > 0

    def run(cache, count):
      place = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
      return (), drafter.text(state.features.window(cache.length, count), place)

    committed, _ = own_cache.feed(run, lambda outputs: outputs, state.cache, context.length - 1, wanted)
    batch = wanted.shape[0]

    def block():
      tokens = jnp.full((batch, size), drafter.config.mask_id, jnp.int32).at[:, 0].set(context.pending)
      place = context.length[:, None] - 1 + jnp.arange(size, dtype=jnp.int32)[None]
      hidden = drafter.forward(jnp.take(target.weights.embedding, tokens, axis=0, mode="clip"), place, committed)
      hidden = hidden[:, skipped:skipped + depth]
      logits = target.logits(hidden) if state.shared is None else drafter.logits(hidden, state.shared)
      return self.read(hidden, logits, context)

    made = parallel.if_any(wanted, block)
    tree = self.draft(target, made, state, context, keys, most)
    return tree, state.replace(cache=committed)

  def read(self, hidden, logits, context):
    """What `draft` takes, of the hidden states f[B, N, E] of the places that draft and their logits f[B, N, U]."""
    del hidden, context
    return self.laws(logits)

  def draft(self, target, made, state, context, keys, most):
    """The tree of what `read` returned, `most` i32[B] tokens deep."""
    return self.drafted(made, self.head.ids, context, keys, most, state.length, target.vocab_size)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the features."""
    del target
    length = state.length
    if committed.path is not None:
      length = self.length.observe(length, committed.drafted, base.accepted_of_chain(committed))
    features = state.features.observe(own_features.joined(committed, self.head.features), committed)
    return state.replace(features=features, length=length)
