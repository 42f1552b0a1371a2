"""Tables: the processed laws of plain use and of tree use are the same, and are what they should be."""
import numpy as np
import pytest

from specjax.sampling import SamplingParams
from specjax.theory import drafts
from specjax.theory import tables as tables_lib

pytestmark = pytest.mark.usefixtures("quick_compile")
TABLES = tables_lib.random_tables(5, 3, 3, zeros=.2)
SETTINGS = {
    "none": tables_lib.Setting(),
    "greedy": tables_lib.Setting(SamplingParams(temperature=0.0)),
    "filters": tables_lib.Setting(SamplingParams(temperature=.7, top_k=2, top_p=.9, min_p=.05)),
    "penalties": tables_lib.Setting(SamplingParams(temperature=1.0, presence_penalty=.7, frequency_penalty=.4,
                                                   repetition_penalty=1.3), prompt=(2, 1, 2, 0)),
    "bias": tables_lib.Setting(SamplingParams(temperature=1.0, logit_bias={1: -1.5}, banned_ids=[2])),
    "minimum": tables_lib.Setting(SamplingParams(temperature=1.0, min_new_tokens=2), prompt=(0, 1), eos=(2,)),
}


def softmax(logits):
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def test_no_processor_is_the_softmax():
  for logits, law in zip(TABLES.target, tables_lib.conditionals(TABLES.target, tables_lib.Setting()), strict=True):
    np.testing.assert_allclose(law, softmax(logits), atol=1e-15)


@pytest.mark.parametrize("name", SETTINGS)
def test_tree_use_is_plain_use(name):
  setting = SETTINGS[name]
  laws = tables_lib.conditionals(TABLES.target, setting)
  found = drafts.named("iid", (0, 0, 1, 0, 3, 2)).outcomes(TABLES, tables_lib.Setting())
  depth, context = found.contexts()
  logits = np.stack([[TABLES.target[d][c] for d, c in zip(*row, strict=True)]
                     for row in zip(depth, context, strict=True)])
  p = tables_lib.tree_laws(logits, found.tokens, found.parents, 3, setting)
  for d, law in enumerate(laws):
    np.testing.assert_allclose(p[depth == d], law[context[depth == d]], atol=1e-14)


def test_penalties_by_hand():
  params = SamplingParams(temperature=1.0, presence_penalty=.7, frequency_penalty=.4)
  setting = tables_lib.Setting(params, prompt=(1, 0))
  laws = tables_lib.conditionals(TABLES.target, setting)
  # Behind the prompt 1 0 and the path 1 2 the counts are 1, 2, 1.
  logits = TABLES.target[2][5] - .7 - .4 * np.array([1, 2, 1])
  np.testing.assert_allclose(laws[2][5], softmax(logits), atol=1e-14)


def test_minimum_bans_the_end():
  laws = tables_lib.conditionals(TABLES.target, SETTINGS["minimum"])
  assert laws[0][:, 2].max() == laws[1][:, 2].max() == 0 < laws[2][:, 2].max()


def test_spelling_and_sub_tables():
  np.testing.assert_array_equal(tables_lib.spell(np.array([5, 0]), 3, 3), [[0, 1, 2], [0, 0, 0]])
  below = TABLES.behind((1, 2), 1)
  np.testing.assert_array_equal(below.target[0], TABLES.target[2][5:6])
  np.testing.assert_array_equal(below.draft[1], TABLES.draft[3][15:18])


def test_joint_is_a_law():
  law = tables_lib.joint(tables_lib.conditionals(TABLES.target, tables_lib.Setting())).reshape(3, 3, 3, 3)
  np.testing.assert_allclose(law.sum((1, 2, 3)), softmax(TABLES.target[0][0]), atol=1e-14)
  assert all(np.isfinite(table).any(-1).all() for table in tables_lib.random_tables(0, 3, 2, zeros=.9).target)
