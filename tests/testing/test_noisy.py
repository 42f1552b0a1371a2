"""The sampled drafter: each token is drawn from the law that it records, and that law is what it says it is.

Every row of a large batch is a seed of one prompt, so counts stand against the laws of plain NumPy. Half of the rows
ask for more than the others, penalties among it.
"""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
import every_proposer
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import stopping
from specjax import testing
from specjax import tree as tree_lib
from specjax.sampling import SamplingParams
from specjax.training import online

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=6, max_context=16)
PROMPT, ROWS, NOISE = [1, 2, 3], 4096, 1.6
PARENTS = (0, 0, 0, 1, 1)  # two children twice: the second's law depends on the first, the lower's on a path
ASKED = [dict(temperature=0.9, top_k=4),
         dict(temperature=1.1, top_k=3, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=-0.3)]
RULES = ["independent", "without_replacement", "coupled", "greedy_multi"]
draft = jax.jit(decode.draft)


def batch_params(asked, rows):
  """The first half of the rows asks for the first of `asked`, the second for the second."""
  names = {name for some in asked for name in some}
  neutral = SamplingParams()
  half = lambda name, some: [some.get(name, getattr(neutral, name))] * (rows // 2)
  return SamplingParams(**{name: half(name, asked[0]) + half(name, asked[1]) for name in names})


def trees(rule, sparse=0, noise=NOISE, parents=PARENTS, asked=ASKED):
  proposer = testing.NoisySelf(noise=jnp.float32(noise), parents=parents, rule=rule, sparse=sparse)
  state = drivers.start(TARGET, proposer, [PROMPT] * ROWS, batch_params(asked, ROWS), max_new_tokens=9,
                        key=jax.random.key(0))
  return draft(TARGET, proposer, state)[0]


def law_at(asked, path, noise=NOISE):
  asked = {**asked, "temperature": asked["temperature"] * noise}
  return dummy_law.law(TARGET, [*PROMPT, *path], len(PROMPT), **asked)[0]


def above(node):
  """Drafted nodes on the way to a node, which is left out."""
  path = []
  while node := PARENTS[node]:
    path.insert(0, node)
  return path


def top_first(law):
  return int(np.argmax(law))


def without(law, tokens):
  law = law.copy()
  law[list(tokens)] = 0
  return law / law.sum()


def contexts(tokens, node):
  """The rows that share everything which node's law may depend on: half, tokens above, earlier siblings' tokens."""
  earlier = [i for i in range(1, node) if PARENTS[i] == PARENTS[node]]
  path = above(node)
  half = np.arange(ROWS) // (ROWS // 2)
  seen, inverse = np.unique(np.column_stack([half, tokens[:, path + earlier]]), axis=0, return_inverse=True)
  for i, context in enumerate(seen):
    yield ASKED[context[0]], context[1:1 + len(path)], context[1 + len(path):], np.flatnonzero(inverse.ravel() == i)


@pytest.mark.parametrize("sparse", [0, 4], ids=["dense", "sparse"])
@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_drawn_from_the_law_that_is_recorded(rule, sparse):
  tree = tree_lib.check(trees(rule, sparse), TARGET.vocab)
  assert tree.replacement == (rule != "without_replacement") and (np.asarray(tree.size) == len(PARENTS)).all()
  assert type(tree.q).__name__ == ("SparseLaw" if sparse else "DenseLaw")
  tokens, sampled = np.asarray(tree.tokens), np.asarray(tree.sampled)
  q = np.stack([tree.q.row(jnp.full(ROWS, node), TARGET.vocab) for node in range(2)], axis=1)
  for node in range(1, len(PARENTS)):
    parent = PARENTS[node]
    last = parent not in PARENTS[node + 1:]
    assert (sampled[:, node] == (rule != "greedy_multi" or last)).all()
    counts, laws, other = [], [], []
    for asked, path, earlier, rows in contexts(tokens, node):
      law, recorded = law_at(asked, path), q[rows, parent]
      if rule == "greedy_multi":
        if not last:
          assert (tokens[rows, node] == top_first(law)).all()
          continue
        assert earlier.tolist() == [top_first(law)]
        law = without(law, earlier)
      np.testing.assert_allclose(recorded, np.broadcast_to(law, recorded.shape), rtol=2e-5, atol=1e-6)
      if rule == "coupled" and len(earlier):
        assert (tokens[rows, node] == earlier[0]).all()  # the same noise, the same token
        continue
      wrong = law_at(asked, path, noise=1.0)
      if rule == "without_replacement":
        law = without(law, earlier)
      counts.append(np.bincount(tokens[rows, node], minlength=TARGET.vocab))
      laws.append(law)
      other.append(without(wrong, earlier) if rule in ("without_replacement", "greedy_multi") else wrong)
    if counts:
      assert dummy_law.p_value(counts, laws) > 1e-4
      assert dummy_law.p_value(counts, other) < 1e-6  # these counts would show another law
  if rule == "without_replacement":
    assert (tokens[:, 1] != tokens[:, 2]).all() and (tokens[:, 3] != tokens[:, 4]).all()


def test_branches_and_steps_draw_for_themselves():
  """The second child of the root and the first child of the first are independent, given the first; and a draft at
  another root is another draw, although the text is one token longer only."""
  tokens = np.asarray(trees("independent").tokens)[:ROWS // 2]
  first = top_first(np.bincount(tokens[:, 1]))
  rows = tokens[:, 1] == first
  joint = np.bincount(tokens[rows, 2] * TARGET.vocab + tokens[rows, 3], minlength=TARGET.vocab ** 2)
  law = np.outer(law_at(ASKED[0], []), law_at(ASKED[0], [first])).ravel()
  assert dummy_law.p_value(joint, law) > 1e-4
  proposer = testing.NoisySelf(noise=jnp.float32(NOISE), parents=PARENTS)
  params = batch_params(ASKED, ROWS)
  state = drivers.start(TARGET, proposer, [[*PROMPT, first]] * ROWS, params, max_new_tokens=9, key=jax.random.key(0))
  later = np.asarray(draft(TARGET, proposer, state)[0].tokens)[:ROWS // 2]
  # Both are draws at the same place of the text, from the same law: once as node 3 below the first token, once as
  # node 1 below it.
  joint = np.bincount(tokens[rows, 3] * TARGET.vocab + later[rows, 1], minlength=TARGET.vocab ** 2)
  here = law_at(ASKED[0], [first])
  assert dummy_law.p_value(joint, np.outer(here, here).ravel()) > 1e-4


def test_without_penalties_nothing_else_is_computed():
  """The way of a batch that asks for no change of the logits; and noise is a value: 1 makes q the target's law."""
  asked = [dict(temperature=0.7), dict(temperature=1.3)]
  tree = tree_lib.check(trees("independent", noise=1.0, parents=(0, 0, 1), asked=asked), TARGET.vocab)
  tokens, q = np.asarray(tree.tokens), np.asarray(tree.q.probs)
  for half in range(2):
    for first in range(TARGET.vocab):
      rows = np.flatnonzero((tokens[:, 1] == first) & (np.arange(ROWS) // (ROWS // 2) == half))
      assert len(rows)
      for node, path in ((0, []), (1, [first])):
        wanted = law_at(asked[half], path, noise=1.0)
        np.testing.assert_allclose(q[rows, node], np.broadcast_to(wanted, (len(rows), TARGET.vocab)), rtol=2e-5,
                                   atol=1e-6)


# --- every drafter of the library -----------------------------------------------------------------------------------

def test_every_drafter_is_in_the_registry():
  exported = {getattr(module, name) for module in (proposers, testing) for name in module.__all__}
  drafters = {x for x in exported if isinstance(x, type) and hasattr(x, "propose") and x is not proposers.Proposer}
  drafters.add(online.Online)  # stands where training stands
  assert drafters == {type(entry.proposer) for entry in every_proposer.ENTRIES + every_proposer.TESTING}


@pytest.mark.parametrize("entry", every_proposer.ENTRIES + every_proposer.TESTING, ids=lambda e: e.name)
def test_every_drafter_makes_trees_that_can_be_judged(entry):
  """Greedy rows, rows whose law has a single id, ended rows, rows at their last token, and texts of several lengths."""
  proposer, target = entry.proposer, entry.target
  prompts = [[1, 2, 1, 2, 1], [0] * 7, [3], [5, 4, 5, 4, 5, 4], [2, 2, 3], [1, 1, 2]]
  params = SamplingParams(temperature=[0.0, 0.8, 1.5, 1.0, 0.9, 1e-3], top_k=[0, 0, 0, 1, 2, 0])
  state = drivers.start(target, proposer, prompts, params, max_new_tokens=[9, 9, 9, 9, 1, 2])
  run = decode.draft if proposer.host else jax.jit(decode.draft)
  for ended in ([], [1, 3]):
    reason = np.zeros(len(prompts), np.int32)
    reason[ended] = stopping.LENGTH
    tree, _ = run(target, proposer, state.replace(reason=jnp.asarray(reason)))
    tree = tree_lib.check(tree, target.vocab_size)
    assert tree.width <= proposer.max_nodes
    assert int(tree_lib.depths(tree_lib.ancestors(tree.parents, tree.width)).max()) <= proposer.max_depth
    if proposer.chains:
      drafted, place = np.asarray(tree.drafted), np.arange(tree.width)
      assert (np.asarray(tree.parents) == np.maximum(place - 1, 0))[drafted].all()
    np.testing.assert_array_equal(tree.tokens[:, 0], [prompt[-1] for prompt in prompts])
    assert (np.asarray(tree.size)[ended] == 1).all() and tree.size[4] == 1  # nothing for those that end
    # Those that read the target's ids have not seen any before the first step.
    assert proposer.max_nodes == 1 or proposer.node_ids or (np.asarray(tree.size) > 1).any()
