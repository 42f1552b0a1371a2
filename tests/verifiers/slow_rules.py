"""Random drafts, and every rule once more as its paper says it: one row, one node after another, in NumPy.

A row's answer is (stop f64[T], next f64[T, V]) as `Verifier.law` gives it; `next` counts only where `stop` is positive.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from specjax import draft_laws
from specjax import tree as tree_lib


class Drafts:
  """Trees in NumPy, a row a case. Rows of q that no sampled child was drawn from are NaN: nobody may read them."""

  def __init__(self, tokens, parents, size, sampled, q, p, replacement=True):
    self.tokens, self.parents, self.size = (np.asarray(x, np.int32) for x in (tokens, parents, size))
    self.sampled, self.q, self.p = np.asarray(sampled, bool), np.array(q, np.float64), np.asarray(p, np.float64)
    self.replacement = replacement
    node = np.arange(self.tokens.shape[1])
    self.drafted = (node > 0) & (node < self.size[:, None])
    for row, laws in enumerate(self.q):
      drawn_from = self.parents[row, self.drafted[row] & self.sampled[row]]
      laws[~np.isin(node, drawn_from)] = np.nan

  def __len__(self):
    return len(self.tokens)

  def take(self, rows):
    return Drafts(*(x[rows] for x in (self.tokens, self.parents, self.size, self.sampled, self.q, self.p)),
                  self.replacement)

  def tree(self, dtype=np.float64, law="dense"):
    """As verifiers get them, with q "dense" or "sparse", or None: a tree that has no q at all."""
    arrays = dict(tokens=jnp.asarray(self.tokens), parents=jnp.asarray(self.parents), size=jnp.asarray(self.size))
    if law is None:
      assert not (self.drafted & self.sampled).any()
      return tree_lib.TokenTree(**arrays)
    q = draft_laws.DenseLaw(jnp.asarray(self.q, dtype)) if law == "dense" else sparse(self.q, dtype)
    return tree_lib.TokenTree(**arrays, sampled=jnp.asarray(self.sampled), q=q, replacement=self.replacement)

  def law(self, rule, depth=None, dtype=np.float64, law="dense"):
    """stop and next as `rule.law` has them, in NumPy."""
    with jax.enable_x64(dtype == np.float64):
      stop, following = jitted(rule)(jnp.asarray(self.p, dtype), self.tree(dtype, law),
                                     depth or max(self.tokens.shape[1] - 1, 1))
      assert stop.dtype == following.dtype == dtype
      return np.asarray(stop, np.float64), np.asarray(following, np.float64)


@functools.cache
def jitted(rule):
  """`rule.law`, compiled once a shape."""
  return jax.jit(rule.law, static_argnums=2)


def sparse(q, dtype):
  """The same laws over their own ids, shuffled; unused places name an id that has its place already."""
  order = np.argsort(np.random.default_rng(0).uniform(size=q.shape), -1)
  probs = np.take_along_axis(q, order, -1)
  ids = np.where(probs == 0, np.argmax(np.nan_to_num(q), -1)[..., None], order)
  return draft_laws.SparseLaw(jnp.asarray(ids, jnp.int32), jnp.asarray(probs, dtype))


def random_laws(rng, shape, vocabulary, zeros=0.2):
  laws = rng.dirichlet(np.ones(vocabulary), shape)
  banned = rng.uniform(size=laws.shape) < zeros
  np.put_along_axis(banned, rng.integers(vocabulary, size=(*shape, 1)), False, -1)  # never all
  laws = np.where(banned, 0, laws) + np.where(banned, 0, 1e-3)
  return laws / laws.sum(-1, keepdims=True)


def random_drafts(seed, rows, width, vocabulary, *, shape="tree", kind="mixture", replacement=True, ragged=True):
  """Drafts as they come: p, q of each node apart, sampled tokens drawn, points chosen by nobody in particular.

  Args:
    shape: "chain", "star" or "tree". kind: "iid", "point", or "mixture". ragged: rows of any size, poison behind it.
  """
  rng = np.random.default_rng(seed)
  node = np.arange(width)
  parents = {"chain": np.tile(np.maximum(node - 1, 0), (rows, 1)), "star": np.zeros((rows, width), int),
             "tree": np.stack([[rng.integers(max(i, 1)) for i in node] for _ in range(rows)])}[shape]
  p, q = random_laws(rng, (rows, width), vocabulary), random_laws(rng, (rows, width), vocabulary)
  sampled = {"iid": np.ones((rows, width), bool), "point": np.zeros((rows, width), bool),
             "mixture": rng.uniform(size=(rows, width)) < .6}[kind]
  tokens = rng.integers(vocabulary, size=(rows, width))
  for row in range(rows):
    for i in range(1, width):
      if not sampled[row, i]:
        continue
      law = q[row, parents[row, i]].copy()
      if not replacement:
        law[[tokens[row, j] for j in range(1, i) if sampled[row, j] and parents[row, j] == parents[row, i]]] = 0
      if law.sum() > 0:
        tokens[row, i] = rng.choice(vocabulary, p=law / law.sum())
      else:
        sampled[row, i] = False  # nothing left to draw
  size = rng.integers(1, width + 1, rows) if ragged else np.full(rows, width)
  return Drafts(tokens, parents, size, sampled, q, p, replacement)


def star(p, q, tokens, sampled, recorded=None, replacement=True, rows=64, width=6):
  """Trees of depth 1 from p, q f64[B, V] at the root and its children's tokens i32[B, K], filled up to a shape.

  `sampled` bool[K] says which were drawn; `recorded` is the law in the tree where it is not q.
  """
  count = tokens.shape[1]
  wide = lambda x: np.pad(x, ((0, rows - len(x)), (1, width - 1 - count)))
  laws = lambda x: np.repeat(np.pad(x, ((0, rows - len(x)), (0, 0)), mode="edge")[:, None], width, 1)
  return Drafts(wide(tokens), np.zeros((rows, width)), np.full(rows, count + 1),
                wide(np.tile(sampled, (len(tokens), 1))), laws(q if recorded is None else recorded), laws(p),
                replacement)


def children(drafts, row, node):
  return [c for c in range(1, drafts.size[row]) if drafts.parents[row, c] == node]


def answers(rule, drafts):
  """`rule(drafts, row)` of all rows: stop f64[B, T], next f64[B, T, V]."""
  stop, following = zip(*(rule(drafts, row) for row in range(len(drafts))), strict=True)
  return np.stack(stop), np.stack(following)


def accepted(stop, drafts):
  """The mean number of drafted tokens on the path, f64[B]."""
  depth = np.zeros(stop.shape, int)
  for node in range(1, stop.shape[1]):
    depth[:, node] = np.take_along_axis(depth, drafts.parents[:, node:node + 1], 1)[:, 0] + 1
  return (stop * depth).sum(-1)


def first_token(answer, drafts):
  """The law of the first emitted token of trees of depth 1: f64[B, V]."""
  stop, following = answer
  assert (drafts.parents == 0).all()
  law = stop[:, :1] * following[:, 0]
  for node in range(1, stop.shape[1]):
    np.add.at(law, (np.arange(len(law)), drafts.tokens[:, node]), stop[:, node])
  return law


def assert_same(got, wanted, atol=1e-12):
  np.testing.assert_allclose(got[0], wanted[0], atol=atol, rtol=0)
  np.testing.assert_allclose(got[0][..., None] * got[1], wanted[0][..., None] * wanted[1], atol=atol, rtol=0)
  np.testing.assert_allclose(got[1].sum(-1), 1, atol=1e-5)  # a law even where it is never asked


def _empty(drafts):
  width, vocabulary = drafts.p.shape[1:]
  return np.zeros(width), np.zeros((width, vocabulary))


def _left(weights, otherwise):
  return weights / weights.sum() if weights.sum() > 0 else otherwise


def _own(drafts, row, child, taken=()):
  """The law that a child was drawn from."""
  if not drafts.sampled[row, child]:
    return np.eye(drafts.p.shape[2])[drafts.tokens[row, child]]
  law = drafts.q[row, drafts.parents[row, child]].copy()
  law[list(taken)] = 0
  return _left(law, law)


def rejection(drafts, row, lenience=1.0):
  stop, following = _empty(drafts)
  reach, node = 1.0, 0
  while True:
    below = children(drafts, row, node)
    p = drafts.p[row, node]
    if not below:
      stop[node], following[node] = reach, p
      return stop, following
    law, token = _own(drafts, row, below[0]), drafts.tokens[row, below[0]]
    accept = min(1, p[token] / (lenience * law[token])) if law[token] > 0 else 0
    stop[node], following[node] = reach * (1 - accept), _left(np.maximum(p - law, 0), p)
    reach, node = reach * accept, below[0]


def block(drafts, row):
  stop, following = _empty(drafts)
  last = drafts.size[row] - 1
  b, passes = [1.0], []
  for node in range(last):
    law, p, token = _own(drafts, row, node + 1), drafts.p[row, node], drafts.tokens[row, node + 1]
    excess = np.maximum(b[-1] * p - law, 0)
    passes.append(1.0 if excess.sum() == 0 and b[-1] == 1 else excess.sum() / (excess.sum() + (1 - b[-1])))
    following[node] = _left(excess, p)
    b.append(min(1, b[-1] * p[token] / law[token]) if law[token] > 0 else 0.0)
  following[last] = drafts.p[row, last]
  passes.append(b[-1])
  passes[0] = 1.0
  failed = 1.0
  for node in range(last, -1, -1):  # the last that passes
    stop[node] = failed * passes[node]
    failed *= 1 - passes[node]
  return stop, following


def recursive(drafts, row):
  stop, following = _empty(drafts)

  def visit(node, reach):
    r, taken = drafts.p[row, node], []
    below = children(drafts, row, node)
    for child in sorted(below, key=lambda c: (not drafts.sampled[row, c], c)):
      law, token = _own(drafts, row, child, taken), drafts.tokens[row, child]
      accept = min(1, r[token] / law[token]) if law[token] > 0 else 0
      visit(child, reach * accept)
      reach *= 1 - accept
      r = _left(np.maximum(r - law, 0), r)
      if drafts.sampled[row, child] and not drafts.replacement:
        taken.append(token)
    stop[node], following[node] = reach, r

  visit(0, 1.0)
  return stop, following


def traversal(drafts, row):
  stop, following = _empty(drafts)

  def visit(node, a, arrives):
    """The chance that it comes back from `node` with nothing accepted."""
    r, taken = drafts.p[row, node], []
    for child in children(drafts, row, node):
      law, token = _own(drafts, row, child, taken), drafts.tokens[row, child]
      arrives = visit(child, min(1, a * r[token] / law[token]) if law[token] > 0 else 0, arrives)
      excess = np.maximum(a * r - law, 0)
      a = 1.0 if excess.sum() == 0 and a == 1 else excess.sum() / (excess.sum() + (1 - a))
      r = _left(excess, r)
      if drafts.sampled[row, child] and not drafts.replacement:
        taken.append(token)
    stop[node], following[node] = arrives * a, r
    return arrives * (1 - a)

  visit(0, 1.0, 1.0)
  return stop, following


def rho_of(p, q, k):
  beta = lambda rho: np.minimum(q, p / rho).sum()
  gap = lambda rho: 1 - (1 - min(beta(rho), 1)) ** k - rho * beta(rho)
  return 1.0 if k == 1 or gap(1.0) <= 0 else optimize.brentq(gap, 1.0, k, xtol=1e-14)


def k_seq(drafts, row):
  stop, following = _empty(drafts)

  def visit(node, reach):
    p, below = drafts.p[row, node], children(drafts, row, node)
    drawn = [c for c in below if drafts.sampled[row, c]]
    if drawn:
      q = drafts.q[row, node]
      rho = rho_of(p, q, len(drawn))
      kept = np.minimum(q, p / rho)
      for child in drawn:
        token = drafts.tokens[row, child]
        accept = min(1, p[token] / (rho * q[token])) if q[token] > 0 else 0
        visit(child, reach * accept)
        reach *= 1 - accept
      beta = kept.sum()
      left = np.maximum(p - kept * (1 - (1 - beta) ** len(drawn)) / beta, 0) if beta > 0 else p
      p = _left(left, p)
    # Points follow the new token's draw.
    p = p.copy()
    for child in (c for c in below if not drafts.sampled[row, c]):
      visit(child, reach * p[drafts.tokens[row, child]])
      p[drafts.tokens[row, child]] = 0
    stop[node], following[node] = reach * p.sum(), _left(p, drafts.p[row, node])

  visit(0, 1.0)
  return stop, following


def allowed(p, q):
  """What a cascade takes for q: the mass of ids that p forbids is p's."""
  inside = np.where(p > 0, q, 0)
  return inside + p * (1 - inside.sum())


def typical(drafts, row, epsilon=.09, alpha=.3):
  """The longest accepted path, the most probable among equals; the paths are walked one by one."""
  stop, following = _empty(drafts)
  best = (0, 1.0, 0)  # depth, chance, minus the node: the first of what is left wins

  def visit(node, depth, chance):
    nonlocal best
    best = max(best, (depth, chance, -node))
    p = drafts.p[row, node]
    seen = p[p > 0]
    bar = min(epsilon, alpha * np.exp((seen * np.log(seen)).sum()))
    for child in children(drafts, row, node):
      here = p[drafts.tokens[row, child]]
      if here > bar:
        visit(child, depth + 1, chance * here)

  visit(0, 0, 1.0)
  stop[-best[2]], following[:] = 1, drafts.p[row]
  return stop, following


def name(x):
  """What a test is called by in a list of rules, references and settings."""
  return getattr(x, "__name__", str(x))
