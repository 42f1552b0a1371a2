"""The tokens of one level of a tree of fixed shape: children of every node, by one of three rules.

A level (`static_trees.levels`) has nodes with known numbers of children; the drafter gives the law at each, after every
processor. Children are the most probable tokens, which are point drafts, or draws: independent ones
(`TokenTree.replacement`), or without replacement, each from what its earlier siblings left, in the order in which they
were drawn. That order is part of the law that verifiers expect. Draws are keyed by the step, never by the token's
position (see `keys`).

Letters: B batch rows, N nodes with children, C children of all of them, V vocabulary.
"""
import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import greatest
from specjax import sampling


def most_probable(law: jax.Array, counts: tuple[int, ...]) -> jax.Array:
  """The `counts[i]` ids of greatest law (or logits) f[B, N, V] at node i, node by node: i32[B, C]."""
  _check(law, counts)
  return _first(greatest.greatest(law, max(counts))[1], counts)


def independent(law: jax.Array, uniforms: jax.Array, counts: tuple[int, ...]) -> jax.Array:
  """`counts[i]` independent draws from the law f[B, N, V] at node i, node by node: i32[B, C].

  `uniforms` f32[B, C], strictly inside (0, 1), one a child: `keys.step_uniform` with DRAFT and the child's node.
  """
  _check(law, counts, distinct=False)
  chex.assert_shape(uniforms, (law.shape[0], sum(counts)))
  parent = np.repeat(np.arange(len(counts)), counts)
  return sampling.invert(law[:, parent], uniforms)


def without_replacement(law: jax.Array, noise: jax.Array, counts: tuple[int, ...]) -> jax.Array:
  """`counts[i]` draws without replacement from the law f[B, N, V] at node i, in the order drawn: i32[B, C].

  Exponential races (the Gumbel top-k trick after a logarithm): with an exponential E(v) for every id, the ids in the
  order of law / E, the greatest first, are such draws. Where a law has fewer ids than a node has children, the first
  draw is repeated, which no verifier accepts twice.

  `noise` f32[B, N, V], standard exponentials: `keys.step_noise` with the node that the children stand below.
  """
  _check(law, counts)
  chex.assert_equal_shape([law, noise])
  left, ids = greatest.greatest(law / noise, max(counts))
  return _first(jnp.where(left > 0, ids, ids[..., :1]), counts)


def _first(ids, counts):
  """The first counts[i] of `ids` i32[B, N, K] at node i: i32[B, C]."""
  node = np.repeat(np.arange(len(counts)), counts)
  place = np.concatenate([np.arange(count) for count in counts])
  return ids[:, node, place]


def _check(law, counts, distinct=True):
  chex.assert_rank(law, 3)
  most = law.shape[2] if distinct else max(counts, default=0)
  if len(counts) != law.shape[1] or not counts or not 1 <= min(counts) <= max(counts) <= most:
    raise ValueError(f"counts={tuple(counts)} for {law.shape[1]} laws over {law.shape[2]} ids: every node takes a "
                     "number of children, 1 or more, and no more than there are ids to choose distinct ones from")
