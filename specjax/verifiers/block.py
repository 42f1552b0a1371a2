"""Block verification of a chain: the draft is judged as a whole, and the last passing position counts.

Sun et al., "Block verification accelerates speculative decoding" (ICLR 2025, arXiv 2403.10444). With
b_i = min(1, b_{i-1} p(x_i) / q(x_i)), position i < N passes with probability h_i = r_i / (r_i + 1 - b_i), where r_i is
the mass of b_i p above q behind it, and the last one with b_N: *not* with the uncapped product of ratios, which is
biased. The new token comes from (b p - q)+ at the last position that passes. Never accepts less than rejection, and no
valid rule for one path accepts more; equal to rejection for point drafts.

The running product is kept in logarithms: log b_i = S_i - max over j <= i of S_j, where S sums log p / q.
"""
import dataclasses

import jax
import jax.numpy as jnp

from specjax.verifiers import base


@dataclasses.dataclass(frozen=True)
class Block(base.ByLaw):
  """See the module. Lossless; chains only, of sampled or point drafts."""
  chain_only = True

  def stops(self, p, tree, depth):
    """See `base.ByLaw`; `rest` is b f[B, T]."""
    del depth
    own = base.own_law(tree, p.dtype)
    seen = base.at_parent(p, tree)
    # log 0 is minus infinity: a forbidden token makes b zero from there on.
    steps = jnp.where(own > 0, jnp.log(seen) - jnp.log(jnp.where(own > 0, own, 1)), -jnp.inf).at[:, 0].set(0)
    sums = jnp.cumsum(steps, axis=1)
    b = jnp.exp(sums - jax.lax.cummax(sums, axis=1))
    excess = _excess(p, tree, b)
    passes = jnp.where(excess > 0, excess / jnp.where(excess > 0, excess + (1 - b), 1), b == 1)
    node = jnp.arange(tree.width)[None]
    last = tree.size[:, None] - 1
    passes = jnp.where(node < last, passes, jnp.where(node == last, b, 0)).at[:, 0].set(1)
    fails_after = jnp.cumprod((1 - passes)[:, ::-1], axis=1)[:, ::-1]
    return passes * jnp.pad(fails_after[:, 1:], ((0, 0), (0, 1)), constant_values=1), b

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    b = jnp.take_along_axis(rest, node[:, None], axis=1)
    here = base.at_node(p, node)
    behind = base.child_law(tree, node, p.shape[-1], p.dtype)
    return jnp.where((node + 1 < tree.size)[:, None], jnp.maximum(b * here - behind, 0), here)


def _excess(p, tree, b):
  """f[B, T]: the mass of b p above the law of each node's child; below a point child it has a closed form."""
  point = b * (1 - base.of_child(base.at_parent(p, tree)))
  if tree.q is None:
    return point
  return jnp.where(base.of_child(base.is_sampled(tree)), tree.q.excess(p, b).astype(p.dtype), point)
