"""Lookahead decoding against the published loop in plain Python: the same trees, pool and window, step by step."""
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import stopping
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import jacobi
from specjax.proposers import lookahead

pytestmark = pytest.mark.usefixtures("quick_compile")
VOCAB = 8
PROMPTS = [[1, 2, 3, 4, 5], [7] * 3, [3, 1]]
BUDGET = [40, 22, 31]
SEEDS = [3, 1, 2]
HOST = re.compile(r"callback|infeed|outfeed|host_compute|\bsend\(|\brecv\(", re.IGNORECASE)
target_of = lambda salt: testing.DummyTarget(salt=np.uint32(salt), vocab=VOCAB, order=2)
FULL = lookahead.Lookahead(window=4, ngram=4, guesses=3)
# Eight ids share three buckets, and a window narrower than its levels has more nodes while it fills than afterwards.
SHARED = lookahead.Lookahead(window=2, ngram=5, guesses=1, buckets=3, from_text=True)
PAIRS = lookahead.Lookahead(window=4, ngram=2, guesses=2)


def asked(temperature):
  return sampling.SamplingParams(temperature=temperature, seed=SEEDS)


@functools.cache
def plain(salt, temperature, ends=()):
  """Texts of plain decoding, the prompts left out."""
  temperature = list(temperature) if isinstance(temperature, tuple) else temperature
  return drivers.generate(target_of(salt), proposers.Plain(), PROMPTS, asked(temperature), max_new_tokens=BUDGET,
                          eos_ids=ends).token_ids


def start(proposer, salt, temperature, ends=()):
  return drivers.start(target_of(salt), proposer, PROMPTS, asked(temperature), max_new_tokens=BUDGET, eos_ids=ends)


@functools.partial(jax.jit, static_argnums=1)
def one_step(target, proposer, state):
  """The step, and what it drafted and verified on the way."""
  tree, own = decode.draft(target, proposer, state)
  outcome = decode.verify(target, proposer, verifiers.Point(), state.replace(proposer=own), tree)
  return tree, outcome.drafted, decode.commit(target, proposer, state.replace(proposer=own), outcome)


def paths_of(tree, row):
  tokens, parents, size = (np.asarray(x)[row] for x in (tree.tokens, tree.parents, tree.size))
  paths = [[]]
  for node in range(1, size):
    paths.append(paths[parents[node]] + [int(tokens[node])])
  return paths


# --- the transcription ----------------------------------------------------------------------------------------------


@functools.cache
def most_probable(salt):
  """The greatest id behind every two tokens, V lists of V."""
  pairs = jnp.asarray([[a, b] for a in range(VOCAB) for b in range(VOCAB)], jnp.int32)
  target = target_of(salt)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (len(pairs), 2, 2))
  places = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), pairs.shape)
  logits = target.logits(target.forward(pairs, places, mask, target.init_cache(len(pairs), 1)).hidden)
  return np.argmax(np.asarray(logits)[:, 1], axis=-1).reshape(VOCAB, VOCAB).tolist()


class SlowRow:
  """One row. `levels[0]` are the window's tokens behind the root, the others its trajectories; None: to be chosen."""

  def __init__(self, proposer, salt, prompt, text, budget, ends):
    self.width, self.ngram, self.guesses = proposer.window, proposer.ngram, proposer.guesses
    self.buckets, self.from_text = min(proposer.buckets, VOCAB), proposer.from_text
    self.greatest, self.text, self.ends, self.limit = most_probable(salt), prompt + text, ends, len(prompt) + budget
    self.length, self.pool = len(prompt), {}
    self.levels = [[None] * (self.width + self.ngram - 3)]
    if self.from_text:
      self.learn_text(0)

  def learn(self, gram):
    held = self.pool.setdefault(gram[0] % self.buckets, [])
    if gram in held:
      held.remove(gram)
    held.insert(0, gram)
    del held[self.guesses:]

  def learn_text(self, begin):
    for end in range(max(begin, self.ngram - 1), self.length):
      self.learn(self.text[end - self.ngram + 1:end + 1])

  def draft(self, chosen):
    """All paths of the tree, in order; `chosen(level, column)` is the token for an empty place."""
    root, paths = self.text[self.length - 1], [[]]
    for level, tokens in enumerate(self.levels):
      for i, token in enumerate(tokens):
        if token is None or token in self.ends:
          tokens[i] = chosen(level, i + (level == 0))
    if len(self.levels) == self.ngram - 1:
      for gram in self.pool.get(root % self.buckets, []):
        if gram[0] == root:
          paths += [gram[1:end] for end in range(2, self.ngram + 1)]
    self.columns = [self.levels[0][:i] for i in range(len(self.levels[0]) + 1)]
    paths += self.columns[1:]
    for level in self.levels[1:]:
      self.columns = [path + [token] for path, token in zip(self.columns, level)]
      paths += self.columns
    return self.usable(paths)

  def usable(self, paths):
    kept = []
    for path in paths:
      if path not in kept and len(path) < self.limit - self.length and not set(path) & set(self.ends):
        kept.append(path)
    return kept

  def verify(self, paths):
    context = self.text[:self.length]
    said = []
    for path in self.columns:
      whole = context + path
      said.append(self.greatest[whole[-2]][whole[-1]] if path in paths else None)
    if len(self.levels) == self.ngram - 1:
      for column, path in enumerate(self.columns):
        # The column's token in the first level, what hangs below it, and what the target says.
        gram = [*(context[-1:] + path)[column:], said[column]]
        if said[column] is not None:
          self.learn(gram)
    if len(paths) > 1:
      if len(self.levels) == self.ngram - 1:
        levels = [*self.levels[1:], said]
        self.levels = [levels[0][1:], *levels[1:]]
      else:
        self.levels = [*[level[1:] for level in self.levels], said[1:]]
    rest = self.text[self.length:]
    count = max(len(path) for path in paths if path == rest[:len(path)]) + 1
    self.length += count
    if self.from_text:
      self.learn_text(self.length - count)
    return count - 1


@pytest.mark.parametrize("proposer,salt,temperature,ends", [
    (FULL, 1, 0.0, ()), (FULL, 2, 0.8, ()), (FULL, 2, 0.8, (0,)), (SHARED, 1, 0.8, ()), (SHARED, 7, 0.0, (4,)),
    (PAIRS, 1, 0.0, ()), (PAIRS, 7, 0.8, (7,))])
def test_every_tree_is_that_of_the_transcription(proposer, salt, temperature, ends):
  texts = plain(salt, temperature, ends)
  rows = [SlowRow(proposer, salt, prompt, text, budget, ends) for prompt, text, budget in zip(PROMPTS, texts, BUDGET)]
  state = start(proposer, salt, temperature, ends)
  accepted, greatest = 0, 0
  levels, columns = state.proposer.window.shape[1:]
  while running := [row for row in range(len(rows)) if rows[row].length < len(rows[row].text)]:
    assert np.flatnonzero(state.active).tolist() == running
    chosen = np.asarray(jacobi.scattered(
        state.tokens, state.length, state.length[:, None] + 8191 * jnp.arange(1, levels * columns + 1)))
    tree, drafted, state = one_step(target_of(salt), proposer, state)
    tree_lib.check(tree, VOCAB)
    wanted = [rows[row].draft(lambda level, column: int(chosen[row, level * columns + column]))
              if row in running else [[]] for row in range(len(rows))]
    assert [paths_of(tree, row) for row in range(len(rows))] == wanted
    worth = 2 * sum(len(paths) > 1 for paths in wanted) >= len(running)  # else the batch verifies roots only
    assert drafted.tolist() == [len(paths) - 1 if worth else 0 for paths in wanted]
    accepted += sum(rows[row].verify(wanted[row] if worth else [[]]) for row in running)
    greatest = max(greatest, *map(len, wanted))
    for row in range(len(rows)):
      pool = [[gram for gram in bucket if gram[0] >= 0] for bucket in state.proposer.pool[row].tolist()]
      assert pool == [rows[row].pool.get(bucket, []) for bucket in range(len(pool))]
      assert state.proposer.level[row] == len(rows[row].levels) - 1
  assert not np.asarray(state.active).any() and accepted > 2
  assert ends or proposer.max_nodes // 2 < greatest <= proposer.max_nodes


@pytest.mark.parametrize("temperature", [0.0, 0.8, (0.0, 0.8, 1.4)], ids=str)
def test_the_text_is_that_of_plain_decoding(temperature):
  accepted = 0
  for salt in range(3):
    state = start(FULL, salt, list(temperature) if isinstance(temperature, tuple) else temperature)
    while np.asarray(state.active).any():
      _, _, state = one_step(target_of(salt), FULL, state)
    texts = [tokens[begin:end].tolist()
             for tokens, begin, end in zip(*map(np.asarray, (state.tokens, state.start, state.length)))]
    assert texts == plain(salt, temperature)
    accepted += int(state.counters.accepted_tokens.sum())
  assert accepted > 30


# --- edges and state ------------------------------------------------------------------------------------------------


def test_a_window_of_one_pair_without_guesses_is_plain_decoding():
  proposer = lookahead.Lookahead(window=1, ngram=2, guesses=0)
  assert (proposer.max_nodes, proposer.max_depth, proposer.node_ids) == (1, 0, 0)
  assert decode.widths_for(proposer.max_nodes) == (1,)
  state = proposer.init(target_of(1), 2, 8)
  assert proposer.observe(None, state, None) is state
  tree, _ = propose(proposer, state)
  assert tree.tokens.tolist() == [[2], [2]] and tree.size.tolist() == [1, 1]


@pytest.mark.parametrize("width,ngram,guesses,nodes,depth", [
    (5, 4, 5, 30, 6), (7, 5, 7, 56, 9), (8, 5, 8, 64, 10), (1, 2, 4, 5, 1), (1, 4, 3, 12, 3), (4, 2, 0, 4, 3),
    (2, 6, 0, 12, 5)])
def test_sizes(width, ngram, guesses, nodes, depth):
  """(N - 1) * (W + G), or what a narrow window holds while it fills: with W = 2, N = 6, 3 levels of 4, then 4 of 3."""
  proposer = lookahead.Lookahead(window=width, ngram=ngram, guesses=guesses)
  assert (proposer.max_nodes, proposer.max_depth, proposer.node_ids) == (nodes, depth, 1)
  assert not jax.tree.leaves(proposer) and proposer.remember(None, []) is proposer


@pytest.mark.parametrize("kwargs", [dict(window=0), dict(ngram=1), dict(guesses=-1), dict(buckets=0)])
def test_errors(kwargs):
  (name, value), = kwargs.items()
  with pytest.raises(ValueError, match=f"{name}={value}.*needed are a window of 1 or more"):
    lookahead.Lookahead(**kwargs)


@functools.partial(jax.jit, static_argnums=0)
def propose_jit(proposer, state, tokens, length, active, budget, eos):
  rules = stopping.StopRules(eos=eos, sequences=jnp.full((len(tokens), 1, 1), -1, jnp.int32))
  context = proposers.Context(tokens=tokens, length=length, start=length, active=active, budget=budget,
                              params=sampling.SamplingParams(), rules=rules)
  return proposer.propose(None, None, state, context, None)


def propose(proposer, state, *, active=True, budget=100, eos=()):
  """Behind the text 1, 2 in every row."""
  rows = len(state.level)
  spread = lambda x, dtype: jnp.asarray(np.broadcast_to(np.asarray(x), (rows,)), dtype)
  return propose_jit(proposer, state, jnp.asarray([[1, 2, 9]] * rows, jnp.int32), spread(2, jnp.int32),
                     spread(active, bool), spread(budget, jnp.int32), stopping.stop_rules(rows, eos).eos)


def filled(window, grams=()):
  """A full window of FULL and its pool, in three rows; `window` are its levels of four tokens."""
  state = FULL.init(target_of(1), 3, 8)
  pool = np.full(state.pool.shape, -1, np.int32)
  for place, gram in enumerate(grams):
    pool[:, gram[0], place] = gram
  levels = np.pad(np.asarray(window, np.int32), ((0, 0), (0, 2)), constant_values=-1)
  return state.replace(window=jnp.asarray([levels] * 3), level=jnp.full((3,), 2, jnp.int32), pool=jnp.asarray(pool))


WINDOW = [[0, 3, 4, 5], [6, 3, 4, 7], [6, 5, 4, 3]]  # the first token of the first level is not looked at
LEVELS = [[3], [3, 4], [3, 4, 5], [6], [3, 3], [3, 4, 4], [3, 4, 5, 7], [6, 6], [3, 3, 5], [3, 4, 4, 4],
          [3, 4, 5, 7, 3]]


def test_guesses_share_nodes_with_each_other_and_with_the_window():
  """Else a verifier that follows one of two equal nodes could not reach what hangs below the other."""
  tree, _ = propose(FULL, filled(WINDOW, [[2, 6, 5, 4], [2, 6, 5, 7], [2, 3, 4, 4]]))
  guesses = [[6], [6, 5], [6, 5, 4], [6, 5, 7], [3], [3, 4], [3, 4, 4]]
  assert paths_of(tree, 0) == [[], *guesses, *[path for path in LEVELS if path not in guesses]]


def test_guesses_begin_with_the_pending_token():
  assert paths_of(propose(FULL, filled(WINDOW, [[1, 6, 5, 4], [3, 6, 5, 7]]))[0], 0) == [[], *LEVELS]


def test_drafts_end_where_a_row_ends():
  """Before an end-of-sequence id in a guess, one token short of the budget, at once in a row that has ended."""
  grams = [[2, 1, 0, 4], [2, 7, 7, 0]]
  tree, state = propose(FULL, filled(WINDOW, grams), eos=(0, 99))
  assert paths_of(tree, 0) == [[], [1], [7], [7, 7], *LEVELS]
  tree, _ = propose(FULL, filled(WINDOW, grams), budget=[0, 1, 3])
  assert paths_of(tree, 0) == paths_of(tree, 1) == [[]]
  assert paths_of(tree, 2) == [[], [1], [1, 0], [7], [7, 7], *[path for path in LEVELS if len(path) < 3]]
  tree, _ = propose(FULL, filled(WINDOW, grams), active=[True, False, True])
  assert tree.size.tolist() == [1 + 6 + 11, 1, 1 + 6 + 11]
  # In the window a token of the text stands in for it.
  tree, state = propose(FULL, filled(WINDOW), eos=(6,))
  assert set(np.asarray(state.window)[0, 1:, 0].tolist()) <= {1, 2}
  assert [path for path in paths_of(tree, 0) if 6 in path] == []


@jax.jit
def observe(state, count, drafted, node_ids):
  path = jnp.zeros((len(count), FULL.max_depth + 1), jnp.int32)
  return FULL.observe(None, state, proposers.Committed(
      tokens=path + 2, following=path, positions=path, hidden=None, count=count, path=path, drafted=drafted,
      node_ids=node_ids))


def test_a_window_is_kept_by_steps_that_do_not_verify_it():
  """Rows: one that drafts, one whose batch does not, one that has ended."""
  tree, before = propose(FULL, filled(WINDOW, [[2, 6, 5, 4]]))
  size = int(tree.size[0])
  ids = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32)[None, :, None] % VOCAB, (3, 32, 1))
  after = observe(before, jnp.asarray([2, 1, 0]), jnp.asarray([size - 1, 0, 0]), ids)
  assert after.window[0, :2, :4].tolist() == [WINDOW[1], WINDOW[2]]
  paths = paths_of(tree, 0)
  assert after.window[0, 2, :4].tolist() == [paths.index(path) % VOCAB for path in LEVELS[7:]]
  for row in (1, 2):
    assert np.array_equal(after.window[row], before.window[row])
    assert np.array_equal(after.pool[row], before.pool[row])
  assert after.pool[0, 3, 0].tolist() == [3, 3, 5, paths.index([3, 3, 5]) % VOCAB]
  assert after.pool[0, 2, :2].tolist() == [[2, 6, 6, paths.index([6, 6]) % VOCAB], [2, 6, 5, 4]]


def test_a_known_ngram_comes_to_the_front_and_the_oldest_falls_out():
  insert = jax.jit(lookahead._insert)
  pool = jnp.full((1, 2, 2, 2), -1, jnp.int32)
  held = lambda: [gram for gram in pool[0, 1].tolist() if gram[0] >= 0]
  for grams, wanted in [([[1, 5]], [[1, 5]]), ([[3, 6]], [[3, 6], [1, 5]]), ([[1, 5]], [[1, 5], [3, 6]]),
                        ([[1, 7]], [[1, 7], [1, 5]])]:
    pool = insert(pool, jnp.asarray([grams]), jnp.ones((1, 1), bool))
    assert held() == wanted
  assert (np.asarray(pool[0, 0]) == -1).all()
  pool = insert(pool, jnp.asarray([[[1, 8]]]), jnp.zeros((1, 1), bool))
  assert held() == [[1, 7], [1, 5]]


def test_nothing_leaves_the_device():

  def both(state, node_ids):
    _, own = SHARED.propose(None, None, state.proposer, state.context(), state.keys)
    return SHARED.observe(None, own, proposers.Committed(
        tokens=state.tokens[:, :6], following=state.tokens[:, 1:7], positions=None, hidden=None, count=state.length,
        path=state.tokens[:, :6], drafted=state.length, node_ids=node_ids))

  text = jax.jit(both).lower(start(SHARED, 1, 0.0), jnp.zeros((3, 16, 1), jnp.int32)).compile().as_text()
  assert not HOST.search(text)
