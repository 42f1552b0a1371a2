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


step_uniform = jax.jit(keys_lib.step_uniform, static_argnums=2)
step_noise = jax.jit(keys_lib.step_noise, static_argnums=3)
position_noise = jax.jit(keys_lib.position_noise, static_argnums=2)


@pytest.mark.usefixtures("quick_compile_here")
def test_no_two_draws_share_a_key():
  """Of three rows, some positions and every purpose; the draws of a step with their indices: all distinct key data."""
  rows = keys_lib.row_keys(KEY, jnp.asarray([0, 1, 77]))
  places = jnp.asarray([0, 1, 2, 3, 4, 5, 31, 1000])
  purposes = (keys_lib.TOKEN, keys_lib.NOISE, keys_lib.DRAFT, keys_lib.STOP, keys_lib.RESIDUAL)
  assert len(set(purposes)) == 5

  @jax.jit
  def data(rows):
    over_all = lambda key_of, indices: jax.vmap(jax.vmap(jax.vmap(jax.vmap(
        key_of, (None, None, None, 0)), (None, None, 0, None)), (None, 0, None, None)), (0, None, None, None))(
            rows, places, jnp.asarray(purposes), indices).ravel()
    tokens = over_all(lambda key, place, purpose, _: keys_lib.position_key(key, place, purpose), jnp.arange(1))
    steps = over_all(keys_lib.step_key, jnp.arange(8))
    return jax.random.key_data(jnp.concatenate([rows, tokens, steps]))

  found = np.asarray(data(rows))
  assert len(found) == 3 + 3 * 8 * 5 * (1 + 8)
  assert len({tuple(x) for x in found.tolist()}) == len(found)


@pytest.mark.usefixtures("quick_compile_here")
def test_draws_of_a_step_are_keyed_by_root_purpose_and_index():
  """The documented schedule: row, root, purpose, index."""
  rows, root = keys_lib.row_keys(KEY, jnp.asarray([6, 7])), jnp.asarray([11, 12])
  found = np.asarray(step_uniform(rows, root, keys_lib.STOP))
  for row in range(2):
    key = KEY
    for part in ((6, 7)[row], (11, 12)[row], keys_lib.STOP, 0):
      key = jax.random.fold_in(key, part)
    bits = int(jax.random.bits(key, dtype=jnp.uint32))
    assert found[row] == np.float32((bits >> 9) + 0.5) / np.float32(2 ** 23)


@pytest.mark.usefixtures("quick_compile_here")
def test_draws_of_steps_and_purposes_differ():
  rows = keys_lib.row_keys(KEY, jnp.asarray([1, 1]))
  seen = [np.asarray(step_uniform(rows, jnp.asarray(roots), purpose))
          for purpose in (keys_lib.STOP, keys_lib.RESIDUAL) for roots in ([4, 5], [5, 6], [6, 4])]
  np.testing.assert_array_equal(seen[0][1], seen[1][0])  # the row and the root alone
  assert len(np.unique(seen)) == 2 * 3
  noise = np.asarray(step_noise(rows, jnp.asarray([4, 5]), jnp.asarray([[0, 1, 2], [2, 1, 0]]), 7))
  assert noise.shape == (2, 3, 7) and len(np.unique(noise)) == 42
  again = np.asarray(step_noise(rows, jnp.asarray([4, 4]), jnp.asarray([[0, 1, 2], [2, 1, 0]]), 7))
  np.testing.assert_array_equal(again[1, ::-1], again[0])


@pytest.mark.usefixtures("quick_compile_here")
def test_uniforms_gives_what_is_asked_for():
  rows, root = keys_lib.row_keys(KEY, jnp.asarray([1, 2])), jnp.asarray([9, 3])
  positions = jnp.asarray([[10, 11, 11], [4, 5, 6]])
  alone = dict(token=token_uniforms(rows, positions), noise=position_noise(rows, positions, 4),
               stop=step_uniform(rows, root, keys_lib.STOP), residual=step_uniform(rows, root, keys_lib.RESIDUAL))
  names = {keys_lib.TOKEN: "token", keys_lib.NOISE: "noise", keys_lib.STOP: "stop", keys_lib.RESIDUAL: "residual"}
  drawn = jax.jit(keys_lib.uniforms, static_argnums=(0, 4))
  for noisy in (True, False):
    found = drawn(tuple(names), rows, root, positions, 4, noisy)
    for name, wanted in alone.items():
      np.testing.assert_array_equal(getattr(found, name), wanted if noisy or name != "noise" else np.ones((2, 3, 4)))
  for purposes in [(), *((one,) for one in names), (keys_lib.STOP, keys_lib.RESIDUAL)]:
    shapes = jax.eval_shape(lambda p=purposes: keys_lib.uniforms(p, rows, root, positions, 4))
    for purpose, name in names.items():
      got = getattr(shapes, name)
      assert (got is not None and got.shape == alone[name].shape) if purpose in purposes else got is None
  assert alone["token"].shape == (2, 3) and alone["noise"].shape == (2, 3, 4) and alone["stop"].shape == (2,)


@pytest.mark.usefixtures("quick_compile_here")
def test_noise_depends_on_its_row_and_position_alone():
  rows = keys_lib.row_keys(KEY, jnp.asarray([5, 8]))
  noise = np.asarray(position_noise(rows, jnp.asarray([[3, 4, 4], [4, 3, 9]]), 16))
  turned = np.asarray(position_noise(rows[::-1], jnp.asarray([[3, 9, 4], [4, 3, 3]]), 16))
  np.testing.assert_array_equal(noise[0, 1], noise[0, 2])
  np.testing.assert_array_equal(noise[0, [0, 1]], turned[1, [1, 0]])
  np.testing.assert_array_equal(noise[1, [1, 2, 0]], turned[0])
  assert len(np.unique(np.concatenate([noise[0, :2], noise[1]]))) == 5 * 16


def test_noise_is_exponential():
  rows = keys_lib.row_keys(KEY, jnp.arange(4))
  noise = np.asarray(position_noise(rows, jnp.arange(32).reshape(4, 8), 8192), np.float64).ravel()
  count = noise.size  # 2^18
  assert noise.min() > 0 and np.isfinite(noise).all()
  for power, moment in enumerate((1, 2, 6), 1):
    deviation = np.sqrt((np.prod(np.arange(1, 2 * power + 1)) - moment ** 2) / count)
    assert abs((noise ** power).mean() - moment) < 5 * deviation  # a fixed key: this is no coin toss
  counts = np.histogram(np.exp(-noise), bins=16, range=(0, 1))[0]
  assert (abs(counts - count / 16) < 6 * np.sqrt(count / 16)).all()


@pytest.mark.parametrize("bits", [0, 1, 2, 1000, 2 ** 20 + 1, 2 ** 31, 2 ** 32 - 1])
def test_noise_is_fine_near_0(monkeypatch, bits):
  """32 bits: the least are apart by one part in 2^32, as a number of 23 bits could not say."""
  monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, bits, jnp.uint32))
  noise = keys_lib._exponentials(None, 3)
  assert noise.shape == (3,) and noise.dtype == jnp.float32 and (noise > 0).all() and jnp.isfinite(noise).all()
  wanted = -np.log1p(-min((bits + .5) / 2 ** 32, 1 - 2.0 ** -24))
  np.testing.assert_allclose(noise, wanted, rtol=3e-7)
