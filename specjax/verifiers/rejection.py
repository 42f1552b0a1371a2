"""Speculative sampling on a chain: accept a drafted x with probability min(1, p(x) / q(x)), up to the first failure.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). The new token comes from the residual
(p - q)+ at the first failure, or from p behind the whole draft. Optimal among rules that look at one token at a time:
a token is accepted with probability 1 - TV(p, q).
"""
import dataclasses

import jax.numpy as jnp

from specjax.verifiers import base


@dataclasses.dataclass(frozen=True)
class Rejection(base.ByLaw):
  """See the module. Lossless; chains only, of sampled or point drafts."""
  chain_only = True

  def stops(self, p, tree, depth):
    """See `base.ByLaw`."""
    del depth
    accept = jnp.minimum(base.ratio(base.at_parent(p, tree), base.own_law(tree, p.dtype)), 1)
    return chain_stops(jnp.where(tree.drafted, accept, 0)), ()

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    del rest
    here = base.at_node(p, node)
    return jnp.maximum(here - base.child_law(tree, node, p.shape[-1], p.dtype), 0)


def chain_stops(accept):
  """Where a chain ends whose node i is accepted, given that all before it were, with probability accept[:, i]: f[B, T].
  Column 0, the root, is not read."""
  reach = jnp.cumprod(accept.at[:, 0].set(1), axis=1)
  return reach * (1 - base.of_child(accept))
