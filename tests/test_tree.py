"""Trees against a slow walk in NumPy: random shapes, ragged sizes, equal siblings, poisoned padding."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import tree as tree_lib

follow = jax.jit(tree_lib.follow, static_argnums=2)
ancestors = jax.jit(tree_lib.ancestors, static_argnums=1)


def random_trees(rng, rows, width, alphabet=3, degenerate=True):
  """Random topological trees; nodes at or beyond `size` are poison that would match if they were looked at."""
  parents = np.zeros((rows, width), np.int32)
  for i in range(1, width):
    parents[:, i] = rng.integers(0, i, rows)
  if degenerate:
    parents[0] = np.maximum(np.arange(width) - 1, 0)  # a chain
    parents[1] = 0                                    # a star
  tokens = rng.integers(0, alphabet, (rows, width)).astype(np.int32)
  size = rng.integers(1, width + 1, rows).astype(np.int32)
  return tree_lib.TokenTree(tokens=jnp.asarray(tokens), parents=jnp.asarray(parents), size=jnp.asarray(size))


def walk_up(parents, node):
  path = [node]
  while path[-1]:
    path.append(int(parents[path[-1]]))
  return path


def walk_down(tokens, parents, size, drawn, depth):
  """The slow walk that `follow` stands for."""
  path = [0]
  while True:
    children = [i for i in range(1, size) if parents[i] == path[-1] and tokens[i] == drawn[path[-1]]]
    if not children:
      break
    path.append(children[0])
  accepted = len(path) - 1
  return path + [path[-1]] * (depth + 1 - len(path)), accepted


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_ancestors_and_depths(width):
  tree = random_trees(np.random.default_rng(width), 40, width)
  parents = np.asarray(tree.parents)
  mask = np.asarray(ancestors(tree.parents, width - 1))
  depths = np.asarray(tree_lib.depths(mask))
  for row in range(40):
    for node in range(width):
      path = walk_up(parents[row], node)
      assert np.flatnonzero(mask[row, node]).tolist() == sorted(path)
      assert depths[row, node] == len(path) - 1
  assert depths.dtype == np.int32


def test_ancestors_needs_no_more_than_the_depth():
  parents = jnp.asarray([[0, 0, 0, 1, 1, 2, 2]], jnp.int32)
  assert np.array_equal(ancestors(parents, 2), ancestors(parents, 6))
  assert not np.array_equal(ancestors(parents, 1), ancestors(parents, 6))  # one less than the depth is not enough


@pytest.mark.parametrize("width,depth", [(1, 0), (1, 3), (2, 1), (5, 4), (5, 7), (8, 7)])
def test_follow_is_the_slow_walk(width, depth):
  rng = np.random.default_rng(100 * width + depth)
  rows, seen = 200, set()
  tree = random_trees(rng, rows, width)
  drawn = rng.integers(0, 3, (rows, width)).astype(np.int32)
  path, accepted = follow(tree, jnp.asarray(drawn), depth)
  assert path.shape == (rows, depth + 1)
  for row in range(rows):
    wanted, count = walk_down(*(np.asarray(x)[row] for x in (tree.tokens, tree.parents, tree.size)), drawn[row], depth)
    assert path[row].tolist() == wanted and accepted[row] == count
    seen.add(count)
  assert len(seen) >= min(width, 4)  # the sample holds deep and shallow walks


def test_follow_takes_the_first_of_equal_siblings_and_no_padding():
  make = lambda size: tree_lib.TokenTree(tokens=jnp.asarray([[9, 4, 4, 5, 6]], jnp.int32),
                                         parents=jnp.asarray([[0, 0, 0, 1, 2]], jnp.int32),
                                         size=jnp.asarray([size], jnp.int32))
  drawn = jnp.asarray([[4, 6, 6, 0, 0]], jnp.int32)  # 6 follows only the second 4
  path, accepted = follow(make(5), drawn, 2)
  assert path.tolist() == [[0, 1, 1]] and accepted.tolist() == [1]
  path, accepted = follow(make(3), jnp.asarray([[4, 5, 5, 0, 0]], jnp.int32), 2)  # node 3 would match, but is padding
  assert path.tolist() == [[0, 1, 1]] and accepted.tolist() == [1]
  path, accepted = follow(make(1), drawn, 2)
  assert path.tolist() == [[0, 0, 0]] and accepted.tolist() == [0]


def test_follow_does_not_let_the_root_follow_itself():
  # The root is its own parent: a draw that equals the pending token must not accept it.
  tree = tree_lib.chain(jnp.asarray([7], jnp.int32), jnp.asarray([[1, 2]], jnp.int32), jnp.asarray([2], jnp.int32))
  path, accepted = follow(tree, jnp.asarray([[7, 7, 7]], jnp.int32), 2)
  assert path.tolist() == [[0, 0, 0]] and accepted.tolist() == [0]


def test_chain():
  tree = tree_lib.chain(jnp.asarray([5, 6], jnp.int32), jnp.asarray([[1, 2, 3], [4, 4, 4]], jnp.int32),
                        jnp.asarray([3, 1], jnp.int32))
  assert tree.tokens.tolist() == [[5, 1, 2, 3], [6, 4, 4, 4]]
  assert tree.parents.tolist() == [[0, 0, 1, 2]] * 2
  assert tree.size.tolist() == [4, 2] and tree.width == 4
  assert tree.valid.tolist() == [[True] * 4, [True, True, False, False]]
  mask = ancestors(tree.parents, 3)
  assert np.array_equal(mask, np.broadcast_to(np.tril(np.ones((4, 4), bool)), (2, 4, 4)))


def test_root_only_is_a_chain_of_nothing():
  pending = jnp.asarray([5, 6], jnp.int32)
  tree = tree_lib.root_only(pending)
  other = tree_lib.chain(pending, jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), tree, other)
  assert tree.width == 1 and tree.size.tolist() == [1, 1]


def test_narrow_loses_no_valid_node():
  tree = random_trees(np.random.default_rng(7), 50, 8)
  tree = tree.replace(size=jnp.minimum(tree.size, 4))
  narrow = tree.narrow(4)
  drawn = jnp.asarray(np.random.default_rng(8).integers(0, 3, (50, 8)), jnp.int32)
  assert narrow.width == 4 and narrow.parents.shape == (50, 4)
  wide_path, wide_accepted = follow(tree, drawn, 3)
  path, accepted = follow(narrow, drawn[:, :4], 3)
  assert np.array_equal(path, wide_path) and np.array_equal(accepted, wide_accepted)
  assert np.asarray(accepted).max() >= 2


def test_shapes_are_checked():
  with pytest.raises(AssertionError):
    tree_lib.root_only(jnp.zeros((2, 1), jnp.int32))
  with pytest.raises(AssertionError):
    tree_lib.chain(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32), jnp.zeros(3, jnp.int32))
  with pytest.raises(AssertionError):
    tree_lib.follow(tree_lib.root_only(jnp.zeros(2, jnp.int32)), jnp.zeros((2, 2), jnp.int32), 1)
