"""Constraints: a state that the text drives, and the ids that it allows next. Grammars and schemas compile to one.

A constraint runs on the device, inside the step. Each node of a tree has the state behind its own path, so a draft is
verified under the mask that plain decoding would have there; only emitted tokens move the state of the row.

Letters: B batch rows, T nodes, N emitted tokens, V vocabulary, Q states, X end ids.
"""
import collections
from typing import Any, Protocol

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling_params

State = Any  # a pytree of arrays whose leading axis is B


class Constraint(Protocol):
  """What may be said next. A pytree: its tables are leaves, so that another grammar of that shape compiles nothing.

  `init`, `advance` and `allowed` are pure, batched and jittable; `check` runs on the host, before anything is drawn.
  """

  def init(self, batch: int) -> State:
    """The state before the first output token."""

  def advance(self, state: State, token: jax.Array) -> State:
    """The state behind `token` i32[B]. Any token may come, a forbidden one or a draft's padding as well."""

  def allowed(self, state: State) -> jax.Array:
    """bool[B, V]: the ids that may come next; none behind a forbidden token."""

  def check(self, vocabulary: int, eos_ids, min_new_tokens: np.ndarray,
            params: sampling_params.SamplingParams | None = None) -> None:
    """Refuses what could leave a row with nothing to draw.

    Args:
      vocabulary: V of the target.
      eos_ids: ids that end a row; for all rows or one list a row, padded with -1.
      min_new_tokens: i32[B]; end ids are not drawn before.
      params: batched parameters, for their banned and allowed ids.

    Raises:
      ValueError: names the row and what to change.
    """


@struct.dataclass
class Automaton:
  """A deterministic finite automaton over token ids. Its state is i32[B], -1 behind a forbidden token.

  An end id is a column of the table like any other; the state behind it needs no successor, as nothing is drawn there.
  """
  transitions: jax.Array          # i32[Q, V]; the next state, -1 where the id is not allowed
  start: jax.Array | int = 0      # i32[] or i32[B]

  def init(self, batch: int) -> jax.Array:
    """See `Constraint`."""
    return jnp.broadcast_to(jnp.asarray(self.start, jnp.int32), (batch,))

  def advance(self, state: jax.Array, token: jax.Array) -> jax.Array:
    """See `Constraint`."""
    states, vocabulary = self.transitions.shape
    known = (state >= 0) & (token >= 0) & (token < vocabulary)
    following = self.transitions[jnp.clip(state, 0, states - 1), jnp.clip(token, 0, vocabulary - 1)]
    return jnp.where(known, following, -1).astype(jnp.int32)

  def allowed(self, state: jax.Array) -> jax.Array:
    """See `Constraint`."""
    row = self.transitions[jnp.clip(state, 0, self.transitions.shape[0] - 1)]
    return (row >= 0) & (state >= 0)[:, None]

  def check(self, vocabulary: int, eos_ids, min_new_tokens: np.ndarray,
            params: sampling_params.SamplingParams | None = None) -> None:
    """See `Constraint`. Walks from the start over the ids that each row may draw.

    Raises:
      ValueError: for a table that is not i32[Q, V] of states; for a state that can be reached and allows nothing; for
        a state that can be reached before the minimum of new tokens and allows end ids only.
    """
    table, least = np.asarray(self.transitions), np.asarray(min_new_tokens)
    rows = len(least)
    start = self._check_table(table, vocabulary, rows)
    ends = sampling_params.end_ids(eos_ids, rows)
    usable = [None] * rows if params is None else params.usable_ids(rows, vocabulary)
    judged = set()
    for row in range(rows):
      # Rows that ask for the same are judged once: the walk reads the whole table.
      asked = (int(start[row]), int(least[row]), frozenset(ends[row]), None if usable[row] is None
               else frozenset(usable[row]))
      if asked not in judged:
        _walk(table, *asked, row)
        judged.add(asked)

  def _check_table(self, table, vocabulary, rows):
    states = table.shape[0] if table.ndim == 2 else 0
    if table.ndim != 2 or table.dtype.kind not in "iu" or not states or table.shape[1] != vocabulary:
      raise ValueError(f"transitions have shape {table.shape} and dtype {table.dtype}; they must be whole numbers of "
                       f"shape (states, {vocabulary}), a column for every id of the target")
    wrong = (table < -1) | (table >= states)
    if wrong.any():
      state, token = np.argwhere(wrong)[0]
      raise ValueError(f"transitions[{state}, {token}]={table[state, token]}: it must be a state in 0 to {states - 1}, "
                       "or -1 where the id is not allowed")
    start = np.asarray(self.start)
    if start.shape not in ((), (rows,)) or start.dtype.kind not in "iu":
      raise ValueError(f"start={start.tolist()!r}: it must be one state, or one a row, {rows}")
    start = np.broadcast_to(start, (rows,))
    if ((start < 0) | (start >= states)).any():
      row = int(np.argmax((start < 0) | (start >= states)))
      raise ValueError(f"start={start[row]} in row {row}: it must be a state in 0 to {states - 1}")
    return start


def _walk(table, start, least, ends, usable, row):
  """Breadth first over the states that a row can reach without ending, by the fewest tokens that lead there."""
  may = np.ones(table.shape[1], bool)
  if usable is not None:
    may[:] = False
    may[[token for token in usable if token < len(may)]] = True
  goes_on = np.ones(table.shape[1], bool)
  goes_on[[token for token in ends if token < len(goes_on)]] = False
  distance, queue = {start: 0}, collections.deque([start])
  while queue:
    state = queue.popleft()
    open_ids = (table[state] >= 0) & may
    where = f"state {state}, reached after {distance[state]} tokens in row {row},"
    if not open_ids.any():
      by = "" if (table[state] < 0).all() else " that banned_ids, allowed_ids and logit_bias leave"
      raise ValueError(f"{where} allows no id{by}: nothing would be left to draw there; give it a transition, or an "
                       f"end id of the row ({sorted(ends) or 'it has none'}), or ban fewer ids")
    following = np.unique(table[state][open_ids & goes_on]).tolist()
    if distance[state] < least and not following:
      raise ValueError(f"{where} allows end ids only, but min_new_tokens={least} forbids them before; lower "
                       f"min_new_tokens to {distance[state]} or less, or give the state another transition")
    for reached in following:
      if reached not in distance:
        distance[reached] = distance[state] + 1
        queue.append(reached)


def node_states(constraint: Constraint, state: State, tree) -> State:
  """The state behind every node: leaves [B, T, ...] from leaves [B, ...].

  Args:
    constraint: the constraint. state: of the rows; the pending token, node 0, is in it already.
    tree: `tokens` i32[B, T] and `parents` i32[B, T], parents first; see `tree.TokenTree`.
  """
  chex.assert_equal_shape([tree.tokens, tree.parents])
  width = tree.tokens.shape[1]
  states = jax.tree.map(lambda x: jnp.repeat(x[:, None], width, axis=1), state)

  def reach(node, states):
    parent, token = tree.parents[:, node], tree.tokens[:, node]
    before = jax.tree.map(lambda x: x[jnp.arange(x.shape[0]), parent], states)
    return jax.tree.map(lambda x, new: x.at[:, node].set(new), states, constraint.advance(before, token))

  return jax.lax.fori_loop(1, width, reach, states)


def allowed_at(constraint: Constraint, states: State) -> jax.Array:
  """bool[B, T, V]: what may follow each node, from the states of `node_states`."""
  batch, width = jax.tree.leaves(states)[0].shape[:2]
  flat = constraint.allowed(jax.tree.map(lambda x: x.reshape(batch * width, *x.shape[2:]), states))
  return flat.reshape(batch, width, -1)


def advance_by(constraint: Constraint, state: State, emitted: jax.Array, count: jax.Array) -> State:
  """The state behind the first `count` i32[B] tokens of `emitted` i32[B, N]; what lies behind was never said."""
  chex.assert_rank([emitted, count], [2, 1])

  def go(place, state):
    counts = lambda new, old: jnp.where((place < count).reshape(-1, *[1] * (old.ndim - 1)), new, old)
    return jax.tree.map(counts, constraint.advance(state, emitted[:, place]), state)

  return jax.lax.fori_loop(0, emitted.shape[1], go, state)
