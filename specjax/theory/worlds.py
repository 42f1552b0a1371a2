"""Two steps in a row under a key schedule, exactly: what an oracle of one step cannot see.

Equal keys are the same uniform, in whichever step they are used. A draw by inversion of a law tells only in which
interval its uniform lies; so a *world* is what is known of every uniform, an interval a label, and a draw splits the
world into one a possible token. A draw from a known uniform splits what is left of its interval. The probability of a
world is the product of its intervals. Labels are the key data of the real keys, so a schedule that uses a key twice
shows as one that does.

Draws of drafted tokens are taken by inversion here; real drafters may race exponentials, with the same keys.
"""
import collections
import dataclasses
import functools
import itertools
from typing import Callable, Hashable

import jax
import numpy as np

from specjax import keys
from specjax import sampling
from specjax import tree as tree_lib
from specjax.theory import drafts
from specjax.theory import oracle
from specjax.theory import tables as tables_lib

Draw = Callable[[Hashable, np.ndarray], int]  # (label, law f64[V]) -> drawn index
_LEAST = 1e-14  # intervals below this are rounding


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Which key a draw uses; the root is a position, a drafted token's index counts from 1. Labels are key data."""
  draft: Callable[[int, int], Hashable]  # (root, index)
  stop: Callable[[int], Hashable]        # (root)
  residual: Callable[[int], Hashable]    # (root)
  token: Callable[[int], Hashable]       # (position of the token)


def enumerate_worlds(program: Callable[[Draw], Hashable]) -> dict[Hashable, float]:
  """The law of what `program(draw)` returns: every sequence of draws is tried, each uniform revealed as far as needed.

  Args:
    program: calls `draw(label, law)`, which returns an index; otherwise deterministic.
  """
  law, todo = collections.Counter(), [()]
  while todo:
    world = _World(todo.pop())
    outcome = program(world.draw)
    law[outcome] += world.probability()
    todo.extend(world.others)
  return dict(law)


class _World:
  """One sequence of draws: the given choices first, then the least possible ones, remembering what else there was."""

  def __init__(self, choices):
    self._given, self._made, self._known, self.others = choices, (), {}, []

  def draw(self, label, law):
    low, high = self._known.get(label, (0.0, 1.0))
    edges = np.concatenate([[0.0], np.cumsum(law)]) / np.sum(law)
    below, above = np.maximum(edges[:-1], low), np.minimum(edges[1:], high)
    possible = np.nonzero(above - below > _LEAST)[0]
    if len(self._made) < len(self._given):
      choice = self._given[len(self._made)]
    else:
      choice = int(possible[0])
      self.others += [(*self._made, int(other)) for other in possible[1:]]
    self._made += (choice,)
    self._known[label] = (below[choice], above[choice])
    return choice

  def probability(self):
    return float(np.prod([high - low for low, high in self._known.values()]))


def label(key: jax.Array) -> bytes:
  """What tells one key from another."""
  return bytes(np.asarray(jax.random.key_data(key)))


def real_schedule(row: jax.Array | None = None) -> Schedule:
  """The schedule of `keys` for one row, with the key `row`; which keys a step really uses, a test records."""
  row = jax.random.key(0) if row is None else row
  step = functools.cache(lambda root, purpose, index: label(keys.step_key(row, root, purpose, index)))
  token = functools.cache(lambda position: label(keys.position_key(row, position, keys.TOKEN)))
  return Schedule(draft=lambda root, index: step(root, keys.DRAFT, index), stop=lambda root: step(root, keys.STOP, 0),
                  residual=lambda root: step(root, keys.RESIDUAL, 0), token=token)


def drafts_by_position(schedule: Schedule) -> Schedule:
  """Wrong: the noise of a drafted token is keyed by its position, so it returns in the next step."""
  return dataclasses.replace(schedule, draft=lambda root, index: schedule.draft(root + index, 0))


def drafts_like_stops(schedule: Schedule) -> Schedule:
  """Wrong: the first drafted token and the place where the path ends come from one key."""
  return dataclasses.replace(schedule, draft=lambda root, index: (
      schedule.stop(root) if index == 1 else schedule.draft(root, index)))


def text_law(verifier, tables: tables_lib.Tables, gamma: int, schedule: Schedule, steps: int = 2) -> oracle.Result:
  """The law of the text over `steps` steps that each draft a chain of `gamma` tokens.

  A verifier that draws with the purposes STOP and RESIDUAL gets tokens drawn from q, and its `law` is used. One that
  draws the TOKEN at a position gets the argmax of q as points, and its `draw` decides: from a uniform a node, in the
  middle of those that draw the token that the world chose there.

  Args:
    verifier: see `verifiers.base.Verifier`. tables: of depth `steps * (gamma + 1) - 1` at least.
    gamma: drafted tokens a step. schedule: which key a draw uses.
  """
  setting = tables_lib.Setting()
  target = tables_lib.conditionals(tables.target, setting)
  number = lambda tokens: _number(tokens, tables.vocabulary)
  behind = functools.cache(lambda text: _chain_laws(verifier, tables, text, gamma))
  points = functools.cache(lambda text: _point_verdicts(verifier, tables, target, text, gamma))

  def step(draw, text):
    root, drafted = len(text), ()
    if keys.TOKEN in verifier.purposes:
      drafted, p, verdicts = points(text)
      accepted, token = verdicts[tuple(draw(schedule.token(root + 1 + node), law) for node, law in enumerate(p))]
      return (*text, *drafted[:accepted], token)
    laws, q = behind(text)
    for index in range(1, gamma + 1):
      drafted += (draw(schedule.draft(root, index), q[len(drafted)][number(drafted)]),)
    stop, following = laws[drafted]
    accepted = draw(schedule.stop(root), stop)
    return (*text, *drafted[:accepted], draw(schedule.residual(root), following[accepted]))

  def program(draw):
    text = ()
    for _ in range(steps):
      text = step(draw, text)
    return text

  law, emitted, accepted = np.zeros(1), enumerate_worlds(program), 0.0
  for d, conditional in enumerate(target):
    mass = np.zeros(conditional.size)
    for text, probability in emitted.items():
      if len(text) == d + 1:
        mass[number(text)] += probability
        accepted += probability * (len(text) - steps) / steps
    law = (law[:, None] * conditional).ravel() + mass
  shape = [tables.vocabulary] * (tables.depth + 1)
  return oracle.Result(law.reshape(shape), tables_lib.joint(target).reshape(shape), accepted)


def _chain_laws(verifier, tables, text, gamma):
  """Behind a text: {drafted: (stop f64[T], next f64[T, V])}, and the draft's own laws."""
  below = tables.behind(text, gamma)
  q = tables_lib.conditionals(below.draft, tables_lib.Setting())
  chain = drafts.named("iid", (0, *range(gamma)))
  outcomes = chain.outcomes(below, tables_lib.Setting())
  stop, following = oracle.laws(verifier, oracle.prepare(below, outcomes))
  drafted = [tuple(map(int, row)) for row in outcomes.tokens[:, 1:]]
  return dict(zip(drafted, zip(stop, following, strict=True), strict=True)), q


def _point_verdicts(verifier, tables, target, text, gamma):
  """Behind a text: the argmax chain, the target's laws at its nodes f64[T, V], and what `verifier.draw` makes of every
  combination of tokens drawn at the nodes: {(token, ..): (accepted, new token)}."""
  vocabulary, drafted = tables.vocabulary, ()
  at = lambda table: table[len(text) + len(drafted)][_number((*text, *drafted), vocabulary)]
  logits, p = [], []
  for _ in range(gamma + 1):
    logits.append(at(tables.target))
    p.append(at(target))
    drafted += (int(np.argmax(at(tables.draft))),)
  drafted, p = drafted[:gamma], np.stack(p)
  drawn = np.array(list(itertools.product(range(vocabulary), repeat=gamma + 1)))
  middle = np.cumsum(p, axis=-1) - p / 2
  uniforms = middle[np.arange(gamma + 1), drawn].astype(np.float32)
  spread = lambda x, dtype: np.tile(np.asarray(x, dtype), (len(drawn), *[1] * np.ndim(x)))
  parents = np.maximum(np.arange(gamma + 1) - 1, 0)
  tree = tree_lib.TokenTree(tokens=spread((0, *drafted), np.int32), parents=spread(parents, np.int32),
                            size=spread(gamma + 1, np.int32))
  accepted, token = _draw(verifier, gamma, spread(np.stack(logits), np.float32), tree,
                          tables_lib.batched(tables_lib.Setting().params, len(drawn), vocabulary), uniforms)
  verdicts = zip(np.asarray(accepted).tolist(), np.asarray(token).tolist(), strict=True)
  return drafted, p, dict(zip(map(tuple, drawn.tolist()), verdicts, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(verifier, depth, logits, tree, params, uniforms):
  verdict = verifier.draw(logits, tree, params, np.int32(sampling.TEMPERATURE), keys.Uniforms(token=uniforms), depth)
  return verdict.accepted, verdict.token


def _number(tokens, vocabulary):
  return functools.reduce(lambda sofar, token: sofar * vocabulary + token, tokens, 0)
