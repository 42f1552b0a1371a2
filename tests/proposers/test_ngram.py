"""Prompt lookup against a slow one in Python, and the edge cases that broke other engines' n-gram proposers."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import proposers
from specjax import sampling
from specjax import stopping
from specjax.proposers import ngram

SLOTS, DRAFT, ROWS = 32, 4, 64
POISON = 1  # behind the text the buffer holds an id that the text uses


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def lookup(tokens, length, min_ngram, max_ngram, num_tokens, match):
  return ngram.lookup(tokens, length, min_ngram, max_ngram, num_tokens, match, begin=jnp.zeros_like(length), end=length)


def slow_lookup(text, min_ngram, max_ngram, num_tokens, match, begin=0, stop=None):
  """The longest suffix that occurs earlier in text[begin:stop], and what followed it there; an occurrence may overlap
  the suffix."""
  stop = len(text) if stop is None else stop
  for size in range(max_ngram, min_ngram - 1, -1):
    if size >= len(text):
      continue
    suffix = text[len(text) - size:]
    starts = [i for i in range(begin, stop - size) if text[i:i + size] == suffix]
    if starts:
      end = (starts[-1] if match == "latest" else starts[0]) + size
      return text[end:min(end + num_tokens, stop)]
  return []


def pack(texts, rows=ROWS):
  tokens = np.full((rows, SLOTS), POISON, np.int32)
  length = np.ones(rows, np.int32)
  for row, text in enumerate(texts):
    tokens[row, :len(text)] = text
    length[row] = len(text)
  return jnp.asarray(tokens), jnp.asarray(length)


def fast_lookup(texts, min_ngram=2, max_ngram=3, num_tokens=DRAFT, match="latest"):
  draft, count = lookup(*pack(texts), min_ngram, max_ngram, num_tokens, match)
  draft, count = np.asarray(draft), np.asarray(count)
  assert count.dtype == np.int32 and (0 <= count).all() and (count <= num_tokens).all()
  return [draft[row, :count[row]].tolist() for row in range(len(texts))]


@pytest.mark.parametrize("match", ngram.MATCHES)
@pytest.mark.parametrize("min_ngram,max_ngram", [(1, 1), (2, 3), (1, 4), (3, 3)])
def test_lookup_is_the_slow_lookup(min_ngram, max_ngram, match):
  rng = np.random.default_rng(min_ngram * 10 + max_ngram)
  drafted = 0
  for alphabet in (2, 3, 6, 30):
    texts = [rng.integers(0, alphabet, rng.integers(1, SLOTS + 1)).tolist() for _ in range(ROWS)]
    wanted = [slow_lookup(text, min_ngram, max_ngram, DRAFT, match) for text in texts]
    assert fast_lookup(texts, min_ngram, max_ngram, match=match) == wanted
    drafted += sum(map(bool, wanted))
  assert 20 < drafted < 4 * ROWS  # the sample holds hits and misses


EDGES = [
    ("one token", [7], []),
    ("one token that is the poison", [POISON], []),
    ("shorter than the n-gram", [7, 8], []),
    ("two equal tokens: no 2-gram before the suffix", [7, 7], []),
    ("exactly one n-gram long", [7, 8, 9], []),
    ("match at place 0", [7, 8, 5, 6, 7, 8], [5, 6, 7, 8]),
    ("match at place 0 of a 3-gram", [7, 8, 9, 5, 7, 8, 9], [5, 7, 8, 9]),
    ("match that ends right before the last token", [7, 7, 7], [7]),
    ("overlapping", [5, 7, 7, 7, 7, 7], [7]),
    ("period two", [5, 6, 5, 6, 5, 6], [5, 6]),
    ("the tail is shorter than the draft", [7, 8, 3, 7, 8], [3, 7, 8]),
    ("the only match is the suffix itself", [1, 2, 3, 4, 5, 6], []),
    ("the longest n-gram wins over a later shorter one", [1, 2, 3, 9, 0, 2, 3, 8, 1, 2, 3], [9, 0, 2, 3]),
    ("the latest of two", [2, 3, 9, 2, 3, 8, 0, 2, 3], [8, 0, 2, 3]),
    ("transformers#46790", [5, 6, 7, 8, 9, 10, 11, 7, 8], [9, 10, 11, 7]),
    ("padding ids inside the match", [7, 8, 0, 0, 5, 7, 8], [0, 0, 5, 7]),
    ("a padded left end", [0, 0, 0, 0, 7, 8, 5, 7, 8], [5, 7, 8]),
    ("the poison behind the text continues no match", [9, POISON, POISON, 4, 9], []),
    ("the whole buffer", list(range(SLOTS - 3)) + [4, 5, 6], [7, 8, 9, 10]),
]


@pytest.mark.parametrize("name,text,wanted", EDGES, ids=[name for name, *_ in EDGES])
def test_edges(name, text, wanted):
  assert fast_lookup([text]) == [wanted] == [slow_lookup(text, 2, 3, DRAFT, "latest")]


def test_the_earliest_of_two():
  text = [2, 3, 9, 2, 3, 8, 0, 2, 3]
  assert fast_lookup([text], match="earliest") == [[9, 2, 3, 8]]
  assert fast_lookup([text], match="latest") == [[8, 0, 2, 3]]


def test_rows_are_independent():
  """Every row alone, beside others and in another place gives the same (engine bugs D7 and D10)."""
  texts = [text for _, text, _ in EDGES]
  together = fast_lookup(texts)
  assert fast_lookup(texts[::-1]) == together[::-1]
  assert [fast_lookup([text])[0] for text in texts] == together
  assert any(together) and not all(together)


# --- the proposer ---------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=6)
def propose_jit(tokens, length, start, active, budget, eos, proposer):
  rules = stopping.StopRules(eos=eos, sequences=jnp.full((tokens.shape[0], 1, 1), -1, jnp.int32))
  context = proposers.Context(tokens=tokens, length=length, start=start, active=active, budget=budget,
                              params=sampling.SamplingParams(), rules=rules)
  return proposer.propose(None, None, proposer.init(None, tokens.shape[0], SLOTS), context, None)


class Static:
  """A proposer without leaves, hashable, to be a static argument here."""

  def __init__(self, **kwargs):
    self.made = proposers.NGram(**kwargs)

  def __getattr__(self, name):
    return getattr(self.made, name)


NGRAM = Static(num_tokens=DRAFT)


def propose(texts, *, active=True, budget=100, eos=(), start=None, proposer=NGRAM):
  """The drafts of a batch as lists, and the tree."""
  spread = lambda x, dtype: jnp.asarray(np.broadcast_to(np.asarray(x), (len(texts),)), dtype)
  rules = stopping.stop_rules(len(texts), eos)
  tokens, length = pack(texts, len(texts))
  start = length if start is None else spread(start, jnp.int32)
  tree, state = propose_jit(tokens, length, start, spread(active, bool), spread(budget, jnp.int32), rules.eos, proposer)
  assert state == ()
  assert tree.tokens.shape == (len(texts), NGRAM.max_nodes) and tree.size.dtype == jnp.int32
  assert tree.tokens[:, 0].tolist() == [text[-1] for text in texts]  # the pending token is the root
  assert tree.parents.tolist() == [[0, *range(DRAFT)]] * len(texts)
  return [row[1:size] for row, size in zip(tree.tokens.tolist(), tree.size.tolist())]


HIT, MISS = [7, 8, 5, 6, 4, 7, 8], [1, 2, 3, 4, 5]


def test_a_hit_and_a_miss():
  assert propose([HIT, MISS, HIT]) == [[5, 6, 4, 7], [], [5, 6, 4, 7]]


@pytest.mark.parametrize("place", range(DRAFT))
def test_a_draft_ends_before_an_end_of_sequence_id(place):
  """What stands before it is kept; the id itself would come as the new token at no cost."""
  assert propose([HIT, MISS, HIT], eos=(HIT[2 + place], 99)) == [HIT[2:2 + place], [], HIT[2:2 + place]]


def test_no_end_of_sequence_id_at_all():
  assert propose([HIT, MISS, HIT], eos=()) == [[5, 6, 4, 7], [], [5, 6, 4, 7]]


def test_a_draft_is_one_token_short_of_the_budget():
  assert propose([HIT] * 6, budget=[0, 1, 2, 3, 5, 6]) == [[], [], [5], [5, 6], [5, 6, 4, 7], [5, 6, 4, 7]]


def test_rows_that_ended_draft_nothing():
  assert propose([HIT, HIT, HIT], active=[True, False, True]) == [[5, 6, 4, 7], [], [5, 6, 4, 7]]


@pytest.mark.parametrize("source", ngram.SOURCES)
def test_the_source_bounds_occurrences_and_what_follows_them(source):
  rng = np.random.default_rng(5)
  proposer = Static(num_tokens=DRAFT, source=source)
  drafted = other = 0
  for alphabet in (2, 4):
    texts = [rng.integers(0, alphabet, rng.integers(1, SLOTS + 1)).tolist() for _ in range(ROWS)]
    starts = [int(rng.integers(1, len(text) + 1)) for text in texts]
    found = propose(texts, start=starts, proposer=proposer)
    for text, start, row in zip(texts, starts, found):
      begin, stop = {"text": (0, len(text)), "prompt": (0, start), "output": (start, len(text))}[source]
      assert row == slow_lookup(text, 2, 3, DRAFT, "latest", begin, stop)
      drafted += bool(row)
      other += row != slow_lookup(text, 2, 3, DRAFT, "latest")
  assert drafted > 30 and (other > 30) == (source != "text")


def test_an_overlap_goes_on_in_its_own_tokens():
  proposer = Static(num_tokens=DRAFT, overlap=True)
  texts = [[7, 7, 7], [5, 6, 5, 6, 5, 6], [1, 2, 3, 1, 2, 3, 1, 2], HIT, MISS]
  assert propose(texts, proposer=proposer) == [[7] * 4, [5, 6, 5, 6], [3, 1, 2, 3], [5, 6, 4, 7], []]
  assert propose([[7, 7, 7]], eos=(7,), proposer=proposer) == [[]]


def test_sizes_are_static_and_count_the_root():
  proposer = proposers.NGram(num_tokens=9)
  assert (proposer.max_nodes, proposer.max_depth) == (10, 9)
  assert not jax.tree.leaves(proposer)  # all configuration: another one is another program


@pytest.mark.parametrize("kwargs,message", [
    (dict(min_ngram=0), "min_ngram=0, max_ngram=3"),
    (dict(min_ngram=4), "min_ngram=4, max_ngram=3: needed is 1 <= min_ngram <= max_ngram"),
    (dict(max_ngram=1), "min_ngram=2, max_ngram=1"),
    (dict(num_tokens=0), "num_tokens=0: it must be 1 or more"),
    (dict(source="both"), "source='both': allowed are text, prompt, output"),
    (dict(source="prompt", overlap=True), "overlap=True with source='prompt'"),
    (dict(match="best"), "match='best': allowed are latest, earliest"),
])
def test_errors(kwargs, message):
  with pytest.raises(ValueError, match=message):
    proposers.NGram(**kwargs)


def test_the_longest_draft_that_a_step_can_verify():
  text = list(range(10, 90)) + [12, 13, 14]
  tokens = jnp.asarray([text + [0] * 13], jnp.int32)
  draft, count = lookup(tokens, jnp.asarray([len(text)], jnp.int32), 2, 3, 63, "latest")
  assert count.tolist() == [63] and draft[0].tolist() == text[5:68]
