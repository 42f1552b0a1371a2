"""The two detectors of the library themselves: full acceptance, none, and the rows that are left out."""
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPTS = [[1, 2, 3, 4, 5], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6]]


def run(proposer, temperature):
  return drivers.generate(testing.DummyTarget(), proposer, PROMPTS, SamplingParams(temperature, top_p=0.9),
                          max_new_tokens=24)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_self_drafter_is_accepted_and_the_wrong_one_is_not(temperature):
  plain = run(proposers.Plain(), temperature)
  same, wrong = run(testing.SelfDrafter(3), temperature), run(testing.always_wrong(3), temperature)
  for result in (same, wrong):
    np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert same.counters.steps.tolist() == [6] * 3
  assert same.counters.accepted_tokens.tolist() == same.counters.drafted_tokens.tolist() == [18] * 3
  assert wrong.counters.accepted_tokens.tolist() == [0] * 3 and wrong.counters.steps.tolist() == [24] * 3
  assert (wrong.counters.drafted_tokens > 60).all()


def test_rows_that_are_left_out_draft_nothing():
  result = run(testing.SelfDrafter(3, rows=(True, False, True)), 0.0)
  np.testing.assert_array_equal(result.tokens, run(proposers.Plain(), 0.0).tokens)
  assert result.counters.drafted_tokens.tolist() == [18, 0, 18] and result.counters.steps.tolist() == [6, 24, 6]


def test_sizes():
  assert (testing.SelfDrafter(5).max_nodes, testing.SelfDrafter(5).max_depth) == (6, 5)
  assert testing.always_wrong(5).shift % testing.DummyTarget().vocab != 0
