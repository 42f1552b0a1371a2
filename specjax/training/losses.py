"""Losses between a drafter's law q and the target's p at one place, over the same ids. None is reduced over places.

The acceptance rate of sampled drafts is 1 - TV(p, q) (Leviathan et al., arXiv 2211.17192); which divergence trains it
best differs by task (DistillSpec, arXiv 2310.08461; LK losses, arXiv 2602.23881).

Letters: V ids.
"""
import jax
import jax.numpy as jnp


def soft_cross_entropy(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """-sum p log q: forward KL up to the entropy of p."""
  return -(p * _finite(log_q)).sum(-1)


def forward_kl(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """KL(p || q)."""
  return (p * (_log(p) - _finite(log_q))).sum(-1)


def reverse_kl(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """KL(q || p)."""
  return (jnp.exp(log_q) * (_finite(log_q) - _log(p))).sum(-1)


def jensen_shannon(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """The mean of KL(p || m) and KL(q || m), m the mean of the laws p and q, not of their logarithms: from 0 to log 2.

  DistillSpec's JSD[beta] (arXiv 2310.08461) at beta = 0.5.
  """
  q = jnp.exp(log_q)
  log_m = _log((p + q) / 2)
  return 0.5 * (p * (_log(p) - log_m) + q * (_finite(log_q) - log_m)).sum(-1)


def total_variation(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """One half of sum |p - q|: 1 less the chance that a draw from q is accepted."""
  return 0.5 * jnp.abs(p - jnp.exp(log_q)).sum(-1)


def likelihood(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """-log sum min(p, q), the negative log of the acceptance rate (LK losses, "nla")."""
  # Added, not a floor: a drafter that is far off still gets a gradient.
  return -jnp.log(jnp.minimum(p, jnp.exp(log_q)).sum(-1) + 1e-9)


def cross_entropy(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """-log q of the most probable id of p."""
  return -jnp.take_along_axis(_finite(log_q), jnp.argmax(p, -1)[..., None], -1)[..., 0]


def dspark(log_q: jax.Array, p: jax.Array) -> jax.Array:
  """A tenth of the cross entropy and 0.9 of sum |p - q| (DSpark, arXiv 2607.05147)."""
  return 0.1 * cross_entropy(log_q, p) + 1.8 * total_variation(log_q, p)


def smooth_l1(x: jax.Array, y: jax.Array) -> jax.Array:
  """Half the square of a difference below 1, and of a greater one its size less a half; the mean over the last axis.

  Between features and not between laws, so it has no name in `BY_NAME`.
  """
  size = jnp.abs(x - y)
  return jnp.where(size < 1, 0.5 * size * size, size - 0.5).mean(-1)


TEXT = "text_ce"  # stands for -log q of the text's own token, of heads that `by_depth` trains
BY_NAME = {"soft_ce": soft_cross_entropy, "ce": cross_entropy, "kl": forward_kl, "reverse_kl": reverse_kl,
           "jsd": jensen_shannon, "tv": total_variation, "lk": likelihood, "dspark": dspark}


def mean(values: jax.Array, counted: jax.Array) -> jax.Array:
  """Over the places that are `counted` bool, 0 where there are none."""
  return jnp.where(counted, values, 0).sum() / jnp.maximum(counted.sum(), 1)


def _log(p):
  return jnp.log(jnp.maximum(p, 1e-30))


def _finite(log_q):
  return jnp.maximum(log_q, -1e4)
