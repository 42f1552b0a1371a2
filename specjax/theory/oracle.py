"""The law of the text that a verifier makes of a drafter, exactly, against the target's own.

Exact mass is pushed through: for every draft outcome the verifier's `law` gives the mass of each (stop node, new
token); together these are a law over emitted prefixes. Each prefix is extended by the target's conditionals to D + 1
tokens and the result compared with the target's joint. A right rule gives rounding error; the almost-right rules in
`negatives` give a hundredth or more. Much stronger than statistics of samples, and cheap while V <= 5 and D <= 3.

Letters: R outcomes, T nodes, D depth, V vocabulary.
"""
import dataclasses
import functools

import jax
import numpy as np

from specjax import sampling
from specjax import tree as tree_lib
from specjax.theory import drafts
from specjax.theory import tables as tables_lib

_WIDTHS, _MANY = (4, 8, 16), 65  # node counts are padded to these, so that few programs compile; rows: see `_pad`


@dataclasses.dataclass(frozen=True)
class Result:
  """What came out. Laws have the shape [V] * (D + 1)."""
  law: np.ndarray           # f64[V, .., V]; of the first D + 1 tokens
  target: np.ndarray        # the same, of plain decoding
  expected_accepted: float  # drafted tokens that are accepted in a step

  @property
  def max_error(self) -> float:
    """Greatest difference of a text's probability from the target's."""
    return float(np.abs(self.law - self.target).max())

  @property
  def total_variation(self) -> float:
    """Between the law of the text and the target's."""
    return float(np.abs(self.law - self.target).sum() / 2)


@dataclasses.dataclass(frozen=True)
class Case:
  """A draft on tables under a setting, with all that does not depend on the verifier."""
  outcomes: drafts.Outcomes
  target: tuple[np.ndarray, ...]  # the target's law after every context
  tree: tree_lib.TokenTree        # the outcomes, padded
  p: np.ndarray                   # the target's law at every node, as a step computes it
  logits: np.ndarray              # before any processor
  params: sampling.SamplingParams  # batched: the temperature alone
  depth: int                      # static bound of the tree's depth
  dtype: type


def text_law(verifier, tables: tables_lib.Tables, draft, setting: tables_lib.Setting = tables_lib.Setting(),
             dtype=np.float64, distort=None) -> Result:
  """The law of the text over one step, exactly.

  Args:
    verifier: see `verifiers.base.Verifier`; only `law` is used (and `evidence`, where it has one).
    tables, draft, setting, dtype, distort: see `prepare`.

  Raises:
    ValueError: outcomes whose probabilities do not sum to 1, or see `judge`.
  """
  return judge(verifier, prepare(tables, draft.outcomes(tables, setting, dtype), setting, dtype, distort))


def prepare(tables: tables_lib.Tables, outcomes: drafts.Outcomes,
            setting: tables_lib.Setting = tables_lib.Setting(), dtype=np.float64, distort=None) -> Case:
  """Everything that verifiers share who judge the same outcomes.

  Args:
    tables: the target and the draft.
    outcomes: all that may be drafted, such as from `drafts.Draft.outcomes`.
    setting: prompt and parameters.
    dtype: float64 (under x64) or float32: what laws, pipeline and verifier compute in.
    distort: see `tables.tree_laws`.

  Raises:
    ValueError: a tree deeper than the tables.
  """
  rows, width = outcomes.tokens.shape
  padded = _pad(outcomes, tables.vocabulary)
  depth, context = padded.contexts()
  if depth[:rows, :width].max() > tables.depth:
    raise ValueError(f"the tree has depth {depth.max()}, the tables depth {tables.depth}: give deeper tables")
  logits = np.zeros((*padded.tokens.shape, tables.vocabulary))
  for d, table in enumerate(tables.target):
    logits = np.where((depth == d)[..., None], table[np.where(depth == d, context, 0)], logits)
  p = tables_lib.tree_laws(logits, padded.tokens, padded.parents, tables.depth, setting, dtype, distort)
  # What a rule may want to know beside p is the temperature; the rest would only be other programs.
  temperature = sampling.SamplingParams(temperature=np.asarray(setting.params.temperature).max())
  with jax.enable_x64(dtype == np.float64):
    return Case(outcomes=outcomes, target=tables_lib.conditionals(tables.target, setting, dtype=dtype),
                tree=padded.tree(dtype), p=p.astype(dtype), logits=logits.astype(dtype),
                params=tables_lib.batched(temperature, len(p), tables.vocabulary),
                depth=max(tables.depth, tables_lib.LEAST_DEPTH), dtype=dtype)


def judge(verifier, case: Case) -> Result:
  """The law of the text that `verifier` makes of a case.

  Raises:
    ValueError: outcomes whose probabilities do not sum to 1, or a verifier's stop that is not a law over valid nodes.
  """
  outcomes, vocabulary = case.outcomes, case.p.shape[-1]
  if abs(outcomes.probability.sum() - 1) > 1e-5:
    raise ValueError(f"the draft's outcomes have probability {outcomes.probability.sum():.9g} together; it must be 1")
  stop, following = laws(verifier, case)
  depth, context = outcomes.contexts()
  mass = outcomes.probability[:, None] * stop
  return Result(law=_extend(mass[..., None] * following, depth, context, case.target),
                target=tables_lib.joint(case.target).reshape([vocabulary] * len(case.target)),
                expected_accepted=float((mass * depth).sum()))


def laws(verifier, case: Case) -> tuple[np.ndarray, np.ndarray]:
  """What `verifier.law` says of each outcome: stop f64[R, T] and next f64[R, T, V].

  Raises:
    ValueError: a verifier's stop that is not a law over valid nodes.
  """
  outcomes = case.outcomes
  rows, width = outcomes.tokens.shape
  with jax.enable_x64(case.dtype == np.float64):
    stop, following = _law(verifier, case.depth, case.p, case.logits, case.tree, case.params)
    stop, following = (np.asarray(x, np.float64)[:rows, :width] for x in (stop, following))
  beyond = np.arange(width) >= outcomes.size[:, None]
  wrong = (np.abs(stop.sum(-1) - 1) + np.maximum(-stop, 0).sum(-1) + np.abs(np.where(beyond, stop, 0)).sum(-1))
  if not (wrong < 1e-5).all():
    raise ValueError(f"stop of {verifier} is not a law over the valid nodes: {stop[np.argmax(~(wrong < 1e-5))]}")
  return stop, following


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=tables_lib.CHEAP)
def _law(verifier, depth, p, logits, tree, params):
  evidence = verifier.evidence(logits, tree, params) if hasattr(verifier, "evidence") else {}
  return verifier.law(p, tree, depth, **evidence)


def _extend(mass, depth, context, target):
  """The law of D + 1 tokens, [V] * (D + 1), from `mass` f64[R, T, V] of (stop node, new token)."""
  vocabulary = target[0].shape[1]
  law = np.zeros(1)
  for d, conditional in enumerate(target):
    here = np.where(depth == d)
    emitted = np.zeros_like(conditional)
    np.add.at(emitted, context[here], mass[here])
    law = (law[:, None] * conditional + emitted).ravel()
  return law.reshape([vocabulary] * len(target))


def _pad(outcomes, vocabulary):
  """Outcomes and nodes filled up; the added nodes look like sampled children of the root, and are not valid."""
  rows, width = outcomes.tokens.shape
  more_nodes = min((w for w in _WIDTHS if w >= width), default=width) - width
  # Trees wider than the least have many outcomes under most rules, and get the rows for them under all.
  more_rows = tables_lib.few_sizes(rows if width <= _WIDTHS[0] else max(rows, _MANY)) - rows

  def pad(x, fill):
    x = np.concatenate([x, np.repeat(x[:1], more_rows, axis=0)])
    return np.pad(x, [(0, 0), (0, more_nodes)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)

  repeat = lambda x: np.concatenate([x, np.repeat(x[:1], more_rows, axis=0)])
  return dataclasses.replace(
      outcomes, tokens=pad(outcomes.tokens, vocabulary - 1), parents=pad(outcomes.parents, 0),
      size=repeat(outcomes.size), sampled=pad(outcomes.sampled, bool(outcomes.sampled.any())),
      probability=np.concatenate([outcomes.probability, np.zeros(more_rows)]), q=pad(outcomes.q, drafts.POISON))
