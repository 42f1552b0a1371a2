"""Coupled draws: drafter, verifier and plain decoding share the noise of a position, so that their draws often agree.

Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding" (arXiv
2408.07978). A position has one exponential E(v) for every id v (`keys.position_noise`); a law w draws the argmax of
w / E. The drafter draws from q and the verifier from p with the same E: the token that it draws is emitted whatever was
drafted, so the text depends on the row's key alone, as with `point`, and not on the drafter, its length or the width.
Drafts from q agree with probability sum over v of 1 / sum over w of max(p_w / p_v, q_w / q_v), at least
(1 - TV) / (1 + TV), at most 1 - TV.

Plain decoding of that text is this verifier over the plain proposer: the text differs from that of `point`, which
draws by inversion.
"""
import dataclasses

import jax
import jax.numpy as jnp

from specjax import keys
from specjax import sampling
from specjax.verifiers import base
from specjax.verifiers import siblings

_FAR = 1e30  # stands for an unbounded ratio of noises


@dataclasses.dataclass(frozen=True)
class Coupled(base.ByLaw):
  """See the module. Lossless for any draft; more than `point` accepts it does with drafts drawn from the same noise.

  `law` holds for trees in which a sampled node has no sibling and was drawn with the position's noise.
  """
  purposes = (keys.NOISE,)

  def stops(self, p, tree, depth):
    """See `base.ByLaw`; `rest` is the weights of every node's draw f[B, T, V] given its drafted child, and the
    children."""
    alive = siblings.points(tree, siblings.before(tree), tree.drafted)
    weights = p
    if tree.q is not None:
      rows = jnp.arange(p.shape[0])[:, None]
      sampled = base.is_sampled(tree)
      child = jnp.full(tree.tokens.shape, -1).at[rows, tree.parents].max(jnp.where(sampled, tree.tokens, -1))
      q = tree.q.dense(p.shape[-1]).astype(p.dtype)
      given = jax.vmap(jax.vmap(agreement))(p, q, jnp.maximum(child, 0))
      weights = jnp.where((child >= 0)[..., None], base.normalise(given, p), p)
    return siblings.stop_at(jnp.where(alive, base.at_parent(weights, tree), 0), tree, depth), (weights, alive)

  def next_at(self, p, tree, rest, node):
    """See `base.ByLaw`."""
    weights, alive = rest
    here = base.at_node(weights, node)
    return siblings.without_children(here, tree, alive, node)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `base.Verifier.draw`."""
    with jax.named_scope("verify"):
      return base.match(self.drawn(logits, params, uniforms, mode), tree, depth)

  def drawn(self, logits, params, uniforms, mode):
    """The token drawn at every node, i32[B, T]; arguments as in `draw`."""
    return jax.lax.cond(mode == sampling.GREEDY, lambda: sampling.argmax(logits),
                        lambda: race(sampling.law(logits, params, mode), uniforms.noise))


def race(law: jax.Array, noise: jax.Array) -> jax.Array:
  """The id that wins the exponential race: i32[...] from a law (or weights) and standard exponentials f[..., V]."""
  return sampling.argmax(law / noise)


def agreement(p: jax.Array, q: jax.Array, drafted: jax.Array) -> jax.Array:
  """Joint probability that q draws `drafted`, i32, and p draws each id, from the same noise: f[V].

  For an id j other than i = `drafted`, with s and t the noises of i and j, every other noise w is at least
  max(s q_w / q_i, t p_w / p_j), and r = t / s lies between q_j / q_i and p_j / p_i; integrating s out leaves the
  integral of 1 / c(r)^2 with c(r) = 1 + r + sum over w of max(q_w / q_i, r p_w / p_j), piecewise linear in r, so that
  a piece gives (r2 - r1) / (c(r1) c(r2)).
  """
  vocabulary = p.shape[-1]
  ids = jnp.arange(vocabulary)
  over = lambda a, b: jnp.where(b > 0, a / jnp.where(b > 0, b, 1), _FAR)
  q_ratio = over(q, q[drafted])

  def joint(j):
    p_ratio = over(p, p[j])
    low, high = q_ratio[j], jnp.minimum(over(p[j], p[drafted]), _FAR)
    knots = jnp.clip(over(q_ratio, p_ratio), low, jnp.maximum(high, low))
    knots = jnp.sort(jnp.concatenate([knots, jnp.stack([low, jnp.maximum(high, low)])]))
    others = (ids != j) & (ids != drafted)
    c = 1 + knots + jnp.where(others, jnp.maximum(q_ratio, knots[:, None] * p_ratio), 0).sum(-1)
    apart = jnp.sum((knots[1:] - knots[:-1]) / c[:-1] / c[1:])
    same = 1 / jnp.maximum(p_ratio, q_ratio).sum()
    return jnp.where(p[j] > 0, jnp.where(j == drafted, same, apart), 0)

  return jax.vmap(joint)(ids)
