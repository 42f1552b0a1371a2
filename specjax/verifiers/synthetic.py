"""SYNTHETIC acceptance, LOSSY: a chain is accepted by a given law, whatever its tokens are.

For runs that measure speed where no drafter fits the target, or the target's weights are random: the work of a step is
real, its acceptance is stated. Node i + 1 is accepted, given node i, with probability `acceptance[i]`, by one uniform
of the row's own; drafted tokens are never looked at. All else is what `point` does: a token is drawn at every node, and
the one behind the accepted path is the new token. The text means nothing, and no measured acceptance may be read from
such a run. vLLM has the same as `rejection_sample_method: "synthetic"`.

Letters: B batch rows, T nodes, D greatest depth.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import keys
from specjax import sampling
from specjax.verifiers import base
from specjax.verifiers import point
from specjax.verifiers import rejection

GREATEST_DEPTH = 63  # the widest step has one node more


@dataclasses.dataclass(frozen=True)
class LossySynthetic(base.ByLaw):
  """See the module. Lossy; chains only, each as deep as the law is long.

  Attributes:
    acceptance: D probabilities, of each position given that all before it were accepted.

  Raises:
    ValueError: for a law that is empty, too long, or leaves [0, 1]; when a step is traced, for a proposer whose chains
      have another depth.
  """
  acceptance: tuple[float, ...]
  lossless = False
  chain_only = True
  purposes = (keys.TOKEN, keys.STOP)

  def __post_init__(self):
    check(self.acceptance)

  @property
  def tokens_per_step(self) -> float:
    """Expected tokens of a step that drafts the whole chain, the new one included: 1 + the sum over i of the product of
    the first i probabilities (arXiv 2211.17192, (1), where they are one constant)."""
    return 1 + float(np.cumprod(self.acceptance).sum())

  def stops(self, p, tree, depth):
    """See `base.ByLaw`; `rest` is the probability that each node's child is accepted, f[B, T], 0 without one."""
    accept = self._accept(tree, depth, p.dtype)
    return rejection.chain_stops(accept), base.of_child(accept)

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    del tree, rest
    return base.at_node(p, node)

  def strays(self, p, tree, rest):
    """See `base.ByLaw`. A token that is emitted with probability f without a look at p strays by f at most."""
    del p, tree
    return rest

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `base.Verifier.draw`: the sampler's own draws, all of them, and a path that does not depend on them."""
    with jax.named_scope("verify"):
      drawn = point.Point().drawn(logits, params, uniforms, mode)
      accept = self._accept(tree, depth, jnp.float32)
      node = sampling.invert(rejection.chain_stops(accept), uniforms.stop)
      path = jnp.minimum(jnp.arange(depth + 1, dtype=jnp.int32)[None], node[:, None])  # node i of a chain has depth i
      passed = jnp.arange(tree.width)[None] <= node[:, None]
      return base.Verdict(path=path, accepted=node, token=jnp.take_along_axis(drawn, node[:, None], axis=1)[:, 0],
                          strayed=jnp.where(passed, base.of_child(accept), 0).sum(-1))

  def _accept(self, tree, depth, dtype):
    """f[B, T]: the probability that each drafted node is accepted, given the one before it."""
    if depth != len(self.acceptance):
      raise ValueError(f"acceptance={self.acceptance}: a law of {len(self.acceptance)} positions, and the proposer's "
                       f"chains have {depth}; give as many probabilities as it drafts tokens")
    law = np.zeros(max(tree.width, depth + 1))
    law[1:depth + 1] = self.acceptance
    return jnp.where(tree.drafted, jnp.asarray(law[:tree.width], dtype), 0)


def check(acceptance) -> None:
  """Raises ValueError for what is no law of acceptance, see `LossySynthetic`."""
  if not isinstance(acceptance, tuple) or not 1 <= len(acceptance) <= GREATEST_DEPTH:
    raise ValueError(f"acceptance={acceptance!r}: it must be a tuple of 1 to {GREATEST_DEPTH} probabilities, one a "
                     "drafted position")
  for place, probability in enumerate(acceptance):
    if not 0 <= probability <= 1:  # as well where it is no number
      raise ValueError(f"acceptance={acceptance}: position {place} has {probability}; each is a probability in [0, 1], "
                       "given that all positions before it were accepted")
