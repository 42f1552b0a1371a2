"""The plots of a load test: one function a plot, each from the summary of `harness.load_summary`."""
import pathlib
from typing import Any

import matplotlib
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import ticker

from experiments.report import figures
from experiments.report.run_folder import PLAIN

Summary = dict[str, Any]


def draw_all(summary: Summary, folder: pathlib.Path) -> list[figures.Plot]:
  """Draws what the summary has values for and writes each plot to `folder` as PNG."""
  folder.mkdir(parents=True, exist_ok=True)
  styles, plots = figures.Styles(summary["methods"]), []
  for stem, draw, title, caption in _PLOTS:
    light = figures.render(draw, summary, styles, figures.LIGHT, folder / f"{stem}.png")
    if light is not None:
      plots.append(figures.Plot(title, caption, light, figures.render(draw, summary, styles, figures.DARK, None)))
  return plots


def throughput(fig: mpl_figure.Figure, summary: Summary, styles: figures.Styles) -> bool:
  """Output tokens a second over the load."""
  if len(summary["sweep"]["values"]) < 2:
    return False
  axes = fig.subplots()
  fig.set_size_inches(7.2, 3.5)
  for method in summary["methods"]:
    points = _of(summary, method)
    _line(axes, [p["point"] for p in points], [p["metrics"]["output_throughput"] for p in points], method, styles,
          [p["spread"].get("output_throughput") for p in points])
    steady = [p["steady"] and p["steady"]["output_throughput"] for p in points]
    if all(steady):
      axes.plot([p["point"] for p in points], steady, color=styles.colour(method), linewidth=1, linestyle=":")
  _load_axis(axes, summary)
  axes.set_ylim(bottom=0)
  axes.set_ylabel("output tokens a second")
  ink = matplotlib.rcParams["text.color"]
  _legend(fig, summary, styles, [(mpl_lines.Line2D([], [], color=ink, linestyle=":"), "steady window")])
  return True


def trade_off(fig: mpl_figure.Figure, summary: Summary, styles: figures.Styles) -> bool:
  """Throughput over latency, the points of a sweep joined: better is up and to the left."""
  key = "tpot" if summary["compares"] == "output_throughput" else "e2el"
  names = [f"median_{key}_ms", f"p99_{key}_ms"]
  if not any(p["metrics"][name] for p in summary["points"] for name in names):
    return False
  fig.set_size_inches(7.2, 3.6)
  both = fig.subplots(1, 2, sharey=True)
  for axes, name in zip(both, names):
    for method in summary["methods"]:
      known = [p for p in _of(summary, method) if p["metrics"][name] and p["metrics"]["output_throughput"]]
      x, y = ([p["metrics"][field] for p in known] for field in (name, "output_throughput"))
      _line(axes, x, y, method, styles)
      for p, a, b in zip(known, x, y):
        axes.annotate(f"{p['point']:g}", (a, b), (4, -7), textcoords="offset points", fontsize=6)
    axes.set_xlabel(f"{name.split('_')[0]} {'time per output token' if key == 'tpot' else 'latency'}, ms")
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
  both[0].set_ylim(bottom=0)
  both[0].set_ylabel("output tokens a second")
  _legend(fig, summary, styles)
  return True


def speedup(fig: mpl_figure.Figure, summary: Summary, styles: figures.Styles) -> bool:
  """The speedup over plain decoding, and where it goes through 1."""
  drafting = [m for m in styles.drafting if any(p["speedup"] for p in _of(summary, m))]
  if not drafting:
    return False
  fig.set_size_inches(7.2, 3.5)
  axes, ink = fig.subplots(), matplotlib.rcParams["text.color"]
  for method in drafting:
    points = [p for p in _of(summary, method) if p["speedup"]]
    _line(axes, [p["point"] for p in points], [p["speedup"]["median"] for p in points], method, styles,
          [(p["speedup"]["low"], p["speedup"]["high"]) for p in points])
    for place in summary["break_even"][method]:
      axes.plot(place["at"], 1, marker="|", markersize=14, markeredgewidth=2, color=styles.colour(method))
      axes.annotate(f"{place['at']:.3g}", (place["at"], 1), (0, 9), textcoords="offset points", ha="center", fontsize=7,
                    color=styles.colour(method))
  axes.axhline(1, color=ink, linewidth=1, linestyle=(0, (4, 3)))
  _load_axis(axes, summary)
  axes.set_ylim(bottom=0)
  axes.set_ylabel("speedup over plain decoding")
  _legend(fig, summary, styles, methods=drafting)
  return True


def first_token(fig: mpl_figure.Figure, summary: Summary, styles: figures.Styles) -> bool:
  """Time to the first token over the load: median, 95th and 99th percentile."""
  if not any(p["metrics"]["p99_ttft_ms"] for p in summary["points"]):
    return False
  fig.set_size_inches(7.2, 3.1)
  panels = fig.subplots(1, 3, sharex=True, sharey=True)
  for axes, name in zip(panels, ("p50", "p95", "p99")):
    for method in summary["methods"]:
      points = _of(summary, method)
      _line(axes, [p["point"] for p in points], [p["metrics"][f"{name}_ttft_ms"] for p in points], method, styles)
    axes.set_title(name, fontsize=9)
    _load_axis(axes, summary, named=False)
  panels[0].set_yscale("log")
  panels[0].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  panels[0].yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))  # its own writes formulas
  panels[0].yaxis.set_minor_formatter(ticker.NullFormatter())
  panels[0].set_ylabel("time to the first token, ms")
  fig.supxlabel(summary["sweep"]["unit"], fontsize=9)
  _legend(fig, summary, styles)
  return True


def acceptance(fig: mpl_figure.Figure, summary: Summary, styles: figures.Styles) -> bool:
  """Accepted over drafted tokens by category, at the lightest load, one bar a method."""
  first = [p for p in summary["points"] if p["point"] == summary["sweep"]["values"][0]]
  rates = {(p["method"], name): counts["spec_decode_acceptance_rate"] for p in first
           for name, counts in p["categories"].items() if counts["spec_decode_acceptance_rate"] is not None}
  categories = [name for name in dict.fromkeys(name for p in first for name in p["categories"])
                if any(name == category for _, category in rates)]
  if not rates:
    return False
  methods = [m for m in styles.drafting if any(m == method for method, _ in rates)]
  fig.set_size_inches(7.2, 1.2 + (0.15 + 0.12 * len(methods)) * len(categories))
  axes = fig.subplots()
  for (method, category), rate in rates.items():
    place = categories.index(category) + 0.7 * ((methods.index(method) + 0.5) / len(methods) - 0.5)
    axes.barh(place, rate, 0.6 / len(methods), color=styles.colour(method), hatch=styles.hatch(method))
    axes.plot(rate, place, linestyle="", marker=_marker(styles, method), color=styles.colour(method), markersize=4)
  axes.set_yticks(range(len(categories)), [figures.name(category) for category in categories])
  axes.set_ylim(len(categories) - 0.5, -0.5)
  axes.set_xlim(0, 102)
  axes.xaxis.set_major_formatter(ticker.PercentFormatter(100, decimals=0))
  axes.set_xlabel("drafted tokens that were accepted")
  _legend(fig, summary, styles, methods=methods)
  return True


def occupancy(fig: mpl_figure.Figure, summary: Summary, styles: figures.Styles) -> bool:
  """How full the batch was, and how much was drafted in it, over the load."""
  if not any(p["engine"] and p["engine"]["steps"] for p in summary["points"]):
    return False
  fig.set_size_inches(7.2, 3.2)
  rows, slots, drafts = fig.subplots(1, 3, sharex=True)
  for method in summary["methods"]:
    points = [p for p in _of(summary, method) if p["engine"]]
    for axes, name in ((rows, "mean_rows_running"), (slots, "slot_occupancy"), (drafts, "mean_draft_tokens")):
      _line(axes, [p["point"] for p in points], [p["engine"][name] for p in points], method, styles)
    rows.plot([p["point"] for p in points], [p["engine"]["mean_rows_computed"] for p in points], linestyle=":",
              color=styles.colour(method), linewidth=1)
  for axes, title in ((rows, "rows; dotted: computed"), (slots, "cache slots in use"),
                      (drafts, "drafted a row and step")):
    axes.set_title(title, fontsize=9)
    axes.set_ylim(bottom=0)
    _load_axis(axes, summary, named=False)
  slots.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  fig.supxlabel(summary["sweep"]["unit"], fontsize=9)
  _legend(fig, summary, styles)
  return True


_PLOTS = (
    ("throughput", throughput, "Throughput over the load",
     "Medians over rounds, with the least and the greatest; whole runs, and dotted the steady window."),
    ("speedup", speedup, "Speedup over the load",
     "Against plain decoding in the same round: medians, with the least and the greatest. Below the dashed line "
     "drafting loses time; a tick marks where a method breaks even, interpolated between points."),
    ("trade_off", trade_off, "Throughput and latency",
     "A line a method, through the points of the sweep, whose values stand beside them. Up and to the left is better."),
    ("first_token", first_token, "Time to the first token", "The queue included, median and tails."),
    ("acceptance", acceptance, "Acceptance by category", "Pooled over all rounds at the lightest load."),
    ("occupancy", occupancy, "The batch", "Means over decode steps."))


def _of(summary, method):
  return [point for point in summary["points"] if point["method"] == method]


def _marker(styles, method):
  return "s" if method == PLAIN else styles.marker(method)


def _line(axes, x, y, method, styles, spread=None):
  """One method's line; values that are not known are left out."""
  known = [(a, b, ends) for a, b, ends in zip(x, y, spread or [None] * len(x)) if a is not None and b is not None]
  if not known:
    return
  x, y, ends = zip(*known)
  colour = styles.colour(method)
  axes.plot(x, y, color=colour, marker=_marker(styles, method), markersize=4, linewidth=1.4)
  for a, pair in zip(x, ends):
    if pair is not None and pair[1] > pair[0]:
      axes.plot([a, a], pair, color=colour, linewidth=1, alpha=0.6)


def _load_axis(axes, summary, named=True):
  """The horizontal axis of a plot over the load."""
  values = summary["sweep"]["values"]
  if min(values) > 0 and max(values) > 4 * min(values):
    axes.set_xscale("log", base=2)
  axes.set_xticks(values, [f"{value:g}" for value in values])
  axes.minorticks_off()
  if named:
    axes.set_xlabel(summary["sweep"]["unit"])


def _legend(fig, summary, styles, extra=(), methods=None):
  methods = summary["methods"] if methods is None else methods
  line = lambda method: mpl_lines.Line2D([], [], color=styles.colour(method), marker=_marker(styles, method),
                                         markersize=4)
  handles = [(line(method), styles.label(method)) for method in methods]
  figures.legend(fig, [], styles, handles + list(extra))
