"""How many experts a pass goes through when every token chooses at random, independently of the others.

MoESD (arXiv 2505.19645): it is these experts' weights that a pass must read, so the formulas say from how many tokens
on further ones are nearly free. Real tokens beside each other share experts, so that real passes go through fewer.
"""
import math


def expected_distinct(experts: int, chosen: int, tokens: float) -> float:
  """Mean number of distinct experts of `experts` that `tokens` tokens go through, each through `chosen`."""
  return experts * (1 - (1 - chosen / experts) ** tokens)


def tokens_an_expert(experts: int, chosen: int, tokens: float) -> float:
  """Mean number of tokens of an expert that has any; the average over experts of a pass, not over tokens."""
  return chosen * tokens / expected_distinct(experts, chosen, tokens)


def saturating_tokens(experts: int, chosen: int, share: float = 0.95) -> int:
  """Fewest tokens that go through `share` of all experts in the mean.

  Raises:
    ValueError: for a share that is not between 0 and 1, neither included.
  """
  if not 0 < share < 1:
    raise ValueError(f"share={share}: a number between 0 and 1 is needed, neither included")
  if chosen >= experts:
    return 1
  return max(1, math.ceil(math.log(1 - share) / math.log(1 - chosen / experts)))
