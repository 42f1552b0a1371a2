"""Typical acceptance, LOSSY: a drafted token is accepted when the target finds it plausible, not with its chance.

Medusa (Cai et al., arXiv 2401.10774): accepted if p(x) > min(epsilon, alpha exp(-H(p))), H the entropy of p; the
longest accepted path wins, among equals the most probable one, as in the reference code. The new token is drawn from p.
epsilon = .09 and alpha = .3 are the paper's and the README's values; the reference *function* has them swapped as its
defaults (.3 and .09), which accepts far less. p is the processed law. At temperature 0 it is greedy matching.
"""
import dataclasses

import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.verifiers import base
from specjax.verifiers import siblings


@dataclasses.dataclass(frozen=True)
class LossyTypical(base.ByLaw):
  """See the module. Lossy.

  Raises:
    ValueError: for epsilon or alpha outside (0, 1].
  """
  epsilon: float = 0.09
  alpha: float = 0.3
  lossless = False

  def __post_init__(self):
    for name in ("epsilon", "alpha"):
      if not 0 < getattr(self, name) <= 1:
        raise ValueError(f"{name}={getattr(self, name)}: it must be in (0, 1]; Medusa uses epsilon=.09, alpha=.3")

  def stops(self, p, tree, depth):
    """See `base.ByLaw`: all of stop's mass is at one node, which is `rest`."""
    end = self._end(p, tree, depth)
    return (jnp.arange(tree.width)[None] == end[:, None]).astype(p.dtype), end

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    return base.at_node(p, node)

  def strays(self, p, tree, rest):
    """See `base.ByLaw`: behind a node whose child is accepted the token is certain, and p gives it less."""
    on_path = base.at_node(tree_lib.ancestors(tree.parents, tree.width - 1), rest)
    lost = jnp.where(on_path & tree.drafted, 1 - base.at_parent(p, tree), 0)
    return jnp.zeros(tree.tokens.shape, p.dtype).at[jnp.arange(p.shape[0])[:, None], tree.parents].max(lost)

  def _end(self, p, tree, depth):
    entropy = -jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0).sum(-1)
    threshold = jnp.minimum(self.epsilon, self.alpha * jnp.exp(-entropy))
    seen = base.at_parent(p, tree)
    accepted = tree.drafted & (seen > jnp.take_along_axis(threshold, tree.parents, axis=1))
    alive = siblings.along_paths(accepted.astype(p.dtype), tree, depth) > 0
    level = jnp.where(alive & tree.valid, tree_lib.depths(tree_lib.ancestors(tree.parents, depth)), -1)
    chance = siblings.along_paths(jnp.where(tree.drafted, seen, 1), tree, depth)
    return jnp.argmax(jnp.where(level == level.max(-1, keepdims=True), chance, -1), -1).astype(jnp.int32)
