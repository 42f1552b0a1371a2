"""k-sequential selection: k children drawn independently, each accepted with probability min(1, p(x) / (rho q(x))).

SpecTr (Sun et al., NeurIPS 2023, arXiv 2310.15141). With beta(rho) = sum of min(q, p / rho), rho is the root in [1, k]
of 1 - (1 - beta)^k = rho beta, per node; then the residual p - min(q, p / rho) (1 - (1 - beta)^k) / beta is nowhere
negative. Any greater rho is lossless, too, so the upper end of the bisection is taken. At least (1 - 1/e) of the
optimal acceptance; equals rejection for one child.

How many siblings a node has must not depend on what the earlier ones were: rho is that of their number, and a drafter
that stops after a token that it likes would be biased here (recursive rejection would forgive it).
"""
import dataclasses

import jax
import jax.numpy as jnp

from specjax.verifiers import base
from specjax.verifiers import siblings


@dataclasses.dataclass(frozen=True)
class KSeq(base.ByLaw):
  """See the module. Lossless on any tree whose sampled siblings were drawn with replacement.

  Raises:
    ValueError: for a tree without q, or drawn without replacement.
  """
  needs_q = True

  def stops(self, p, tree, depth):
    """See `base.ByLaw`; `rest` is rho, the factor of the accepted part, and the point children."""
    if tree.q is None or not tree.replacement:
      raise ValueError("kseq needs sampled drafts with q, siblings drawn with replacement; use recursive or traversal "
                       "for other trees")
    earlier, sampled = siblings.before(tree), base.is_sampled(tree)
    rows = jnp.arange(p.shape[0])[:, None]
    count = jnp.zeros(tree.tokens.shape, p.dtype).at[rows, tree.parents].add(sampled)
    rho, beta = _solve(p, tree, count)
    accepted = 1 - (1 - beta) ** count
    factor = jnp.where(beta > 0, accepted / jnp.where(beta > 0, beta, 1), 0)
    at = lambda x: jnp.take_along_axis(x, tree.parents, axis=1)
    target, own = base.at_parent(p, tree), base.own_law(tree, p.dtype)
    accept = jnp.where(sampled, jnp.minimum(base.ratio(target, at(rho) * own), 1), 0)
    earlier_refused = jnp.where(earlier, (1 - accept)[:, None], 1).prod(-1)
    all_refused = jnp.ones_like(accept).at[rows, tree.parents].multiply(1 - accept)
    alive = siblings.points(tree, earlier, tree.drafted & ~sampled)
    q = jnp.where(tree.drafted & (at(count) > 0), tree.q.of(tree.parents, tree.tokens).astype(p.dtype), 0)
    drafted_mass = jnp.minimum(q, target / at(rho))
    left = _divide(target - drafted_mass * at(factor), at(1 - accepted))
    edge = jnp.where(alive, at(all_refused) * left, earlier_refused * accept)
    return siblings.stop_at(edge, tree, depth), (rho, factor, alive)

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    rho, factor, alive = rest
    pick = lambda x: jnp.take_along_axis(x, node[:, None], axis=1)
    here = base.at_node(p, node)
    q = tree.q.row(node, p.shape[-1]).astype(p.dtype)
    drafted_mass = jnp.where(pick(factor) > 0, jnp.minimum(q, here / pick(rho)) * pick(factor), 0)
    left = jnp.maximum(here - drafted_mass, 0)
    return siblings.without_children(left, tree, alive, node)


def _divide(a, b):
  return jnp.where(b > 0, jnp.maximum(a, 0) / jnp.where(b > 0, b, 1), 0)


def _solve(p, tree, count):
  """rho f[B, T], at least 1, and beta f[B, T] at it; nodes without sampled children have beta 0 and rho 1."""
  has = count > 0

  def beta(rho):  # the sum of min(q, p / rho) is the mass of p / rho without its excess over q
    return jnp.where(has, jnp.clip(p.sum(-1) / rho - tree.q.excess(p, 1 / rho).astype(p.dtype), 0, 1), 0)

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) / 2
    b = beta(middle)
    above = 1 - (1 - b) ** count > middle * b
    return jnp.where(above, middle, low), jnp.where(above, high, middle)

  rounds = 24 if p.dtype == jnp.float32 else 54
  high = jax.lax.fori_loop(0, rounds, halve, (jnp.ones_like(count), jnp.maximum(count, 1)))[1]
  return high, beta(high)
