"""Speculative cascades, LOSSY: speculative sampling towards a mixture of drafter and target instead of the target.

Narasimhan et al., "Faster cascades via speculative decoding" (ICLR 2025, arXiv 2405.19261). The verification is
`rejection` with a law pi in place of p, so the text has pi's law, not p's. Two rules, both with `alpha` >= 0:

- "token": with A the ids of p(v) >= (1 - alpha) max p, pi(v) = q(v) 1[v in A] + p(v) q(not A).
- "opt": pi = p where max q < max p - alpha TV(p, q), that is where deferring to the target pays, else pi = q.

Behind the draft, where no q is known, pi is p. Where q gives mass to ids that p forbids (banned, outside the grammar,
filtered), that mass is p's: no rule, lossy or not, lets a forbidden id out.
"""
import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.verifiers import base
from specjax.verifiers import rejection

RULES = ("token", "opt")


@dataclasses.dataclass(frozen=True)
class LossyCascade(base.ByLaw):
  """See the module. Lossy; chains of sampled drafts only.

  Raises:
    ValueError: for an unknown rule or a negative alpha; for a tree without q.
  """
  rule: str = "token"
  alpha: float = 0.1
  lossless = False
  chain_only = True
  needs_q = True

  def __post_init__(self):
    if self.rule not in RULES:
      raise ValueError(f"rule={self.rule!r}: allowed are {', '.join(RULES)}")
    if not 0 <= self.alpha <= (1 if self.rule == "token" else np.finfo(np.float32).max):
      raise ValueError(f"alpha={self.alpha}: it must be 0 or more, and at most 1 for rule 'token'")

  def stops(self, p, tree, depth):
    """See `base.ByLaw`; `rest` is pi f[B, T, V]."""
    mixed = self._mixed(p, tree)
    return rejection.Rejection().stops(mixed, tree, depth)[0], mixed

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    return rejection.Rejection().next_at(rest, tree, (), node)

  def strays(self, p, tree, rest):
    """See `base.ByLaw`: the total variation of pi and p."""
    return jnp.abs(rest - p).sum(-1) / 2

  def _mixed(self, p, tree):
    if tree.q is None:
      raise ValueError("cascade needs sampled drafts with q; point drafts have nothing to mix")
    q = tree.q.dense(p.shape[-1]).astype(p.dtype)
    inside = jnp.where(p > 0, q, 0)
    q = inside + p * jnp.maximum(1 - inside.sum(-1, keepdims=True), 0)
    if self.rule == "token":
      kept = p >= (1 - self.alpha) * p.max(-1, keepdims=True)
      mixed = jnp.where(kept, q, 0) + p * jnp.where(kept, 0, q).sum(-1, keepdims=True)
    else:
      variation = jnp.abs(p - q).sum(-1) / 2
      mixed = jnp.where((q.max(-1) < p.max(-1) - self.alpha * variation)[..., None], p, q)
    return jnp.where(base.of_child(base.is_sampled(tree))[..., None], mixed, p)
