"""EAGLE: a small head drafts from the target's own features, token by token or as a tree.

The feature at token t and the embedding of token t + 1 predict token t + 2. Behind the pending token the head's own
output takes the place of features; after every step the true ones replace it. The head is that of EAGLE-1 and 2, which
reads what the target's own head reads and predicts it (arXiv 2401.15077), or that of EAGLE-3, which reads three layers
(arXiv 2503.01840), or a module of multi-token prediction that is used again on its own output (FastMTP, arXiv
2509.18362). It drafts a chain; EAGLE-1's tree of fixed shape, whose tokens are the most probable or draws
without replacement; or EAGLE-2's tree (arXiv 2406.16858), grown where the head is sure, see `growth`.

The head may draft from a part of the vocabulary only; what it never drafts the target still emits.

Of a target with an encoder it reads the decoder's features, and its text is the decoder's: what the encoder read is in
the features. Such a head has its own vocabulary matrix (EAGLE-3).

Letters: B batch rows, N drafted tokens, T nodes, k width of the beam, E width of the head, F feature width, U draft ids,
V vocabulary.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import growth
from specjax import static_trees
from specjax.models import base as models
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import draft_ids
from specjax.proposers import fixed_tree
from specjax.proposers import length as length_lib
from specjax.proposers import own_cache
from specjax.proposers import own_features


@struct.dataclass
class State:
  """Of a batch."""
  features: own_features.OwnFeatures
  cache: cache_lib.KVCache   # of the head's layers; entries of true features only
  shared: jax.Array | None   # f[U, E]; rows of the target's head, for a head that drafts some ids through it
  length: Any = ()           # of the length rule


class Headed:
  """A mixin: what follows from the `head`, a field."""

  @property
  def features(self) -> tuple[int, ...]:
    return tuple(sorted(set(self.head.features)))

  @property
  def behind_inputs(self) -> bool:
    return True

  @property
  def draft_context(self) -> int:
    limit = self.head.config.max_context
    return min(limit, limit + 2 - self.max_depth)  # all levels of a tree have a place

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    head = self.head
    base.layers_of(target, "EAGLE")
    if head.shares_head:
      models.decoder_only(target, "EAGLE with the target's vocabulary matrix")
    head.check(target)
    draft_ids.check(target, head.ids)
    width = max(len(head.features), 1) * target.config.width
    return State(features=own_features.empty(batch, capacity, width, target.weights.embedding.dtype),
                 cache=head.init_cache(batch, min(capacity, head.config.max_context)),
                 shared=draft_ids.shared_rows(target, head.ids) if head.shares_head else None)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the features."""
    del target
    return state.replace(features=state.features.observe(own_features.of(committed, self.head.features), committed))


@struct.dataclass
class Eagle(Headed, autoregressive.Chained):
  """Drafts a chain of up to `num_tokens` tokens with `head`.

  Attributes:
    head: a `models.eagle.EagleHead`, `models.eagle3.Eagle3Head` or `models.mtp.MtpHead`; its weights are leaves.
    num_tokens: N.
    drawing, length: as of `DraftModel`.

  Raises:
    ValueError: for a number of tokens below 1, or drawing options that make no sense; by `init` for another target than
      the head's.
  """
  head: Any
  num_tokens: int = struct.field(pytree_node=False, default=3)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  @property
  def draft_context(self) -> int:
    return self.head.config.max_context  # a chain may be cut anywhere

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return super().init(target, batch, capacity).replace(length=self.length.init(batch, self.num_tokens))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    text = context.behind_inputs()
    most = jnp.minimum(autoregressive.room(text, self.num_tokens, self.draft_context),
                       self.length.limit(state.length, self.num_tokens))
    most = jnp.where(text.length > 1, most, 0)  # a text of one token has no features yet
    if self.samples:
      known = draft_ids.known(self.head.ids, target)
      most = jnp.where(autoregressive.possible(known, context, self.drawing), most, 0)
    law = lambda hidden: _logits(self.head, target, state.shared, hidden)[:, 0]
    committed, (logits, feature) = _catch_up(self.head, target, state, text, most > 0, law)

    def advance(token, index, extra):
      block, feature = extra
      seen = jnp.append(jnp.arange(self.num_tokens) < index, True)
      hidden, feature, new = self.head.forward(
          self.head.embed(target.weights.embedding, token[:, None]), feature, (text.length - 1 + index)[:, None],
          jnp.broadcast_to(seen, (token.shape[0], 1, self.num_tokens + 1)), committed, before=block)
      return law(hidden), (block.put(new, index), feature)

    extra = (committed.empty_block(self.num_tokens), feature)
    chain = autoregressive.draft_chain(advance, extra, logits, context, keys, self.drawing, self.num_tokens, most,
                                       self.length, state.length, ids=self.head.ids, vocabulary=target.vocab_size)
    return chain.tree(context.pending), state.replace(cache=committed)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the features."""
    state = super().observe(target, state, committed)
    if committed.path is None:
      return state
    return state.replace(length=self.length.observe(state.length, committed.drafted, base.accepted_of_chain(committed)))


@struct.dataclass
class EagleFixedTree(Headed, fixed_tree.FixedTree):
  """Drafts a tree of the shape `parents`, EAGLE-1's by default.

  Attributes:
    head: as of `Eagle`.
    parents, children, drawing: as of `DraftTree`. EAGLE-1 itself takes the most probable tokens at temperature 0 and
      draws "without_replacement" else.

  Raises:
    ValueError: as of `DraftTree`; by `init` for another target than the head's, or more children than draft ids.
  """
  head: Any
  parents: tuple[int, ...] = struct.field(pytree_node=False, default=static_trees.EAGLE.parents)
  children: str = struct.field(pytree_node=False, default="top_k")
  drawing: autoregressive.Drawing = autoregressive.Drawing()

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    most = max(max(level.counts) for level in static_trees.levels(self.parents))
    if self.children != "independent" and most > self.head.config.draft_vocab:
      raise ValueError(f"parents={self.parents}: a node has {most} children; at most {self.head.config.draft_vocab}, "
                       "the head's token ids")
    return super().init(target, batch, capacity)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    head, text = self.head, context.behind_inputs()
    # No row drafts a part of the tree: one without room for all levels in the head's context drafts nothing.
    wanted = (autoregressive.room(text, self.max_depth) > 0) & (text.length < self.draft_context) & (text.length > 1)
    if self.samples:
      wanted &= autoregressive.possible(draft_ids.known(head.ids, target), context, self.drawing)
    spread = lambda hidden: draft_ids.spread(_logits(head, target, state.shared, hidden), head.ids, target.vocab_size)
    committed, (logits, feature) = _catch_up(head, target, state, text, wanted, lambda hidden: spread(hidden)[:, 0])
    # Where each node with children stands in the pass over its level.
    place = {node: i for level in static_trees.levels(self.parents) for i, node in enumerate(level.nodes)}

    def run(level, slot, depth, tokens, mask, extra):
      block, feature = extra
      above = jnp.asarray([place[self.parents[node]] for node in level.nodes])
      positions = jnp.broadcast_to(text.length[:, None] - 2 + depth, tokens.shape)
      hidden, recurring, new = head.forward(head.embed(target.weights.embedding, tokens), feature[:, above], positions,
                                            mask, committed, before=block)
      return spread(hidden), (block.put(new, slot), recurring)

    extra = (committed.empty_block(max(self.fed_nodes, 1)), feature)
    tree, _ = self.draft(run, extra, logits, context, keys, wanted)
    return tree, state.replace(cache=committed)


@struct.dataclass
class EagleTree(Headed, base.Defaults):
  """Drafts the `nodes` - 1 most probable nodes of a pool of `depth` levels, grown from a beam of `beam` nodes.

  All drafts are points: chosen by the head's probability, not drawn.

  Attributes:
    head: as of `Eagle`.
    nodes: T, the root included. depth: levels. beam: k. EAGLE-2 and 3 run 60 nodes, 5 to 7 levels and a beam of 10 on
      accelerators.

  Raises:
    ValueError: for fewer than 2 nodes, no level or no beam; by `init` for another target than the head's.
  """
  head: Any
  nodes: int = struct.field(pytree_node=False, default=8)
  depth: int = struct.field(pytree_node=False, default=4)
  beam: int = struct.field(pytree_node=False, default=3)

  def __post_init__(self):
    for name, least in (("nodes", 2), ("depth", 1), ("beam", 1)):
      if getattr(self, name) < least:
        raise ValueError(f"{name}={getattr(self, name)}: it must be {least} or more")

  @property
  def max_nodes(self) -> int:
    return self.nodes

  @property
  def max_depth(self) -> int:
    return min(self.depth, self.nodes - 1)

  @property
  def chains(self) -> bool:
    return self.beam == 1 or self.nodes == 2

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    if self.beam > self.head.config.draft_vocab:
      raise ValueError(f"beam={self.beam}: at most {self.head.config.draft_vocab}, the head's token ids")
    return super().init(target, batch, capacity)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache, keys
    text = context.behind_inputs()
    levels = autoregressive.room(text, self.max_depth)
    wanted = (levels > 0) & (text.length < self.draft_context) & (text.length > 1)
    batch, k = wanted.shape[0], self.beam

    def children(hidden):
      ids, log_q = growth.children(_logits(self.head, target, state.shared, hidden), k)
      ids = ids if self.head.ids is None else self.head.ids[ids]
      return growth.without_ends(ids, log_q, context.rules.eos)

    committed, ((ids, log_q), feature) = _catch_up(self.head, target, state, text, wanted, children)
    pool, beam = growth.start(ids[:, 0], jnp.where(wanted[:, None], log_q[:, 0], -jnp.inf), self.max_depth)

    def grow(carry):
      pool, beam, feature, block = carry
      itself = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
      positions = jnp.broadcast_to(text.length[:, None] - 2 + beam.level, beam.tokens.shape)
      own = jnp.take_along_axis(feature, beam.parents[:, :, None], axis=1)
      hidden, feature, new = self.head.forward(
          self.head.embed(target.weights.embedding, beam.tokens), own, positions,
          jnp.concatenate([beam.above, itself], axis=2), committed, before=block)
      block = block.put(new, beam.first_slot)
      pool, beam = growth.expand(pool, beam, *children(hidden))
      return pool, beam, feature, block

    if self.max_depth > 1:
      deepest = jnp.max(levels)
      goes_on = lambda carry: (carry[1].level < deepest) & (carry[1].alive.any(-1) & wanted).any()
      feature = jnp.broadcast_to(feature, (batch, k, feature.shape[-1]))  # of the root, the parent of all of level 1
      carry = (pool, beam, feature, committed.empty_block((self.max_depth - 1) * k))
      pool = jax.lax.while_loop(goes_on, grow, carry)[0]
    tree, _ = growth.rerank(pool, context.pending, self.nodes, max_level=levels)
    return tree, state.replace(cache=committed)


def _logits(head, target, shared, hidden):
  """Of the ids that are drafted, without rows of the vocabulary that only fill it up."""
  logits = head.logits(hidden, target.head if shared is None else shared) if head.shares_head else head.logits(hidden)
  return logits if head.ids is not None else draft_ids.whole(logits, target)


def _catch_up(head, target, state, context, wanted, read):
  """Feeds all entries of true features, the last being that before the pending token: the cache, and of that entry what
  `read` makes of its hidden state f[B, 1, E], and the feature that recurs f[B, 1, E]. `context` is the decoder's own.

  The product with a vocabulary stands in `read`, where no row drafts nothing of it is computed.
  """
  def run(cache, size):
    start = cache.length
    place = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(place + 1, context.tokens.shape[1] - 1), axis=1)
    feature = head.fused(state.features.window(start, size))
    # Behind a barrier: XLA folds a constant mask.
    mask = jax.lax.optimization_barrier(jnp.tril(jnp.ones((size, size), bool)))
    hidden, recurring, block = head.forward(head.embed(target.weights.embedding, tokens), feature, place,
                                            jnp.broadcast_to(mask, (tokens.shape[0], size, size)), cache)
    return (hidden, recurring), block

  return own_cache.feed(run, lambda out: (read(out[0]), out[1]), state.cache, context.length - 1, wanted)
