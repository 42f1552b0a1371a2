"""Token recycling against a transcription in plain Python that knows the target's laws; its matrix of successors."""
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
from specjax.proposers import recycling
from specjax.proposers import slots

pytestmark = pytest.mark.usefixtures("quick_compile")
VOCAB, RANKS, NODES, DEPTH = 10, 3, 14, 4
TABLE = (0.53, 0.22, 0.11)
PROMPTS = [[1, 2, 3, 4, 5], [7] * 3, [3, 1]]
BUDGET = [40, 22, 31]
SEEDS = [3, 1, 2]
HOST = re.compile(r"callback|infeed|outfeed|host_compute|\bsend\(|\brecv\(", re.IGNORECASE)
target_of = lambda salt: testing.DummyTarget(salt=np.uint32(salt), vocab=VOCAB, order=2)
EMPTY = recycling.recycling(VOCAB, successors=RANKS, num_nodes=NODES, depth=DEPTH, acceptance=TABLE)


def asked(temperature):
  return sampling.SamplingParams(temperature=temperature, seed=SEEDS)


def plain(salt, temperature, ends=()):
  """Texts of plain decoding, the prompts left out."""
  return drivers.generate(target_of(salt), proposers.Plain(), PROMPTS, asked(temperature), max_new_tokens=BUDGET,
                          eos_ids=ends).token_ids


def start(proposer, salt, temperature, ends=()):
  return drivers.start(target_of(salt), proposer, PROMPTS, asked(temperature), max_new_tokens=BUDGET, eos_ids=ends)


@jax.jit
def one_step(target, proposer, state):
  """The step, and what it drafted and verified on the way."""
  tree, proposer_state = decode.draft(target, proposer, state)
  outcome = decode.verify(target, proposer, verifiers.Point(), state.replace(proposer=proposer_state), tree)
  return tree, outcome.drafted, decode.commit(target, proposer, state.replace(proposer=proposer_state), outcome)


def finish(proposer, salt, temperature):
  """The state behind the last step."""
  state = start(proposer, salt, temperature)
  while np.asarray(state.active).any():
    _, _, state = one_step(target_of(salt), proposer, state)
  return state


def texts_of(state):
  return [tokens[begin:end].tolist() for tokens, begin, end in zip(*map(np.asarray, (state.tokens, state.start,
                                                                                     state.length)))]


# --- the transcription ----------------------------------------------------------------------------------------------


@functools.cache
def rankings(salt):
  """The ids behind every two tokens, most probable first: a list of V lists of V lists."""
  pairs = jnp.asarray([[a, b] for a in range(VOCAB) for b in range(VOCAB)], jnp.int32)
  target = target_of(salt)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (len(pairs), 2, 2))
  places = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), pairs.shape)
  logits = np.asarray(target.logits(target.forward(pairs, places, mask, target.init_cache(len(pairs), 1)).hidden))[:, 1]
  return np.argsort(-logits, axis=-1, kind="stable").reshape(VOCAB, VOCAB, VOCAB).tolist()


def slow_shape():
  """Nodes as lists of ranks from the root, in the order of their worth."""
  nodes = [[]]
  while len(nodes) < NODES:
    candidates = [[*node, rank] for node in nodes if len(node) < DEPTH for rank in range(RANKS)]
    candidates = [node for node in candidates
                  if node not in nodes and (node[-1] == 0 or [*node[:-1], node[-1] - 1] in nodes)]
    nodes.append(max(candidates, key=lambda node: round(float(np.prod([TABLE[r] for r in node])), 9)))
  return nodes


class SlowRow:
  """One row: its matrix, a dictionary, and the tree of each step as the paths of its nodes in order."""

  def __init__(self, salt, text, start, budget, ends):
    self.ranked, self.text, self.length, self.ends, self.limit = rankings(salt), text, start, ends, start + budget
    self.matrix, self.shape = {}, slow_shape()

  def draft(self):
    paths = {(): []}
    for node in self.shape[1:]:
      above = paths.get(tuple(node[:-1]))
      known = None if above is None else self.matrix.get([self.text[self.length - 1], *above][-1])
      if known is not None and known[node[-1]] not in self.ends and len(node) < self.limit - self.length:
        paths[tuple(node)] = above + [known[node[-1]]]
    return list(paths.values())

  def verify(self, paths):
    """Learns from every node, and moves on along the text, which is what the target draws."""
    for path in paths:
      context = self.text[:self.length] + path
      self.matrix[context[-1]] = self.ranked[context[-2]][context[-1]][:RANKS]
    rest = self.text[self.length:]
    self.length += max(len(path) for path in paths if path == rest[:len(path)]) + 1


# --- end to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8, (0.0, 0.8, 1.4)], ids=str)
def test_the_text_is_that_of_plain_decoding(temperature):
  temperature = list(temperature) if isinstance(temperature, tuple) else temperature
  accepted = 0
  for salt in (1, 2, 3):
    state = finish(EMPTY, salt, temperature)
    assert texts_of(state) == plain(salt, temperature)
    accepted += int(state.counters.accepted_tokens.sum())
  assert accepted > 40


def test_a_row_keeps_its_tree_whatever_its_neighbours_are():
  """Engine bugs D7 and D10: another order of rows, and a row that has ended beside them."""
  order = [2, 0, 1]
  begin = lambda rows, budget: drivers.start(
      target_of(1), EMPTY, [PROMPTS[row] for row in rows], sampling.SamplingParams(seed=[SEEDS[row] for row in rows]),
      max_new_tokens=[budget[row] for row in rows])
  first, second = begin([0, 1, 2], BUDGET), begin(order, [BUDGET[0], 4, BUDGET[2]])
  alive = {0, 1, 2}
  for _ in range(8):
    tree, _, first = one_step(target_of(1), EMPTY, first)
    other, _, second = one_step(target_of(1), EMPTY, second)
    alive &= {row for place, row in enumerate(order) if bool(second.active[place])} | {0, 2}
    for place, row in enumerate(order):
      if row in alive - {1}:
        assert paths_of(other, place) == paths_of(tree, row)
  assert alive == {0, 2} and int(tree.size.max()) > 4


def paths_of(tree, row):
  tokens, parents, size = (np.asarray(x)[row] for x in (tree.tokens, tree.parents, tree.size))
  paths = [[]]
  for node in range(1, size):
    paths.append(paths[parents[node]] + [int(tokens[node])])
  return paths


@pytest.mark.parametrize("salt,temperature,ends", [(1, 0.0, ()), (2, 0.8, ()), (4, 0.8, (6,))])
def test_every_tree_is_that_of_the_transcription(salt, temperature, ends):
  """Where fewer than half of the running rows draft, only the roots are verified (`decode.verify`) and learned from."""
  texts = plain(salt, temperature, ends)
  rows = [SlowRow(salt, prompt + text, len(prompt), budget, ends)
          for text, prompt, budget in zip(texts, PROMPTS, BUDGET)]
  state = start(EMPTY, salt, temperature, ends)
  greatest = held_back = 0
  while running := [row for row in range(len(rows)) if rows[row].length < len(rows[row].text)]:
    assert np.flatnonzero(state.active).tolist() == running
    tree, drafted, state = one_step(target_of(salt), EMPTY, state)
    tree_lib.check(tree, VOCAB)
    wanted = [rows[row].draft() if row in running else [[]] for row in range(len(rows))]
    assert [paths_of(tree, row) for row in range(len(rows))] == wanted
    worth = 2 * sum(len(paths) > 1 for paths in wanted) >= len(running)
    assert drafted.tolist() == [len(paths) - 1 if worth else 0 for paths in wanted]
    for row in running:
      rows[row].verify(wanted[row] if worth else [[]])
    greatest, held_back = max(greatest, *map(len, wanted)), held_back + (not worth and max(map(len, wanted)) > 1)
    for row in range(len(rows)):
      assert state.proposer.matrix[row].tolist() == [rows[row].matrix.get(i, [-1] * RANKS) for i in range(VOCAB)]
  assert not np.asarray(state.active).any()
  assert ends or (held_back and greatest == NODES)


# --- the matrix -----------------------------------------------------------------------------------------------------

# A tree 1 -> (2 -> 1, 3 -> 2), in the order 1, 2, 3, 1, 2: ids 1 and 2 stand in it twice.
TREE = [1, 2, 3, 1, 2]
IDS = [[10 * node + rank for rank in range(RANKS)] for node in range(NODES)]


@jax.jit
def observe(proposer, state, committed):
  return proposer.observe(target_of(1), state, committed)


def learned(drafted, count, path=True):
  """What one observation writes: rows of the matrix that are not empty. Two rows of a batch, the other one idle."""
  state = recycling.State(matrix=jnp.full((2, VOCAB, RANKS), -1, jnp.int32),
                          tokens=jnp.asarray([TREE + [0] * (NODES - 5)] * 2, jnp.int32))
  spread = lambda x: jnp.asarray([x, 0], jnp.int32)
  nothing = jnp.zeros((2, DEPTH + 1), jnp.int32)
  ids = jnp.pad(jnp.asarray([IDS] * 2, jnp.int32), ((0, 0), (0, 2), (0, 0)), constant_values=-1)
  committed = proposers.Committed(tokens=nothing, following=nothing, positions=nothing, hidden=None,
                                  count=spread(count), path=nothing if path else None, drafted=spread(drafted),
                                  node_ids=ids if path else None)
  matrix = np.asarray(observe(EMPTY, state, committed).matrix)
  assert (matrix[1] == -1).all()
  return {token: row.tolist() for token, row in enumerate(matrix[0]) if (row != -1).any()}


def test_every_verified_node_is_learned_from_and_of_equal_tokens_the_last_one():
  assert learned(drafted=4, count=1) == {1: IDS[3], 2: IDS[4], 3: IDS[2]}
  assert learned(drafted=3, count=3) == {1: IDS[3], 2: IDS[1], 3: IDS[2]}


def test_of_drafts_that_were_not_verified_only_the_root_is_learned_from():
  """A batch in which few rows draft verifies roots; another proposer's draft may have been accepted meanwhile."""
  assert learned(drafted=0, count=1) == learned(drafted=0, count=3) == {1: IDS[0]}


def test_rows_that_ended_and_prefill_teach_nothing():
  assert learned(drafted=0, count=0) == learned(drafted=0, count=3, path=False) == {}


def test_what_requests_taught_is_remembered_and_forgotten():
  state = cold = finish(EMPTY, 1, 0.0)
  matrices = np.asarray(state.proposer.matrix)
  warm = EMPTY.remember(state.proposer, [])
  merged = np.asarray(warm.matrix)
  for token in range(VOCAB):
    seen = [matrix[token].tolist() for matrix in matrices if matrix[token, 0] >= 0]
    assert merged[token].tolist() == (seen[-1] if seen else [-1] * RANKS)
  assert len({matrix.tobytes() for matrix in matrices}) == 3  # rows know different things
  programs = drivers.compiled_programs(), one_step._cache_size()
  tree, _, _ = one_step(target_of(1), warm, start(warm, 1, 0.0))
  assert (np.asarray(tree.size) > 4).all()  # it drafts at once
  state = finish(warm, 1, 0.0)
  assert texts_of(state) == texts_of(cold) and state.counters.steps.sum() < cold.counters.steps.sum()
  # A request that teaches nothing new changes nothing, and what was known before gives way to what is new.
  assert np.array_equal(warm.remember(warm.init(target_of(1), 3, 0), []).matrix, merged)
  odd = warm.init(target_of(1), 2, 0)
  odd = odd.replace(matrix=odd.matrix.at[0, 3].set(7).at[1, 4].set(8))
  again = np.asarray(warm.remember(odd, []).matrix)
  assert (again[3] == 7).all() and (again[4] == 8).all()
  assert np.array_equal(np.delete(again, [3, 4], 0), np.delete(merged, [3, 4], 0))
  assert np.array_equal(warm.forget().matrix, EMPTY.matrix)
  assert programs == (drivers.compiled_programs(), one_step._cache_size())


# --- edges ----------------------------------------------------------------------------------------------------------


@jax.jit
def propose_jit(proposer, state, tokens, length, active, budget, eos):
  rules = stopping.StopRules(eos=eos, sequences=jnp.full((len(tokens), 1, 1), -1, jnp.int32))
  context = proposers.Context(tokens=tokens, length=length, start=length, active=active, budget=budget,
                              params=sampling.SamplingParams(), rules=rules)
  return proposer.propose(None, None, state, context, None)


def propose(successors, *, active=True, budget=100, eos=()):
  """The paths drafted behind token 1, with the same known successors in each of three rows."""
  matrix = np.full((3, VOCAB, RANKS), -1, np.int32)
  for token, row in successors.items():
    matrix[:, token] = row
  state = recycling.State(matrix=jnp.asarray(matrix), tokens=jnp.zeros((3, NODES), jnp.int32))
  spread = lambda x, dtype: jnp.asarray(np.broadcast_to(np.asarray(x), (3,)), dtype)
  tree, new = propose_jit(EMPTY, state, jnp.asarray([[5, 1, 9]] * 3, jnp.int32), spread(2, jnp.int32),
                          spread(active, bool), spread(budget, jnp.int32), stopping.stop_rules(3, eos).eos)
  assert np.array_equal(tree.tokens, new.tokens) and tree.width == NODES == EMPTY.max_nodes
  return [paths_of(tree, row) for row in range(3)]


def test_what_was_never_seen_is_not_drafted():
  """Engine bug D4: fillers are no drafts."""
  assert propose({}) == [[[]]] * 3
  assert propose({2: [1, 3, 4]}) == [[[]]] * 3
  assert propose({1: [2, 3, 4]}) == [[[], [2], [3], [4]]] * 3
  assert propose({1: [2, 3, 4], 3: [0, 5, 6]}) == [[[], [2], [3], [3, 0], [4]]] * 3


def test_an_end_of_sequence_id_and_all_below_it_are_left_out():
  assert propose({1: [2, 3, 4], 2: [5, 6, 7], 3: [5, 0, 6], 4: [8, 7, 6]}, eos=(2, 8)) == [[[], [3], [3, 5], [4]]] * 3
  assert propose({1: [2, 3, 4], 2: [5, 6, 7]}, eos=(6, 99)) == [[[], [2], [2, 5], [3], [4], [2, 7]]] * 3


def test_no_node_is_deeper_than_a_budget_can_use():
  chain = {1: [1, 2, 3]}
  found = propose(chain, budget=[1, 2, 3])
  assert [max(map(len, paths)) for paths in found] == [0, 1, 2] and found[0] == [[]]
  assert max(map(len, propose(chain)[0])) == DEPTH == EMPTY.max_depth


def test_rows_that_ended_draft_nothing():
  assert propose({1: [2, 3, 4]}, active=[True, False, True]) == [[[], [2], [3], [4]], [[]], [[], [2], [3], [4]]]


def test_nothing_leaves_the_device():

  def both(proposer, state, node_ids):
    _, own = proposer.propose(None, None, state.proposer, state.context(), state.keys)
    return proposer.observe(None, own, proposers.Committed(
        tokens=None, following=None, positions=None, hidden=None, count=state.length, path=state.tokens,
        drafted=state.length, node_ids=node_ids))

  ids = jnp.zeros((3, 16, RANKS), jnp.int32)
  assert not HOST.search(jax.jit(both).lower(EMPTY, start(EMPTY, 1, 0.0), ids).compile().as_text())


def test_sizes():
  """The most that a step can verify, without a row of the matrix for each of its ranks."""
  large = recycling.recycling(50, successors=2, num_nodes=64, depth=63)
  assert (large.max_nodes, large.node_ids, large.matrix.shape) == (64, 2, (50, 2)) and 5 < large.max_depth < 64
  assert recycling.recycling(9, successors=1, num_nodes=8, depth=4).max_nodes == 5  # a chain ends at its depth
  assert len(jax.tree.leaves(large)) == 1


@pytest.mark.parametrize("kwargs,message", [
    (dict(num_nodes=1), "num_nodes=1, depth=6: needed are 2 nodes"),
    (dict(depth=0), "num_nodes=16, depth=0"),
    (dict(acceptance=(0.9, 0.9)), "acceptance=.*a sum over ranks of at most 1"),
    (dict(successors=0), "successors=0: allowed are 1 to 10"),
    (dict(successors=11), "successors=11: allowed are 1 to 10"),
])
def test_errors(kwargs, message):
  with pytest.raises(ValueError, match=message):
    recycling.recycling(VOCAB, **{"successors": 3, **kwargs})


def test_a_matrix_of_another_shape_is_refused():
  with pytest.raises(ValueError, match=r"matrix of shape \(11, 3\): this target needs 10 rows"):
    recycling.recycling(11, successors=3).init(target_of(1), 1, 8)
  with pytest.raises(ValueError, match="table of acceptance at least 8 successors"):
    recycling.Recycling(matrix=jnp.zeros((10, 3), jnp.int32)).init(target_of(1), 1, 8)


# --- slots ----------------------------------------------------------------------------------------------------------


def test_slots_are_packed_in_order_and_equal_paths_found():
  """Two chains of two tokens below the root and a third one below the first slot, against lists of paths."""
  parents = (0, 0, 1, 0, 3, 1, 5)
  packed = jax.jit(lambda tokens, keep: (slots.first_equal(tokens, parents, keep), *slots.pack(
      tokens, jnp.asarray(parents, jnp.int32), keep, 4)))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 2, (64, 7)).astype(np.int32)
  keep = rng.random((64, 7)) < 0.8
  keep[:, 0] = True
  for slot in range(1, 7):
    keep[:, slot] &= keep[:, parents[slot]]
  first, tree, node = packed(tokens, keep)
  shared = 0
  for row in range(64):
    paths = [[]]
    for slot in range(1, 7):
      paths.append(paths[parents[slot]] + [int(tokens[row, slot])])
    for slot in range(7):
      kept = [other for other in range(7) if paths[other] == paths[slot] and (keep[row, other] or other == slot)]
      assert first[row, slot] == kept[0]
      shared += kept[0] != slot
    wanted = [slot for slot in range(7) if keep[row, slot]][:4]
    assert paths_of(tree, row) == [paths[slot] for slot in wanted]
    assert node[row].tolist() == [wanted.index(slot) if slot in wanted else -1 for slot in range(7)]
  assert shared > 20 and tree.width == 4
