"""The law of a verifier's fast draw, integrated over its uniforms, to be compared with the law that it claims.

A draw gets its uniforms as an argument and uses each by monotone inversion, so the outcome is a step function of each:
every step's place is found by bisection over the 2^23 uniforms that `keys` can make, all steps of all rows at once. The
measures are those of the real draw, with its rounding and its last places; no sampling, and an error of some 2^-23.

Letters: B rows, T nodes, V vocabulary, D depth, K = T V draws that are asked of every row at once.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import keys
from specjax import sampling
from specjax import tree as tree_lib

COUNT = 2 ** 23  # uniforms are (i + 1/2) / COUNT


def draw_law(verifier, logits: jax.Array, tree: tree_lib.TokenTree, params: sampling.SamplingParams,
             depth: int, grid: np.ndarray | None = None) -> np.ndarray:
  """The joint law of (node where the accepted path ends, new token) of `verifier.draw`: f64[B, T, V].

  Args:
    verifier: see `verifiers.base.Verifier`, with the purposes (STOP, RESIDUAL) or (TOKEN,).
    logits: f32[B, T, V]. tree: the proposal. params: batched parameters. depth: static bound of the tree's depth, D.
    grid: instead of all uniforms, these few f[G], in every combination; each counts the same. Nothing is taken to be
      monotone then, and 0 may be among them, which `keys` cannot make.

  Raises:
    ValueError: a verifier that draws from anything else: exponential noise cannot be integrated, sample such a rule.
  """
  purposes = set(verifier.purposes)
  if grid is not None:
    return _counted(verifier, depth, logits, tree, params, np.asarray(grid, np.float32))
  if purposes == {keys.STOP, keys.RESIDUAL}:
    return _two_uniforms(verifier, depth, logits, tree, params)
  if purposes == {keys.TOKEN}:
    return _token_each(verifier, depth, logits, tree, params)
  raise ValueError(f"{verifier} draws for the purposes {sorted(purposes)}; allowed are STOP and RESIDUAL, or TOKEN")


def race_law(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  """The joint law of the ids that q and p draw in races over the same three exponentials, exactly: f64[3, 3].

  Who wins depends on the exponentials' shares of their sum alone, which are uniform in a triangle, and every win is a
  linear inequality: each probability is the share of a convex polygon.
  """
  law = np.zeros((3, 3))
  for i, j in np.ndindex(3, 3):
    corners = np.eye(3)
    for w in range(3):
      for weights, winner in ((q, i), (p, j)):
        if w != winner:  # noise[winner] / weights[winner] is the least: noise[w] weights[winner] is more
          corners = _clip(corners, weights[winner] * np.eye(3)[w] - weights[w] * np.eye(3)[winner])
    x, y = corners[:, 0], corners[:, 1]
    law[i, j] = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))  # twice the area: the triangle has 1 / 2
  return law


def _clip(corners, normal):
  """The part of a convex polygon, corners f64[N, 3] in order, where `normal` @ x >= 0."""
  side, kept = corners @ normal, []
  for at, after in zip(range(len(corners)), np.roll(np.arange(len(corners)), -1), strict=True):
    if side[at] >= 0:
      kept.append(corners[at])
    if side[at] * side[after] < 0:
      kept.append((corners[at] * side[after] - corners[after] * side[at]) / (side[after] - side[at]))
  return np.array(kept).reshape(-1, 3)


def uniform(index: np.ndarray) -> np.ndarray:
  """The uniform of an index in 0 .. COUNT - 1, as `keys` makes it: f32, exact."""
  return ((index + 0.5) / COUNT).astype(np.float32)


def _two_uniforms(verifier, depth, logits, tree, params):
  batch, width, vocabulary = logits.shape
  copies = width * vocabulary
  node_of = np.repeat(np.arange(width), vocabulary)   # of the K draws
  token_of = np.tile(np.arange(vocabulary), width)
  middle = np.full((batch, copies), COUNT // 2)
  ask = lambda stop, residual: _verdicts(verifier, depth, logits, tree, params,
                                         keys.Uniforms(stop=uniform(stop), residual=uniform(residual)), copies)
  # Where the node becomes k or more, then where the token becomes v or more behind each node.
  edges = _first(lambda at: ask(at, middle)[0] >= node_of, middle.shape)
  edges = edges.reshape(batch, width, vocabulary)[..., 0]
  stops = np.diff(edges, append=COUNT, axis=1)
  inside = np.repeat(np.minimum(edges + stops // 2, COUNT - 1), vocabulary, axis=1)
  edges = _first(lambda at: ask(inside, at)[1] >= token_of, middle.shape).reshape(batch, width, vocabulary)
  return stops[..., None] / COUNT * (np.diff(edges, append=COUNT, axis=2) / COUNT)


def _counted(verifier, depth, logits, tree, params, grid):
  batch, width, vocabulary = logits.shape
  each = keys.TOKEN in verifier.purposes
  tried = np.stack(np.meshgrid(*[grid] * (width if each else 2), indexing="ij"), -1)
  tried = np.tile(tried.reshape(1, -1, tried.shape[-1]), (batch, 1, 1))
  uniforms = keys.Uniforms(token=tried) if each else keys.Uniforms(stop=tried[..., 0], residual=tried[..., 1])
  ended, token = _verdicts(verifier, depth, logits, tree, params, uniforms, tried.shape[1])
  counts = np.zeros((batch, width, vocabulary))
  np.add.at(counts, (np.arange(batch)[:, None], ended, token), 1 / tried.shape[1])
  return counts


def _token_each(verifier, depth, logits, tree, params):
  batch, width, vocabulary = logits.shape
  tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
  # The draw at each node alone, as the root of a tree of one.
  more = lambda x: jnp.repeat(x, width, axis=0)
  alone = tree_lib.root_only(more(tree.tokens[:, 0]))
  single = lambda at: _verdicts(verifier, depth, logits.reshape(batch * width, 1, vocabulary), alone,
                                jax.tree.map(more, params), keys.Uniforms(token=uniform(at)[..., None]), vocabulary)
  edges = _first(lambda at: single(at)[1] >= np.arange(vocabulary), (batch * width, vocabulary))
  edges = edges.reshape(batch, width, vocabulary)
  measure = np.diff(edges, append=COUNT, axis=2)
  inside = np.minimum(edges + measure // 2, COUNT - 1)
  # All together, once for each (node, token): on the way to the node every draw is the token of the path's next node.
  ancestors = np.asarray(tree_lib.ancestors(tree.parents, depth))
  chosen = np.full((batch, width, vocabulary, width), COUNT // 2)
  reach = np.ones((batch, width))
  for row in range(batch):
    for node in range(width):
      chosen[row, node, :, node] = inside[row, node]
      for child in np.nonzero(ancestors[row, node])[0][1:]:
        parent = parents[row, child]
        chosen[row, node, :, parent] = inside[row, parent, tokens[row, child]]
        reach[row, node] *= measure[row, parent, tokens[row, child]] / COUNT
  chosen = uniform(chosen).reshape(batch, width * vocabulary, width)
  ended, token = _verdicts(verifier, depth, logits, tree, params, keys.Uniforms(token=chosen), width * vocabulary)
  seen = ((ended.reshape(measure.shape) == np.arange(width)[:, None])
          & (token.reshape(measure.shape) == np.arange(vocabulary)))
  return np.where(seen, reach[..., None] * measure / COUNT, 0)


def _verdicts(verifier, depth, logits, tree, params, uniforms, copies):
  """Last node and new token of `copies` draws a row, i32[B, K] each, from uniforms f32[B, K, ..]."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), uniforms)
  found = _draw(verifier, depth, copies, int(params.mode()), logits, tree, params, flat)
  return [np.asarray(x).reshape(-1, copies) for x in found]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _draw(verifier, depth, copies, mode, logits, tree, params, uniforms):
  # The mode is a constant here, so that branches of the other modes are not compiled.
  more = lambda x: jnp.repeat(x, copies, axis=0)
  verdict = verifier.draw(more(logits), jax.tree.map(more, tree), jax.tree.map(more, params), jnp.int32(mode), uniforms,
                          depth)
  return verdict.path[:, -1], verdict.token


def _first(holds, shape):
  """The least index in 0 .. COUNT for which `holds(index i64[shape]) -> bool[shape]`, which is monotone."""
  low, high = np.zeros(shape, np.int64), np.full(shape, COUNT)
  while (low < high).any():
    middle = np.minimum((low + high) // 2, COUNT - 1)
    yes = holds(middle)
    low, high = np.where((low < high) & ~yes, middle + 1, low), np.where((low < high) & yes, middle, high)
  return high
