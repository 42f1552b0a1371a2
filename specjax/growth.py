"""Trees of the most probable tokens, grown level by level on the device.

EAGLE-2's rule (arXiv 2406.16858, section 4): of the nodes of a level the k with the greatest probability of the whole
path, the *beam*, are expanded to their k most probable children each; all of these go into a *pool*; at the end the
best of the pool make the tree. A path's probability never grows from node to node, and among equal ones the earlier
pool entry is taken, so a node is never taken without its ancestors.

Nothing here knows a model. The driver runs its drafter over the beam (`Beam`), asks for the children of each
(`children`, or any ids with their log-probabilities) and hands them to `expand`. Levels may be a traced number, so that
a drafter is compiled once, in a `lax` loop. The order in which beam nodes went through the drafter, k *slots* a level,
is kept as well: which slots hold a node's ancestors, and which slot a node of the tree had.

All drafts are points: chosen, not drawn. Everything is per row; a row's tree does not depend on its neighbours.

Letters: B batch rows, k width of the beam, D levels below the root, P = k + (D - 1) k k pool nodes, F = (D - 1) k
slots, T nodes of the tree (root included), V vocabulary.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import greatest
from specjax import tree as tree_lib


@struct.dataclass
class Pool:
  """Every node seen so far, level by level; nodes of a level stand in the order of the beam that they descend from.

  Places of levels to come have score -inf, as have nodes of probability 0: neither is ever part of a tree.
  """
  tokens: jax.Array   # i32[B, P]
  parents: jax.Array  # i32[B, P]; as pool places, -1 for the root
  scores: jax.Array   # f[B, P]; log-probability of the path from the root to the node
  fed: jax.Array      # i32[B, F]; the pool place of the node in each slot, -1 where nothing is yet
  width: int = struct.field(pytree_node=False)  # k
  depth: int = struct.field(pytree_node=False)  # D


@struct.dataclass
class Beam:
  """The nodes of one level that go through the drafter next, into slots `first_slot` to `first_slot` + k - 1."""
  places: jax.Array   # i32[B, k]; in the pool
  tokens: jax.Array   # i32[B, k]
  scores: jax.Array   # f[B, k]; log-probability of the path, -inf for a node that only fills the shape
  parents: jax.Array  # i32[B, k]; which node of the beam above each descends from; 0 at level 1
  above: jax.Array    # bool[B, k, F]; the slots of each node's ancestors, itself and the root not among them
  level: jax.Array    # i32; depth of these nodes, 1 for children of the root

  @property
  def alive(self) -> jax.Array:
    """bool[B, k]: nodes that children can still come from."""
    return self.scores > -jnp.inf

  @property
  def first_slot(self) -> jax.Array:
    """i32: where the driver puts what the drafter computes for the beam's first node."""
    return (self.level - 1) * self.tokens.shape[1]


def children(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The most probable children of every node: ids i32[..., k] and their log-probabilities f[..., k].

  `logits` f[..., V], normalised here. Between this and `expand` the driver may map ids of a smaller vocabulary, or set
  to -inf what must not be drafted, such as an end-of-sequence id, which costs nothing as a new token.
  """
  values, ids = greatest.greatest(logits, count)
  # The greatest logit is known by now, but a sum that reads it from the list takes XLA three times as long on a CPU.
  return ids, values - jax.nn.logsumexp(logits, -1, keepdims=True)


def without_ends(ids: jax.Array, log_q: jax.Array, eos: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The same children i32[B, ..., k], those that are in a row's `eos` i32[B, E] at -inf: an end of sequence is no draft,
  as the step would draw it at no cost."""
  ends = (ids[..., None] == eos.reshape(eos.shape[0], *[1] * (ids.ndim - 1), -1)).any(-1)
  return ids, jnp.where(ends, -jnp.inf, log_q)


def start(ids: jax.Array, log_q: jax.Array, depth: int) -> tuple[Pool, Beam]:
  """A pool for `depth` levels that holds the root's children, which are the first beam as well.

  Args:
    ids: i32[B, k], distinct in a row. log_q: f[B, k], their log-probabilities; -inf in all places for a row that drafts
      nothing.
    depth: D.

  Raises:
    ValueError: for a depth below 1.
  """
  chex.assert_rank(ids, 2)
  chex.assert_equal_shape([ids, log_q])
  if depth < 1:
    raise ValueError(f"depth={depth}: a tree needs 1 level or more; a proposer that drafts nothing builds none")
  (batch, width), places, slots = ids.shape, pool_size(ids.shape[1], depth), (depth - 1) * ids.shape[1]
  scores = _log_probabilities(log_q)
  fill = lambda x, value: jnp.pad(x, ((0, 0), (0, places - width)), constant_values=value)
  pool = Pool(tokens=fill(ids.astype(jnp.int32), 0), parents=jnp.full((batch, places), -1, jnp.int32),
              scores=fill(scores, -jnp.inf), fed=jnp.full((batch, slots), -1, jnp.int32), width=width, depth=depth)
  order = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), ids.shape)
  beam = Beam(places=order, tokens=ids.astype(jnp.int32), scores=scores, parents=jnp.zeros_like(order),
              above=jnp.zeros((batch, width, slots), bool), level=jnp.ones((), jnp.int32))
  return pool, beam


def expand(pool: Pool, beam: Beam, ids: jax.Array, log_q: jax.Array,
           grow: jax.Array | None = None) -> tuple[Pool, Beam]:
  """Adds the children of every beam node to the pool; the best of them are the next beam.

  Args:
    pool, beam: of `start` or of the `expand` before; the beam went through the drafter and fills its slots.
    ids: i32[B, k, k], distinct among siblings. log_q: f[B, k, k], their log-probabilities given the path.
    grow: bool[B]; a row without it takes no child and grows no further. What it depends on is up to the driver, see
      `expected_tokens`.

  Returns:
    The pool and the beam below. Beyond level D the pool stays as it is and no node of the beam is alive.

  Raises:
    ValueError: for a pool of one level, which has no place for more.
  """
  width = pool.width
  if pool.depth < 2:
    raise ValueError(f"depth={pool.depth}: this pool holds the root's children only; start it with more levels")
  chex.assert_shape([ids, log_q], (pool.tokens.shape[0], width, width))
  may = beam.level < pool.depth
  may = may if grow is None else may & grow[:, None, None]
  scores = jnp.where(may, beam.scores[:, :, None] + _log_probabilities(log_q), -jnp.inf)
  flat = lambda x: x.reshape(x.shape[0], -1)
  scores, ids = flat(scores), flat(ids).astype(jnp.int32)

  first = pool_size(width, 1) + (beam.level - 1) * width * width
  write = lambda x, new, at: jax.lax.dynamic_update_slice(x, new, (0, at))
  grown = pool.replace(tokens=write(pool.tokens, ids, first), scores=write(pool.scores, scores, first),
                       parents=write(pool.parents, jnp.repeat(beam.places, width, axis=1), first),
                       fed=write(pool.fed, beam.places, beam.first_slot))
  # A slice beyond the end is moved back inside by XLA, over the last level.
  pool = jax.tree.map(lambda new, old: jnp.where(beam.level < pool.depth, new, old), grown, pool)

  best, place = jax.lax.top_k(scores, width)
  parent = place // width
  pick = lambda x, at: jnp.take_along_axis(x, at, axis=1, mode="promise_in_bounds")
  slot = (beam.first_slot + parent)[:, :, None] == jnp.arange(beam.above.shape[2], dtype=jnp.int32)
  return pool, Beam(places=first + place, tokens=pick(ids, place), scores=best, parents=parent,
                    above=pick(beam.above, parent[:, :, None]) | slot, level=beam.level + 1)


def rerank(pool: Pool, pending: jax.Array, nodes: int, *, limit: jax.Array | None = None,
           min_score: jax.Array | None = None,
           max_level: jax.Array | None = None) -> tuple[tree_lib.TokenTree, jax.Array]:
  """The tree of the best nodes of the pool, and the pool place of each.

  Equal nodes are taken in pool order, the shallower first. Nodes stand in pool order too, level by level.

  Args:
    pool: with every level that was grown.
    pending: i32[B], the root's token.
    nodes: T, greatest number of nodes, the root included.
    limit: i32[B], at most this many drafted nodes.
    min_score: f[B], only nodes whose path has at least this log-probability.
    max_level: i32[B], only nodes of at most this depth: one less than the tokens that a row may still emit.

  Returns:
    The tree, of T nodes, all points; and places i32[B, T], -1 at the root and behind the tree's size.

  Raises:
    ValueError: for fewer than 1 node.
  """
  if nodes < 1:
    raise ValueError(f"nodes={nodes}: a tree has 1 node, the root, or more")
  scores = pool.scores
  if min_score is not None:
    scores = jnp.where(scores >= min_score[:, None], scores, -jnp.inf)
  if max_level is not None:
    scores = jnp.where(_levels(pool) <= max_level[:, None], scores, -jnp.inf)
  size = pool.scores.shape[1]
  count = min(nodes - 1, size)
  best, places = jax.lax.top_k(scores, count)
  taken = best > -jnp.inf
  if limit is not None:
    taken = taken & (jnp.arange(count) < limit[:, None])
  places = jnp.sort(jnp.where(taken, places, size), axis=1)
  taken = places < size
  pick = lambda x: jnp.take_along_axis(x, jnp.minimum(places, size - 1), axis=1, mode="promise_in_bounds")
  # Places are sorted and a parent is among them: its node is the number of places up to it, the root being node 0.
  parents = (places[:, None] <= pick(pool.parents)[:, :, None]).sum(-1, dtype=jnp.int32)
  clear = lambda x: jnp.where(taken, x, 0)
  root = pending.astype(jnp.int32)[:, None]
  tree = tree_lib.TokenTree(tokens=jnp.concatenate([root, clear(pick(pool.tokens))], axis=1),
                            parents=jnp.concatenate([jnp.zeros_like(root), clear(parents)], axis=1),
                            size=1 + taken.sum(-1, dtype=jnp.int32))
  places = jnp.concatenate([jnp.full_like(root, -1), jnp.where(taken, places, -1)], axis=1)
  return tree.widen(nodes), jnp.pad(places, ((0, 0), (0, nodes - 1 - count)), constant_values=-1)


def fed_slots(pool: Pool, places: jax.Array) -> jax.Array:
  """The slot that each node at `places` i32[B, T] went through the drafter in: i32[B, T], -1 if it never did."""
  here = (pool.fed[:, None] == places[:, :, None]) & (places >= 0)[:, :, None]
  slots = jnp.arange(pool.fed.shape[1], dtype=jnp.int32)
  return jnp.where(here, slots, -1).max(-1, initial=-1)


def expected_tokens(pool: Pool, nodes: int) -> jax.Array:
  """Tokens that a step with the pool's best tree of T = `nodes` nodes is expected to emit, the new one included: f[B].

  The sum of the nodes' path probabilities, exact where the drafter's law is the target's. OPT-Tree (arXiv 2406.17276)
  grows another level only while the last one added more than a threshold to it, one that the costs of a draft pass and
  of a verified token set: `expand(..., grow=now - before > threshold)`.
  """
  best, _ = jax.lax.top_k(pool.scores, min(nodes - 1, pool.scores.shape[1]))
  return 1 + jnp.exp(best).sum(-1)


def pool_size(width: int, depth: int) -> int:
  """P, nodes of a pool with a beam of `width` nodes and `depth` levels."""
  return width + (depth - 1) * width * width


def _levels(pool):
  """Depth of every pool place: i32[P]."""
  k = pool.width
  return np.concatenate([np.full(k, 1), np.repeat(np.arange(2, pool.depth + 1), k * k)]).astype(np.int32)


def _log_probabilities(log_q):
  """Of at most 0, so that no child scores more than its parent; negative zero counts less than zero in a sort, and what
  is no number counts most."""
  log_q = log_q.astype(jnp.promote_types(log_q.dtype, jnp.float32))
  return jnp.where(log_q < 0, log_q, jnp.where(log_q >= 0, 0, -jnp.inf))
