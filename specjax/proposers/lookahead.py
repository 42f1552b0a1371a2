"""Lookahead decoding: Jacobi iterations in a window give n-grams; those that begin with the pending token are drafts.

Method of `hao-ai-lab/LookaheadDecoding` (arXiv 2402.02057), with its letters: a window of W columns and N - 1 levels, a
pool of n-grams of N tokens, up to G guesses a step. The first level of the window is a row of tokens, column 0 being
the pending one; below each hangs a trajectory, what earlier passes said would follow it. One forward pass verifies the
guesses and asks the last level for one token more: a column is then an n-gram for the pool, and moves up by one.

All of it is one tree, as the window's mask is that of a tree: the first level is a chain below the root, column j hangs
below its node j, and guesses are branches below the root.

What differs from the original:
- Equal paths share their nodes, so a guess or a window path may be continued by another one; and the window is verified
  as well, not the guesses alone. Both only add accepted tokens and save nodes.
- The pool has a fixed size: buckets of G n-grams, the least recently seen one falling out. With as many buckets as ids
  it is the original's, else ids with the same bucket share its places.
- An end-of-sequence id in the window gives way to a scattered token of the text, in greedy decoding too.
- N = 2 works, as a Jacobi row with a pool of pairs; W = 1, N = 2, G = 0 is plain decoding, in width 1.
As there, the window moves by one place a step whatever was accepted, columns fill up level by level over the first
N - 2 steps, in which nothing is guessed, and the first tokens are taken from the prompt (here by a hash of the place).
A step that verifies none of the row's nodes, in a batch that does not draft, leaves the window as it is.

Letters: B batch rows, C = W + N - 2 columns at the start, H buckets, Q slots of the tree's fixed shape, T nodes.
"""
import functools
from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.proposers import base
from specjax.proposers import jacobi
from specjax.proposers import slots

_NONE = -1  # no token, no n-gram


@struct.dataclass
class State:
  """Of a batch."""
  window: jax.Array  # i32[B, N - 1, C]; [0, 0] is the root's and not used; -1 where a token is still to be chosen
  level: jax.Array   # i32[B]; the last level of the window that is filled
  pool: jax.Array    # i32[B, H, G, N]; n-grams by the bucket of their first token, the latest seen first; -1: none
  nodes: jax.Array   # i32[B, Q]; which node of the latest tree stands for each slot, -1: none
  latest: jax.Array  # i32[B, N - 2]; the last committed tokens, -1 where there are fewer


class Layout(NamedTuple):
  """The slots: root, guesses, window level by level."""
  parents: tuple[int, ...]  # Q
  depths: np.ndarray        # i32[Q]
  window: np.ndarray        # i32[N - 1, C]; slot of each place of the window, -1 where there never is a token
  most: int                 # greatest number of nodes at a time


@struct.dataclass
class Lookahead(base.Defaults):
  """Lookahead decoding with a window of `window` columns, n-grams of `ngram` tokens and up to `guesses` of them a step.

  A step verifies (N - 1) * (W + G) nodes, the root included. Drafts leave out end-of-sequence ids, and what lies deeper
  than the row's budget. Memory of a row: H * G * N numbers, 320 KiB by default.

  Attributes:
    window: W. ngram: N. guesses: G; 0 for a window without a use, which is for comparisons.
    buckets: H, if the vocabulary is not smaller.
    from_text: n-grams of prompt and output enter the pool as well (the original's POOL_FROM_PROMPT).

  Raises:
    ValueError: for a size out of range.
  """
  window: int = struct.field(pytree_node=False, default=5)
  ngram: int = struct.field(pytree_node=False, default=4)
  guesses: int = struct.field(pytree_node=False, default=5)
  buckets: int = struct.field(pytree_node=False, default=4096)
  from_text: bool = struct.field(pytree_node=False, default=False)

  def __post_init__(self):
    if self.window < 1 or self.ngram < 2 or self.guesses < 0 or self.buckets < 1:
      raise ValueError(f"window={self.window}, ngram={self.ngram}, guesses={self.guesses}, buckets={self.buckets}: "
                       "needed are a window of 1 or more, n-grams of 2 tokens or more, no negative number of guesses "
                       "and 1 bucket or more")

  @property
  def layout(self) -> Layout:
    return _layout(self.window, self.ngram, self.guesses)

  @property
  def max_nodes(self) -> int:
    return self.layout.most

  @property
  def max_depth(self) -> int:
    return int(self.layout.depths.max())

  @property
  def node_ids(self) -> int:
    """See `base.Proposer`: the most probable id, if there is anything to learn from it."""
    return int(self.max_nodes > 1)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    del capacity
    levels, columns = self.layout.window.shape
    empty = lambda *shape: jnp.full((batch, *shape), _NONE, jnp.int32)
    return State(window=empty(levels, columns), level=jnp.zeros((batch,), jnp.int32),
                 pool=empty(min(self.buckets, target.vocab_size), self.guesses, self.ngram),
                 nodes=empty(len(self.layout.parents)), latest=empty(self.ngram - 2))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    layout, pending = self.layout, context.pending
    is_end = lambda x: (x[..., None] == context.rules.eos.reshape(-1, *[1] * (x.ndim - 1), context.rules.eos.shape[1])
                        ).any(-1)
    window = self._choose(state.window, is_end, context)
    tokens, wanted = [pending[:, None]], [jnp.ones((len(pending), 1), bool)]
    if self.guesses:
      found = _lookup(state.pool, pending)
      use = (found[:, :, 0] == pending[:, None]) & (state.level == self.ngram - 2)[:, None]
      tokens.append(found[:, :, 1:].reshape(len(pending), -1))
      wanted.append(jnp.repeat(use, self.ngram - 1, axis=1))
    level, column = np.nonzero(layout.window > 0)
    tokens.append(window[:, level, column])
    wanted.append((level <= state.level[:, None]) & (column < layout.window.shape[1] - state.level[:, None]))
    tokens, wanted = jnp.concatenate(tokens, axis=1), jnp.concatenate(wanted, axis=1)
    # The step emits one token more than it accepts.
    wanted = wanted & (tokens >= 0) & ~is_end(tokens) & (layout.depths < context.budget[:, None])
    wanted = (wanted & context.active[:, None]).at[:, 0].set(True)
    keep = wanted[:, slots.paths(layout.parents)].all(-1)
    first = slots.first_equal(jnp.maximum(tokens, 0), layout.parents, keep)
    own = keep & (first == jnp.arange(len(layout.parents)))
    tree, node = slots.pack(tokens, first[:, np.asarray(layout.parents)], own, layout.most)
    nodes = jnp.where(keep, jnp.take_along_axis(node, first, axis=1), _NONE)
    return tree, state.replace(window=window, nodes=nodes)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    del target
    if self.max_nodes == 1:
      return state
    state = self._learned_from_window(state, committed)
    if self.from_text and self.guesses:
      latest = state.latest
      text = jnp.concatenate([latest, committed.tokens], axis=1)
      place = jnp.arange(committed.tokens.shape[1])
      gram = text[:, place[:, None] + np.arange(self.ngram - 1)]  # [B, tokens, N - 1]
      gram = jnp.concatenate([gram, committed.following[:, :, None]], axis=-1)
      pool = _insert(state.pool, gram, (place < committed.count[:, None]) & (gram >= 0).all(-1))
      back = committed.count[:, None] + jnp.arange(self.ngram - 2)
      state = state.replace(pool=pool, latest=jnp.take_along_axis(text, back, axis=1))
    return state

  def _learned_from_window(self, state, committed):
    """The n-grams of a full window enter the pool, and it moves."""
    if committed.path is None:
      return state
    said = self._said(state, committed)
    full, pool = state.level == self.ngram - 2, state.pool
    if self.guesses:
      columns = state.window.at[:, 0, 0].set(committed.tokens[:, 0])
      gram = jnp.moveaxis(jnp.concatenate([columns, said[:, None]], axis=1)[:, :, :self.window], 1, 2)
      pool = _insert(pool, gram, (full & (committed.count > 0))[:, None] & (gram >= 0).all(-1))
    moves = (committed.drafted > 0) & (committed.count > 0)
    window = jnp.where(moves[:, None, None], _moved(state.window, said, state.level, full), state.window)
    return state.replace(pool=pool, window=window, level=jnp.where(moves & ~full, state.level + 1, state.level))

  def _choose(self, window, is_end, context):
    """The window with tokens of the text where it has none or an end of sequence."""
    batch, levels, columns = window.shape
    place = context.length[:, None] + 8191 * jnp.arange(1, levels * columns + 1, dtype=jnp.int32)
    other = jacobi.scattered(context.tokens, context.length, place).reshape(window.shape)
    return jnp.where((window == _NONE) | is_end(window), other, window)

  def _said(self, state, committed):
    """What the target says behind the last filled level, i32[B, C]; -1 behind what was not verified."""
    verified = (state.nodes >= 0) & (state.nodes <= committed.drafted[:, None])
    ids = jnp.take_along_axis(committed.node_ids[..., 0], jnp.maximum(state.nodes, 0), axis=1)
    ids = jnp.where(verified, ids, _NONE)
    grid = jnp.where(self.layout.window >= 0, ids[:, np.maximum(self.layout.window, 0)], _NONE)
    return jnp.take_along_axis(grid, state.level[:, None, None], axis=1)[:, 0]


def _moved(window, said, level, full):
  """The window of the next step. A full one moves up; one that is not yet moves left, and has a level more."""
  up = jnp.concatenate([window[:, 1:], said[:, None]], axis=1)
  number = jnp.arange(window.shape[1], dtype=jnp.int32)[None, :, None]
  more = jnp.where(number == level[:, None, None] + 1, said[:, None], window)
  left = jnp.pad(more[:, :, 1:], ((0, 0), (0, 0), (0, 1)), constant_values=_NONE)
  return jnp.where(full[:, None, None], up, left)


def _bucket(token, buckets):
  """Of a token i32[...]; each token its own, where there are as many."""
  return token % buckets


def _lookup(pool, token):
  """The n-grams in the bucket of `token` i32[B]: i32[B, G, N]."""
  return pool[jnp.arange(len(token)), _bucket(token, pool.shape[1])]


def _insert(pool, grams, valid):
  """Puts n-grams i32[B, M, N] into the pool, one by one, where `valid` bool[B, M]; known ones come to the front."""
  row, place = jnp.arange(len(grams)), jnp.arange(pool.shape[2], dtype=jnp.int32)

  def put(i, pool):
    gram = grams[:, i]
    bucket = _bucket(gram[:, 0], pool.shape[1])
    held = pool[row, bucket]
    known = (held == gram[:, None]).all(-1)
    gone = jnp.where(known, place, pool.shape[2] - 1).min(-1)  # the last one falls out
    older = jnp.where((place <= gone[:, None])[:, :, None], jnp.roll(held, 1, axis=1), held)
    new = older.at[:, 0].set(gram)
    return pool.at[row, jnp.where(valid[:, i], bucket, pool.shape[1])].set(new, mode="drop")

  return jax.lax.fori_loop(0, grams.shape[1], put, pool)


@functools.lru_cache
def _layout(width, ngram, guesses):
  parents, depths, columns = [0], [0], width + ngram - 2

  def add(parent):
    parents.append(parent)
    depths.append(depths[parent] + 1)
    return len(parents) - 1

  for _ in range(guesses):
    above = 0
    for _ in range(ngram - 1):
      above = add(above)
  window = np.full((ngram - 1, columns), -1, np.int32)
  window[0, 0] = 0
  for column in range(1, columns):
    window[0, column] = add(window[0, column - 1])
  for level in range(1, ngram - 1):
    for column in range(columns - level):
      window[level, column] = add(window[level - 1, column])
  filling = [(level + 1) * (columns - level) for level in range(ngram - 2)]
  return Layout(parents=tuple(map(int, parents)), depths=np.asarray(depths, np.int32), window=window,
                most=max((ngram - 1) * (width + guesses), *filling, 1))
