"""The oracle: right rules are exact in both precisions and under processors, every known-wrong one is caught."""
import dataclasses

import numpy as np
import pytest

from specjax import verifiers
from specjax.sampling import SamplingParams
from specjax.theory import drafts
from specjax.theory import negatives
from specjax.theory import oracle
from specjax.theory import tables as tables_lib
from specjax.theory import wrong_rules

pytestmark = pytest.mark.usefixtures("quick_compile")
CHAIN = (0, 0, 1)
TREE = (0, 0, 1, 0)
TABLES = tables_lib.random_tables(9, 3, 2, zeros=.15)
SETTING = tables_lib.Setting(SamplingParams(temperature=.8, top_p=.95, presence_penalty=.5, repetition_penalty=1.2),
                             prompt=(1, 2, 0))


@pytest.mark.parametrize("verifier, name, parents", [
    ("Rejection", "iid", CHAIN), ("Rejection", "ragged", CHAIN), ("Block", "truncated", CHAIN),
    ("Block", "mixture", CHAIN), ("Point", "repeated", TREE), ("Recursive", "without_replacement", TREE),
    ("Traversal", "mixture_without_replacement", TREE),
])
@pytest.mark.parametrize("dtype, bound", [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_right_rules(verifier, name, parents, dtype, bound):
  draft = drafts.named(name, parents)
  result = oracle.text_law(getattr(verifiers, verifier)(), TABLES, draft, SETTING, dtype)
  assert result.law.shape == (3, 3, 3) and result.law.sum() == pytest.approx(1, abs=1e-6)
  assert result.max_error < bound and result.total_variation < 10 * bound
  assert 0 < result.expected_accepted < 2


@pytest.mark.parametrize("negative", negatives.NEGATIVES, ids=lambda negative: negative.name)
def test_known_wrong_rules(negative):
  assert negative.wrong(verifiers) > 1e-3
  assert negative.right(verifiers) < 1e-6


def test_dropping_a_token_by_what_it_is():
  draft = wrong_rules.WithoutToken(drafts.named("iid", (0, 0)), token=1)
  tables = tables_lib.context_free((.6, .4), (.6, .4), 1)
  result = oracle.text_law(verifiers.Rejection(), tables, draft)
  np.testing.assert_allclose(result.law.sum(1), (.84, .16), atol=1e-12)
  assert result.total_variation == pytest.approx(.24)


@pytest.mark.parametrize("verifier", ["Rejection", "Block"])
def test_a_round_may_end_a_draft_if_its_last_token_is_kept(verifier):
  rule, tables = getattr(verifiers, verifier)(), tables_lib.random_tables(4, 3, 2)
  errors = {ends: oracle.text_law(rule, tables, wrong_rules.Hierarchy(ends, 2)).max_error
            for ends in ("tokens", "round", "accepted")}
  assert errors["tokens"] < 1e-12 and errors["round"] < 1e-12 and errors["accepted"] > 1e-2


@dataclasses.dataclass(frozen=True)
class BeyondTheEnd:
  """Stops at the last node, valid or not."""

  def law(self, p, tree, depth):
    del tree, depth
    return p[..., 0] * 0 + (np.arange(p.shape[1]) == p.shape[1] - 1), p


@dataclasses.dataclass(frozen=True)
class Half:
  """A draft that forgets half of its outcomes' probability."""

  def outcomes(self, tables, setting, dtype):
    found = drafts.named("iid", CHAIN).outcomes(tables, setting, dtype)
    return dataclasses.replace(found, probability=found.probability / 2)


def test_what_is_no_law_is_refused():
  with pytest.raises(ValueError, match="not a law over the valid nodes"):
    oracle.text_law(BeyondTheEnd(), TABLES, drafts.named("iid", CHAIN))
  with pytest.raises(ValueError, match="probability 0.5"):
    oracle.text_law(verifiers.Rejection(), TABLES, Half())
  with pytest.raises(ValueError, match="deeper tables"):
    deep = tables_lib.random_tables(9, 3, 3)
    oracle.prepare(TABLES, drafts.named("iid", (0, 0, 1, 2)).outcomes(deep, tables_lib.Setting()))


@pytest.mark.parametrize("verifier, name, parents", [
    ("Rejection", "iid", (0, 0, 1)), ("Block", "iid", (0, 0, 1)), ("Recursive", "without_replacement", (0, 0, 0, 0)),
    ("Traversal", "without_replacement", (0, 0, 0, 0)),
])
def test_a_draft_that_differs_by_rounding(verifier, name, parents):
  tables, rng = tables_lib.random_tables(12, 3, 2), np.random.default_rng(12)
  noisy = dataclasses.replace(tables, draft=tuple(x + 1e-7 * rng.normal(size=x.shape) for x in tables.target))
  result = oracle.text_law(getattr(verifiers, verifier)(), noisy, drafts.named(name, parents), dtype=np.float32)
  depth = 2 if parents == CHAIN else 1
  assert result.max_error < 1e-6 and result.expected_accepted == pytest.approx(depth, abs=1e-5)
