"""Transport: closed forms against linear programs, and every rule below the optimum."""
import numpy as np
import pytest

from specjax.theory import transport

SIZES = [3, 3, 4, 4, 4, 5] * 2
LAWS = [tuple(np.random.default_rng(seed).dirichlet([.7] * size, 2)) for seed, size in enumerate(SIZES)]
ZERO = [(np.array([.5, .5, 0]), np.array([0, .4, .6])), (np.array([1., 0, 0]), np.array([0, 0, 1.])),
        (np.array([.2, .3, .5]), np.array([.2, .3, .5]))]


@pytest.mark.parametrize("p, q", LAWS + ZERO)
@pytest.mark.parametrize("replacement", [True, False])
def test_closed_form_is_the_program(p, q, replacement):
  for k in (1, 2, 3):
    law = transport.candidates(q, k, replacement)
    assert sum(law.values()) == pytest.approx(1)
    best = transport.optimal(p, q, k, replacement)
    assert best == pytest.approx(transport.optimal_by_program(p, law), abs=1e-9)
    assert transport.naive(p, q, k, replacement) <= transport.recursive(p, q, k, replacement) + 1e-12
    assert transport.recursive(p, q, k, replacement) <= best + 1e-12
  assert transport.optimal(p, q, 1, replacement) == pytest.approx(transport.single(p, q))


@pytest.mark.parametrize("p, q", LAWS)
def test_other_rules(p, q):
  for k in (2, 3):
    rho, accepted = transport.k_seq(p, q, k)
    best = transport.optimal(p, q, k, True)
    assert 1 <= rho <= k and (1 - np.exp(-1)) * best - 1e-9 <= accepted <= best + 1e-9
    greedy = transport.greedy_multi(p, q, k)
    assert greedy == pytest.approx(transport.optimal_by_program(p, transport.greedy_candidates(q, k)), abs=1e-9)
    assert greedy >= transport.top_k(p, q, k) - 1e-12
  assert transport.coupled_bound(p, q) - 1e-12 <= transport.coupled(p, q) <= transport.single(p, q) + 1e-12


def test_all_tokens_drafted_without_replacement_are_enough():
  p, q = LAWS[0]
  assert transport.optimal(p, q, 3, False) == pytest.approx(1)
  assert transport.recursive(p, q, 3, False) == pytest.approx(1)


def test_shared_noise_by_sampling():
  (p, q), rng = LAWS[3], np.random.default_rng(0)
  noise = rng.exponential(size=(200_000, len(p)))
  agree = np.mean(np.argmin(noise / p, axis=1) == np.argmin(noise / q, axis=1))
  assert agree == pytest.approx(transport.coupled(p, q), abs=5e-3)  # four standard errors
