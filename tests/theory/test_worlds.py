"""Two steps under the key schedule, exactly."""
import jax
import numpy as np
import pytest

from specjax import keys
from specjax import verifiers
from specjax.theory import tables as tables_lib
from specjax.theory import worlds

pytestmark = pytest.mark.usefixtures("quick_compile")
REAL = worlds.real_schedule()


def first_two(result):
  return result.law.reshape(2, 2, -1).sum(-1)


@pytest.mark.parametrize("verifier", ["Rejection", "Block", "Traversal", "Point"])
def test_real_schedule_is_exact(verifier):
  for tables in (tables_lib.toy("B", 5), tables_lib.random_tables(3, 2, 5)):
    result = worlds.text_law(getattr(verifiers, verifier)(), tables, 2, REAL)
    assert result.max_error < 1e-12 and result.expected_accepted > .4


@pytest.mark.parametrize("verifier", ["Block", "Traversal"])
def test_draft_noise_keyed_by_position_is_biased(verifier):
  result = worlds.text_law(getattr(verifiers, verifier)(), tables_lib.toy("B", 5), 2, worlds.drafts_by_position(REAL))
  np.testing.assert_allclose(first_two(result), [[1 / 9, 2 / 9], [5 / 18, 7 / 18]], atol=1e-12)


def test_but_not_under_rejection():
  result = worlds.text_law(verifiers.Rejection(), tables_lib.toy("B", 5), 2, worlds.drafts_by_position(REAL))
  assert result.max_error < 1e-12


def test_one_step_does_not_see_it():
  result = worlds.text_law(verifiers.Block(), tables_lib.toy("B", 2), 2, worlds.drafts_by_position(REAL), steps=1)
  assert result.max_error < 1e-12


def test_the_key_that_decides_must_not_draft():
  result = worlds.text_law(verifiers.Rejection(), tables_lib.toy("B", 5), 2, worlds.drafts_like_stops(REAL))
  assert result.max_error > .02 and first_two(result)[0, 0] == pytest.approx(0)  # 1/9 in the target


def test_labels_are_the_keys_of_the_real_draws():
  row = jax.random.key(0)
  label = lambda key: bytes(np.asarray(jax.random.key_data(key)))
  assert REAL.stop(4) == label(keys.step_key(row, 4, keys.STOP, 0))
  assert REAL.token(4) == label(keys.position_key(row, 4, keys.TOKEN))
  labels = [f(root) for root in range(6) for f in (REAL.stop, REAL.residual, REAL.token)]
  labels += [REAL.draft(root, index) for root in range(6) for index in range(1, 4)]
  assert len(set(labels)) == len(labels)


def test_enumeration_of_a_shared_uniform():
  # Twice the same uniform under different laws: u < .5 and then u < .2, the rest of the first interval.
  program = lambda draw: (draw("u", np.array([.5, .5])), draw("u", np.array([.2, .8])), draw("v", np.array([.5, .5])))
  law = worlds.enumerate_worlds(program)
  expected = {(0, 0): .2, (0, 1): .3, (1, 1): .5}
  assert law == pytest.approx({(*pair, v): mass / 2 for pair, mass in expected.items() for v in (0, 1)})
