"""The report's table of quality: what the judges of `experiments.quality` found, beside plain decoding's."""
from collections.abc import Sequence

from experiments.report import tables
from experiments.report.run_folder import ALL

COLUMNS = (
    tables.Column("mean", "Mean over requests; of a yes or no the share of yes.",
                  lambda score: tables.Cell(tables.short(score["mean"])), rate=False),
    tables.Column("n", "Requests that the metric applies to.",
                  lambda score: tables.Cell(tables.decimal(score["n"], 0)), rate=False),
    tables.Column("minus plain", "Mean difference to plain decoding, request by request on the same seeds. The 95% "
                  "interval, of a sampled run with 8 requests or more, is a paired bootstrap over requests. A greedy "
                  "run has none: its texts are plain decoding's, or it is wrong.", lambda score: _difference(score),
                  rate=False))


def build(groups: Sequence[tables.Group], methods: Sequence[str]) -> tables.Table | None:
  """A section a category and metric, methods below each other, the parts of all categories last; None without any.

  Args:
    groups: of one setting. What stands in a group's `quality` without a mean is no metric, and is left out.
    methods: the order of the rows of a section.
  """
  sections = {}
  for group in sorted(groups, key=lambda group: (group["category"] == ALL, methods.index(group["method"]))):
    where = "all categories" if group["category"] == ALL else group["category"]
    where += "" if group["language"] == ALL else f" · {group['language']}"
    for metric, score in (group["quality"] or {}).items():
      if isinstance(score, dict) and isinstance(score.get("mean"), int | float):
        cells = [column.cell(score) for column in COLUMNS]
        sections.setdefault((where, metric), []).append((group["method"], cells))
  order = list(dict.fromkeys(where for where, _ in sections))
  return tables.Table(list(COLUMNS), [
      tables.Section(f"{where}: {metric}", sections[where, metric])
      for where, metric in sorted(sections, key=lambda key: order.index(key[0]))]) if sections else None


def differences(groups: Sequence[tables.Group]) -> list[str]:
  """A line for each greedy text that is not plain decoding's, with the metrics that moved."""
  lines = []
  for group in groups:
    if group["category"] == group["language"] == ALL:
      for one in (group["quality"] or {}).get("differences") or ():
        moved = ", ".join(f"{name} {_number(a)} → {_number(b)}" for name, (a, b) in one["metrics"].items())
        lines.append(f"{group['method']}, {one['id']}" + (f", turn {one['turn']}" if one["turn"] else "") +
                     f": {moved or 'no metric moved'}")
  return lines


def _difference(score):
  value, interval = score.get("difference"), score.get("difference_interval")
  if value is None:
    return tables.Cell(tables.DASH)
  note = "[{:+.3g}, {:+.3g}]".format(*interval) if interval else ""
  return tables.Cell(f"{value:+.3g}" if value else "0", note)


def _number(value):
  return str(value).lower() if isinstance(value, bool) else f"{value:.3g}"
