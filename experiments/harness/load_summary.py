"""What the runs of a load test say together: medians over rounds and ratios within rounds, by method and point."""
from typing import Any

import numpy as np

from experiments.harness import load_sweep
from specjax.serving import load_metrics
from specjax.serving import requests as requests_lib

SCHEMA = 1
KIND = "serve_load"
PLAIN = "plain"


def summarize(runs: list[dict], records: list[dict], sweep: load_sweep.Sweep, goodput: dict | None) -> dict[str, Any]:
  """`summary.json` of a load test.

  A point's `metrics`, `steady` and `engine` hold the median over rounds of every number of `load_metrics.summarize`,
  and `spread` the least and greatest of the first; counts of drafts are pooled. `speedup` is against plain decoding in
  the same round: throughput over plain's where the server sets the pace, plain's median latency over the method's
  where the clients do, taken in the steady window if every run has one (`basis`), else over whole runs.

  Args:
    runs: of `runs.json`, each with the method, point, round and metrics.
    records: of `requests.jsonl`.
    sweep: what was varied. goodput: limits, or None.
  """
  methods, values = (list(dict.fromkeys(run[name] for run in runs)) for name in ("method", "point"))
  methods.sort(key=lambda method: method != PLAIN)
  basis = "steady" if all(run["metrics"]["steady"] for run in runs) else "whole"
  points = []
  for method in methods:
    for value in sorted(values):
      own = [run for run in runs if (run["method"], run["point"]) == (method, value)]
      if own:
        points.append({"method": method, "point": value, "rounds": len(own)} | _point(own) | {
            "speedup": _speedup(own, runs, sweep.compares, basis),
            "identical_to_plain": _identical(method, value, records)})
  return {"schema": SCHEMA, "kind": KIND, "sweep": {"kind": sweep.kind, "unit": load_sweep.UNITS[sweep.kind],
                                                    "values": sorted(values)},
          "methods": methods, "compares": sweep.compares, "basis": basis, "goodput": goodput, "points": points,
          "break_even": {method: crossings([p for p in points if p["method"] == method]) for method in methods
                         if method != PLAIN}, "warnings": _warnings(runs)}


def crossings(points: list[dict]) -> list[dict]:
  """Where a method's speedup goes through 1, between two points: `at`, and whether drafting pays `below` or "above".

  Interpolated on a logarithmic scale of the load, since a batch's cost changes with its size by factors.
  """
  known = [(p["point"], p["speedup"]["median"]) for p in points if p["speedup"] and p["point"] > 0]
  found = []
  for (load, before), (next_load, after) in zip(known, known[1:]):
    if (before - 1) * (after - 1) < 0:
      share = (before - 1) / (before - after)
      found.append({"at": load * (next_load / load) ** share, "pays": "below" if before > 1 else "above"})
  return found


def _point(own):
  metrics = [run["metrics"] for run in own]
  steady, engine = ([m[name] for m in metrics if m[name]] for name in ("steady", "engine"))
  categories = dict.fromkeys(name for m in metrics for name in m["categories"])
  spread = {key: [min(values), max(values)] for key, values in _numbers(metrics).items()}
  return {
      "metrics": _medians(metrics) | _pooled(metrics), "spread": spread,
      "steady": _medians(steady) if len(steady) == len(own) else None, "engine": _medians(engine) or None,
      "categories": {name: _medians([m["categories"][name] for m in metrics if name in m["categories"]]) | _pooled(
          [m["categories"][name] for m in metrics if name in m["categories"]]) for name in categories}}


def _numbers(dicts):
  """By name, the numbers that are there."""
  found = {}
  for one in dicts:
    for key, value in one.items():
      if isinstance(value, int | float):
        found.setdefault(key, []).append(value)
  return found


def _medians(dicts):
  """Medians by name; None for what no round has a number of."""
  names = dict.fromkeys(key for one in dicts for key, value in one.items() if not isinstance(value, dict | list))
  return dict.fromkeys(names) | {key: float(np.median(values)) for key, values in _numbers(dicts).items()}


def _pooled(metrics):
  """The numbers of drafts, pooled over rounds."""
  if any(m["spec_decode_num_drafts"] is None for m in metrics):
    return load_metrics.speculation(None)
  return load_metrics.speculation([requests_lib.Speculation(
      steps=m["spec_decode_num_steps"] or 0, drafts=m["spec_decode_num_drafts"],
      drafted_tokens=m["spec_decode_draft_tokens"], accepted_tokens=m["spec_decode_accepted_tokens"],
      accepted_per_position=tuple(round(rate * m["spec_decode_num_drafts"]) for rate in
                                  m["spec_decode_per_position_acceptance_rates"] or ()),
      forced_tokens=m["spec_decode_forced_tokens"]) for m in metrics])


def _speedup(own, runs, compares, basis):
  """Of each round, and their median, least and greatest; None without plain decoding to compare with."""
  plain = {run["round"]: run for run in runs if run["method"] == PLAIN and run["point"] == own[0]["point"]}
  value = lambda run: (run["metrics"]["steady"] if basis == "steady" else run["metrics"])[compares]
  ratios = []
  for run in own:
    pair = [value(run), value(plain[run["round"]])] if run["round"] in plain else [None]
    if all(pair):
      ratio = pair[0] / pair[1]
      ratios.append(ratio if compares == "output_throughput" else 1 / ratio)
  if not ratios:
    return None
  return {"median": float(np.median(ratios)), "low": min(ratios), "high": max(ratios), "rounds": ratios}


def _identical(method, value, records):
  """[same, compared]: requests whose output is that of plain decoding in the same round; None without any to compare.

  Servers tell texts and no ids, so there texts are compared. Sampled texts are compared as well: point drafts and a
  seed give plain decoding's text at any temperature.
  """
  ended = lambda record: record.get("finish_reason") in (requests_lib.STOP, requests_lib.LENGTH)
  here = [r for r in records if r["point"] == value and ended(r)]
  key = lambda record: (record["round"], record["index"])
  plain = {key(r): r for r in here if r["method"] == PLAIN}
  pairs = [(r, plain[key(r)]) for r in here if r["method"] == method and key(r) in plain]
  if method == PLAIN or not pairs:
    return None
  return [sum((a["token_ids"], a["text"]) == (b["token_ids"], b["text"]) for a, b in pairs), len(pairs)]


def _warnings(runs):
  """What a reader must know before believing a number."""
  found, count = [], lambda test: sum(bool(test(run["metrics"])) for run in runs)
  failed = sum(run["metrics"]["failed"] for run in runs)
  if failed:
    found.append(f"{failed} requests failed or were refused: they are in no latency.")
  if compiled := count(lambda m: m["engine"] and m["engine"]["programs"]):
    found.append(f"In {compiled} of {len(runs)} runs programs were compiled as requests ran; their times include it.")
  if short := count(lambda m: not m["steady"]):
    found.append(f"{short} of {len(runs)} runs have no steady window: give more requests (--num_requests). Speedups "
                 "are of whole runs, ramp-up and drain included.")
  if thin := count(lambda m: m["steady"] and m["steady"]["duration"] < 0.25 * m["duration"]):
    found.append(f"In {thin} of {len(runs)} runs the steady window is less than a quarter of the time: give more "
                 "requests (--num_requests).")
  fewest = min((run["metrics"]["completed"] for run in runs), default=20)
  if fewest < 20:
    found.append("Some runs have fewer than 20 completed requests: their p95 and p99 are about the slowest one.")
  return found
