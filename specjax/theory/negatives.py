"""Rules that look right and are not, each with its right twin; an oracle that misses one of them is no oracle.

Every entry of `NEGATIVES` is a mistake that was made in print, in a released engine, or on the way here. `wrong(rules)`
gives its greatest error in the probability of a text, `right(rules)` that of the same thing done properly; `rules` is
`specjax.verifiers`, or anything with its names.
"""
import dataclasses
from typing import Any, Callable

import jax.numpy as jnp
import numpy as np

from specjax import constraints
from specjax import sampling
from specjax.theory import drafts
from specjax.theory import draws
from specjax.theory import oracle
from specjax.theory import tables as tables_lib
from specjax.theory import worlds
from specjax.theory import wrong_rules

_CHAIN = (0, 0, 1)


@dataclasses.dataclass(frozen=True)
class Negative:
  """A mistake and its right twin; see the module."""
  name: str
  wrong: Callable[[Any], float]
  right: Callable[[Any], float]


def argmax_with_softmax(rules, honest: bool = False) -> float:
  """The argmax of q drafted, and verified as if it had been drawn from q."""
  argmax = drafts.named("argmax", (0, 0))
  return _error(rules.Rejection(), tables_lib.toy("A", 1), argmax if honest else wrong_rules.WithRawQ(argmax))


def truncated_with_raw(rules, honest: bool = False) -> float:
  """Drawn from the two most probable tokens, and verified with q over all of them."""
  top = drafts.Draft(drafts.iid, (0, 0), sampling.SamplingParams(temperature=1.0, top_k=2))
  return _error(rules.Rejection(), tables_lib.toy("A", 1), top if honest else wrong_rules.WithRawQ(top))


def block_without_cap(rules, honest: bool = False) -> float:
  """Block verification whose last position passes with the uncapped product of ratios."""
  del rules
  return _error(wrong_rules.Block(capped=honest), tables_lib.toy("B", 2), drafts.named("iid", _CHAIN))


def first_residual(rules, honest: bool = False) -> float:
  """After all siblings are rejected, the new token comes from what the first of them left."""
  del rules
  return _error(wrong_rules.Siblings(last_residual=honest), tables_lib.toy("C", 1),
                drafts.named("iid", (0, 0, 0)))


def bonus_unprocessed(rules, honest: bool = False) -> float:
  """The token behind the whole draft is drawn from the raw softmax, without the temperature of the request."""
  rule = rules.Rejection() if honest else wrong_rules.RawBonus(rules.Rejection())
  setting = tables_lib.Setting(sampling.SamplingParams(temperature=0.5))
  return _error(rule, tables_lib.random_tables(3, 3, 2), drafts.named("iid", _CHAIN), setting)


def penalty_late(rules, honest: bool = False) -> float:
  """Penalties count the path without its newest token."""
  late = lambda prefixes: prefixes.replace(mask=prefixes.mask & ~jnp.eye(prefixes.mask.shape[1], dtype=bool))
  setting = tables_lib.Setting(sampling.SamplingParams(temperature=1.0, presence_penalty=1.0), prompt=(1, 0))
  return oracle.text_law(rules.Rejection(), tables_lib.random_tables(3, 3, 2), drafts.named("iid", _CHAIN), setting,
                         distort=None if honest else late).max_error


def grammar_stands_still(rules, honest: bool = False) -> float:
  """Every node is masked as the pending token is, instead of along its own path."""
  still = lambda prefixes: prefixes.replace(allowed=jnp.broadcast_to(prefixes.allowed[:, :1], prefixes.allowed.shape))
  # From state 0 ids 0 and 1 are allowed, from state 1 ids 1 and 2.
  grammar = lambda vocabulary: constraints.Automaton(jnp.asarray([[0, 1, -1], [-1, 0, 1]], jnp.int32))
  setting = tables_lib.Setting(sampling.SamplingParams(temperature=1.0), constraint=grammar)
  return oracle.text_law(rules.Rejection(), tables_lib.random_tables(3, 3, 2), drafts.named("iid", _CHAIN), setting,
                         distort=None if honest else still).max_error


def dropped_by_own_token(rules, honest: bool = False) -> float:
  """A drafted token is not verified because of what it is; with p = q = (.6, .4), (.84, .16) comes out."""
  law = (.6, .4)
  draw = drafts.named("iid", (0, 0))
  return _error(rules.Rejection(), tables_lib.context_free(law, law, 1),
                draw if honest else wrong_rules.WithoutToken(draw, token=1))


def hierarchy_by_rounds(rules, honest: bool = False) -> float:
  """A drafter that is itself speculative hands on what one inner round accepted, instead of a number of tokens."""
  return _error(rules.Rejection(), tables_lib.random_tables(4, 3, 2),
                wrong_rules.Hierarchy("tokens" if honest else "accepted", gamma=2))


def shared_key(rules, honest: bool = False) -> float:
  """The same key draws the first drafted token and decides about it."""
  real = worlds.real_schedule()
  schedule = real if honest else worlds.drafts_like_stops(real)
  return worlds.text_law(rules.Rejection(), tables_lib.toy("B", 5), 2, schedule).max_error


def noise_by_position(rules, honest: bool = False) -> float:
  """Block verification of draft noise that is keyed by the drafted position, over two steps."""
  real = worlds.real_schedule()
  schedule = real if honest else worlds.drafts_by_position(real)
  return worlds.text_law(rules.Block(), tables_lib.toy("B", 5), 2, schedule).max_error


def accepts_at_zero(rules, honest: bool = False) -> float:
  """`u <= p / q` with u = 0 accepts a token that the target forbids."""
  rule = rules.Rejection() if honest else wrong_rules.AcceptsAtZero()
  return _drawn_against_law(rule, rules.Rejection(), drafts.named("iid", (0, 0)))


def inverts_to_banned(rules, honest: bool = False) -> float:
  """Inversion that takes the first id whose cumulative sum is *not below* u draws a banned id 0 at u = 0."""
  rule = rules.Point() if honest else wrong_rules.LooseInversion()
  return _drawn_against_law(rule, rules.Point(), drafts.named("argmax", (0,)))


_ALL = (argmax_with_softmax, truncated_with_raw, block_without_cap, first_residual, bonus_unprocessed, penalty_late,
        grammar_stands_still, dropped_by_own_token, hierarchy_by_rounds, shared_key, noise_by_position,
        accepts_at_zero, inverts_to_banned)
NEGATIVES = tuple(Negative(rule.__name__, rule, lambda rules, rule=rule: rule(rules, honest=True)) for rule in _ALL)


def _error(verifier, tables, draft, setting=tables_lib.Setting()):
  return oracle.text_law(verifier, tables, draft, setting).max_error


def _drawn_against_law(rule, lawful, draft):
  """The greatest share of draws of `rule` that the law of `lawful` says never happen, on a grid of 64 uniforms from 0
  on; the target forbids id 0."""
  tables = tables_lib.context_free((0, .5, .5), (.5, .25, .25), 1)
  outcomes = draft.outcomes(tables, tables_lib.Setting(), np.float32)
  case = oracle.prepare(tables, outcomes, dtype=np.float32)
  stop, following = oracle.laws(lawful, case)
  rows, width = outcomes.tokens.shape
  made = draws.draw_law(rule, jnp.asarray(case.logits[:rows, :width]), outcomes.tree(np.float32),
                        tables_lib.batched(tables_lib.Setting().params, rows, tables.vocabulary), tables.depth,
                        np.arange(64) / 64)
  return float(np.where(stop[..., None] * following > 0, 0, made).max())
