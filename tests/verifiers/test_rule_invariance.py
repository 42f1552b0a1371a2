"""What no rule's law may depend on: other rows, padding, width, how q is stored; and what all are at temperature 0."""
import numpy as np
import pytest

import slow_rules as slow
from specjax import verifiers

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, WIDTH, WIDER, VOCABULARY = 64, 5, 6, 4
RULES = [rule() for rule in verifiers.BY_NAME.values()]
READ_Q = [rule for rule in RULES if not isinstance(rule, verifiers.Point | verifiers.LossyTypical)]


def drafts_for(rule, seed=0):
  """Chains where a rule takes no more; `coupled` has a law for sampled nodes without siblings."""
  shape = "chain" if rule.chain_only or isinstance(rule, verifiers.Coupled) else "tree"
  return slow.random_drafts(seed, ROWS, WIDTH, VOCABULARY, shape=shape)


@pytest.mark.parametrize("rule", RULES, ids=slow.name)
def test_rows_padding_and_width(rule):
  """Permuted, doubled, beside rows of nonsense, in a wider tree with padding that looks like the best children."""
  given, rng = drafts_for(rule), np.random.default_rng(1)
  rows = rng.integers(ROWS, size=ROWS)
  assert len(set(rows.tolist())) < ROWS
  moved = given.take(rows)
  more = lambda x: np.pad(x, [(0, 0), (0, WIDER - WIDTH)] + [(0, 0)] * (x.ndim - 2))
  tokens, parents, sampled, q, p = map(more, (moved.tokens, moved.parents, moved.sampled, moved.q, moved.p))
  beyond = np.arange(WIDER) >= moved.size[:, None]
  chain = rule.chain_only or isinstance(rule, verifiers.Coupled)
  # The padding has the target's best token at its parent, as if it had been drawn.
  parents = np.where(beyond, moved.size[:, None] - 1 if chain else rng.integers(moved.size[:, None], size=beyond.shape),
                     parents)
  tokens = np.where(beyond, np.take_along_axis(p.argmax(-1), parents, 1), tokens)
  sampled |= beyond
  p[beyond] = np.eye(VOCABULARY)[0]
  poisoned = slow.Drafts(tokens, parents, moved.size, sampled, q, p)
  nonsense = rng.uniform(size=ROWS) < .1
  poisoned.p[nonsense] = np.nan
  stop, following = poisoned.law(rule)
  assert (stop[~nonsense][beyond[~nonsense]] == 0).all() and nonsense.any()
  wanted = tuple(x[rows][~nonsense] for x in given.law(rule))
  slow.assert_same((stop[~nonsense, :WIDTH], following[~nonsense, :WIDTH]), wanted, 1e-12)


@pytest.mark.parametrize("rule", READ_Q, ids=slow.name)
def test_a_sparse_law_is_as_good(rule):
  given = drafts_for(rule, 2)
  slow.assert_same(given.law(rule, law="sparse"), given.law(rule), 1e-12)


@pytest.mark.parametrize("rule", RULES, ids=slow.name)
def test_a_tree_of_one_node(rule):
  p = slow.random_laws(np.random.default_rng(3), (5, 1), VOCABULARY)
  one = np.zeros((5, 1))
  stop, following = slow.Drafts(one, one, np.ones(5), one, p, p).law(rule, law=None)
  np.testing.assert_array_equal(stop, 1)
  np.testing.assert_allclose(following, p, atol=1e-15)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, verifiers.LossyCascade)],
                         ids=slow.name)
def test_with_a_one_hot_target_it_follows_the_best_token(rule):
  """A cascade does not: it mixes in what the drafter thinks."""
  given = drafts_for(rule, 4)
  given.p = np.eye(VOCABULARY)[given.p.argmax(-1)]
  best = given.p.argmax(-1)
  for row in range(0, ROWS, 2):  # half of the drafts are good ones; drawn from q all the same
    for node in range(1, WIDTH):
      parent = given.parents[row, node]
      if np.nan_to_num(given.q[row, parent, best[row, parent]], nan=1) > 0 and node % 3:
        given.tokens[row, node] = best[row, parent]
  stop, following = given.law(rule)
  ends, one_way = np.zeros(ROWS, int), np.full(ROWS, True)
  for row in range(ROWS):
    while same := [c for c in slow.children(given, row, ends[row]) if given.tokens[row, c] == best[row, ends[row]]]:
      # Where equal siblings are drawn and chosen, the drawn ones are asked first.
      one_way[row] &= len(same) == 1
      ends[row] = min(same, key=lambda c: (not given.sampled[row, c], c)) if _sampled_first(rule) else same[0]
  # Typical acceptance takes the longer of equal ways.
  compared = one_way if isinstance(rule, verifiers.LossyTypical) else one_way | True
  np.testing.assert_allclose(stop[compared], np.eye(WIDTH)[ends[compared]], atol=1e-9)
  emitted = following[np.arange(ROWS), ends]
  np.testing.assert_allclose(emitted[compared], np.eye(VOCABULARY)[best[np.arange(ROWS), ends]][compared], atol=1e-9)
  assert (ends == 0).sum() > 3 and (ends > 0).sum() > 10


def _sampled_first(rule):
  return isinstance(rule, verifiers.Recursive | verifiers.KSeq)
