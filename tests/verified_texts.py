"""Texts of many seeds through the whole loop, one verifier a group of rows, and the exact law that they must have.

One program tries all verifiers of a way of drafting: its rows stand in groups, each with a verifier of its own, and
each row is a seed of the same prompt. In a group the first half of the rows asks for nothing but temperature 1, the
second for top-k and penalties. Keys are fixed, so nothing is left to chance. The drafter draws from its q at a
temperature of its own, so that it is wrong about greedy rows, too.
"""
import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

import dummy_law
from specjax import drivers
from specjax import keys
from specjax import proposers
from specjax import testing
from specjax import verifiers
from specjax.sampling import SamplingParams
from specjax.verifiers import base

TARGET = testing.DummyTarget(vocab=5, max_context=16)
PROMPT, GROUP, LENGTH = [1, 2, 3], 1024, 3
ASKED = [dict(temperature=1.0),
         dict(temperature=0.8, top_k=3, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)]


@dataclasses.dataclass(frozen=True)
class Groups:
  """One verifier for each group of rows, groups of equal size in the batch's order."""
  members: tuple
  lossless = False  # some members are not
  chain_only = False
  needs_q = False
  purposes = (keys.TOKEN, keys.NOISE, keys.STOP, keys.RESIDUAL)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    size = logits.shape[0] // len(self.members)
    # With nothing drafted no rule is asked: neighbours with that draw are one group, which compiles faster.
    alike = lambda member: type(member).draw is base.ByLaw.draw and tree.width == 1
    verdicts, begin = [], 0
    for end in range(1, len(self.members) + 1):
      if end < len(self.members) and alike(self.members[begin]) and alike(self.members[end]):
        continue
      mine = jax.tree.map(lambda x: x[begin * size:end * size], (logits, tree, params, uniforms))
      verdicts.append(self.members[begin].draw(*mine[:3], mode, mine[3], depth))
      begin = end
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *verdicts)


@struct.dataclass
class Drafter(testing.NoisySelf):
  """Draws at a temperature of at least `least`: greedy rows get drafts that may be wrong."""
  least: jax.Array | float = 0.5

  def propose(self, target, cache, state, context, keys):
    warm = context.params.replace(temperature=jnp.maximum(context.params.temperature, self.least))
    return super().propose(target, cache, state, context.replace(params=warm), keys)


def params_of(groups, **override):
  """Half of each group asks for the first of ASKED, half for the second; seeds are those of the place in the group."""
  half = lambda i, name: [ASKED[i].get(name, getattr(SamplingParams(), name))] * (GROUP // 2)
  names = ("temperature", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty")
  values = {name: (half(0, name) + half(1, name)) * groups for name in names}
  return SamplingParams(**{**values, "seed": np.tile(np.arange(GROUP), groups), **override})


def run(drafter, members, new=LENGTH, override=None, **kwargs):
  """The result, and its tokens as i32[groups, GROUP, new]."""
  params = params_of(len(members), **override or {})
  result = drivers.generate(TARGET, drafter, [PROMPT] * (GROUP * len(members)), params, max_new_tokens=new,
                            verifier=Groups(members), key=jax.random.key(0), **kwargs)
  return result, result.tokens.reshape(len(members), GROUP, -1)


@dataclasses.dataclass(frozen=True)
class Way:
  """A drafter, the verifiers that fit it, and those whose text must not have the target's law."""
  drafter: Drafter
  lossless: tuple
  lossy: tuple = ()

  def run(self, **kwargs):
    return run(self.drafter, self.lossless + self.lossy, **kwargs)

  @functools.cached_property
  def texts(self):
    """Of `LENGTH` tokens, as asked for."""
    return self.run()


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
def plain(verifier, new=LENGTH):
  """Plain texts of all seeds, by a verifier that draws the token at a position."""
  return run(proposers.Plain(), (verifier,), new=new)[1][0]


def check_laws(way):
  """The law of the text, for lossless verifiers; another one, for lossy ones. By a drafter that is flatter than the
  target, whose first child leaves little to its siblings, and by a sharper one, whose first child is refused often."""
  found, members = [], way.lossless + way.lossy
  for result, texts in (way.texts, run(way.drafter.replace(noise=0.4), members)):
    found.append([p_values(text) for text in texts])
    accepted, drafted = per_group(result)
    some = slice(len(way.lossless))
    assert (0 < accepted).all() and (accepted[some] < drafted[some]).all()
  for i, verifier in enumerate(members):
    least = min(min(by_noise[i]) for by_noise in found)
    assert least < 1e-6 if verifier in way.lossy else least > 1e-3, (verifier, [by_noise[i] for by_noise in found])


def per_group(result):
  """Accepted and drafted tokens of each group."""
  return [x.reshape(-1, GROUP).sum(1) for x in (result.counters.accepted_tokens, result.counters.drafted_tokens)]


def check_plain(way):
  """Verifiers that draw the token at a position: seed for seed the plain text, whatever was drafted."""
  for verifier, text in zip(way.lossless, way.texts[1]):
    if verifier in (verifiers.Point(), verifiers.Coupled()):
      np.testing.assert_array_equal(text, plain(verifier))


def check_greedy(way, beside_sampled=True):
  """Greedy rows have the greedy text: beside sampled rows they go through the rule with a law of one id."""
  wanted = [dummy_law.text(TARGET, PROMPT, 5, **{**asked, "temperature": 0})[0] for asked in ASKED]
  temperature = 0.0
  if beside_sampled:
    temperature = np.tile(np.repeat([ASKED[0]["temperature"], 0.0], GROUP // 2), len(way.lossless + way.lossy))
  result, texts = way.run(new=5, override=dict(temperature=temperature))
  accepted, drafted = per_group(result)
  for i, verifier in enumerate(way.lossless):
    for half in (1,) if beside_sampled else (0, 1):
      assert (texts[i].reshape(2, -1, 5)[half] == wanted[half]).all(), (verifier, half)
    assert 0 < accepted[i] < drafted[i]


def check_whole(way, of):
  """A drafter that is the target, q = p: 6 tokens in two steps of three for every seed, by the verifiers `of`."""
  result, _ = run(way.drafter.replace(noise=1.0), way.lossless + way.lossy, new=6)
  steps, accepted = (x.reshape(-1, GROUP) for x in (result.counters.steps, result.counters.accepted_tokens))
  for verifier in of:
    i = way.lossless.index(verifier)
    assert (steps[i] == 2).all() and (accepted[i] == 4).all(), verifier
