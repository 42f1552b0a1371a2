"""Greedy multi-draft: the k - 1 most probable tokens of q are drafted for certain, one more is drawn from the rest.

Hu et al. (ICLR 2025). The sampled child is judged first, against its own law, q without the top and normalised; what
(p - q)+ leaves holds all of p's mass on the top, and a point child takes its whole share of it. The acceptance,
p(top) + sum over the rest of min(p, q), is the optimal transport bound of this draft. The verification is recursive
rejection with its sampled child first; what is particular is the draft.
"""
import dataclasses

from specjax.verifiers import recursive


@dataclasses.dataclass(frozen=True)
class GreedyMulti(recursive.Recursive):
  """See the module. Lossless on any tree; optimal where a node has at most one sampled child, with q the law of it."""
  needs_q = True
