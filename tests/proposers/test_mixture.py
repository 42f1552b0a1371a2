"""Trees of several proposers: merging against a trie in Python, what each proposer is told, and the law of the text."""
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import verified_texts
from specjax import decode
from specjax import draft_laws
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import mixture
from specjax.proposers import recycling
from specjax.sampling import SamplingParams
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=6, order=3)
PROMPTS = [[1, 2, 3], [4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [2]]
NEW = [60, 53, 40]
DRAFTS = 3
# A chain, another one, and a tree by a proposer that reads the target's ids at its own nodes; they do not all find room.
PARTS = (proposers.DraftModel(model=TARGET, num_tokens=DRAFTS), proposers.NGram(max_ngram=3, min_ngram=3, num_tokens=4),
         recycling.recycling(TARGET.vocab_size, successors=4, num_nodes=6))
ALL = mixture.Mixture(PARTS, node_budget=8)
DRAWN = mixture.Mixture((proposers.DraftModel(model=verified_texts.TARGET.replace(salt=np.uint32(5)), num_tokens=2),
                         testing.NoisySelf(noise=2.0, parents=(0, 0, 0, 1))))
merge = jax.jit(mixture.merge, static_argnums=1)

# --- merging --------------------------------------------------------------------------------------------------------


def random_tree(rng, rows, width, vocab=2):
  parents = np.array([[0] + [rng.integers(node) for node in range(1, width)] for _ in range(rows)], np.int32)
  tokens = rng.integers(0, vocab, (rows, width)).astype(np.int32)
  tokens[:, 0] = 9
  return tree_lib.TokenTree(tokens=jnp.asarray(tokens), parents=jnp.asarray(parents),
                            size=jnp.asarray(rng.integers(1, width + 1, rows), jnp.int32))


def slow_merge(trees, width, apart):
  """Nodes as (token, parent), and the node of each tree's nodes; the first `apart` trees are merged with nothing."""
  nodes, became = [(9, 0)], []
  children = {}
  for place, (tokens, parents, size) in enumerate(trees):
    own = [0] + [-1] * (len(tokens) - 1)
    for node in range(1, size):
      above = own[parents[node]]
      if above < 0:
        continue
      known = children.get((above, tokens[node]))
      if known is None and len(nodes) < width:
        known = len(nodes)
        nodes.append((tokens[node], above))
        if place >= apart:
          children[above, tokens[node]] = known
      own[node] = -1 if known is None else known
    became.append([-1 if -1 in own[:node] else where for node, where in enumerate(own)])
  return nodes, became


@pytest.mark.parametrize("sampled", [False, True])
def test_merging_is_that_of_a_trie(sampled):
  """A drawn tree, the second of the three, goes first and stays what it was."""
  rng, rows, width = np.random.default_rng(0), 200, 7
  trees = [random_tree(rng, rows, size) for size in (5, 4, 6)]
  order = [0, 1, 2]
  if sampled:
    order = [1, 0, 2]
    q = rng.random((rows, 4, 3)).astype(np.float32)
    trees[1] = trees[1].replace(sampled=jnp.asarray(rng.random((rows, 4)) < 0.7), q=draft_laws.DenseLaw(jnp.asarray(q)),
                                replacement=False)
  tree, nodes = merge(trees, width)
  full = shared = 0
  for row in range(rows):
    lists = [tuple(x[row].tolist() for x in (trees[k].tokens, trees[k].parents, trees[k].size)) for k in order]
    wanted, became = slow_merge(lists, width, int(sampled))
    size = int(tree.size[row])
    assert list(zip(tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist())) == wanted
    for k, own in zip(order, became):
      assert nodes[k][row].tolist() == own
    full += size == width
    shared += sum(map(len, became)) - 2 - sum(own.count(-1) for own in became) > size
  assert full > 9 and shared > 9
  if sampled:
    valid = np.asarray(trees[1].valid)
    np.testing.assert_array_equal(tree.sampled[:, :4], np.asarray(trees[1].sampled) & valid)
    assert not tree.sampled[:, 4:].any() and not tree.replacement
    np.testing.assert_array_equal(tree.q.probs[:, :4], q)
    assert tree.q.probs.shape[1] == width
  else:
    assert tree.sampled is None and tree.q is None


def test_a_proposer_learns_in_its_own_numbers():
  """Chains a b c and a b d e, of which the text goes a b d e; cut to five nodes there is no e."""
  chain = lambda *tokens: tree_lib.chain(jnp.asarray([9]), jnp.asarray([tokens]), jnp.asarray([len(tokens)]))
  ids = jnp.arange(16).reshape(1, 8, 2)

  def learned(width, path, drafted, which):
    tree, nodes = merge([chain(1, 2, 3), chain(1, 2, 4, 5)], width)
    committed = proposers.Committed(tokens=None, following=None, positions=None, hidden=None, count=jnp.asarray([5]),
                                    path=jnp.asarray([path]), drafted=jnp.asarray([drafted]), node_ids=ids)
    reader = type("Reader", (), {"node_ids": which})
    own = mixture.own_part(committed, nodes[which], reader)
    assert tree.size.tolist() == [width]
    return own.path[0].tolist(), int(own.drafted[0]), None if own.node_ids is None else own.node_ids[0, :, 0].tolist()

  assert learned(6, [0, 1, 2, 4, 5], 5, 0) == ([0, 1, 2, 0, 0], 3, None)
  assert learned(6, [0, 1, 2, 4, 5], 5, 1) == ([0, 1, 2, 3, 4], 4, [0, 2, 4, 8, 10])
  assert learned(5, [0, 1, 2, 4, 4], 4, 1) == ([0, 1, 2, 3, 3], 3, [0, 2, 4, 8, -1])
  assert learned(6, [0, 0, 0, 0, 0], 0, 1) == ([0, 0, 0, 0, 0], 0, [0, -1, -1, -1, -1])  # nothing was verified
  assert learned(6, [0, 1, 2, 3, 3], 5, 1) == ([0, 1, 2, 0, 0], 4, [0, 2, 4, 8, 10])


# --- in the loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, [0.8, 0.9, 0.0]])
def test_text_is_that_of_plain_decoding(temperature):
  """A draft model that is the target is right about greedy text, whatever stands beside its chain."""
  params = SamplingParams(temperature=temperature)
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, params, max_new_tokens=NEW)
  result = drivers.generate(TARGET, ALL, PROMPTS, params, max_new_tokens=NEW)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  counters = result.counters
  assert (0 < counters.accepted_tokens).all() and counters.accepted_tokens.sum() < counters.drafted_tokens.sum()
  if temperature == 0:  # at least its chain and a token a step, and lookup now and then one more
    assert (counters.accepted_tokens >= DRAFTS * (counters.steps - 1)).all()
    assert (counters.accepted_tokens > DRAFTS * counters.steps).any()


def test_drawn_nodes_come_first_and_the_text_has_the_law_of_the_target():
  members = (verifiers.Recursive(), verifiers.Traversal(), verifiers.LossyTypical())
  result, texts = verified_texts.run(DRAWN, members)
  least = [min(verified_texts.p_values(text)) for text in texts]
  assert min(least[:2]) > 1e-3 and least[2] < 1e-6  # a rule that is not lossless is seen
  accepted, drafted = verified_texts.per_group(result)
  assert (0 < accepted).all() and (accepted < drafted).all()
  state = drivers.start(verified_texts.TARGET, DRAWN, [[1, 2, 3]] * 4, SamplingParams(temperature=1.0),
                        max_new_tokens=9, verifier=members[0])
  tree, _ = jax.jit(decode.draft)(verified_texts.TARGET, DRAWN, state)
  tree_lib.check(tree, verified_texts.TARGET.vocab_size)
  assert tree.size.tolist() == [6] * 4 and tree.parents[0].tolist() == [0, 0, 0, 1, 0, 4]
  assert tree.sampled.tolist() == [[False, True, True, True, False, False]] * 4


def test_no_host_in_the_step():
  state = drivers.start(TARGET, ALL, PROMPTS, max_new_tokens=9)
  step = jax.jit(functools.partial(decode.step, verifier=verifiers.Point()))
  text = step.lower(TARGET, ALL, state=state).as_text()
  assert "while" in text and not re.search("callback|infeed|outfeed", text, re.IGNORECASE)


@pytest.mark.parametrize("make,message", [
    (lambda: mixture.Mixture((proposers.Plain(),)), "two or more are needed"),
    (lambda: mixture.Mixture(PARTS, node_budget=5), "node_budget=5: allowed are 6 nodes or more"),
    (lambda: mixture.Mixture((proposers.NGram(num_tokens=1), testing.NoisySelf(parents=(0, 0, 0, 0))), node_budget=3),
     "node_budget=3: allowed are 4 nodes or more"),
    (lambda: mixture.Mixture((testing.NoisySelf(), proposers.Plain(), testing.NoisySelf())),
     "NoisySelf and NoisySelf both draw their tokens"),
    (lambda: mixture.Mixture((proposers.NGram(), type("Slow", (proposers.NGram,), {"host": True})())),
     "Slow drafts on the host and cannot be one of several"),
    (lambda: drivers.start(TARGET, ALL, PROMPTS, max_new_tokens=9, verifier=verifiers.Rejection()),
     "Rejection verifies chains only, and Mixture drafts trees"),
    (lambda: _draft_early_exit(), "EarlyExit runs the target's lower layers and cannot be one of several"),
])
def test_errors(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def _draft_early_exit():
  target = tiny.decoder(layers=2)
  proposer = mixture.Mixture((proposers.NGram(), proposers.EarlyExit(1)))
  jax.eval_shape(decode.draft, target, proposer, drivers.start(target, proposer, PROMPTS, max_new_tokens=9))


def test_a_budget_bounds_the_nodes():
  assert (ALL.max_nodes, ALL.max_depth, ALL.node_ids) == (8, 4, PARTS[2].node_ids)
  assert mixture.Mixture(PARTS).max_nodes == mixture.Mixture(PARTS, node_budget=60).max_nodes == 1 + 3 + 4 + 5
