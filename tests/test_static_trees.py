"""Shapes of static trees against Sequoia's dynamic program, written here as its recursion, and the published numbers."""
import functools

import numpy as np
import pytest

from specjax import static_trees

SEQUOIA = (.6, .2, .1, .05)


def best_value(p, nodes, depth):
  """The most tokens that a step with a tree of at most `nodes` nodes and `depth` levels emits: Sequoia's recursion over
  the number of nodes, the depth, and how many siblings stand before."""
  @functools.cache
  def tree(nodes, depth):
    return 1 + (forest(nodes - 1, depth - 1, 0) if depth else 0)

  @functools.cache
  def forest(nodes, depth, rank):
    if nodes == 0 or rank == len(p):
      return 0
    return max(0, *(p[rank] * tree(m, depth) + forest(nodes - m, depth, rank + 1) for m in range(1, nodes + 1)))

  return tree(nodes, depth)


def check_shape(shape):
  """Topological, siblings in the order of their ranks, without a gap."""
  seen = {}
  for node, (parent, rank) in enumerate(zip(*shape, strict=True)):
    if node:
      assert parent < node and rank == seen.get(parent, 0)
      seen[parent] = rank + 1
  assert shape.parents[0] == shape.ranks[0] == 0


@pytest.mark.parametrize("nodes, value", [(4, 2.176), (8, 2.7456), (16, 3.30936), (64, 4.420118)])
def test_the_published_values(nodes, value):
  shape = static_trees.best_first(SEQUOIA, nodes, 63)
  check_shape(shape)
  assert len(shape.parents) == nodes
  assert abs(static_trees.expected_tokens(*shape, SEQUOIA) - value) < 1e-6


def test_the_published_chain():
  chain = static_trees.fixed((1,) * 15)
  assert chain.parents == (0, *range(15)) and set(chain.ranks) == {0}
  assert abs(static_trees.expected_tokens(*chain, SEQUOIA) - 2.499295) < 1e-6
  assert static_trees.best_first((.6,), 16, 20) == chain


@pytest.mark.parametrize("seed", range(4))
def test_best_first_is_the_dynamic_program(seed):
  rng = np.random.default_rng(seed)
  p = np.sort(rng.dirichlet(np.ones(5)))[::-1][:rng.integers(1, 5)] * rng.uniform(.5, 1)
  for depth in (0, 1, 2, 4, 6):
    whole = static_trees.best_first(p, 64, depth)
    for nodes in (1, 2, 5, 17, 40, 64):
      shape = static_trees.best_first(p, nodes, depth)
      check_shape(shape)
      assert static_trees.depths(shape.parents).max() <= depth and len(shape.parents) <= nodes
      assert abs(static_trees.expected_tokens(*shape, p) - best_value(tuple(p), nodes, depth)) < 1e-12
      # The first nodes of a tree are the best tree of that size.
      assert shape == (whole.parents[:nodes], whole.ranks[:nodes])


def test_a_table_has_a_vector_for_each_depth():
  table = [[.5, .3], [.2, .1], [.9, 0.]]
  shape = static_trees.best_first(table, 7, 5)
  # Products: .5, .3; .1, .06, .05, .03; below them times .9: .09, .054, .045, .027; the root first.
  assert shape.parents == (0, 0, 0, 1, 3, 2, 5) and shape.ranks == (0, 0, 1, 0, 0, 0, 0)
  assert abs(static_trees.expected_tokens(*shape, table) - (1 + .5 + .3 + .1 + .09 + .06 + .054)) < 1e-12
  assert len(static_trees.best_first(table, 99, 5).parents) == 1 + 2 + 4 + 4  # no node that is never reached
  assert static_trees.depths(static_trees.best_first(table, 99, 2).parents).max() == 2
  assert static_trees.expected_tokens((0, 0, 0, 0), (0, 0, 1, 2), table) == 1.8  # nothing beyond the ranks,
  assert static_trees.expected_tokens((0, 0, 1, 2, 3), (0,) * 5, table) == 1 + .5 + .1 + .09  # or the depths


def test_fixed_is_level_by_level():
  shape = static_trees.fixed((3, 2, 1))
  assert shape.parents == (0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
  assert shape.ranks == (0, 0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0)
  check_shape(shape)


@pytest.mark.parametrize("draft_cost", [0, .02, .1, .5])
def test_sequoia_is_the_cheapest_over_sizes_and_depths(draft_cost):
  costs = {1: 1., 4: 1.1, 8: 1.3, 16: 2., 32: 3.5}
  shape = static_trees.sequoia(SEQUOIA, 24, 6, draft_cost, costs)
  cost_of = lambda nodes: costs[min(width for width in costs if width >= nodes)]
  wanted = min((depth * draft_cost + cost_of(nodes)) / best_value(SEQUOIA, nodes, depth)
               for nodes in range(1, 25) for depth in range(7))
  check_shape(shape)
  assert len(shape.parents) <= 24
  assert abs(static_trees.cost_per_token(shape, SEQUOIA, draft_cost, costs) - wanted) < 1e-12


def test_sequoia_drafts_more_the_cheaper_it_is_and_nothing_where_it_does_not_pay():
  costs = {1: 1., 4: 1.1, 8: 1.3, 16: 2.}
  depth = [int(static_trees.depths(static_trees.sequoia(SEQUOIA, 16, 8, cost, costs).parents).max())
           for cost in (0, .1, .3, 2)]
  assert depth == sorted(depth, reverse=True) and depth[0] > 3 and depth[-1] == 0
  assert static_trees.sequoia((.05,), 16, 8, .1, costs) == ((0,), (0,))


def test_levels_are_the_passes_of_a_drafter():
  shape = static_trees.Shape((0, 0, 1, 0, 3, 2, 3, 1), (0, 0, 0, 1, 0, 0, 1, 1))
  check_shape(shape)
  assert static_trees.depths(shape.parents).tolist() == [0, 1, 2, 1, 2, 3, 2, 2]
  assert static_trees.levels(shape.parents) == (
      ((0,), (2,), (1, 3)), ((1, 3), (2, 2), (2, 7, 4, 6)), ((2,), (1,), (5,)))
  assert static_trees.levels((0,)) == ()


@pytest.mark.parametrize("call, message", [
    (lambda: static_trees.best_first(SEQUOIA, 0, 3), "nodes=0, max_depth=3"),
    (lambda: static_trees.best_first(SEQUOIA, 4, -1), "nodes=4, max_depth=-1"),
    (lambda: static_trees.sequoia(SEQUOIA, 4, -1, .1, {1: 1.}), "max_depth=-1"),
    (lambda: static_trees.best_first((.6, .6), 4, 3), "at most one child"),
    (lambda: static_trees.best_first((.6, -.1), 4, 3), "it must be probabilities"),
    (lambda: static_trees.best_first((.6, np.nan), 4, 3), "it must be probabilities"),
    (lambda: static_trees.best_first((), 4, 3), "it must be probabilities"),
    (lambda: static_trees.fixed((2, 0)), r"branching=\(2, 0\)"),
    (lambda: static_trees.fixed(()), r"branching=\(\)"),
    (lambda: static_trees.depths((0, 2, 1)), "a parent comes before"),
    (lambda: static_trees.depths(()), "a parent comes before"),
    (lambda: static_trees.cost_per_token(static_trees.fixed((3, 3)), SEQUOIA, .1, {8: 1.}), "holds 13 nodes"),
    (lambda: static_trees.sequoia(SEQUOIA, 8, 2, -1, {1: 1., 8: 1.}), "draft_cost=-1"),
    (lambda: static_trees.sequoia(SEQUOIA, 8, 2, 1, {1: 1., 8: 0}), "positive costs by width"),
])
def test_refusals(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_a_tree_of_paths_is_the_one_that_the_paths_say():
  shape = static_trees.of_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0)])
  assert shape == ((0, 0, 0, 1, 2, 2, 3), (0, 0, 1, 0, 0, 1, 0))
  for wrong in ([(1,)], [(0, 0)], [(0,), (0,)], [()], [(0,), (0, 1)]):
    with pytest.raises(ValueError, match="path "):
      static_trees.of_paths(wrong)


def test_eagles_tree_is_the_published_one():
  check_shape(static_trees.EAGLE)
  assert np.bincount(static_trees.depths(static_trees.EAGLE.parents)).tolist() == [1, 4, 8, 8, 3, 2]
  assert static_trees.EAGLE.parents == (0,) * 5 + (1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7, 7, 8, 13, 13, 13, 21, 21)
