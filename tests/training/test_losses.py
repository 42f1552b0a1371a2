"""Losses against formulas in NumPy, their gradients and minima, and logits of -inf, which a draft vocabulary brings.

Letters: N places, V ids.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import losses

pytestmark = pytest.mark.usefixtures("quick_compile")
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((40, 7)).astype(np.float32) * 2
LOG_Q = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
Q = np.exp(LOG_Q)
P = RNG.dirichlet(np.full(7, 0.5), 40).astype(np.float32)

FORMULAS = {
    "soft_ce": -(P * LOG_Q).sum(-1), "ce": -LOG_Q[np.arange(40), P.argmax(-1)],
    "kl": (P * (np.log(P) - LOG_Q)).sum(-1), "reverse_kl": (Q * (LOG_Q - np.log(P))).sum(-1),
    "jsd": (P * np.log(2 * P / (P + Q)) + Q * np.log(2 * Q / (P + Q))).sum(-1) / 2,
    "tv": np.abs(P - Q).sum(-1) / 2, "lk": -np.log(np.minimum(P, Q).sum(-1)),
    "dspark": -0.1 * LOG_Q[np.arange(40), P.argmax(-1)] + 0.9 * np.abs(P - Q).sum(-1)}
AT_BEST = {"soft_ce": -(P * np.log(P)).sum(-1), "kl": 0, "reverse_kl": 0, "jsd": 0, "tv": 0, "lk": 0}


@functools.cache
def computed(name):
  """Value and gradient to the logits at every place: a function of logits f[N, V] and laws f[N, V]."""
  loss = lambda logits, p: losses.BY_NAME[name](jax.nn.log_softmax(logits), p)
  return jax.jit(lambda logits, p: (loss(logits, p), jax.grad(lambda logits: loss(logits, p).sum())(logits)))


def test_every_loss_has_a_formula_here():
  assert FORMULAS.keys() == losses.BY_NAME.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_the_value_is_that_of_the_formula(name):
  np.testing.assert_allclose(computed(name)(LOGITS, P)[0], FORMULAS[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", AT_BEST)
def test_the_least_value_is_at_the_targets_law(name):
  value, gradient = computed(name)(np.log(P), P)
  np.testing.assert_allclose(value, np.broadcast_to(AT_BEST[name], 40), atol=2e-5)
  if name not in ("tv", "lk"):  # those have a corner there
    np.testing.assert_allclose(gradient, 0, atol=2e-5)
  assert (FORMULAS[name] > AT_BEST[name]).all()
  for step in (0.05, -0.05):
    moved = np.log(P) + step * LOGITS
    assert (computed(name)(moved, P)[0] >= value - 1e-6).all()


def test_soft_cross_entropy_pulls_by_the_difference_of_the_laws():
  for name in ("soft_ce", "kl"):
    np.testing.assert_allclose(computed(name)(LOGITS, P)[1], Q - P, atol=1e-5)


def test_acceptance_is_pulled_only_where_the_drafter_says_too_little():
  """d sum min(p, q) / dq is 1 where q < p and 0 where q > p: so total variation, its complement, has a gradient to q of
  one half of the sign, and the rest is what the softmax spreads."""
  of_q = jax.jit(jax.grad(lambda q: jnp.minimum(P, q).sum()))(Q)
  np.testing.assert_array_equal(of_q, (Q < P).astype(np.float32))
  below = np.where(Q < P, Q, 0)
  acceptance = -(below - Q * below.sum(-1, keepdims=True))  # the gradient of -sum min(p, q) to the logits
  share = np.minimum(P, Q).sum(-1, keepdims=True)
  np.testing.assert_allclose(computed("lk")(LOGITS, P)[1], acceptance / share, atol=1e-5)
  np.testing.assert_allclose(computed("tv")(LOGITS, P)[1], acceptance, atol=1e-5)


def test_total_variation_is_what_is_rejected_of_sampled_drafts():
  np.testing.assert_allclose(1 - FORMULAS["tv"], np.minimum(P, Q).sum(-1), atol=1e-5)
  np.testing.assert_allclose(np.exp(-computed("lk")(LOGITS, P)[0]), 1 - computed("tv")(LOGITS, P)[0], atol=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
def test_banned_ids_and_impossible_tokens_leave_value_and_gradient_finite(name):
  logits, p = LOGITS.copy(), P.copy()
  logits[:, 2] = -np.inf
  logits[3] = [0, *[-np.inf] * 6]
  p[5] = np.eye(7)[2]  # on the banned id alone: no overlap at all
  p[6] = np.eye(7)[0]
  value, gradient = computed(name)(logits, p)
  assert np.isfinite(value).all() and np.isfinite(gradient).all()


def test_jensen_shannon_treats_both_laws_alike_and_ends_at_log_2():
  other = np.asarray(losses.jensen_shannon(np.log(P), Q))
  np.testing.assert_allclose(computed("jsd")(LOGITS, P)[0], other, rtol=2e-5, atol=1e-6)
  apart = losses.jensen_shannon(np.log(np.array([1.0, 1e-12], np.float32)), np.array([0.0, 1.0], np.float32))
  np.testing.assert_allclose(apart, np.log(2), rtol=1e-5)


def test_a_drafter_that_is_far_off_is_still_pulled_by_its_acceptance():
  logits = np.array([[0.0, -17, -17, -17, -17, -17, -17]], np.float32)
  gradient = computed("lk")(logits, np.eye(7, dtype=np.float32)[[1]])[1]
  np.testing.assert_allclose(gradient, [[1, -1, 0, 0, 0, 0, 0]], atol=0.05)


def test_the_mean_is_over_what_is_counted():
  values, counted = np.array([1.0, 2.0, np.inf, 6.0], np.float32), np.array([True, True, False, False])
  assert losses.mean(values, counted) == 1.5
  assert losses.mean(values, np.zeros(4, bool)) == 0


def test_the_loss_between_features_is_smooth():
  x = np.array([[0.0, 0.5, -3.0, 1.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
  y = np.array([[0.0, 0.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
  np.testing.assert_allclose(losses.smooth_l1(x, y), [(0.125 + 3.5 + 0.5) / 4, 0])
  np.testing.assert_allclose(jax.grad(lambda x: losses.smooth_l1(x, y).sum())(x), [[0, 0.125, -0.25, 0.25], [0] * 4])
