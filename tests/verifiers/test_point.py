"""Point verification: its law by enumeration, its draw by integration over u, and what it is at temperature 0."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.sampling import SamplingParams

POINT = verifiers.Point()
law_jit = jax.jit(POINT.law, static_argnums=2)
draw_jit = jax.jit(POINT.draw, static_argnums=5)

# name -> parents, tokens, size, vocabulary; nodes at or beyond `size` are poison
TREES = {
    "root": ([0], [2], 1, 3),
    "chain": ([0, 0, 1, 2], [0, 1, 2, 0], 4, 3),
    "ragged chain": ([0, 0, 1, 2], [0, 1, 2, 0], 2, 3),
    "nothing drafted": ([0, 0, 1, 2], [0, 1, 2, 0], 1, 3),
    "two branches": ([0, 0, 0, 1], [1, 0, 2, 2], 4, 4),
    "all of the vocabulary": ([0, 0, 0, 0], [1, 0, 2, 1], 4, 3),
    "equal siblings": ([0, 0, 0, 2], [0, 1, 1, 2], 4, 3),
    "equal siblings, the first with a child": ([0, 0, 0, 1], [0, 1, 1, 2], 4, 3),
    "branches below": ([0, 0, 1, 1], [0, 1, 0, 2], 4, 3),
    "poison that equals a sibling": ([0, 0, 0, 0], [0, 1, 1, 2], 2, 3),
}


def make(name):
  parents, tokens, size, vocabulary = TREES[name]
  tree = tree_lib.TokenTree(tokens=jnp.asarray([tokens], jnp.int32), parents=jnp.asarray([parents], jnp.int32),
                            size=jnp.asarray([size], jnp.int32))
  return tree, vocabulary


def enumerate_law(p, tree):
  """Every joint outcome of one draw at each node, walked slowly: stop [T] and joint [T, V]."""
  tokens, parents, size = (np.asarray(x)[0] for x in (tree.tokens, tree.parents, tree.size))
  nodes, vocabulary = p.shape
  joint = np.zeros((nodes, vocabulary))
  for drawn in itertools.product(range(vocabulary), repeat=nodes):
    at = 0
    while True:
      child = [i for i in range(1, size) if parents[i] == at and tokens[i] == drawn[at]]
      if not child:
        break
      at = child[0]
    joint[at, drawn[at]] += np.prod([p[i, drawn[i]] for i in range(nodes)])
  return joint.sum(1), joint


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_law_by_enumeration(name, zeros):
  tree, vocabulary = make(name)
  rng = np.random.default_rng(len(name))
  p = rng.uniform(0.05, 1, (tree.width, vocabulary))
  if zeros:  # some laws are one-hot, some forbid the drafted token
    p[rng.uniform(size=p.shape) < 0.4] = 0
    p[p.sum(1) == 0, 0] = 1
  p /= p.sum(1, keepdims=True)
  stop, following = (np.asarray(x)[0] for x in law_jit(jnp.asarray(p[None], jnp.float32), tree, tree.width - 1))
  wanted_stop, joint = enumerate_law(p, tree)
  np.testing.assert_allclose(stop, wanted_stop, atol=1e-6)
  np.testing.assert_allclose(stop.sum(), 1, atol=1e-6)
  np.testing.assert_allclose(stop[:, None] * following, joint, atol=1e-6)
  np.testing.assert_allclose(following.sum(1), 1, atol=1e-5)  # a law even where it is never reached


def test_law_in_double_precision():
  """The rule itself, apart from rounding."""
  tree, vocabulary = make("equal siblings, the first with a child")
  p = np.random.default_rng(6).dirichlet(np.ones(vocabulary), tree.width)
  with jax.enable_x64(True):
    stop, following = (np.asarray(x)[0] for x in law_jit(jnp.asarray(p[None], jnp.float64), tree, tree.width - 1))
  assert stop.dtype == following.dtype == np.float64
  np.testing.assert_allclose(stop[:, None] * following, enumerate_law(p, tree)[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", TREES)
def test_law_is_the_target_law(name):
  """Lossless: the first token's law is p at the root, and given a drafted first token the second's is p there."""
  tree, vocabulary = make(name)
  tokens, parents, size = (np.asarray(x)[0] for x in (tree.tokens, tree.parents, tree.size))
  p = np.random.default_rng(3).dirichlet(np.ones(vocabulary), tree.width)
  stop, following = (np.asarray(x)[0] for x in law_jit(jnp.asarray(p[None], jnp.float32), tree, tree.width - 1))
  path = lambda node: [] if node == 0 else [*path(parents[node]), node]
  first = np.zeros(vocabulary)
  for node in range(tree.width):
    if node < size and stop[node] > 0:
      if path(node):
        first[tokens[path(node)[0]]] += stop[node]
      else:
        first += stop[node] * following[node]
  np.testing.assert_allclose(first, p[0], atol=1e-6)
  for child in range(1, size):  # the second token, given that the first is this drafted one
    if parents[child] or any(parents[i] == 0 and tokens[i] == tokens[child] for i in range(1, child)):
      continue
    second = np.zeros(vocabulary)
    for node in range(size):
      if child in path(node):
        rest = path(node)[1:]
        if rest:
          second[tokens[rest[0]]] += stop[node]
        else:
          second += stop[node] * following[node]
    np.testing.assert_allclose(second, p[0, tokens[child]] * p[child], atol=1e-6)


def draw_all(p, tree, uniforms, temperature=1.0):
  """One draw per row of `uniforms` [R, T]: node where it stopped, token, and the accepted path's tokens."""
  rows, nodes = uniforms.shape
  with np.errstate(divide="ignore"):
    logits = np.broadcast_to(np.log(p).astype(np.float32), (rows, *p.shape))
  params = SamplingParams(temperature=temperature).batch(rows)
  spread = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), tree)
  verdict = draw_jit(jnp.asarray(logits), spread, params, params.mode(),
                     keys.Uniforms(token=jnp.asarray(uniforms, jnp.float32)), nodes - 1)
  assert verdict.path.shape == (rows, nodes)
  return jax.tree.map(np.asarray, verdict)


def dyadic(rng, nodes, vocabulary, parts=8):
  """Laws in eighths, so that a grid of eight midpoints integrates them exactly."""
  return rng.multinomial(parts, np.ones(vocabulary) / vocabulary, nodes) / parts


@pytest.mark.parametrize("name", TREES)
def test_draw_integrates_to_the_law(name):
  """u over a full grid at every node: the share of each outcome is the law, without statistics."""
  tree, vocabulary = make(name)
  p = dyadic(np.random.default_rng(len(name)), tree.width, vocabulary)
  grid = (np.arange(8) + 0.5) / 8
  uniforms = np.array(list(itertools.product(grid, repeat=tree.width)))
  verdict = draw_all(p, tree, uniforms)
  end = verdict.path[:, -1]
  joint = np.zeros((tree.width, vocabulary))
  np.add.at(joint, (end, verdict.token), 1 / len(uniforms))
  stop, following = (np.asarray(x)[0] for x in law_jit(jnp.asarray(p[None], jnp.float32), tree, tree.width - 1))
  np.testing.assert_allclose(joint, stop[:, None] * following, atol=1e-6)
  depth = np.asarray(tree_lib.depths(tree_lib.ancestors(tree.parents, tree.width - 1)))[0]
  np.testing.assert_array_equal(verdict.accepted, depth[end])
  assert (p[end, verdict.token] > 0).all()


@pytest.mark.parametrize("name", TREES)
def test_nodes_of_one_depth_may_share_their_uniform(name):
  """As in a step: u is keyed by the position, so siblings see the same one; only one of them is on the path."""
  tree, vocabulary = make(name)
  p = dyadic(np.random.default_rng(len(name)), tree.width, vocabulary)
  depth = np.asarray(tree_lib.depths(tree_lib.ancestors(tree.parents, tree.width - 1)))[0]
  grid = (np.arange(8) + 0.5) / 8
  shared = np.array(list(itertools.product(grid, repeat=4)))
  verdict = draw_all(p, tree, shared[:, depth])
  joint = np.zeros((tree.width, vocabulary))
  np.add.at(joint, (verdict.path[:, -1], verdict.token), 1 / len(shared))
  np.testing.assert_allclose(joint, enumerate_law(p, tree)[1], atol=1e-6)


@pytest.mark.parametrize("name", TREES)
def test_at_temperature_0_it_is_greedy(name):
  tree, vocabulary = make(name)
  tokens, parents, size = (np.asarray(x)[0] for x in (tree.tokens, tree.parents, tree.size))
  rng = np.random.default_rng(4)
  for _ in range(20):
    p = rng.dirichlet(np.ones(vocabulary), tree.width)
    best, at, accepted = p.argmax(1), 0, 0
    while children := [i for i in range(1, size) if parents[i] == at and tokens[i] == best[at]]:
      at, accepted = children[0], accepted + 1
    verdict = draw_all(p, tree, rng.uniform(0.01, 0.99, (8, tree.width)), temperature=0.0)
    assert (verdict.path[:, -1] == at).all() and (verdict.accepted == accepted).all()
    assert (verdict.token == best[at]).all()


@pytest.mark.parametrize("u", [0.0, 2.0 ** -24, 1 - 2.0 ** -24])
def test_a_forbidden_draft_is_never_accepted_whatever_u(u):
  """Engine bug A7: u = 0 accepted a token of probability 0. First and last ids banned, and both drafted."""
  tree = tree_lib.TokenTree(tokens=jnp.asarray([[1, 0, 3, 0]], jnp.int32),
                            parents=jnp.asarray([[0, 0, 0, 1]], jnp.int32), size=jnp.asarray([4], jnp.int32))
  verdict = draw_all(np.array([[0, 0.5, 0.5, 0]] * 4), tree, np.full((8, 4), u))
  assert (verdict.accepted == 0).all() and np.isin(verdict.token, [1, 2]).all()


@pytest.mark.parametrize("p,q,k,wanted", [
    ((.3, .4, .3), (.6, .3, .1), 2, .70),       # golden row 7: top-2 point mass on toy A
    ((.5, .3, .1, .1), (.1, .2, .3, .4), 2, .2),  # toy C: the draft's two best are the target's two worst
])
def test_acceptance_of_a_top_k_point_draft(p, q, k, wanted):
  drafted = np.argsort(q)[::-1][:k]
  tree = tree_lib.TokenTree(tokens=jnp.asarray([[0, *drafted]], jnp.int32), parents=jnp.zeros((1, k + 1), jnp.int32),
                            size=jnp.asarray([k + 1], jnp.int32))
  stop, _ = law_jit(jnp.broadcast_to(jnp.asarray(p, jnp.float32), (1, k + 1, len(p))), tree, 1)
  np.testing.assert_allclose(1 - float(stop[0, 0]), wanted, atol=1e-6)


def test_verify_reads_and_does_not_write():
  """Engine bug A5: the same call twice gives the same, and leaves its arguments as they were."""
  tree, vocabulary = make("two branches")
  p = np.random.default_rng(5).dirichlet(np.ones(vocabulary), tree.width)
  logits = jnp.log(jnp.asarray(p[None], jnp.float32))
  before = np.array(logits)
  params = SamplingParams(temperature=1.0).batch(1)
  uniforms = keys.Uniforms(token=jnp.full((1, tree.width), 0.3, jnp.float32))
  a, b = (draw_jit(logits, tree, params, params.mode(), uniforms, 3) for _ in range(2))
  jax.tree.map(np.testing.assert_array_equal, a, b)
  np.testing.assert_array_equal(logits, before)


def test_it_is_a_static_argument():
  assert hash(verifiers.Point()) == hash(POINT) and verifiers.Point() == POINT
