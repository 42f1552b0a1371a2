"""What a sweep found: `sweep.json`, the best value per kind of request, and the table of a terminal.

`sweep.json` is {"schema": 1, "kind": "sweep", "vary", "pinned", "methods", "categories", "points", "best"}. A point is
one (method, category, values) cell: `method, category, values, requests, output_tokens, prompt_tokens,
tokens_per_step, acceptance_rate, tokens_per_second`, each of these rates with its 95% interval in `intervals`, `speedup`
with the paired interval `speedup_interval` against plain decoding under the same setting, `latency_ms,
time_to_first_token_ms, peak_memory_bytes, identical_to_plain`. Intervals are bootstraps over requests (of a batch over
batches), null below 8; a speedup's is Student's below 8, null below 3.
"""
import collections

import numpy as np

from experiments.harness import statistics
from experiments.harness import sweep_setting
from experiments.harness import text_table

RATES = {"tokens_per_step": ("output_tokens", "steps"), "acceptance_rate": ("accepted_tokens", "drafted_tokens"),
         "tokens_per_second": ("tokens", "seconds")}
_KEPT = ("category", "batch_size", "requests", "prompt_tokens", "output_tokens", *RATES, "speedup", "speedup_interval",
         "decode_speedup", "latency_ms", "time_to_first_token_ms", "time_per_output_token_ms", "peak_memory_bytes",
         "identical_to_plain", "repeated_share", "verifier", "lossless")


def placed(group: dict, arm, values: dict) -> dict:
  """A group of `summary.json` that says which arm it is: "method" is made unique by all values that vary."""
  known = arm.values | values
  label = sweep_setting.label(known)
  return group | {"method": f"{arm.method}, {label}" if label else arm.method, "arm": group["method"],
                  "base_method": arm.method, "values": known, "request_values": values}


def summarize(groups: list[dict], records: list[dict], varied, pinned: dict) -> dict:
  """`sweep.json`.

  Args:
    groups: of `placed`. records: of the whole run, with "values". varied: of `sweep_setting.parse`. pinned: the other
      settings.
  """
  cells = collections.defaultdict(list)
  for record in records:
    for category in dict.fromkeys(("all", record["category"])):
      cells[record["method"], category, _key(record["values"])].append(record)
  points = []
  for group in groups:
    if group["language"] == "all":
      members = cells[group["arm"], group["category"], _key(group["request_values"])]
      points.append(
          {"method": group["base_method"], "values": group["values"]} | {name: group[name] for name in _KEPT} |
          {"intervals": {name: _interval(members, *parts) for name, parts in RATES.items()}})
  categories = list(dict.fromkeys(point["category"] for point in points))
  return {"schema": 1, "kind": "sweep",
          "vary": [{"name": s.name, "values": list(s.values), "numeric": s.numeric,
                    "of": "request" if s.of_request else "method"} for s in varied],
          "pinned": pinned, "methods": list(dict.fromkeys(p["method"] for p in points if p["method"] != "plain")),
          "categories": sorted(categories, key=lambda name: name != "all"), "points": points, "best": best(points)}


def _key(values):
  return tuple(sorted(values.items(), key=lambda item: item[0]))


def _interval(records, top, bottom):
  """95% interval of a pooled ratio, by a bootstrap over batches; None below 8 of them, where Student's may leave what a
  rate can be, and where too few have any of what it is a share of."""
  units = collections.defaultdict(lambda: np.zeros(2))
  repeats = 1 + max(record["repeat"] for record in records)
  for record in records:
    known = record["counters"] | {"tokens": len(record["token_ids"]), "seconds": record["seconds"]}
    units[record["batch"]] += np.array([known[top], known[bottom]]) / repeats
  if len(units) < statistics.LEAST_FOR_BOOTSTRAP:
    return None
  with np.errstate(invalid="ignore"):  # where nothing was drafted in all that was drawn again
    found = statistics.speedup_interval([(1, 1)] * len(units), list(units.values()))  # a ratio to a rate of 1
  return found if found and np.isfinite(found).all() else None


def best(points: list[dict]) -> list[dict]:
  """Per category and method the values of the greatest speedup over plain decoding under the same setting.

  Returns:
    [{"category", "method", "values", "speedup", "interval", "beats_plain", "next", "overlaps_next"}]: `next` is the
    runner-up with its interval; `beats_plain` says whether the interval stands above 1, `overlaps_next` whether it
    reaches the runner-up's, in which case the order of the two is not settled. Without intervals both are None.
  """
  cells = collections.defaultdict(list)
  for point in points:
    if point["method"] != "plain" and point["speedup"] is not None:
      cells[point["category"], point["method"]].append(point)
  found = []
  for (category, method), members in cells.items():
    first, second = (sorted(members, key=lambda p: -p["speedup"]) + [None])[:2]
    interval = first["speedup_interval"]
    other = second and second["speedup_interval"]
    found.append({
        "category": category, "method": method, "values": first["values"], "speedup": first["speedup"],
        "interval": interval, "beats_plain": interval[0] > 1 if interval else None,
        "next": second and {"values": second["values"], "speedup": second["speedup"], "interval": other},
        "overlaps_next": bool(interval[0] <= other[1] and other[0] <= interval[1]) if interval and other else None})
  return sorted(found, key=lambda one: one["category"] != "all")


def verdict(one: dict) -> str:
  """A line of `best` in words."""
  if one["next"] is None:
    settled = "no other value was measured"
  elif one["overlaps_next"] is None:
    settled = f"too few requests for an interval; next {sweep_setting.label(one['next']['values'])}"
  else:
    settled = f"{'overlaps' if one['overlaps_next'] else 'apart from'} {sweep_setting.label(one['next']['values'])}"
  if one["speedup"] <= 1:
    settled += "; no faster than plain"
  elif one["beats_plain"] is False:
    settled += "; its interval reaches 1"
  return settled


def pinned_text(pinned: dict) -> str:
  """All that does not vary, for a terminal."""
  text = lambda value: ",".join(map(str, value)) if isinstance(value, list) else sweep_setting.shown(value)
  known = [f"{name}={text(value)}" for name, value in sorted(pinned.items()) if value is not None]
  lines, line = [], "pinned:"
  for item in known:
    if len(line) + len(item) > 118:
      lines.append(line)
      line = " "
    line += f" {item}"
  return "\n".join([*lines, line])


def table(sweep: dict) -> str:
  """The points of a sweep and the best values, as text."""
  number = lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}"
  span = lambda ends: f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "-"
  wins = {(one["category"], one["method"], _key(one["values"])) for one in sweep["best"] if one["speedup"] > 1}
  rows, names = [], [setting["name"] for setting in sweep["vary"]]
  for category in sweep["categories"]:
    for point in (p for p in sweep["points"] if p["category"] == category):
      won = (category, point["method"], _key(point["values"])) in wins
      memory = point["peak_memory_bytes"] and sum(point["peak_memory_bytes"][k] for k in ("weights", "cache", "draft"))
      rows.append((category, point["method"], *(_shown(point["values"], name) for name in names),
                   str(point["requests"]), number(point["tokens_per_step"]), number(point["acceptance_rate"]),
                   number(point["tokens_per_second"], 1), number(point["speedup"]) + ("*" if won else " "),
                   span(point["speedup_interval"]), number((point["latency_ms"] or {}).get("p50"), 0),
                   number(memory and memory / 2**20, 0)))
  columns = ("category", "method", *names, "requests", "tokens/step", "accepted", "tokens/s", "speedup ",
             "95% interval", "p50 ms", "MiB")
  title = f"Varied: {', '.join(names)}. Speedups are over plain decoding under the same setting; * is the best above 1."
  chosen = [(one["category"], one["method"], sweep_setting.label(one["values"]), number(one["speedup"]),
             span(one["interval"]), verdict(one)) for one in sweep["best"]]
  return "\n\n".join([text_table.Table(title, columns, rows).text(), text_table.Table(
      "Best per kind of request:", ("category", "method", "best", "speedup", "95% interval", "and the next"),
      chosen).text()])


def _shown(values, name):
  return sweep_setting.shown(values[name]) if name in values else "-"
