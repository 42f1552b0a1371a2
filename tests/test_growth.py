"""Trees grown on the device against EAGLE-2's rule in plain Python: laws with ties, with certain and impossible tokens.

Log-probabilities here are multiples of 1/8, so that sums are exact and equal paths are equal.
"""
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import growth
from specjax import tree as tree_lib

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCABULARY = 7
WIDTH, DEPTH, NODES = 3, 4, 14
LAWS = ("ties", "some_impossible", "nothing_below", "all_equal", "certain", "one_path", "no_drafts")
HOST = re.compile(r"callback|infeed|outfeed|host_compute|\bsend\(|\brecv\(", re.IGNORECASE)

start = jax.jit(growth.start, static_argnums=2)
expand = jax.jit(growth.expand)
ancestors = jax.jit(tree_lib.ancestors, static_argnums=1)
fed_slots = jax.jit(growth.fed_slots)
expected_tokens = jax.jit(growth.expected_tokens, static_argnums=1)


@functools.partial(jax.jit, static_argnums=2)
def rerank(pool, pending, nodes, limit=None, min_score=None, max_level=None):
  return growth.rerank(pool, pending, nodes, limit=limit, min_score=min_score, max_level=max_level)


def law(kind, seed, path):
  """Log-probabilities (not normalised) of the tokens behind a path: f[V]."""
  rng = np.random.default_rng([seed, *path])
  steps = -rng.integers(0, 16, VOCABULARY) / 8
  if kind == "some_impossible":
    return np.where(rng.random(VOCABULARY) < .6, -np.inf, steps)
  if kind == "nothing_below":
    return steps if len(path) < 2 else np.full(VOCABULARY, -np.inf)
  if kind == "all_equal":
    return np.full(VOCABULARY, -1.)
  if kind == "certain":  # several children as probable as their parent
    return np.where(rng.random(VOCABULARY) < .5, 0., -1.)
  if kind == "one_path":
    return np.where(np.arange(VOCABULARY) == rng.integers(VOCABULARY), 0., -np.inf)
  return steps if kind == "ties" else np.full(VOCABULARY, -np.inf)


def best(entries, count):
  """The places of the `count` greatest, equal ones in order."""
  return sorted(range(len(entries)), key=lambda i: (-entries[i], i))[:count]


def eagle2(law_of, width, depth):
  """EAGLE-2's growth with lists: the pool as (path, score, pool place of the parent), and the beams as pool places."""
  pool, beams, beam = [], [], [((), 0., -1)]
  for level in range(depth):
    first = len(pool)
    for path, score, place in beam:
      log_q = law_of(path)
      pool += [((*path, token), score + log_q[token], place) for token in best(log_q, width)]
    beams.append([first + i for i in best([score for _, score, _ in pool[first:]], width)])
    beam = [(*pool[place][:2], place) for place in beams[-1]]
  return pool, beams


def chosen(pool, nodes, allowed=lambda path, score: True):
  """The tree's pool places."""
  scores = [score if allowed(path, score) else -math.inf for path, score, _ in pool]
  return sorted(i for i in best(scores, nodes - 1) if scores[i] > -math.inf)


def paths_of(pool, beam):
  """The text below the root of every beam node, from the device's own pointers: [B][k]."""
  tokens, parents = np.asarray(pool.tokens), np.asarray(pool.parents)
  def up(row, place):
    return () if place < 0 else (*up(row, parents[row, place]), int(tokens[row, place]))
  return [[up(row, place) for place in places] for row, places in enumerate(np.asarray(beam.places))]


def top(log_q):
  """The `WIDTH` most probable of each law: ids and log-probabilities, from f[..., V]."""
  log_q = np.asarray(log_q, np.float32)
  ids = np.argsort(-log_q, axis=-1, kind="stable")[..., :WIDTH]
  return jnp.asarray(ids, jnp.int32), jnp.asarray(np.take_along_axis(log_q, ids, -1))


def grow(laws, depth=DEPTH, go=None):
  """Grows a tree for every law of a row on the device: the pool and the beams."""
  pool, beam = start(*top([law_of(()) for law_of in laws]), depth)
  beams = [beam]
  for level in range(1, depth):
    log_q = [[law_of(path) for path in paths] for law_of, paths in zip(laws, paths_of(pool, beam))]
    pool, beam = expand(pool, beam, *top(log_q), None if go is None else jnp.asarray(go[level - 1]))
    beams.append(beam)
  return pool, beams


def all_laws():
  return [functools.partial(law, kind, seed) for kind in LAWS for seed in range(4)]


@pytest.fixture(scope="module")
def grown():
  """Laws, and the pool and beams of a batch of all of them."""
  return all_laws(), *grow(all_laws())


def check_tree(tree, places, pool, wanted, row):
  """One row of a tree holds the `wanted` places of the reference's pool, parents first."""
  size = len(wanted) + 1
  node_of = {-1: 0, **{place: node for node, place in enumerate(wanted, 1)}}
  assert tree.size[row] == size
  assert places[row].tolist() == [-1, *wanted] + [-1] * (tree.width - size)
  assert tree.tokens[row].tolist() == [50 + row, *(pool[i][0][-1] for i in wanted)] + [0] * (tree.width - size)
  # A parent that is not in the tree would be a KeyError: the tree is closed under ancestors.
  assert tree.parents[row].tolist() == [0, *(node_of[pool[i][2]] for i in wanted)] + [0] * (tree.width - size)


def pending(rows):
  return 50 + jnp.arange(rows, dtype=jnp.int32)


@pytest.mark.parametrize("nodes", [2, NODES, 70])
def test_a_tree_is_eagle2s(grown, nodes):
  laws, pool, beams = grown
  tree, places = jax.device_get(rerank(pool, pending(len(laws)), nodes))
  assert tree.width == nodes and tree.sampled is None and tree.tokens.dtype == tree.parents.dtype == np.int32
  sizes = set()
  for row, law_of in enumerate(laws):
    wanted, wanted_beams = eagle2(law_of, WIDTH, DEPTH)
    check_tree(tree, places, wanted, chosen(wanted, nodes), row)
    sizes.add(int(tree.size[row]))
    for beam, order in zip(beams, wanted_beams):
      alive = [i for i in order if wanted[i][1] > -math.inf]
      assert np.asarray(beam.places)[row][:len(alive)].tolist() == alive  # of those that are not, the order is free
      assert np.asarray(beam.alive)[row].tolist() == [True] * len(alive) + [False] * (WIDTH - len(alive))
      assert np.asarray(beam.scores)[row][:len(alive)].tolist() == [wanted[i][1] for i in alive]
      assert np.asarray(beam.tokens)[row][:len(alive)].tolist() == [wanted[i][0][-1] for i in alive]
  assert {1, nodes} & sizes == sizes if nodes == 2 else len(sizes) > 3


def test_a_tree_of_the_root_alone(grown):
  laws, pool, _ = grown
  tree, places = rerank(pool, pending(len(laws)), 1)
  assert tree.tokens.tolist() == pending(len(laws))[:, None].tolist() and (tree.size == 1).all()
  assert places.tolist() == [[-1]] * len(laws)


def test_one_level():
  laws = all_laws()
  pool, _ = grow(laws, depth=1)
  tree, places = jax.device_get(rerank(pool, pending(len(laws)), NODES))
  for row, law_of in enumerate(laws):
    wanted, _ = eagle2(law_of, WIDTH, 1)
    check_tree(tree, places, wanted, chosen(wanted, NODES), row)
  assert fed_slots(pool, places).tolist() == [[-1] * NODES] * len(laws)


def test_limits_of_a_row(grown):
  """Numbers of nodes, least scores and greatest depths by row; what is left is a tree again."""
  laws, pool, _ = grown
  rows = np.arange(len(laws))
  limit, least, level = rows % 6, -.25 * (rows % 9), 1 + rows % DEPTH
  as_device = lambda x, kind: jnp.asarray(x, kind)
  trees = {
      "limit": rerank(pool, pending(len(laws)), NODES, as_device(limit, jnp.int32)),
      "score": rerank(pool, pending(len(laws)), NODES, None, as_device(least, jnp.float32)),
      "level": rerank(pool, pending(len(laws)), NODES, None, None, as_device(level, jnp.int32))}
  for name, (tree, places) in jax.device_get(trees).items():
    cut = 0
    for row, law_of in enumerate(laws):
      wanted, _ = eagle2(law_of, WIDTH, DEPTH)
      nodes = min(limit[row] + 1, NODES) if name == "limit" else NODES
      allowed = {"limit": lambda path, score: True, "score": lambda path, score: score >= least[row],
                 "level": lambda path, score: len(path) <= level[row]}[name]
      check_tree(tree, places, wanted, chosen(wanted, nodes, allowed), row)
      cut += chosen(wanted, NODES) != chosen(wanted, nodes, allowed)
    assert cut > 5, name


def test_a_row_alone_grows_the_same_tree(grown):
  laws, pool, _ = grown
  tree, places = jax.device_get(rerank(pool, pending(len(laws)), NODES))
  for row in range(0, len(laws), 3):
    alone, _ = grow(laws[row:row + 1])
    single, at = rerank(alone, pending(len(laws))[row:row + 1], NODES)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[row]), (single, at), (tree, places))


def test_a_node_sees_its_ancestors_and_knows_its_slot(grown):
  """The mask over earlier beam nodes is the tree's own ancestor mask, read through slots."""
  laws, pool, beams = grown
  tree, places = rerank(pool, pending(len(laws)), 40)
  slots = np.asarray(fed_slots(pool, places))
  mask = np.asarray(ancestors(tree.parents, DEPTH))
  places, fed = np.asarray(places), np.asarray(pool.fed)
  assert fed.shape[1] == (DEPTH - 1) * WIDTH
  last_level = places >= growth.pool_size(WIDTH, DEPTH - 1)
  assert (slots[last_level] == -1).all() and (slots[places < 0] == -1).all()
  compared = 0
  for row in range(len(laws)):
    for level, beam in enumerate(beams[:-1], 1):
      assert beam.level == level and beam.first_slot == (level - 1) * WIDTH
      slots_of_level = np.arange(WIDTH) + (level - 1) * WIDTH
      assert fed[row, slots_of_level].tolist() == np.asarray(beam.places)[row].tolist()
      for i, place in enumerate(np.asarray(beam.places)[row]):
        node = np.flatnonzero(places[row] == place)
        if not len(node):
          continue
        assert slots[row, node[0]] == slots_of_level[i]
        above = [slots[row, j] for j in np.flatnonzero(mask[row, node[0]]) if j not in (0, node[0])]
        assert len(above) == level - 1  # the ancestors of a node in a beam were in beams
        assert np.flatnonzero(np.asarray(beam.above)[row, i]).tolist() == sorted(above)
        if level > 1:
          parent_slot = (level - 2) * WIDTH + np.asarray(beam.parents)[row, i]
          assert parent_slot == slots[row, np.asarray(tree.parents)[row, node[0]]]
        compared += level > 1
  assert compared > 100


def test_nodes_that_never_were_in_a_beam_have_no_slot(grown):
  laws, pool, beams = grown
  everything = jnp.broadcast_to(jnp.arange(pool.tokens.shape[1], dtype=jnp.int32), pool.tokens.shape)
  slots = np.asarray(fed_slots(pool, everything))
  for row in range(len(laws)):
    was_fed = {int(place) for beam in beams[:-1] for place in np.asarray(beam.places)[row]}
    assert {place for place in range(slots.shape[1]) if slots[row, place] >= 0} == was_fed
  fresh, _ = start(*top([law_of(()) for law_of in laws]), DEPTH)  # a loop may end before any beam went through
  assert (fed_slots(fresh, everything - 1) == -1).all()


def test_a_row_that_stops_keeps_its_tree():
  """Rows stop at different levels; each is the tree of that depth, and nothing is alive in it afterwards."""
  laws = all_laws()
  last = 1 + np.arange(len(laws)) % DEPTH  # levels that each row grows
  go = [level <= last - 1 for level in range(1, DEPTH)]
  pool, beams = grow(laws, go=go)
  tree, places = jax.device_get(rerank(pool, pending(len(laws)), NODES))
  for row, law_of in enumerate(laws):
    wanted, _ = eagle2(law_of, WIDTH, int(last[row]))
    check_tree(tree, places, wanted, chosen(wanted, NODES), row)
    for level in range(last[row] + 1, DEPTH + 1):
      assert not np.asarray(beams[level - 1].alive)[row].any()


def test_no_level_beyond_the_last():
  laws = all_laws()
  pool, beams = grow(laws)
  zeros = jnp.zeros((len(laws), WIDTH, WIDTH))
  after, beam = expand(pool, beams[-1], zeros.astype(jnp.int32), zeros)
  jax.tree.map(np.testing.assert_array_equal, after, pool)
  assert not beam.alive.any()


def test_what_is_no_log_probability_makes_no_tree_wrong():
  """Rounding may give a log-probability a little above 0, and negative zeros; a poisoned row gives NaN."""
  tiny = jnp.asarray([[[1e-7, -0., 0.]] * 3] * 2)
  ids = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 3, 3))
  first = jnp.asarray([[-0., 1e-7, -.5], [jnp.nan, -jnp.inf, -1.]])
  pool, beam = start(ids[:, 0], first, 3)
  for _ in range(2):
    pool, beam = expand(pool, beam, ids, tiny)
  tree, places = rerank(pool, jnp.zeros(2, jnp.int32), 8)
  assert (pool.scores <= 0).all() and tree.size.tolist() == [8, 8]
  # Row 0: equal scores everywhere but at the third child, so the first places. Row 1: below its only child.
  assert places[0].tolist() == [-1, 0, 1, 3, 4, 5, 6, 7] and tree.parents[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
  assert tree.tokens[1, :5].tolist() == [0, 2, 0, 1, 2] and tree.parents[1, :5].tolist() == [0, 0, 1, 1, 1]
  assert (tree.parents < jnp.maximum(jnp.arange(8), 1)).all()


def test_expected_tokens_and_growth_by_them(grown):
  """OPT-Tree: another level is grown while the last one added more than a threshold."""
  laws, pool, _ = grown
  found = np.asarray(expected_tokens(pool, NODES))
  gains = np.zeros((len(laws), DEPTH + 1))
  for row, law_of in enumerate(laws):
    worth = [1.0]
    for depth in range(1, DEPTH + 1):
      wanted, _ = eagle2(law_of, WIDTH, depth)
      worth.append(1 + sum(math.exp(wanted[i][1]) for i in chosen(wanted, NODES)))
    np.testing.assert_allclose(found[row], worth[-1], rtol=1e-6)
    gains[row, 1:] = np.diff(worth)
  assert expected_tokens(pool, 1).tolist() == [1] * len(laws)

  threshold, before = .3, np.ones(len(laws))
  pool, beam = start(*top([law_of(()) for law_of in laws]), DEPTH)
  for _ in range(1, DEPTH):
    now = expected_tokens(pool, NODES)
    log_q = [[law_of(path) for path in paths] for law_of, paths in zip(laws, paths_of(pool, beam))]
    pool, beam = expand(pool, beam, *top(log_q), now - before > threshold)
    before = now
  tree, places = jax.device_get(rerank(pool, pending(len(laws)), NODES))
  stops = [next((d for d in range(1, DEPTH) if gains[row, d] <= threshold), DEPTH) for row in range(len(laws))]
  for row, law_of in enumerate(laws):
    wanted, _ = eagle2(law_of, WIDTH, stops[row])
    check_tree(tree, places, wanted, chosen(wanted, NODES), row)
  assert len(set(stops)) > 2


def test_children_are_the_most_probable():
  rng = np.random.default_rng(3)
  logits = np.round(rng.normal(size=(2, 3, 1000)), 1).astype(np.float32) * 4
  logits[0, 1, 5:] = -np.inf
  ids, log_q = jax.jit(growth.children, static_argnums=1)(jnp.asarray(logits), 10)
  wanted = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
  order = np.argsort(-logits, axis=-1, kind="stable")[..., :10]
  assert np.array_equal(ids, order) and ids.dtype == jnp.int32
  np.testing.assert_allclose(log_q, np.take_along_axis(wanted, order, -1), rtol=1e-5, atol=1e-5)
  assert (log_q <= 0).all() and (log_q[0, 1, 5:] == -jnp.inf).all()


def test_growth_in_a_loop_stays_on_the_device(grown):
  """Levels counted by a traced number: the same tree as level by level, in one program that never asks the host."""
  laws, _, _ = grown
  rows = len(laws)
  # The drafter as a table over the last token of a path, so that it can run inside the loop.
  table = np.stack([[law_of((token,)) for token in range(VOCABULARY)] for law_of in laws]).astype(np.float32)
  ids, log_q = top(table)

  @jax.jit
  def whole(ids, log_q, pending):
    of = lambda tokens: [jnp.take_along_axis(x, tokens[:, :, None], axis=1) for x in (ids, log_q)]
    pool, beam = growth.start(ids[:, 0], log_q[:, 0], DEPTH)
    pool, beam = jax.lax.while_loop(lambda s: (s[1].level < DEPTH) & s[1].alive.any(),
                                    lambda s: growth.expand(*s, *of(s[1].tokens)), (pool, beam))
    tree, places = growth.rerank(pool, pending, NODES)
    return tree, places, tree_lib.ancestors(tree.parents, DEPTH), growth.fed_slots(pool, places)

  compiled = whole.lower(ids, log_q, pending(rows)).compile()
  assert not HOST.search(compiled.as_text())
  tree, places, _, _ = jax.device_get(compiled(ids, log_q, pending(rows)))
  for row in range(rows):
    wanted, _ = eagle2(lambda path: table[row, path[-1] if path else 0], WIDTH, DEPTH)
    check_tree(tree, places, wanted, chosen(wanted, NODES), row)


def test_refusals():
  ids, log_q = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2))
  with pytest.raises(ValueError, match="depth=0: a tree needs 1 level"):
    growth.start(ids, log_q, 0)
  pool, beam = growth.start(ids, log_q, 1)
  with pytest.raises(ValueError, match="depth=1: this pool holds the root's children only"):
    growth.expand(pool, beam, ids[:, None], log_q[:, None])
  with pytest.raises(ValueError, match="nodes=0: a tree has 1 node"):
    growth.rerank(pool, jnp.zeros(1, jnp.int32), 0)
  with pytest.raises(AssertionError):
    growth.start(ids, log_q[0], 2)
