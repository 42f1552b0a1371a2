"""From records to `summary.json`: one group a (method, category, language) cell, counters pooled."""
import collections

import numpy as np

from experiments.harness import breakdown
from experiments.harness import cost_model
from experiments.harness import statistics
from specjax import counters as counters_lib
from specjax import expert_counters
from specjax.theory import experts as experts_theory

_COUNTED = ("steps", "output_tokens", "drafted_tokens", "accepted_tokens", "strayed", "steps_beyond_draft_context")
_PER_POSITION = ("drafted_per_position", "trials_per_position", "accepted_per_position")


def summarize(records: list[dict], baseline: str = "plain", *, costs=None, memory=None, gaps=None,
              routing=None, widths=None, expert_cost=None, windows=(), quality=None) -> dict:
  """The summary of a run.

  Args:
    records: lines of `requests.jsonl`.
    baseline: the method that speedups are relative to; without records of it they are null.
    costs: by method, what `costs.step_costs` returns, or the "methods" of `cost_model.measure`.
    memory: by method, `peak_memory_bytes`.
    gaps: by (id, turn, method), the top-2 logit gap where that text first differs from the baseline's.
    routing: of the target, see `models.base.Routing`; None without mixtures of experts.
    widths: by method, the widths that its passes run at; with `routing` only.
    expert_cost: what `expert_costs.measure` returns; with `routing` only.
    windows: of the target's layers, tokens or None each; () without any.
    quality: a `quality.registry.Judged` of the records.

  Returns:
    {"schema": 1, "groups": [...], "prediction_error": see `cost_model`}, fields of what was not measured null.
  """
  methods = list(dict.fromkeys(r["method"] for r in records))
  languages = collections.defaultdict(set)
  for record in records:
    languages[record["category"]].add(record["language"])
  cells = {}
  for record in records:
    rows = record["batch_size"]  # the last batch of a category may be smaller: a cell of its own
    names = {("all", "all"): None, (record["category"], "all"): None}  # each cell once, even for a category "all"
    if len(languages[record["category"]]) > 1:
      names[record["category"], record["language"]] = None
    for name in names:
      cells.setdefault((*name, rows), []).append(record)
  groups = []
  for (category, language, _), members in cells.items():
    requests = {m: _by_request([r for r in members if r["method"] == m]) for m in methods}
    for method in methods:
      if requests[method]:
        groups.append({"method": method, "category": category, "language": language} |
                      _group(requests[method], requests.get(baseline, {}), method, baseline, costs or {}, memory or {},
                             gaps or {}, quality) |
                      {"experts": _experts(requests[method], routing, (widths or {}).get(method)),
                       "windows": _windows(requests[method], windows)})
        if routing is not None and (category, language) == ("all", "all"):
          groups[-1]["experts"]["cost"] = expert_cost
  return {"schema": 1, "groups": groups, "prediction_error": cost_model.prediction_error(groups)}


def _by_request(records):
  """Records by request id, in order: repeats of one request stay together."""
  found = collections.defaultdict(list)
  for record in records:
    found[record["id"]].append(record)
  return found


def _group(requests, base, method, baseline, costs, memory, gaps, quality):
  everything = [r for records in requests.values() for r in records]
  first = [r for r in everything if r["repeat"] == 0]  # repeats differ in time, not in text or counts
  totals = {name: sum(r["counters"].get(name, 0) for r in first) for name in _COUNTED}
  totals |= {name: np.sum([r["counters"][name] for r in first], axis=0).tolist() for name in _PER_POSITION}
  greedy = all(r["temperature"] == 0 for r in first)
  step_ms = _step_ms(everything)
  plain_ms = _step_ms([r for records in base.values() for r in records])
  return {
      "temperature": first[0]["temperature"], "batch_size": first[0]["batch_size"], "requests": len(requests),
      "prompt_tokens": sum(r["prompt_tokens"] for r in first),
      "reused_tokens": sum(r.get("reused_tokens", 0) for r in first), "output_tokens": totals["output_tokens"],
      "steps": totals["steps"], "drafted_tokens": totals["drafted_tokens"],
      "accepted_tokens": totals["accepted_tokens"],
      "steps_beyond_draft_context": totals["steps_beyond_draft_context"], "verifier": first[0]["verifier"],
      "lossless": first[0]["lossless"],
  } | counters_lib.ratios(totals) | {
      "tokens_per_second": float(np.divide(*np.sum([tokens_and_seconds(v) for v in requests.values()], axis=0))),
      "repeated_share": sum(statistics.repeated_tokens(r["token_ids"]) for r in first) / totals["output_tokens"],
      "time_to_first_token_ms": statistics.percentiles([r["time_to_first_token_ms"] for r in everything]),
      "time_per_output_token_ms": statistics.percentiles([r["time_per_output_token_ms"] for r in everything]),
      "latency_ms": statistics.percentiles(_latencies(requests)),
      "step_ms": step_ms, "plain_step_ms": plain_ms,
      "verify_cost_ratio": step_ms / plain_ms if step_ms and plain_ms else None,
      "peak_memory_bytes": memory.get(method),
      "identical_to_plain": _identical(requests, base) if greedy and method != baseline and base else None,
      "first_difference_gap": max([gap for (key, _, m), gap in gaps.items() if m == method and key in requests],
                                  default=None),
      "quality": quality and quality.pooled(everything, [] if method == baseline else [
          r for records in base.values() for r in records]),
  } | _encoder(everything) | breakdown.of(first) \
    | _speedups(requests, base if method != baseline else {}, costs.get(method), costs.get(baseline)) \
    | _costs_of(first, costs.get(method), step_ms)


def _encoder(records):
  """Of a target with an encoder: its milliseconds a request and its share of all time, also by length of the inputs:
  the power of two below, from 16. Null for others."""
  spent = lambda some: sum(r.get("encode_seconds", 0) for r in some)
  if not spent(records):
    return dict.fromkeys(("encoder_ms", "encoder_share", "encoder_share_by_inputs"))
  by_length = collections.defaultdict(list)
  for record in records:
    by_length[1 << max(4, record["prompt_tokens"].bit_length() - 1)].append(record)
  share = lambda some: spent(some) / sum(r["seconds"] for r in some)
  return {"encoder_ms": spent(records) * 1e3 / len(records), "encoder_share": share(records),
          "encoder_share_by_inputs": {str(length): share(by_length[length]) for length in sorted(by_length)}}


def _experts(requests, routing, widths):
  """See `expert_counters.summarize`; each width beside what tokens that choose at random would go through."""
  if routing is None:
    return None
  first = [r["counters"] for records in requests.values() for r in records if r["repeat"] == 0]
  totals = {name: np.sum([c["experts"][name] for c in first], axis=0) for name in first[0]["experts"]}
  found = expert_counters.summarize(totals, routing, widths, sum(c["output_tokens"] for c in first))
  for row in found["by_width"]:
    row["at_random"] = experts_theory.expected_distinct(routing.experts, routing.chosen, row["nodes"])
  return found


def _windows(requests, windows):
  """Of a target with windows: layers that have one, of how many, the windows' tokens, and the share of output tokens
  that were written behind more tokens than the least of them holds. None for others."""
  sizes = sorted({window for window in windows if window is not None})
  if not sizes:
    return None
  first = [r for records in requests.values() for r in records if r["repeat"] == 0]
  # Before output token j stand as many tokens as the prompt has, and j.
  beyond = sum(max(0, min(len(r["token_ids"]), r["prompt_tokens"] + len(r["token_ids"]) - 1 - sizes[0])) for r in first)
  return {"layers": sum(window is not None for window in windows), "of_layers": len(windows), "tokens": sizes,
          "beyond": beyond / max(1, sum(len(r["token_ids"]) for r in first))}


def _speedups(requests, base, costs, base_costs):
  """Measured and predicted speedup over the baseline, on the requests that both have."""
  paired = [k for k in requests if k in base]
  repeats = lambda k: max(map(_repeated, (requests[k], base[k]))) >= statistics.REPEATING
  pair = lambda keys: ([tokens_and_seconds(base[k]) for k in keys], [tokens_and_seconds(requests[k]) for k in keys])
  # Rows of a batch share its time, so it is batches that are drawn again.
  units = collections.defaultdict(list)
  for key in paired:
    units[requests[key][0]["batch"]].append(key)
  pooled = [[np.sum(side, axis=0) for side in pair(keys)] for keys in units.values()]
  return {
      "speedup": statistics.speedup(*pair(paired)),
      "speedup_interval": statistics.speedup_interval([a for a, _ in pooled], [b for _, b in pooled]),
      "decode_speedup": _decode_rate([requests[k] for k in paired], [base[k] for k in paired]),
      "speedup_without_repeats": statistics.speedup(*pair([k for k in paired if not repeats(k)])),
      "predicted_speedup": cost_model.predicted(
          [requests[k] for k in paired], [base[k] for k in paired], costs, base_costs, _host_draft_ms),
  }


def tokens_and_seconds(records):
  """(tokens, seconds) of one request: turns add up, repeats are represented by their median time."""
  turns = collections.defaultdict(list)
  for record in records:
    turns[record["turn"]].append(record)
  tokens = sum(len(t[0]["token_ids"]) for t in turns.values())
  return tokens, float(sum(np.median([r["seconds"] for r in t]) for t in turns.values()))


def _decode_rate(ours, base):
  """How much faster tokens come behind the first step, prefill apart."""
  def rate(requests):
    tokens = seconds = 0
    for records in requests:
      turns = collections.defaultdict(list)
      for record in records:
        turns[record["turn"]].append(record)
      tokens += sum(t[0].get("decode_tokens", 0) for t in turns.values())
      seconds += sum(float(np.median([r["decode_seconds"] for r in t])) for t in turns.values())
    return tokens / seconds if seconds > 0 else None
  rates = rate(ours), rate(base)
  return rates[0] / rates[1] if all(rates) else None


def _latencies(requests):
  """Milliseconds of every request and repeat, all its turns together."""
  times = collections.defaultdict(float)
  for records in requests.values():
    for record in records:
      times[record["id"], record["repeat"]] += record["latency_ms"]
  return list(times.values())


def _repeated(records):
  first = [r for r in records if r["repeat"] == 0]
  total = sum(len(r["token_ids"]) for r in first)
  return sum(statistics.repeated_tokens(r["token_ids"]) for r in first) / max(1, total)


def _step_ms(records):
  """Decode time over decode steps; the first step of each call is part of the time to the first token."""
  steps = sum(r["decode_steps"] for r in records)
  seconds = sum(r["decode_seconds"] for r in records)
  return seconds * 1e3 / steps if steps > 0 else None


def _identical(requests, base):
  text = lambda records: {r["turn"]: r["token_ids"] for r in records if r["repeat"] == 0}
  paired = [k for k in requests if k in base]
  return [sum(text(requests[k]) == text(base[k]) for k in paired), len(paired)]


def _verify_ms(records, costs):
  """Mean verify time of a step, by how often each width was used."""
  share = np.sum([r["counters"]["steps_per_width"] for r in records], axis=0)
  return float(np.dot(share, costs["verify_ms"]) / share.sum())


def _costs_of(records, costs, step_ms):
  """Draft, verify and commit time of a step, and what of the measured step they leave."""
  if not costs:
    return dict.fromkeys(("draft_ms", "verify_ms", "commit_ms", "other_ms", "utilization"))
  verify, draft = _verify_ms(records, costs), _draft_ms(records, costs)
  spent = draft + verify + costs["commit_ms"]
  return {"draft_ms": draft, "verify_ms": verify, "commit_ms": costs["commit_ms"],
          "other_ms": step_ms - spent if step_ms else None, "utilization": costs["utilization"]}


def _draft_ms(records, costs):
  """Of a proposer that drafts on the host the time that its drafts took in the run; else timed alone."""
  on_host = _host_draft_ms(records, costs)
  return costs["draft_ms"] if on_host is None else on_host


def _host_draft_ms(records, costs):
  """Milliseconds of a draft in the run, of a proposer that drafts on the host; None for others."""
  del costs
  on_host = sum(r.get("draft_seconds", 0) for r in records)
  steps = sum(r["counters"]["steps"] for r in records)
  return on_host * 1e3 / steps if on_host and steps else None
