"""Integrated draws: the measures of the fast draws are the laws that the rules claim."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys
from specjax import sampling
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.theory import drafts
from specjax.theory import draws
from specjax.theory import tables as tables_lib
from specjax.theory import transport

pytestmark = pytest.mark.usefixtures("quick_compile")
TABLES = tables_lib.random_tables(11, 3, 2, zeros=.15)
PARAMS = sampling.SamplingParams(temperature=.9, top_p=.97)


def drafted(name, parents):
  found = drafts.named(name, parents).outcomes(TABLES, tables_lib.Setting(), np.float32)
  depth, context = found.contexts()
  logits = np.stack([[TABLES.target[d][c] for d, c in zip(*row, strict=True)]
                     for row in zip(depth, context, strict=True)])
  logits = jnp.asarray(logits, jnp.float32)
  return logits, found.tree(np.float32), tables_lib.batched(PARAMS, len(logits), 3)


@functools.partial(jax.jit, static_argnums=0)
def claimed(verifier, logits, tree, params):
  stop, following = verifier.law(sampling.process(logits, params), tree, 2)
  return stop[..., None] * following


@pytest.mark.parametrize("verifier, name, parents", [
    ("Recursive", "without_replacement", (0, 0, 0)), ("Point", "repeated", (0, 0, 0, 1, 1)),
])
def test_draw_has_its_law(verifier, name, parents):
  rule, given = getattr(verifiers, verifier)(), drafted(name, parents)
  measured = draws.draw_law(rule, *given, 2)
  np.testing.assert_allclose(measured, claimed(rule, *given), atol=1e-6)
  np.testing.assert_allclose(measured.sum((1, 2)), 1, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Simple:
  """Ends at node 0 or 1 with probabilities .25 and .75, and draws from the softmax; a power of u skews the place."""
  power: int
  purposes = (keys.STOP, keys.RESIDUAL)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    del tree, params, mode, depth
    node = (uniforms.stop ** self.power > .25).astype(jnp.int32)
    here = jnp.take_along_axis(jnp.exp(logits), node[:, None, None], axis=1)[:, 0]
    token = sampling.invert(here, uniforms.residual)
    return verifiers.Verdict(path=node[:, None], accepted=node, token=token, strayed=jnp.zeros(node.shape))


def test_a_skewed_draw_is_seen():
  law = np.random.default_rng(0).dirichlet([1, 1, 1], (2, 2))
  zero = jnp.zeros(2, jnp.int32)
  given = (jnp.asarray(np.log(law), jnp.float32), tree_lib.chain(zero, zero[:, None], zero + 1),
           tables_lib.batched(PARAMS, 2, 3))
  expected = law * np.array([.25, .75])[:, None]
  np.testing.assert_allclose(draws.draw_law(Simple(1), *given, 1), expected, atol=1e-6)
  np.testing.assert_allclose(draws.draw_law(Simple(2), *given, 1), law / 2, atol=1e-6)


def test_a_grid_counts_what_it_holds():
  # Of the uniforms 0, 1/4, 1/2, 3/4 two lie above 1/4, and u < .5 draws id 1 where id 0 has no weight.
  zero = jnp.zeros(1, jnp.int32)
  logits = jnp.asarray(np.log(np.array([[[1e-30, .5, .5]] * 2])), jnp.float32).at[:, :, 0].set(-jnp.inf)
  given = logits, tree_lib.chain(zero, zero[:, None], zero + 1), tables_lib.batched(PARAMS, 1, 3)
  made = draws.draw_law(Simple(1), *given, 1, np.arange(4) / 4)
  np.testing.assert_allclose(made, [[[0, .25, .25], [0, .25, .25]]])
  alone = logits[:, :1], tree_lib.root_only(zero), tables_lib.batched(sampling.SamplingParams(temperature=1.0), 1, 3)
  np.testing.assert_allclose(draws.draw_law(verifiers.Point(), *alone, 1, np.arange(4) / 4), [[[0, .5, .5]]])


def test_races_are_integrated():
  p, q = np.array([.2, .5, .3]), np.array([.6, .1, .3])
  law = draws.race_law(p, q)
  np.testing.assert_allclose(law.sum(1), q, atol=1e-15)
  np.testing.assert_allclose(law.sum(0), p, atol=1e-15)
  np.testing.assert_allclose(np.trace(law), transport.coupled(p, q), atol=1e-15)
  np.testing.assert_allclose(draws.race_law(p, p), np.diag(p), atol=1e-15)
  noise = np.random.default_rng(0).exponential(size=(200_000, 3))
  counts = np.zeros((3, 3))
  np.add.at(counts, (np.argmin(noise / q, 1), np.argmin(noise / p, 1)), 1 / len(noise))
  np.testing.assert_allclose(counts, law, atol=5e-3)  # four standard errors
  banned = draws.race_law(np.array([0, .4, .6]), q)
  np.testing.assert_allclose(banned.sum(0), [0, .4, .6], atol=1e-15)


def test_noise_is_refused():
  with pytest.raises(ValueError, match="STOP and RESIDUAL, or TOKEN"):
    draws.draw_law(verifiers.Coupled(), *drafted("iid", (0, 0, 1)), 2)
