"""Shapes of trees that are chosen once, on the host, from how often each child turns out to be the accepted one.

An *acceptance vector* gives that frequency by rank: entry r is the probability that of a node's children the one of
rank r is accepted (Sequoia, arXiv 2402.12374); a *table* has a row for each depth (Medusa, arXiv 2401.10774: how often
the token of rank r of head d is right). A node is then reached with the product of the entries on its path, and a step
emits the sum of these products over the tree, the new token included.

Where entries do not increase with the rank, the nodes of the greatest products are a tree already, and the best one of
its size: so trees are grown best node first, and Sequoia's dynamic program is what tests compare them with. Best-first
trees list their nodes in the order of their worth: the first n of them are the best tree of n nodes.

Letters: T nodes (root included), D greatest depth, K ranks.
"""
from collections.abc import Mapping, Sequence
import heapq
from typing import NamedTuple

import numpy as np
from numpy import typing as npt


class Shape(NamedTuple):
  """A tree without tokens. Siblings stand in the order of their ranks."""
  parents: tuple[int, ...]  # T; parents[0] == 0, parents[i] < i
  ranks: tuple[int, ...]    # T; the place of each node among its siblings, 0 for the first and for the root


class Level(NamedTuple):
  """The nodes of one level that have children: what a drafter has to run over, and what it then drafts."""
  nodes: tuple[int, ...]     # N; in order
  counts: tuple[int, ...]    # N; how many children each has, 1 or more
  children: tuple[int, ...]  # sum of counts; the children, node by node, siblings in order


def best_first(acceptance: npt.ArrayLike, nodes: int, max_depth: int) -> Shape:
  """The best tree of at most `nodes` nodes, the root included, and `max_depth` levels below it.

  Optimal where acceptance does not increase with the rank; else it is Medusa's greedy tree, which adds the best of all
  next siblings and first children. Smaller than `nodes` where no node is left that would ever be reached.

  Args:
    acceptance: f[K] by rank, or f[D, K] by depth and rank; a table of fewer than `max_depth` rows bounds the depth.
    nodes: T, 1 or more. max_depth: D, 0 or more.
  """
  _check_bounds(nodes, max_depth)
  table = _table(acceptance, max_depth)
  parents, ranks, depths, values = [], [], [], []
  waiting = [(-1.0, 0, 0, 0)]  # minus the value, depth, parent, rank: equal ones by depth, then in order
  while waiting and len(parents) < nodes:
    value, depth, parent, rank = heapq.heappop(waiting)
    node = len(parents)
    for column, entry in zip((parents, ranks, depths, values), (parent, rank, depth, -value)):
      column.append(entry)
    neighbours = [(depth + 1, node, 0)] if node == 0 else [(depth, parent, rank + 1), (depth + 1, node, 0)]
    for level, above, place in neighbours:
      if level <= len(table) and place < table.shape[1]:
        value = values[above] * table[level - 1, place]
        if value > 0:
          heapq.heappush(waiting, (-value, level, above, place))
  return Shape(tuple(parents), tuple(ranks))


def fixed(branching: Sequence[int]) -> Shape:
  """Level by level, every node of a level with the same number of children: (3, 2, 1) has 1 + 3 + 6 + 6 nodes."""
  if not branching or min(branching) < 1:
    raise ValueError(f"branching={tuple(branching)}: it takes a number of children, 1 or more, for every level")
  parents, ranks, level = [0], [0], [0]
  for count in branching:
    first = len(parents)
    parents += [node for node in level for _ in range(count)]
    ranks += list(range(count)) * len(level)
    level = range(first, len(parents))
  return Shape(tuple(parents), tuple(ranks))


def of_paths(paths: Sequence[Sequence[int]]) -> Shape:
  """The tree of the nodes at `paths`, each the ranks on the way to it: how SafeAILab and Medusa write trees.

  A node's parent and earlier siblings come before it.
  """
  nodes = {(): 0}
  for path in map(tuple, paths):
    needed = [path[:-1], *([(*path[:-1], path[-1] - 1)] if path and path[-1] else [])]
    if not path or path in nodes or any(other not in nodes for other in needed):
      raise ValueError(f"path {path}: each is there once, behind its parent and the sibling of the rank above")
    nodes[path] = len(nodes)
  return Shape(tuple(nodes[path[:-1]] for path in nodes), tuple(path[-1] if path else 0 for path in nodes))


def sequoia(acceptance: npt.ArrayLike, max_nodes: int, max_depth: int, draft_cost: float,
            verify_costs: Mapping[int, float]) -> Shape:
  """The best-first tree of the least cost a token, over all sizes and depths; only the root if no draft pays.

  Args:
    acceptance: as in `best_first`.
    max_nodes: the greatest T. max_depth: the greatest D.
    draft_cost: of one pass of the drafter, which a level takes.
    verify_costs: measured cost of a target pass by its width, in the same unit; a tree is verified in the least width
      that holds it.
  """
  _check_bounds(max_nodes, max_depth)
  options = [best_first(acceptance, min(width, max_nodes), depth)
             for depth in range(max_depth + 1) for width in sorted(verify_costs)]
  return min(options, key=lambda shape: cost_per_token(shape, acceptance, draft_cost, verify_costs))


def cost_per_token(shape: Shape, acceptance: npt.ArrayLike, draft_cost: float,
                   verify_costs: Mapping[int, float]) -> float:
  """(levels * draft_cost + verify cost) / `expected_tokens` of a tree; arguments as in `sequoia`."""
  size = len(shape.parents)
  widths = [width for width in verify_costs if width >= size]
  if not widths or min(verify_costs.values()) <= 0 or draft_cost < 0:
    raise ValueError(f"draft_cost={draft_cost}, verify_costs={dict(verify_costs)}: needed are a draft cost of 0 or "
                     f"more and positive costs by width, one of them of a width that holds {size} nodes")
  cost = int(depths(shape.parents).max()) * draft_cost + verify_costs[min(widths)]
  return cost / expected_tokens(*shape, acceptance)


def expected_tokens(parents: Sequence[int], ranks: Sequence[int], acceptance: npt.ArrayLike) -> float:
  """Tokens that a step with this tree is expected to emit, the new one included: one more than it accepts.

  `acceptance` as in `best_first`; 0 beyond its ranks and, for a table, its depths.
  """
  levels = depths(parents)
  table = _table(acceptance, int(levels.max()))
  values = np.ones(len(parents))
  for node in range(1, len(parents)):
    inside = levels[node] <= len(table) and ranks[node] < table.shape[1]
    values[node] = values[parents[node]] * table[levels[node] - 1, ranks[node]] if inside else 0
  return float(values.sum())


def depths(parents: Sequence[int]) -> np.ndarray:
  """i32[T]; 0 at the root. Raises ValueError where a parent does not come before its children."""
  out = np.zeros(len(parents), np.int32)
  if not len(parents) or any(not 0 <= parent < max(node, 1) for node, parent in enumerate(parents)):
    raise ValueError(f"parents={tuple(parents)}: a parent comes before its children, and parents[0] is 0")
  for node in range(1, len(parents)):
    out[node] = out[parents[node]] + 1
  return out


def levels(parents: Sequence[int]) -> tuple[Level, ...]:
  """The passes of a drafter that fill the tree, root first: D of them. Nodes without children are in none."""
  deep, family = depths(parents), {}
  for node in range(1, len(parents)):
    family.setdefault(parents[node], []).append(node)
  out = []
  for depth in range(int(deep.max())):
    nodes = tuple(node for node in sorted(family) if deep[node] == depth)
    out.append(Level(nodes=nodes, counts=tuple(len(family[node]) for node in nodes),
                     children=tuple(child for node in nodes for child in family[node])))
  return tuple(out)


def _check_bounds(nodes, max_depth):
  if nodes < 1 or max_depth < 0:
    raise ValueError(f"nodes={nodes}, max_depth={max_depth}: needed are 1 node, the root, or more, and a depth of 0 or "
                     "more")


def _table(acceptance, max_depth):
  """f[D, K], checked; a vector is the same at every depth."""
  table = np.asarray(acceptance, np.float64)
  if table.ndim not in (1, 2) or not table.size or not np.all(table >= 0) or (table.sum(-1) > 1 + 1e-6).any():
    raise ValueError(f"acceptance={table.tolist()}: it must be probabilities by rank, or by depth and rank, with a "
                     "sum over ranks of at most 1, as at most one child of a node is accepted")
  return np.broadcast_to(table, (max_depth, table.shape[0])) if table.ndim == 1 else table[:max_depth]


# EAGLE-1's tree for all its heads (SafeAILab/EAGLE `choices.py`, mc_sim_7b_63): 25 drafted nodes, 5 levels.
EAGLE = of_paths([
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0, 0), (0, 0, 1),
    (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)])
