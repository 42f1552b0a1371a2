"""What a layer with a window of W tokens may see: the node itself and the W - 1 tokens before it.

The committed cache of such a layer is a ring of at most W slots: the token at position q lies in slot q mod W, and a
later token takes its place. Nothing unverified is ever written, so the ring needs no way back.

Letters: B batch rows, T nodes, F nodes in flight that may be seen, R slots of the ring.
"""
import jax
import jax.numpy as jnp


def seen_slots(length: jax.Array, positions: jax.Array, window: int, slots: int) -> jax.Array:
  """Which slots of a ring nodes see: bool[B, T, R].

  Args:
    length: i32[B], committed tokens. positions: i32[B, T], of the nodes, none of them committed.
    window: W. slots: R; W, or fewer while no text can be longer.
  """
  last = length[:, None] - 1
  held = last - jnp.mod(last - jnp.arange(slots, dtype=jnp.int32)[None], window)  # position that each slot holds
  return (held >= 0)[:, None] & (positions[:, :, None] - held[:, None] < window)


def seen_nodes(mask: jax.Array, window: int) -> jax.Array:
  """`mask` bool[B, T, F], ancestor-or-self with ancestors first, without those W or more tokens back."""
  return mask & (distances(mask) < window)


def distances(mask: jax.Array) -> jax.Array:
  """How many tokens back each node in flight lies, i32[B, T, F]; without meaning for one that is not seen.

  What a node sees in flight is a path that ends at itself, one token a position, so the distance to an ancestor is the
  number of nodes seen behind it. `mask` is bool[B, T, F], ancestor-or-self with ancestors first.
  """
  return jnp.cumsum(mask[..., ::-1].astype(jnp.int32), axis=-1)[..., ::-1] - mask
