"""Everything that can be asked of a token, under drafts: the text is that of plain decoding, written here in NumPy.

The drafter is a table that knows the plain texts, with a face a row; one program serves all faces, and plain decoding
is one of them. A batch always holds a row that asks for everything, so that all batches share that program.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
from specjax import drivers
from specjax import testing
from specjax import verifiers
from specjax.constraints import Automaton
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=10, max_context=300)
POINT = verifiers.Point()
EOS, NEW = 9, 20
PROMPTS = [[1, 2, 3, 1, 2, 3], [7] * 5, [3, 1, 4, 1, 5], [8], [2, 6, 2, 6], [5, 5, 0, 0]]
EVERYTHING = dict(temperature=0.9, top_k=6, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.4,
                  frequency_penalty=0.2, logit_bias={2: 1.5, 4: -np.inf}, banned_ids=[1],
                  allowed_ids=[0, 2, 3, 4, 5, 6, 7, 8, EOS], min_new_tokens=3)
# A row each, and what it asks for.
EACH = [
    dict(temperature=0.0, repetition_penalty=1.8, min_new_tokens=NEW),
    dict(temperature=0.8, presence_penalty=1.0, frequency_penalty=0.5),
    dict(temperature=1.2, logit_bias={3: 2.5, 7: -np.inf, EOS: -1.0}),
    dict(temperature=1.0, banned_ids=[0, 5, 6], top_k=4),
    dict(temperature=0.0, allowed_ids=[1, 4, 6, 8], presence_penalty=2.0),
    EVERYTHING,
]
OTHERS = [  # the other way round: everything of every row, some of it greedy, penalties that ask for repetition
    {**EVERYTHING, "temperature": 0.0},
    {**EVERYTHING, "repetition_penalty": 0.5, "seed": 3},
    {**EVERYTHING, "frequency_penalty": -1.0, "temperature": 1.4},
    {**EVERYTHING, "banned_ids": [0, 8], "top_p": 0.6},
    {**EVERYTHING, "temperature": 0.0, "presence_penalty": -2.0, "min_new_tokens": 9},
    {**EVERYTHING, "allowed_ids": [2, 6, EOS], "top_k": 2},
]
BATCHES = {"each": EACH, "everything": OTHERS}
FACES = {"right": dict(), "wrong": dict(wrong_from=0), "half right": dict(wrong_from=[2, 0, 4, 1, 3, 2]),
         "mixed": dict(wrong_from=[99, 0, 99, 3, 99, 1], limit=[6, 6, 2, 6, 1, 6]), "plain": dict(limit=0)}


def together(asked):
  """SamplingParams of one dict a row."""
  names = [name for name in EVERYTHING] + ["seed"]
  neutral = dict(vars(SamplingParams()), logit_bias=None, seed=0)
  values = {name: [some.get(name, i + 10 if name == "seed" else neutral[name]) for i, some in enumerate(asked)]
            for name in names}
  return SamplingParams(**values)


def seed_of(asked, row):
  return asked[row].get("seed", row + 10)


@functools.cache
def words(batch, row):
  """The row's text, and its logarithms, by NumPy."""
  asked = BATCHES[batch][row]
  return dummy_law.text(TARGET, PROMPTS[row], NEW, ends=(EOS,), **{**asked, "seed": seed_of(BATCHES[batch], row)})


def texts(batch):
  return [words(batch, row)[0] for row in range(len(PROMPTS))]


def run(proposer, asked, prompts=PROMPTS, driver=drivers.generate, **kwargs):
  return driver(TARGET, proposer, prompts, together(asked), **{"max_new_tokens": NEW, "eos_ids": (EOS,), **kwargs})


@pytest.fixture(scope="module")
def make(drafter):
  """`make(texts, face)`: a drafter of 6 tokens that knows the texts of all rows."""
  return lambda known, face="right": drafter(PROMPTS, known, **FACES[face])


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
def test_every_parameter_under_every_draft(make, batch):
  wanted = texts(batch)
  for face in FACES:
    result = run(make(wanted, face), BATCHES[batch])
    assert result.token_ids == wanted, face
    accepted, drafted = result.counters.accepted_tokens.sum(), result.counters.drafted_tokens.sum()
    assert {"wrong": accepted == 0 < drafted, "plain": drafted == 0}.get(face, 0 < accepted < drafted)
    if face == "right":  # six drafts and a new token a step
      assert result.counters.steps.tolist() == [-(-len(text) // 7) for text in wanted]
  assert len({tuple(text) for text in wanted}) == len(wanted)
  assert any(len(text) < NEW for text in wanted) and any(len(text) == NEW for text in wanted)


def test_what_is_asked_for_matters():
  """Each parameter changes the text of the row that asks for it."""
  for row, asked in enumerate(EACH[:-1]):
    for name in set(asked) - {"temperature"}:
      less = {key: value for key, value in asked.items() if key != name}
      text = dummy_law.text(TARGET, PROMPTS[row], NEW, ends=(EOS,), seed=seed_of(EACH, row), **less)[0]
      if name != "min_new_tokens":
        assert text != texts("each")[row], (row, name)


def test_drafts_that_repeat_a_token(make):
  """Penalties count the drafted tokens on a node's own path: behind a repeated draft the law is another one."""
  wanted = texts("everything")
  repeated = [[text[i - i % 2] for i in range(len(text))] for text in wanted]
  stuck = [[text[0]] * len(text) for text in wanted]
  for known in (repeated, stuck):
    result = run(make(known), OTHERS)
    assert result.token_ids == wanted
    assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()


def test_each_row_is_the_row_alone(drafter):
  """One program for all of them, as all ask for everything."""
  for row, asked in enumerate(OTHERS):
    known = texts("everything")[row]
    one = {**asked, "seed": seed_of(OTHERS, row)}
    for wrong_from in (99, 2):
      result = run(drafter([PROMPTS[row]], [known], wrong_from=wrong_from, num_tokens=3), [one], [PROMPTS[row]])
      assert result.token_ids == [known]


def test_the_end_comes_right_behind_the_minimum(make):
  """The end id is wanted from the first token on: it comes as soon as it may, inside bursts and between them."""
  for least in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [14, 13, 19, 20, 7]):
    asked = [dict(temperature=0.0 if row % 2 else 1.1, logit_bias={EOS: 40.0}, min_new_tokens=n)
             for row, n in enumerate(least)] + [EVERYTHING]
    known = [dummy_law.text(TARGET, PROMPTS[row], NEW, ends=(EOS,), seed=seed_of(asked, row), **some)[0]
             for row, some in enumerate(asked)]
    for face in ("right", "half right", "plain"):
      result = run(make(known, face), asked)
      assert result.token_ids == known
      for row, n in enumerate(least):
        ended = n < NEW
        assert result.lengths[row] == (n + 1 if ended else NEW)
        assert result.finish_reasons[row] == ("stop" if ended else "length")
        assert (EOS in known[row]) == ended and EOS not in known[row][:n]


# --- logprobs -------------------------------------------------------------------------------------------------------

TOP = 3


def check_logprobs(found, batch, lengths, plain=None):
  """Against NumPy, row by row up to its end, and nothing behind it."""
  assert found.top_ids.shape[-1] == found.top_raw.shape[-1] == TOP
  for row, length in enumerate(lengths):
    _, processed, raw, laws = words(batch, row)
    near = dict(rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(found.processed[row, :length], processed[:length], **near)
    np.testing.assert_allclose(found.raw[row, :length], raw[:length], **near)
    order = np.argsort(-laws[:length], axis=1)[:, :TOP]
    np.testing.assert_array_equal(found.top_ids[row, :length], order)
    np.testing.assert_allclose(found.top_raw[row, :length], np.log(np.take_along_axis(laws[:length], order, axis=1)),
                               **near)
    for field in jax.tree.leaves(found):
      assert not field[row, length:].any()
  if plain is not None:
    # Rounding may differ between widths, nothing else.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, plain)


@pytest.mark.parametrize("batch", BATCHES)
def test_logprobs_are_those_of_the_text(make, batch):
  wanted = texts(batch)
  plain = run(make(wanted, "plain"), BATCHES[batch], logprobs=TOP).logprobs
  for face in FACES:
    result = run(make(wanted, face), BATCHES[batch], logprobs=TOP)
    assert result.token_ids == wanted
    assert result.logprobs.processed.shape == result.tokens.shape
    check_logprobs(result.logprobs, batch, result.lengths, plain=plain)
  for row, asked in enumerate(BATCHES[batch]):
    if asked["temperature"] == 0:
      assert not plain.processed[row].any()  # a law of one id
  deltas = list(run(make(wanted, "half right"), BATCHES[batch], driver=drivers.stream, logprobs=TOP))
  for row in range(len(PROMPTS)):
    mine = [delta for delta in deltas if delta.row == row]
    assert all(delta.logprobs.raw.shape == (len(delta.token_ids),) for delta in mine)
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *[delta.logprobs for delta in mine])
    jax.tree.map(lambda part, rows: np.testing.assert_allclose(part, rows[row, :len(part)], rtol=1e-6, atol=1e-6),
                 joined, plain)
    assert len(joined.raw) == len(wanted[row])


def test_logprobs_are_cut_with_the_text(make):
  """By a stop sequence and by a budget, inside a burst."""
  wanted = texts("each")
  for end in (2, 5, 8):
    sequences = [[text[end - 2:end]] if len(text) >= end else [] for text in wanted]
    result = run(make(wanted), EACH, logprobs=TOP, stop_sequences=sequences)
    assert (result.lengths <= end).all() and result.logprobs.raw.shape == (6, NEW)
    check_logprobs(result.logprobs, "each", result.lengths)
    result = run(make(wanted), EACH, logprobs=TOP, max_new_tokens=[NEW, end, end, end, end, end + 1])
    assert result.lengths.tolist() == [NEW, *np.minimum([end] * 4 + [end + 1], list(map(len, wanted[1:])))]
    check_logprobs(result.logprobs, "each", result.lengths)


def test_logprobs_without_alternatives_across_a_bucket(drafter):
  """logprobs=0 keeps those of the tokens themselves; the buffers move to the next bucket with the text."""
  prompt = np.random.default_rng(0).integers(0, TARGET.vocab, 246).tolist()
  text, processed, raw, _ = dummy_law.text(TARGET, prompt, 30, temperature=0.8, seed=4)
  params = SamplingParams(temperature=0.8, seed=4)
  for face in (dict(), dict(wrong_from=1)):
    proposer = drafter([prompt], [text], num_tokens=3, **face)
    result = drivers.generate(TARGET, proposer, [prompt], params, max_new_tokens=30, logprobs=0)
    assert result.token_ids == [text] and result.logprobs.top_ids.shape == result.logprobs.top_raw.shape == (1, 30, 0)
    np.testing.assert_allclose(result.logprobs.processed[0], processed, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(result.logprobs.raw[0], raw, rtol=1e-4, atol=2e-5)


def test_logprobs_are_kept_on_request_only(make):
  assert run(make(texts("each")), EACH).logprobs is None


# --- constraints ----------------------------------------------------------------------------------------------------

STATES = 5
STARTS = [0, 3, 1]


def grammar(seed):
  """A random table in which every state allows at least two ids, the end among them in state 4 only."""
  rng = np.random.default_rng(seed)
  table = np.where(rng.uniform(size=(STATES, TARGET.vocab)) < 0.4, rng.integers(0, STATES, (STATES, TARGET.vocab)), -1)
  table[np.arange(STATES), np.arange(STATES)] = (np.arange(STATES) + 1) % STATES
  table[np.arange(STATES), np.arange(STATES) + 3] = (np.arange(STATES) + 2) % STATES
  table[:, EOS] = -1
  table[4, EOS] = 0
  return table.astype(np.int32)


GRAMMAR_ASKED = [dict(temperature=0.0, repetition_penalty=1.4), dict(temperature=0.9, top_k=3),
                 dict(temperature=1.3, frequency_penalty=0.3)]


def walk(table, state, tokens):
  for token in tokens:
    assert state >= 0
    state = int(table[state, token])
  return state


def constrained(table, proposer, **kwargs):
  params = SamplingParams(temperature=[0.0, 0.9, 1.3], top_k=[0, 3, 0], repetition_penalty=[1.4, 1.0, 1.0],
                          frequency_penalty=[0.0, 0.0, 0.3], seed=[10, 11, 12])
  return drivers.generate(TARGET, proposer, PROMPTS[:3], params, max_new_tokens=NEW, eos_ids=(EOS,), constraint=table,
                          **kwargs)


def grammar_texts(table, asked=GRAMMAR_ASKED):
  return [dummy_law.text(TARGET, PROMPTS[row], NEW, ends=(EOS,), seed=10 + row, automaton=table, state=STARTS[row],
                         **some)[0] for row, some in enumerate(asked)]


def forbidden_from(table, known, place):
  """Drafts that follow the texts up to `place` and then break the grammar."""
  broken = []
  for start, text in zip(STARTS, known):
    text = list(text)
    if place < len(text):
      state = walk(table, start, text[:place])
      text[place] = int(np.flatnonzero(table[state] < 0)[0])
    broken.append(text)
  return broken


def test_a_grammar_holds_under_drafts(drafter):
  """Another table, or another start, is a value; each row has its own start; what breaks the grammar is refused."""
  sizes = set()
  for seed in (1, 2, 3):
    table = grammar(seed)
    automaton = Automaton(jnp.asarray(table), jnp.asarray(STARTS, jnp.int32))
    known = grammar_texts(table)
    faces = [(known, dict(limit=0)), (known, {}), (known, dict(wrong_from=[0, 2, 1])),
             *((forbidden_from(table, known, place), {}) for place in (0, 1, 2))]
    for told, face in faces:
      result = constrained(automaton, drafter(PROMPTS[:3], told, num_tokens=3, **face))
      assert result.token_ids == known, face
      for start, text in zip(STARTS, result.token_ids):
        assert walk(table, start, text) >= 0
      sizes.add(drivers.compiled_programs())
    accepted, drafted = result.counters.accepted_tokens.sum(), result.counters.drafted_tokens.sum()
    assert accepted < drafted
    # The state was copied, not donated: the caller's tables are still there.
    np.testing.assert_array_equal(automaton.transitions, table)
    np.testing.assert_array_equal(automaton.start, STARTS)
  assert len(sizes) == 1
  assert any(len(text) > 6 for text in known)


def test_only_emitted_tokens_move_the_state(drafter):
  """A stop cuts a burst of right drafts: the grammar stands behind what was let out, step by step."""
  table = grammar(1)
  known = grammar_texts(table)
  automaton = Automaton(jnp.asarray(table), jnp.asarray(STARTS, jnp.int32))
  proposer = drafter(PROMPTS[:3], known, num_tokens=3)
  params = SamplingParams(temperature=[0.0, 0.9, 1.3], top_k=[0, 3, 0], repetition_penalty=[1.4, 1.0, 1.0],
                          frequency_penalty=[0.0, 0.0, 0.3], seed=[10, 11, 12])
  for end in (1, 2, 3, 4):
    state = drivers.start(TARGET, proposer, PROMPTS[:3], params, max_new_tokens=[end, NEW, NEW], eos_ids=(EOS,),
                          stop_sequences=[[], [known[1][:end]], []], constraint=automaton)
    assert state.constraint_state.tolist() == STARTS
    for _ in range(3):
      state = drivers.advance(TARGET, proposer, state, np.int32(1), verifier=POINT)
      count = np.asarray(state.length - state.start)
      assert state.constraint_state.tolist() == [walk(table, start, text[:n])
                                                 for start, text, n in zip(STARTS, known, count)]
    assert count[0] == min(end, len(known[0])) and count[1] <= end


def test_the_grammar_of_a_whole_text():
  """Against itself: the reference text breaks no rule and the rules say something."""
  for seed in (1, 2, 3):
    table = grammar(seed)
    free = [dummy_law.text(TARGET, PROMPTS[row], NEW, ends=(EOS,), seed=10 + row, **some)[0]
            for row, some in enumerate(GRAMMAR_ASKED)]
    assert all(a != b for a, b in zip(free, grammar_texts(table)))


# --- what the caller gave -------------------------------------------------------------------------------------------


def test_batched_parameters_can_be_used_again(make):
  """The state is donated from step to step; arrays that were given are not part of it."""
  wanted = texts("everything")
  params = together(OTHERS).batch(len(OTHERS), TARGET.vocab)
  for _ in range(2):
    result = drivers.generate(TARGET, make(wanted), PROMPTS, params, max_new_tokens=NEW, eos_ids=(EOS,))
    assert result.token_ids == wanted
  assert all(not x.is_deleted() for x in jax.tree.leaves(params))
