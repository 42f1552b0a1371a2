"""DSpark: a block drafted in one pass, each place told by a small Markov head which token was drafted before it.

DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec), over DFlash's block. The laws of a chain are then true conditionals, at
the price of one small product a token; so drawn drafts have their q, and a tree grows by the probability of whole
paths. With `confidence` a chain ends before the first place that the confidence head gives less of a chance; what it
reads is known before that place's token is drawn.

Letters: B batch rows, N depths, E width, k width of the beam, U draft ids.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import growth
from specjax.proposers import autoregressive
from specjax.proposers import dflash
from specjax.proposers import parallel


@struct.dataclass
class DSpark(dflash.DFlash):
  """Drafts a chain of up to `num_tokens` tokens, or a tree of `nodes` nodes; fields as of `DFlash`.

  Attributes:
    head: a `models.dspark.DSparkHead`.
    confidence: least chance of acceptance of a place of a chain; 0: the head is not asked.

  Raises:
    ValueError: as `DFlash`, and for a confidence outside [0, 1), for a tree, or where the head gives none.
  """
  head: Any
  confidence: float = struct.field(pytree_node=False, default=0.0)

  def __post_init__(self):
    super().__post_init__()
    if not hasattr(self.head, "config") or self.confidence == 0:
      return
    if not 0 < self.confidence < 1:
      raise ValueError(f"confidence={self.confidence}: it is the least chance of acceptance, 0 or more and below 1")
    if self.head.confidence is None or self.nodes is not None:
      why = "it ends a chain; leave the tree out" if self.nodes is not None else "this drafter has no confidence head"
      raise ValueError(f"confidence={self.confidence}: {why}")

  @property
  def skipped(self) -> int:
    """See `DFlash.skipped`: every place drafts the token behind it."""
    return 0

  @property
  def drafter(self):
    """See `DFlash.drafter`."""
    return self.head.drafter

  def read(self, hidden, logits, context):
    """See `DFlash.read`: the first place knows its previous token."""
    return hidden, logits.at[:, 0].set(self.head.follow(logits[:, 0], context.pending))

  def draft(self, target, made, state, context, keys, most):
    """See `DFlash.draft`."""
    hidden, logits = made
    if self.nodes is not None:
      return self._tree(logits, context, most)
    at = lambda x, index: jax.lax.dynamic_index_in_dim(x, jnp.minimum(index, x.shape[1] - 1), 1, keepdims=False)

    def advance(token, index, extra):
      del extra
      return self.head.follow(at(logits, index + 1), token), (token, index + 1)

    def may(extra):
      previous, index = extra
      return jax.nn.sigmoid(self.head.acceptance(at(hidden, index), previous)) >= self.confidence

    chain = autoregressive.draft_chain(
        advance, (context.pending, jnp.int32(0)), logits[:, 0], context, keys, self.drawing, logits.shape[1], most,
        self.length, state.length, ids=self.head.ids, vocabulary=target.vocab_size, may=may if self.confidence else None)
    return chain.tree(context.pending)

  def _tree(self, logits, context, levels):
    """Grown by the probability of the whole path: the children of a node depend on its token."""
    depths = logits.shape[1]

    def children(depth, previous=None):
      """Of nodes with tokens i32[B, n] at `depth`, None for the root: i32[B, n, k] and log-probabilities."""
      def run():
        here = logits[:, depth, None]
        if previous is not None:
          here = self.head.follow(jnp.broadcast_to(here, (*previous.shape, here.shape[-1])), previous)
        return growth.children(here, self.beam)

      found, log_q = parallel.if_any(levels > depth, run)
      found = found if self.head.ids is None else self.head.ids[found]
      return growth.without_ends(found, log_q, context.rules.eos)

    found, log_q = children(0)
    pool, front = growth.start(found[:, 0], jnp.where((levels > 0)[:, None], log_q[:, 0], -jnp.inf), depths)
    for depth in range(1, depths):
      pool, front = growth.expand(pool, front, *children(depth, front.tokens))
    return growth.rerank(pool, context.pending, self.nodes, max_level=levels)[0]
