"""Suffix decoding against a trie of dictionaries with counts, all suffixes inserted; its store; exactness."""
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import proposers
from specjax import sampling
from specjax import stopping
from specjax import tree as tree_lib
from specjax.proposers import suffix
from specjax.testing import dummy

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOTS, ROWS = 64, 48
POISON = 1  # behind the text the buffer holds an id that the text uses
PUBLISHED = dict(escape=0.0, store_escape=0.0, factor=1.0, occurrences=64)  # of a text of 64 tokens all


@jax.jit
def drafts(proposer, tokens, length, active, budget, eos):
  rules = stopping.StopRules(eos=eos, sequences=jnp.full((tokens.shape[0], 1, 1), -1, jnp.int32))
  context = proposers.Context(tokens=tokens, length=length, start=length, active=active, budget=budget,
                              params=sampling.SamplingParams(), rules=rules)
  draft = proposer.draft(context)
  return draft, draft.tree()


def draft(proposer, texts, *, active=True, budget=100, eos=(), rows=ROWS):
  """A list of rows, each a list of (token, parent, probability) of its nodes, and the matched lengths."""
  tokens, length = np.full((rows, SLOTS), POISON, np.int32), np.ones(rows, np.int32)
  for row, text in enumerate(texts):
    tokens[row, :len(text)], length[row] = text, len(text)
  def spread(x, dtype):
    out = np.zeros(rows, dtype)
    out[:len(texts)] = x
    return out
  ends = np.full((rows, 8), -1, np.int32)
  ends[:, :len(eos)] = eos
  found, tree = drafts(proposer, tokens, length, spread(active, bool), spread(budget, np.int32), ends)
  assert tree.tokens.shape == (rows, proposer.max_nodes) and tree.size.dtype == jnp.int32 and tree.sampled is None
  assert tree.tokens[:len(texts), 0].tolist() == [text[-1] for text in texts]  # the pending token is the root
  tree_lib.check(tree, 1000)
  size, probability = np.asarray(tree.size), np.asarray(found.probability)
  assert (size == (probability > 0).sum(1)).all() and (probability[:, 0] == 1).all()
  nodes = [list(zip(*(np.asarray(x)[row, 1:size[row]].tolist() for x in (tree.tokens, tree.parents, probability))))
           for row in range(len(texts))]
  return nodes, np.asarray(found.matched)[:len(texts)].tolist()


def tokens_of(nodes):
  return [token for token, _, _ in nodes]


def make_trie(texts):
  """Every suffix of every text in a dictionary of dictionaries; key None counts what goes through a node."""
  trie = {None: 0}
  for text in texts:
    for start in range(len(text)):
      node = trie
      for token in text[start:]:
        node = node.setdefault(token, {None: 0})
        node[None] += 1
  return trie


def slow_nodes(trie, text, length, itself, proposer, eos, budget):
  """Probability by path of all nodes that may be drafted behind the last `length` tokens."""
  node = trie
  for token in text[len(text) - length:]:
    node = node.get(token)
    if node is None:
      return {}
  found = {}

  def grow(node, total, path, probability):
    if len(path) == min(proposer.max_depth, max(budget - 1, 0)):
      return
    for token, child in node.items():
      if token is None or token in eos:
        continue
      escape = (proposer.escape if itself else proposer.store_escape) / (length + len(path))
      mine = probability * child[None] / (total + escape)
      if mine >= proposer.min_probability - 1e-6:
        found[(*path, token)] = mine
        grow(child, child[None], (*path, token), mine)
  grow(node, node[None] - itself, (), 1.0)
  return found


def slow_scores(trie, text, itself, proposer, eos=(), budget=100):
  """By match length: the nodes, and the greatest score of a draft of them."""
  out = {}
  for length in range(proposer.min_match, min(proposer.max_match, len(text)) + 1):
    nodes = slow_nodes(trie, text, length, itself, proposer, eos, budget)
    limit = min(int(proposer.factor * length + proposer.offset + 1e-6), proposer.num_tokens)
    if proposer.tree:
      score = sum(sorted(nodes.values(), reverse=True)[:limit])
    else:
      sums = (sum(nodes[path[:i + 1]] for i in range(len(path))) for path in nodes if len(path) <= limit)
      score = max(sums, default=0)
    if nodes and limit:
      out[length] = nodes, limit, score
  return out


def check(drafted, matched, slow, proposer):
  """One row's draft is a best one of the trie."""
  if not slow:
    assert not drafted and matched == 0
    return False
  best = max(score for _, _, score in slow.values())
  slack = 0.008 if proposer.tree else 1e-4  # of the choice between match lengths; a tree's score is bisected
  assert matched in slow and slow[matched][2] >= best - slack
  assert matched >= max(length for length, (_, _, score) in slow.items() if score >= best) or proposer.tree
  nodes, limit, score = slow[matched]
  paths = [()]
  for token, parent, probability in drafted:
    paths.append((*paths[parent], token))
    assert probability == pytest.approx(nodes[paths[-1]], abs=1e-5)
  assert len(set(paths)) == len(paths) <= limit + 1
  assert sum(probability for *_, probability in drafted) == pytest.approx(score, abs=1e-4)
  return True


PROPOSERS = {
    "published chain": suffix.Suffix(num_tokens=7, **PUBLISHED),
    "published tree": suffix.Suffix(num_tokens=12, tree=True, **PUBLISHED),
    "chain": suffix.Suffix(num_tokens=7, occurrences=64),
    "tree": suffix.Suffix(num_tokens=12, tree=True, min_match=2, max_match=9, factor=2.0, offset=1.0,
                          occurrences=64),
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_draft_is_a_best_one_of_the_trie(name):
  proposer, rng, hits, branched = PROPOSERS[name], np.random.default_rng(7), 0, 0
  for alphabet in (2, 4, 12):
    texts = [rng.integers(0, alphabet, rng.integers(1, SLOTS + 1)).tolist() for _ in range(ROWS - 8)]
    texts += [(rng.integers(0, alphabet, period).tolist() * SLOTS)[:40] for period in range(1, 9)]
    nodes, matched = draft(proposer, texts, eos=(11,), budget=6)
    for row, text in enumerate(texts):
      slow = slow_scores(make_trie([text]), text, 1, proposer, eos=(11,), budget=6)
      hits += check(nodes[row], matched[row], slow, proposer)
      branched += any(parent != i for i, (_, parent, _) in enumerate(nodes[row]))
  assert ROWS < hits < 3 * ROWS  # the sample holds hits and misses
  assert (branched > 5) == proposer.tree


CHAIN = PROPOSERS["published chain"]
EDGES = [
    ("one token", [7], []),
    ("one token that is the poison", [POISON], []),
    ("two tokens", [7, 8], []),
    ("two equal tokens", [7, 7], [7]),
    ("no token twice", [1, 2, 3, 4, 5, 6], []),
    ("match at place 0", [7, 8, 5, 6, 7, 8], [5, 6]),
    ("match at place 0, of one token", [7, 8, 5, 6, 7], [8]),
    ("match that ends right before the last token", [7, 7, 7], [7]),
    ("overlapping", [5, 7, 7, 7, 7, 7], [7, 7]),
    ("the tail is shorter than the match", [5, 6, 5, 6, 5, 6, 5, 6], [5, 6, 5, 6]),
    ("the more frequent one wins", [2, 3, 9, 2, 3, 8, 4, 2, 3, 9, 6, 2, 3], [9, 6]),
    ("padding ids inside the match", [7, 8, 0, 0, 5, 7, 8], [0, 0]),
    ("a padded left end", [0, 0, 0, 0, 7, 8, 5, 7, 8], [5, 7]),
    ("the poison behind the text continues no match", [9, POISON, POISON, 4, 9], [POISON]),
    ("the whole buffer", list(range(2, SLOTS - 1)) + [4, 5, 6], [7, 8, 9]),
    ("a match beyond its limit", (list(range(10, 40)) * 3)[:60] + [30, 31], [32, 33]),
]


def test_edges_and_independence_of_rows():
  """Each edge; and every row alone, beside others and in another place gives the same."""
  texts = [text for _, text, _ in EDGES]
  nodes, matched = draft(CHAIN, texts)
  for (name, text, wanted), row, length in zip(EDGES, nodes, matched):
    assert tokens_of(row) == wanted, name
    check(row, length, slow_scores(make_trie([text]), text, 1, CHAIN), CHAIN)
  assert draft(CHAIN, texts[::-1]) == (nodes[::-1], matched[::-1])
  assert [draft(CHAIN, [text])[0][0] for text in texts] == nodes


HIT, MISS = [7, 8, 9, 5, 6, 4, 3, 7, 8, 9], [1, 2, 3, 4, 5]


def test_where_a_draft_ends():
  proposer = PROPOSERS["chain"]
  full = [5, 6, 4, 3, 7, 8, 9]
  lists = lambda *args, **kwargs: [tokens_of(row) for row in draft(proposer, *args, **kwargs)[0]]
  assert lists([HIT, MISS, HIT]) == [full, [], full]
  assert lists([HIT] * 3, active=[True, False, True]) == [full, [], full]
  assert lists([HIT] * 6, budget=[0, 1, 2, 3, 8, 9]) == [[], [], [5], [5, 6], full, full]
  for place in range(6):  # what stands before the end of sequence is kept; the id itself comes at no cost
    assert lists([HIT, MISS], eos=(full[place], 99)) == [full[:place], []]


def test_what_is_improbable_is_not_drafted():
  text = [5, 6, 1, 5, 6, 2, 5, 6, 3, 5, 6]
  sure = suffix.Suffix(num_tokens=7, min_probability=0.4, **PUBLISHED)
  assert draft(sure, [text])[0] == [[]] and draft(CHAIN, [text])[0] != [[]]


def test_a_least_score_keeps_a_row_from_drafting():
  weak, strong = [5, 6, 1, 2, 5], HIT
  proposer = suffix.Suffix(num_tokens=7, min_score=1.0)
  (nothing, something), matched = draft(proposer, [weak, strong])
  assert not nothing and matched[0] == 0
  assert tokens_of(something) == [5, 6, 4, 3, 7, 8, 9] and matched[1] == 3
  assert tokens_of(draft(PROPOSERS["chain"], [weak])[0][0]) == [6, 1, 2]


def test_overlap_goes_on_in_its_own_tokens():
  proposer = suffix.Suffix(num_tokens=7, overlap=True)
  for text in ([7, 7, 7, 7], [3, 5, 6, 5, 6, 5, 6], [1, 2, 3, 1, 2, 3, 1]):
    grown = list(text)
    period = next(q for q in range(1, 4) if text[-1 - q] == text[-1])
    for _ in range(7):
      grown.append(grown[-period])
    assert tokens_of(draft(proposer, [text])[0][0]) == grown[len(text):]


# --- the store ------------------------------------------------------------------------------------------------------


def test_the_store_is_read_as_a_trie_of_its_outputs_and_the_better_draft_wins():
  """Nothing goes across the end of an output, and a full store has forgotten its oldest tokens."""
  rng = np.random.default_rng(3)
  for alphabet, name in ((3, "published chain"), (6, "tree")):
    proposer = PROPOSERS[name].with_store(40)
    assert draft(proposer, [HIT]) == draft(PROPOSERS[name], [HIT])  # an empty store
    outputs = [rng.integers(0, alphabet, rng.integers(1, 20)).tolist() for _ in range(9)]
    for output in outputs:
      proposer = proposer.remember((), [output])
    kept = [token for output in outputs for token in (*output, -1)][-40:]
    stored, part = [], []
    for token in kept:
      part = (stored.append(part), [])[1] if token < 0 else [*part, token]
    texts = [rng.integers(0, alphabet, rng.integers(1, 30)).tolist() for _ in range(ROWS)]
    nodes, matched = draft(proposer, texts)
    local, _ = draft(PROPOSERS[name], texts)
    from_store = 0
    for row, text in enumerate(texts):
      sources = [slow_scores(make_trie([text]), text, 1, proposer), slow_scores(make_trie(stored), text, 0, proposer)]
      best = [max((score for *_, score in slow.values()), default=0) for slow in sources]
      score = sum(probability for *_, probability in nodes[row])
      assert score >= max(best) - 0.01
      if nodes[row] != local[row]:
        from_store += check(nodes[row], matched[row], sources[1], proposer)
    assert 5 < from_store < ROWS


def test_remember_and_forget_keep_the_shapes_and_the_program():
  proposer = PROPOSERS["published chain"].with_store(40)
  draft(proposer, [MISS])
  programs = drafts._cache_size()
  other = proposer.remember((), [[4, 5, 8, 9], [], [4, 5, 8, 9]])
  assert tokens_of(draft(other, [MISS])[0][0]) == [8, 9] and not draft(proposer, [MISS])[0][0]
  assert not draft(other.forget(), [MISS])[0][0]
  assert other.store.tokens[:10].tolist() == [4, 5, 8, 9, -1] * 2 and int(other.store.filled) == 10
  assert drafts._cache_size() == programs
  alone = PROPOSERS["published chain"]
  assert alone.remember((), [[1, 2]]) is alone and alone.forget() is alone


def test_one_output_longer_than_the_store():
  proposer = PROPOSERS["published chain"].with_store(8).remember((), [list(range(20))])
  assert proposer.store.tokens.tolist() == [13, 14, 15, 16, 17, 18, 19, -1]


# --- in the decode loop ---------------------------------------------------------------------------------------------


@functools.cache
def plain():
  return generate(proposers.Plain())


def generate(proposer):
  """Greedy and sampled rows in one batch, on a target whose texts repeat; one of them ends early."""
  target = dummy.DummyTarget(vocab=8, order=2, sharpness=6.0, eos_ids=(7,))
  prompts = [[1, 2, 3], [0, 4, 2, 2, 0, 4], [3], [1, 2, 3]]
  params = specjax.SamplingParams(temperature=[0.0, 0.8, 0.8, 0.8], seed=[0, 1, 2, 3])
  return specjax.generate(target, proposer, prompts, params, max_new_tokens=[40, 40, 40, 17])


@pytest.mark.parametrize("tree", [False, True])
def test_the_text_is_that_of_plain_decoding(tree):
  wanted = plain()
  earlier = np.asarray(wanted.tokens[1])[:wanted.lengths[1]].tolist()
  proposer = suffix.Suffix(num_tokens=3, tree=tree).with_store(64).remember((), [earlier])
  found = generate(proposer)
  assert found.tokens.tolist() == wanted.tokens.tolist() and found.lengths.tolist() == wanted.lengths.tolist()
  assert int(found.counters.accepted_tokens.sum()) > 20


def test_a_draft_is_one_program_on_the_device():
  proposer = PROPOSERS["tree"].with_store(40)
  shape = lambda *x, dtype=jnp.int32: jax.ShapeDtypeStruct(x, dtype)
  args = shape(2, SLOTS), shape(2), shape(2, dtype=jnp.bool_), shape(2), shape(2, 8)
  text = drafts.lower(proposer, *args).compile().as_text()
  assert "while" in text and not re.search(r"callback|infeed|outfeed|host_compute|\bsend\(|\brecv\(", text, re.I)


@pytest.mark.parametrize("kwargs,message", [
    (dict(num_tokens=0), "num_tokens=0: it must be 1 or more"),
    (dict(num_tokens=1, tree=True), "num_tokens=1: it must be 2 or more for a tree"),
    (dict(min_match=0), "min_match=0, max_match=24: needed is 1 <= min_match <= max_match <= 63"),
    (dict(max_match=64), "max_match=64"),
    (dict(min_match=5, max_match=4), "min_match=5, max_match=4"),
    (dict(occurrences=0), "occurrences=0"),
    (dict(min_probability=1.5), "min_probability=1.5: it must be between 0 and 1"),
    (dict(factor=-1.0), "factor=-1.0: it must be 0 or greater"),
    (dict(escape=float("nan")), "escape=nan: it must be 0 or greater, and finite"),
    (dict(min_score=float("inf")), "min_score=inf"),
])
def test_errors(kwargs, message):
  with pytest.raises(ValueError, match=message):
    suffix.Suffix(**kwargs)


def test_errors_of_the_store():
  with pytest.raises(ValueError, match="a store of 1 tokens: it must be 2 or more"):
    suffix.Suffix().with_store(1)
  with pytest.raises(ValueError, match="an output holds id -1; ids are 0 or greater"):
    suffix.Suffix().with_store(9).remember((), [[3, -1]])


def test_sizes_say_chain_or_tree():
  chain, tree = suffix.Suffix(num_tokens=9), suffix.Suffix(num_tokens=9, tree=True)
  assert (chain.max_nodes, chain.max_depth) == (10, 9) and (tree.max_nodes, tree.max_depth) == (10, 8)
  assert not jax.tree.leaves(chain) and len(jax.tree.leaves(chain.with_store(8))) == 2
