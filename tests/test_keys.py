"""The randomness of a row: what a draw depends on, what it does not, and that it never leaves (0, 1)."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys as keys_lib

KEY = jax.random.key(3)
ROWS, PLACES = 4, 32  # every call is padded to this shape: one program
token_uniforms = jax.jit(keys_lib.token_uniforms)


def uniforms(seeds, positions, key=KEY):
  rows = keys_lib.row_keys(key, jnp.asarray([*seeds, *[77] * (ROWS - len(seeds))], jnp.int32))
  padded = np.full((ROWS, PLACES), 999, np.int32)
  padded[:len(seeds), :len(positions)] = positions
  return np.asarray(token_uniforms(rows, jnp.asarray(padded)))[:len(seeds), :len(positions)]


def test_a_row_is_independent_of_its_batch():
  together = uniforms([4, 0, 9, 4], range(20))
  for row, seed in enumerate([4, 0, 9, 4]):
    np.testing.assert_array_equal(together[row], uniforms([seed], range(20))[0])
  assert (together[0] != together[1]).all() and (together[0] != together[2]).all()


def test_a_draw_is_keyed_by_its_position_alone():
  """However a position is reached, as node 0 of one step or node 5 of another, its number is the same."""
  straight = uniforms([1], range(32))[0]
  np.testing.assert_array_equal(uniforms([1], range(31, -1, -1))[0], straight[::-1])
  np.testing.assert_array_equal(uniforms([1], [7, 7, 8, 7])[0], straight[[7, 7, 8, 7]])
  assert len(set(straight.tolist())) == 32


def test_rows_of_one_call_may_stand_at_different_positions():
  got = uniforms([0, 1], np.asarray([[5, 6], [50, 51]]))
  np.testing.assert_array_equal(got[0], uniforms([0], [5, 6])[0])
  np.testing.assert_array_equal(got[1], uniforms([1], [50, 51])[0])


def test_another_key_is_another_stream():
  assert (uniforms([0], range(16)) != uniforms([0], range(16), jax.random.key(4))).all()


def test_the_key_schedule_is_the_documented_one():
  """fold_in(key, seed), then the position, then the purpose; a change here changes everybody's text."""
  key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(KEY, 6), 11), keys_lib.TOKEN)
  bits = int(jax.random.bits(key, dtype=jnp.uint32))
  assert uniforms([6], [11])[0, 0] == np.float32((bits >> 9) + 0.5) / np.float32(2 ** 23)


@pytest.mark.parametrize("bits,wanted", [(0, 2.0 ** -24), (2 ** 32 - 1, 1 - 2.0 ** -24), (2 ** 31, 0.5 + 2.0 ** -24)])
def test_the_extreme_bits_stay_inside(monkeypatch, bits, wanted):
  monkeypatch.setattr(jax.random, "bits", lambda key, dtype: jnp.uint32(bits))
  u = keys_lib._uniform(None)
  assert u.dtype == jnp.float32 and float(u) == wanted
  assert 0.0 < float(u) < 1.0


def test_uniforms_are_uniform_and_inside():
  u = np.concatenate([uniforms(range(4), range(at, at + PLACES)).ravel() for at in range(0, 8192, PLACES)])
  assert u.dtype == np.float32 and u.min() > 0 and u.max() < 1
  counts = np.histogram(u, bins=16, range=(0, 1))[0]
  assert (abs(counts - u.size / 16) < 6 * np.sqrt(u.size / 16)).all()  # a fixed key: this is no coin toss


def test_seeds_have_one_axis():
  with pytest.raises(AssertionError):
    keys_lib.row_keys(KEY, jnp.zeros((2, 2), jnp.int32))
