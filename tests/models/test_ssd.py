"""The dual form and the carried state beside the recurrence spelt out in float64, path by path."""
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import recurrent_cache
from specjax.models import ssd

B, G, R, P, N = 2, 2, 3, 4, 5


def drawn(nodes, strength, seed=0):
  """What `nodes` nodes bring, the committed state, and queries; decays of `strength` on average."""
  rng = np.random.default_rng(seed)
  of = lambda *shape: rng.standard_normal(shape)
  decay = -strength * rng.exponential(size=(B, nodes, G, R))
  return of(B, G, R, P, N), of(B, nodes, G, N), of(B, nodes, G, N), of(B, nodes, G, R, P), decay


def walked(state, keys, inputs, decay, path):
  """The state behind the nodes of a path, one after the other."""
  for i in path:
    state = np.exp(decay[:, i])[..., None, None] * state + np.einsum("bgrp,bgn->bgrpn", inputs[:, i], keys[:, i])
  return state


@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0, 300.0])
def test_every_node_reads_the_state_behind_its_path(strength):
  """A random tree of 40 nodes; decays that keep nearly all, and that leave nothing that a float32 holds."""
  rng, nodes = np.random.default_rng(1), 40
  parents = [-1, *(int(rng.integers(max(0, i - 3), i)) for i in range(1, nodes))]
  paths = []
  for i, parent in enumerate(parents):
    paths.append([*(paths[parent] if parent >= 0 else []), i])
  mask = np.zeros((nodes, nodes), bool)
  for i, path in enumerate(paths):
    mask[i, path] = True
  state, queries, keys, inputs, decay = drawn(nodes, strength)
  seen, f32 = jnp.broadcast_to(mask, (B, nodes, nodes)), lambda x: jnp.asarray(x, jnp.float32)
  out = ssd.outputs(f32(state), f32(queries), f32(keys), f32(inputs), ssd.reach(f32(decay), seen), seen)
  for i, path in enumerate(paths):
    wanted = np.einsum("bgrpn,bgn->bgrp", walked(state, keys, inputs, decay, path), queries[:, i])
    np.testing.assert_allclose(out[..., i], wanted, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("strength", [0.01, 1.0, 300.0])
def test_a_carried_state_is_the_one_that_was_walked(strength):
  """256 nodes, a prefill's longest chunk, of which one row commits all and the other 2."""
  state, _, keys, inputs, decay = drawn(256, strength)
  taps = np.arange(B * 256 * 2, dtype=np.float32).reshape(B, 256, 2)
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  nodes = recurrent_cache.Nodes(taps=f32(taps), inputs=f32(inputs), keys=f32(keys), decay=f32(decay), reach=f32(decay))
  layer = recurrent_cache.LayerState(state=f32(state), tail=-jnp.ones((B, 3, 2)))
  after = recurrent_cache.carry(layer, nodes, jnp.asarray([256, 2]))
  for row, count in enumerate((256, 2)):
    wanted = walked(state, keys, inputs, decay, range(count))[row]
    np.testing.assert_allclose(after.state[row], wanted, atol=1e-5 * np.abs(wanted).max())
  np.testing.assert_array_equal(after.tail[0], taps[0, -3:])
  np.testing.assert_array_equal(after.tail[1], [[-1, -1], *taps[1, :2]])


def test_a_convolution_follows_the_path_and_then_the_text():
  """Of a node its ancestors, nearest last, then the committed tail; nodes of an earlier pass stand in front."""
  #        nodes: 0 and 1 of an earlier pass, 1 unseen; 2 below 0, 3 below 0, 4 below 2
  mask = jnp.asarray([[1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 1, 0, 1]], bool)[None]
  places = np.asarray(ssd.sources(mask, 4))[0]
  tail = lambda back: 3 - back  # the tail's three, the last one 1 back
  node = lambda i: 3 + i
  assert places.tolist() == [[tail(2), tail(1), node(0), node(2)], [tail(2), tail(1), node(0), node(3)],
                             [tail(1), node(0), node(2), node(4)]]
  weight = jnp.asarray([[1.0, 10.0, 100.0, 1000.0]])
  out = ssd.convolve(jnp.asarray([[[7.0], [8.0], [9.0]]]), jnp.arange(5.0).reshape(1, 5, 1), jnp.asarray(places)[None],
                     weight, jnp.asarray([0.5]))
  assert out[0, :, 0].tolist() == [98.5 + 0 + 2000, 98.5 + 0 + 3000, 9.5 + 0 + 200 + 4000]
