"""One head a depth over the target's last hidden state: what the proposers of Medusa and of Hydra share.

Drafts are a chain, or the tree of Medusa (arXiv 2401.10774): a fixed shape, best first by how often the child of each
rank was right at each depth (`static_trees.best_first`).

Letters: B batch rows, T nodes, E width of the target.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import static_trees
from specjax import tree as tree_lib
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import parallel


@struct.dataclass
class LastHidden:
  """What the target computed at the last committed token: the head for depth 1 sees what predicted the pending one."""
  values: jax.Array  # f[B, E]
  known: jax.Array   # bool[B]; whether there is one

  def observe(self, committed: base.Committed) -> "LastHidden":
    """With newly committed tokens."""
    last = jnp.maximum(committed.count - 1, 0)
    new = jnp.take_along_axis(committed.hidden, last[:, None, None], axis=1)[:, 0].astype(self.values.dtype)
    some = committed.count > 0
    return LastHidden(values=jnp.where(some[:, None], new, self.values), known=self.known | some)


def last_hidden(target, batch: int) -> LastHidden:
  """Of `batch` rows without text."""
  return LastHidden(values=jnp.zeros((batch, target.config.width), target.weights.embedding.dtype),
                    known=jnp.zeros((batch,), bool))


class DepthHeads(base.Defaults):
  """A mixin for proposers of a chain of `num_tokens` tokens, or of a tree of a fixed `shape`, no deeper than `head` has
  heads: with `drawing` and `length` of chains, five fields of theirs."""

  def __post_init__(self):
    """Raises ValueError for more depths than heads, drawing options that make no sense, or draws for a tree."""
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

  def tree_of(self, drafted: jax.Array, context: base.Context, wanted: jax.Array) -> tree_lib.TokenTree:
    """The fixed shape with the tokens `drafted` i32[B, T - 1] below the root, for the rows that are `wanted` bool[B]."""
    tokens = jnp.concatenate([context.pending[:, None], drafted], axis=1)
    parents = jnp.broadcast_to(jnp.asarray(self.shape.parents, jnp.int32), tokens.shape)
    return tree_lib.TokenTree(tokens=tokens, parents=parents,
                              size=jnp.where(wanted, tokens.shape[1], 1).astype(jnp.int32))
