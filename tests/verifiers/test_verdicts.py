"""Verdicts of the fast draws: at the ends of u, the path as it is handed on, greedy batches, and what is reported."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow_rules as slow
from specjax import keys
from specjax import sampling
from specjax import verifiers
from specjax.verifiers import base

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, WIDTH, VOCABULARY = 64, 5, 4
LEAST, MOST = 2.0 ** -24, 1 - 2.0 ** -24
RULES = [verifiers.Rejection(), verifiers.Block(), verifiers.Recursive(), verifiers.Traversal(), verifiers.KSeq(),
         verifiers.LossyTypical(), verifiers.LossyLenient(), verifiers.LossyCascade()]
# The mode is a constant, so that branches of the other modes are not compiled.
jitted = jax.jit(lambda rule, mode, logits, tree, params, uniforms, depth: rule.draw(
    logits, tree, params, jnp.int32(mode), uniforms, depth), static_argnums=(0, 1, 6))


def draw(rule, logits, given, uniforms, temperature=1.):
  params = sampling.SamplingParams(temperature=temperature).batch(ROWS)
  spread = lambda u: jnp.broadcast_to(jnp.asarray(u, jnp.float32), (ROWS,))
  stop, residual = map(spread, uniforms)
  verdict = jitted(rule, int(params.mode()), jnp.asarray(logits, jnp.float32), given.tree(np.float32), params,
                   keys.Uniforms(stop=stop, residual=residual), WIDTH)  # one deeper than the tree is
  return jax.tree.map(np.asarray, verdict)


def case(rule, seed, banned=True):
  """Drafts of which half of the rows forbid the first and the last id, both of which were drafted."""
  given = slow.random_drafts(seed, ROWS, WIDTH, VOCABULARY, shape="chain" if rule.chain_only else "tree",
                             kind="iid" if isinstance(rule, verifiers.LossyCascade) else "mixture")
  logits = np.random.default_rng(seed).normal(size=given.p.shape)
  if banned:
    logits[::2, :, [0, VOCABULARY - 1]] = -np.inf
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  given.p = weights / weights.sum(-1, keepdims=True)
  return logits, given


def assert_is_path(verdict, given):
  """From the root to a valid node, each the child of the last, then the last again; no deeper than it says."""
  for row in range(ROWS):
    path, accepted = verdict.path[row].tolist(), int(verdict.accepted[row])
    assert len(path) == WIDTH + 1 and path[0] == 0
    for depth in range(1, WIDTH + 1):
      if depth <= accepted:
        assert path[depth] in slow.children(given, row, path[depth - 1])
      else:
        assert path[depth] == path[accepted]


@pytest.mark.parametrize("rule", RULES, ids=slow.name)
def test_at_the_ends_of_u(rule):
  logits, given = case(rule, 80)
  possible = given.p > 0
  lengths = set()
  rng = np.random.default_rng(80)
  for uniforms in [(LEAST, LEAST), (LEAST, MOST), (MOST, LEAST), (MOST, MOST), rng.uniform(.01, .99, (2, ROWS))]:
    verdict = draw(rule, logits, given, uniforms)
    assert_is_path(verdict, given)
    rows, end = np.arange(ROWS), verdict.path[:, -1]
    assert (end < given.size).all()
    assert possible[rows, end, verdict.token].all()
    for row in range(ROWS):
      for node in verdict.path[row, 1:verdict.accepted[row] + 1]:
        assert possible[row, given.parents[row, node], given.tokens[row, node]]
    lengths |= set(verdict.accepted.tolist())
  assert {0, 1, 2} <= lengths


@pytest.mark.parametrize("rule, reference", [
    (verifiers.Block(), slow.block), (verifiers.Recursive(), slow.recursive), (verifiers.Traversal(), slow.traversal),
], ids=slow.name)
def test_the_ends_of_u_are_the_ends_of_the_law(rule, reference):
  logits, given = case(rule, 80)
  stop, following = slow.answers(reference, given)
  ends = lambda law, last: np.array([np.flatnonzero(x > 1e-6)[-1 if last else 0] for x in law])
  for last in (False, True):
    node = ends(stop, last)
    verdict = draw(rule, logits, given, (MOST if last else LEAST, MOST if last else LEAST))
    np.testing.assert_array_equal(verdict.path[:, -1], node)
    np.testing.assert_array_equal(verdict.token, ends(following[np.arange(ROWS), node], last))


@pytest.mark.parametrize("rule", [verifiers.Block(), verifiers.Recursive()], ids=slow.name)
def test_a_greedy_batch_is_matched(rule):
  logits, given = case(rule, 81)
  best = logits.argmax(-1)
  rng = np.random.default_rng(81)
  good = rng.uniform(size=(ROWS, WIDTH)) < .6
  given.tokens = np.where(good, np.take_along_axis(best, given.parents, 1), given.tokens)
  for uniforms in ((LEAST, MOST), (MOST, LEAST)):
    verdict = draw(rule, logits, given, uniforms, temperature=0.)
    assert_is_path(verdict, given)
    for row in range(ROWS):
      node = 0
      while same := [c for c in slow.children(given, row, node) if given.tokens[row, c] == best[row, node]]:
        node = same[0]
      assert verdict.path[row, -1] == node and verdict.token[row] == best[row, node]
    assert (verdict.accepted > 1).any() and (verdict.accepted == 0).any()


@pytest.mark.parametrize("rule", RULES, ids=slow.name)
def test_what_strayed(rule):
  """Nothing without loss; else the total variation of a token, summed over the nodes that were passed."""
  logits, given = case(rule, 80)
  verdict = draw(rule, logits, given, (.7, .5))
  assert verdict.strayed.shape == (ROWS,) and verdict.strayed.dtype == np.float32
  if rule.lossless:
    assert (verdict.strayed == 0).all()
    return
  wanted = np.zeros(ROWS)
  for row in range(ROWS):
    for node in set(verdict.path[row].tolist()):
      below = slow.children(given, row, node)
      if isinstance(rule, verifiers.LossyTypical):
        end = slow.typical(given, row)[0].argmax()
        above = {end}
        while 0 not in above:
          above |= {given.parents[row, n] for n in above}
        wanted[row] += sum(1 - given.p[row, node, given.tokens[row, c]] for c in below if c in above)
      elif below:
        wanted[row] += variation(rule, given, row, node, below[0])
  np.testing.assert_allclose(verdict.strayed, wanted, atol=3e-6)
  assert (verdict.strayed > .05).any()


def variation(rule, given, row, node, child):
  """Of the token behind a node of a chain: its law under the rule, all draws of the child taken together."""
  p, vocabulary = given.p[row, node], VOCABULARY
  law = given.q[row, node] if given.sampled[row, child] else np.eye(vocabulary)[given.tokens[row, child]]
  if isinstance(rule, verifiers.LossyCascade):
    trusted, law = p >= .9 * p.max(), slow.allowed(p, law)
    out = np.where(trusted, law, 0) + p * law[~trusted].sum()
  else:
    accept = np.minimum(p, rule.lenience * law) / rule.lenience
    residual = np.maximum(p - law, 0)
    out = accept + (1 - accept.sum()) * (residual / residual.sum() if residual.sum() > 0 else p)
  return np.abs(out - p).sum() / 2


@pytest.mark.parametrize("rule", [verifiers.Traversal(), verifiers.LossyTypical(), verifiers.Point()], ids=slow.name)
def test_a_tree_of_one_node_is_the_plain_draw(rule):
  logits = np.random.default_rng(82).normal(size=(ROWS, 1, VOCABULARY))
  one = np.zeros((ROWS, 1))
  tree = slow.Drafts(one, one, np.ones(ROWS), one, one[..., None], one[..., None]).tree(np.float32, law=None)
  params = sampling.SamplingParams(temperature=1.).batch(ROWS)
  u = jnp.asarray(np.random.default_rng(83).uniform(.01, .99, (ROWS, 1)), jnp.float32)
  verdict = jitted(rule, sampling.TEMPERATURE, jnp.asarray(logits, jnp.float32), tree, params,
                   keys.Uniforms(token=u, stop=u[:, 0], residual=u[:, 0]), 0)
  below = np.cumsum(np.exp(logits[:, 0]), -1)
  np.testing.assert_array_equal(verdict.token, (below > u * below[:, -1:]).argmax(-1))
  assert (verdict.accepted == 0).all() and verdict.path.tolist() == [[0]] * ROWS


def test_rules_share_their_draw():
  """So what holds for the draws of some at one node, or greedy, holds for all."""
  for rule in (*RULES, verifiers.GreedyMulti()):
    assert type(rule).draw is base.ByLaw.draw and type(rule)._draw is base.ByLaw._draw
