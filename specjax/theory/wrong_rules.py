"""The known-wrong drafters and verifiers of `negatives`, as small as they can be; a flag makes most of them right.

Verifiers here are written down as the papers state them, for whole trees of sampled nodes, and share no rule with
`specjax.verifiers`.

Letters: B rows, T nodes, V vocabulary.
"""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import keys
from specjax import sampling
from specjax.theory import drafts
from specjax.theory import tables as tables_lib
from specjax.verifiers import base


@dataclasses.dataclass(frozen=True)
class Block:
  """Block verification of a chain; without `capped` the last position passes with min(1, P / Q) of the whole draft."""
  capped: bool

  def law(self, p, tree, depth):
    """See `verifiers.base.Verifier.law`."""
    del depth
    row, batch = jnp.arange(p.shape[0]), p.shape[0]
    b = uncapped = jnp.ones(batch, p.dtype)
    passes, following = [], []
    for node in range(tree.width):
      q = tree.q.row(jnp.full(batch, node), p.shape[-1])
      if node:
        before = tree.q.row(jnp.full(batch, node - 1), p.shape[-1])
        token = tree.tokens[:, node]
        ratio = p[row, node - 1, token] / before[row, token]
        b, uncapped = jnp.minimum(1, b * ratio), uncapped * ratio
      left = jnp.maximum(b[:, None] * p[:, node] - q, 0)
      mass = left.sum(-1)
      inner = jnp.where(mass + 1 - b > 0, mass / jnp.where(mass + 1 - b > 0, mass + 1 - b, 1), 1)
      last = node == tree.size - 1
      chance = jnp.where(last, b if self.capped else jnp.minimum(1, uncapped), inner)
      passes.append(jnp.where(node < tree.size, chance, 0) if node else jnp.ones(batch, p.dtype))
      residual = left / jnp.where(mass > 0, mass, 1)[:, None]
      following.append(jnp.where((last | (mass <= 0))[:, None], p[:, node], residual))
    stop, later = [], jnp.ones(batch, p.dtype)
    for chance in reversed(passes):
      stop.append(chance * later)
      later = later * (1 - chance)
    return jnp.stack(stop[::-1], 1), jnp.stack(following, 1)


@dataclasses.dataclass(frozen=True)
class Siblings:
  """Recursive rejection of a root's children, drawn with replacement; without `last_residual` the new token comes from
  what the first rejected one left."""
  last_residual: bool

  def law(self, p, tree, depth):
    """See `verifiers.base.Verifier.law`."""
    del depth
    row, q = jnp.arange(p.shape[0]), tree.q.row(jnp.zeros(p.shape[0], jnp.int32), p.shape[-1])
    target, reach, stop, residuals = p[:, 0], jnp.ones(p.shape[0], p.dtype), [], []
    for node in range(1, tree.width):
      token = tree.tokens[:, node]
      accept = jnp.where(node < tree.size, jnp.minimum(1, target[row, token] / q[row, token]), 0)
      stop.append(reach * accept)
      reach = reach * (1 - accept)
      left = jnp.maximum(target - q, 0)
      left = jnp.where(left.sum(-1, keepdims=True) > 0, left / left.sum(-1, keepdims=True), target)
      target = jnp.where((node < tree.size)[:, None], left, target)
      residuals.append(target)
    following = p.at[:, 0].set(residuals[-1] if self.last_residual else residuals[0])
    return jnp.stack([reach, *stop], 1), following


@dataclasses.dataclass(frozen=True)
class AcceptsAtZero:
  """Rejection of a chain of one drawn token that accepts with `u <= p / q`."""
  purposes = (keys.STOP, keys.RESIDUAL)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `verifiers.base.Verifier.draw`."""
    del depth
    p, row = sampling.law(logits, params, mode), jnp.arange(logits.shape[0])
    q, token = tree.q.row(jnp.zeros_like(row), p.shape[-1]), tree.tokens[:, 1]
    node = (uniforms.stop <= p[row, 0, token] / q[row, token]).astype(jnp.int32)
    weights = jnp.where((node > 0)[:, None], p[:, 1], jnp.maximum(p[:, 0] - q, 0))
    return base.Verdict(path=node[:, None], accepted=node, token=sampling.invert(weights, uniforms.residual),
                        strayed=jnp.zeros(row.shape))


@dataclasses.dataclass(frozen=True)
class LooseInversion:
  """Draws the next token, whatever was drafted, as the first id whose cumulative sum is not below u."""
  purposes = (keys.TOKEN,)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `verifiers.base.Verifier.draw`."""
    del tree, depth
    below = jnp.cumsum(sampling.law(logits, params, mode)[:, 0], -1) < uniforms.token[:, :1]
    root = jnp.zeros(logits.shape[0], jnp.int32)
    return base.Verdict(path=root[:, None], accepted=root, token=below.sum(-1), strayed=jnp.zeros(root.shape))


@dataclasses.dataclass(frozen=True)
class RawBonus:
  """A verifier whose token behind the whole draft ignores the processors."""
  inner: Any

  def evidence(self, logits, tree, params):
    """See `verifiers.base.ByLaw.evidence`."""
    del tree, params
    return {"raw": jax.nn.softmax(logits)}

  def law(self, p, tree, depth, raw):
    """See `verifiers.base.Verifier.law`."""
    stop, following = self.inner.law(p, tree, depth)
    last = jnp.arange(tree.width)[None] == tree.size[:, None] - 1
    return stop, jnp.where(last[..., None], raw, following)


@dataclasses.dataclass(frozen=True)
class WithRawQ:
  """A draft that is said to be drawn from the draft's law at temperature 1, whatever it was drawn from."""
  draft: drafts.Draft

  def outcomes(self, tables, setting, dtype=np.float64):
    """See `drafts.Draft.outcomes`."""
    found = self.draft.outcomes(tables, setting, dtype)
    raw = tables_lib.conditionals(tables.draft, setting, sampling.SamplingParams(temperature=1.0), dtype)
    return _claim(found, raw)


@dataclasses.dataclass(frozen=True)
class WithoutToken:
  """A chain that ends before the first drafted `token`: the draft looks at what it drew."""
  draft: drafts.Draft
  token: int

  def outcomes(self, tables, setting, dtype=np.float64):
    """See `drafts.Draft.outcomes`."""
    found = self.draft.outcomes(tables, setting, dtype)
    hit = np.pad(found.tokens[:, 1:] == self.token, ((0, 0), (1, 1)), constant_values=((0, 0), (False, True)))
    return dataclasses.replace(found, size=np.minimum(found.size, np.argmax(hit, axis=1)).astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Hierarchy:
  """A chain drafted by speculation: a small model (the draft at temperature 2) proposes, the draft verifies.

  `ends` says when the draft is handed on: "tokens": when it has `gamma` tokens, through as many inner rounds as that
  takes; "round": after the first rejection, with the token that replaced the rejected one; "accepted": after the first
  rejection, without it. The last is wrong: whether a token is handed on then depends on what it is. The others are
  right: whether there is a next token depends on the ones before.
  """
  ends: str
  gamma: int

  def outcomes(self, tables, setting, dtype=np.float64):
    """See `drafts.Draft.outcomes`."""
    laws = tables_lib.conditionals(tables.draft, setting, sampling.SamplingParams(temperature=1.0), dtype)
    small = tables_lib.conditionals(tables.draft, setting, sampling.SamplingParams(temperature=2.0), dtype)
    leaves = []

    def grow(drafted, context, mass):
      if len(drafted) == self.gamma:
        leaves.append((drafted, mass))
        return
      q, s = laws[len(drafted)][context], small[len(drafted)][context]
      both = np.minimum(q, s)
      left = q - both  # the mass of a rejection, already times the law of the token that replaces it
      if self.ends == "accepted":
        leaves.append((drafted, mass * left.sum()))
      for token in range(len(q)):
        longer = ((*drafted, token), context * len(q) + token)
        grow(*longer, mass * both[token])
        if self.ends == "round":
          leaves.append((longer[0], mass * left[token]))
        elif self.ends == "tokens":
          grow(*longer, mass * left[token])

    grow((), 0, 1.0)
    rows, vocabulary = len(leaves), tables.vocabulary
    tokens = np.zeros((rows, self.gamma + 1), np.int32)
    for row, (drafted, _) in enumerate(leaves):
      tokens[row, 1:1 + len(drafted)] = drafted
    tokens[:, 0] = setting.prompt[-1]
    parents = np.tile(np.maximum(np.arange(self.gamma + 1, dtype=np.int32) - 1, 0), (rows, 1))
    found = drafts.Outcomes(
        tokens=tokens, parents=parents, size=np.array([1 + len(drafted) for drafted, _ in leaves], np.int32),
        probability=np.array([mass for _, mass in leaves]), sampled=np.zeros(tokens.shape, bool),
        q=np.zeros((*tokens.shape, vocabulary)))
    return _claim(found, laws)


def _claim(found, laws):
  """The outcomes with every node said to be drawn from `laws` f64[V ** d, V] at its parent."""
  depth, context = found.contexts()
  q = np.zeros(found.q.shape)
  for d, law in enumerate(laws):
    q = np.where((depth == d)[..., None], law[np.where(depth == d, context, 0)], q)
  sampled = np.tile(np.arange(found.tokens.shape[1]) > 0, (len(found.tokens), 1))
  return dataclasses.replace(found, sampled=sampled, q=q, draws=True)
