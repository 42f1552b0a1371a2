"""What the rules of advice read, from records of a method and of plain decoding on the tuning half of a kind."""
import os

import jax
import numpy as np

from experiments.harness import advice_rules
from experiments.harness import settings
from specjax import counters as counters_lib
from specjax import drivers

_SLOTS = 1024  # of a cache, where memory is stated


def of(arm, kind: tuple[str, str], records: list[dict], plain: list[dict], others: list[list[dict]], *, target,
       proposer, step_ms: float, times, draft_ms: float, held_out: int, lookup: bool) -> advice_rules.Facts:
  """The facts of an arm on a kind.

  Args:
    arm: its method is read. records, plain: of the arm and of plain decoding. others: of the arm in other languages.
    target, proposer: measured ones. step_ms, draft_ms: of its step and of a draft. times: `speedup.StepTimes`.
    held_out: requests of the other half. lookup: whether drafts are looked up.
  """
  ratios, rates = _ratios(records), [_ratios(each)["acceptance_rate"] for each in others]
  steps = sum(r["counters"]["steps"] for r in records)
  conditional = ratios["conditional_per_position"]
  model, plain_ms = not lookup, times.ms(1)
  return advice_rules.Facts(
      method=arm.method, category=kind[0], language=kind[1], requests=held_out,
      tokens_per_step=ratios["tokens_per_step"], tokens_needed=step_ms / plain_ms,
      first_acceptance=conditional[0] if conditional else None,
      acceptance=ratios["acceptance_rate"], other_acceptance=max([r for r in rates if r is not None], default=None),
      draft_share=draft_ms / max(1, proposer.max_depth) / plain_ms,
      prefill_share=sum(r["seconds"] - r["decode_seconds"] for r in plain) / sum(r["seconds"] for r in plain),
      plain_ms=plain_ms, temperature=settings.TEMPERATURE.value, sampled=proposer.samples, lookup=lookup, model=model,
      layers=_layers(proposer, target),
      beyond_context=sum(r["counters"]["steps_beyond_draft_context"] for r in records) / max(1, steps),
      memory_bytes=memory_bytes(target, proposer), free_bytes=free_bytes(), nodes=proposer.max_nodes,
      ridge=times.ridge(), experts=_experts(target))


def memory_bytes(target, proposer) -> int:
  """Of a proposer's weights and its state for one row of 1024 tokens, or of the target's context if that is less."""
  slots = drivers.bucket(min(_SLOTS, target.max_context), target.max_context)
  return size(proposer) + size(jax.eval_shape(lambda: proposer.init(target, 1, slots)))


def size(tree) -> int:
  """Bytes of all leaves."""
  described = (x if hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(tree))
  return int(sum(x.size * x.dtype.itemsize for x in described))


def free_bytes() -> int | None:
  """Of the device's memory, or of the host's where that is the device; None where neither says."""
  stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
  if stats and "bytes_limit" in stats:
    return stats["bytes_limit"] - stats["bytes_in_use"]
  try:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  except (ValueError, OSError):
    return None


def _ratios(records):
  total = lambda name: sum(r["counters"][name] for r in records)
  position = lambda name: np.sum([r["counters"][name] for r in records], axis=0).tolist()
  return counters_lib.ratios({name: total(name) for name in ("steps", "output_tokens", "drafted_tokens",
                                                             "accepted_tokens", "strayed")} |
                             {name: position(name) for name in ("drafted_per_position", "trials_per_position",
                                                                "accepted_per_position")})


def _layers(proposer, target):
  """Layers of a draft model and of its target; None for drafters that are no model of their own."""
  ours, theirs = (getattr(getattr(model, "config", None), "layers", None)
                  for model in (getattr(proposer, "model", None), target))
  return (ours, theirs) if isinstance(ours, int) and isinstance(theirs, int) else None


def _experts(target):
  routing = getattr(target, "routing", None)
  return None if routing is None else (routing.experts, routing.chosen)
