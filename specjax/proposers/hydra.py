"""Hydra: heads on the target's hidden state that also see the tokens drafted above them, one pass a depth.

Hydra (arXiv 2402.05109, zankner/Hydra). Drafts are a chain or a tree of a fixed shape, as Medusa's (`depth_heads`). Every
head's law is conditional on the path above it, so draws keep a true q, and the nodes of one depth have other children.

Heads of Hydra++ read what a layer of attention makes of the target's hidden states at all committed tokens. It runs over
committed tokens only, and always over the target's own hidden states, see `own_features` and `own_cache`.

Letters: B batch rows, N heads, T nodes, n nodes of a level, E width of the target, U draft ids, V vocabulary.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax import level_draws
from specjax import static_trees
from specjax.models import base as models
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import depth_heads
from specjax.proposers import draft_ids
from specjax.proposers import length as length_lib
from specjax.proposers import own_cache
from specjax.proposers import own_features
from specjax.proposers import parallel


@struct.dataclass
class State:
  """Of a batch."""
  text: Any                        # `depth_heads.LastHidden`; with prefix attention `own_features.OwnFeatures`
  cache: cache_lib.KVCache | None  # of prefix attention; entries of the target's hidden states only
  shared: jax.Array | None         # f[U, E]; rows of the target's head, for heads without a matrix of theirs
  length: Any


@struct.dataclass
class Hydra(depth_heads.DepthHeads):
  """Drafts a chain of up to `num_tokens` tokens, or a tree of a fixed `shape`.

  Attributes:
    head: a `models.hydra.HydraHead`; its weights are leaves.
    num_tokens: of a chain; at most the number of heads.
    shape: of a tree, as of `static_trees.best_first`, no deeper than there are heads; None drafts a chain.
    drawing, length: of a chain; as of `DraftModel`.

  Raises:
    ValueError: for more depths than heads, drawing options that make no sense, or draws for a tree; by `init` for
      another target than the heads'.
  """
  head: Any
  num_tokens: int = struct.field(pytree_node=False, default=3)
  shape: static_trees.Shape | None = struct.field(pytree_node=False, default=None)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  @property
  def draft_context(self) -> int | None:
    return self.head.config.max_context

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.layers_of(target, "Hydra")
    models.decoder_only(target, "Hydra")
    self.head.check(target)
    draft_ids.check(target, self.head.ids)
    own, cache = self.head.vocabulary is not None, None
    if self.head.prefix is None:
      text = depth_heads.last_hidden(target, batch)
    else:
      text = own_features.empty(batch, capacity, target.config.width, target.weights.embedding.dtype)
      cache = self.head.init_cache(batch, min(capacity, self.draft_context))
    return State(text=text, cache=cache, shared=None if own else draft_ids.shared_rows(target, self.head.ids),
                 length=self.length.init(batch, self.max_depth))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    room = jnp.where(state.text.known > 0, autoregressive.room(context, self.max_depth), 0)
    if self.draft_context is not None:
      room = jnp.where(context.length < self.draft_context, room, 0)
    most = jnp.minimum(room, self.length.limit(state.length, self.max_depth))
    if self.samples:
      known = draft_ids.known(self.head.ids, target)
      most = jnp.where(autoregressive.possible(known, context, self.drawing), most, 0)
    state, hidden = self._read(state, context, most > 0)
    embed = lambda tokens: jnp.take(target.weights.embedding, tokens, axis=0, mode="clip")
    law = lambda head, inputs: self._logits(target, state.shared, head, inputs)
    if self.shape is None:
      return self._chain(law, embed, hidden, state, context, keys, most, target.vocab_size), state
    drafted = parallel.if_any(most > 0, lambda: self._choices(law, embed, hidden, context))
    return self.tree_of(drafted, context, most > 0), state

  def _read(self, state, context, wanted):
    """The state, and what the heads read at the last committed token, f[B, E]."""
    if self.head.prefix is None:
      return state, state.text.values

    def run(cache, size):
      place = cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
      # Behind a barrier: XLA folds a constant mask.
      mask = jax.lax.optimization_barrier(jnp.tril(jnp.ones((size, size), bool)))
      return self.head.forward_prefix(state.text.window(cache.length, size), place,
                                      jnp.broadcast_to(mask, (place.shape[0], size, size)), cache)

    cache, hidden = own_cache.feed(run, lambda out: out[:, 0], state.cache, context.length - 1, wanted)
    return state.replace(cache=cache), hidden

  def _logits(self, target, shared, head, inputs):
    """f[M, U] of one head, of the ids that are drafted: without rows of the vocabulary that only fill it up."""
    states = self.head.state(head, inputs)
    if self.head.vocabulary is None and shared is None:
      return target.logits(states)
    logits = self.head.logits(head, states, shared)
    return logits if self.head.ids is not None else draft_ids.whole(logits, target)

  def _chain(self, law, embed, hidden, state, context, keys, most, vocabulary):
    batch, count = context.length.shape[0], self.num_tokens
    # What the heads read, the pending token, and those drafted: head i takes the first i + 2.
    read = jnp.stack([hidden, embed(context.pending)], axis=1)
    read = jnp.pad(read, ((0, 0), (0, count - 1), (0, 0)))
    of = lambda head: lambda read: law(head, read[:, :head + 2].reshape(batch, -1))
    behind = [of(head) for head in range(1, count)] or [of(0)]  # where there is one head none is behind it

    def advance(token, index, read):
      read = read.at[:, index + 2].set(embed(token), mode="drop")
      return jax.lax.switch(index, behind, read), read

    logits = parallel.if_any(most > 0, lambda: of(0)(read))
    return autoregressive.draft_chain(advance, read, logits, context, keys, self.drawing, count, most, self.length,
                                      state.length, ids=self.head.ids, vocabulary=vocabulary).tree(context.pending)

  def _choices(self, law, embed, hidden, context):
    """The tokens of the shape's nodes but the root, level by level: i32[B, T - 1]."""
    parents, batch = self.shape.parents, hidden.shape[0]
    paths = _paths(parents)
    tokens = jnp.zeros((batch, len(parents)), jnp.int32).at[:, 0].set(context.pending)
    for depth, level in enumerate(static_trees.levels(parents)):
      above = embed(tokens[:, np.array([paths[node] for node in level.nodes])])  # f[B, n, depth + 1, E]
      read = jnp.broadcast_to(hidden[:, None, None], (*above.shape[:2], 1, above.shape[3]))
      inputs = jnp.concatenate([read, above], axis=2).reshape(batch * len(level.nodes), -1)
      best = level_draws.most_probable(law(depth, inputs).reshape(batch, len(level.nodes), -1), level.counts)
      best = best if self.head.ids is None else self.head.ids[best]
      tokens = tokens.at[:, np.asarray(level.children)].set(best.astype(jnp.int32))
    return tokens[:, 1:]

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the target's hidden states, of the last token or of all."""
    del target
    text, length = state.text, state.length
    if self.head.prefix is None:
      text = text.observe(committed)
    else:
      text = text.observe(committed.hidden, committed)
    if committed.path is not None:
      length = self.length.observe(length, committed.drafted, base.accepted_of_chain(committed))
    return state.replace(text=text, length=length)


def _paths(parents):
  """By node, the nodes from the root down to itself."""
  paths = [[0]]
  for node in range(1, len(parents)):
    paths.append([*paths[parents[node]], node])
  return paths
