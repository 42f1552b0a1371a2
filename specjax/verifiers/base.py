"""What the step asks of a verifier: a law, and a draw that has that law; and the draw that most rules share.

A rule that is not the sampler's own (`point`, `coupled`) says where the accepted path ends, `stops`, and what the new
token's law is at one node, `next_at`. `ByLaw` makes both the law and the draw of these two: the draw picks the node by
inversion of `stop`, computes the new token's law at that node only, and inverts it. So what is enumerated is what runs.

Letters: B batch rows, T nodes, D greatest depth, V vocabulary.
"""
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from specjax import keys
from specjax import sampling
from specjax import tree as tree_lib
from specjax import vocabulary


@struct.dataclass
class Verdict:
  """What one step decided: the accepted path and the new token behind it."""
  path: jax.Array      # i32[B, D + 1]; node ids from the root on, the last accepted one repeated
  accepted: jax.Array  # i32[B]; drafted nodes on the path
  token: jax.Array     # i32[B]; the new token
  strayed: jax.Array   # f32[B]; bound of this step's total variation to the target; 0 for a lossless rule


class Verifier(Protocol):
  """A verification rule. Hashable: it is a static argument of the step.

  Attributes:
    lossless: the emitted text has the target's law.
    chain_only: takes trees without branches only.
    needs_q: takes sampled drafts only.
    purposes: the draws of `keys` that `draw` needs.
  """
  lossless: bool
  chain_only: bool
  needs_q: bool
  purposes: tuple[int, ...]

  def law(self, p: jax.Array, tree: tree_lib.TokenTree, depth: int) -> tuple[jax.Array, jax.Array]:
    """The rule as a law, given what was drafted: stop f[B, T], the probability that the path ends at each node, and
    next f[B, T, V], the law of the new token given that.

    Args:
      p: f[B, T, V], the target's processed law at every node.
      tree: the proposal; `tree.q` is the law that sampled nodes were drawn from.
      depth: static bound of the tree's depth, D.
    """

  def draw(self, logits: jax.Array, tree: tree_lib.TokenTree, params: sampling.SamplingParams, mode: jax.Array,
           uniforms: keys.Uniforms, depth: int) -> Verdict:
    """One draw from that law.

    Args:
      logits: f32[B, T, V], adjusted by `processors.adjust`; temperature and filters are still to come.
      tree, depth: as in `law`.
      params, mode: see `sampling.draw`.
      uniforms: of this verifier's purposes.
    """


class ByLaw:
  """What rules share that are given by `stops` and `next_at`: their law and their draw.

  A rule defines

  - `stops(p, tree, depth, **evidence) -> (stop f[B, T], rest)`, with whatever `next_at` needs in `rest`;
  - `next_at(p, tree, rest, node i32[B]) -> f[B, V]`, the new token's law at one node a row, not normalised.

  At temperature 0 every lossless rule is greedy matching, so a greedy batch takes that way.
  """
  lossless = True
  chain_only = False
  needs_q = False
  purposes = (keys.STOP, keys.RESIDUAL)

  def law(self, p, tree, depth, **evidence):
    """See `Verifier.law`."""
    if tree.width == 1:
      return jnp.ones_like(p[..., 0]), p
    stop, rest = self.stops(p, tree, depth, **evidence)
    at = lambda node: self.next_at(p, tree, rest, jnp.full(tree.size.shape, node))
    weights = jax.vmap(at, out_axes=1)(jnp.arange(tree.width))
    return stop / stop.sum(-1, keepdims=True), normalise(weights, p)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `Verifier.draw`."""
    if tree.width == 1:  # nothing drafted, the plain step: no rule is asked
      return match(sampling.draw(logits, params, uniforms.residual[:, None], mode), tree, depth)
    sampled = lambda: self._draw(logits, tree, params, mode, uniforms, depth)
    if not self.lossless:  # a rule that accepts more than the target would is one at temperature 0, too
      return sampled()
    return jax.lax.cond(mode == sampling.GREEDY, lambda: match(sampling.argmax(logits), tree, depth), sampled)

  def evidence(self, logits: jax.Array, tree: tree_lib.TokenTree, params: sampling.SamplingParams) -> dict[str, Any]:
    """What `stops` wants beside p, from the logits; nothing for most rules."""
    del logits, tree, params
    return {}

  def strays(self, p: jax.Array, tree: tree_lib.TokenTree, rest) -> jax.Array:
    """f[B, T]: total variation between the law of the token that this rule emits behind a node and p there, `rest` as
    `stops` gives it. A lossy rule defines it; summed over the nodes that are passed, its mean bounds the total
    variation of the text."""
    del p, rest
    return jnp.zeros(tree.tokens.shape, jnp.float32)

  def _draw(self, logits, tree, params, mode, uniforms, depth):
    with jax.named_scope("verify"):
      p = sampling.law(logits, params, mode)
      evidence = self.evidence(logits, tree, params)
      stop, rest = self.stops(p, tree, depth, **evidence)
      node = sampling.invert(stop, uniforms.stop)
      path, accepted = tree_lib.path_to(tree, node, depth)
      weights = self.next_at(p, tree, rest, node)
      # A residual without mass is reached by rounding only. p is computed again at its node: kept, it would be one more
      # array [B, T, V] beside the residuals.
      here = at_node(logits, node)[:, None]
      otherwise = sampling.law(here, params, mode)[:, 0].astype(weights.dtype)
      token = sampling.invert(jnp.where(weights.sum(-1, keepdims=True) > 0, weights, otherwise), uniforms.residual)
      if self.lossless:
        strayed = jnp.zeros(node.shape, jnp.float32)
      else:
        passed = jnp.arange(path.shape[1])[None] <= accepted[:, None]
        strayed = jnp.where(passed, jnp.take_along_axis(self.strays(p, tree, rest), path, axis=1), 0).sum(-1)
      return Verdict(path=path, accepted=accepted, token=token, strayed=strayed.astype(jnp.float32))


def match(drawn: jax.Array, tree: tree_lib.TokenTree, depth: int) -> Verdict:
  """Follows the children that equal the token drawn at their parent; the last draw is the new token. `drawn` i32[B, T]
  stands for every node's draw."""
  path, accepted = tree_lib.follow(tree, drawn, depth)
  token = jnp.take_along_axis(drawn, path[:, -1:], axis=1)[:, 0]
  return Verdict(path=path, accepted=accepted, token=token, strayed=jnp.zeros(token.shape, jnp.float32))


def normalise(weights: jax.Array, otherwise: jax.Array) -> jax.Array:
  """`weights` f[..., V] as laws; `otherwise` where they are all zero: such a residual is never drawn from, but for
  rounding."""
  mass = weights.sum(-1, keepdims=True)
  return jnp.where(mass > 0, weights / jnp.where(mass > 0, mass, 1), otherwise)


def at_node(x: jax.Array, node: jax.Array) -> jax.Array:
  """`x` f[B, T, V] at one node a row, i32[B]: f[B, V]."""
  return vocabulary.at_node(x, node)


def of_child(x: jax.Array) -> jax.Array:
  """Of a chain: [B, T] values of each node's child, 0 behind the last."""
  return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))


def is_sampled(tree: tree_lib.TokenTree) -> jax.Array:
  """bool[B, T]: valid drafted nodes that were drawn from q."""
  return tree.drafted & tree.sampled if tree.sampled is not None else jnp.zeros(tree.tokens.shape, bool)


def own_law(tree: tree_lib.TokenTree, dtype) -> jax.Array:
  """f[B, T]: the probability of each node's token under the law that it was drawn from: 1 for a point. Earlier siblings
  are not taken out here: see `recursive`."""
  if tree.q is None:
    return jnp.ones(tree.tokens.shape, dtype)
  return jnp.where(is_sampled(tree), tree.q.of(tree.parents, tree.tokens).astype(dtype), 1)


def ratio(p: jax.Array, q: jax.Array) -> jax.Array:
  """p / q, 0 where q is 0: a token that its own law forbids is never accepted."""
  return jnp.where(q > 0, p / jnp.where(q > 0, q, 1), 0)


def at_parent(p: jax.Array, tree: tree_lib.TokenTree) -> jax.Array:
  """f[B, T]: the target's probability of each node's token at its parent."""
  return vocabulary.pick_at(p, tree.parents, tree.tokens)


def child_law(tree: tree_lib.TokenTree, node: jax.Array, vocabulary: int, dtype) -> jax.Array:
  """Of a chain: the law that the child of `node` i32[B] was drawn from, f[B, V]; all zero where it has no valid child.
  One-hot for a point."""
  child = jnp.minimum(node + 1, tree.width - 1)
  pick = lambda x: jnp.take_along_axis(x, child[:, None], axis=1)[:, 0]
  law = jax.nn.one_hot(pick(tree.tokens), vocabulary, dtype=dtype)
  if tree.q is not None:
    law = jnp.where(pick(is_sampled(tree))[:, None], tree.q.row(node, vocabulary).astype(dtype), law)
  return jnp.where((node + 1 < tree.size)[:, None], law, 0)
