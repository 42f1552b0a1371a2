"""Reading along a vocabulary that may be divided among devices.

What is computed of logits f[B, T, V] entry by entry, or summed over V, the compiler divides by itself. What looks an
entry up by its id, or sorts, it would gather whole: such steps stand here, or ask here whether the vocabulary is divided
and then work part by part, so that scalars and a few candidates travel in place of [B, T, V]. Which layout holds is a
matter of tracing: `divided` is entered around what is traced, and on one device nothing changes.

Letters: B batch rows, T nodes, V vocabulary, K ids.
"""
from collections.abc import Callable
import contextlib
import contextvars
import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Layout(Protocol):
  """What is asked of a layout here; see `parallel.layout.Layout`."""

  @property
  def vocab(self) -> int:
    """V, of logits; it may be divided, and so may the rows B."""

  def by_parts(self, function: Callable, divided: tuple, whole: tuple) -> Any:
    """`function(part, *divided, *whole)` on every device: of the arrays `divided` [B, ..., V] its own rows and its own
    part of the vocabulary, of the arrays `whole` [B, ...] its own rows. Results [B, ...] are whole."""


@dataclasses.dataclass(frozen=True)
class Part:
  """A device's part of the vocabulary: `size` ids from `first` i32 on, and the mesh axis that it is divided over, None
  if it is whole."""
  first: jax.Array | int
  size: int
  axis: str | None

  def local(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where ids stand in this part, and which of them do, bool."""
    place = ids - self.first
    inside = (place >= 0) & (place < self.size)
    return jnp.where(inside, place, 0), inside

  def total(self, x: jax.Array) -> jax.Array:
    """The sum over all parts."""
    return x if self.axis is None else jax.lax.psum(x, self.axis)

  def greatest(self, x: jax.Array) -> jax.Array:
    """The greatest of all parts, and so of each entry."""
    return x if self.axis is None else jax.lax.pmax(x, self.axis)

  @property
  def index(self) -> jax.Array | int:
    """Which part this is."""
    return 0 if self.axis is None else jax.lax.axis_index(self.axis)

  def joined(self, x: jax.Array) -> jax.Array:
    """What all parts have, side by side along the last axis."""
    return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)


_LAYOUT: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("vocabulary_layout", default=None)


@contextlib.contextmanager
def divided(layout: Layout | None):
  """What is traced inside has a vocabulary that lies as `layout` says; None for one device."""
  token = _LAYOUT.set(layout)
  try:
    yield
  finally:
    _LAYOUT.reset(token)


def division(x: jax.Array) -> Layout | None:
  """The layout that divides `x` f[B, ..., V]; None on one device."""
  layout = _LAYOUT.get()
  return layout if layout is not None and layout.vocab == x.shape[-1] and x.ndim > 1 else None


def pick(x: jax.Array, ids: jax.Array) -> jax.Array:
  """Entries of f[..., V] at ids i32[..., K]: f[..., K]."""
  layout = division(x)
  if layout is None:
    return jnp.take_along_axis(x, ids, axis=-1)

  def own(part, x, ids):
    place, inside = part.local(ids)
    return part.total(jnp.where(inside, jnp.take_along_axis(x, place, axis=-1), 0))

  return layout.by_parts(own, (x,), (ids,))


def pick_at(x: jax.Array, nodes: jax.Array, ids: jax.Array) -> jax.Array:
  """Entries of f[B, T, V] at `nodes` i32[B, K] and `ids` i32[B, K]: f[B, K]."""
  at = lambda x, nodes, ids: x[jnp.arange(x.shape[0])[:, None], nodes, ids]
  layout = division(x)
  if layout is None:
    return at(x, nodes, ids)

  def own(part, x, nodes, ids):
    place, inside = part.local(ids)
    return part.total(jnp.where(inside, at(x, nodes, place), 0))

  return layout.by_parts(own, (x,), (nodes, ids))


def at_node(x: jax.Array, node: jax.Array) -> jax.Array:
  """`x` f[B, T, V] at one node a row, i32[B]: f[B, V]."""
  if division(x) is None:
    return jnp.take_along_axis(x, node[:, None, None], axis=1)[:, 0]
  # One term of the sum is not zero. A gather would be divided by its rows or by its ids, and gathered for the other.
  here = jnp.arange(x.shape[1])[None, :, None] == node[:, None, None]
  return jnp.where(here, x, 0).sum(1)


def without(x: jax.Array, ids: jax.Array) -> jax.Array:
  """`x` f[B, V] with 0 at `ids` i32[B, K]; an id of V or more changes nothing."""
  if division(x) is None:
    return x.at[jnp.arange(x.shape[0])[:, None], ids].set(0, mode="drop")
  return jnp.where((ids[..., None] == jnp.arange(x.shape[-1])).any(1), 0, x)
