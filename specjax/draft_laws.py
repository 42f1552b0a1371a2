"""The law that drafted tokens were drawn from, q: dense over the vocabulary, or sparse over a few ids a node.

A law stands at a node and is the one its *children* were drawn from, before any of them was. Both kinds answer the same
questions, so that a verifier does not ask which it has: the probability of a token, one dense row, and the mass that
block verification needs.

Letters: B batch rows, T nodes, V vocabulary, K ids of a sparse law.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import vocabulary as vocabulary_lib


@struct.dataclass
class DenseLaw:
  """A law over the whole vocabulary at every node."""
  probs: jax.Array  # f[B, T, V]; rows of nodes without sampled children are not read

  def of(self, nodes: jax.Array, tokens: jax.Array) -> jax.Array:
    """Probability of `tokens` i32[B, N] at `nodes` i32[B, N]: f[B, N]."""
    return vocabulary_lib.pick_at(self.probs, nodes, tokens)

  def row(self, node: jax.Array, vocabulary: int) -> jax.Array:
    """The law at one node a row, `node` i32[B]: f[B, V]."""
    chex.assert_axis_dimension(self.probs, 2, vocabulary)
    return vocabulary_lib.at_node(self.probs, node)

  def dense(self, vocabulary: int) -> jax.Array:
    """The law at every node: f[B, T, V]."""
    chex.assert_axis_dimension(self.probs, 2, vocabulary)
    return self.probs

  def excess(self, p: jax.Array, scale: jax.Array) -> jax.Array:
    """The mass of `scale * p` above this law, sum over v of max(scale p(v) - q(v), 0): f[B, T].

    `p` f[B, T, V], each row summing to 1; `scale` f[B, T].
    """
    return jnp.maximum(scale[..., None] * p - self.probs, 0).sum(-1)

  def narrow(self, width: int) -> "DenseLaw":
    """Of the first `width` nodes."""
    return DenseLaw(self.probs[:, :width])

  def widen(self, width: int) -> "DenseLaw":
    """Padded to `width` nodes, with laws that are not read."""
    return DenseLaw(_pad(self.probs, width))


@struct.dataclass
class SparseLaw:
  """A law over at most K ids at every node; unused places have probability 0, and ids with more are distinct."""
  ids: jax.Array    # i32[B, T, K]
  probs: jax.Array  # f[B, T, K]

  def of(self, nodes: jax.Array, tokens: jax.Array) -> jax.Array:
    """See `DenseLaw.of`."""
    row = jnp.arange(nodes.shape[0])[:, None]
    return jnp.where(self.ids[row, nodes] == tokens[..., None], self.probs[row, nodes], 0).sum(-1)

  def row(self, node: jax.Array, vocabulary: int) -> jax.Array:
    """See `DenseLaw.row`."""
    pick = lambda x: jnp.take_along_axis(x, node[:, None, None], axis=1)[:, 0]
    rows = jnp.arange(node.shape[0])[:, None]
    return jnp.zeros((node.shape[0], vocabulary), self.probs.dtype).at[rows, pick(self.ids)].add(pick(self.probs))

  def dense(self, vocabulary: int) -> jax.Array:
    """See `DenseLaw.dense`."""
    row, node = jnp.arange(self.ids.shape[0])[:, None, None], jnp.arange(self.ids.shape[1])[None, :, None]
    return jnp.zeros((*self.ids.shape[:2], vocabulary), self.probs.dtype).at[row, node, self.ids].add(self.probs)

  def excess(self, p: jax.Array, scale: jax.Array) -> jax.Array:
    """See `DenseLaw.excess`; only the K ids are looked at, all others count whole."""
    at = jnp.where(self.probs > 0, vocabulary_lib.pick(p, self.ids), 0)
    outside = jnp.maximum(p.sum(-1) - at.sum(-1), 0)
    return scale * outside + jnp.maximum(scale[..., None] * at - self.probs, 0).sum(-1)

  def narrow(self, width: int) -> "SparseLaw":
    """See `DenseLaw.narrow`."""
    return SparseLaw(self.ids[:, :width], self.probs[:, :width])

  def widen(self, width: int) -> "SparseLaw":
    """See `DenseLaw.widen`."""
    return SparseLaw(_pad(self.ids, width), _pad(self.probs, width))


DraftLaw = DenseLaw | SparseLaw


def _pad(x, width):
  return jnp.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0)))
