"""Lenient speculative sampling, LOSSY: accept a drafted x with probability min(1, p(x) / (l q(x))), l below 1.

Leviathan et al. (arXiv 2211.17192), appendix A.5; also DistillSpec. No token's probability exceeds p(x) / l. After a
failure the new token comes from (p - q)+, as without lenience, which keeps the law closest to p: the total variation of
a token is sum of (min(q, p / l) - p)+. At temperature 0 a drafted x is accepted if p(x) >= l max p, with p the law at
temperature 1 before filters; the paper prints the inequality the other way round, which would accept everything at
l = 1. With l = 1 it is `rejection`, but for a tie at temperature 0, where any of the best tokens will do.
"""
import dataclasses

import jax.numpy as jnp

from specjax.verifiers import base
from specjax.verifiers import rejection


@dataclasses.dataclass(frozen=True)
class LossyLenient(base.ByLaw):
  """See the module. Lossy; chains only, of sampled or point drafts.

  Raises:
    ValueError: for a lenience outside (0, 1].
  """
  lenience: float = 0.5
  lossless = False
  chain_only = True

  def __post_init__(self):
    if not 0 < self.lenience <= 1:
      raise ValueError(f"lenience={self.lenience}: it must be in (0, 1]; 1 is plain rejection, smaller is more lenient")

  def evidence(self, logits, tree, params):
    """How close each drafted token comes to the best one, exp of the difference of their logits, in greedy rows; -1 in
    others: f32[B, T]."""
    best = jnp.take_along_axis(logits.max(-1), tree.parents, axis=1)
    close = jnp.exp(base.at_parent(logits, tree) - best)
    return {"closeness": jnp.where((params.temperature == 0)[:, None], close, -1)}

  def stops(self, p, tree, depth, closeness=None):
    """See `base.ByLaw`; `rest` is the closeness."""
    del depth
    accept = jnp.minimum(base.ratio(base.at_parent(p, tree), self.lenience * base.own_law(tree, p.dtype)), 1)
    if closeness is not None:
      accept = jnp.where(closeness >= 0, closeness >= self.lenience, accept)
    return rejection.chain_stops(jnp.where(tree.drafted, accept, 0)), closeness

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    return rejection.Rejection().next_at(p, tree, rest, node)

  def strays(self, p, tree, rest):
    """See `base.ByLaw`."""
    child, closeness = base.of_child, rest
    seen = base.at_parent(p, tree)
    lost = child(jnp.minimum(seen / self.lenience, 1) - seen)
    if tree.q is not None:
      # min(q, p / l) is p / l without its excess over q, and (min(q, p / l) - p)+ is the excess of p over q less that.
      one = jnp.ones(tree.tokens.shape, p.dtype)
      scale = one / self.lenience
      sampled = tree.q.excess(p, one) - tree.q.excess(p, scale) + (1 / self.lenience - 1)
      lost = jnp.where(child(base.is_sampled(tree)), jnp.maximum(sampled, 0), lost)
    if closeness is not None:
      lost = jnp.where(child(closeness) >= 0, child((closeness >= self.lenience) & (seen == 0)), lost)
    return jnp.where(child(tree.drafted), lost, 0)
