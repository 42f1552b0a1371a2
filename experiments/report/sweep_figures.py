"""The curves of a sweep: one plot a metric, a line a kind of request, the overall one in ink, with intervals.

A panel is one method, and under a second setting one of its values.
"""
import base64
import pathlib
from typing import Any

import matplotlib
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import ticker

from experiments.harness import sweep_setting
from experiments.report import figures
from experiments.report.run_folder import ALL, PLAIN

Sweep = dict[str, Any]
_MEMORY = ("weights", "cache", "draft")
_METRICS = (
    ("speedup", "speedup over plain decoding", "Speedup",
     "Against plain decoding under the same setting; below the dashed line drafting loses time."),
    ("tokens_per_step", "output tokens a step", "Tokens a step", "What one pass of the target gives."),
    ("acceptance_rate", "drafted tokens that were accepted", "Acceptance", "Accepted over drafted tokens."),
    ("tokens_per_second", "output tokens a second", "Throughput", "Whole requests, prefill included."),
    ("latency", "latency, ms", "Latency", "Median over requests."),
    ("memory", "MiB", "Memory", "Weights, the largest cache and the drafter with its state; computed from shapes."))


def draw_all(sweep: Sweep, folder: pathlib.Path) -> list[figures.Plot]:
  """Draws what the sweep has values for, and writes each plot to `folder` as PNG and SVG."""
  folder.mkdir(parents=True, exist_ok=True)
  styles, plots = figures.Styles(_lines(sweep)), []
  for metric, unit, title, caption in _METRICS:
    def draw(fig, given, styles, metric=metric, unit=unit):
      return curves(fig, given, styles, metric, unit)
    light = figures.render(draw, sweep, styles, figures.LIGHT, folder / f"{metric}.png")
    if light is not None:
      (folder / f"{metric}.svg").write_bytes(base64.b64decode(light.partition(",")[2]))
      plots.append(figures.Plot(title, caption + " Bars are 95% intervals: of speedups from 3 requests on, of rates from 8.", light,
                                figures.render(draw, sweep, styles, figures.DARK, None)))
  return plots


def curves(fig: mpl_figure.Figure, sweep: Sweep, styles: figures.Styles, metric: str, unit: str) -> bool:
  """One metric over the first setting; False where no point has it."""
  first, *more = sweep["vary"]
  panels = [(method, value) for method in sweep["methods"] for value in (more[0]["values"] if more else [None])]
  known = [p for p in sweep["points"] if p["method"] != PLAIN and value_of(p, metric) is not None]
  if not known:
    return False
  columns = min(3, len(panels))
  rows = -(-len(panels) // columns)
  fig.set_size_inches(max(7.2, 2.6 * columns), 0.9 + (3.2 if rows == 1 else 2.6) * rows)
  grid, ink = fig.subplots(rows, columns, squeeze=False, sharey=True), matplotlib.rcParams["text.color"]
  for axes, (method, value) in zip(grid.flat, panels):
    for category in _lines(sweep):
      points = [p for p in known if p["method"] == method and p["category"] == category
                and (value is None or p["values"][more[0]["name"]] == value)]
      points.sort(key=lambda p: _place(first, p["values"][first["name"]]))
      _line(axes, first, points, metric, *_look(category, styles, ink))
    if metric == "speedup":
      axes.axhline(1, color=ink, linewidth=1, linestyle=(0, (4, 3)))
    _horizontal(axes, first)
    if len(panels) > 1:
      axes.set_title(figures.name(method + ("" if value is None else
                                            f", {sweep_setting.label({more[0]['name']: value})}")), fontsize=9)
    axes.set_ylim(bottom=0)
    if metric == "acceptance_rate":
      axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  for axes in grid.flat[len(panels):]:
    axes.remove()
  for axes in grid[:, 0]:
    axes.set_ylabel(unit)
  present = [category for category in _lines(sweep) if any(p["category"] == category for p in known)]
  handles = [(mpl_lines.Line2D([], [], color=colour, marker=marker, markersize=4, linewidth=width, linestyle=style),
              figures.name(category)) for category in present
             for colour, marker, width, style in [_look(category, styles, ink)]]
  figures.legend(fig, [], styles, handles)
  return True


def value_of(point: dict[str, Any], metric: str) -> float | None:
  """The number of a point that a plot shows."""
  if metric == "latency":
    return (point["latency_ms"] or {}).get("p50")
  if metric == "memory":
    memory = point["peak_memory_bytes"]
    return memory and sum(memory[name] for name in _MEMORY) / 2**20
  return point[metric]


def _lines(sweep):
  """Categories by line; one that the overall line would lie on is left out."""
  categories = sweep["categories"]
  return [ALL] if set(categories) <= {ALL} or len(categories) == 2 else categories


def _look(category, styles, ink):
  """Colour, marker, width and line of a category."""
  if category == ALL:
    return ink, "o", 2.2, "-"
  turn = styles.drafting.index(category) // 7 % 2 if category in styles.drafting else 0
  marker = styles.marker(category) if category in styles.drafting else "s"
  return styles.colour(category), marker, 1.2, ("-", "--")[turn]


def _line(axes, setting, points, metric, colour, marker, width, style):
  if not points:
    return
  x = [_place(setting, p["values"][setting["name"]]) for p in points]
  y = [value_of(p, metric) for p in points]
  axes.plot(x, y, color=colour, marker=marker, markersize=3 + width, linewidth=width, linestyle=style,
            zorder=3 if width > 2 else 2)
  for place, point in zip(x, points):
    ends = point["speedup_interval"] if metric == "speedup" else point["intervals"].get(metric)
    if ends and ends[1] > ends[0]:
      axes.plot([place, place], ends, color=colour, linewidth=width, alpha=0.6, marker="_", markersize=6)


def _place(setting, value):
  """Where a value stands: itself if it is a number, else its place in the list."""
  return value if setting["numeric"] else setting["values"].index(value)


def _horizontal(axes, setting):
  values = setting["values"]
  places = [_place(setting, value) for value in values]
  if setting["numeric"] and min(values) > 0 and max(values) > 4 * min(values):
    axes.set_xscale("log", base=2)
  axes.set_xticks(places, [figures.name(sweep_setting.shown(value)) for value in values])
  axes.minorticks_off()
  axes.margins(x=0.08)
  axes.set_xlabel(setting["name"])
