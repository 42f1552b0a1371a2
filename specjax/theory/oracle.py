"""The law of the text that a verifier makes of a drafter, exactly, against the target's own.

Exact mass is pushed through: for every draft outcome the verifier's `law` gives the mass of each (stop node, new token);
together these are a law over emitted prefixes. Each prefix is extended by the target's conditionals to D + 1 tokens and
the result compared with the target's joint. A right rule gives rounding error; the almost-right rules in `negatives`
give a hundredth or more. Much stronger than statistics of samples, and cheap while V <= 5 and D <= 3.

Letters: R outcomes, T nodes, D depth, V vocabulary.
"""
import dataclasses
import functools

import jax
import numpy as np

from specjax import sampling
from specjax.theory import drafts
from specjax.theory import tables as tables_lib

# Node counts are padded to these and this is the least depth that a verifier is told, so that few programs compile.
_WIDTHS = (4, 8, 16)
_DEPTH = 3


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


def text_law(verifier, tables: tables_lib.Tables, draft, setting: tables_lib.Setting = tables_lib.Setting(),
             dtype=np.float64, distort=None) -> Result:
  """The law of the text over one step, exactly.

  Args:
    verifier: see `verifiers.base.Verifier`; only `law` is used (and `evidence`, where it has one).
    tables: the target and the draft.
    draft: anything with `outcomes(tables, setting, dtype) -> drafts.Outcomes`, such as `drafts.Draft`.
    setting: prompt and parameters.
    dtype: float64 (under x64) or float32: what laws, pipeline and verifier compute in.
    distort: see `tables.tree_laws`.

  Raises:
    ValueError: outcomes whose probabilities do not sum to 1.
  """
  target = tables_lib.conditionals(tables.target, setting, dtype=dtype)
  outcomes = draft.outcomes(tables, setting, dtype)
  stop, following = outcome_laws(verifier, tables, outcomes, setting, dtype, distort)
  depth, context = outcomes.contexts()
  mass = outcomes.probability[:, None] * stop
  if abs(outcomes.probability.sum() - 1) > 1e-5:
    raise ValueError(f"the draft's outcomes have probability {outcomes.probability.sum():.9g} together; it must be 1")
  return Result(law=_extend(mass[..., None] * following, depth, context, target),
                target=tables_lib.joint(target).reshape([tables.vocabulary] * (tables.depth + 1)),
                expected_accepted=float((mass * depth).sum()))


def outcome_laws(verifier, tables: tables_lib.Tables, outcomes: drafts.Outcomes,
                 setting: tables_lib.Setting = tables_lib.Setting(), dtype=np.float64,
                 distort=None) -> tuple[np.ndarray, np.ndarray]:
  """What `verifier.law` says of each outcome: stop f64[R, T] and next f64[R, T, V].

  Raises:
    ValueError: a tree deeper than the tables, or a verifier's stop that is not a law over valid nodes.
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
  with jax.enable_x64(dtype == np.float64):
    # What a rule may want to know beside p is the temperature; the rest would only be other programs.
    temperature = sampling.SamplingParams(temperature=np.asarray(setting.params.temperature).max())
    params = tables_lib.batched(temperature, len(p), tables.vocabulary)
    stop, following = _law(verifier, max(tables.depth, _DEPTH), p.astype(dtype), logits.astype(dtype),
                           padded.tree(dtype), params)
    stop, following = (np.asarray(x, np.float64)[:rows, :width] for x in (stop, following))
  beyond = np.arange(width) >= outcomes.size[:, None]
  if not (np.abs(stop.sum(-1) - 1) < 1e-4).all() or stop.min() < -1e-6 or np.abs(stop[beyond]).sum() > 1e-6:
    raise ValueError(f"stop of {verifier} is not a law over the valid nodes: {stop[np.argmax(np.abs(stop.sum(-1) - 1))]}")
  return stop, following


@functools.partial(jax.jit, static_argnums=(0, 1))
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
  more_rows = tables_lib.few_sizes(rows) - rows
  more_nodes = min((w for w in _WIDTHS if w >= width), default=width) - width

  def pad(x, fill):
    x = np.concatenate([x, np.repeat(x[:1], more_rows, axis=0)])
    return np.pad(x, [(0, 0), (0, more_nodes)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)

  repeat = lambda x: np.concatenate([x, np.repeat(x[:1], more_rows, axis=0)])
  return dataclasses.replace(
      outcomes, tokens=pad(outcomes.tokens, vocabulary - 1), parents=pad(outcomes.parents, 0),
      size=repeat(outcomes.size), sampled=pad(outcomes.sampled, bool(outcomes.sampled.any())),
      probability=np.concatenate([outcomes.probability, np.zeros(more_rows)]), q=pad(outcomes.q, drafts.POISON))
