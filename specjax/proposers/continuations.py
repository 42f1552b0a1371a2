"""Drafts from what followed earlier occurrences of a text's end: the counts of a suffix trie, without the trie.

A suffix trie with counts says, behind the last p tokens of a text, how often each continuation followed them. The same
numbers come from a few dozen occurrences laid side by side: two continuations share a node at depth n when their first
n tokens agree, so the table of common prefix lengths holds every node, and one small product of matrices counts them
for all p at once. All of it is static arrays on the device; nothing is built or kept between steps.

Letters: B batch rows, S places of a text, M occurrences, N continued tokens, P match lengths tried, T nodes (root
included).
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib

MAX_MATCH = 63
_EXACT = 2 ** 24  # whole numbers up to here are exact in f32, the type in which a CPU finds the greatest fast
_BISECTIONS = 12
_BLOCK = 64
_NEVER = -2       # equals no id of a text, not even the -1 between the texts of a store


@struct.dataclass
class Continuations:
  """What followed the occurrences, the longest match first and among equals the latest."""
  tokens: jax.Array   # i32[B, N, M]
  known: jax.Array    # i32[B, M]; how many of the N may be drafted
  matched: jax.Array  # i32[B, M]; tokens before it that agree with the text's end; 0: no occurrence


@struct.dataclass
class Draft:
  """A drafted tree, or chain, and what the counts say of it."""
  tokens: jax.Array       # i32[B, T]; column 0 is the root
  parents: jax.Array      # i32[B, T]
  probability: jax.Array  # f32[B, T]; estimate that the text goes through the node; root 1, 0 where there is no node
  matched: jax.Array      # i32[B]; length of the match that it continues; 0: nothing drafted

  @property
  def score(self) -> jax.Array:
    """Estimated accepted tokens, f32[B]."""
    return self.probability.sum(-1) - 1

  def tree(self) -> tree_lib.TokenTree:
    """The nodes for a verifier; point drafts."""
    return tree_lib.TokenTree(tokens=self.tokens, parents=self.parents, size=(self.probability > 0).sum(-1).astype(
        jnp.int32))

  def only(self, wanted: jax.Array) -> "Draft":
    """The draft of the rows `wanted` bool[B]; nothing for the others."""
    kept = wanted[:, None] | (jnp.arange(self.tokens.shape[1]) == 0)
    return self.replace(probability=jnp.where(kept, self.probability, 0), matched=jnp.where(wanted, self.matched, 0))

  def where(self, chosen: jax.Array, other: "Draft") -> "Draft":
    """Row by row this draft where `chosen` bool[B], else the other one."""
    pick = lambda a, b: jnp.where(chosen if a.ndim == 1 else chosen[:, None], a, b)
    return jax.tree.map(pick, self, other)


def check_options(proposer) -> None:
  """Raises ValueError for what `best_draft` cannot do: num_tokens, min_probability, escape, occurrences."""
  least, for_tree = (2, " for a tree") if proposer.tree else (1, "; for no drafts use the plain method")
  if proposer.num_tokens < least:
    raise ValueError(f"num_tokens={proposer.num_tokens}: it must be {least} or more{for_tree}")
  if proposer.occurrences < 1:
    raise ValueError(f"occurrences={proposer.occurrences}: it must be 1 or more")
  if not 0 <= proposer.min_probability <= 1:
    raise ValueError(f"min_probability={proposer.min_probability}: it must be between 0 and 1")
  if not 0 <= proposer.escape < float("inf"):
    raise ValueError(f"escape={proposer.escape}: it must be 0 or greater, and finite")


def cut(tokens: jax.Array, count: jax.Array, context, axis: int = -1) -> jax.Array:
  """How many of `count` i32[B, ...] drafted tokens a row can use.

  Drafts end before an end-of-sequence id, which would come as the new token at no cost, and one token short of the
  budget: the step emits one more than it accepts. Rows that have ended draft nothing.

  Args:
    tokens: i32[B, ...] with the drafted tokens along `axis`, an axis that `count` lacks.
    context: see `base.Context`.
  """
  tokens = jnp.moveaxis(tokens, axis, -1)
  spread = lambda x: x.reshape(x.shape[:1] + (1,) * (count.ndim - 1) + x.shape[1:])
  ends = (tokens[..., None] == spread(context.rules.eos)[..., None, :]).any(-1)
  place = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
  before_end = jnp.where(ends, place, tokens.shape[-1]).min(-1)
  most = jnp.where(context.active, jnp.maximum(context.budget - 1, 0), 0)
  return jnp.clip(jnp.minimum(count, before_end), 0, spread(most)).astype(jnp.int32)


def latest_tokens(tokens: jax.Array, length: jax.Array, depth: int) -> jax.Array:
  """The last `depth` tokens of each text, the latest first: i32[B, depth] of i32[B, S]; -2 where there are fewer."""
  place = length[:, None] - 1 - jnp.arange(depth, dtype=jnp.int32)[None]
  return jnp.where(place >= 0, jnp.take_along_axis(tokens, jnp.maximum(place, 0), axis=1), _NEVER)


def match_lengths(text: jax.Array, ends: jax.Array, wanted: jax.Array) -> jax.Array:
  """By how many tokens the text up to each place agrees with the tokens wanted.

  The loop ends with the longest match, after a few turns in a text that repeats little.

  Args:
    text: i32[B, S], or i32[1, S] for all rows. ends: bool[B, S], the places at which a match may end.
    wanted: i32[B, D] of `latest_tokens`.

  Returns:
    i32[B, S], at most D.
  """
  depth, slots = wanted.shape[1], text.shape[1]
  padded = jnp.pad(text, ((0, 0), (depth, 0)), constant_values=-1)

  def deeper(carry):
    back, matched, _ = carry
    there = jax.lax.dynamic_slice_in_dim(padded, depth - back, slots, axis=1)
    agrees = (there == jax.lax.dynamic_slice_in_dim(wanted, back, 1, axis=1)) & (matched == back.astype(jnp.int8))
    return back + 1, matched + agrees.astype(jnp.int8), agrees.any()

  # One byte a place: a long store is read from memory once a turn, and nothing else should be.
  start = (jnp.int32(0), jnp.where(ends, 0, -1).astype(jnp.int8), jnp.bool_(True))
  matched = jax.lax.while_loop(lambda carry: carry[2] & (carry[0] < depth), deeper, start)[1]
  return jnp.maximum(matched, 0).astype(jnp.int32)


def best_places(matched: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The places of the longest matches, the latest first among equals: i32[B, M] twice, places and match lengths.

  Args:
    matched: i32[B, S]. count: M.
  """
  slots = matched.shape[1]
  key = matched * slots + jnp.arange(slots, dtype=jnp.int32)
  key = key.astype(jnp.float32) if (MAX_MATCH + 1) * slots <= _EXACT else key
  blocks = slots // _BLOCK
  if slots % _BLOCK or blocks <= 4 * count:
    best, place = jax.lax.top_k(key, min(count, slots))
    return place, best.astype(jnp.int32) // slots
  # In a long text first the blocks that hold the greatest, then those: as many blocks as places are enough.
  key = key.reshape(-1, blocks, _BLOCK)
  _, block = jax.lax.top_k(key.max(-1), count)
  near = jnp.take_along_axis(key, block[:, :, None], axis=1).reshape(-1, count * _BLOCK)
  best, at = jax.lax.top_k(near, count)
  place = jnp.take_along_axis(block, at // _BLOCK, axis=1) * _BLOCK + at % _BLOCK
  return place, best.astype(jnp.int32) // slots


def follow(text: jax.Array, known: jax.Array, place: jax.Array, matched: jax.Array, num_tokens: int, context, *,
           overlap: bool = False) -> Continuations:
  """Gathers what follows the places.

  Args:
    text: i32[B, S] or i32[1, S]; an id of -1 ends a continuation. known: i32[B], tokens of it.
    place, matched: i32[B, M], the place at which each match ends, and its length.
    num_tokens: N. context: see `base.Context`.
    overlap: a continuation that reaches the end of the text goes on in its own tokens: a match q tokens before the end
      says that the text repeats with period q. Only for a row's own text.
  """
  ahead = jnp.arange(num_tokens, dtype=jnp.int32)[None, :, None]
  known = known[:, None, None]
  if overlap:
    period = jnp.maximum(known - 1 - place[:, None], 1)
    at = place[:, None] + 1 + ahead % period
  else:
    at = place[:, None] + 1 + ahead
  flat = jnp.clip(at, 0, text.shape[1] - 1).reshape(at.shape[0], -1)
  tokens = text[0][flat] if text.shape[0] == 1 else jnp.take_along_axis(text, flat, axis=1)
  tokens = jnp.where(at < known, tokens.reshape(at.shape), -1)
  count = jnp.where(tokens < 0, ahead, num_tokens).min(1)
  count = cut(tokens, count, context, axis=1)
  return Continuations(tokens=tokens, known=jnp.where(matched > 0, count, 0), matched=matched)


def best_draft(found: Continuations, root: jax.Array, lengths: jax.Array, limits: jax.Array, *, max_nodes: int,
               min_probability: float, escape: float, chain: bool) -> Draft:
  """The draft of the greatest score over several ways of counting.

  Counting behind the last p tokens takes the occurrences that match by p or more. A node that n of the N occurrences
  through its parent continue with has probability n / N given the parent, and with an `escape` n / (N + escape / m): so
  many more counts stand for what was never seen behind a context of m tokens, m growing along the path, as in the
  escape of PPM text compression. (Without it a single occurrence of a single token is certain of what follows.) Nodes
  below `min_probability` are left out. The score is the sum of the probabilities, an estimate of the accepted tokens. A
  tree takes the most probable nodes, the shallower first among equals: probabilities never rise along a path, so that
  parents come along. A chain is the path of the greatest score.

  Args:
    found: the continuations. root: i32[B], the pending token.
    lengths: i32[P] or i32[B, P], the values of p, descending: the longer match wins a tie.
    limits: i32[P], how many tokens may be drafted at each.
    max_nodes: T. min_probability, escape: as above. chain: a chain instead of a tree.
  """
  lengths = jnp.broadcast_to(lengths, (root.shape[0], lengths.shape[-1]))
  counts, total = _counts(found, lengths)
  if escape:
    depth = counts.shape[2]
    parents = jnp.concatenate([jnp.broadcast_to(total[:, :, None, None], counts[:, :, :1].shape), counts[:, :, :-1]], 2)
    reach = jnp.maximum(lengths, 1)[:, :, None, None] + jnp.arange(depth, dtype=jnp.int32)[:, None]
    probability = jnp.cumprod(counts / (parents + escape / reach), axis=2)
  else:
    probability = counts / jnp.maximum(total, 1)[:, :, None, None]
  probability = jnp.where(probability >= min_probability - 1e-6, probability, 0)
  limits = jnp.minimum(limits, max_nodes - 1).astype(jnp.int32)
  level, tokens, parents, probability = (_best_path if chain else _best_nodes)(found, probability, limits, max_nodes)
  fit = lambda x: jnp.pad(x, ((0, 0), (1, max(max_nodes - 1 - x.shape[1], 0))))[:, :max_nodes]
  drafted = probability > 0
  return Draft(tokens=fit(jnp.where(drafted, tokens, 0)).at[:, 0].set(root),
               parents=fit(jnp.where(drafted, parents, 0)).astype(jnp.int32),
               probability=fit(probability).at[:, 0].set(1),
               matched=jnp.where(drafted[:, 0], jnp.take_along_axis(lengths, level[:, None], 1)[:, 0], 0))


def _prefixes(found):
  """Length of the common drafted prefix of every two continuations: i32[B, M, M]."""
  tokens = found.tokens
  ahead = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :, None, None]
  agree = jnp.where(tokens[:, :, :, None] != tokens[:, :, None, :], ahead, tokens.shape[1]).min(1)
  return jnp.minimum(agree, jnp.minimum(found.known[:, :, None], found.known[:, None, :]))


def _counts(found, lengths):
  """Occurrences through each of the N nodes of each continuation, f32[B, P, N, M], and all of them, f32[B, P]."""
  batch, depth, places = found.tokens.shape
  ahead = jnp.arange(depth, dtype=jnp.int32)[None, None, :, None]
  same = (_prefixes(found)[:, :, None] > ahead).astype(jnp.float32).reshape(batch, places, -1)
  counted = found.matched[:, None] >= jnp.maximum(lengths, 1)[:, :, None]
  counts = jnp.einsum("bpk,bkx->bpx", counted.astype(jnp.float32), same)
  return counts.reshape(batch, -1, depth, places), counted.sum(-1).astype(jnp.float32)


def _best_path(found, probability, limits, max_nodes):
  """The row of the greatest score: its level i32[B], and tokens, parents and probabilities of its N nodes."""
  del max_nodes
  depth, places = probability.shape[2:]
  ahead = jnp.arange(depth, dtype=jnp.int32)
  probability = jnp.where((ahead < limits[:, None])[None, :, :, None], probability, 0)
  best = jnp.argmax(probability.sum(2).reshape(probability.shape[0], -1), axis=-1)
  level, which, row = best // places, best % places, jnp.arange(best.shape[0])
  return level, found.tokens[row, :, which], ahead[None], probability[row, level, :, which]


def _best_nodes(found, probability, limits, max_nodes):
  """The most probable nodes of the level of the greatest score, as in `_best_path`."""
  batch, _, depth, places = probability.shape
  # A node is named by the first continuation that goes through it, here and at its parent.
  through = _prefixes(found)[:, None] > jnp.arange(depth, dtype=jnp.int32)[None, :, None, None]
  name = jnp.arange(places, dtype=jnp.int32)
  first = jnp.where(through, name, places).min(-1)
  probability = jnp.where((first == name)[:, None], probability, 0).reshape(batch, -1, depth * places)
  level = jnp.argmax(_greatest_sums(probability, limits), axis=-1)
  size = min(max_nodes - 1, depth * places)
  best, node = jax.lax.top_k(jnp.take_along_axis(probability, level[:, None, None], axis=1)[:, 0], size)
  best = jnp.where(jnp.arange(size) < limits[level][:, None], best, 0)
  above = node - places  # the same continuation, one token earlier
  parent = above // places * places + jnp.take_along_axis(first.reshape(batch, -1), jnp.maximum(above, 0), axis=1)
  at = jnp.argmax(node[:, None] == parent[:, :, None], axis=-1) + 1
  tokens = jnp.take_along_axis(found.tokens.reshape(batch, -1), node, axis=1)
  return level, tokens, jnp.where(above >= 0, at, 0), best


def _greatest_sums(probability, limits):
  """The sum of each level's greatest probabilities, as many as it may draft, to a few thousandths: f32[B, P].

  By bisection for the least probability that is taken: sorting every level would cost more than all the rest.
  """
  if probability.shape[1] == 1:
    return jnp.zeros(probability.shape[:2])
  above = lambda least: probability > least[:, :, None]
  low, high = jnp.zeros(probability.shape[:2]), jnp.ones(probability.shape[:2])
  for _ in range(_BISECTIONS):  # more than the limit are above `low`, or it is 0; not more are above `high`
    middle = (low + high) / 2
    fits = above(middle).sum(-1) <= limits
    low, high = jnp.where(fits, low, middle), jnp.where(fits, middle, high)
  taken = above(high)
  many = jnp.minimum(above(low).sum(-1), limits) - taken.sum(-1)
  return jnp.where(taken, probability, 0).sum(-1) + high * many
