"""Drafts from laws that one pass gives for all depths at once: what Medusa's heads and block drafters share.

The law of a depth does not depend on what is drafted above it. A chain takes one token of each; a tree the paths of the
greatest product of probabilities, from a beam of them on every level (`growth`; JetSpec's own rule is in `jetspec`).

Letters: B batch rows, N depths, U draft ids, V vocabulary, k width of the beam, T nodes.
"""
import jax
import jax.numpy as jnp

from specjax import growth
from specjax import tree as tree_lib
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import length as length_lib


def chain(logits: jax.Array, ids, context: base.Context, keys, drawing, most, rule, rule_state,
          vocabulary: int) -> autoregressive.Chain:
  """A chain of up to `most` i32[B] tokens from `logits` f[B, N, U], greedy or drawn; see `autoregressive.draft_chain`."""
  depths = logits.shape[1]
  at = lambda index: jax.lax.dynamic_index_in_dim(logits, jnp.minimum(index, depths - 1), 1, keepdims=False)
  advance = lambda token, index, extra: (at(index + 1), extra)
  return autoregressive.draft_chain(advance, (), at(jnp.int32(0)), context, keys, drawing, depths, most, rule, rule_state,
                                    ids=ids, vocabulary=vocabulary)


def tree(best: tuple[jax.Array, jax.Array], ids, context: base.Context, levels: jax.Array, beam: int,
         nodes: int) -> tree_lib.TokenTree:
  """The `nodes` - 1 most probable nodes of depth up to `levels` i32[B]; points. A row of 0 levels drafts nothing.

  `best` are the ids i32[B, N, k] of each depth and their log-probabilities, see `growth.children`.
  """
  found, log_q = best
  batch, depths = found.shape[:2]
  found = found if ids is None else ids[found]
  found, log_q = growth.without_ends(found, log_q, context.rules.eos)
  pool, front = growth.start(found[:, 0], jnp.where((levels > 0)[:, None], log_q[:, 0], -jnp.inf), depths)
  alike = lambda x, depth: jnp.broadcast_to(x[:, depth, None], (batch, beam, beam))
  for depth in range(1, depths):
    pool, front = growth.expand(pool, front, alike(found, depth), alike(log_q, depth))
  return growth.rerank(pool, context.pending, nodes, max_level=levels)[0]


class ChainOrTree(base.Defaults):
  """A mixin: chains of up to `num_tokens` tokens or trees of `nodes` nodes from the laws of all depths; fields of
  theirs, as are `beam`, `drawing` and `length`."""

  def check_options(self, most: int | None, what: str, draft_vocab: int) -> None:
    """Raises ValueError for more than `most` tokens, `what` the drafter has, and for options that make no sense."""
    if self.num_tokens < 1 or most is not None and self.num_tokens > most:
      raise ValueError(f"num_tokens={self.num_tokens}: it must be 1 "
                       + ("or more" if most is None else f"to {most}, {what}"))
    if self.nodes is not None and (self.nodes < 2 or not 1 <= self.beam <= draft_vocab):
      raise ValueError(f"nodes={self.nodes}, beam={self.beam}: a tree has 2 nodes or more, and a node 1 child or more")
    if isinstance(self.drawing, autoregressive.Drawing):
      self.drawing.check()
      check_tree(self.nodes is not None, self.drawing, self.length)

  @property
  def max_nodes(self) -> int:
    return self.num_tokens + 1 if self.nodes is None else self.nodes

  @property
  def max_depth(self) -> int:
    return self.num_tokens if self.nodes is None else min(self.num_tokens, self.nodes - 1)

  @property
  def chains(self) -> bool:
    return self.nodes is None or self.beam == 1 or self.nodes == 2

  @property
  def samples(self) -> bool:
    return self.drawing.sampled

  def laws(self, logits: jax.Array):
    """What `drafted` takes, of the logits f[B, N, U]: themselves, or of a tree the best ids of each depth."""
    return logits if self.nodes is None else growth.children(logits, self.beam)

  def drafted(self, made, ids, context: base.Context, keys, most: jax.Array, length_state, vocabulary: int):
    """The tree of what `laws` returned, `most` i32[B] tokens deep."""
    if self.nodes is not None:
      return tree(made, ids, context, most, self.beam, self.nodes)
    return chain(made, ids, context, keys, self.drawing, most, self.length, length_state,
                 vocabulary).tree(context.pending)


def if_any(rows: jax.Array, run):
  """`run()`, or zeros of its shape where none of `rows` bool[B] asks for it."""
  nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
  return jax.lax.cond(rows.any(), run, nothing)


def check_tree(is_tree: bool, drawing, length) -> None:
  """Raises ValueError for options of a chain where a tree is drafted."""
  if is_tree and drawing.sampled:
    raise ValueError("sampled=True draws a chain: a tree's nodes are chosen by probability; leave the tree out")
  if is_tree and not isinstance(length, length_lib.Fixed):
    raise ValueError(f"length={type(length).__name__}() ends a chain: a tree is as large as it is; leave one of them out")
