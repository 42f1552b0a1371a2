"""What a run of `load` was worth: throughput, latencies, what drafting brought, how full the batch was.

Names are those of the JSON of `vllm bench serve` wherever the meaning is the same (vllm/benchmarks/serve.py), units
too: latencies in milliseconds, `spec_decode_acceptance_rate` in percent, the rates of positions as fractions of all
drafts, the acceptance length with the token that the target adds. Where vLLM writes 0 or nothing for what it does not
know, such as the rate of a run without drafts, there is None. Counts are pooled; no ratio is the mean of ratios.

A request that was cancelled, or ran into its deadline, has no latency and its tokens are in no throughput; both are
counted apart. Drafts count whatever the end, as in a server's counters.

The steady window leaves out ramp-up and drain: it begins when the first request has completed, so that the batch is as
full as it gets, and ends when the last one is admitted, since no one takes a place that is left from then on. Of a
server nobody knows when a request was admitted, and the last arrival stands for it. There is none where the two moments
cross, as when all requests fit into the first batch.
"""
import resource
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.serving import requests as requests_lib
from specjax.serving import load

PERCENTILES = (50, 95, 99)
GOODPUT = ("ttft", "tpot", "e2el")  # what limits may be set to
_COMPLETED = (requests_lib.STOP, requests_lib.LENGTH)


def summarize(run: load.Run, *, goodput: dict[str, float] | None = None) -> dict[str, Any]:
  """All numbers of a run, ready for JSON.

  Args:
    run: of `load.run` or `load_http.run`.
    goodput: limits in milliseconds by name, of `GOODPUT`; a completed request is good if it keeps all of them.

  Returns:
    The whole run's numbers by name; and under "steady" those of the steady window (None without one), under "engine"
    what the engine's turns say (None of a server), under "categories" counts and drafts by category.

  Raises:
    ValueError: for a limit that there is not, or below 0.
  """
  check_goodput(goodput)
  outcomes = run.outcomes
  ends = {reason: sum(o.finish_reason == reason for o in outcomes) for reason in requests_lib.FINISH_REASONS}
  completed = _completed(outcomes)
  found = {"num_requests": len(run.served), "duration": run.end - run.begin, "completed": len(completed),
           "failed": sum(served.outcome is None for served in run.served), "cancelled": ends[requests_lib.CANCELLED],
           "deadline_exceeded": ends[requests_lib.DEADLINE],
           "unfinished_tokens": sum(_tokens(o) for o in outcomes) - sum(map(_tokens, completed)),
           "cached_tokens": sum(o.cached_tokens for o in outcomes),
           "max_concurrent_requests": _most_at_once(outcomes)}
  found |= _throughput(completed, run.begin, run.end, goodput) | _latencies(completed)
  found |= speculation([run.counts] if run.counts else _speculations(outcomes))
  return found | {"steady": _steady(run, goodput), "engine": _engine(run),
                  "categories": _categories(run.served), "peak_memory_bytes": peak_memory_bytes()}


def check(outcomes: Sequence[requests_lib.Outcome], *, stop_strings: bool = False) -> None:
  """Holds the counts of requests against what must be true of them (negative, diluted and over-counted acceptance have
  all been shipped: vllm#27077, vllm#44054, ik_llama.cpp#2358, sglang#39826).

  Args:
    outcomes: of `load.run`.
    stop_strings: whether some may have ended at a stop string: the steps that wrote it are counted, its tokens are not.

  Raises:
    ValueError: names the request and what does not go together.
  """
  numbers = [o.id for o in outcomes]
  if len(set(numbers)) < len(numbers):
    raise ValueError(f"request {next(n for n in numbers if numbers.count(n) > 1)} has two outcomes")
  for outcome in outcomes:
    for what, holds in _invariants(outcome, stop_strings).items():
      if not holds:
        raise ValueError(f"request {outcome.id} ({outcome.finish_reason}, {len(outcome.token_ids)} tokens, "
                         f"{outcome.speculation}): {what} does not hold")


def _invariants(outcome, stop_strings):
  """By what is said of them, whether they hold."""
  s, tokens = outcome.speculation, len(outcome.token_ids)
  places = s.accepted_per_position
  # A step emits its accepted drafts and one token more, which the end of a request may cut off.
  cut = s.accepted_tokens + s.steps - tokens
  unseen = stop_strings and outcome.finish_reason == requests_lib.STOP
  times = [time for time, _ in outcome.arrivals]
  moments = [outcome.submitted, *([] if outcome.admitted is None else [outcome.admitted]), *times, outcome.finished]
  return {
      "finish_reason is a known one": outcome.finish_reason in requests_lib.FINISH_REASONS,
      "0 <= accepted <= drafted": 0 <= s.accepted_tokens <= s.drafted_tokens,
      "0 <= drafts <= steps": 0 <= s.drafts <= s.steps,
      "a draft has a token or more": s.drafts <= s.drafted_tokens and (s.drafts > 0 or not s.drafted_tokens),
      "tokens = accepted + steps, less one if the end cut the last step": cut in (0, 1) or unseen and cut > 1,
      "accepted per position sums to accepted": sum(places) == s.accepted_tokens,
      "accepted per position never increases, from drafts on": list(places) == sorted(places, reverse=True) and (
          max(places, default=0) <= s.drafts),
      "0 <= forced <= accepted": 0 <= s.forced_tokens <= s.accepted_tokens,
      "updates hold all tokens": sum(count for _, count in outcome.arrivals) == tokens,
      "an update has a token or more": all(count > 0 for _, count in outcome.arrivals),
      "0 <= cached <= prompt": 0 <= outcome.cached_tokens <= outcome.prompt_tokens,
      "times are in order": moments == sorted(moments)}


def check_goodput(goodput: dict[str, float] | None) -> None:
  """Refuses limits that mean nothing.

  Raises:
    ValueError: names the limit and those that there are.
  """
  for name, limit in (goodput or {}).items():
    if name not in GOODPUT or not limit >= 0:
      raise ValueError(f"goodput {name}:{limit}: limits are milliseconds of 0 or more of {', '.join(GOODPUT)}")


def steady_window(run: load.Run) -> tuple[float, float] | None:
  """Begin and end of the steady window, in seconds of the clock; None where there is none."""
  completed = _completed(run.outcomes)
  if not completed:
    return None
  begin = min(o.finished for o in completed)
  end = max([o.submitted if o.admitted is None else o.admitted for o in completed])
  return (begin, end) if end > begin else None


def speculation(found: Sequence[requests_lib.Speculation] | None) -> dict[str, Any]:
  """The spec_decode_ numbers of some requests, pooled; all of them None where `found` is: nobody knows."""
  if found is None:
    return dict.fromkeys(speculation([]))
  total = lambda name: sum(getattr(one, name) for one in found)
  drafts, drafted, accepted = total("drafts"), total("drafted_tokens"), total("accepted_tokens")
  places = [one.accepted_per_position for one in found]
  depth = max(map(len, places), default=0)
  per_position = [sum(counts[i] for counts in places if i < len(counts)) for i in range(depth)]
  ratio = lambda part, whole: part / whole if whole else None
  return {
      "spec_decode_num_steps": total("steps") or None, "spec_decode_num_drafts": drafts,
      "spec_decode_draft_tokens": drafted, "spec_decode_accepted_tokens": accepted,
      "spec_decode_forced_tokens": total("forced_tokens"),
      "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
      "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else None,
      "spec_decode_per_position_acceptance_rates": [ratio(count, drafts) for count in per_position] if drafts else None}


def peak_memory_bytes() -> int:
  """The most memory that this process has held so far (resident set size), runs before this one included."""
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return most if sys.platform == "darwin" else most * 1024  # Linux counts in KiB


def _speculations(outcomes):
  """Of each request; None where tokens came without a step: of a server, which does not tell."""
  if any(o.arrivals and not o.speculation.steps for o in outcomes):
    return None
  return [o.speculation for o in outcomes]


def _completed(outcomes):
  return [o for o in outcomes if o.finish_reason in _COMPLETED]


def _tokens(outcome):
  """Output tokens; a server may have told their number without their ids."""
  return sum(count for _, count in outcome.arrivals)


def _throughput(outcomes, begin, end, goodput):
  """What completed requests brought in (begin, end]: requests when they end, prompts when their first token comes."""
  inside = lambda time: begin < time <= end
  seconds = end - begin
  ended = [o for o in outcomes if inside(o.finished)]
  prompts = sum(o.prompt_tokens for o in outcomes if o.arrivals and inside(o.arrivals[0][0]))
  tokens = sum(count for o in outcomes for time, count in o.arrivals if inside(time))
  rate = lambda amount: amount / seconds if seconds > 0 else None
  return {"total_input_tokens": prompts, "total_output_tokens": tokens, "request_throughput": rate(len(ended)),
          "request_goodput": rate(sum(_is_good(o, goodput) for o in ended)) if goodput else None,
          "output_throughput": rate(tokens), "total_token_throughput": rate(prompts + tokens)}


def _is_good(outcome, goodput):
  """Whether a request keeps all limits; one of a single token has no time per token to exceed, as in vLLM."""
  seconds = {"ttft": outcome.first_token_seconds, "tpot": outcome.token_seconds or 0.0,
             "e2el": outcome.finished - outcome.submitted}
  return all(seconds[name] is not None and 1e3 * seconds[name] <= limit for name, limit in goodput.items())


def _latencies(outcomes):
  """Mean, median, deviation and percentiles of every latency, in milliseconds; None where nothing was measured."""
  values = {"ttft": [o.first_token_seconds for o in outcomes], "tpot": [o.token_seconds for o in outcomes],
            "itl": [gap for o in outcomes for gap in o.gaps], "e2el": [o.finished - o.submitted for o in outcomes],
            "queue": [o.queue_seconds for o in outcomes]}
  found = {}
  for name, seconds in values.items():
    known = 1e3 * np.array([value for value in seconds if value is not None])
    statistics = {"mean": np.mean, "median": np.median, "std": np.std} | {
        f"p{q}": lambda x, q=q: np.percentile(x, q) for q in PERCENTILES}
    found |= {f"{key}_{name}_ms": float(measure(known)) if known.size else None for key, measure in statistics.items()}
  return found


def _most_at_once(outcomes):
  """The greatest number of requests between arrival and end; one that ends as another comes makes room for it."""
  events = sorted([(o.submitted, 1) for o in outcomes] + [(o.finished, -1) for o in outcomes])
  return int(np.cumsum([change for _, change in events]).max(initial=0))


def _steady(run, goodput):
  window = steady_window(run)
  if window is None:
    return None
  begin, end = window
  completed = _completed(run.outcomes)
  came = [o for o in completed if begin <= o.submitted <= end]
  return {"begin": begin - run.begin, "duration": end - begin, "arrived": len(came),
          "completed": sum(begin < o.finished <= end for o in completed)} | _throughput(
              completed, begin, end, goodput) | _latencies(came)


def _categories(served):
  found = {}
  for category in dict.fromkeys(one.category for one in served):
    outcomes = [one.outcome for one in served if one.category == category and one.outcome is not None]
    completed = _completed(outcomes)
    found[category] = {"completed": len(completed), "total_output_tokens": sum(map(_tokens, completed))} | speculation(
        _speculations(outcomes))
  return found


def _engine(run):
  """Means over the turns that decoded, each counted once; times over all turns."""
  if not run.turns:
    return None
  seconds, device = (sum(getattr(turn, name) for turn in run.turns) for name in ("seconds", "device_seconds"))
  decoding = [turn for turn in run.turns if turn.width]
  mean = lambda name: float(np.mean([getattr(turn, name) for turn in decoding])) if decoding else None
  running, batch, used, drafted = (sum(getattr(turn, name) for turn in decoding)
                                   for name in ("running", "batch", "used", "drafted"))
  allocated = sum(turn.batch * turn.slots for turn in decoding)
  ratio = lambda part, whole: part / whole if whole else None
  # Outside of turns: waiting for arrivals, and checking what is submitted.
  rest = lambda part: max(0.0, 1 - part / (run.end - run.begin)) if run.end > run.begin else None
  return {
      "turns": len(run.turns), "steps": len(decoding), "programs": sum(turn.programs for turn in run.turns),
      "mean_rows_running": mean("running"), "mean_rows_computed": mean("batch"), "row_occupancy": ratio(running, batch),
      "mean_waiting": mean("waiting"), "mean_slots_used": ratio(used, len(decoding)),
      "mean_slots_allocated": ratio(allocated, len(decoding)), "slot_occupancy": ratio(used, allocated),
      "mean_draft_limit": mean("draft_limit"), "mean_width": mean("width"),
      "drafting_share": ratio(sum(turn.drafted > 0 for turn in decoding), len(decoding)),
      "mean_draft_tokens": ratio(drafted, running), "turn_seconds": seconds, "device_seconds": device,
      "outside_device_share": rest(device), "outside_turns_share": rest(seconds)}
