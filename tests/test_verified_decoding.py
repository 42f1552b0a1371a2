"""Sampled drafts through the whole loop: counts of texts against the exact law of the target, for every verifier.

One program tries all verifiers of a way of drafting: its rows stand in groups, each with a verifier of its own, and each
row is a seed of the same prompt. In a group the first half of the rows asks for nothing but temperature 1, the second
for top-k and penalties. Keys are fixed, so nothing here is left to chance. The drafter draws from its q at a temperature
of its own, so that it is wrong about greedy rows, too.
"""
import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
from specjax import draft_laws
from specjax import drivers
from specjax import keys
from specjax import proposers
from specjax import testing
from specjax import verifiers
from specjax.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=5, max_context=16)
PROMPT, GROUP, LENGTH = [1, 2, 3], 1536, 3
ASKED = [dict(temperature=1.0),
         dict(temperature=0.8, top_k=3, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)]


@dataclasses.dataclass(frozen=True)
class Groups:
  """One verifier for each group of rows, groups of equal size in the batch's order."""
  members: tuple
  lossless = True
  chain_only = False
  needs_q = False
  purposes = (keys.TOKEN, keys.NOISE, keys.STOP, keys.RESIDUAL)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    size = logits.shape[0] // len(self.members)
    verdicts = []
    for i, member in enumerate(self.members):
      mine = jax.tree.map(lambda x: x[i * size:(i + 1) * size], (logits, tree, params, uniforms))
      verdicts.append(member.draw(*mine[:3], mode, mine[3], depth))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *verdicts)


@struct.dataclass
class Drafter(testing.NoisySelf):
  """Draws at a temperature of at least `least`: greedy rows get drafts that may be wrong."""
  least: jax.Array | float = 0.5

  def propose(self, target, cache, state, context, keys):
    warm = context.params.replace(temperature=jnp.maximum(context.params.temperature, self.least))
    return super().propose(target, cache, state, context.replace(params=warm), keys)


class Misled(verifiers.Rejection):
  """Rejection with a wrong q: what a drafter leads to that draws from another law than it records."""

  def draw(self, logits, tree, params, mode, uniforms, depth):
    other = draft_laws.DenseLaw(0.7 * tree.q.probs + 0.3 / logits.shape[-1])
    return super().draw(logits, tree.replace(q=other), params, mode, uniforms, depth)


V = verifiers
CHAIN, TREE = (0, 0, 1), (0, 0, 0, 1)
# A way of drafting, the verifiers that fit it, and those whose text must not have the target's law.
WAYS = {
    "chain": (Drafter(parents=CHAIN), (V.Rejection(), V.Block(), V.Point()),
              (V.Typical(), V.Lenient(0.4), V.Cascade("token", 0.3), Misled())),
    "tree": (Drafter(parents=TREE, sparse=5), (V.Recursive(), V.Traversal(), V.KSeq(), V.Coupled()), ()),
    "without replacement": (Drafter(parents=TREE, rule="without_replacement"),
                            (V.Recursive(), V.Traversal(), V.Point()), ()),
    "greedy multi": (Drafter(parents=TREE, rule="greedy_multi"), (V.GreedyMulti(), V.Traversal(), V.KSeq()), ()),
    # The noise of a position comes back in the next step: `coupled` is made for that, block verification is biased.
    "coupled": (Drafter(noise=5.0, parents=CHAIN, rule="coupled"), (V.Coupled(), V.Point()), (V.Block(),)),
}


def params_of(groups, **override):
  """Half of each group asks for the first of ASKED, half for the second; seeds are those of the place in the group."""
  half = lambda i, name: [ASKED[i].get(name, getattr(SamplingParams(), name))] * (GROUP // 2)
  names = ("temperature", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty")
  values = {name: (half(0, name) + half(1, name)) * groups for name in names}
  return SamplingParams(**{**values, "seed": np.tile(np.arange(GROUP), groups), **override})


def run(drafter, members, new=LENGTH, override=None, **kwargs):
  """The result, and its tokens as i32[groups, GROUP, new]."""
  result = drivers.generate(TARGET, drafter, [PROMPT] * (GROUP * len(members)), params_of(len(members), **override or {}),
                            max_new_tokens=new, verifier=Groups(members), key=jax.random.key(0), **kwargs)
  return result, result.tokens.reshape(len(members), GROUP, -1)


def go(way, **kwargs):
  drafter, lossless, lossy = WAYS[way]
  return run(drafter, lossless + lossy, **kwargs)


@functools.cache
def exact(half):
  return dummy_law.text_law(TARGET, PROMPT, LENGTH, **ASKED[half])


def p_values(texts):
  """Of the first tokens of one group's texts, i32[GROUP, *], for both halves."""
  code = texts[:, :LENGTH] @ (TARGET.vocab ** np.arange(LENGTH)[::-1])
  halves = code.reshape(2, -1)
  return [dummy_law.p_value(np.bincount(halves[half], minlength=TARGET.vocab ** LENGTH), exact(half))
          for half in range(2)]


@functools.cache
def plain(verifier, new):
  """Plain texts of all seeds, by a verifier that draws the token at a position."""
  return run(proposers.Plain(), (verifier,), new=new)[1][0]


# --- the law of the text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_text_has_the_law_of_the_target(way):
  _, lossless, lossy = WAYS[way]
  result, texts = go(way)
  accepted = result.counters.accepted_tokens.reshape(len(texts), -1).sum(1)
  drafted = result.counters.drafted_tokens.reshape(len(texts), -1).sum(1)
  for verifier, text, a, d in zip(lossless + lossy, texts, accepted, drafted):
    found = p_values(text)
    if verifier in lossy:
      assert min(found) < 1e-6, (verifier, found)
    else:
      assert min(found) > 1e-3, (verifier, found)
    assert 0 < a < d  # drafts were accepted, and refused


# --- the same text, and full acceptance -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_rules_that_draw_the_token_at_a_position_keep_the_plain_text(way):
  """Seed for seed, under sampled drafts of every kind: `point` and `coupled`."""
  members = WAYS[way][1]
  _, texts = go(way)
  for verifier, text in zip(members, texts):
    if verifier in (V.Point(), V.Coupled()):
      np.testing.assert_array_equal(text, plain(verifier, LENGTH))


@pytest.mark.parametrize("way", WAYS)
def test_greedy_rows_have_the_greedy_text(way):
  """Alone in their batch, and beside sampled rows, where they go through the rule with a law of one id."""
  wanted = [dummy_law.text(TARGET, PROMPT, 6, **{**asked, "temperature": 0})[0] for asked in ASKED]
  drafter, members, _ = WAYS[way]
  everyone = members + WAYS[way][2]  # the same program as above
  sampled = np.tile(np.repeat([ASKED[0]["temperature"], 0.0], GROUP // 2), len(everyone))
  for temperature, halves in ((0.0, (0, 1)), (sampled, (1,))):
    result, texts = run(drafter, everyone, new=6, override=dict(temperature=temperature))
    accepted, drafted = (x.reshape(len(everyone), -1).sum(1) for x in (result.counters.accepted_tokens,
                                                                       result.counters.drafted_tokens))
    for i, verifier in enumerate(members):
      for half in halves:
        mine = texts[i].reshape(2, -1, 6)[half]
        assert (mine == wanted[half]).all(), (verifier, half)
      assert 0 < accepted[i] < drafted[i]


@pytest.mark.parametrize("way", ["chain", "tree", "without replacement", "coupled"])
def test_a_drafter_that_is_the_target_is_accepted_whole(way):
  """q = p: 6 tokens in two steps of three, for every seed."""
  drafter, lossless, lossy = WAYS[way]
  result, _ = run(drafter.replace(noise=1.0), lossless + lossy, new=6)
  steps, accepted = (x.reshape(-1, GROUP) for x in (result.counters.steps, result.counters.accepted_tokens))
  for i, verifier in enumerate(lossless):
    if verifier != V.Point() and not (way == "tree" and verifier == V.Coupled()):  # these do not look at q
      assert (steps[i] == 2).all() and (accepted[i] == 4).all(), verifier
