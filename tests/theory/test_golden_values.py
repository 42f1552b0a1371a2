"""Golden values: acceptance of every rule on three toys, by the oracle and by closed forms.

A: p = (.3, .4, .3), q = (.6, .3, .1). B: p = (1/3, 2/3), q = (2/3, 1/3). C: p = (.5, .3, .1, .1), q = (.1, .2, .3, .4).
"""
import numpy as np
import pytest

from specjax import verifiers
from specjax.theory import closed_forms
from specjax.theory import drafts
from specjax.theory import negatives
from specjax.theory import oracle
from specjax.theory import tables as tables_lib
from specjax.theory import transport
from specjax.theory import wrong_rules

pytestmark = pytest.mark.usefixtures("quick_compile")
A, B, C = (tuple(map(np.array, tables_lib.TOYS[name])) for name in "ABC")
FULL = (0, 0, 0, 1, 1, 2, 2)


def accepted(verifier, toy, name, parents, depth):
  """Accepted tokens; the rule must be lossless."""
  result = oracle.text_law(verifier, tables_lib.toy(toy, depth), drafts.named(name, parents))
  assert result.max_error < 1e-12
  return result.expected_accepted


def one_step(name, parents):
  """The law of the first token of a negative's verifier on toy A."""
  draft = drafts.Draft(*name) if isinstance(name, tuple) else drafts.named(name, parents)
  result = oracle.text_law(verifiers.Rejection(), tables_lib.toy("A", 1), wrong_rules.WithRawQ(draft))
  return result.law.sum(1)


def test_one_token():
  assert closed_forms.total_variation(*A) == pytest.approx(.3)
  assert transport.single(*A) == pytest.approx(.7)
  np.testing.assert_allclose(closed_forms.residual(*A), (0, 1 / 3, 2 / 3))
  assert closed_forms.total_variation(*C) == pytest.approx(.5)
  np.testing.assert_allclose(closed_forms.residual(*C), (.8, .2, 0, 0), atol=1e-12)
  np.testing.assert_array_equal(closed_forms.residual(A[0], A[0]), A[0])


def test_recursion_after_the_first_rejection():
  tables = tables_lib.toy("A", 1)
  outcomes = drafts.named("without_replacement", (0, 0, 0)).outcomes(tables, tables_lib.Setting())
  stop, following = oracle.laws(verifiers.Recursive(), oracle.prepare(tables, outcomes))
  drawn = {tuple(row): at for at, row in enumerate(outcomes.tokens[:, 1:].tolist())}
  assert stop[drawn[0, 1]] == pytest.approx((.5 * 5 / 9, .5, .5 * 4 / 9))
  assert stop[drawn[0, 2]] == pytest.approx((0, .5, .5))
  np.testing.assert_allclose(following[drawn[0, 1], 0], (0, 0, 1), atol=1e-12)


@pytest.mark.parametrize("toy, k, name, verifier, closed_form, value", [
    ("A", 2, "iid", "Point", lambda p, q: transport.naive(p, q, 2, True), .513),
    ("A", 2, "without_replacement", "Point", lambda p, q: transport.naive(p, q, 2, False), .678333),
    ("A", 2, "iid", "Recursive", lambda p, q: transport.recursive(p, q, 2, True), .82),
    ("A", 2, "without_replacement", "Recursive", lambda p, q: transport.recursive(p, q, 2, False), .875),
    ("A", 2, "iid", "KSeq", lambda p, q: transport.k_seq(p, q, 2)[1], .84),
    ("A", 2, "greedy_multi", "GreedyMulti", lambda p, q: transport.greedy_multi(p, q, 2), .95),
    ("A", 2, "top_k", "Point", lambda p, q: transport.top_k(p, q, 2), .70),
    ("A", 3, "iid", "Recursive", lambda p, q: transport.recursive(p, q, 3, True), .848),
    ("A", 3, "without_replacement", "Recursive", lambda p, q: transport.recursive(p, q, 3, False), 1),
    ("A", 3, "iid", "KSeq", lambda p, q: transport.k_seq(p, q, 3)[1], .875),
    ("C", 2, "iid", "Recursive", lambda p, q: transport.recursive(p, q, 2, True), .65),
    ("C", 2, "without_replacement", "Recursive", lambda p, q: transport.recursive(p, q, 2, False), .678571),
    ("C", 2, "iid", "KSeq", lambda p, q: transport.k_seq(p, q, 2)[1], .658443),
    ("C", 2, "greedy_multi", "GreedyMulti", lambda p, q: transport.greedy_multi(p, q, 2), .666667),
    ("C", 4, "without_replacement", "Recursive", lambda p, q: transport.recursive(p, q, 4, False), 1),
])
def test_several_candidates(toy, k, name, verifier, closed_form, value):
  assert closed_form(*map(np.array, tables_lib.TOYS[toy])) == pytest.approx(value, abs=5e-7)
  measured = accepted(getattr(verifiers, verifier)(), toy, name, (0,) * (k + 1), 1)
  assert measured == pytest.approx(value, abs=5e-7)


def test_best_possible():
  best = lambda toy, k, replacement: transport.optimal(*toy, k, replacement)
  assert best(A, 2, True) == pytest.approx(.89)
  assert best(A, 2, False) == pytest.approx(.992857, abs=5e-7)
  assert best(A, 3, True) == pytest.approx(.971)
  assert best(C, 2, True) == pytest.approx(.69)
  assert best(C, 2, False) == pytest.approx(.734524, abs=5e-7)
  assert best(C, 4, True) == pytest.approx(.8439)
  assert transport.k_seq(*A, 2)[0] == pytest.approx(1.4)
  assert transport.k_seq(*A, 3)[0] == pytest.approx(1.75)
  assert transport.k_seq(*C, 2)[0] == pytest.approx(1.5844, abs=5e-5)


def test_shared_noise():
  assert transport.coupled(*A) == pytest.approx(2 / 3)
  assert transport.coupled_bound(*A) == pytest.approx(.538462, abs=5e-7)
  assert transport.coupled(*C) == pytest.approx(.458936, abs=5e-7)
  assert transport.coupled_bound(*C) == pytest.approx(1 / 3)


@pytest.mark.parametrize("toy, verifier, values", [
    ("B", "Rejection", (.666667, 1.111111, 1.407407, 1.604938, 1.736626, 1.824417)),
    ("B", "Block", (.666667, 1.222222, 1.666667, 2.049383, 2.370370, 2.651578)),
    ("A", "Rejection", (.7, 1.19, 1.533, 1.7731, 1.94117, 2.058819)),
    ("A", "Block", (.7, 1.25, 1.704, 2.0887, 2.41616, 2.698098)),
])
def test_chains(toy, verifier, values):
  for gamma, value in enumerate(values, 1):
    measured = accepted(getattr(verifiers, verifier)(), toy, "iid", (0, *range(gamma)), 6)
    assert measured == pytest.approx(value, abs=5e-7)
    if (toy, verifier) == ("A", "Rejection"):
      assert closed_forms.expected_accepted(.7, gamma) == pytest.approx(value, abs=5e-7)


def test_no_lossless_rule_for_one_path_accepts_more_than_block():
  target, draft = (tuple(np.tile(law, (2 ** d, 1)) for d in range(3)) for law in B)
  assert transport.single_path_by_program(target, draft, 2) == pytest.approx(11 / 9)
  assert closed_forms.joint_mass(*B, 2) == pytest.approx(12 / 9)
  tables = tables_lib.random_tables(7, 3, 2)
  laws = [tables_lib.conditionals(logits, tables_lib.Setting()) for logits in (tables.target, tables.draft)]
  block = oracle.text_law(verifiers.Block(), tables, drafts.named("iid", (0, 0, 1))).expected_accepted
  assert transport.single_path_by_program(*laws, 2) == pytest.approx(block, abs=1e-9)


@pytest.mark.parametrize("parents, name, top_down, traversal", [
    ((0, 0, 0, 1, 1, 2), "without_replacement", 1.61, 1.67),
    (FULL, "without_replacement", 1.640625, 1.690625),
    (FULL, "iid", 1.4924, 1.5464),
])
def test_trees(parents, name, top_down, traversal):
  assert accepted(verifiers.Recursive(), "A", name, parents, 2) == pytest.approx(top_down)
  assert accepted(verifiers.Traversal(), "A", name, parents, 2) == pytest.approx(traversal)


def test_a_path_is_judged_as_a_whole():
  tables = tables_lib.toy("A", 2)
  outcomes = drafts.named("iid", (0, 0, 1)).outcomes(tables, tables_lib.Setting())
  row = outcomes.tokens[:, 1:].tolist().index([0, 1])
  assert oracle.laws(verifiers.Traversal(), oracle.prepare(tables, outcomes))[0][row, 2] == pytest.approx(2 / 3)
  assert oracle.laws(verifiers.Recursive(), oracle.prepare(tables, outcomes))[0][row, 2] == pytest.approx(1 / 2)


def test_what_biased_rules_give():
  np.testing.assert_allclose(one_step("argmax", (0, 0)), (.5, 1 / 6, 1 / 3), atol=1e-12)
  top = (drafts.iid, (0, 0), tables_lib.sampling.SamplingParams(temperature=1.0, top_k=2))
  np.testing.assert_allclose(one_step(top, (0, 0)), (1 / 3, 4 / 9, 2 / 9), atol=1e-12)
  right = oracle.text_law(verifiers.Rejection(), tables_lib.toy("A", 1), drafts.Draft(*top))
  assert right.max_error < 1e-12 and right.expected_accepted == pytest.approx(.633333, abs=5e-7)
  uncapped = oracle.text_law(wrong_rules.Block(False), tables_lib.toy("B", 2), drafts.named("iid", (0, 0, 1)))
  assert uncapped.expected_accepted == pytest.approx(12 / 9)
  assert negatives.block_without_cap(verifiers) == pytest.approx(2 / 27)


def test_other_vocabularies():
  p, q, shared = np.array([.3, .4, .3, 0]), np.array([.5, .2, 0, .3]), np.array([True, True, False, False])
  assert closed_forms.token_level_intersection(p, q, shared) == pytest.approx(.585714, abs=5e-7)
  assert transport.single(p, q) == pytest.approx(.5)


def test_typical_acceptance():
  p = np.array([.5, .3, .2])
  assert closed_forms.typical_threshold(p) == pytest.approx(.09)
  assert closed_forms.typical_threshold(p, epsilon=.3, delta=.09) == pytest.approx(.0321, abs=5e-5)
  for token in range(3):
    one_hot = np.eye(3)[token]
    tables = tables_lib.context_free(p, one_hot, 1)
    result = oracle.text_law(verifiers.LossyTypical(), tables, drafts.named("argmax", (0, 0)))
    np.testing.assert_allclose(result.law.sum(1), one_hot, atol=1e-9)


def test_lossy_rules():
  draw = drafts.named("iid", (0, 0))
  lenient = oracle.text_law(verifiers.LossyLenient(lenience=.5), tables_lib.toy("A", 1), draw)
  assert lenient.expected_accepted == pytest.approx(1)
  np.testing.assert_allclose(lenient.law.sum(1), A[1], atol=1e-12)
  cascade = oracle.text_law(verifiers.LossyCascade(rule="token", alpha=0.), tables_lib.toy("A", 1), draw)
  np.testing.assert_allclose(cascade.law.sum(1), (.21, .58, .21), atol=1e-12)
  np.testing.assert_allclose(closed_forms.cascade(*A, 0), (.21, .58, .21), atol=1e-12)
