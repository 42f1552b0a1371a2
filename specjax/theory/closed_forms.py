"""Numbers of speculative decoding that need no enumeration.

Leviathan et al. (arXiv 2211.17192) with p the target's law and q the draft's; "accepted" counts drafted tokens only,
the new token of a step apart.
"""
import numpy as np

from specjax.theory import transport


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
  """Of two laws: half the sum of |p - q|."""
  return 1 - transport.single(p, q)


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """What the new token is drawn from after a rejection: (p - q)+ normalised; p where nothing is left."""
  left = np.maximum(np.subtract(p, q), 0)
  return left / left.sum() if left.sum() > 0 else np.asarray(p)


def expected_accepted(alpha: float, gamma: int) -> float:
  """Accepted tokens of a chain of `gamma`, each accepted with the same probability `alpha` behind the ones before."""
  return float(sum(alpha ** i for i in range(1, gamma + 1)))


def joint_mass(p: np.ndarray, q: np.ndarray, gamma: int) -> float:
  """Sum over i <= gamma of the overlap of the laws of i tokens, context-free. More than any lossless rule accepts that
  leaves later steps alone: block verification without its cap would reach it, and is biased."""
  total, target, draft = 0.0, np.ones(1), np.ones(1)
  for _ in range(gamma):
    target, draft = np.outer(target, p).ravel(), np.outer(draft, q).ravel()
    total += float(np.minimum(target, draft).sum())
  return total


def token_level_intersection(p: np.ndarray, q: np.ndarray, shared: np.ndarray) -> float:
  """Acceptance when the draft is restricted to the ids `shared` bool[V] with the target (Timor et al., arXiv
  2502.05202); p and q f64[V] over the union of both vocabularies. Where the draft may propose ids that the target
  lacks, which are then rejected, the acceptance is `transport.single`."""
  inside = np.where(shared, q, 0)
  return transport.single(p, inside / inside.sum())


def typical_threshold(p: np.ndarray, epsilon: float = 0.09, delta: float = 0.3) -> float:
  """What p of a token must exceed in Medusa's typical acceptance: min(epsilon, delta exp(-H(p))) (arXiv 2401.10774)."""
  seen = np.asarray(p)[np.asarray(p) > 0]
  return float(min(epsilon, delta * np.exp((seen * np.log(seen)).sum())))


def cascade(p: np.ndarray, q: np.ndarray, a: float) -> np.ndarray:
  """The law that the token-specific speculative cascade samples: q where p(v) >= (1 - a) max p, and p with the mass
  that q has elsewhere (arXiv 2405.19261)."""
  p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
  trusted = p >= (1 - a) * p.max()
  return np.where(trusted, q, 0) + p * q[~trusted].sum()
