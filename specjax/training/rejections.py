"""Where drafts were wrong: texts as they were served, with what the target computed at every token of them.

Online Speculative Decoding (arXiv 2310.07177) keeps, of every request, the places whose draft the target replaced, and
the target's logits there. Kept here is the final hidden state instead, f[D] for f[V]: the target's head makes the same
logits of it. Heads also get what they read: hidden states before the place, and features.

Letters: B texts, S tokens of each at most, N committed tokens of a step, K drafted tokens, D width of the target, F
feature width.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax.proposers import base


@struct.dataclass
class Rejections:
  """Texts, cut at S tokens."""
  tokens: jax.Array    # i32[B, S]
  length: jax.Array    # i32[B]; tokens that are kept
  depth: jax.Array     # i32[B, S]; at token t: i + 1 if the i-th draft of a chain, for token t + 1, was wrong; else 0
  hidden: jax.Array    # f[B, S, D]; behind the target's final norm
  features: jax.Array  # f[B, S, F]

  def observe(self, committed: base.Committed, features: jax.Array, drafted: jax.Array) -> "Rejections":
    """With newly committed tokens.

    Args:
      features: f[B, N, F] of them. drafted: i32[B, K], the chain that they were judged against; none counts in prefill.
    """
    size, row = self.tokens.shape[1], jnp.arange(self.tokens.shape[0])[:, None]
    real = jnp.arange(committed.tokens.shape[1])[None] < committed.count[:, None]
    where = jnp.where(real, committed.positions, size)  # beyond the end nothing is written
    put = lambda old, new: old.at[row, where].set(new.astype(old.dtype), mode="drop")
    found = self.replace(tokens=put(self.tokens, committed.tokens), hidden=put(self.hidden, committed.hidden),
                         features=put(self.features, features),
                         length=jnp.minimum(self.length + committed.count, size))
    if committed.path is None:
      return found
    judged = jnp.minimum(committed.count, committed.drafted)
    places = jnp.arange(drafted.shape[1])[None]
    wrong = (drafted != committed.following[:, :drafted.shape[1]]) & (places < judged[:, None])
    first = jnp.argmax(wrong, axis=1)
    place = jnp.take_along_axis(committed.positions, first[:, None], axis=1)[:, 0]
    place = jnp.where(wrong.any(1), place, size)
    return found.replace(depth=self.depth.at[row[:, 0], place].set(first.astype(jnp.int32) + 1, mode="drop"))

  def put(self, index, others: "Rejections", which) -> "Rejections":
    """With text `which` of `others` in place of text `index`."""
    return jax.tree.map(lambda mine, theirs: mine.at[index].set(theirs[which]), self, others)


def empty(batch: int, size: int, width: int, features: int, dtype) -> Rejections:
  """B texts of at most S tokens, of a target of width D, with features of width F."""
  return Rejections(tokens=jnp.zeros((batch, size), jnp.int32), length=jnp.zeros((batch,), jnp.int32),
                    depth=jnp.zeros((batch, size), jnp.int32), hidden=jnp.zeros((batch, size, width), dtype),
                    features=jnp.zeros((batch, size, features), dtype))
