"""Rows of a decode state: one is put in, some are taken, into more or fewer rows and slots.

All of it is copying. What is committed in a row does not depend on where the row stands, so that a request may be read
alone, put beside others, and moved when they leave.

Letters: B batch rows, S slots.
"""
import functools

import jax
import jax.numpy as jnp

from specjax import decode
from specjax import stopping

Axes = tuple[int | None, ...]  # of every leaf of a cache and a proposer's state, where its rows are; None: nowhere


def axes_of(target, proposer, capacity: int) -> tuple[Axes, Axes]:
  """Where rows stand in the leaves of the target's cache and of the proposer's state, found from their shapes alone.
  A leaf without an axis of rows belongs to all of them and is never moved."""
  def found(init):
    leaves = [jax.tree.leaves(jax.eval_shape(functools.partial(init, rows=rows), target, proposer)) for rows in (2, 3)]
    return tuple(next((i for i, (a, b) in enumerate(zip(two.shape, three.shape)) if a != b), None)
                 for two, three in zip(*leaves))

  cache = found(lambda target, proposer, rows: target.init_cache(rows, capacity))
  return cache, found(lambda target, proposer, rows: proposer.init(target, rows, capacity))


@functools.partial(jax.jit, static_argnames="axes", donate_argnames="state")
def insert(target, state: decode.DecodeState, one: decode.DecodeState, row, *, axes) -> decode.DecodeState:
  """`state` with the only row of `one`, of no more slots, in place of row `row` i32. Both are `jobs.neutral`: what the
  host sets before every step is not in them."""
  one = _fitted(target, one, state.tokens.shape[1])
  put = lambda axis: lambda old, new: old if axis is None else old.at[(slice(None),) * axis + (row,)].set(
      jnp.take(new, 0, axis=axis) if axis else new[0])
  return _mapped(put, axes, state, one)


@functools.partial(jax.jit, static_argnames=("slots", "axes"))
def take(target, state: decode.DecodeState, index, *, slots: int, axes) -> decode.DecodeState:
  """The rows `index` i32[B], in `slots` slots, which must hold all that is known of them; where it is -1, a row that
  has ended."""
  state = _fitted(target, state, slots)
  pick = lambda axis: lambda old, _: old if axis is None else old[(slice(None),) * axis + (jnp.maximum(index, 0),)]
  taken = _mapped(pick, axes, state, state)
  return taken.replace(reason=jnp.where(index < 0, stopping.STOP, taken.reason))


def _mapped(change, axes, state, other):
  """All that belongs to rows, changed leaf by leaf: `change(axis)(leaf, the other state's)`."""
  first = lambda name: jax.tree.map(change(0), getattr(state, name), getattr(other, name))
  along = lambda name, where: jax.tree.unflatten(jax.tree.structure(getattr(state, name)), [
      change(axis)(old, new) for axis, old, new in zip(where, jax.tree.leaves(getattr(state, name)),
                                                       jax.tree.leaves(getattr(other, name)), strict=True)])
  names = ("tokens", "drafted", "length", "start", "limit", "reason", "keys")
  return state.replace(**{name: first(name) for name in names}, cache=along("cache", axes[0]),
                       proposer=along("proposer", axes[1]))


def _fitted(target, state, slots):
  """The state in `slots` slots. A window's ring that has never begun anew has its tokens where they were; one that has
  keeps all of its W slots."""
  rows = state.tokens.shape[0]
  shapes, structure = jax.tree.flatten(jax.eval_shape(lambda target: target.init_cache(rows, slots), target))
  leaves = jax.tree.leaves(state.cache)
  cache = jax.tree.unflatten(structure, [_sized(x, shape.shape) for x, shape in zip(leaves, shapes, strict=True)])
  along = lambda x: _sized(x, (rows, slots, *x.shape[2:]))
  return state.replace(tokens=along(state.tokens), drafted=along(state.drafted), cache=cache)


def _sized(x, shape):
  """Cut or padded with zeros at the end of each axis."""
  x = x[tuple(slice(0, size) for size in shape)]
  return x if x.shape == tuple(shape) else jnp.pad(x, [(0, want - have) for want, have in zip(shape, x.shape)])
