"""Draft rules that say everything they may draft: all outcomes with their probabilities, for the oracle.

A rule draws the nodes of a shape in their order. For each it is told q at the parent, what the earlier siblings are,
and the node's place; it returns the law of the token, whether the node counts as drawn, and the law that the tree
records at the parent. It never sees p, the verifier's uniforms, or a later node, which is all that losslessness asks of
a drafter.

Letters: R outcomes, T nodes, D depth, V vocabulary, K ids of a sparse law.
"""
import dataclasses
from typing import Callable, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import draft_laws
from specjax import sampling
from specjax import tree as tree_lib
from specjax.theory import tables as tables_lib

POISON = 9.0  # stands where no verifier may look


@dataclasses.dataclass(frozen=True)
class Outcomes:
  """Everything a rule may draft, a row an outcome."""
  tokens: np.ndarray       # i32[R, T]; column 0 is the pending token
  parents: np.ndarray      # i32[R, T]
  size: np.ndarray         # i32[R]
  probability: np.ndarray  # f64[R]
  sampled: np.ndarray      # bool[R, T]
  q: np.ndarray            # f64[R, T, V]; POISON at nodes without sampled children
  replacement: bool = True
  sparse: bool = False
  draws: bool = True       # whether the rule draws at all: its trees have a q, even where nothing was drafted

  def contexts(self) -> tuple[np.ndarray, np.ndarray]:
    """Depth of every node i32[R, T], and its context i64[R, T]: the tokens behind the root, as a number."""
    context, row = np.zeros(self.tokens.shape, np.int64), np.arange(len(self.tokens))
    for node in range(1, self.tokens.shape[1]):
      context[:, node] = context[row, self.parents[:, node]] * self.q.shape[-1] + self.tokens[:, node]
    return depths(self.parents), context

  def tree(self, dtype) -> tree_lib.TokenTree:
    """The trees as a verifier gets them; a rule that never draws gives no q at all."""
    arrays = dict(tokens=jnp.asarray(self.tokens), parents=jnp.asarray(self.parents), size=jnp.asarray(self.size))
    if not self.draws:
      return tree_lib.TokenTree(**arrays)
    law = draft_laws.DenseLaw(jnp.asarray(self.q, dtype))
    if self.sparse:
      # Unused places name id 0 again, with probability 0.
      ids = np.argsort(-self.q, axis=-1, kind="stable")
      probs = np.take_along_axis(self.q, ids, axis=-1)
      law = draft_laws.SparseLaw(jnp.asarray(np.where(probs > 0, ids, 0), jnp.int32), jnp.asarray(probs, dtype))
    return tree_lib.TokenTree(**arrays, sampled=jnp.asarray(self.sampled), q=law, replacement=self.replacement)


def depths(parents) -> np.ndarray:
  """Depth of every node, i32[.., T], from the parents i32[.., T] of trees whose parents come first."""
  depth = np.zeros(np.shape(parents), np.int32)
  for node in range(1, depth.shape[-1]):
    above = np.asarray(parents)[..., node:node + 1]
    depth[..., node] = np.take_along_axis(depth, above, axis=-1)[..., 0] + 1
  return depth


class Place(NamedTuple):
  """Where a node stands in its shape."""
  node: int
  rank: int   # among its siblings
  count: int  # of children that its parent has


class Sibling(NamedTuple):
  """An earlier sibling in every outcome."""
  tokens: np.ndarray   # i32[R]
  sampled: np.ndarray  # bool[R]


# (place, q at the parent f64[R, V], earlier siblings) -> law of the token f64[R, V], sampled bool[R], and the law that
# is recorded at the parent f64[R, V]
Rule = Callable[[Place, np.ndarray, list[Sibling]], tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Draft:
  """A rule on a shape.

  Attributes:
    rule: see the functions below. parents: the shape, a parent a node.
    params: the draft's own temperature and filters.
    sparse: record q over its own ids only.
    replacement: as in `TokenTree`.
    stop_below: a node whose parent's greatest q is below it gets no children; which nodes there are then depends on
      their ancestors, and differs from row to row.
  """
  rule: Rule
  parents: tuple[int, ...]
  params: sampling.SamplingParams = sampling.SamplingParams(temperature=1.0)
  sparse: bool = False
  replacement: bool = True
  stop_below: float = 0.0

  def outcomes(self, tables: tables_lib.Tables, setting: tables_lib.Setting, dtype=np.float64) -> Outcomes:
    """All that may be drafted from these tables."""
    laws = tables_lib.conditionals(tables.draft, setting, self.params, dtype)
    return enumerate_drafts(self.rule, self.parents, laws, setting.prompt[-1], self.replacement, self.sparse,
                            self.stop_below)


def enumerate_drafts(rule: Rule, parents: tuple[int, ...], laws: tuple[np.ndarray, ...], pending: int,
                     replacement: bool = True, sparse: bool = False, stop_below: float = 0.0) -> Outcomes:
  """All outcomes of `rule`; `laws` f64[V ** d, V] are the draft's after every context, see `tables.conditionals`."""
  width, vocabulary = len(parents), laws[0].shape[1]
  depth = depths(parents)
  tokens, context = np.full((1, width), pending, np.int32), np.zeros((1, width), np.int64)
  sampled, recorded = np.zeros((1, width), bool), np.full((1, width, vocabulary), POISON)
  probability, there = np.ones(1), np.ones((1, width), bool)
  for node in range(1, width):
    parent = parents[node]
    family = [i for i in range(1, width) if parents[i] == parent]
    q = laws[depth[parent]][context[:, parent]]
    there[:, node] = there[:, parent] & (q.max(-1) >= stop_below)
    siblings = [Sibling(tokens[:, i], sampled[:, i]) for i in family if i < node]
    law, drawn, kept = rule(Place(node, len(siblings), len(family)), q, siblings)
    drawn = drawn & there[:, node]
    recorded[:, parent] = np.where(drawn[:, None], kept, recorded[:, parent])
    law = np.where(there[:, node, None], law, np.eye(vocabulary)[0])  # a node that is not there splits nothing
    row, token = np.nonzero(law > 0)
    probability = probability[row] * law[row, token]
    tokens, context, sampled, recorded, there = tokens[row], context[row], sampled[row], recorded[row], there[row]
    tokens[:, node], sampled[:, node] = token, drawn[row]
    context[:, node] = context[:, parent] * vocabulary + token
  # The nodes that are there come first; the others are left behind them as poison.
  order = np.argsort(~there, axis=1, kind="stable")
  take = lambda x: np.take_along_axis(x, order, axis=1)
  place = np.argsort(order, axis=1, kind="stable")  # where each node went
  moved = np.take_along_axis(place, np.asarray(parents)[order], axis=1)
  return Outcomes(tokens=take(tokens), parents=np.where(take(there), moved, 0).astype(np.int32),
                  size=there.sum(1).astype(np.int32), probability=probability, sampled=take(sampled),
                  q=np.take_along_axis(recorded, order[..., None], axis=1), replacement=replacement, sparse=sparse,
                  draws=rule not in (point, repeated, top_k))


def point(place, q, siblings):
  """Arbitrary tokens, chosen by the node alone."""
  del siblings
  return _points(q, np.full(len(q), (2 * place.node + 1) % q.shape[1]))


def repeated(place, q, siblings):
  """Arbitrary tokens, the second sibling equal to the first."""
  return point(place._replace(node=place.node - (place.rank == 1)), q, siblings)


def top_k(place, q, siblings):
  """The most probable tokens in order, as points; on a chain the argmax."""
  del siblings
  ranked = np.argsort(-q, axis=-1, kind="stable")
  return _points(q, ranked[:, min(place.rank, q.shape[1] - 1)])


def iid(place, q, siblings):
  """Every node from q, whatever its siblings are."""
  del place, siblings
  return q, np.ones(len(q), bool), q


def without_replacement(place, q, siblings):
  """Every node from what the earlier siblings left of q; where nothing is left, a point that repeats the first."""
  del place
  return _draw(q, _without(q, [s for s in siblings if s.sampled.any()]), q, siblings)


def greedy_multi(place, q, siblings):
  """All but the last child are q's most probable tokens, as points; the last is drawn from the rest.

  Hu et al., "Towards optimal multi-draft speculative decoding" (ICLR 2025, arXiv 2502.18779).
  """
  if place.rank < place.count - 1:
    return top_k(place, q, siblings)
  rest = _without(q, siblings)
  return _draw(q, rest, _normalised(rest), siblings)


def mixture(place, q, siblings):
  """Points and draws beside and below each other: of three nodes the first is the argmax, the others are drawn."""
  return (top_k if _is_point(place) else iid)(place, q, siblings)


def mixture_without_replacement(place, q, siblings):
  """The same with draws without replacement: points take nothing out of q."""
  return (top_k if _is_point(place) else without_replacement)(place, q, siblings)


_TRUNCATED = sampling.SamplingParams(temperature=0.7, top_k=2)
_KINDS = {
    "point": dict(rule=point),
    "repeated": dict(rule=repeated),
    "argmax": dict(rule=top_k),
    "top_k": dict(rule=top_k),
    "iid": dict(rule=iid),
    "without_replacement": dict(rule=without_replacement, replacement=False),
    "truncated": dict(rule=iid, params=_TRUNCATED),
    "truncated_without_replacement": dict(rule=without_replacement, params=_TRUNCATED, replacement=False),
    "greedy_multi": dict(rule=greedy_multi),
    "mixture": dict(rule=mixture),
    "mixture_without_replacement": dict(rule=mixture_without_replacement, replacement=False),
    "ragged": dict(rule=iid, stop_below=0.5),
    "ragged_without_replacement": dict(rule=without_replacement, replacement=False, stop_below=0.5),
    "ragged_point": dict(rule=top_k, stop_below=0.5),
}
NAMES = tuple(_KINDS)
POINTS = ("point", "repeated", "argmax", "top_k", "ragged_point")  # those without any sampled node


def named(name: str, parents: tuple[int, ...], *, sparse: bool = False) -> Draft:
  """One of `NAMES` on a shape."""
  return Draft(parents=tuple(parents), sparse=sparse, **_KINDS[name])


def _is_point(place):
  return place.node % 3 == 1


def _points(q, token):
  return np.eye(q.shape[1])[token], np.zeros(len(q), bool), q


def _draw(q, rest, recorded, siblings):
  # Whether a draw is possible depends on how many were made and on q's support, not on what was drawn.
  mass = rest.sum(-1)
  if (mass > 0).all():
    return _normalised(rest), np.ones(len(q), bool), recorded
  first = np.eye(q.shape[1])[siblings[0].tokens]
  return np.where((mass > 0)[:, None], _normalised(rest), first), mass > 0, recorded


def _without(q, siblings):
  left = q.copy()
  for sibling in siblings:
    left[np.arange(len(q)), sibling.tokens] = 0
  return left


def _normalised(weights):
  mass = weights.sum(-1, keepdims=True)
  return weights / np.where(mass > 0, mass, 1)
