"""Medusa: heads on the target's last hidden state draft all depths at once.

Medusa (arXiv 2401.10774, FasterDecoding/Medusa). The state is one vector a row, the target's hidden state at the last
committed token. Drafts are a chain or a tree of a fixed shape (`depth_heads`). The paper's typical acceptance is a
verifier of its own and lossy (`verifiers.LossyTypical`); here any verifier goes with it.

Letters: B batch rows, N heads, T nodes, E width of the target, U draft ids, V vocabulary.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import greatest
from specjax import static_trees
from specjax.models import base as models
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import depth_heads
from specjax.proposers import draft_ids
from specjax.proposers import length as length_lib
from specjax.proposers import parallel


@struct.dataclass
class State:
  """Of a batch."""
  hidden: depth_heads.LastHidden
  shared: jax.Array | None   # f[U, E]; rows of the target's head, for heads without a matrix of theirs
  length: Any


@struct.dataclass
class Medusa(depth_heads.DepthHeads):
  """Drafts a chain of up to `num_tokens` tokens, or a tree of a fixed `shape`.

  Attributes:
    head: a `models.medusa.MedusaHead`; its weights are leaves.
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

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    del capacity
    base.layers_of(target, "Medusa")
    models.decoder_only(target, "Medusa")
    self.head.check(target)
    draft_ids.check(target, self.head.ids)
    own = self.head.vocabulary is not None
    return State(hidden=depth_heads.last_hidden(target, batch),
                 shared=None if own else draft_ids.shared_rows(target, self.head.ids),
                 length=self.length.init(batch, self.max_depth))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    room = jnp.where(state.hidden.known, autoregressive.room(context, self.max_depth), 0)
    most = jnp.minimum(room, self.length.limit(state.length, self.max_depth))
    head, chain = self.head, self.shape is None
    if chain and self.samples:
      known = draft_ids.known(head.ids, target)
      most = jnp.where(autoregressive.possible(known, context, self.drawing), most, 0)

    def run():
      states = head.states(state.hidden.values, self.max_depth)
      if head.vocabulary is None and state.shared is None:
        logits = target.logits(states)
      else:
        logits = head.logits(states, state.shared)
      logits = logits if head.ids is not None else draft_ids.whole(logits, target)
      return logits if chain else self._choices(logits)

    out = parallel.if_any(most > 0, run)
    if chain:
      return parallel.chain(out, head.ids, context, keys, self.drawing, most, self.length, state.length,
                            target.vocab_size).tree(context.pending), state
    return self.tree_of(out, context, most > 0), state

  def _choices(self, logits):
    """The tokens of the shape's nodes but the root, by depth and rank: i32[B, T - 1]."""
    ranks, depths = np.asarray(self.shape.ranks), static_trees.depths(self.shape.parents)
    best = greatest.greatest(logits, int(ranks.max()) + 1)[1]
    best = best if self.head.ids is None else self.head.ids[best]
    return best[:, depths[1:] - 1, ranks[1:]].astype(jnp.int32)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the hidden state at the last committed token."""
    del target
    length = state.length
    if committed.path is not None:
      length = self.length.observe(length, committed.drafted, base.accepted_of_chain(committed))
    return state.replace(hidden=state.hidden.observe(committed), length=length)
