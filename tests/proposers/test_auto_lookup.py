"""Weighed lookup: what is copied and how it is estimated, against plain Python, and what becomes of that in a run."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import stopping
from specjax import testing
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
SLOTS, TOKENS = 64, 5
LOOKUP = proposers.AutoLookup(num_tokens=TOKENS, max_match=6, occurrences=SLOTS)


@jax.jit
def copy(tokens, length):
  rows = length.shape[0]
  context = proposers.Context(tokens=tokens, length=length, start=jnp.ones_like(length), active=jnp.ones(rows, bool),
                              budget=jnp.full(rows, 99), params=None, rules=stopping.stop_rules(rows, (), ()))
  return LOOKUP.copy(context)


def slow_copy(text):
  """The latest of the longest matches, continued as a period, and for each token (match, seen, same)."""
  last = len(text) - 1
  agree = lambda end: next((n for n in range(6) if end - n < 0 or text[end - n] != text[last - n]), 6)
  matches = {end: agree(end) for end in range(last)}
  match = max(matches.values(), default=0)
  if not match:
    return [], []
  goes_on = lambda end: [text[end + 1 + i % (last - end)] for i in range(TOKENS)]
  ends = [end for end, size in matches.items() if size == match]
  draft, alike, facts = goes_on(ends[-1]), [goes_on(end) for end in ends], []
  for i in range(TOKENS):
    seen = sum(other[:i] == draft[:i] for other in alike)
    facts.append((match + i, seen, sum(other[:i + 1] == draft[:i + 1] for other in alike)))
  return draft, facts


def test_what_is_copied_and_how_sure_that_is():
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, alphabet, rng.integers(1, SLOTS)).tolist() for alphabet in (2, 3, 8, 40) for _ in range(16)]
  texts += [[1], [1, 1], [2, 1, 2], [3] * 20, [1, 2, 3] * 9]
  tokens, length = np.full((len(texts), SLOTS), 1, np.int32), np.array([len(t) for t in texts], np.int32)
  for row, text in enumerate(texts):
    tokens[row, :len(text)] = text
  draft, count, confidence = (np.asarray(x) for x in copy(jnp.asarray(tokens), jnp.asarray(length)))
  for row, text in enumerate(texts):
    wanted, facts = slow_copy(text)
    assert draft[row, :count[row]].tolist() == wanted, text
    estimate = [same / (seen + 3 * match ** -1.5) for match, seen, same in facts]
    np.testing.assert_allclose(confidence[row, :len(estimate)], estimate, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_plain_one_and_repeating_text_is_copied(temperature):
  target = testing.DummyTarget(vocab=6, order=2)
  prompts, new = [[1, 2, 3], [4, 5, 0, 1] * 5, [2]], [60, 53, 40]
  params = SamplingParams(temperature=temperature, seed=[3, 4, 5])
  plain = drivers.generate(target, proposers.Plain(), prompts, params, max_new_tokens=new)
  result = drivers.generate(target, proposers.AutoLookup(), prompts, params, max_new_tokens=new)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  if not temperature:
    assert (result.counters.steps < np.asarray(new) / 2.5).all()


def test_text_that_never_repeats_costs_plain_steps():
  """A hash of the whole path: matches of one id abound and are right by chance only. Lookup drafts behind nearly all of
  them; here the row's record of wrong estimates leaves few steps of more than one node at the end."""
  target = testing.DummyTarget(vocab=40)
  plain_steps = lambda proposer, new: drivers.generate(target, proposer, [[1, 2, 3]], max_new_tokens=new,
                                                       eos_ids=()).counters.steps_per_width[0, 0]
  assert plain_steps(proposers.AutoLookup(), 250) > 210
  assert plain_steps(proposers.NGram(min_ngram=1), 250) < 90


def test_costs_decide_and_compile_nothing():
  """Where a wide pass costs twelve plain steps nothing is worth drafting, in one and the same program."""
  target = testing.DummyTarget(vocab=6, order=2)
  run = lambda costs: drivers.generate(target, proposers.AutoLookup(rule=proposers.auto_lookup.RULE.replace(
      verify_costs=tuple(map(jnp.float32, costs)))), [[1, 2, 3]], max_new_tokens=40)
  cheap = run([1, 1.2, 1.4, 2, 3, 5])
  before = drivers.compiled_programs()
  dear = run([1, 12, 12, 12, 12, 12])
  assert drivers.compiled_programs() == before
  assert cheap.counters.drafted_tokens > 20 > dear.counters.drafted_tokens
  np.testing.assert_array_equal(cheap.tokens, dear.tokens)


@pytest.mark.parametrize("options, message", [({"num_tokens": 0}, "num_tokens=0"), ({"max_match": 64}, "max_match=64"),
                                              ({"occurrences": 0}, "occurrences=0")])
def test_bad_options(options, message):
  with pytest.raises(ValueError, match=message):
    proposers.AutoLookup(**options)
