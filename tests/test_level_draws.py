"""Children of a level: order, repeats and counts, and the law of draws without replacement by enumeration."""
import itertools

import dummy_law
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys
from specjax import level_draws
from specjax import static_trees

COUNTS = (2, 1, 3)
ROWS = 4000

most_probable = jax.jit(level_draws.most_probable, static_argnums=1)
independent = jax.jit(level_draws.independent, static_argnums=2)
without_replacement = jax.jit(level_draws.without_replacement, static_argnums=2)


def laws(batch, vocabulary, seed=0):
  return np.random.default_rng(seed).dirichlet(np.ones(vocabulary), (batch, len(COUNTS))).astype(np.float32)


def in_order(weights, counts):
  """The greatest of f[B, N, V], node by node."""
  order = np.argsort(-weights, axis=-1, kind="stable")
  return np.concatenate([order[:, node, :count] for node, count in enumerate(counts)], axis=1)


@pytest.mark.parametrize("vocabulary", [5, 2000])
def test_points_and_races_are_in_order(vocabulary):
  law = laws(3, vocabulary)
  noise = np.random.default_rng(1).exponential(size=law.shape).astype(np.float32)
  assert np.array_equal(most_probable(jnp.asarray(law), COUNTS), in_order(law, COUNTS))
  drawn = without_replacement(jnp.asarray(law), jnp.asarray(noise), COUNTS)
  assert np.array_equal(drawn, in_order(law / noise, COUNTS)) and drawn.dtype == jnp.int32


def test_independent_draws_invert_the_law_of_their_parent():
  law = laws(3, 50)
  uniforms = np.random.default_rng(2).uniform(size=(3, sum(COUNTS))).astype(np.float32)
  drawn = independent(jnp.asarray(law), jnp.asarray(uniforms), COUNTS)
  below = np.cumsum(law.astype(np.float64), -1)
  parent = np.repeat(np.arange(len(COUNTS)), COUNTS)
  wanted = (below[:, parent] <= (uniforms * below[:, parent, -1])[..., None]).sum(-1)
  assert np.array_equal(drawn, wanted)


def test_the_law_of_ordered_draws_without_replacement():
  """Each draw from what earlier ones left, for every order, with the noise of a step as the key schedule gives it."""
  law = np.array([[.5, .3, .15, .05], [.25, .25, .5, 0], [.1, .2, .3, .4]], np.float32)

  @jax.jit
  def step_noise(key):
    rows = keys.row_keys(key, jnp.arange(ROWS, dtype=jnp.int32))
    index = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (ROWS, 3))
    return keys.step_noise(rows, jnp.full(ROWS, 9, jnp.int32), index, 4)

  noise = step_noise(jax.random.key(7))
  drawn = np.asarray(without_replacement(jnp.broadcast_to(law, (ROWS, *law.shape)), noise, COUNTS))
  counts, wanted = np.zeros((3, 64)), np.zeros((3, 64))
  first = np.concatenate([[0], np.cumsum(COUNTS)])
  for node, count in enumerate(COUNTS):
    here = drawn[:, first[node]:first[node + 1]]
    np.add.at(counts[node], here @ (4 ** np.arange(count)), 1)
    for order in itertools.permutations(range(4), count):
      left, chance = 1.0, 1.0
      for token in order:
        chance *= float(law[node, token]) / left
        left -= float(law[node, token])
      wanted[node, np.dot(order, 4 ** np.arange(count))] += chance
  np.testing.assert_allclose(wanted.sum(-1), 1, atol=1e-6)
  assert dummy_law.p_value(counts, wanted) > 1e-3
  assert dummy_law.p_value(counts, np.roll(wanted, 1, axis=0)) < 1e-6  # the test has power


def test_a_support_smaller_than_the_family_repeats_the_first_draw():
  law = np.zeros((1, 3, 1000), np.float32)
  law[0, 0, 700] = 1
  law[0, 1, [3, 9]] = .5
  law[0, 2, [4, 900]] = .9, .1
  noise = np.random.default_rng(3).exponential(size=law.shape).astype(np.float32)
  drawn = np.asarray(without_replacement(jnp.asarray(law), jnp.asarray(noise), COUNTS))[0]
  assert drawn[:2].tolist() == [700, 700] and drawn[2] in (3, 9)
  assert set(drawn[3:5]) == {4, 900} and drawn[5] == drawn[3]


def test_levels_give_the_counts():
  shape = static_trees.fixed((2, 3))
  (_, below) = static_trees.levels(shape.parents)
  law = laws(1, 8)[:, :2]
  tokens = np.zeros(len(shape.parents), np.int32)
  tokens[list(below.children)] = most_probable(jnp.asarray(law), below.counts)[0]
  for child in below.children:
    order = np.argsort(-law[0, below.nodes.index(shape.parents[child])])
    assert tokens[child] == order[shape.ranks[child]]


@pytest.mark.parametrize("counts", [(), (1, 1), (1, 0, 1), (1, 6, 1)])
def test_counts_that_do_not_fit(counts):
  law = jnp.asarray(laws(2, 5))
  with pytest.raises(ValueError, match="for 3 laws over 5 ids"):
    level_draws.most_probable(law, counts)
  with pytest.raises(ValueError, match="for 3 laws over 5 ids"):
    level_draws.without_replacement(law, law, counts)


def test_independent_draws_may_outnumber_the_ids():
  drawn = independent(jnp.ones((1, 1, 2)) / 2, jnp.asarray([[.2, .7, .4, .9]]), (4,))
  assert drawn.tolist() == [[0, 1, 0, 1]]
