"""Retrieval against a search of every place of the corpus, and its datastore files."""
import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import proposers
from specjax import sampling
from specjax import stopping
from specjax import tree as tree_lib
from specjax.proposers import retrieval
from specjax.testing import dummy

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOTS, ROWS = 24, 32


@jax.jit
def drafts(proposer, tokens, length, active, budget, eos):
  rules = stopping.StopRules(eos=eos, sequences=jnp.full((tokens.shape[0], 1, 1), -1, jnp.int32))
  context = proposers.Context(tokens=tokens, length=length, start=length, active=active, budget=budget,
                              params=sampling.SamplingParams(), rules=rules)
  return proposer.find(tokens, length), proposer.draft(context), proposer.propose(None, None, (), context, None)[0]


def run(proposer, texts, *, active=True, budget=100, eos=()):
  """Of each row: the matched lengths and last places of the occurrences, and its nodes (token, parent, probability)."""
  tokens, length = np.full((ROWS, SLOTS), 1, np.int32), np.ones(ROWS, np.int32)
  for row, text in enumerate(texts):
    tokens[row, :len(text)], length[row] = text, len(text)
  ends = np.full((ROWS, 8), -1, np.int32)
  ends[:, :len(eos)] = eos
  (place, matched), draft, tree = drafts(proposer, tokens, length, np.full(ROWS, active),
                                         np.full(ROWS, budget, np.int32), ends)
  tree_lib.check(tree, 1000)
  found = []
  for row in range(len(texts)):
    size = int(tree.size[row])
    nodes = zip(*(np.asarray(x)[row, 1:size].tolist() for x in (tree.tokens, tree.parents, draft.probability)))
    real = np.asarray(matched)[row] > 0
    found.append((np.asarray(matched)[row][real].tolist(), np.asarray(place)[row][real].tolist(), list(nodes)))
  return found


def slow_find(corpus, text, min_ngram, max_ngram):
  """The longest n-gram at the text's end that the corpus holds, and the last places of all its occurrences."""
  for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
    ends = [i + size - 1 for i in range(len(corpus) - size + 1) if corpus[i:i + size] == text[len(text) - size:]]
    if ends:
      return size, ends
  return 0, []


def slow_paths(corpus, size, ends, depth, escape, eos):
  """Probability of every continuation of the occurrences, by path."""
  counts = collections.Counter()
  for end in ends:
    for n in range(1, depth + 1):
      path = tuple(corpus[end + 1:end + 1 + n])
      if len(path) < n or -1 in path or set(path) & set(eos):
        break
      counts[path] += 1
  found = {(): 1.0}
  for path in sorted(counts, key=len):
    parent = counts[path[:-1]] if len(path) > 1 else len(ends)
    found[path] = found[path[:-1]] * counts[path] / (parent + escape / (size + len(path) - 1))
  del found[()]
  return found


@pytest.mark.parametrize("alphabet,options", [
    (3, dict(tree=True, num_tokens=10, min_ngram=1, max_ngram=7, occurrences=250, min_probability=0.0, escape=0.0)),
    (9, dict(num_tokens=4, min_ngram=2, max_ngram=16, occurrences=64)),
])
def test_drafts_are_those_of_a_search_of_every_place(alphabet, options):
  rng = np.random.default_rng(alphabet)
  stored = [rng.integers(0, alphabet, rng.integers(1, 60)).tolist() for _ in range(12)]
  proposer = retrieval.Retrieval.of_texts(stored, **options)
  corpus = np.asarray(proposer.tokens).tolist()
  assert corpus == [token for text in stored for token in (*text, -1)]
  texts = [rng.integers(0, alphabet, rng.integers(1, SLOTS + 1)).tolist() for _ in range(ROWS - 12)]
  texts += [text[:SLOTS] for text in stored[:8]] + [[alphabet], [0], [alphabet, 0], [0, alphabet]]
  hits = 0
  for text, (matched, place, nodes) in zip(texts, run(proposer, texts, eos=(2,), budget=9), strict=True):
    size, ends = slow_find(corpus, text, proposer.min_ngram, proposer.max_ngram)
    assert sorted(place) == ends and set(matched) <= {size}
    slow = {path: p for path, p in slow_paths(corpus, size, ends, min(proposer.max_depth, 8), proposer.escape, (2,)
                                              ).items() if p >= proposer.min_probability - 1e-6}
    paths = [()]
    for token, parent, probability in nodes:
      paths.append((*paths[parent], token))
      assert probability == pytest.approx(slow[paths[-1]], abs=1e-5)
    assert len(set(paths)) == len(paths)
    score = sum(slow[path] for path in paths[1:])
    if proposer.tree:
      assert score == pytest.approx(sum(sorted(slow.values(), reverse=True)[:proposer.num_tokens]), abs=1e-4)
    else:
      best = max((sum(slow[path[:i + 1]] for i in range(len(path))) for path in slow), default=0)
      assert score == pytest.approx(best, abs=1e-4)
    hits += bool(nodes)
  assert 8 < hits < ROWS


def test_many_occurrences_are_read_evenly():
  """All places of a frequent n-gram lie in order of what follows, so an even choice keeps the shares of it."""
  stored = [[1, 2, token] for token in range(3, 13) for _ in range(40)]
  proposer = retrieval.Retrieval.of_texts(stored, occurrences=20, tree=True, num_tokens=12, escape=0.0,
                                          min_probability=0.0)
  (_, place, nodes), = run(proposer, [[5, 1, 2]])
  assert len(set(place)) == 20
  assert sorted((token, p) for token, _, p in nodes) == [(token, pytest.approx(0.1)) for token in range(3, 13)]


def test_where_a_draft_ends():
  proposer = retrieval.Retrieval.of_texts([[1, 2, 3, 4, 5], [9, 9]], num_tokens=7, escape=0.0)
  tokens = lambda *args, **kwargs: [token for token, *_ in run(proposer, [[1, 2]], *args, **kwargs)[0][2]]
  assert tokens() == [3, 4, 5]  # not across the end of a stored text
  assert tokens(budget=2) == [3] and tokens(budget=1) == [] == tokens(active=False)
  assert tokens(eos=(4,)) == [3]
  assert run(proposer, [[2, 9], [9, 9], [5, 9], [9]]) == [([], [], []), ([2], [7], []), ([], [], []), ([], [], [])]


def test_the_suffix_array_is_that_of_sorting():
  rng = np.random.default_rng(0)
  for tokens in (rng.integers(-1, 2, 200), np.zeros(50), np.arange(30)[::-1], np.array([3])):
    tokens = tokens.astype(np.int32)
    suffixes = [tokens[i:].tolist() for i in range(len(tokens))]
    assert retrieval.suffix_array(tokens).tolist() == sorted(range(len(tokens)), key=suffixes.__getitem__)


def test_the_text_is_that_of_plain_decoding():
  target = dummy.DummyTarget(vocab=8, order=2, sharpness=6.0)
  params = specjax.SamplingParams(temperature=[0.0, 0.8], seed=[0, 1])
  generate = lambda proposer: specjax.generate(target, proposer, [[1, 2, 3], [0, 4]], params, max_new_tokens=40)
  wanted = generate(proposers.Plain())
  stored = [row[:25].tolist() for row in np.asarray(wanted.tokens)] + [[3, 3, 0, 1, 2]]
  found = generate(retrieval.Retrieval.of_texts(stored, num_tokens=3, tree=True))
  assert found.tokens.tolist() == wanted.tokens.tolist()
  assert found.counters.accepted_tokens.sum() > 10


# --- files ----------------------------------------------------------------------------------------------------------


def vocabulary(*tokens):
  return types.SimpleNamespace(tokens=lambda: list(tokens))


def test_a_datastore_is_read_as_it_was_written(tmp_path):
  tokens = retrieval.join([[1, 2, 0], [], [2, 2]])
  path = tmp_path / "new" / "store"
  retrieval.save(path, tokens, retrieval.suffix_array(tokens), vocabulary("a", "b", None))
  loaded = retrieval.Retrieval.load(path, vocabulary("a", "b", None), num_tokens=5)
  assert loaded.tokens.tolist() == [1, 2, 0, -1, 2, 2, -1] and loaded.tokens.dtype == jnp.int32
  assert loaded.suffix_array.tolist() == retrieval.suffix_array(tokens).tolist() and loaded.num_tokens == 5
  for other in (vocabulary("a", "c", None), vocabulary("b", "a", None), vocabulary("a", "b"), vocabulary("a", "b", "")):
    with pytest.raises(ValueError, match="another vocabulary than the target's"):
      retrieval.Retrieval.load(path, other)
  kept = dict(np.load(path))
  np.savez(tmp_path / "later.npz", **{**kept, "format": 2})
  with pytest.raises(ValueError, match="has format 2, and 1 is read here"):
    retrieval.Retrieval.load(tmp_path / "later.npz", vocabulary("a", "b", None))
  np.savez(tmp_path / "other.npz", tokens=tokens)
  (tmp_path / "text").write_text("no archive")
  for name in ("other.npz", "text"):
    with pytest.raises(ValueError, match="is not a datastore"):
      retrieval.Retrieval.load(tmp_path / name, vocabulary("a"))


@pytest.mark.parametrize("kwargs,message", [
    (dict(num_tokens=0), "num_tokens=0: it must be 1 or more"),
    (dict(num_tokens=1, tree=True), "num_tokens=1: it must be 2 or more for a tree"),
    (dict(min_ngram=0), "min_ngram=0, max_ngram=16: needed is"),
    (dict(max_ngram=1), "min_ngram=2, max_ngram=1"),
    (dict(occurrences=0), "occurrences=0"),
])
def test_errors(kwargs, message):
  with pytest.raises(ValueError, match=message):
    retrieval.Retrieval.of_texts([[1]], **kwargs)


@pytest.mark.parametrize("texts,message", [([], "has no token"), ([[], []], "has no token"), ([[1, -2]], "negative")])
def test_errors_of_texts(texts, message):
  with pytest.raises(ValueError, match=message):
    retrieval.join(texts)
