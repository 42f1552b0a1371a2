"""The table that a benchmark prints."""

_COLUMNS = (
    ("category", 15), ("method", 8), ("requests", 8), ("tokens", 7), ("tok/step", 8), ("accept", 7), ("tok/s", 7),
    ("speedup", 7), ("95% interval", 13), ("TTFT ms", 8), ("p50 ms", 8), ("p95 ms", 8), ("p99 ms", 8),
    ("identical", 9))


def render(groups: list[dict]) -> str:
  """One line a (category, method), the overall rows last; a dash where a number does not exist."""
  shown = [g for g in groups if g["language"] == "all"]
  shown.sort(key=lambda g: (g["category"] == "all",))
  lines = [_line([name for name, _ in _COLUMNS]), "-" * (sum(w for _, w in _COLUMNS) + 2 * len(_COLUMNS) - 2)]
  before = None
  for group in shown:
    name = "overall" if group["category"] == "all" else group["category"]
    lines.append(_line(["" if name == before else name] + _cells(group)))
    before = name
  return "\n".join(lines)


def _cells(g):
  number = lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}"
  interval = g["speedup_interval"]
  latency = g["latency_ms"] or {}
  return [g["method"], str(g["requests"]), str(g["output_tokens"]), number(g["tokens_per_step"]),
          number(g["acceptance_rate"]), number(g["tokens_per_second"], 1), number(g["speedup"]),
          f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "-",
          number((g["time_to_first_token_ms"] or {}).get("p50"), 0), number(latency.get("p50"), 0),
          number(latency.get("p95"), 0), number(latency.get("p99"), 0),
          "{} of {}".format(*g["identical_to_plain"]) if g["identical_to_plain"] else "-"]


def _line(cells):
  padded = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, (_, w)) in enumerate(zip(cells, _COLUMNS))]
  return "  ".join(padded).rstrip()
