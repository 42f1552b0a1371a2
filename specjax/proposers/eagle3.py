"""EAGLE-3: a one-layer head drafts from the target's own features, token by token or as a tree.

EAGLE-3 (arXiv 2503.01840) drafts with what the target computed of the text: the fused features of three layers at token
t and the embedding of token t + 1 predict token t + 2. Behind the pending token the head's own output takes the place of
features; after every step the true ones replace it. Trees are those of EAGLE-2 (arXiv 2406.16858), see `growth`.

The head may draft from a part of the vocabulary only; what it never drafts the target still emits.

Letters: B batch rows, N drafted tokens, T nodes, k width of the beam, E width of the head, F feature width, U draft ids,
V vocabulary.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import growth
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import draft_ids
from specjax.proposers import length as length_lib
from specjax.proposers import own_cache
from specjax.proposers import own_features


@struct.dataclass
class State:
  """Of a batch."""
  features: own_features.OwnFeatures
  cache: cache_lib.KVCache   # of the head's layer; entries of true features only
  length: Any = ()           # of the length rule


@struct.dataclass
class Eagle3(autoregressive.Chained):
  """Drafts a chain of up to `num_tokens` tokens with `head`.

  Attributes:
    head: a `models.eagle3.Eagle3Head`; its weights are leaves.
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
  def features(self) -> tuple[int, ...]:
    return tuple(sorted(set(self.head.features)))

  @property
  def draft_context(self) -> int:
    return self.head.config.max_context

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return _init(self.head, target, batch, capacity).replace(length=self.length.init(batch, self.num_tokens))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    most = jnp.minimum(autoregressive.room(context, self.num_tokens, self.draft_context),
                       self.length.limit(state.length, self.num_tokens))
    most = jnp.where(context.length > 1, most, 0)  # a prompt of one token has no features yet
    if self.samples:
      known = draft_ids.known(self.head.ids, target.vocab_size)
      most = jnp.where(autoregressive.possible(known, context, self.drawing), most, 0)
    law = lambda hidden: _logits(self.head, target, hidden)[:, 0]
    committed, (logits, feature) = _catch_up(self.head, target, state, context, most > 0, law)

    def advance(token, index, extra):
      block, feature = extra
      seen = jnp.append(jnp.arange(self.num_tokens) < index, True)
      hidden, feature, new = self.head.forward(
          self.head.embed(target.weights.embedding, token[:, None]), feature, (context.length - 1 + index)[:, None],
          jnp.broadcast_to(seen, (token.shape[0], 1, self.num_tokens + 1)), committed, before=block)
      return law(hidden), (block.put(new, index), feature)

    extra = (committed.empty_block(self.num_tokens), feature)
    chain = autoregressive.draft_chain(advance, extra, logits, context, keys, self.drawing, self.num_tokens, most,
                                       self.length, state.length, ids=self.head.ids, vocabulary=target.vocab_size)
    return chain.tree(context.pending), state.replace(cache=committed)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the features."""
    del target
    length = state.length
    if committed.path is not None:
      length = self.length.observe(length, committed.drafted, base.accepted_of_chain(committed))
    return state.replace(features=_learnt(self.head, state, committed), length=length)


@struct.dataclass
class Eagle3Tree(base.Defaults):
  """Drafts the `nodes` - 1 most probable nodes of a pool of `depth` levels, grown from a beam of `beam` nodes.

  All drafts are points: chosen by the head's probability, not drawn.

  Attributes:
    head: as of `Eagle3`.
    nodes: T, the root included. depth: levels. beam: k. EAGLE-3 runs 60 nodes, 5 to 7 levels and a beam of 10 on
      accelerators.

  Raises:
    ValueError: for fewer than 2 nodes, 1 level or a beam of 1; by `init` for another target than the head's.
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

  @property
  def features(self) -> tuple[int, ...]:
    return tuple(sorted(set(self.head.features)))

  @property
  def draft_context(self) -> int:
    limit = self.head.config.max_context
    return min(limit, limit + 2 - self.max_depth)  # all levels have a place

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    if self.beam > self.head.config.draft_vocab:
      raise ValueError(f"beam={self.beam}: at most {self.head.config.draft_vocab}, the head's token ids")
    return _init(self.head, target, batch, capacity)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache, keys
    levels = autoregressive.room(context, self.max_depth)
    wanted = (levels > 0) & (context.length < self.draft_context) & (context.length > 1)
    batch, k = wanted.shape[0], self.beam

    def children(hidden):
      ids, log_q = growth.children(_logits(self.head, target, hidden), k)
      ids = ids if self.head.ids is None else self.head.ids[ids]
      return growth.without_ends(ids, log_q, context.rules.eos)

    committed, ((ids, log_q), feature) = _catch_up(self.head, target, state, context, wanted, children)
    pool, beam = growth.start(ids[:, 0], jnp.where(wanted[:, None], log_q[:, 0], -jnp.inf), self.max_depth)

    def grow(carry):
      pool, beam, feature, block = carry
      itself = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
      positions = jnp.broadcast_to(context.length[:, None] - 2 + beam.level, beam.tokens.shape)
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

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the features."""
    del target
    return state.replace(features=_learnt(self.head, state, committed))


def _init(head, target, batch, capacity):
  base.layers_of(target, "EAGLE-3")
  head.check(target)
  draft_ids.check(target, head.ids)
  width = len(head.features) * target.config.width
  return State(features=own_features.empty(batch, capacity, width, target.weights.embedding.dtype),
               cache=head.init_cache(batch, min(capacity, head.config.max_context)))


def _learnt(head, state, committed):
  return state.features.observe(own_features.joined(committed, head.features), committed)


def _logits(head, target, hidden):
  """Of the ids that are drafted, without rows of the vocabulary that only fill it up."""
  logits = head.logits(hidden)
  return logits if head.ids is not None else logits[..., :target.vocab_size]


def _catch_up(head, target, state, context, wanted, read):
  """Feeds all entries of true features, the last being that before the pending token: the cache, and of that entry what
  `read` makes of its hidden state f[B, 1, E], and the feature that recurs f[B, 1, E].

  The head's product with its vocabulary stands in `read`, where no row drafts nothing of it is computed.
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
