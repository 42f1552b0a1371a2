"""From records to `summary.json`: one group a (method, category, language) cell, counters pooled."""
import collections

import numpy as np

from experiments.harness import statistics
from specjax import counters as counters_lib

_COUNTED = ("steps", "output_tokens", "drafted_tokens", "accepted_tokens")
_PER_POSITION = ("drafted_per_position", "trials_per_position", "accepted_per_position")


def summarize(records: list[dict], baseline: str = "plain", *, costs=None, memory=None, gaps=None) -> dict:
  """The summary of a run.

  Args:
    records: lines of `requests.jsonl`.
    baseline: the method that speedups are relative to; without records of it they are null.
    costs: by (method, category, language) cell-independent method name, the step costs of `costs.step_costs`.
    memory: by method, `peak_memory_bytes`.
    gaps: by (id, turn, method), the top-2 logit gap where that text first differs from the baseline's.

  Returns:
    {"schema": 1, "groups": [...]}, fields of features that are not there yet null.
  """
  methods = list(dict.fromkeys(r["method"] for r in records))
  cells = {("all", "all"): records}
  for record in records:
    cells.setdefault((record["category"], "all"), []).append(record)
  languages = collections.defaultdict(set)
  for record in records:
    languages[record["category"]].add(record["language"])
  for record in records:
    if len(languages[record["category"]]) > 1:
      cells.setdefault((record["category"], record["language"]), []).append(record)
  groups = []
  for (category, language), members in cells.items():
    requests = {m: _by_request([r for r in members if r["method"] == m]) for m in methods}
    for method in methods:
      if requests[method]:
        groups.append({"method": method, "category": category, "language": language} |
                      _group(requests[method], requests.get(baseline, {}), method, baseline, costs or {}, memory or {},
                             gaps or {}))
  return {"schema": 1, "groups": groups}


def _by_request(records):
  """Records by request id, in order: repeats of one request stay together."""
  found = collections.defaultdict(list)
  for record in records:
    found[record["id"]].append(record)
  return found


def _group(requests, base, method, baseline, costs, memory, gaps):
  everything = [r for records in requests.values() for r in records]
  first = [r for r in everything if r["repeat"] == 0]  # repeats differ in time, not in text or counts
  totals = {name: sum(r["counters"][name] for r in first) for name in _COUNTED}
  totals |= {name: np.sum([r["counters"][name] for r in first], axis=0).tolist() for name in _PER_POSITION}
  times = {k: _tokens_and_seconds(v) for k, v in requests.items()}
  base_times = {k: _tokens_and_seconds(v) for k, v in base.items()}
  paired = [k for k in requests if k in base]
  compared = method != baseline and bool(paired)
  repeating = {k for k, records in (requests | base).items() if _repeated(records) >= statistics.REPEATING}
  pair = lambda keys: ([base_times[k] for k in keys], [times[k] for k in keys])
  greedy = all(r["temperature"] == 0 for r in first)
  step_ms = _step_ms(everything)
  plain_ms = _step_ms([r for records in base.values() for r in records])
  predicted = _predicted(first, costs.get(method), costs.get(baseline))
  return {
      "temperature": first[0]["temperature"], "batch_size": max(r["batch_size"] for r in first),
      "requests": len(requests), "prompt_tokens": sum(r["prompt_tokens"] for r in first),
  } | {k: totals[k] for k in _COUNTED if k != "output_tokens"} | {
      "output_tokens": totals["output_tokens"],
  } | counters_lib.ratios(totals) | {
      "tokens_per_second": float(np.divide(*np.sum(list(times.values()), axis=0))),
      "speedup": statistics.speedup(*pair(paired)) if compared else None,
      "speedup_interval": statistics.speedup_interval(*pair(paired)) if compared else None,
      "repeated_share": sum(statistics.repeated_tokens(r["token_ids"]) for r in first) / totals["output_tokens"],
      "speedup_without_repeats":
          statistics.speedup(*pair([k for k in paired if k not in repeating])) if compared else None,
      "time_to_first_token_ms": statistics.percentiles([r["time_to_first_token_ms"] for r in everything]),
      "time_per_output_token_ms": statistics.percentiles([r["time_per_output_token_ms"] for r in everything]),
      "latency_ms": statistics.percentiles([r["latency_ms"] for r in everything]),
      "step_ms": step_ms, "plain_step_ms": plain_ms,
      "verify_cost_ratio": step_ms / plain_ms if step_ms and plain_ms else None,
      "predicted_speedup": predicted if compared else None,
      "peak_memory_bytes": memory.get(method),
      "identical_to_plain": _identical(requests, base, paired) if greedy and compared else None,
      "first_difference_gap": max([gap for (key, _, m), gap in gaps.items() if m == method and key in requests],
                                  default=None),
      "quality": None,
  } | _costs_of(first, costs.get(method))


def _tokens_and_seconds(records):
  """(tokens, seconds) of one request: turns add up, repeats are represented by their median time."""
  turns = collections.defaultdict(list)
  for record in records:
    turns[record["turn"]].append(record)
  tokens = sum(len(t[0]["token_ids"]) for t in turns.values())
  return tokens, float(sum(np.median([r["seconds"] for r in t]) for t in turns.values()))


def _repeated(records):
  first = [r for r in records if r["repeat"] == 0]
  return sum(statistics.repeated_tokens(r["token_ids"]) for r in first) / max(1, sum(len(r["token_ids"]) for r in first))


def _step_ms(records):
  """Decode time over decode steps; the first step of each call is part of the time to the first token."""
  steps = sum(r["decode_steps"] for r in records)
  seconds = sum(r["decode_seconds"] for r in records)
  return seconds * 1e3 / steps if steps > 0 else None


def _identical(requests, base, paired):
  text = lambda records: {r["turn"]: r["token_ids"] for r in records if r["repeat"] == 0}
  return [sum(text(requests[k]) == text(base[k]) for k in paired), len(paired)]


def _costs_of(records, costs):
  """Draft, verify and commit time of a step, and what of the measured step they leave."""
  names = ("draft_ms", "verify_ms", "commit_ms", "other_ms", "utilization")
  if not costs:
    return dict.fromkeys(names)
  share = np.sum([r["counters"]["steps_per_width"] for r in records], axis=0)
  verify = float(np.dot(share, costs["verify_ms"]) / share.sum())
  measured = _step_ms(records)
  spent = costs["draft_ms"] + verify + costs["commit_ms"]
  return {"draft_ms": costs["draft_ms"], "verify_ms": verify, "commit_ms": costs["commit_ms"],
          "other_ms": measured - spent if measured else None, "utilization": costs.get("utilization")}


def _predicted(records, costs, base_costs):
  """Speedup of decoding (prefill apart) from tokens per step and separately measured costs."""
  if not costs or not base_costs:
    return None
  mine = _costs_of(records, costs)
  spent = lambda c: c["draft_ms"] + c["verify_ms"] + c["commit_ms"]
  base = base_costs["draft_ms"] + base_costs["verify_ms"][0] + base_costs["commit_ms"]
  tokens = sum(r["counters"]["output_tokens"] for r in records) / sum(r["counters"]["steps"] for r in records)
  return tokens * base / spent(mine)


