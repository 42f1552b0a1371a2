"""Lossless rules as laws: against their papers' pseudocode in NumPy, against each other, and by closed forms.

Nearly all drafts have the shape of `ROWS`, `WIDTH` and `VOCABULARY`, so that a rule compiles once.
"""
import itertools

import numpy as np
import pytest

import slow_rules as slow
from specjax import verifiers

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, WIDTH, VOCABULARY = 64, 6, 4
BLOCK, REJECTION, RECURSIVE = verifiers.Block(), verifiers.Rejection(), verifiers.Recursive()
TRAVERSAL, K_SEQ, GREEDY_MULTI = verifiers.Traversal(), verifiers.KSeq(), verifiers.GreedyMulti()


def drafts(seed, **how):
  return slow.random_drafts(seed, ROWS, WIDTH, VOCABULARY, **how)


def all_draws(seed, tables, k):
  """Every k tokens for each of several laws: p, q f64[B, V], tokens i32[B, k] and their chance with replacement."""
  rng = np.random.default_rng(seed)
  tokens = np.array(list(itertools.product(range(VOCABULARY), repeat=k)))
  p, q = (np.repeat(slow.random_laws(rng, (tables,), VOCABULARY, .3), len(tokens), 0) for _ in range(2))
  tokens = np.tile(tokens, (tables, 1))
  return p, q, tokens, np.take_along_axis(q, tokens, 1).prod(-1)


@pytest.mark.parametrize("rule, reference, how", [
    (REJECTION, slow.rejection, dict(shape="chain")),
    (BLOCK, slow.block, dict(shape="chain")),
    (RECURSIVE, slow.recursive, dict()),
    (RECURSIVE, slow.recursive, dict(replacement=False)),
    (GREEDY_MULTI, slow.recursive, dict()),
    (TRAVERSAL, slow.traversal, dict()),
    (TRAVERSAL, slow.traversal, dict(replacement=False)),
    (K_SEQ, slow.k_seq, dict()),  # its rho by scipy's root finder
], ids=slow.name)
def test_the_paper_in_numpy(rule, reference, how):
  deepest = 0
  for seed, kind in enumerate(("iid", "mixture", "point")):
    given = drafts(10 + seed, kind=kind, **how)
    wanted = slow.answers(reference, given)
    slow.assert_same(given.law(rule), wanted, 1e-11)
    deepest = max(slow.accepted(wanted[0], given).max(), deepest)
  assert deepest > 1.2  # some cases go deep


@pytest.mark.parametrize("rule, reference, shape", [
    (REJECTION, slow.rejection, "chain"), (BLOCK, slow.block, "chain"), (RECURSIVE, slow.recursive, "tree"),
    (TRAVERSAL, slow.traversal, "tree"),
], ids=slow.name)
def test_points_need_no_q(rule, reference, shape):
  given = drafts(4, kind="point", shape=shape)
  slow.assert_same(given.law(rule, law=None), slow.answers(reference, given), 1e-11)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("kind", ["iid", "mixture", "point"])
def test_traversal_is_block_on_chains(kind, replacement):
  given = drafts(20, kind=kind, shape="chain", replacement=replacement)
  slow.assert_same(given.law(TRAVERSAL), given.law(BLOCK), 1e-11)


@pytest.mark.parametrize("replacement", [True, False])
def test_traversal_is_recursive_at_depth_1(replacement):
  given = drafts(21, shape="star", replacement=replacement, ragged=False)
  # Recursive tries sampled children first; here they stand first.
  order = np.argsort(np.where(np.arange(WIDTH) == 0, -1, ~given.sampled), axis=1, kind="stable")
  given.tokens, given.sampled = (np.take_along_axis(x, order, 1) for x in (given.tokens, given.sampled))
  assert (given.sampled[:, 1:].any(1) & ~given.sampled[:, 1:].all(1)).sum() > 20
  slow.assert_same(given.law(TRAVERSAL), given.law(RECURSIVE), 1e-11)


def test_block_accepts_at_least_what_rejection_does():
  gains = []
  for seed in range(12):
    rng = np.random.default_rng(seed)
    path = np.array(list(itertools.product(range(VOCABULARY), repeat=3)))  # 64 drafts of three tokens
    powers = VOCABULARY ** np.arange(3)[::-1]
    at = np.stack([path[:, :depth] @ powers[3 - depth:] for depth in range(4)], 1)  # each node's context
    p, q = np.ones((2, ROWS, WIDTH, VOCABULARY)) / VOCABULARY
    for depth in range(4):  # one law a context
      for laws in (p, q):
        laws[:, depth] = slow.random_laws(rng, (VOCABULARY ** depth,), VOCABULARY)[at[:, depth]]
    tokens = np.pad(path, ((0, 0), (1, 2)))
    parents = np.tile(np.maximum(np.arange(WIDTH) - 1, 0), (ROWS, 1))
    chance = np.take_along_axis(q, np.pad(path, ((0, 0), (0, 3)))[..., None], 2)[:, :3, 0].prod(-1)
    assert chance.sum() == pytest.approx(1)
    make = lambda sampled: slow.Drafts(tokens, parents, np.full(ROWS, 4), np.full((ROWS, WIDTH), sampled), q, p)
    block, token = (slow.accepted(make(True).law(rule)[0], make(True)) @ chance for rule in (BLOCK, REJECTION))
    gains.append(block - token)
    # The same tokens as points: nothing to gain, draft by draft.
    block, token = (slow.accepted(make(False).law(rule)[0], make(False)) for rule in (BLOCK, REJECTION))
    np.testing.assert_allclose(block, token, atol=1e-12)
  assert min(gains) > -1e-12 and np.mean(gains) > .01


def test_block_is_capped():
  """Ratios 2 and 1/2: their product passes always, the capped one half of the time."""
  p = np.full((ROWS, WIDTH, VOCABULARY), 1 / VOCABULARY)
  q = p.copy()
  p[:, 0], q[:, 0] = (.5, .3, .1, .1), (.25, .25, .25, .25)
  p[:, 1], q[:, 1] = (.2, .4, .2, .2), (.4, .2, .2, .2)
  parents = np.tile(np.maximum(np.arange(WIDTH) - 1, 0), (ROWS, 1))
  given = slow.Drafts(np.zeros((ROWS, WIDTH)), parents, np.full(ROWS, 3), np.ones((ROWS, WIDTH)), q, p)
  stop = given.law(BLOCK)[0][0]
  np.testing.assert_allclose(stop, (0, .5, .5, 0, 0, 0), atol=1e-12)


def long_chains():
  """63 drafted nodes: q far from p, close, equal up to rounding, equal; huge ratios; a forbidden token; points."""
  rng = np.random.default_rng(5)
  noise = (.3, 1e-2, 1e-6, 0, .1, .01, 0, .1)
  shape = (len(noise), 64)
  p = slow.random_laws(rng, shape, VOCABULARY, 0) + .05
  q = p * np.exp(np.array(noise)[:, None, None] * rng.normal(size=p.shape))
  p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
  tokens = np.zeros(shape, int)
  tokens[:, 1:] = (rng.uniform(size=(len(noise), 63, 1)) > np.cumsum(q[:, :-1], -1)).sum(-1).clip(0, VOCABULARY - 1)
  at = lambda laws, row, node: (laws, (row, node, tokens[row, node + 1]))
  for node in range(0, 60):  # a product of ratios that no float32 holds
    q[4, node] = 1 / 3
    q[(4, node, tokens[4, node + 1])] = 1e-36
  laws, place = at(p, 5, 40)
  laws[place] = 0
  p[5, 40] /= p[5, 40].sum()
  sampled = np.ones(shape, bool)
  sampled[6], sampled[7] = False, rng.uniform(size=64) < .5
  parents = np.tile(np.maximum(np.arange(64) - 1, 0), (len(noise), 1))
  p, q = (x.astype(np.float32) for x in (p, q))
  return slow.Drafts(tokens, parents, np.full(len(noise), 64), sampled, q, p)


@pytest.mark.parametrize("rule, reference", [(REJECTION, slow.rejection), (BLOCK, slow.block),
                                             (TRAVERSAL, slow.block)], ids=slow.name)
def test_long_chains_in_single_precision(rule, reference):
  given = long_chains()
  stop, following = given.law(rule, dtype=np.float32)
  wanted = slow.answers(reference, given)
  slow.assert_same((stop, following), wanted, 3e-4)
  ordinary = np.arange(len(stop)) != 4  # log b is what sums of some thousands leave there
  np.testing.assert_allclose(stop[ordinary], wanted[0][ordinary], atol=2e-5)
  np.testing.assert_allclose(stop.sum(-1), 1, atol=1e-5)
  np.testing.assert_allclose(stop[3, 63], 1, atol=1e-4)   # q = p
  assert stop[4, 60:].sum() > .99                         # ratios of 1e35
  assert (stop[5, 41:] == 0).all()                        # behind a forbidden token


@pytest.mark.parametrize("kind", ["iid", "mixture", "point"])
def test_k_seq_of_one_child_is_rejection(kind):
  given = drafts(30, kind=kind, shape="chain")
  slow.assert_same(given.law(K_SEQ), given.law(REJECTION), 1e-11)


@pytest.mark.parametrize("p, q, k, rho", [((.3, .4, .3, 0), (.6, .3, .1, 0), 2, 1.4),
                                          ((.3, .4, .3, 0), (.6, .3, .1, 0), 3, 1.75),
                                          ((.5, .3, .1, .1), (.1, .2, .3, .4), 2, 1.5844)])
def test_rho(p, q, k, rho):
  """By a root finder, and by what it makes of the first child: p / (rho q)."""
  p, q = (np.tile(x, (VOCABULARY, 1)) for x in (p, q))
  assert slow.rho_of(p[0], q[0], k) == pytest.approx(rho, abs=5e-5)
  tokens = np.tile(np.arange(VOCABULARY)[:, None], k)
  stop, _ = slow.star(p, q, tokens, np.ones(k)).law(K_SEQ)
  wanted = np.minimum(1, p[0] / np.maximum(q[0], 1e-9) / slow.rho_of(p[0], q[0], k))
  np.testing.assert_allclose(stop[:VOCABULARY, 1], wanted, atol=1e-11)


def test_k_seq_refuses_what_it_cannot_judge():
  given = drafts(31, kind="point")
  with pytest.raises(ValueError, match="drawn with replacement; use recursive or traversal"):
    K_SEQ.stops(given.p, given.tree(np.float32, law=None), WIDTH - 1)
  with pytest.raises(ValueError, match="drawn with replacement; use recursive or traversal"):
    K_SEQ.stops(given.p, drafts(31, replacement=False).tree(np.float32), WIDTH - 1)


@pytest.mark.parametrize("rule", [RECURSIVE, TRAVERSAL, K_SEQ, GREEDY_MULTI], ids=slow.name)
def test_duplicates_and_forbidden_tokens_do_no_harm(rule):
  """All pairs of independent draws: equal ones, ones with p = 0; the law of the token is p."""
  p, q, tokens, chance = all_draws(1, 4, 2)
  given = slow.star(p, q, tokens, np.ones(2))
  answer = given.law(rule)
  law = (slow.first_token(answer, given) * chance[:, None]).reshape(4, -1, VOCABULARY).sum(1)
  np.testing.assert_allclose(law, p[::VOCABULARY ** 2], atol=1e-11)
  seen = np.take_along_axis(p, tokens, 1)
  assert (answer[0][:, 1:3][(seen == 0) & (chance > 0)[:, None]] == 0).all()
  possible = (chance > 0) & (tokens[:, 0] == tokens[:, 1]) & (seen[:, 0] > 0)
  assert (seen[chance > 0] == 0).any() and possible.any()
  if rule is RECURSIVE:  # what is left after a rejection gives the token itself nothing
    assert (answer[0][possible, 2] == 0).all()


@pytest.mark.parametrize("rule", [RECURSIVE, TRAVERSAL], ids=slow.name)
def test_a_duplicate_that_cannot_be_is_rejected(rule):
  """Without replacement a second copy has a law that gives it nothing."""
  p, q, tokens, _ = all_draws(2, 4, 2)
  tokens[:, 1] = tokens[:, 0]
  stop, _ = slow.star(p, q, tokens, np.ones(2), replacement=False).law(rule)
  assert (stop[:, 2] == 0).all()
  np.testing.assert_allclose(stop.sum(-1), 1, atol=1e-12)


@pytest.mark.parametrize("rule, shape", [(REJECTION, "chain"), (BLOCK, "chain"), (RECURSIVE, "tree"),
                                         (TRAVERSAL, "tree"), (K_SEQ, "tree"), (GREEDY_MULTI, "tree")], ids=slow.name)
def test_a_token_that_its_own_law_forbids_is_rejected(rule, shape):
  given = drafts(33, kind="iid", shape=shape, ragged=False)
  dead = np.zeros((ROWS, WIDTH), bool)
  for row in range(ROWS):
    node = 1 + row % (WIDTH - 1)
    given.q[row, given.parents[row, node], given.tokens[row, node]] = 0  # no law any more; what matters is the 0
    dead[row, node] = True
    for below in range(node + 1, WIDTH):
      dead[row, below] = dead[row, given.parents[row, below]]
  stop, following = given.law(rule)
  assert (stop[dead] == 0).all() and np.isfinite(stop).all() and np.isfinite(following).all()


@pytest.mark.parametrize("rule", [RECURSIVE, TRAVERSAL], ids=slow.name)
def test_drafting_all_of_the_support_without_replacement_is_accepted(rule):
  orders = np.array(list(itertools.permutations(range(VOCABULARY))))
  rng = np.random.default_rng(3)
  p, q = (slow.random_laws(rng, (len(orders),), VOCABULARY, zeros) for zeros in (.3, 0))
  given = slow.star(p, q, orders, np.ones(4), replacement=False)
  answer = given.law(rule)
  np.testing.assert_allclose(answer[0][:24, 0], 0, atol=1e-12)
  chance = np.ones(len(orders))  # of this order; the law over all of them is p when p and q are the same for all
  given = slow.star(np.tile(p[0], (24, 1)), np.tile(q[0], (24, 1)), orders, np.ones(4), replacement=False)
  left = np.tile(q[0], (24, 1))
  for token in orders.T:
    chance *= left[np.arange(24), token] / left.sum(-1)
    left[np.arange(24), token] = 0
  np.testing.assert_allclose(chance @ slow.first_token(given.law(rule), given)[:24], p[0], atol=1e-11)


@pytest.mark.parametrize("points", [1, 2])
def test_greedy_multi_reaches_the_bound(points):
  """The best tokens of q for certain and one of the rest: p(top) + sum of min(p, q of the rest)."""
  rng = np.random.default_rng(points)
  p, q = (np.repeat(slow.random_laws(rng, (16,), VOCABULARY, 0), VOCABULARY, 0) for _ in range(2))
  top = np.argsort(-q, 1)[:, :points]
  rest = q.copy()
  np.put_along_axis(rest, top, 0, 1)
  rest /= rest.sum(-1, keepdims=True)
  drawn = np.tile(np.arange(VOCABULARY), 16)[:, None]
  chance = np.take_along_axis(rest, drawn, 1)[:, 0]
  given = slow.star(p, q, np.concatenate([top, drawn], 1), np.array([False] * points + [True]), recorded=rest)
  answer = given.law(GREEDY_MULTI)
  each = lambda x: (x * chance[:, None]).reshape(16, VOCABULARY, -1).sum(1)
  wanted = np.take_along_axis(p, top, 1).sum(-1) + np.minimum(p, rest).sum(-1)
  np.testing.assert_allclose(each(1 - answer[0][:, :1])[:, 0], wanted[::VOCABULARY], atol=1e-11)
  np.testing.assert_allclose(each(slow.first_token(answer, given)), p[::VOCABULARY], atol=1e-11)


def test_recursive_judges_sampled_children_first():
  """A point in front of a draw of its token: the draw takes its share first, the point what is left."""
  p, q = np.array([[.5, .3, .1, .1]]), np.array([[.25, .25, .25, .25]])
  tokens = np.array([[0, 0]])
  stop = slow.star(p, q, tokens, np.array([False, True])).law(RECURSIVE)[0][0]
  np.testing.assert_allclose(stop[:3], (0, 0, 1), atol=1e-12)  # p / q = 2: the draw is always accepted
  stop, following = (x[0] for x in slow.star(p, q, np.array([[0, 3]]), np.array([False, True])).law(RECURSIVE))
  np.testing.assert_allclose(stop[:3], (.6 * .05 / .3, .6 * .25 / .3, .4), atol=1e-12)
  np.testing.assert_allclose(following[0], (0, 1, 0, 0), atol=1e-12)
