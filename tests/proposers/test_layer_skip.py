"""Layer skipping against the full model with silenced layers, and the search against the drafts that it predicts."""
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import layer_search
from specjax.proposers import layer_skip
from specjax.sampling import SamplingParams
from specjax.testing import tiny

TARGET = tiny.decoder()
PROMPTS = [[1, 2, 3, 4, 5], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6] * 3]
NEW = [40, 33, 20]
POINT = layer_skip.LayerSkip((1, 3))
SAMPLED = layer_skip.LayerSkip((2, 0), drawing=proposers.Drawing(sampled=True))
pytestmark = pytest.mark.usefixtures("quick_compile")
draft = jax.jit(decode.draft)


def silenced(target, skipped):
  """The whole target, with layers that add nothing."""
  mute = lambda layer: layer.replace(attention_out=jnp.zeros_like(layer.attention_out), down=jnp.zeros_like(layer.down))
  layers = tuple(mute(layer) if i in skipped else layer for i, layer in enumerate(target.weights.layers))
  return target.replace(weights=target.weights.replace(layers=layers))


@pytest.mark.parametrize("temperature", [0.0, [0.8, 0.8, 0.0]])
def test_text_is_that_of_plain_decoding(temperature):
  """Greedy, and sampled with a seed: drafts are points."""
  params = SamplingParams(temperature=temperature)
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, params, max_new_tokens=NEW)
  result = drivers.generate(TARGET, POINT, PROMPTS, params, max_new_tokens=NEW)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert (0 < result.counters.accepted_tokens).all()
  assert (result.counters.accepted_tokens < result.counters.drafted_tokens).all()


@pytest.mark.parametrize("proposer", [POINT, SAMPLED], ids=["point", "sampled"])
def test_drafts_are_those_of_the_silenced_target(proposer):
  """With the committed keys and values of the whole target, in a row that may draft 3, 1 and 0 tokens."""
  state = drivers.start(TARGET, proposer, PROMPTS, SamplingParams(temperature=0.8), max_new_tokens=[9, 2, 1])
  tree, _ = draft(TARGET, proposer, state)
  assert tree.size.tolist() == [4, 2, 1] and tree.resume is None
  tree_lib.check(tree, TARGET.vocab_size)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (3, 4, 4))
  positions = state.length[:, None] - 1 + jnp.arange(4)
  model = silenced(TARGET, proposer.skipped)
  logits = np.asarray(model.logits(model.forward(tree.tokens, positions, mask, state.cache).hidden), np.float64)
  for row, size in enumerate(tree.size.tolist()):
    for node in range(size - 1):
      if proposer is POINT:
        assert tree.tokens[row, node + 1] == np.argmax(logits[row, node])
      else:
        np.testing.assert_allclose(tree.q.probs[row, node], dummy_law.softmax(logits[row, node] / 0.8), atol=1e-5)
  assert (tree.q is None) == (proposer is POINT)


def test_q_is_the_law_that_tokens_were_drawn_from():
  rows, vocabulary = 3000, TARGET.vocab_size
  state = drivers.start(TARGET, SAMPLED, [PROMPTS[0]] * rows, SamplingParams(temperature=0.6), max_new_tokens=9)
  tree, _ = draft(TARGET, SAMPLED, state)
  tokens, q = np.asarray(tree.tokens), np.asarray(tree.q.probs, np.float64)
  assert (tree.size == 4).all()
  counts, laws = np.zeros((vocabulary + 1, vocabulary)), np.full((vocabulary + 1, vocabulary), 1 / vocabulary)
  np.add.at(counts[0], tokens[:, 1], 1)
  laws[0] = q[0, 0]
  for row in range(rows):
    counts[1 + tokens[row, 1], tokens[row, 2]] += 1
    laws[1 + tokens[row, 1]] = q[row, 1]
  assert dummy_law.p_value(counts, laws / laws.sum(1, keepdims=True)) > 1e-3


def test_sampled_drafts_under_rejection_and_no_host_in_the_step():
  params = SamplingParams(temperature=0.8)
  arguments = dict(max_new_tokens=NEW, verifier=verifiers.Rejection())
  result = drivers.generate(TARGET, SAMPLED, PROMPTS, params, **arguments)
  assert result.lengths.tolist() == NEW
  assert 0 < result.counters.accepted_tokens.sum() < result.counters.drafted_tokens.sum()
  state = drivers.start(TARGET, SAMPLED, PROMPTS, params, **arguments)
  step = jax.jit(functools.partial(decode.step, verifier=verifiers.Rejection()))
  host = re.compile("callback|infeed|outfeed", re.IGNORECASE)
  assert not host.search(step.lower(TARGET, SAMPLED, state=state).as_text())
  guilty = jax.jit(lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((), jnp.float32), x))
  assert host.search(guilty.lower(jnp.float32(0)).as_text())


@pytest.mark.parametrize("make,message", [
    (lambda: layer_skip.LayerSkip(()), r"skipped=\(\): needed are one layer or more"),
    (lambda: layer_skip.LayerSkip((1, 1)), r"skipped=\(1, 1\): .* each named once"),
    (lambda: layer_skip.LayerSkip((1,), num_tokens=0), "num_tokens=0: it must be 1 or more"),
    (lambda: layer_skip.LayerSkip((1,), drawing=proposers.Drawing(temperature=0.5)), "draft temperature=0.5"),
    (lambda: layer_skip.LayerSkip((4,)).init(TARGET, 1, 8), r"skipped=\(4,\): allowed are 1 to 3 of the layers 0 to 3"),
    (lambda: layer_skip.LayerSkip((0, 1, 2, 3)).init(TARGET, 1, 8), r"skipped=\(0, 1, 2, 3\): allowed are 1 to 3"),
    (lambda: layer_skip.LayerSkip((0,)).init(testing.DummyTarget(), 1, 8), "DummyTarget has none to choose from"),
    (lambda: layer_search.search(testing.DummyTarget(), PROMPTS, 8, 8), "DummyTarget has none to choose from"),
    (lambda: layer_search.search(tiny.decoder(layers=1), PROMPTS, 8, 8), "the target has 1 layer"),
    (lambda: layer_search.search(TARGET, PROMPTS, 2, 8), "num_tokens=3, budget=2, rounds=8"),
    (lambda: layer_search.search(TARGET, PROMPTS, 8, 8, most=4), "most=4: allowed are 1 to 3"),
    (lambda: layer_search.search(TARGET, PROMPTS, 8, 0), "num_tokens=3, budget=8, rounds=0"),
])
def test_errors(make, message):
  with pytest.raises(ValueError, match=message):
    make()


# --- the search -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
  return layer_search.search(TARGET, PROMPTS, 31, 12, most=3, progress=False)


def test_the_search_tries_every_set_once(found):
  """All layers alone, then more of the least harmful ones, then neighbours of the best; 4 layers have 14 sets."""
  sets = [one.skipped for one in found.tried]
  assert len(set(sets)) == 12 and sets[:4] == [(0,), (1,), (2,), (3,)] and all(0 < len(s) < 4 for s in sets)
  singles = sorted(found.tried[:4], key=lambda one: -one.tokens_per_step)
  assert set(sets[4]) == {singles[0].skipped[0], singles[1].skipped[0]} and len(sets[5]) == 3
  assert found.best.speedup == max(one.speedup for one in found.tried)
  for one in found.tried:
    assert one.tokens_per_step == pytest.approx(1 + 3 * one.acceptance)
    assert one.speedup == pytest.approx(one.tokens_per_step / (3 * (4 - len(one.skipped)) / 4 + 1))
  again = layer_search.search(TARGET, PROMPTS, 31, 30, most=3, seed=1, progress=False)
  assert len(again.tried) == 14 and again.tried[:6] == found.tried[:6]  # ends when there is nothing left to try
  few = layer_search.search(TARGET, PROMPTS, 31, 30, progress=False).tried  # of half of the layers at most
  assert len(few) == 4 + 6 and few[:5] == found.tried[:5]
  assert layer_search.search(TARGET, PROMPTS, 31, 12, most=3, progress=False) == found


def test_measured_tokens_are_those_of_the_drafts(found):
  """At every third place of the text `LayerSkip` drafts from there, and is compared with the text."""
  text = layer_search.write(TARGET, PROMPTS, 31)
  plain = drivers.generate(TARGET, proposers.Plain(), PROMPTS, max_new_tokens=31)
  rows = [[*prompt, *output] for prompt, output in zip(PROMPTS, plain.tokens.tolist())]
  assert [row[:len(rows[i])] for i, row in enumerate(text.tokens.tolist())] == rows
  roots = [(row, len(PROMPTS[row]) + 3 * k) for row in range(3) for k in range(10)]
  for one in (found.tried[1], found.tried[4]):
    assert 0 < one.acceptance < 1
    proposer = layer_skip.LayerSkip(one.skipped)
    state = drivers.start(TARGET, proposer, [rows[row][:end] for row, end in roots], max_new_tokens=9)
    tree, _ = draft(TARGET, proposer, state)
    wanted = np.array([rows[row][end:end + 3] for row, end in roots])
    accepted = (np.asarray(tree.tokens)[:, 1:] == wanted).cumprod(1).sum(1)
    assert one.tokens_per_step == pytest.approx(1 + accepted.mean())


def test_a_layer_that_does_nothing_is_found():
  """Skipping it is free, and better than skipping any other."""
  idle = silenced(tiny.decoder(scale=0.5), (2,))
  result = layer_search.search(idle, PROMPTS, 31, 4, progress=False)
  assert [one.skipped for one in result.tried if one.tokens_per_step == 4] == [(2,)]
  assert result.best.skipped == (2,) and result.best.acceptance == 1


def test_text_behind_an_end_counts_for_nobody():
  text = layer_search.write(TARGET, PROMPTS, 31)
  output = [text.tokens[row, len(prompt):len(prompt) + 31].tolist() for row, prompt in enumerate(PROMPTS)]
  assert text.count.tolist() == [31] * 3
  first = output[0][1]
  ending = TARGET.replace(config=dataclasses.replace(TARGET.config, eos_ids=(first,)))
  wanted = [words.index(first) + 1 if first in words else 31 for words in output]
  assert layer_search.write(ending, PROMPTS, 31).count.tolist() == wanted and wanted[0] <= 2
  ends_at_once = dataclasses.replace(TARGET.config, eos_ids=tuple(words[0] for words in output))
  with pytest.raises(ValueError, match="ends all of its answers before 3 tokens"):
    layer_search.search(TARGET.replace(config=ends_at_once), PROMPTS, 31, 4, progress=False)
