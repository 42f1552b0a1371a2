"""Early exit: the target's first layers and its head draft; verification goes on from where they stopped.

Self-speculation of LayerSkip (arXiv 2404.16710): no second model and no second cache, since keys and values of the
lower layers are the same for drafting and verifying. The last drafted token's lower layers are run as well, so that the
whole tree resumes above them. LayerSkip trains its model for early exits; any decoder runs here, but one that was not
trained for it may have low acceptance.

Letters: B batch rows, N drafted tokens, T nodes, E model width.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import base as models
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import length as length_lib


@struct.dataclass
class EarlyExit(autoregressive.Chained):
  """Drafts up to `num_tokens` tokens with the target's layers 0 to `exit_layer` - 1, final norm and head.

  Attributes:
    exit_layer: how many layers draft.
    num_tokens: N.
    drawing, length: as of `DraftModel`.

  Raises:
    ValueError: for a number below 1; by `init` for an `exit_layer` that is not below the target's layers, or a target
      without layers.
  """
  exit_layer: int = struct.field(pytree_node=False)
  num_tokens: int = struct.field(pytree_node=False, default=3)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()

  def __post_init__(self):
    if self.exit_layer < 1:
      raise ValueError(f"exit_layer={self.exit_layer}: it must be 1 or more")
    super().__post_init__()

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`: the rule's state."""
    del capacity
    layers = base.layers_of(target, "early exit")
    if self.exit_layer >= layers:
      raise ValueError(f"exit_layer={self.exit_layer}: allowed are 1 to {layers - 1}, as the target has {layers} layers")
    return self.length.init(batch, self.num_tokens)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    layers = tuple(range(self.exit_layer))
    model, lower = target.keep(layers), cache.of_layers(layers)
    batch, nodes = context.length.shape[0], self.num_tokens + 1
    most = jnp.minimum(autoregressive.room(context, self.num_tokens), self.length.limit(state, self.num_tokens))

    def feed(token, node, carry):
      """Runs the lower layers over node `node`, the root being node 0."""
      resume = carry
      seen = jnp.append(jnp.arange(nodes) < node, True)
      out = model.forward(token[:, None], (context.length - 1 + node)[:, None],
                          jnp.broadcast_to(seen, (batch, 1, nodes + 1)), lower, before=resume.in_flight,
                          features=(self.exit_layer,))
      hidden = jax.lax.dynamic_update_slice_in_dim(resume.hidden, out.features[0].astype(resume.hidden.dtype), node, 1)
      return out.hidden, cache_lib.Resume(hidden=hidden, in_flight=resume.in_flight.put(out.in_flight, node))

    def advance(token, index, resume):
      hidden, resume = feed(token, index + 1, resume)
      return model.logits(hidden)[:, 0], resume

    width = target.weights.embedding.shape[1]
    empty = cache_lib.Resume(hidden=jnp.zeros((batch, nodes, width), models.residual_dtype(target)),
                             in_flight=lower.empty_block(nodes))
    drafting = (most > 0).any()
    first, resume = feed(context.pending, jnp.int32(0), empty)  # the root's lower layers are needed in any case
    logits = jax.lax.cond(drafting, lambda: model.logits(first)[:, 0],
                          lambda: jnp.zeros((batch, target.vocab_size), jnp.float32))
    chain = autoregressive.draft_chain(advance, resume, logits, context, keys, self.drawing, self.num_tokens, most,
                                       self.length, state)
    last = jnp.maximum(chain.steps - 1, 0)
    # Unless the last turn drafted nothing, the last token has not been through them yet.
    resume = jax.lax.cond((chain.steps > 0) & (jnp.max(chain.count) == chain.steps),
                          lambda: feed(chain.tokens[:, last], last + 1, chain.extra)[1], lambda: chain.extra)
    return chain.tree(context.pending).replace(resume=resume), state

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: the rule learns."""
    del target
    if committed.path is None:
      return state
    return self.length.observe(state, committed.drafted, base.accepted_of_chain(committed))
