"""Draft rules: what they enumerate is a law, by a slow walk too, and what they record is what they drew from."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import tree as tree_lib
from specjax.theory import drafts
from specjax.theory import tables as tables_lib

pytestmark = pytest.mark.usefixtures("quick_compile")
TABLES = tables_lib.random_tables(2, 3, 3, zeros=.15)
SHAPES = {"chain": (0, 0, 1, 2), "siblings": (0, 0, 0, 0), "tree": (0, 0, 1, 0, 3)}


@jax.jit
def rows(q):
  nodes = jnp.arange(q.probs.shape[1])
  return jax.vmap(lambda node: q.row(jnp.full(q.probs.shape[0], node), 3), out_axes=1)(nodes)


@pytest.mark.parametrize("name", drafts.NAMES)
def test_every_rule(name):
  for shape in SHAPES.values():
    dense, sparse = (drafts.named(name, shape, sparse=sparse).outcomes(TABLES, tables_lib.Setting(), np.float32)
                     for sparse in (False, True))
    assert dense.probability.sum() == pytest.approx(1, abs=1e-5) and dense.probability.min() > 0
    assert len(np.unique(dense.tokens[:, 1:], axis=0)) == len(dense.tokens) or name.startswith("ragged")
    assert dense.sampled.any() == (name not in drafts.POINTS)
    for outcomes in (dense, sparse) if dense.sampled.any() else ():
      tree = outcomes.tree(np.float32)
      assert tree.replacement == ("without_replacement" not in name)
      read = outcomes.q < drafts.POISON
      np.testing.assert_allclose(np.asarray(rows(tree.q))[read], outcomes.q[read], atol=1e-7)
  if name in ("mixture", "ragged_without_replacement"):
    tree_lib.check(sparse.tree(np.float32), 3)


def test_independent_and_without_replacement_by_a_slow_walk():
  laws = tables_lib.conditionals(TABLES.draft, tables_lib.Setting())
  parents = SHAPES["tree"]
  for name in ("iid", "without_replacement"):
    found = drafts.named(name, parents).outcomes(TABLES, tables_lib.Setting())
    seen = {tuple(row): mass for row, mass in zip(found.tokens[:, 1:].tolist(), found.probability, strict=True)}
    for a, a_child, b, b_child in itertools.product(range(3), repeat=4):
      root = laws[0][0]
      mass = root[a] * laws[1][a][a_child] * root[b] * laws[1][b][b_child]
      if name == "without_replacement":
        mass *= (a != b) / (1 - root[a])
      assert seen.get((a, a_child, b, b_child), 0) == pytest.approx(mass, abs=1e-12)


def test_depths():
  np.testing.assert_array_equal(drafts.depths((0, 0, 1, 2, 1, 0)), [0, 1, 2, 3, 2, 1])
  np.testing.assert_array_equal(drafts.depths([[0, 0, 1], [0, 0, 0]]), [[0, 1, 2], [0, 1, 1]])


def test_greedy_multi_records_the_rest():
  tables = tables_lib.toy("C", 1)
  found = drafts.named("greedy_multi", (0, 0, 0, 0)).outcomes(tables, tables_lib.Setting())
  np.testing.assert_array_equal(found.tokens[:, 1:], [[3, 2, 0], [3, 2, 1]])
  np.testing.assert_allclose(found.q[:, 0], [[1 / 3, 2 / 3, 0, 0]] * 2)
  np.testing.assert_array_equal(found.sampled[:, 1:], [[False, False, True]] * 2)


def test_what_is_left_of_a_short_support():
  tables = tables_lib.context_free((.5, .3, .2), (.5, .5, 0), 1)
  found = drafts.named("without_replacement", (0, 0, 0, 0)).outcomes(tables, tables_lib.Setting())
  np.testing.assert_array_equal(found.tokens[:, 1:], [[0, 1, 0], [1, 0, 1]])
  np.testing.assert_array_equal(found.sampled[:, 1:], [[True, True, False]] * 2)


def test_ragged_rows():
  tables = tables_lib.random_tables(8, 3, 3)
  laws = tables_lib.conditionals(tables.draft, tables_lib.Setting())
  found = drafts.named("ragged", (0, 0, 1, 0, 3)).outcomes(tables, tables_lib.Setting())
  depth, context = found.contexts()
  seen = set()
  for row in range(len(found.tokens)):
    size = found.size[row]
    for node in range(size):
      children = [i for i in range(1, size) if found.parents[row, i] == node]
      wanted = (2, 1, 0)[depth[row, node]] if laws[depth[row, node]][context[row, node]].max() >= .5 else 0
      assert len(children) == wanted
      seen.add((depth[row, node], wanted))
  assert {(1, 0), (1, 1)} <= seen
