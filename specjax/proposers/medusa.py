"""Medusa: heads on the target's last hidden state draft all depths at once.

Medusa (arXiv 2401.10774, FasterDecoding/Medusa). The state is one vector a row, the target's hidden state at the last
committed token; the head for depth 1 sees what predicted the pending token. Drafts are a chain, or the tree of Medusa: a
fixed shape, best first by how often the child of each rank was right at each depth (`static_trees.best_first`). The
paper's typical acceptance is a verifier of its own and lossy (`verifiers.LossyTypical`); here any verifier goes with it.

Letters: B batch rows, N heads, T nodes, E width of the target, U draft ids, V vocabulary.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import greatest
from specjax import static_trees
from specjax import tree as tree_lib
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import draft_ids
from specjax.proposers import length as length_lib
from specjax.proposers import parallel


@struct.dataclass
class State:
  """Of a batch."""
  hidden: jax.Array          # f[B, E]; at the last committed token
  known: jax.Array           # bool[B]; whether there is one
  shared: jax.Array | None   # f[U, E]; rows of the target's head, for heads without a matrix of theirs
  length: Any


@struct.dataclass
class Medusa(base.Defaults):
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

  def __post_init__(self):
    if not hasattr(self.head, "config"):
      return  # put together from something else inside a transformation
    heads = self.head.config.heads
    if not 1 <= self.max_depth <= heads:
      raise ValueError(f"a draft of depth {self.max_depth}: it must be 1 to {heads}, the number of heads")
    if isinstance(self.drawing, autoregressive.Drawing):
      self.drawing.check()
      parallel.check_tree(self.shape is not None, self.drawing, self.length)

  @property
  def max_nodes(self) -> int:
    return self.num_tokens + 1 if self.shape is None else len(self.shape.parents)

  @property
  def max_depth(self) -> int:
    return self.num_tokens if self.shape is None else int(static_trees.depths(self.shape.parents).max())

  @property
  def chains(self) -> bool:
    return self.shape is None or len(set(self.shape.parents[1:])) == len(self.shape.parents) - 1

  @property
  def samples(self) -> bool:
    return self.drawing.sampled

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    del capacity
    base.layers_of(target, "Medusa")
    self.head.check(target)
    draft_ids.check(target, self.head.ids)
    own = self.head.vocabulary is not None
    return State(hidden=jnp.zeros((batch, target.config.width), target.weights.embedding.dtype),
                 known=jnp.zeros((batch,), bool), shared=None if own else draft_ids.shared_rows(target, self.head.ids),
                 length=self.length.init(batch, self.max_depth))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache
    room = jnp.where(state.known, autoregressive.room(context, self.max_depth), 0)
    most = jnp.minimum(room, self.length.limit(state.length, self.max_depth))
    head, chain = self.head, self.shape is None
    if chain and self.samples:
      known = draft_ids.known(head.ids, target.vocab_size)
      most = jnp.where(autoregressive.possible(known, context, self.drawing), most, 0)

    def run():
      states = head.states(state.hidden, self.max_depth)
      if head.vocabulary is None and state.shared is None:
        logits = target.logits(states)
      else:
        logits = head.logits(states, state.shared)
      logits = logits if head.ids is not None else logits[..., :target.vocab_size]  # without rows that only fill it up
      return logits if chain else self._choices(logits)

    out = parallel.if_any(most > 0, run)
    if chain:
      return parallel.chain(out, head.ids, context, keys, self.drawing, most, self.length, state.length,
                            target.vocab_size).tree(context.pending), state
    return self._tree(out, context, most), state

  def _choices(self, logits):
    """The tokens of the shape's nodes but the root, by depth and rank: i32[B, T - 1]."""
    ranks, depths = np.asarray(self.shape.ranks), static_trees.depths(self.shape.parents)
    best = greatest.greatest(logits, int(ranks.max()) + 1)[1]
    best = best if self.head.ids is None else self.head.ids[best]
    return best[:, depths[1:] - 1, ranks[1:]].astype(jnp.int32)

  def _tree(self, drafted, context, most):
    """The fixed shape with its tokens."""
    tokens = jnp.concatenate([context.pending[:, None], drafted], axis=1)
    parents = jnp.broadcast_to(jnp.asarray(self.shape.parents, jnp.int32), tokens.shape)
    return tree_lib.TokenTree(tokens=tokens, parents=parents,
                              size=jnp.where(most > 0, tokens.shape[1], 1).astype(jnp.int32))

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: keeps the hidden state at the last committed token."""
    del target
    last = jnp.maximum(committed.count - 1, 0)
    hidden = jnp.take_along_axis(committed.hidden, last[:, None, None], axis=1)[:, 0].astype(state.hidden.dtype)
    some = committed.count > 0
    length = state.length
    if committed.path is not None:
      length = self.length.observe(length, committed.drafted, base.accepted_of_chain(committed))
    return state.replace(hidden=jnp.where(some[:, None], hidden, state.hidden), known=state.known | some, length=length)

