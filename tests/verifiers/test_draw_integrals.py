"""Fast draws, integrated over their uniforms, have the laws of the pseudocode: mixed rows, filters, forbidden ids."""
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import slow_rules as slow
from specjax import sampling
from specjax import verifiers
from specjax.theory import draws

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, WIDTH, VOCABULARY = 8, 4, 4
TEMPERATURE = np.tile([1., .6, 0., 1.3], 2)
TOP_K = np.array([0, 0, 0, 0, 2, 3, 2, 0])
BANNED = np.isin(np.arange(ROWS), (1, 2, 4, 7))  # rows without the first and the last id


def case(seed, shape, replacement=True, kind="mixture"):
  """Logits f32[B, T, V], and drafts whose p is what temperature and top-k make of them, in double precision."""
  given = slow.random_drafts(seed, ROWS, WIDTH, VOCABULARY, shape=shape, replacement=replacement, kind=kind)
  given.q = given.q.astype(np.float32).astype(np.float64)
  logits = np.random.default_rng(seed).normal(size=given.p.shape).astype(np.float32)
  logits[BANNED] = np.where(np.isin(np.arange(VOCABULARY), (0, VOCABULARY - 1)), -np.inf, logits[BANNED])
  for row, node in np.ndindex(ROWS, WIDTH):
    x = logits[row, node].astype(np.float64)
    kept = x >= np.sort(x)[::-1][(TOP_K[row] or VOCABULARY) - 1]
    weights = np.where(kept, np.exp((x - x.max()) / (TEMPERATURE[row] or 1)), 0)
    given.p[row, node] = weights / weights.sum() if TEMPERATURE[row] else np.eye(VOCABULARY)[x.argmax()]
  return logits, given


def cascade(given, row):
  """Rejection towards the mixture of the token rule, see its own tests."""
  mixed = given.take(np.arange(ROWS))
  for node in range(given.size[row] - 1):
    p, q = given.p[row, node], slow.allowed(given.p[row, node], given.q[row, node])
    trusted = p >= (1 - .1) * p.max()
    mixed.p[row, node] = np.where(trusted, q, 0) + p * q[~trusted].sum()
  return slow.rejection(mixed, row)


def lenient(logits, given, row):
  """Greedy rows ask how close the drafted token comes to the best one."""
  if TEMPERATURE[row]:
    return slow.rejection(given, row, .5)
  end, x = 0, logits[row]
  while end + 1 < given.size[row] and np.exp(x[end, given.tokens[row, end + 1]] - x[end].max()) >= .5:
    end += 1
  return np.eye(WIDTH)[end], np.eye(VOCABULARY)[logits[row].argmax(-1)]


@pytest.mark.parametrize("rule, reference, shape, kind, replacement", [
    (verifiers.Rejection(), slow.rejection, "chain", "mixture", True),
    (verifiers.Block(), slow.block, "chain", "mixture", True),
    (verifiers.Recursive(), slow.recursive, "tree", "mixture", False),
    (verifiers.Traversal(), slow.traversal, "tree", "mixture", False),
    (verifiers.KSeq(), slow.k_seq, "tree", "mixture", True),
    (verifiers.LossyTypical(), slow.typical, "tree", "mixture", True),
    (verifiers.LossyLenient(), lenient, "chain", "mixture", True),
    (verifiers.LossyCascade(), cascade, "chain", "iid", True),
], ids=slow.name)
def test_a_draw_has_its_law(rule, reference, shape, kind, replacement):
  logits, given = case(70, shape, replacement, kind)
  params = sampling.SamplingParams(temperature=TEMPERATURE, top_k=TOP_K).batch(ROWS, VOCABULARY)
  measured = draws.draw_law(rule, jnp.asarray(logits), given.tree(np.float32), params, WIDTH - 1)
  reference = functools.partial(reference, logits) if reference is lenient else reference
  stop, following = slow.answers(reference, given)
  np.testing.assert_allclose(measured, stop[..., None] * following, atol=3e-6)
  np.testing.assert_allclose(measured.sum((1, 2)), 1, atol=1e-6)
  assert (measured[BANNED][..., [0, VOCABULARY - 1]] == 0).all()
