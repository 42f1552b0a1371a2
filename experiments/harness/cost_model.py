"""T(w, B, S) and the costs of drafts, measured on the run's own target, methods and texts: what `costs.json` holds.

All parts of all methods are timed in turns, behind a short and a long text of the run where these have other buckets of
slots, and times between are interpolated (`theory.speedup.StepTimes`). Drafts are timed behind several texts, each cut
at a random place of its output, because what a lookup finds, and what falls back on it, differs from text to text.

From these and from counts, the speedup of a cell is predicted. The prediction is scaled by how much longer plain steps
of the cell took in the run than alone, so that of the method's own decoding no time enters, only its number of steps.
"""
import numpy as np

from experiments.harness import costs as costs_lib
from specjax import drivers
from specjax.models import base as models
from specjax.theory import speedup
from specjax.verifiers import point

_TEXTS = 6  # behind which drafts are timed, for each length


def measure(target, methods: dict, records: list[dict], *, params=None, verifier=point.Point(),
            progress=lambda lengths: lengths) -> dict:
  """What `costs.json` holds.

  Args:
    target, methods: of the run, proposers by name. records: of the run: their texts and lengths.
    params, verifier: as in `drivers.generate`. progress: wraps the list of lengths that are gone through.

  Returns:
    {"schema": 1, "rows", "methods": by name what `costs.step_costs` returns, at the length that most requests have,
    with "by_slots": the same for each measured bucket, {"slots", "draft_ms", "commit_ms", "verify_ms"}}}.
  """
  rows = max(r["batch_size"] for r in records)
  room = 2 * max(p.max_depth for p in methods.values()) + 2
  peaks, found = costs_lib.device_peaks(), {name: [] for name in methods}
  lengths, usual = _lengths(target, records, room)
  for slots, texts in progress(sorted(lengths.items())):
    given = dict(rows=rows, params=params, verifier=verifier)
    timers = {(name, part): run for name, proposer in methods.items()
              for part, run in costs_lib.part_timers(target, proposer, texts[0], **given).items()}
    first = next(iter(methods))
    others = {(name, index): costs_lib.draft_timer(target, proposer, text, **given)
              for name, proposer in methods.items() for index, text in enumerate(texts[1:]) if proposer.max_nodes > 1}
    times = _pooled(costs_lib.interleaved(timers | others, (first, "verify 1")), methods)
    for name, proposer in methods.items():
      mine = {part: ms for (owner, part), ms in times.items() if owner == name}
      mine["draft"] = float(np.mean([mine["draft"], *(ms for part, ms in mine.items() if isinstance(part, int))]))
      found[name].append({"slots": slots} | costs_lib.described(mine, target, proposer, rows, peaks))
  at = sorted(lengths).index(usual)
  parts = ("slots", "draft_ms", "commit_ms", "verify_ms")
  return {"schema": 1, "rows": rows, "methods": {
      name: {key: value for key, value in each[at].items() if key != "slots"} |
            {"by_slots": [{part: one[part] for part in parts} for one in each]} for name, each in found.items()}}


def step_ms(costs: dict, records: list[dict], draft_ms: float | None = None) -> float:
  """Milliseconds of the decoding steps of `records` by their parts: widths as counted, each at the record's length.

  Args:
    costs: of a method. draft_ms: of a draft, where it was timed in the run.
  """
  by_slots = costs.get("by_slots") or [{"slots": 0} | costs]
  times = speedup.StepTimes(speedup.Point(width, 1, one["slots"], ms) for one in by_slots
                            for width, ms in zip(costs["widths"], one["verify_ms"]))
  places = [one["slots"] for one in by_slots]
  each = lambda name, slots: float(np.interp(slots, places, [one[name] for one in by_slots]))
  total = 0.0
  for record in records:
    slots = _slots(record)
    share = np.asarray(record["counters"]["steps_per_width"], float)
    verify = share @ [times.ms(width, 1, slots) for width in costs["widths"]] / share.sum()
    draft = each("draft_ms", slots) if draft_ms is None else draft_ms
    total += record["decode_steps"] * (draft + each("commit_ms", slots) + verify)
  return total


def predicted(requests: list[list[dict]], base: list[list[dict]], costs: dict | None, base_costs: dict | None,
              draft_ms=lambda records, costs: None) -> float | None:
  """The predicted speedup of a cell: the measured time to the first token of each arm, then plain steps as measured and
  the method's steps by their parts, on the scale of the plain ones.

  Args:
    requests, base: records by request, of the method and of plain decoding on the same requests.
    costs, base_costs: of both. draft_ms: of (records, costs), where drafts were timed in the run.
  """
  if not requests or not costs or not base_costs:
    return None
  ours, plain = ([r for records in arm for r in records if r["repeat"] == 0] for arm in (requests, base))
  tokens = lambda arm: sum(len(r["token_ids"]) for r in arm)
  # Rows share their batch's time: what is not decoding is prefill and the first step.
  first = lambda arm: sum((r["seconds"] - r["decode_seconds"]) * 1e3 for r in arm)
  decoding = sum(r["decode_seconds"] for r in plain) * 1e3
  alone = step_ms(base_costs, plain, draft_ms(plain, base_costs))
  scale = decoding / alone if alone > 0 and decoding > 0 else 1.0
  spent = first(ours) + scale * step_ms(costs, ours, draft_ms(ours, costs))
  return (first(plain) + decoding) / tokens(plain) / (spent / tokens(ours))


def prediction_error(groups: list[dict]) -> dict | None:
  """How far predicted speedups are from measured ones over all (method, request type) cells: |predicted / measured -
  1|, {"median", "p90", "cells"}; None without a cell that has both. Pooled cells and languages of a type are left
  out."""
  cells = [g for g in groups if g["category"] != "all" and g["language"] == "all" and g["speedup"]
           and g["predicted_speedup"]]
  if not cells:
    return None
  errors = [abs(g["predicted_speedup"] / g["speedup"] - 1) for g in cells]
  return {"median": float(np.median(errors)), "p90": float(np.percentile(errors, 90)), "cells": len(cells)}


def _pooled(times, methods):
  """A pass of the target costs the same whoever drafted: the median over methods, of those that read the same layers.
  Not of those that hand over hidden states, whose pass begins further up."""
  alike = lambda name: (methods[name].features, methods[name].node_ids, getattr(methods[name], "exit_layer", None))
  groups = {}
  for (name, part), ms in times.items():
    if str(part).startswith("verify"):
      groups.setdefault((alike(name), part), []).append(ms)
  return {(name, part): float(np.median(groups.get((alike(name), part), [ms]))) for (name, part), ms in times.items()}


def _slots(record):
  return drivers.bucket(record["prompt_tokens"] + len(record["token_ids"]) // 2, 1 << 30)


def _lengths(target, records, room):
  """By bucket of slots, up to `_TEXTS` texts of it, of the usual bucket and the longest; and the usual one."""
  if models.encodes(target):
    length = int(np.median([r["prompt_tokens"] + len(r["token_ids"]) // 2 for r in records]))
    ids = records[0]["prompt_ids"] + records[0]["token_ids"]
    length = max(2, min(length, target.max_inputs))
    return {0: [(ids * (length // len(ids) + 1))[:length]]}, 0
  rng, plain = np.random.default_rng(0), records[0]["method"]
  found = {}
  for record in records:
    if record["method"] == plain and record["repeat"] == 0:
      cut = int(rng.integers(0, len(record["token_ids"]) + 1))
      text = (record["prompt_ids"] + record["token_ids"][:cut])[:target.max_context - room]
      found.setdefault(drivers.bucket(len(text), target.max_context), []).append(text if len(text) > 1 else text * 2)
  usual = max(found, key=lambda slots: len(found[slots]))
  picked = lambda texts: [texts[i] for i in np.linspace(0, len(texts) - 1, min(_TEXTS, len(texts))).astype(int)]
  return {slots: picked(found[slots]) for slots in {usual, max(found)}}, usual
