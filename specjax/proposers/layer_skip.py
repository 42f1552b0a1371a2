"""Layer skipping: the target without some of its layers drafts, and the whole of it verifies.

Self-speculation of Draft & Verify (arXiv 2309.08168) and SWIFT (arXiv 2410.06916): no second model and no second cache.
A drafted node sees the committed keys and values that the whole target wrote in the layers that are kept, and, of the
draft, what those layers compute themselves. Whole layers are skipped here; Draft & Verify also chooses between the two
halves of a layer. `layer_search` finds a good set by measured acceptance.

Verification runs all layers again. To resume above the layers below the first one skipped, as `early_exit` does, would
only move their work: the last drafted token would go through them in the draft instead of the verify pass, and drafts
could not stand in one tree with another proposer's.

Letters: B batch rows, N drafted tokens, L layers.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import length as length_lib


@struct.dataclass
class LayerSkip(autoregressive.Chained):
  """Drafts up to `num_tokens` tokens with all layers of the target but those `skipped`, its final norm and head.

  Attributes:
    skipped: indices of the layers that are left out, in any order.
    num_tokens: N.
    drawing, length: as of `DraftModel`.

  Raises:
    ValueError: for no layer skipped or one named twice, or a number of tokens below 1; by `init` for a layer that the
      target does not have, all of its layers, or a target without layers.
  """
  skipped: tuple[int, ...] = struct.field(pytree_node=False)
  num_tokens: int = struct.field(pytree_node=False, default=3)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  def __post_init__(self):
    if not self.skipped or len(set(self.skipped)) < len(self.skipped):
      raise ValueError(f"skipped={self.skipped}: needed are one layer or more, each named once")
    super().__post_init__()

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`: the rule's state."""
    del capacity
    kept_layers(target, self.skipped)
    return self.length.init(batch, self.num_tokens)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    kept = kept_layers(target, self.skipped)
    model, committed = target.keep(kept), cache.of_layers(kept)
    batch, nodes = context.length.shape[0], self.num_tokens  # the root, and all drafted tokens but the last
    most = jnp.minimum(autoregressive.room(context, self.num_tokens), self.length.limit(state, self.num_tokens))

    def feed(token, node, block):
      """Runs the kept layers over node `node`, the root being node 0."""
      seen = jnp.append(jnp.arange(nodes) < node, True)
      out = model.forward(token[:, None], (context.length - 1 + node)[:, None],
                          jnp.broadcast_to(seen, (batch, 1, nodes + 1)), committed, before=block)
      return model.logits(out.hidden)[:, 0], block.put(out.in_flight, node)

    empty = committed.empty_block(nodes)
    nothing = lambda: (jnp.zeros((batch, target.vocab_size), jnp.float32), empty)
    logits, block = jax.lax.cond((most > 0).any(), lambda: feed(context.pending, jnp.int32(0), empty), nothing)
    advance = lambda token, index, block: feed(token, index + 1, block)
    chain = autoregressive.draft_chain(advance, block, logits, context, keys, self.drawing, self.num_tokens, most,
                                       self.length, state)
    return chain.tree(context.pending), state

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: the rule learns."""
    del target
    if committed.path is None:
      return state
    return self.length.observe(state, committed.drafted, base.accepted_of_chain(committed))


def kept_layers(target, skipped: tuple[int, ...]) -> tuple[int, ...]:
  """The layers that draft. Raises ValueError if there are none, or if the target lacks one of those skipped."""
  layers = base.layers_of(target, "layer skipping")
  kept = tuple(i for i in range(layers) if i not in skipped)
  if len(kept) + len(skipped) != layers or not kept:
    raise ValueError(f"skipped={skipped}: allowed are 1 to {layers - 1} of the layers 0 to {layers - 1} that the "
                     "target has")
  return kept
