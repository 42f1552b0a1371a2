"""Coupled draws: the joint law of two races over the same noise, and the draw with noise in the hand."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow_rules as slow
from specjax import keys
from specjax import sampling
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.verifiers import coupled

pytestmark = pytest.mark.usefixtures("quick_compile")
CASES, VOCABULARY = 200, 5
# The joint law f[N, V, V] of what q draws and what p draws.
joint_laws = jax.jit(jax.vmap(lambda p, q: jax.vmap(coupled.agreement, (None, None, 0))(p, q, jnp.arange(p.shape[0]))))


def joint(p, q):
  with jax.enable_x64(True):
    found = np.array(joint_laws(jnp.asarray(p), jnp.asarray(q)))
  found[q == 0] = 0  # what q never draws is never asked for
  return found


def some_laws(seed, vocabulary=VOCABULARY, zeros=.25):
  rng = np.random.default_rng(seed)
  p, q = (slow.random_laws(rng, (CASES,), vocabulary, zeros) for _ in range(2))
  p[:10] = q[:10]                # the same
  p[10], q[10] = np.eye(vocabulary)[[0, 1]]
  p[11], q[11] = np.eye(vocabulary)[[2, 2]]
  return p, q


def test_marginals():
  p, q = some_laws(0)
  law = joint(p, q)
  assert (law >= 0).all()
  np.testing.assert_allclose(law.sum(2), q, atol=1e-12)
  np.testing.assert_allclose(law.sum(1), p, atol=1e-12)


def test_agreement():
  p, q = some_laws(1)
  law = joint(p, q)
  agrees = np.trace(law, axis1=1, axis2=2)
  for case in range(CASES):
    wanted = np.zeros(VOCABULARY)
    for v in range(VOCABULARY):
      if p[case, v] > 0 and q[case, v] > 0:
        wanted[v] = 1 / sum(max(p[case, w] / p[case, v], q[case, w] / q[case, v]) for w in range(VOCABULARY))
    np.testing.assert_allclose(np.diagonal(law[case]), wanted, atol=1e-12)
  variation = np.abs(p - q).sum(-1) / 2
  assert (agrees >= (1 - variation) / (1 + variation) - 1e-12).all() and (agrees <= 1 - variation + 1e-12).all()
  np.testing.assert_allclose(agrees[:10], 1, atol=1e-12)
  np.testing.assert_allclose(agrees[10:12], [0, 1], atol=1e-12)


def test_joint_law_over_all_noise():
  """Who wins depends on the direction of the noise alone, which is uniform on a simplex: a fine grid of it."""
  p, q = some_laws(2, 3)
  p, q = np.concatenate([p[:20], p[9:14]]), np.concatenate([q[20:40], q[9:14]])
  side = 600
  first, second = np.divmod(np.arange(side * side), side)
  both = np.stack([first, second, side - 1 - first - second], 1)[first + second < side]
  noise = (both + 1 / 3) / side  # midpoints of the upright triangles; the others tend to the same
  law = np.zeros((len(p), 3, 3))
  for case in range(len(p)):
    np.add.at(law[case], ((q[case] / noise).argmax(1), (p[case] / noise).argmax(1)), 1 / len(noise))
  wide = np.pad(p, ((0, CASES - len(p)), (0, 0)), mode="edge"), np.pad(q, ((0, CASES - len(q)), (0, 0)), mode="edge")
  np.testing.assert_allclose(law, joint(*wide)[:len(p)], atol=4e-3)


def test_single_precision():
  p, q = some_laws(3)
  found = np.array(joint_laws(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)), np.float64)
  found[q == 0] = 0
  np.testing.assert_allclose(found, joint(p, q), atol=2e-6)


def test_a_race():
  rng = np.random.default_rng(4)
  law = slow.random_laws(rng, (7, 3), 300, .5)
  noise = rng.exponential(size=law.shape)
  won = np.asarray(jax.jit(coupled.race)(jnp.asarray(law, jnp.float32), jnp.asarray(noise, jnp.float32)))
  for row, node in np.ndindex(7, 3):
    assert won[row, node] == max(range(300), key=lambda v: law[row, node, v] / noise[row, node, v])
  assert coupled.race(jnp.asarray([.5, .5, 0]), jnp.asarray([2., 1., 1e-9])) == 1


def a_draw(p, tree, noise, temperature, depth=3):
  rule = verifiers.Coupled()
  with np.errstate(divide="ignore"):
    logits = jnp.asarray(np.log(p), jnp.float32)
  params = sampling.SamplingParams(temperature=temperature).batch(len(p))
  return jax.tree.map(np.asarray, jitted_draw(rule, logits, tree, params, params.mode(),
                                              keys.Uniforms(noise=jnp.asarray(noise, jnp.float32)), depth))


jitted_draw = jax.jit(lambda rule, *given: rule.draw(*given), static_argnums=(0, 6))


@pytest.mark.parametrize("temperature", [1., 0., "mixed"])
def test_the_draw_follows_the_winner_of_each_race(temperature):
  given = slow.random_drafts(5, 64, 6, 4)
  rng = np.random.default_rng(5)
  noise = rng.exponential(size=given.p.shape)
  each = np.where(np.arange(64) % 2, 0., 1.) if temperature == "mixed" else np.full(64, temperature)
  law = np.where(each[:, None, None] == 0, np.eye(4)[given.p.argmax(-1)], given.p)
  drawn = (law / noise).argmax(-1)
  verdict = a_draw(given.p, given.tree(np.float32), noise, each, depth=5)
  depths = []
  for row in range(64):
    path = [0]
    while same := [c for c in slow.children(given, row, path[-1]) if given.tokens[row, c] == drawn[row, path[-1]]]:
      path.append(same[0])
    assert verdict.path[row].tolist() == path + [path[-1]] * (6 - len(path))
    assert verdict.accepted[row] == len(path) - 1 and verdict.token[row] == drawn[row, path[-1]]
    depths.append(len(path) - 1)
  assert max(depths) >= 2 and (verdict.strayed == 0).all()


def test_a_forbidden_id_never_wins():
  """First and last banned, with the least noise there is, and the greatest everywhere else."""
  rng = np.random.default_rng(6)
  given = slow.random_drafts(6, 64, 6, 4)
  given.p[..., [0, 3]] = 0
  given.p[..., [1, 2]] = rng.dirichlet((1, 1), (64, 6)) + 1e-3
  noise = np.where(given.p > 0, -np.log(2.0 ** -24), 2.0 ** -33)
  verdict = a_draw(given.p, given.tree(np.float32), noise, np.ones(64), depth=5)
  assert np.isin(verdict.token, (1, 2)).all()
  on_path = given.tokens[np.arange(64)[:, None], verdict.path]
  assert np.isin(on_path[:, 1:][verdict.path[:, 1:] > 0], (1, 2)).all()


def test_the_text_does_not_depend_on_the_draft():
  """Noise by position: the token that follows is the winner there, whether it was drafted or not."""
  rng = np.random.default_rng(7)
  p, noise = rng.dirichlet(np.ones(4), 4), rng.exponential(size=(4, 4))
  plain = (p / noise).argmax(-1)
  tokens = np.array([*np.ndindex(4, 4, 4)])  # a law that depends on the position alone: all drafts of three tokens
  tree = tree_lib.chain(jnp.zeros(64, jnp.int32), jnp.asarray(tokens, jnp.int32), jnp.full(64, 3, jnp.int32))
  spread = lambda x: np.broadcast_to(x, (64, *x.shape))
  verdict = a_draw(spread(p), tree, spread(noise), np.ones(64))
  for row in range(64):
    count = verdict.accepted[row]
    assert [*tokens[row, :count], verdict.token[row]] == plain[:count + 1].tolist()
  assert sorted(set(verdict.accepted.tolist())) == [0, 1, 2, 3]


@pytest.mark.parametrize("sampled", [True, False])
def test_its_law_of_one_drafted_token(sampled):
  p, q = (np.repeat(x[:16], 4, 0) for x in some_laws(8, 4))
  tokens = np.tile(np.arange(4), 16)
  given = slow.star(p, q, tokens[:, None], np.array([sampled]))
  stop, following = given.law(verifiers.Coupled())
  if sampled:
    wide = (np.pad(x[::4], ((0, CASES - 16), (0, 0)), mode="edge") for x in (p, q))
    wanted = joint(*wide)[:16].reshape(64, 4)
    possible = wanted.sum(-1) > 0
    wanted = wanted[possible] / wanted[possible].sum(-1, keepdims=True)
  else:
    possible, wanted = np.full(64, True), p
  law = slow.first_token((stop, following), given)[possible]
  np.testing.assert_allclose(law, wanted, atol=1e-11)
  np.testing.assert_allclose(stop[possible, 1], wanted[np.arange(len(wanted)), tokens[possible]], atol=1e-11)
