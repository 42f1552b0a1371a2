"""The tables of a load test, for the terminal and the page: one row a point and method."""
from typing import Any

from experiments.report import tables
from experiments.report.run_folder import PLAIN

Point = dict[str, Any]


def _of(*path, form=tables.short):
  """The cell of one number of a point, found by its path."""
  def cell(point):
    value = point
    for key in path:
      value = None if value is None else value.get(key)
    return tables.Cell(form(value))
  return cell


def _speedup(point):
  found = point["speedup"]
  if found is None or point["method"] == PLAIN:
    return tables.Cell(tables.DASH)
  several = len(found["rounds"]) > 1  # one round may be luck
  tone = "good" if several and found["low"] > 1 else "bad" if several and found["high"] < 1 else ""
  return tables.Cell(tables.times(found["median"]), f"[{found['low']:.2f}, {found['high']:.2f}]", tone)


def _throughput(point):
  low, high = map(tables.short, point["spread"].get("output_throughput", (None, None)))
  return tables.Cell(tables.short(point["metrics"]["output_throughput"]), f"[{low}, {high}]")


def _identical(point):
  found = point["identical_to_plain"]
  if found is None:
    return tables.Cell(tables.DASH)
  return tables.Cell(f"{found[0]} of {found[1]}", tone="bad" if found[0] < found[1] else "")


def _pair(name):
  """The median and the 99th percentile of a latency."""
  def cell(point):
    values = [point["metrics"][f"{key}_{name}_ms"] for key in ("median", "p99")]
    return tables.Cell(" / ".join(map(tables.short, values)))
  return cell


def _whole(value):
  return tables.decimal(value, 0)


def _rate(value):
  """A rate that is given in percent."""
  return tables.percent(None if value is None else value / 100)


RESULTS = (
    tables.Column("completed", "Requests that came to their end.", _of("metrics", "completed", form=_whole)),
    tables.Column("tokens/s", "Output tokens of completed requests a second, whole run: median over rounds, with the "
                  "least and the greatest.", _throughput),
    tables.Column("steady", "The same in the steady window: from the first completed request, when the batch is as "
                  "full as it gets, to the last admission.", _of("steady", "output_throughput")),
    tables.Column("speedup", "Against plain decoding in the same round: median, least and greatest. ▲ and ▼: all "
                  "rounds, of several, lie above or below 1.", _speedup),
    tables.Column("TTFT p50 / p99", "Time to the first token, milliseconds, the queue included.", _pair("ttft")),
    tables.Column("TPOT p50 / p99", "Time per output token after the first, milliseconds.", _pair("tpot")),
    tables.Column("ITL p50 / p99", "Time between updates, milliseconds; with drafts an update has several tokens.",
                  _pair("itl")),
    tables.Column("E2EL p50 / p99", "Time of the whole request, milliseconds.", _pair("e2el")),
    tables.Column("goodput", "Completed requests a second that keep the limits of --goodput.",
                  _of("metrics", "request_goodput")),
    tables.Column("acceptance", "Accepted over drafted tokens, pooled. A dash where nothing was drafted.",
                  _of("metrics", "spec_decode_acceptance_rate", form=_rate)),
    tables.Column("length", "Acceptance length: tokens of a step that had a draft, the target's own included.",
                  _of("metrics", "spec_decode_acceptance_length")),
    tables.Column("identical", "Requests whose output equals that of plain decoding in the same round.", _identical))

ENGINE = (
    tables.Column("steps", "Decode steps of a run.", _of("engine", "steps", form=_whole)),
    tables.Column("rows", "Rows that ran, mean over steps.", _of("engine", "mean_rows_running")),
    tables.Column("computed", "Rows that were computed, mean over steps: batches are powers of two.",
                  _of("engine", "mean_rows_computed")),
    tables.Column("occupancy", "Rows that ran over rows computed.",
                  _of("engine", "row_occupancy", form=tables.percent)),
    tables.Column("slots", "Cache slots that held a token over slots of the batch: the rest is fragmentation.",
                  _of("engine", "slot_occupancy", form=tables.percent)),
    tables.Column("waiting", "Requests in the queue, mean over steps.", _of("engine", "mean_waiting")),
    tables.Column("width", "Nodes a row at which steps were verified, mean.", _of("engine", "mean_width")),
    tables.Column("drafting", "Steps with a draft.", _of("engine", "drafting_share", form=tables.percent)),
    tables.Column("drafted / row", "Drafted tokens of a row and step, mean.", _of("engine", "mean_draft_tokens")),
    tables.Column("off device", "Share of the wall time outside of compiled programs: the host's work, and waiting for "
                  "requests.", _of("engine", "outside_device_share", form=tables.percent)),
    tables.Column("peak memory", "The most that the process has held so far.", _of("metrics", "peak_memory_bytes",
                                                                                 form=tables.size)))


def build(summary: dict, columns, *, keep_empty: bool = True) -> tables.Table | None:
  """A section a point, a row a method; None where there is nothing to show."""
  sections = [(_title(summary, value), [(point["method"], [column.cell(point) for column in columns])
                                        for point in summary["points"] if point["point"] == value])
              for value in summary["sweep"]["values"]]
  kept = [i for i in range(len(columns)) if keep_empty or any(
      row[i].text != tables.DASH for _, rows in sections for _, row in rows)]
  if not kept:
    return None
  return tables.Table([columns[i] for i in kept], [tables.Section(title, [(method, [row[i] for i in kept])
                                                                          for method, row in rows])
                                                   for title, rows in sections])


def categories(summary: dict) -> tables.Table | None:
  """Drafts by category: a section a category, a row a method, at the first point; the load changes what an adaptive
  method drafts, not what a text is like."""
  first = [point for point in summary["points"] if point["point"] == summary["sweep"]["values"][0]]
  columns = [
      tables.Column("completed", "Requests of a round.", _of("completed", form=_whole)),
      tables.Column("drafts", "Steps that had a draft, of all rounds.", _of("spec_decode_num_drafts", form=_whole)),
      tables.Column("drafted", "Drafted tokens.", _of("spec_decode_draft_tokens", form=_whole)),
      tables.Column("accepted", "Of them accepted.", _of("spec_decode_accepted_tokens", form=_whole)),
      tables.Column("acceptance", "Accepted over drafted.", _of("spec_decode_acceptance_rate", form=_rate)),
      tables.Column("length", "Tokens of a step that had a draft.", _of("spec_decode_acceptance_length"))]
  names = dict.fromkeys(name for point in first for name in point["categories"])
  sections = [tables.Section(name, [
      (point["method"], [column.cell(point["categories"][name]) for column in columns]) for point in first
      if name in point["categories"] and point["categories"][name]["spec_decode_num_drafts"]]) for name in names]
  sections = [section for section in sections if section.rows]
  return tables.Table(columns, sections) if sections else None


def break_even(summary: dict) -> list[tuple[str, str]]:
  """A sentence a method: where it begins or ceases to pay."""
  unit, found = summary["sweep"]["unit"], []
  for method, places in summary["break_even"].items():
    known = [point["speedup"]["median"] for point in summary["points"]
             if point["method"] == method and point["speedup"]]
    if places:
      found.append((method, "; ".join(f"pays {place['pays']} {tables.short(place['at'])} {unit}" for place in places)))
    elif known:
      words = "pays at every point" if min(known) >= 1 else "pays at no point" if max(known) <= 1 else "breaks even"
      found.append((method, f"{words}: {tables.times(min(known))} to {tables.times(max(known))}"))
  return found


def render(summary: dict) -> str:
  """The table of a terminal, and a line a method below it."""
  table = build(summary, RESULTS, keep_empty=False)
  text = lambda cell: " ".join(filter(None, [cell.text, cell.note]))
  header = [summary["sweep"]["kind"], "method", *(column.title for column in table.columns)]
  rows = [[section.title if i == 0 else "", method, *map(text, cells)]
          for section in table.sections for i, (method, cells) in enumerate(section.rows)]
  widths = [max(map(len, column)) for column in zip(header, *rows)]
  line = lambda cells: "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                                 for i, (cell, width) in enumerate(zip(cells, widths))).rstrip()
  lines = [line(header), "-" * len(line(header)), *map(line, rows), ""]
  lines += [f"{method}: {words}" for method, words in break_even(summary)]
  return "\n".join(lines + [f"note: {warning}" for warning in summary["warnings"]]).rstrip()


def _title(summary, value):
  kind, unit = summary["sweep"]["kind"], summary["sweep"]["unit"]
  return "all at once" if kind == "at_once" else f"{value:g} {unit}"
