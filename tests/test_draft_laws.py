"""Draft laws, dense and sparse, against NumPy: the same questions and answers; nothing but a law's own row is read."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft_laws

pytestmark = pytest.mark.usefixtures("quick_compile")
BATCH, NODES, VOCABULARY, IDS = 6, 5, 9, 4


def laws(seed, places=IDS):
  """Laws over at most `places` ids of the vocabulary, dense f32[B, T, V], and as ids and probabilities."""
  rng = np.random.default_rng(seed)
  ids = np.stack([[rng.permutation(VOCABULARY)[:places] for _ in range(NODES)] for _ in range(BATCH)])
  probs = rng.dirichlet(np.ones(places), (BATCH, NODES))
  probs[rng.uniform(size=probs.shape) < .3] = 0
  probs[probs.sum(-1) == 0, 0] = 1
  probs = (probs / probs.sum(-1, keepdims=True)).astype(np.float32)
  dense = np.zeros((BATCH, NODES, VOCABULARY), np.float32)
  np.put_along_axis(dense, ids, probs, -1)
  # An unused place may name any id, one that is used as well.
  ids = np.where(probs == 0, np.take_along_axis(ids, probs.argmax(-1)[..., None], -1), ids)
  return dense, draft_laws.DenseLaw(jnp.asarray(dense)), draft_laws.SparseLaw(jnp.asarray(ids, jnp.int32),
                                                                              jnp.asarray(probs))


@pytest.fixture(params=["dense", "sparse"])
def law(request):
  """The reference and one of both kinds."""
  dense, one, other = laws(0)
  return dense, one if request.param == "dense" else other


def test_of(law):
  reference, law = law
  rng = np.random.default_rng(1)
  nodes, tokens = rng.integers(NODES, size=(BATCH, 40)), rng.integers(VOCABULARY, size=(BATCH, 40))
  found = np.asarray(law.of(jnp.asarray(nodes), jnp.asarray(tokens)))
  wanted = [[reference[b, n, v] for n, v in zip(nodes[b], tokens[b], strict=True)] for b in range(BATCH)]
  np.testing.assert_array_equal(found, wanted)
  assert (found == 0).any() and (found > 0).any()


def test_row(law):
  reference, law = law
  for node in np.random.default_rng(2).integers(NODES, size=(4, BATCH)):
    found = np.asarray(law.row(jnp.asarray(node), VOCABULARY))
    np.testing.assert_array_equal(found, [reference[b, n] for b, n in enumerate(node)])


def test_dense(law):
  reference, law = law
  np.testing.assert_array_equal(law.dense(VOCABULARY), reference)


@pytest.mark.parametrize("seed", range(3))
def test_excess(law, seed):
  reference, law = law
  rng = np.random.default_rng(seed)
  p = rng.dirichlet(np.ones(VOCABULARY), (BATCH, NODES))
  p[0] = reference[0]                                     # equal laws
  p[1] = np.where(reference[1] > 0, 0, 1) / (reference[1] == 0).sum(-1, keepdims=True)  # nothing in common
  p[2] = np.eye(VOCABULARY)[rng.integers(VOCABULARY, size=NODES)]
  for scale in (np.ones((BATCH, NODES)), np.zeros((BATCH, NODES)), rng.uniform(0, 3, (BATCH, NODES))):
    found = np.asarray(law.excess(jnp.asarray(p, jnp.float32), jnp.asarray(scale, jnp.float32)))
    wanted = [[sum(max(scale[b, n] * p[b, n, v] - reference[b, n, v], 0) for v in range(VOCABULARY))
               for n in range(NODES)] for b in range(BATCH)]
    np.testing.assert_allclose(found, wanted, atol=3e-6 if scale.max() else 0)
  one = np.asarray(law.excess(jnp.asarray(p, jnp.float32), jnp.ones((BATCH, NODES))))
  np.testing.assert_allclose(one[0], 0, atol=1e-6)
  np.testing.assert_allclose(one[1], 1, atol=1e-6)


def test_narrow_and_widen(law):
  reference, law = law
  narrow, wide = law.narrow(2), law.widen(NODES + 3)
  assert type(narrow) is type(wide) is type(law)
  for changed, width in ((narrow, 2), (wide, NODES + 3), (law.widen(NODES), NODES), (wide.narrow(NODES), NODES)):
    assert {x.shape[:2] for x in jax.tree.leaves(changed)} == {(BATCH, width)}
    for node in range(min(width, NODES)):
      found = np.asarray(changed.row(jnp.full(BATCH, node), VOCABULARY))
      np.testing.assert_array_equal(found, reference[:, node])
  assert all((np.asarray(x)[:, NODES:] == 0).all() for x in jax.tree.leaves(wide))


def test_a_sparse_law_over_the_whole_vocabulary():
  reference, dense, sparse = laws(3, VOCABULARY)
  nodes, tokens = (x.reshape(1, -1).repeat(BATCH, 0) for x in np.indices((NODES, VOCABULARY)))
  for law in (dense, sparse):
    found = np.asarray(law.of(jnp.asarray(nodes), jnp.asarray(tokens)))
    np.testing.assert_array_equal(found.reshape(reference.shape), reference)


def test_other_nodes_are_not_read(law):
  """Rows of nodes without sampled children may hold anything."""
  reference, law = law
  floats = lambda x: x.at[:, 1].set(jnp.nan) if x.dtype == jnp.float32 else x
  poisoned = jax.tree.map(floats, law)
  zero = jnp.zeros(BATCH, jnp.int32)
  np.testing.assert_array_equal(poisoned.row(zero, VOCABULARY), reference[:, 0])
  np.testing.assert_array_equal(poisoned.of(zero[:, None], zero[:, None])[:, 0], reference[:, 0, 0])
  p = jnp.full((BATCH, NODES, VOCABULARY), 1 / VOCABULARY)
  one = jnp.ones((BATCH, NODES))
  found, wanted = (np.delete(np.asarray(x.excess(p, one)), 1, axis=1) for x in (poisoned, law))
  np.testing.assert_array_equal(found, wanted)


def test_another_vocabulary_is_refused():
  _, dense, _ = laws(4)
  with pytest.raises(AssertionError):
    dense.row(jnp.zeros(BATCH, jnp.int32), VOCABULARY + 1)
  with pytest.raises(AssertionError):
    dense.dense(VOCABULARY + 1)
