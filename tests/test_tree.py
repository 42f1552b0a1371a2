"""Trees against a slow walk in NumPy: random shapes, ragged sizes, equal siblings, poisoned padding."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_laws
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


def test_padding_is_not_token_0():
  """Below the root a tree is padded with id 0, which a draw of 0 must not accept (as Medusa's own code does; EAGLE's
  pads with -1)."""
  tree = tree_lib.chain(jnp.asarray([7], jnp.int32), jnp.asarray([[1, 2]], jnp.int32), jnp.asarray([1], jnp.int32))
  tree = tree.widen(6)
  assert np.asarray(tree.tokens)[0, 3:].tolist() == np.asarray(tree.parents)[0, 3:].tolist() == [0, 0, 0]
  path, accepted = follow(tree, jnp.zeros((1, 6), jnp.int32), 2)
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


path_to = jax.jit(tree_lib.path_to, static_argnums=2)


@pytest.mark.parametrize("width, depth", [(1, 0), (1, 2), (5, 4), (8, 7), (8, 10)])
def test_path_to_is_the_way_up(width, depth):
  rng, rows = np.random.default_rng(50 + width), 60
  tree = random_trees(rng, rows, width)
  parents, levels = np.asarray(tree.parents), set()
  for _ in range(4):
    node = rng.integers(0, width, rows).astype(np.int32)
    node[:3] = 0, 0, width - 1  # the end of the chain, an end of the star
    path, level = path_to(tree, jnp.asarray(node), depth)
    assert path.shape == (rows, depth + 1) and path.dtype == level.dtype == jnp.int32
    for row in range(rows):
      wanted = walk_up(parents[row], node[row])[::-1] if node[row] else [0]
      assert level[row] == len(wanted) - 1
      assert path[row].tolist() == wanted + [node[row]] * (depth + 1 - len(wanted))
      levels.add(len(wanted) - 1)
  assert len(levels) >= min(width, 4)


def test_path_to_the_node_where_follow_ends_is_its_path():
  rng = np.random.default_rng(60)
  tree = random_trees(rng, 60, 8)
  path, accepted = follow(tree, jnp.asarray(rng.integers(0, 3, (60, 8)), jnp.int32), 7)
  again, level = path_to(tree, path[:, -1], 7)
  assert np.array_equal(path, again) and np.array_equal(accepted, level)


def sampled_tree():
  """Two rows of four nodes, drawn and chosen ones; the second row has a poisoned node behind its size."""
  q = np.full((2, 4, 5), .2, np.float32)
  q[:, 1] = (.5, .5, 0, 0, 0)
  q[:, 3] = 7  # not read: it has no sampled child
  return tree_lib.TokenTree(tokens=jnp.asarray([[3, 4, 1, 2], [3, 4, 0, 99]], jnp.int32),
                            parents=jnp.asarray([[0, 0, 1, 0], [0, 0, 1, 3]], jnp.int32), size=jnp.asarray([4, 3]),
                            sampled=jnp.asarray([[0, 1, 1, 0], [0, 1, 1, 1]], bool),
                            q=draft_laws.DenseLaw(jnp.asarray(q)))


def changed(tree, **at):
  """The tree with single entries changed: field=(index, value)."""
  for field, (index, value) in at.items():
    if field == "q":
      tree = tree.replace(q=draft_laws.DenseLaw(tree.q.probs.at[index].set(value)))
    else:
      tree = tree.replace(**{field: getattr(tree, field).at[index].set(value)})
  return tree


def test_check_passes_what_is_right():
  tree = sampled_tree()
  assert tree_lib.check(tree, 5) is tree
  points = tree.replace(sampled=None, q=None)
  assert tree_lib.check(points, 5) is points
  chosen = tree.replace(sampled=jnp.zeros((2, 4), bool), q=None)
  assert tree_lib.check(chosen, 5) is chosen
  tree_lib.check(changed(tree, q=((0, 0, 0), .2005)), 5)  # rounding
  ids = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 4, 5))
  tree_lib.check(tree.replace(q=draft_laws.SparseLaw(ids, tree.q.probs)), 5)


@pytest.mark.parametrize("change, message", [
    (dict(parents=((0, 2), 2)), "node 2 of row 0 has parent 2; a parent comes before"),
    (dict(parents=((1, 1), -1)), "node 1 of row 1 has parent -1"),
    (dict(tokens=((0, 3), 5)), "node 3 of row 0 drafts id 5; ids are 0 to 4"),
    (dict(tokens=((1, 1), -1)), "node 1 of row 1 drafts id -1"),
    (dict(size=((1,), 0)), "row 1 has size 0; allowed are 1 to 4"),
    (dict(size=((0,), 5)), "row 0 has size 5; allowed are 1 to 4"),
    (dict(size=((1,), 4)), "node 3 of row 1 has parent 3"),  # the poison, if it were valid
    (dict(tokens=((0, 2), 3)), "node 2 of row 0 was drawn as id 3, to which q gives probability 0"),
    (dict(q=((1, 0, 2), .3)), "q at node 0 of row 1 sums to 1.1"),
    (dict(q=((0, 1), jnp.asarray([.8, .5, -.3, 0, 0]))), "q at node 1 of row 0 sums to 1 and its least entry is -0.3"),
    (dict(q=((0, 1), 0.)), "q at node 1 of row 0 sums to 0"),
])
def test_check_names_what_is_wrong(change, message):
  with pytest.raises(ValueError, match=message):
    tree_lib.check(changed(sampled_tree(), **change), 5)


def test_check_refuses_a_sparse_law_that_names_an_id_twice():
  tree = sampled_tree()
  ids = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 4, 5))
  tree = tree.replace(q=draft_laws.SparseLaw(ids, tree.q.probs))
  with pytest.raises(ValueError, match="q at node 0 of row 1 names ids twice"):
    tree_lib.check(tree.replace(q=tree.q.replace(ids=ids.at[1, 0, 3].set(2))), 5)
  tree_lib.check(tree.replace(q=tree.q.replace(ids=ids.at[:, 1, 4].set(0))), 5)  # an unused place may


def test_check_refuses_sampled_nodes_without_q():
  with pytest.raises(ValueError, match="sampled nodes but no q"):
    tree_lib.check(sampled_tree().replace(q=None), 5)


@pytest.mark.parametrize("nodes", [3, 4])
def test_chain_with_q(nodes):
  """q of the drafted tokens' parents alone, or of all nodes."""
  probs = jnp.asarray(np.random.default_rng(9).dirichlet(np.ones(5), (2, nodes)), jnp.float32)
  tree = tree_lib.chain(jnp.asarray([5, 6], jnp.int32), jnp.asarray([[1, 2, 3], [4, 4, 4]], jnp.int32),
                        jnp.asarray([3, 1], jnp.int32), draft_laws.DenseLaw(probs))
  assert tree.sampled.tolist() == [[False, True, True, True]] * 2
  assert tree.q.probs.shape == (2, 4, 5) and np.array_equal(tree.q.probs[:, :nodes], probs)
  for node in range(1, 4):
    assert np.array_equal(tree.q.row(tree.parents[:, node], 5), probs[:, node - 1])
  assert tree_lib.check(tree, 5) is tree and tree.replacement


def test_drafted_are_the_valid_ones_but_the_root():
  assert sampled_tree().drafted.tolist() == [[False, True, True, True], [False, True, True, False]]
  assert tree_lib.root_only(jnp.zeros(2, jnp.int32)).drafted.tolist() == [[False]] * 2


def test_narrow_and_widen_keep_what_was_drawn():
  tree = sampled_tree().replace(replacement=False)
  wide, narrow = tree.widen(6), tree.narrow(3)
  jax.tree.map(np.testing.assert_array_equal, wide.narrow(4), tree)
  assert wide.size.tolist() == [4, 3] and not (wide.valid | wide.sampled)[:, 4:].any()
  assert wide.sampled.shape == (2, 6) and wide.q.probs.shape == (2, 6, 5) and not wide.replacement
  assert (wide.parents[:, 4:] == 0).all() and (wide.tokens[:, 4:] == 0).all()
  assert narrow.sampled.tolist() == [[False, True, True]] * 2 and np.array_equal(narrow.q.probs, tree.q.probs[:, :3])
  assert not narrow.replacement and narrow.parents.tolist() == [[0, 0, 1]] * 2
  points = tree.replace(sampled=None, q=None)
  assert points.widen(6).sampled is None and points.narrow(2).q is None
