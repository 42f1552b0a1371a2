"""Sampled trees through the whole loop: counts of texts against the exact law of the target, for every verifier.

See `verified_texts`; chains are in `test_verified_decoding.py`.
"""
import pytest

import verified_texts as texts
from specjax import verifiers as rules

pytestmark = pytest.mark.usefixtures("quick_compile")
SHAPE = (0, 0, 0, 1)
WAYS = {
    "independent": texts.Way(texts.Drafter(parents=SHAPE, sparse=5),
                             (rules.Recursive(), rules.Traversal(), rules.KSeq(), rules.Point())),
    "without replacement": texts.Way(texts.Drafter(parents=SHAPE, rule="without_replacement"),
                                     (rules.Recursive(), rules.Traversal(), rules.Coupled())),
    "greedy multi": texts.Way(texts.Drafter(parents=SHAPE, rule="greedy_multi"),
                              (rules.GreedyMulti(), rules.Traversal(), rules.KSeq())),
}
ways = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))


@ways
def test_the_text_has_the_law_of_the_target(way):
  texts.check_laws(way)


def test_rules_that_draw_the_token_at_a_position_keep_the_plain_text():
  texts.check_plain(WAYS["independent"])
  texts.check_plain(WAYS["without replacement"])


@ways
def test_greedy_rows_have_the_greedy_text(way):
  texts.check_greedy(way)


def test_a_drafter_that_is_the_target_is_accepted_whole():
  texts.check_whole(WAYS["independent"], (rules.Recursive(), rules.Traversal()))
  texts.check_whole(WAYS["without replacement"], (rules.Recursive(), rules.Traversal()))
