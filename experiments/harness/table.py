"""The table that a benchmark prints."""
from experiments.report import tables

_COLUMNS = (
    ("requests", 8), ("tokens", 7), ("tok/step", 8), ("break-even", 10), ("accept", 7), ("tok/s", 7),
    ("speedup", 7), ("95% interval", 13), ("decode", 6),
    ("no repeats", 10), ("repeated", 8), ("TTFT ms", 8), ("p50 ms", 8), ("p95 ms", 8), ("p99 ms", 8),
    ("identical", 9))


def render(groups: list[dict]) -> str:
  """One line a (category, method), the overall rows last; a dash where a number does not exist. Below it, what must be
  known of a lossy verifier; its name stands beside the methods that it judged."""
  shown = [g for g in groups if g["language"] == "all"]
  shown.sort(key=lambda g: g["category"] == "all")
  several = len({g["batch_size"] for g in shown}) > 1
  name = lambda g: ("overall" if g["category"] == "all" else g["category"]) + (
      f", batch {g['batch_size']}" if several else "")
  lossy = tables.lossy(groups)
  method = lambda g: tables.label(g["method"], lossy)
  columns = (("category", max([15, *(len(name(g)) for g in shown)])),
             ("method", max([8, *(len(method(g)) for g in shown)])), *_COLUMNS)
  lines = [_line(columns, [title for title, _ in columns])]
  lines.append("-" * len(lines[0]))
  before = None
  for group in shown:
    lines.append(_line(columns, ["" if name(group) == before else name(group), method(group)] + _cells(group)))
    before = name(group)
  return "\n".join(lines + tables.lossy_lines(groups))


def _cells(g):
  number = lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}"
  interval = g["speedup_interval"]
  latency = g["latency_ms"] or {}
  return [str(g["requests"]), str(g["output_tokens"]), number(g["tokens_per_step"]), number(g["verify_cost_ratio"]),
          number(g["acceptance_rate"]), number(g["tokens_per_second"], 1), number(g["speedup"]),
          f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "-", number(g.get("decode_speedup")),
          number(g["speedup_without_repeats"]), f"{g['repeated_share']:.0%}",
          number((g["time_to_first_token_ms"] or {}).get("p50"), 0), number(latency.get("p50"), 0),
          number(latency.get("p95"), 0), number(latency.get("p99"), 0),
          "{} of {}".format(*g["identical_to_plain"]) if g["identical_to_plain"] else "-"]


def _line(columns, cells):
  padded = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, (_, w)) in enumerate(zip(cells, columns))]
  return "  ".join(padded).rstrip()
