"""What a row's text depends on when drafts are sampled: its seed, and for `coupled` nothing else; and where it ends."""
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import verifiers
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=6, max_context=64)
PROMPTS = [[1, 2, 3, 4, 5], [0, 5, 0, 5, 0, 5, 0], [3]]
NEW = 40
TREE = testing.NoisySelf(noise=2.0, parents=(0, 0, 0, 1), rule="without_replacement")


def ask(rows):
  values = dict(temperature=[0.8, 1.2, 0.9], top_p=[0.95, 1.0, 1.0], top_k=[0, 0, 4], seed=[5, 6, 7])
  return SamplingParams(**{name: [value[row] for row in rows] for name, value in values.items()})


def run(proposer, verifier, rows=(0, 1, 2), driver=drivers.generate, **kwargs):
  kwargs = {"max_new_tokens": NEW, **kwargs}
  return driver(TARGET, proposer, [PROMPTS[row] for row in rows], ask(rows), verifier=verifier, **kwargs)


# --- coupled --------------------------------------------------------------------------------------------------------


def test_coupled_text_does_not_depend_on_the_drafter(drafter):
  """Nor on the length of its drafts, nor on the width: right drafts, wrong ones, half right ones, none; sampled ones
  with the position's noise; prompt lookup."""
  coupled = verifiers.Coupled()
  plain = run(drafter(PROMPTS, [[]] * 3, limit=0), coupled)
  assert not plain.counters.drafted_tokens.any() and plain.lengths.tolist() == [NEW] * 3
  widths = set()
  for wrong_from, limit in ((99, 99), (0, 99), (2, 99), (99, 1), (99, 3), ([99, 0, 3], [6, 2, 6])):
    result = run(drafter(PROMPTS, plain.tokens, wrong_from=wrong_from, limit=limit), coupled)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    widths |= set(np.flatnonzero(result.counters.steps_per_width.sum(0)))
    if (wrong_from, limit) == (99, 99):
      assert result.counters.accepted_tokens.tolist() == result.counters.drafted_tokens.tolist()
    if (wrong_from, limit) == (0, 99):
      assert not result.counters.accepted_tokens.any()
  assert widths == {0, 1, 2}
  noisy = testing.NoisySelf(noise=1.5, parents=(0, 0, 1, 2), rule="coupled")
  results = [run(proposer, coupled) for proposer in (proposers.NGram(min_ngram=1, num_tokens=3), noisy)]
  for result in results:
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()
  point = run(drafter(PROMPTS, [[]] * 3, limit=0), verifiers.Point())
  assert (point.tokens != plain.tokens).any(1).all()  # another draw from the same law


# --- rules that draw for each step ----------------------------------------------------------------------------------

SAMPLED = verifiers.Traversal()
# The last step of a row cannot draft, and a batch drafts when half of its rows do: up to here no row is near its end.
SAFE = NEW // 3


@pytest.fixture(scope="module")
def whole():
  return run(TREE, SAMPLED, eos_ids=())


def test_rows_are_independent(whole):
  """Permuted, duplicated and alone, with the seed of the request."""
  assert 0 < whole.counters.accepted_tokens.sum() < whole.counters.drafted_tokens.sum()
  for rows in ((2, 0, 1), (1, 1, 0), (2,), (0,)):
    result = run(TREE, SAMPLED, rows)
    for row, text in zip(rows, result.tokens):
      assert text[:SAFE].tolist() == whole.tokens[row, :SAFE].tolist()
  np.testing.assert_array_equal(run(TREE, SAMPLED, (2, 0, 1)).tokens, whole.tokens[[2, 0, 1]])


def test_stream_is_generate(whole):
  ids, drafted = [[], [], []], [[], [], []]
  for delta in run(TREE, SAMPLED, driver=drivers.stream):
    ids[delta.row] += delta.token_ids
    drafted[delta.row] += delta.drafted
  assert ids == whole.tokens.tolist() and drafted == whole.drafted.tolist()


def test_stops_inside_a_burst(whole):
  """An end id and a sequence at every place of a burst: the text is cut there, and counters and flags with it."""
  inside = set()
  for end in range(2, SAFE):
    sequences = [[text[end - 2:end].tolist()] for text in whole.tokens]
    firsts = [next(i for i in range(2, NEW) if text[i - 2:i].tolist() == s[0]) for text, s in
              zip(whole.tokens, sequences)]
    result = run(TREE, SAMPLED, stop_sequences=sequences)
    for row, first in enumerate(firsts):
      assert result.finish_reasons[row] == "stop" and result.lengths[row] == first
      assert result.tokens[row].tolist() == whole.tokens[row, :first].tolist() + [-1] * (NEW - first)
      assert result.drafted[row].sum() == result.counters.accepted_tokens[row]
      on_a_draft = int(result.drafted[row, first - 1])
      assert result.counters.steps[row] + result.counters.accepted_tokens[row] - on_a_draft == first
      # Behind the stop the burst went on: what was accepted there counts for nobody.
      inside.add(bool(on_a_draft and whole.drafted[row, first]))
  assert inside == {True, False}
  for token in range(TARGET.vocab):
    result = run(TREE, SAMPLED, eos_ids=(token,))
    for row, text in enumerate(whole.tokens[:, :SAFE].tolist()):
      if token in text:
        assert result.lengths[row] == text.index(token) + 1 and result.finish_reasons[row] == "stop"
        assert result.tokens[row, :result.lengths[row]].tolist() == text[:result.lengths[row]]


def test_budgets_inside_a_burst(whole):
  """Exactly the budget is delivered. A row does not draft for its last token, which may then be another one."""
  for budget in range(1, SAFE):
    budgets = [budget, SAFE - budget, budget]
    result = run(TREE, SAMPLED, max_new_tokens=budgets)
    assert result.lengths.tolist() == budgets and result.finish_reasons == ("length",) * 3
    assert result.drafted.sum(1).tolist() == result.counters.accepted_tokens.tolist()
  alone = run(TREE, SAMPLED, (1,), max_new_tokens=SAFE)
  assert alone.tokens[0, :SAFE - 1].tolist() == whole.tokens[1, :SAFE - 1].tolist()
