"""Draft length rules against closed forms, hand-written sequences and slow ones in Python."""
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.proposers import length
from specjax.proposers import renewal
from specjax.theory import closed_forms

ALPHAS = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
COSTS = (0.01, 0.02, 0.052, 0.12, 0.22, 0.33, 0.45)
MOST = 63
RULES = {"fixed": length.Fixed(), "heuristic": length.Heuristic(), "confidence": length.Confidence(),
         "entropy": length.Entropy(), "renewal": length.Renewal()}
FREE = (1.0,) * len(renewal.REFERENCE_WIDTHS)  # a pass costs the same at every width


@functools.partial(jax.jit, static_argnums=(0, 1))
def make(batch, num_tokens, rule):
  return rule.init(batch, num_tokens)


@jax.jit
def go_on(rule, state, drafted, survival, confidence, entropy):
  return rule.go_on(state, drafted, survival, confidence, entropy)


@functools.partial(jax.jit, static_argnums=2)
def limit(rule, state, num_tokens):
  return rule.limit(state, num_tokens)


@jax.jit
def observe(rule, state, drafted, accepted):
  return rule.observe(state, drafted, accepted)


@jax.jit
def cut(rule, state, count, confidence):
  return length.cut(rule, state, count, confidence)


@jax.jit
def all_places(rule, state, beta):
  """`go_on` after 0, 1, 2 .. drafted tokens of constant acceptance f[B]: bool[N, B]."""
  places = jnp.arange(state.tried.shape[1])
  return jax.vmap(lambda drafted: rule.go_on(state, drafted, beta ** drafted, beta, None))(places)


def ints(*values):
  return jnp.asarray(values, jnp.int32)


def floats(*values):
  return jnp.asarray(values, jnp.float32)


def optimum(alpha, cost_of, most=MOST):
  """The length of the greatest expected tokens per cost, and that rate."""
  rates = [(1 + closed_forms.expected_accepted(alpha, g)) / cost_of(g) for g in range(most + 1)]
  best = int(np.argmax(rates))
  return best, rates[best], sorted(rates)[-1] / sorted(rates)[-2] - 1


def known(rule, batch, rate):
  """A state whose rho is `rate`."""
  state = make(batch, MOST, rule)
  return state.replace(tokens=jnp.broadcast_to(jnp.asarray(rate, jnp.float32), (batch,)), cost=jnp.ones(batch))


# --- renewal --------------------------------------------------------------------------------------------------------


def test_renewal_finds_the_best_length_for_constant_acceptance():
  """papers.md 1.15: 84 pairs of acceptance and draft cost; asked token by token, and on a known chain."""
  pairs = [(alpha, cost) for alpha in ALPHAS for cost in COSTS]
  assert len(pairs) == 84
  lengths = set()
  for cost in COSTS:
    rule = length.Renewal(draft_cost=cost, verify_costs=FREE, probe_tokens=0)
    wanted, rates, margins = zip(*[optimum(alpha, lambda g: 1 + cost * g) for alpha in ALPHAS])
    assert min(margins) > 1e-5  # no ties
    state, beta = known(rule, len(ALPHAS), rates), floats(*ALPHAS)
    going = all_places(rule, state, beta)
    assert np.cumprod(going, axis=0).sum(0).tolist() == list(wanted)
    scores = jnp.broadcast_to(beta[:, None], (len(ALPHAS), MOST))
    assert cut(rule, state, jnp.full(len(ALPHAS), MOST), scores).tolist() == list(wanted)
    lengths |= set(wanted)
  assert 0 in lengths and max(lengths) > 20


def test_renewal_on_verify_widths():
  """With steps of cost a draft fills a width or stops at one, and nothing is drafted where no width pays."""
  rule = length.Renewal(draft_cost=0.01, widths=(1, 8, 16), probe_tokens=0)
  cost_of = lambda g: (1.0 if g == 0 else 1.5 if g < 8 else 1.91) + 0.01 * g
  wanted, rates, margins = zip(*[optimum(alpha, cost_of, 15) for alpha in ALPHAS])
  assert min(margins) > 1e-4 and {0, 15} < set(wanted) and len(set(wanted)) > 4
  batch, beta = len(ALPHAS), floats(*ALPHAS)
  state = make(batch, 15, rule).replace(tokens=floats(*rates), cost=jnp.ones(batch))
  assert cut(rule, state, jnp.full(batch, 15), jnp.broadcast_to(beta[:, None], (batch, 15))).tolist() == list(wanted)
  assert np.cumprod(all_places(rule, state, beta), axis=0).sum(0).tolist() == list(wanted)


def test_rho_finds_its_fixed_point():
  """From plain decoding's rate the iteration ends at the best length and rate, told expected tokens only."""
  rule = length.Renewal(draft_cost=0.05, verify_costs=FREE)
  survival = 0.8 ** jnp.arange(1, MOST + 1, dtype=jnp.float32)[None]
  rate, costs = floats(1.0), rule.costs(MOST)
  for _ in range(8):
    best = renewal.best_length(survival, rate, costs, ints(MOST))
    rate = (1 + survival[0, :best[0]].sum(keepdims=True)) / costs[best]
  assert best.tolist() == [8] and float(rate[0]) == pytest.approx(3.092, abs=1e-3)  # papers.md row 23


def play(rule, alphas, steps, num_tokens=7, seed=0):
  """Runs a rule on drafts without scores, accepted with chance `alphas`: drafted and accepted, i[steps, B] each."""
  rng, state, history = np.random.default_rng(seed), make(len(alphas), num_tokens, rule), []
  full = jnp.full(len(alphas), num_tokens)
  for _ in range(steps):
    drafted = np.asarray(cut(rule, state, full, None))
    lucky = np.cumprod(rng.random((len(alphas), num_tokens)) < np.asarray(alphas)[:, None], axis=1).sum(-1)
    accepted = np.minimum(lucky, drafted)
    state = observe(rule, state, ints(*drafted), ints(*accepted))
    history.append((drafted, accepted))
  return np.asarray(history).transpose(1, 0, 2)


def test_renewal_learns_and_never_costs_more_than_a_little():
  """Always wrong: few steps draft. Often right: close to the best fixed length, found from past rounds alone."""
  rule = length.Renewal(widths=(1, 4, 8))
  drafted, accepted = play(rule, (0.0, 0.1, 0.9, 1.0), 400)
  cost = np.asarray(rule.costs(7))[drafted].sum(0)
  rate = (400 + accepted.sum(0)) / cost
  assert (drafted[:, 0] > 0).mean() < 0.04 and rate[0] > 0.98
  assert (drafted[200:, 0] > 0).sum() > 0  # it tries again, at times
  assert rate[1] > 0.97
  best = max((1 + closed_forms.expected_accepted(0.9, g)) / float(rule.costs(7)[g]) for g in range(8))
  assert rate[2] > 0.95 * best and rate[3] > 5.2
  assert (drafted[20:, 3] == 7).all()


def test_a_row_that_stopped_drafting_comes_back():
  rule = length.Renewal(widths=(1, 4, 8))
  state, full, drafts = make(1, 7, rule), jnp.full(1, 7), []
  for step in range(300):
    drafted = cut(rule, state, full, None)
    drafts.append(int(drafted[0]))
    state = observe(rule, state, drafted, drafted * (step >= 150))
  assert max(drafts[100:140]) <= 3 and sum(map(bool, drafts[50:150])) <= 4
  assert drafts[230:] == [7] * 70


def test_the_limit_without_scores_is_all_or_nothing():
  """A drafter with scores asks token by token; by past rounds alone a row is worth drafting for or not."""
  rule = length.Renewal(widths=(1, 4, 8))
  state = make(3, 7, rule)
  assert limit(rule, state, 7).tolist() == [7, 7, 7]
  for _ in range(4):
    state = observe(rule, state, ints(7, 7, 0), ints(0, 7, 0))
  assert limit(rule, state, 7).tolist() == [0, 7, 7]
  assert go_on(rule, state, 0, None, None, None).tolist() == [False, True, True]


def test_the_limit_alone_is_the_best_length():
  """For drafters whose law is not read: what `cut` keeps of a full draft, and no token by token."""
  rule = length.Renewal(widths=(1, 4, 8), reads_laws=False)
  state, full = make(3, 7, rule), jnp.full(3, 7)
  for _ in range(4):
    state = observe(rule, state, ints(7, 7, 7), ints(0, 7, 1))
  wanted = cut(rule, state, full, None).tolist()
  assert limit(rule, state, 7).tolist() == wanted == [0, 7, 3]  # three fit into the smallest width
  assert {name: rule.reads_laws for name, rule in RULES.items()} == {
      "fixed": False, "heuristic": False, "confidence": True, "entropy": True, "renewal": True}


def test_drafts_that_the_text_judges_need_no_tries():
  """Lookup knows without verification that its first token was wrong, or right: it stops and comes back by that."""
  rule = length.Renewal(widths=(1, 4, 8), probe_tokens=0)
  judge = jax.jit(lambda rule, state, *numbers: rule.observe(state, *numbers[:2], judged=numbers[2], agreed=numbers[3]))
  state, full, drafts = make(1, 7, rule), jnp.full(1, 7), []
  for right in [0] * 60 + [7] * 20:
    drafted = cut(rule, state, full, None)
    drafts.append(int(drafted[0]))
    accepted = jnp.minimum(drafted, right)
    judged = jnp.minimum(accepted + 1, 7)  # as many as were emitted
    state = judge(rule, state, drafted, accepted, judged, jnp.minimum(judged, right))
  assert sum(map(bool, drafts[:60])) <= 3 and not any(drafts[5:60])
  assert drafts[75:] == [7] * 5


def test_what_the_text_says_of_a_draft():
  draft = jnp.asarray([[5, 6, 7, 8]] * 6)
  emitted = jnp.asarray([[5, 6, 7, 8, 1], [5, 6, 9, 0, 0], [5, 0, 0, 0, 0], [4, 0, 0, 0, 0], [5, 6, 7, 0, 0],
                         [5, 6, 7, 8, 1]])
  judged, agreed = length.judge(draft, ints(4, 4, 4, 4, 2, 0), emitted, ints(5, 3, 1, 1, 3, 5))
  assert judged.tolist() == [4, 3, 1, 1, 2, 0] and agreed.tolist() == [4, 2, 1, 0, 2, 0]


def test_scores_are_corrected_by_their_record():
  """Against the slow one; a row whose scores are worth nothing stops drafting."""
  rule = length.Renewal(widths=(1, 4, 8), score_memory=0.9, score_weight=1.0, least_rate=1.3,
                        probe_tokens=0)
  learn = jax.jit(lambda rule, state, drafted, accepted, scores: rule.observe(state, drafted, accepted,
                                                                              confidence=scores))
  scores = floats(0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.5)[None]
  state, expected, right = make(1, 7, rule), 0.0, 0.0
  assert cut(rule, state, ints(7), scores).tolist() == [7]
  for drafted, accepted in [(7, 2), (0, 0), (3, 3), (7, 0), (2, 1), *[(7, 0)] * 12]:
    state = learn(rule, state, ints(drafted), ints(accepted), scores)
    if drafted:
      judged = min(accepted + 1, drafted)
      expected, right = 0.9 * expected + float(scores[0, :judged].sum()), 0.9 * right + accepted
  record = (right + 1) / (expected + 1)
  np.testing.assert_allclose(rule.calibrate(state, scores), scores * record, rtol=1e-5)
  assert record < 0.4 and cut(rule, state, ints(7), scores).tolist() == [0]


def test_confidence_of_copies():
  match, seen, same = (ints(*x) for x in zip((0, 0, 0), (1, 1, 1), (4, 1, 1), (4, 10, 9), (100, 1, 1)))
  wanted = [0, 1 / 4, 1 / 1.375, 9 / 10.375, 1 / 1.003]
  np.testing.assert_allclose(length.copy_confidence(match, seen, same), wanted, rtol=1e-5)


def test_survival_is_the_slow_one_of_past_rounds():
  """Discounted counts per place, the pooled acceptance behind them."""
  rule, rounds = length.Renewal(memory=0.8, prior=0.6, prior_weight=3.0), [(5, 3), (0, 0), (2, 2), (5, 0), (7, 6)]
  state, tried, passed = make(1, 7, rule), np.zeros(7), np.zeros(7)
  for drafted, accepted in rounds:
    state = observe(rule, state, ints(drafted), ints(accepted))
    if drafted:
      tried, passed = tried * 0.8, passed * 0.8
      for place in range(min(accepted + 1, drafted)):
        tried[place] += 1
        passed[place] += place < accepted
  pool = (passed.sum() + 3 * 0.6) / (tried.sum() + 3)
  np.testing.assert_allclose(rule.acceptance(state)[0], (passed + 3 * pool) / (tried + 3), rtol=1e-5)


# --- the others -----------------------------------------------------------------------------------------------------


def test_heuristic_against_a_hand_written_sequence():
  state = make(1, 7, RULES["heuristic"])
  lengths = []
  for share in (1, 0, 0, 0.5, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1):
    drafted = limit(RULES["heuristic"], state, 7)
    lengths.append(int(drafted[0]))
    state = observe(RULES["heuristic"], state, drafted, (drafted * share).astype(jnp.int32))
  assert lengths == [7, 7, 6, 5, 4, 3, 2, 1, 1, 3, 5, 4, 6, 7]


def test_a_round_without_a_draft_teaches_no_length():
  for name in ("heuristic", "entropy"):
    state = make(2, 7, RULES[name])
    after = observe(RULES[name], state, ints(0, 0), ints(0, 0))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state, after))


def test_confidence_and_entropy_thresholds():
  state = make(3, 7, RULES["confidence"])
  assert go_on(RULES["confidence"], state, 2, None, floats(0.39, 0.4, 0.9), None).tolist() == [False, True, True]
  entropy, rule = np.array([0.0, 1.0, 3.0, 3.3, 8.0]), length.Entropy(factor=0.2, start=0.2)
  state = make(5, 7, rule)
  wanted = 1 - np.sqrt(0.2 * entropy) >= 0.2
  assert go_on(rule, state, 0, None, None, floats(*entropy)).tolist() == wanted.tolist()
  assert wanted.tolist() == [True, True, True, False, False]
  assert not go_on(rule, state, ints(0, 3, 6, 7, 8), None, None, jnp.zeros(5))[3:].any()  # the draft is full


def test_the_entropy_threshold_follows_the_acceptance():
  rule = length.Entropy(start=0.3, target=0.8, pace=0.05, memory=0.7, rate_memory=0.6)
  state, threshold, rate = make(1, 7, rule), 0.3, 0.8
  for drafted, accepted in [(4, 4), (4, 4), (5, 1), (2, 0), (0, 0), (3, 3), (6, 6)]:
    state = observe(rule, state, ints(drafted), ints(accepted))
    if drafted:
      rate = 0.6 * rate + 0.4 * accepted / drafted
      threshold = 0.7 * threshold + 0.3 * (threshold + (0.05 if rate <= 0.8 else -0.05))
  np.testing.assert_allclose([state.threshold[0], state.acceptance[0]], [threshold, rate], rtol=1e-5)
  assert threshold > 0.3


def test_rules_that_need_a_law_say_so():
  for name, missing in (("confidence", "confidence"), ("entropy", "entropy")):
    rule = RULES[name]
    with pytest.raises(ValueError, match=f"stops by the draft law's {missing}, and this drafter has none; use"):
      cut(rule, make(1, 7, rule), ints(3), None)


def test_cut_is_asking_token_by_token():
  """With scores: the threshold's leading run; without: the limit. Never more than there is."""
  scores = floats(0.9, 0.5, 0.2, 0.9, 0.9, 0.9, 0.9)[None].repeat(3, 0)
  rule = RULES["confidence"]
  assert cut(rule, make(3, 7, rule), ints(7, 1, 0), scores).tolist() == [2, 1, 0]
  for name in ("fixed", "heuristic"):
    assert cut(RULES[name], make(3, 7, RULES[name]), ints(7, 4, 0), None).tolist() == [7, 4, 0]
    assert cut(RULES[name], make(3, 7, RULES[name]), ints(7, 4, 0), scores).tolist() == [7, 4, 0]
  state = observe(RULES["heuristic"], make(3, 7, RULES["heuristic"]), ints(7, 7, 7), ints(0, 0, 7))
  assert cut(RULES["heuristic"], state, ints(7, 5, 7), None).tolist() == [6, 5, 7]


# --- all of them ----------------------------------------------------------------------------------------------------


def decide(rule, state):
  batch = state_batch(state)
  spread = lambda x: jnp.full(batch, x, jnp.float32)
  return [limit(rule, state, 7), go_on(rule, state, 1, spread(0.7), spread(0.6), spread(0.9))]


def state_batch(state):
  return jax.tree.leaves(state)[0].shape[0]


@pytest.mark.parametrize("name", RULES)
def test_rows_are_independent(name):
  """A row among others, in another order and alone decides the same."""
  rule, rng = RULES[name], np.random.default_rng(3)
  drafted = rng.integers(0, 8, (12, 4))
  accepted = (drafted * rng.random((12, 4)) * np.array([0, 0.5, 1, 1.3])).clip(0, drafted).astype(int)

  def run(rows):
    state, seen = make(len(rows), 7, rule), []
    for d, a in zip(drafted, accepted):
      state = observe(rule, state, ints(*d[rows]), ints(*a[rows]))
      seen.append(np.stack([np.asarray(x, float) for x in decide(rule, state)]))
    return np.stack(seen)

  together = run([0, 1, 2, 3])
  assert (run([3, 1, 0, 2]) == together[..., [3, 1, 0, 2]]).all()
  assert (run([2, 2, 2, 2])[..., 0] == together[..., 2]).all()


@pytest.mark.parametrize("name,other", [
    ("heuristic", length.Heuristic(up=3.0, down=2.0)), ("confidence", length.Confidence(threshold=0.7)),
    ("entropy", length.Entropy(start=0.5, target=0.6, factor=0.3)),
    ("renewal", length.Renewal(draft_cost=0.3, verify_costs=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), prior=0.2, last_wait=9))])
def test_other_numbers_compile_nothing(name, other):
  """And are read: they decide otherwise."""
  rule = RULES[name]
  traces = []

  @jax.jit
  def both(rule, state, confidence, entropy, drafted, accepted):
    traces.append(name)
    state = rule.observe(state, drafted, accepted)
    return rule.go_on(state, 1, confidence, confidence, entropy), rule.limit(state, 7)

  confidence, entropy = jnp.linspace(0.05, 0.95, 8), jnp.linspace(3.5, 0.1, 8)
  drafted, accepted = jnp.full(8, 4), ints(0, 1, 2, 2, 3, 3, 4, 4)
  decided = [both(r, make(8, 7, rule), confidence, entropy, drafted, accepted) for r in (rule, other)]
  assert len(traces) == 1
  assert any((a != b).any() for a, b in zip(*decided))


@pytest.mark.parametrize("name", RULES)
def test_decisions_see_no_target(name):
  """What may be looked at is all in the signatures: no target law, no drawn token, no draw of the verifier."""
  rule = RULES[name]
  assert list(inspect.signature(rule.limit).parameters) == ["state", "num_tokens"]
  assert list(inspect.signature(rule.go_on).parameters) == ["state", "drafted", "survival", "confidence", "entropy"]
  state = make(2, 7, rule)
  assert limit(rule, state, 7).tolist() == [7, 7] and limit(rule, state, 7).dtype == jnp.int32
  assert jax.tree.structure(observe(rule, state, ints(3, 0), ints(2, 0))) == jax.tree.structure(state)
  same = jax.tree.map(lambda a, b: a.dtype == b.dtype and a.shape == b.shape, state,
                      observe(rule, state, ints(3, 0), ints(2, 0)))
  assert jax.tree.all(same)


@pytest.mark.parametrize("make_it,message", [
    (lambda: length.Renewal(widths=(4, 8)), r"widths=\(4, 8\): they start with 1"),
    (lambda: length.Renewal(widths=(1, 5)), r"widths=\(1, 5\): they start with 1, ascend and stand in"),
    (lambda: length.Renewal(verify_costs=(1.0, 1.3)), "verify_costs has 2 entries; it needs one for each"),
    (lambda: length.Renewal(widths=(1, 4, 8)).init(1, 8), "num_tokens=8: with the root that is more than the widest"),
])
def test_errors(make_it, message):
  with pytest.raises(ValueError, match=message):
    make_it()
