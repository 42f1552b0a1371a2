"""Lossy rules as laws: what they accept and emit, by pseudocode and enumeration, and how far from the target it is."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow_rules as slow
from specjax import sampling
from specjax import verifiers

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, WIDTH, VOCABULARY = 64, 6, 4
TOY_A = (np.array([[.3, .4, .3, 0]]), np.array([[.6, .3, .1, 0]]))  # a fourth id that neither gives


def drafts(seed, **how):
  return slow.random_drafts(seed, ROWS, WIDTH, VOCABULARY, **how)


@functools.cache
def jitted_strays(rule):
  return jax.jit(lambda p, tree: rule.strays(p, tree, rule.stops(p, tree, WIDTH - 1)[1]))


def strays(rule, given):
  with jax.enable_x64(True):
    return np.asarray(jitted_strays(rule)(jnp.asarray(given.p), given.tree()))


def every_token(p, q):
  """One drafted token, each that there is, below p and q f64[B, V]: drafts and their chance f64[B, V]."""
  p, q = (np.repeat(x, VOCABULARY, 0) for x in (p, q))
  tokens = np.tile(np.arange(VOCABULARY), len(p) // VOCABULARY)[:, None]
  return slow.star(p, q, tokens, np.ones(1)), np.take_along_axis(q, tokens, 1)


def output(rule, p, q):
  """The law of the first token when one is drafted from q: f64[B, V]."""
  given, chance = every_token(p, q)
  law = slow.first_token(given.law(rule), given)[:len(chance)]
  return (law * chance).reshape(-1, VOCABULARY, VOCABULARY).sum(1)


def some_laws(seed):
  rng = np.random.default_rng(seed)
  return (slow.random_laws(rng, (ROWS // VOCABULARY,), VOCABULARY) for _ in range(2))


def mixed_law(p, q, rule, alpha):
  """Of a cascade, one row after another."""
  mixed = []
  for target, draft in zip(p, q, strict=True):
    draft = slow.allowed(target, draft)
    if rule == "token":
      trusted = {v for v in range(len(target)) if target[v] >= (1 - alpha) * max(target)}
      lost = sum(draft[v] for v in range(len(target)) if v not in trusted)
      mixed.append([(draft[v] if v in trusted else 0) + target[v] * lost for v in range(len(target))])
    else:
      defers = max(draft) < max(target) - alpha * np.abs(target - draft).sum() / 2
      mixed.append(target if defers else draft)
  return np.array(mixed)


@pytest.mark.parametrize("epsilon, alpha", [(.09, .3), (.3, .09), (.5, 1.)])
def test_typical_by_walking(epsilon, alpha):
  rule = verifiers.LossyTypical(epsilon=epsilon, alpha=alpha)
  reference = functools.partial(slow.typical, epsilon=epsilon, alpha=alpha)
  deepest = 0
  for seed, kind in enumerate(("iid", "mixture", "point")):
    given = drafts(seed, kind=kind)
    wanted = slow.answers(reference, given)
    slow.assert_same(given.law(rule), wanted)
    deepest = max(deepest, slow.accepted(wanted[0], given).max())
  assert deepest >= 2


def test_typical_thresholds():
  """p = (.5, .3, .2): H = 1.02965; .09 in the paper's setting and .0321 with the reference function's defaults."""
  p = np.array([[.5, .3, .2, 0], [.6, .3, .05, .05], [.92, .05, .03, 0]])
  given, _ = every_token(p, np.full((3, 4), .25))
  accepts = lambda rule: (given.law(rule)[0][:12, 1] == 1).reshape(3, 4).astype(int).tolist()
  assert accepts(verifiers.LossyTypical()) == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
  assert accepts(verifiers.LossyTypical(epsilon=.3, alpha=.09)) == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
  bar = .09 * np.exp((np.array([.5, .3, .2]) * np.log([.5, .3, .2])).sum())
  assert bar == pytest.approx(.0321, abs=5e-5)
  edge = np.array([[.5, .5 - .04, .04, 0], [.5, .5 - .03, .03, 0]])  # H = .98, so the bar is .0337
  given, _ = every_token(edge, np.full((2, 4), .25))
  assert given.law(verifiers.LossyTypical(epsilon=.3, alpha=.09))[0][:8, 1].tolist() == [1, 1, 1, 0, 1, 1, 0, 0]


def test_typical_takes_the_longest_path_and_the_most_probable_of_these():
  make = lambda parents, tokens, p: slow.Drafts(
      np.tile(tokens, (ROWS, 1)), np.tile(parents, (ROWS, 1)), np.full(ROWS, WIDTH), np.zeros((ROWS, WIDTH)),
      np.zeros((ROWS, WIDTH, VOCABULARY)), np.tile(p, (ROWS, 1, 1)))
  flat, sharp = (.4, .3, .2, .1), (.1, .7, .1, .1)
  ends = lambda given: int(given.law(verifiers.LossyTypical())[0][0].argmax())
  # A long path of improbable tokens beats the best single one; of the two long ones the second is more probable.
  given = make((0, 0, 0, 2, 0, 4), (0, 0, 2, 2, 1, 1), np.array([flat, flat, flat, flat, flat, sharp]))
  assert ends(given) == 5
  given = make((0, 0, 0, 2, 0, 4), (0, 0, 2, 2, 1, 1), np.array([flat, flat, sharp, flat, sharp, sharp]))
  assert ends(given) == 5
  given = make((0, 0, 0, 0, 0, 0), (0, 3, 1, 0, 0, 2), np.array([flat] * 6))
  assert ends(given) == 3  # equal ones: the first


def test_typical_tells_deep_paths_apart():
  """Single precision cannot hold a depth and a small chance in one number; each has its own."""
  depth, vocabulary = 8, 64
  tokens, parents = np.zeros((1, 2 * depth + 1), int), np.zeros((1, 2 * depth + 1), int)
  p = np.full((1, 2 * depth + 1, vocabulary), 1 / vocabulary)
  tokens[0, 1:depth + 1], tokens[0, depth + 1:] = 1, 2
  parents[0, 1:] = [0, *range(1, depth), 0, *range(depth + 1, 2 * depth)]
  p[0, 0, 2] *= 1.5
  p /= p.sum(-1, keepdims=True)
  given = slow.Drafts(tokens, parents, [2 * depth + 1], tokens * 0, p * 0, p)
  stop, _ = given.law(verifiers.LossyTypical(alpha=.5), depth, np.float32)
  assert stop[0, -1] == 1


def test_typical_at_temperature_0_is_greedy():
  given = drafts(9, kind="point")
  given.p = np.eye(VOCABULARY)[given.p.argmax(-1)]
  stop, following = given.law(verifiers.LossyTypical())
  slow.assert_same((stop, following), slow.answers(slow.recursive, given))
  assert (strays(verifiers.LossyTypical(), given)[stop > 0] == 0).all()


@pytest.mark.parametrize("lenience", [1., .5, .1])
def test_lenient_in_numpy(lenience):
  rule = verifiers.LossyLenient(lenience=lenience)
  for seed, kind in enumerate(("iid", "mixture", "point")):
    given = drafts(40 + seed, kind=kind, shape="chain")
    slow.assert_same(given.law(rule), slow.answers(functools.partial(slow.rejection, lenience=lenience), given), 1e-11)
    if lenience == 1:
      slow.assert_same(given.law(rule), given.law(verifiers.Rejection()))
      assert (strays(rule, given) < 1e-12).all()


def test_lenient_on_toy_a():
  """At .5 every drafted token is accepted, so the output is the draft's own law."""
  rule = verifiers.LossyLenient(lenience=.5)
  given, _ = every_token(*TOY_A)
  assert given.law(rule)[0][:3, 1].tolist() == [1, 1, 1]
  np.testing.assert_allclose(output(rule, *TOY_A), TOY_A[1], atol=1e-12)


def test_lenient_gives_no_token_more_than_its_bound():
  p, q = some_laws(41)
  law = output(verifiers.LossyLenient(lenience=.5), p, q)
  np.testing.assert_allclose(law.sum(-1), 1, atol=1e-12)
  assert (law <= p / .5 + 1e-12).all() and (law > p + .05).any()


def lenient_greedy(lenience, logits, given, temperature):
  """stop, next and strays of rows of which some are greedy."""
  rule = verifiers.LossyLenient(lenience=lenience)

  @jax.jit
  def answer(logits, tree, params):
    p = sampling.law(logits, params, params.mode())
    evidence = rule.evidence(logits, tree, params)
    rest = rule.stops(p, tree, WIDTH - 1, **evidence)[1]
    return *rule.law(p, tree, WIDTH - 1, **evidence), rule.strays(p, tree, rest), p

  params = sampling.SamplingParams(temperature=temperature).batch(ROWS)
  return [np.asarray(x, np.float64) for x in answer(jnp.asarray(logits, jnp.float32), given.tree(np.float32), params)]


@pytest.mark.parametrize("lenience", [1., .6])
def test_lenient_at_temperature_0(lenience):
  """A draft close enough to the best token is accepted, and no other; sampled rows beside it stay what they are."""
  given = drafts(42, shape="chain", ragged=False)
  rng = np.random.default_rng(42)
  logits = rng.normal(size=given.p.shape)
  best = logits.max(-1)
  for row in range(0, ROWS, 2):  # half of the drafts are the best token or a near one
    for node in range(WIDTH - 1):
      given.tokens[row, node + 1] = np.argsort(-logits[row, node])[rng.integers(2)]
      given.q[row, node] = np.where(np.isnan(given.q[row, node]), np.nan, .25)
  temperature = np.where(np.arange(ROWS) % 4 == 1, 1., 0.)
  stop, following, strayed, p = lenient_greedy(lenience, logits, given, temperature)
  wanted_p = np.exp(logits - best[..., None])
  given.p = np.where(temperature[:, None, None] == 0, np.eye(VOCABULARY)[logits.argmax(-1)],
                     wanted_p / wanted_p.sum(-1, keepdims=True))
  np.testing.assert_allclose(p, given.p, atol=1e-6)
  depths = []
  for row in range(ROWS):
    if temperature[row]:
      wanted = slow.rejection(given, row, lenience)
      np.testing.assert_allclose(stop[row][:, None] * following[row], wanted[0][:, None] * wanted[1], atol=2e-6)
      continue
    close = [wanted_p[row, node, given.tokens[row, node + 1]] >= lenience for node in range(WIDTH - 1)]
    end = close.index(False) if False in close else WIDTH - 1
    np.testing.assert_array_equal(stop[row], np.arange(WIDTH) == end)
    assert following[row, end].argmax() == logits[row, end].argmax() and following[row, end].max() > 1 - 1e-6
    away = [close[node] and given.tokens[row, node + 1] != logits[row, node].argmax() for node in range(WIDTH - 1)]
    np.testing.assert_array_equal(strayed[row], [*away, False])
    depths.append(end)
  assert 0 in depths and max(depths) >= 3


@pytest.mark.parametrize("rule, alpha", [("token", 0.), ("token", .4), ("opt", 0.), ("opt", .5)])
def test_the_law_of_a_cascade(rule, alpha):
  p, q = some_laws(50)
  wanted = mixed_law(p, q, rule, alpha)
  assert (wanted[p == 0] == 0).all() and (q[p == 0] > 0).any()  # what the target forbids stays forbidden
  np.testing.assert_allclose(output(verifiers.LossyCascade(rule=rule, alpha=alpha), p, q), wanted, atol=1e-11)
  if rule == "opt":
    defers = (wanted == p).all(-1)
    assert defers.any() and not defers.all()


def test_cascade_on_toy_a():
  law = output(verifiers.LossyCascade(rule="token", alpha=0.), *TOY_A)[0]
  np.testing.assert_allclose(law, (.21, .58, .21, 0), atol=1e-12)


@pytest.mark.parametrize("rule, alpha", [("token", .4), ("opt", .5)])
def test_cascade_is_rejection_towards_the_mixture(rule, alpha):
  """Along whole chains; behind the draft, where there is no q, the target's own law stands."""
  given = drafts(51, kind="iid", shape="chain")
  has = ~np.isnan(given.q[..., 0])
  mixed = given.take(np.arange(ROWS))
  mixed.p[has] = mixed_law(given.p[has], given.q[has], rule, alpha)
  cascade = verifiers.LossyCascade(rule=rule, alpha=alpha)
  slow.assert_same(given.law(cascade), slow.answers(slow.rejection, mixed), 1e-11)
  np.testing.assert_allclose(strays(cascade, given), np.abs(mixed.p - given.p).sum(-1) / 2, atol=1e-12)
  assert (strays(cascade, given)[~has] == 0).all()


def test_cascade_refuses_points():
  given = drafts(52, kind="point", shape="chain")
  with pytest.raises(ValueError, match="point drafts have nothing to mix"):
    verifiers.LossyCascade().stops(given.p, given.tree(np.float32, law=None), WIDTH - 1)


@pytest.mark.parametrize("rule", [
    verifiers.LossyLenient(lenience=.5), verifiers.LossyLenient(lenience=.1),
    verifiers.LossyCascade(rule="token", alpha=.4),
    verifiers.LossyCascade(rule="opt", alpha=.5)], ids=slow.name)
def test_what_is_reported_is_the_total_variation_of_a_token(rule):
  """Of one token drafted from q: the enumerated law of the first token against p."""
  p, q = some_laws(60)
  given, chance = every_token(p, q)
  variation = np.abs(output(rule, p, q) - p).sum(-1) / 2
  reported = strays(rule, given)[:, 0].reshape(-1, VOCABULARY)
  possible = chance.reshape(-1, VOCABULARY) > 0
  np.testing.assert_allclose(reported[possible], np.repeat(variation, VOCABULARY).reshape(-1, 4)[possible], atol=1e-11)
  assert (variation > .05).sum() > 3
  assert (strays(rule, given)[:, 1] == 0).all()  # behind the draft nothing is lost


@pytest.mark.parametrize("rule", [verifiers.LossyLenient(lenience=.5), verifiers.LossyTypical(epsilon=.2, alpha=.9)],
                         ids=slow.name)
def test_what_is_reported_of_points(rule):
  """A point is not drawn: the total variation is that of its own tree."""
  p, q = some_laws(61)
  given, _ = every_token(p, q)
  given = slow.Drafts(given.tokens, given.parents, given.size, given.sampled & False, given.q, given.p)
  variation = np.abs(slow.first_token(given.law(rule), given) - given.p[:, 0]).sum(-1) / 2
  np.testing.assert_allclose(strays(rule, given)[:, 0], variation, atol=1e-11)
  assert (variation > .2).any()


@pytest.mark.parametrize("make, message", [
    (lambda: verifiers.LossyTypical(epsilon=0), r"epsilon=0: it must be in \(0, 1\]"),
    (lambda: verifiers.LossyTypical(alpha=1.5), "alpha=1.5"),
    (lambda: verifiers.LossyLenient(lenience=0), "lenience=0"),
    (lambda: verifiers.LossyLenient(lenience=1.01), "1 is plain rejection"),
    (lambda: verifiers.LossyCascade(rule="best"), "rule='best': allowed are token, opt"),
    (lambda: verifiers.LossyCascade(alpha=-.1), "alpha=-0.1"),
    (lambda: verifiers.LossyCascade(rule="token", alpha=1.1), "at most 1 for rule 'token'"),
])
def test_settings_that_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_settings_that_are_not_refused():
  assert verifiers.LossyCascade(rule="opt", alpha=3.).alpha == 3
  assert verifiers.LossyLenient(lenience=1).lossless is verifiers.LossyTypical(epsilon=1, alpha=1).lossless is False
