"""The parts of a lookup, each against plain Python: matches, the best places, what follows, where drafts are cut."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import proposers
from specjax import sampling
from specjax import stopping
from specjax.proposers import continuations

pytestmark = pytest.mark.usefixtures("quick_compile")


def context(rows, **given):
  known = dict(tokens=jnp.zeros((rows, 8), jnp.int32), length=jnp.full(rows, 8), start=jnp.full(rows, 8),
               active=jnp.ones(rows, bool), budget=jnp.full(rows, 100), params=sampling.SamplingParams(),
               rules=stopping.stop_rules(rows))
  return proposers.Context(**{**known, **given})


def slow_match(text, end, wanted):
  """By how many tokens text[:end + 1] and the tokens wanted (the latest first) agree."""
  matched = 0
  while matched < min(end + 1, len(wanted)) and text[end - matched] == wanted[matched]:
    matched += 1
  return matched


@pytest.mark.parametrize("shared", [False, True])
def test_match_lengths(shared):
  """Of a row's own text, and of one text for all rows; -1 and places that are no ends match nothing."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 2, (6, 40)).astype(np.int32)
  length = np.array([1, 2, 5, 39, 40, 40], np.int32)
  text = np.concatenate([rng.integers(0, 2, 30), [-1], tokens[4, -9:]]).astype(np.int32)[None] if shared else tokens
  before = np.array([40, 3, 0, 40, 40, 20]) if shared else length - 1
  ends = np.arange(text.shape[1]) < before[:, None]
  wanted = jax.jit(continuations.latest_tokens, static_argnums=2)(tokens, length, 5)
  for row, here in enumerate(tokens):
    latest = here[:length[row]][::-1][:5].tolist()
    assert wanted[row].tolist() == latest + [-2] * (5 - len(latest))
  found = np.asarray(jax.jit(continuations.match_lengths)(text, ends, wanted))
  for row in range(6):
    own = text[0] if shared else text[row]
    assert found[row].tolist() == [slow_match(own, end, wanted[row]) if end < before[row] else 0
                                   for end in range(text.shape[1])]
  assert found.max() == 5


@pytest.mark.parametrize("slots,count", [(10, 16), (100, 7), (64 * 40, 7), (64 * 40 + 1, 7)])
def test_best_places_are_the_longest_then_the_latest(slots, count):
  matched = np.random.default_rng(slots).geometric(0.5, (3, slots)).astype(np.int32) - 1
  matched[2] = 0
  place, length = jax.jit(continuations.best_places, static_argnums=1)(matched, count)
  for row in range(3):
    order = sorted(range(slots), key=lambda at: (-matched[row, at], -at))[:count]
    assert place[row].tolist() == order and length[row].tolist() == matched[row, order].tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_follows(overlap):
  """To the end of the text, of a stored text or of a row's budget; in an overlap on in its own tokens."""
  text = jnp.array([[4, 5, 6, 7, 8, -1, 9, 3], [4, 4, 4, 4, 4, 4, 4, 4]])
  known = jnp.array([8, 6])
  place, matched = jnp.array([[1, 5, 6], [4, 0, 3]]), jnp.array([[2, 1, 1], [5, 1, 0]])
  found = continuations.follow(text, known, place, matched, 4, context(2, budget=jnp.array([9, 4])), overlap=overlap)
  assert found.tokens[0, :3, 0].tolist() == [6, 7, 8] and found.tokens[0, :2, 1].tolist() == [9, 3]
  assert found.known.tolist() == ([[3, 4, 4], [3, 3, 0]] if overlap else [[3, 2, 1], [1, 3, 0]])
  assert not overlap or found.tokens[0, :, 1].tolist() == [9, 3, 9, 3]
  assert found.matched.tolist() == matched.tolist()


def test_where_drafts_are_cut():
  tokens = jnp.array([[5, 6, 7], [6, 7, 5], [7, 7, 7], [7, 7, 7]])
  given = dict(rules=stopping.stop_rules(4, (5, 9)), budget=jnp.array([9, 9, 3, 9]),
               active=jnp.array([True, True, True, False]))
  cut = lambda tokens, count, **kwargs: continuations.cut(tokens, count, context(4, **given), **kwargs).tolist()
  assert cut(tokens, jnp.full(4, 3)) == [0, 2, 2, 0] and cut(tokens, jnp.full(4, 1)) == [0, 1, 1, 0]
  both = jnp.stack([tokens, tokens[:, ::-1]], axis=2)  # drafts of a row side by side, their tokens downward
  assert cut(both, jnp.full((4, 2), 3), axis=1) == [[0, 2], [2, 0], [2, 2], [0, 0]]


def test_a_row_may_prefer_another_draft():
  draft = lambda token, p: continuations.Draft(
      tokens=jnp.array([[1, token], [1, token]]), parents=jnp.zeros((2, 2), jnp.int32),
      probability=jnp.array([[1.0, p], [1.0, p]]), matched=jnp.array([3, 3]))
  both = draft(8, 0.5).where(jnp.array([True, False]), draft(9, 0.25))
  assert both.tokens[:, 1].tolist() == [8, 9] and both.score.tolist() == [0.5, 0.25]
  kept = both.only(jnp.array([False, True]))
  assert kept.tree().size.tolist() == [1, 2] and kept.matched.tolist() == [0, 3] and kept.score.tolist() == [0, 0.25]
