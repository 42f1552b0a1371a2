"""The cost of a pass through mixtures of experts: its terms by hand, and a fit that finds what made the times."""
import numpy as np
import pytest

from specjax.theory import expert_cost
from specjax.theory import experts

TOKENS = np.array([1, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64])
TEXT = [experts.expected_distinct(8, 2, t) for t in (1, 4, 8, 16, 32, 64)]
DISTINCT = np.array([TEXT[0], *(value for text in TEXT[1:] for value in (text, 2))])


def test_the_roofline_bends_without_a_step_or_a_corner():
  """s ** t to the ridge and its tangent behind it: MoESD asks for the slope to match, too."""
  found = expert_cost.roofline([1, 8, 8.001, 9, 40], 1.1, 8)
  assert found[0] == pytest.approx(1.1) and found[1] == pytest.approx(1.1 ** 8)
  slope = 1.1 ** 8 * np.log(1.1)
  assert found[2] == pytest.approx(found[1] + 0.001 * slope) and found[4] == pytest.approx(found[1] + 32 * slope)
  assert np.array_equal(expert_cost.roofline([1, 50], 1.0, 8), [1, 1])


@pytest.mark.parametrize("weights", [(3.0, 0.5, 0.25, 0.1), (1.0, 0.0, 2.0, 0.0)], ids=str)
def test_a_fit_finds_what_made_the_times(weights):
  made = expert_cost.ExpertCost(*weights, scale=1.05, ridge=16, chosen=2, error=0.0)
  found = expert_cost.fit(TOKENS, DISTINCT, made.milliseconds(TOKENS, DISTINCT), 2)
  assert found.expert == pytest.approx(weights[2], rel=0.02) and found.error < 1e-3
  between = np.array([2, 12, 48]), np.array([3.5, 6.0, 8.0])
  assert found.milliseconds(*between) == pytest.approx(made.milliseconds(*between), rel=0.01)


def test_copies_of_a_token_tell_tokens_from_experts():
  """Times that hang on experts alone, and on tokens alone: each fit gives the other term nothing."""
  by_experts = expert_cost.fit(TOKENS, DISTINCT, 1 + 0.5 * DISTINCT, 2)
  assert by_experts.expert == pytest.approx(0.5, rel=0.02)
  by_tokens = expert_cost.fit(TOKENS, DISTINCT, 2 + expert_cost.roofline(TOKENS, 1.05, 16), 2)
  assert by_tokens.expert < 0.02 and by_tokens.dense > 0.5


def test_too_few_or_impossible_times_are_refused():
  with pytest.raises(ValueError, match="5 passes"):
    expert_cost.fit(TOKENS[:5], DISTINCT[:5], np.ones(5), 2)
  with pytest.raises(ValueError, match="positive"):
    expert_cost.fit(TOKENS, DISTINCT, 0.0 * TOKENS, 2)
