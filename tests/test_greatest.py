"""The two-level search for the greatest entries against a stable sort."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import greatest

find = jax.jit(greatest.greatest, static_argnums=1)


@pytest.mark.parametrize("length, count", [(1, 1), (7, 7), (300, 3), (1001, 4), (4097, 128), (5000, 128), (50257, 10)])
def test_the_greatest_in_order(length, count):
  rng = np.random.default_rng(length)
  x = np.round(rng.normal(size=(3, 2, length)), 1).astype(np.float32)  # full of ties
  x[0, 0, rng.random(length) < .999] = -np.inf
  x[0, 1] = 2
  x[1, 0] = np.arange(length)  # the last block is filled up
  x[1, 1] = -np.inf
  values, ids = find(jnp.asarray(x), count)
  order = np.argsort(-x, axis=-1, kind="stable")[..., :count]
  assert np.array_equal(ids, order) and ids.dtype == jnp.int32
  assert np.array_equal(values, np.take_along_axis(x, order, -1))


@pytest.mark.parametrize("count", [0, 6])
def test_a_count_that_does_not_fit(count):
  with pytest.raises(ValueError, match=f"count={count}: allowed are 1 to 5"):
    greatest.greatest(jnp.zeros((2, 5)), count)
