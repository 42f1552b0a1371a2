"""The parts of a layer against plain NumPy in float64, with everything that must not be read set to garbage."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import layers

GARBAGE = 1e9
RNG = np.random.default_rng


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 9])
def test_linear(monkeypatch, tokens, backend):
  """With the barriers of a CPU and without, with and without a bias."""
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  rng = RNG(0)
  columns, weight, bias = (rng.standard_normal(s).astype(np.float32) for s in ((13, tokens), (7, 13), (7,)))
  wanted = weight.astype(np.float64) @ columns.astype(np.float64)
  for given in (None, bias):
    out = jax.jit(lambda *args: layers.linear(*args))(weight, columns, given)
    assert out.shape == (7, tokens) and out.dtype == jnp.float32
    np.testing.assert_allclose(out, wanted if given is None else wanted + bias[:, None], atol=1e-5)


def test_linear_reads_the_weight_first_on_a_cpu():
  """The barriers are what keeps XLA from turning the product back; one token needs none."""
  text = lambda tokens: str(jax.make_jaxpr(layers.linear)(jnp.zeros((4, 8)), jnp.zeros((8, tokens))))
  if jax.default_backend() == "cpu":
    assert text(4).count("optimization_barrier") == 2
  assert "optimization_barrier" not in text(1)


def test_rms_norm():
  x, weight = RNG(1).standard_normal((16, 6)) * 5, RNG(2).standard_normal(16)
  wanted = x / np.sqrt((x ** 2).mean(0) + 1e-2) * weight[:, None]
  out = layers.rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-2)
  np.testing.assert_allclose(out, wanted, atol=1e-5)
  half = layers.rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), 1e-2)
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(jnp.float32), wanted, atol=0.1)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotate_turns_pairs_by_position_times_frequency(layout):
  """As complex numbers: pair i of a head is multiplied by exp(1j * position * theta ** (-2 i / C))."""
  x = RNG(3).standard_normal((3, 8, 2, 5))  # heads, C, B, T
  positions = np.array([[0, 1, 2, 3, 4], [7, 7, 100, 2047, 5]], np.int32)
  pairs = (slice(0, 4), slice(4, 8)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
  angle = 1000.0 ** (-np.arange(4) / 4)[:, None, None] * positions
  turned = (x[:, pairs[0]] + 1j * x[:, pairs[1]]) * np.exp(1j * angle)
  wanted = np.empty_like(x)
  wanted[:, pairs[0]], wanted[:, pairs[1]] = turned.real, turned.imag
  cos, sin = layers.rotary_angles(jnp.asarray(positions), 8, 1000.0)
  assert cos.shape == sin.shape == (4, 2, 5) and cos.dtype == jnp.float32
  np.testing.assert_allclose(layers.rotate(jnp.asarray(x, jnp.float32), cos, sin, layout), wanted, atol=2e-4)


def test_the_layouts_are_one_rotation_of_permuted_elements():
  x = jnp.asarray(RNG(4).standard_normal((2, 8, 1, 4)), jnp.float32)
  cos, sin = layers.rotary_angles(jnp.arange(4, dtype=jnp.int32)[None], 8, 10000.0)
  order = np.arange(8).reshape(2, 4).T.ravel()  # half -> interleaved
  half = layers.rotate(x, cos, sin, "half")
  np.testing.assert_array_equal(layers.rotate(x[:, order], cos, sin, "interleaved"), half[:, order])
  assert not np.allclose(layers.rotate(x, cos, sin, "interleaved"), half)


def attend(query, cached_keys, cached_values, keys, values, visible, mask):
  """`layers.attend`, with all of keys and values as [B, K, S, C]."""
  to = lambda x: jnp.asarray(x, jnp.float32)
  flip = lambda x: jnp.swapaxes(to(x), 2, 3)
  return jax.jit(layers.attend)(to(query), flip(cached_keys), to(cached_values), flip(keys), to(values), visible, mask)


def dense(query, cached_keys, cached_values, keys, values, lengths, mask):
  """One softmax over what each node sees, row by row and node by node."""
  batch, kv, group, nodes, _ = query.shape
  out = np.zeros_like(query)
  for b in range(batch):
    for t in range(nodes):
      seen = np.flatnonzero(mask[b, t])
      for k in range(kv):
        all_keys = np.concatenate([cached_keys[b, k, :lengths[b]], keys[b, k, seen]])
        all_values = np.concatenate([cached_values[b, k, :lengths[b]], values[b, k, seen]])
        for g in range(group):
          scores = all_keys @ query[b, k, g, t]
          weights = np.exp(scores - scores.max())
          out[b, k, g, t] = weights @ all_values / weights.sum()
  return out


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 3, 12), (11, 1, 6)], ids=str)
@pytest.mark.parametrize("nodes", [1, 5])
def test_attend_is_dense_attention_over_what_is_visible(lengths, nodes):
  """Ragged rows, an empty cache, a full one; unfilled slots and hidden nodes hold garbage."""
  rng = RNG(5)
  kv, group, slots, width = 2, 3, 12, 4
  query = rng.standard_normal((3, kv, group, nodes, width))
  cached_keys, cached_values = rng.standard_normal((2, 3, kv, slots, width))
  keys, values = rng.standard_normal((2, 3, kv, nodes, width))
  mask = np.tril(rng.uniform(size=(3, nodes, nodes)) < 0.5) | np.eye(nodes, dtype=bool)
  wanted = dense(query, cached_keys, cached_values, keys, values, lengths, mask)
  for b, length in enumerate(lengths):
    cached_keys[b, :, length:] = GARBAGE
    cached_values[b, :, length:] = -GARBAGE
  visible = np.arange(slots)[None] < np.array(lengths)[:, None]
  out = attend(query, cached_keys, cached_values, keys, values, visible, mask)
  np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_attend_does_not_read_hidden_nodes():
  rng = RNG(6)
  query = rng.standard_normal((1, 1, 1, 3, 4))
  keys, values = rng.standard_normal((2, 1, 1, 3, 4))
  cached = jnp.zeros((1, 1, 2, 4))
  mask = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
  visible = np.zeros((1, 2), bool)
  before = np.asarray(attend(query, cached, cached, keys, values, visible, mask))
  keys[0, 0, 1], values[0, 0, 1] = GARBAGE, GARBAGE
  after = np.asarray(attend(query, cached, cached, keys, values, visible, mask))
  np.testing.assert_array_equal(before[..., [0, 2], :], after[..., [0, 2], :])


def test_attend_with_nothing_to_see_is_finite():
  """Padding rows may see nothing; NaN there would spread."""
  ones = jnp.ones((1, 1, 2, 4))
  out = attend(ones[:, :, None], ones, ones, ones, ones, np.zeros((1, 2), bool), np.zeros((1, 2, 2), bool))
  assert np.isfinite(np.asarray(out)).all()


def test_attend_survives_large_scores():
  big = jnp.full((1, 1, 2, 4), 100.0)
  out = attend(big[:, :, None], big, big, big, big, np.ones((1, 2), bool), np.ones((1, 2, 2), bool))
  np.testing.assert_allclose(out, 100.0)
