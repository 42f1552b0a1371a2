"""Public bug reports of other engines about drafting, on every proposer: lookup, caches, vocabularies, long context.

Each case is a batch of four rows that differ in length, temperature and penalties; with a batch of one shape a proposer
compiles once for all cases. Point drafts must give the plain text at every temperature, byte for byte. Drawn drafts must
at temperature 0, whose rows are marked.
"""
import jax
import numpy as np
import pytest

from every_proposer import ENTRIES
from every_proposer import TARGET
from specjax import drivers
from specjax import proposers
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, SEEDS = 4, [5, 6, 7, 8]
GREEDY, WARM = [0.0] * 4, [0.0, 0.8, 0.0, 1.2]
REPEAT, NONE = [1, 2, 3] * 5, [0, 5, 1, 4, 2]

# name: (what it guards, prompts, new tokens, temperatures, repetition penalties)
CASES = {
    "no_state_from_wrong_drafts": ("vLLM 40875", [REPEAT, NONE, [4, 4, 4, 4], [1]], [50] * 4, WARM, [1.0] * 4),
    "repeated_quotes_and_brackets": ("minefield 94: a token twice inside JSON", [[2, 2, 3, 2, 2, 3, 2], [3, 3] * 6,
                                     [2, 3, 3, 2], [5, 2, 5, 2, 5, 3]], [40] * 4, GREEDY, [1.0] * 4),
    "penalties_see_earlier_drafts": ("TGI 2997", [REPEAT, NONE, [1, 1, 1], [2, 3, 2, 3]], [40] * 4, WARM,
                                     [1.3, 1.5, 1.0, 0.8]),
    "only_some_rows_match": ("vllm-fork 1780, exllamav3", [REPEAT, [0], REPEAT, [5]], [30] * 4, GREEDY, [1.0] * 4),
    "budgets_end_inside_a_draft": ("vllm-ascend 10321", [REPEAT] * 4, [1, 2, 3, 5], WARM, [1.0] * 4),
    "shortest_texts": ("edges: length 1, below n, at n", [[1], [1, 1], [2, 1, 2], [3, 3, 3, 3]], [12, 3, 2, 1], WARM,
                       [1.0] * 4),
    "a_match_at_the_first_place": ("edges", [[1, 2, 1], [1, 2, 3, 4, 1], [4, 5, 0, 4, 5], [0] * 9], [9, 9, 9, 9],
                                   GREEDY, [1.0] * 4),
    "same_prompt_twice": ("vLLM 41838, SGLang 19796: a prefix that another row fills", [REPEAT, REPEAT, NONE, NONE],
                          [30] * 4, GREEDY, [1.0] * 4),
    "rows_of_very_different_length": ("E6: per-row lengths", [[1, 2, 3, 0, 5] * 41, [2], REPEAT, [4, 4]],
                                      [51, 5, 40, 20], WARM, [1.0] * 4),
    "the_last_place_of_the_context": ("vLLM 5342, SGLang 3574, llama.cpp 26478", [[1, 2, 3] * 84, [4, 4, 1] * 85,
                                      [5, 1, 2, 3, 4] * 50, [2, 0] * 127], [4, 1, 6, 2], WARM, [1.0] * 4),
}


def ask(temperatures, penalties):
  return SamplingParams(temperature=temperatures, repetition_penalty=[1.0000001 if p == 1 else p for p in penalties],
                        seed=SEEDS)


def run(entry, prompts, new, temperatures, penalties, **kwargs):
  return drivers.generate(entry.target, entry.proposer, prompts, ask(temperatures, penalties), max_new_tokens=new,
                          verifier=entry.verifier, **kwargs)


def plain_of(target, prompts, new, temperatures, penalties, **kwargs):
  return drivers.generate(target, proposers.Plain(), prompts, ask(temperatures, penalties), max_new_tokens=new, **kwargs)


def sound(result, new):
  """What counters may never say: more accepted than drafted, drafts behind the budget, ids out of range."""
  counters = result.counters
  assert (counters.accepted_tokens <= counters.drafted_tokens).all() and (counters.drafted_tokens >= 0).all()
  assert (counters.output_tokens == result.lengths).all() and (result.lengths <= new).all()
  assert (counters.steps + counters.accepted_tokens >= counters.output_tokens).all()
  assert all(0 <= token for row in result.token_ids for token in row)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_reports(entry):
  """All cases of one proposer, which so compiles once."""
  drafted = 0
  for case, (guards, prompts, new, temperatures, penalties) in CASES.items():
    result = run(entry, prompts, new, temperatures, penalties)
    sound(result, new)
    wanted = plain_of(entry.target, prompts, new, temperatures, penalties)
    for row in range(ROWS):
      if not entry.proposer.samples or temperatures[row] == 0:
        assert result.token_ids[row] == wanted.token_ids[row], (case, guards, row)
    ones = np.asarray(new) == 1
    assert not result.counters.drafted_tokens[ones].any(), (case, "a row that may emit one token needs no draft")
    drafted += result.counters.drafted_tokens.sum()
  assert (drafted > 0) == (entry.proposer.max_nodes > 1), "loaded but never used: llama.cpp 25345"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_ends_inside_a_draft(entry):
  """An end-of-sequence id in the middle of what is drafted: nothing behind it, in text, counters or flags."""
  prompts, new = [REPEAT, NONE, [4, 4, 4, 4], [1]], [50] * 4
  for eos in (1, 3):
    result = run(entry, prompts, new, GREEDY, [1.0] * 4, eos_ids=[eos])
    wanted = plain_of(entry.target, prompts, new, GREEDY, [1.0] * 4, eos_ids=[eos])
    assert result.token_ids == wanted.token_ids and result.finish_reasons == wanted.finish_reasons
    sound(result, new)


def test_the_self_drafter_is_right_across_buckets():
  """vLLM 40756: acceptance that dies at a cache size. From 200 tokens over 256 to 300."""
  target = TARGET.replace(max_context=512)
  proposer = proposers.DraftModel(model=target, num_tokens=3)
  prompts = [([1, 2, 3, 0] * 60)[:200 + i] for i in range(ROWS)]
  result = drivers.generate(target, proposer, prompts, max_new_tokens=96, eos_ids=())
  assert (result.counters.steps <= 96 // 4 + 1).all()
  np.testing.assert_array_equal(result.counters.accepted_tokens, result.counters.drafted_tokens)


def test_truncated_text_is_another_request():
  """llama.cpp 10547: a drafter that keeps state of a longer text. Every call starts anew, whatever came before."""
  entry = next(e for e in ENTRIES if e.name == "draft model")
  first = run(entry, [REPEAT * 4, NONE, [1], [2]], [40] * 4, GREEDY, [1.0] * 4)
  run(entry, [REPEAT, NONE, [1], [2]], [40] * 4, GREEDY, [1.0] * 4)
  again = run(entry, [REPEAT * 4, NONE, [1], [2]], [40] * 4, GREEDY, [1.0] * 4)
  np.testing.assert_array_equal(first.tokens, again.tokens)
  jax.tree.map(np.testing.assert_array_equal, first.counters, again.counters)
