"""What a draw holds beside the logits is read from the compiled program; that every timed case runs."""
import jax
import pytest

from experiments.harness import verifier_speed
from specjax import verifiers


@pytest.fixture(scope="module", autouse=True)
def smaller_vocabulary():
  """Arrays are counted in units of one f32[B, T, V]: their number does not depend on V, but must dwarf the rest."""
  before = verifier_speed.VOCABULARY
  verifier_speed.VOCABULARY = 16384
  yield
  verifier_speed.VOCABULARY = before
  verifier_speed._compiled.cache_clear()


@pytest.mark.parametrize("name", verifier_speed.CASES)
def test_a_draw_holds_no_more_than_three_arrays_beside_the_logits(name):
  array = 4 * verifier_speed.NODES * verifier_speed.VOCABULARY
  # And small change, which does not grow with V.
  assert verifier_speed.memory(name) <= 3 * array + 2**16


def test_every_rule_is_timed_and_has_its_bar():
  timed = {type(verifier) for verifier, *_ in verifier_speed.CASES.values()}
  assert timed == set(verifiers.BY_NAME.values())
  assert set(verifier_speed.timers()) == set(verifier_speed.bars())
  bars = verifier_speed.bars()
  assert (bars["verify, point, greedy"], bars["verify, traversal"], bars["law with top-k and top-p"]) == (0.3, 8, 8)


def test_a_timed_case_is_a_verdict_about_its_draft():
  verdict = jax.tree.map(jax.device_get, verifier_speed._compiled("rejection")(*verifier_speed.arguments("rejection")))
  assert verdict.path.shape == (1, verifier_speed.NODES) and 0 <= verdict.accepted[0] < verifier_speed.NODES
