"""Drafts from laws that one pass gives for all depths at once: what Medusa's heads and block drafters share.

The law of a depth does not depend on what is drafted above it. A chain takes one token of each; a tree the paths of the
greatest product of probabilities (best first over the depths' marginals: JetSpec, arXiv 2606.18394).

Letters: B batch rows, N depths, U draft ids, V vocabulary, k width of the beam, T nodes.
"""
import jax
import jax.numpy as jnp

from specjax import growth
from specjax import tree as tree_lib
from specjax.proposers import autoregressive
from specjax.proposers import base


def spread(ids: jax.Array | None, vocabulary: int):
  """Logits of draft ids f[..., U] -> of the target's ids f[..., V], -inf where there is none; `ids` i32[U] or None."""
  if ids is None:
    return lambda logits: logits[..., :vocabulary]
  return lambda logits: jnp.full((*logits.shape[:-1], vocabulary), -jnp.inf, logits.dtype).at[..., ids].set(logits)


def chain(logits: jax.Array, ids, context: base.Context, keys, drawing, most, rule, rule_state,
          vocabulary: int) -> autoregressive.Chain:
  """A chain of up to `most` i32[B] tokens from `logits` f[B, N, U], greedy or drawn; see `autoregressive.draft_chain`."""
  full, depths = spread(ids, vocabulary), logits.shape[1]
  at = lambda index: full(jax.lax.dynamic_index_in_dim(logits, jnp.minimum(index, depths - 1), 1, keepdims=False))
  advance = lambda token, index, extra: (at(index + 1), extra)
  return autoregressive.draft_chain(advance, (), at(jnp.int32(0)), context, keys, drawing, depths, most, rule, rule_state)


def tree(logits: jax.Array, ids, context: base.Context, levels: jax.Array, beam: int,
         nodes: int) -> tree_lib.TokenTree:
  """The `nodes` - 1 most probable nodes of depth up to `levels` i32[B]; points. A row of 0 levels drafts nothing."""
  batch, depths = logits.shape[:2]
  found, log_q = growth.children(logits, beam)
  found = found if ids is None else ids[found]
  found, log_q = growth.without_ends(found, log_q, context.rules.eos)
  pool, front = growth.start(found[:, 0], jnp.where((levels > 0)[:, None], log_q[:, 0], -jnp.inf), depths)
  alike = lambda x, depth: jnp.broadcast_to(x[:, depth, None], (batch, beam, beam))
  for depth in range(1, depths):
    pool, front = growth.expand(pool, front, alike(found, depth), alike(log_q, depth))
  return growth.rerank(pool, context.pending, nodes, max_level=levels)[0]
