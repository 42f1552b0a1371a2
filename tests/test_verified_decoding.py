"""Sampled chains through the whole loop: counts of texts against the exact law of the target, for every verifier.

See `verified_texts`; trees are in `test_verified_trees.py`.
"""
import pytest

import verified_texts as texts
from specjax import draft_laws
from specjax import verifiers as rules

pytestmark = pytest.mark.usefixtures("quick_compile")


class Misled(rules.Rejection):
  """Rejection that is told a q from which nothing was drawn: that of other ids."""

  def stops(self, p, tree, depth):
    return super().stops(p, _mirrored(tree), depth)

  def next_at(self, p, tree, rest, node):
    return super().next_at(p, _mirrored(tree), rest, node)


def _mirrored(tree):
  return tree.replace(q=draft_laws.DenseLaw(tree.q.probs[..., ::-1]))


CHAIN = texts.Way(texts.Drafter(parents=(0, 0, 1)),
                  (rules.Rejection(), rules.Block(), rules.Recursive(), rules.Traversal()),
                  (rules.LossyTypical(), rules.LossyLenient(0.4), rules.LossyCascade("token", 0.3), Misled()))
COUPLED = texts.Way(texts.Drafter(parents=(0, 0, 1), rule="coupled"), (rules.Coupled(), rules.Point()))


@pytest.mark.parametrize("way", [CHAIN, COUPLED], ids=["chain", "coupled"])
def test_the_text_has_the_law_of_the_target(way):
  texts.check_laws(way)


def test_rules_that_draw_the_token_at_a_position_keep_the_plain_text():
  texts.check_plain(COUPLED)


@pytest.mark.parametrize("beside_sampled", [False, True])
def test_greedy_rows_have_the_greedy_text(beside_sampled):
  texts.check_greedy(CHAIN, beside_sampled)
  texts.check_greedy(COUPLED, beside_sampled)


def test_a_drafter_that_is_the_target_is_accepted_whole():
  texts.check_whole(CHAIN, (rules.Rejection(), rules.Block(), rules.Recursive(), rules.Traversal()))
  texts.check_whole(COUPLED, (rules.Coupled(),))
