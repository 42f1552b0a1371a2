"""What a draft head knows of the text: the target's features at every committed token, kept until the head is fed them.

`observe` writes them and runs no network. A head is fed when a row is about to draft, from the *true* features, those of
the target: what it made up itself while drafting is dropped after every step (EAGLE; vLLM once forgot to, which cost a
tenth of its accepted tokens).

Letters: B batch rows, S entries, N committed tokens of one pass, F feature width.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax.proposers import base

# Tokens of the longest pass that is observed, a prefill chunk: a write never runs into the end and is moved back.
_LONGEST = 256


@struct.dataclass
class OwnFeatures:
  """Entry t of a row is the target's features at token t."""
  values: jax.Array  # f[B, S, F]
  known: jax.Array   # i32[B]; entries of each row

  def observe(self, features: jax.Array, committed: base.Committed) -> "OwnFeatures":
    """With those of newly committed tokens, f[B, N, F]; behind the counted ones stands what nobody reads."""
    chex.assert_axis_dimension_lteq(features, 1, _LONGEST)
    new = features.astype(self.values.dtype)
    if self.known.shape[0] == 1:
      values = jax.lax.dynamic_update_slice(self.values, new, (0, self.known[0], 0))
    else:
      values = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice(old, new, (at, 0)))(self.values, new, self.known)
    return OwnFeatures(values=values, known=self.known + committed.count)

  def window(self, start: jax.Array, size: int) -> jax.Array:
    """`size` entries from `start` i32[B] on: f[B, size, F]."""
    return jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, size, 0))(self.values, start)


def empty(batch: int, capacity: int, width: int, dtype) -> OwnFeatures:
  """For `batch` rows of at most `capacity` tokens."""
  return OwnFeatures(values=jnp.zeros((batch, capacity + _LONGEST, width), dtype), known=jnp.zeros((batch,), jnp.int32))


def joined(committed: base.Committed, layers: tuple[int, ...]) -> jax.Array:
  """The features of several layers side by side, in order: f[B, N, F]."""
  return jnp.concatenate([committed.features[layer] for layer in layers], axis=-1)


def of(committed: base.Committed, layers: tuple[int, ...]) -> jax.Array:
  """As `joined`; without layers the hidden state behind the final norm, f[B, N, D]."""
  return joined(committed, layers) if layers else committed.hidden
