"""What a run counts. Numerators and denominators are kept; ratios are derived, pooled, and null when undefined.

Only emitted tokens count: a draft that was accepted behind a stop counts for nobody.

Letters: B batch rows, D greatest depth.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import expert_counters


@struct.dataclass
class Counters:
  """Per row, so that pooling is a sum over rows."""
  steps: jax.Array                 # i32[B]; verify passes that the row took part in
  output_tokens: jax.Array         # i32[B]
  drafted_tokens: jax.Array        # i32[B]; valid drafted nodes that were verified
  accepted_tokens: jax.Array       # i32[B]; drafted tokens that were emitted
  drafted_per_position: jax.Array  # i32[B, D]; steps whose draft reached depth d + 1
  trials_per_position: jax.Array   # i32[B, D]; those of them that emitted a token there, drafted or new
  accepted_per_position: jax.Array  # i32[B, D]; those of them that emitted the draft
  steps_per_width: jax.Array       # i32[B, W]; steps verified at each width
  strayed: jax.Array               # f32[B]; sum over steps of a lossy verifier's bound, see `ratios`
  steps_beyond_draft_context: jax.Array  # i32[B]; steps in which the text was too long for the drafter
  experts: expert_counters.ExpertCounters | None = None  # of a target with mixtures of experts


def zero_counters(rows: int, depth: int, widths: int, routing=None) -> Counters:
  """Counters of a batch at its start; `routing` is that of `models.base.Routing`."""
  zeros = lambda *shape: jnp.zeros((rows, *shape), jnp.int32)
  return Counters(steps=zeros(), output_tokens=zeros(), drafted_tokens=zeros(), accepted_tokens=zeros(),
                  drafted_per_position=zeros(depth), trials_per_position=zeros(depth),
                  accepted_per_position=zeros(depth), steps_per_width=zeros(widths),
                  strayed=jnp.zeros((rows,), jnp.float32), steps_beyond_draft_context=zeros(),
                  experts=None if routing is None else expert_counters.zero(rows, widths, routing))


def count_step(counters: Counters, *, active: jax.Array, drafted: jax.Array, reach: jax.Array, accepted: jax.Array,
               emitted: jax.Array, strayed: jax.Array, width_index: jax.Array,
               beyond: jax.Array | bool = False, loads: jax.Array | None = None) -> Counters:
  """Adds one step.

  Args:
    counters: so far.
    active: bool[B], rows that take part.
    drafted: i32[B], valid drafted nodes. reach: i32[B], depth of the deepest.
    accepted: i32[B], drafted tokens on the accepted path. emitted: i32[B], tokens that are let out after the cut.
    strayed: f32[B], of the verdict.
    width_index: i32, which width the step was verified at.
    beyond: bool[B], rows whose text is too long for the drafter.
    loads: i32[B, L, X], see `expert_counters.count`; with counters of experts only.
  """
  accepted = jnp.minimum(accepted, emitted)
  position = jnp.arange(counters.drafted_per_position.shape[1])[None]
  width = jnp.arange(counters.steps_per_width.shape[1])[None]
  experts = counters.experts
  if experts is not None:
    experts = expert_counters.count(experts, active=active, nodes=drafted + 1, loads=loads, width_index=width_index)
  add = lambda total, value: total + jnp.where(active.reshape(-1, *[1] * (total.ndim - 1)), value, 0).astype(jnp.int32)
  return Counters(
      steps=add(counters.steps, 1),
      output_tokens=add(counters.output_tokens, emitted),
      drafted_tokens=add(counters.drafted_tokens, drafted),
      accepted_tokens=add(counters.accepted_tokens, accepted),
      drafted_per_position=add(counters.drafted_per_position, position < reach[:, None]),
      trials_per_position=add(counters.trials_per_position, position < jnp.minimum(reach, emitted)[:, None]),
      accepted_per_position=add(counters.accepted_per_position, position < accepted[:, None]),
      steps_per_width=add(counters.steps_per_width, width == width_index),
      strayed=counters.strayed + jnp.where(active, strayed, 0),
      steps_beyond_draft_context=add(counters.steps_beyond_draft_context, beyond),
      experts=experts)


def ratios(totals: dict) -> dict:
  """Ratios of pooled counts, under the names of the result schema; a ratio without a denominator is None.

  Args:
    totals: the fields of `Counters` summed over rows and requests, as numbers and lists.

  Returns:
    tokens_per_step (output tokens over verify passes, the new token included), acceptance_rate (accepted over
    drafted), accepted_per_position (over all steps that drafted), conditional_per_position (over the steps whose
    draft reached that position and whose earlier positions were all accepted), and total_variation_bound (of a token's
    law to the target's, the mean over output tokens: 0 for a lossless verifier; times its length it bounds a text's).
  """
  divide = lambda a, b: float(a) / float(b) if b else None
  accepted = np.asarray(totals["accepted_per_position"], np.int64)
  trials = np.asarray(totals["trials_per_position"], np.int64)
  drafting = int(totals["drafted_per_position"][0]) if accepted.size else 0
  return {
      "tokens_per_step": divide(totals["output_tokens"], totals["steps"]),
      "acceptance_rate": divide(totals["accepted_tokens"], totals["drafted_tokens"]),
      "accepted_per_position": [divide(a, drafting) for a in accepted] if drafting else None,
      "conditional_per_position": [divide(a, t) for a, t in zip(accepted, trials)] if drafting else None,
      "total_variation_bound": divide(totals["strayed"], totals["output_tokens"]),
  }
