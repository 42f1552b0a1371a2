"""The plots of the page, drawn with matplotlib: one function a plot, each from the groups of one setting.

A plot is drawn once for a light and once for a dark page. Method and category names are data, so `$` never starts a
formula and control characters never reach the SVG.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import io
import math
import pathlib
from typing import Any
import warnings

import matplotlib
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import patches as mpl_patches
from matplotlib import ticker

from experiments.report.run_folder import ALL, PLAIN
from specjax.theory import experts as experts_theory

Group = dict[str, Any]
Draw = Callable[[mpl_figure.Figure, Sequence[Group], "Styles"], bool]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b6bb1")  # Okabe and Ito, and a violet
_PLAIN_COLOUR = "#8a8f98"
_MARKERS = "osD^vP*Xhp<>"
_COSTS = (("draft_ms", "draft", "#e69f00"), ("verify_ms", "verify", "#0072b2"), ("commit_ms", "commit", "#009e73"),
          ("other_ms", "other", "#8a8f98"))
LIGHT = {"ink": "#2b2f36", "grid": "#dfe2e6", "paper": "#ffffff"}
DARK = {"ink": "#d5d9df", "grid": "#363b44", "paper": "#16181d"}


class Styles:
  """One look and one name per method, the same in every plot and in the tables.

  `methods` in order; a mapping gives the names that legends show.
  """

  def __init__(self, methods: Sequence[str] | Mapping[str, str]):
    self._labels = methods if isinstance(methods, Mapping) else {}
    self.drafting = [method for method in methods if method != PLAIN]

  def colour(self, method: str) -> str:
    if method not in self.drafting:
      return _PLAIN_COLOUR
    return _COLOURS[self.drafting.index(method) % len(_COLOURS)]

  def marker(self, method: str) -> str:
    return _MARKERS[self.drafting.index(method) % len(_MARKERS)]

  def label(self, method: str) -> str:
    """The method's name, cut to fit, and whatever the label says behind it in full: that it is lossy must be seen."""
    return name(method) + self._labels.get(method, method).removeprefix(method)

  def hatch(self, method: str) -> str:
    """Tells apart two methods that share a colour, from the eighth on."""
    return ("", "////", "....", "xxxx")[self.drafting.index(method) // len(_COLOURS) % 4]


@dataclasses.dataclass(frozen=True)
class Plot:
  """A drawn plot: its title and caption, and data URLs for a light and a dark page."""
  title: str
  caption: str
  light: str
  dark: str


def name(text: str) -> str:
  """A name as a plot can show it."""
  text = "".join(char if char.isprintable() else "?" for char in text)
  text = text if len(text) <= 30 else text[:29] + "…"
  return f" {text}" if text.startswith("_") else text  # matplotlib hides labels that start with an underscore


def draw_all(groups: Sequence[Group], methods: Sequence[str] | Mapping[str, str], folder: pathlib.Path,
             suffix: str = "") -> list[Plot]:
  """Draws what the groups have values for and writes each plot to `folder` as PNG.

  Args:
    groups: the cells of one setting, language "all".
    methods: all methods of the run, in order; they fix the colours. See `Styles`.
    folder: where the PNG files go.
    suffix: appended to the file names, for runs with several settings.
  """
  folder.mkdir(parents=True, exist_ok=True)
  styles = Styles(methods)
  plots = []
  for stem, draw, title, caption in _PLOTS:
    light = render(draw, groups, styles, LIGHT, folder / f"{stem}{suffix}.png")
    if light is not None:
      plots.append(Plot(title, caption, light, render(draw, groups, styles, DARK, None)))
  return plots


def speedup_bars(fig: mpl_figure.Figure, groups: Sequence[Group], styles: Styles) -> bool:
  """Speedup by category, one bar a method, with intervals."""
  found = {(group["category"], group["method"]): group for group in groups
           if group["speedup"] is not None and group["method"] in styles.drafting}
  categories = _categories(groups, {category for category, _ in found})
  methods = _present(styles, found.values())
  if not found:
    return False
  bars = len(categories) * (len(methods) + 1)
  fig.set_size_inches(min(max(7.2, 1.2 + 0.2 * bars), 15), 3.5)
  axes = fig.subplots()
  width = 0.8 / len(methods)
  labelled = width * fig.get_figwidth() / (len(categories) + 1) > 0.3  # inches: room for the number over a bar
  for j, method in enumerate(methods):
    for i, category in enumerate(categories):
      group = found.get((category, method))
      if group is None:
        continue
      x, y = i + (j - (len(methods) - 1) / 2) * width, group["speedup"]
      axes.bar(x, y, 0.92 * width, color=styles.colour(method), hatch=styles.hatch(method),
               edgecolor=matplotlib.rcParams["axes.facecolor"], linewidth=0)
      low, high = group["speedup_interval"] or (y, y)
      if high > low:
        axes.errorbar(x, y, [[max(y - low, 0)], [max(high - y, 0)]], color=matplotlib.rcParams["text.color"],
                      linewidth=1, capsize=2)
      if labelled:
        axes.annotate(f"{y:.2f}", (x, max(y, high)), (0, 2), textcoords="offset points", ha="center", va="bottom",
                      fontsize=7)
  axes.axhline(1, color=matplotlib.rcParams["text.color"], linewidth=1, linestyle=(0, (4, 3)))
  labels = [name(category) for category in categories]
  turned = max(map(len, labels)) > 84 / len(labels)
  axes.set_xticks(range(len(labels)), labels, rotation=25 if turned else 0, ha="right" if turned else "center")
  axes.set_xlim(-0.6, len(labels) - 0.4)
  axes.margins(y=0.12)
  axes.set_ylim(bottom=0)
  axes.set_ylabel("speedup over plain decoding")
  axes.grid(axis="x", visible=False)
  legend(fig, methods, styles, bars=True)
  return True


def acceptance_overall(fig: mpl_figure.Figure, groups: Sequence[Group], styles: Styles) -> bool:
  """Acceptance by drafted position over all categories, unconditional and conditional side by side."""
  groups = [group for group in groups if group["category"] == ALL and _has_positions(group, styles)]
  if not groups:
    return False
  fig.set_size_inches(7.2, 3.1)
  both = fig.subplots(1, 2, sharey=True, sharex=True)
  for axes, field, title in zip(both, _FIELDS, ("unconditional", "conditional")):
    for group in groups:
      _positions(axes, group, field, styles, "-")
    _position_axes(axes, title)
    axes.set_xlabel("drafted position")
  fig.axes[0].set_ylabel("accepted")
  legend(fig, _present(styles, groups), styles)
  return True


def acceptance_by_category(fig: mpl_figure.Figure, groups: Sequence[Group], styles: Styles) -> bool:
  """Acceptance by drafted position, one small panel a category."""
  groups = [group for group in groups if group["category"] != ALL and _has_positions(group, styles)]
  categories = _categories(groups, {group["category"] for group in groups})
  if not categories:
    return False
  columns = min(3, len(categories))
  rows = math.ceil(len(categories) / columns)
  fig.set_size_inches(7.2, 0.7 + 1.9 * rows)
  grid = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
  for axes, category in zip(grid.flat, categories):
    for group in groups:
      if group["category"] == category:
        for field, line in zip(_FIELDS, ("-", ":")):
          _positions(axes, group, field, styles, line)
    _position_axes(axes, name(category))
  for axes in grid.flat[len(categories):]:
    axes.remove()
  fig.supxlabel("drafted position", fontsize=9)
  fig.supylabel("accepted", fontsize=9)
  ink = matplotlib.rcParams["text.color"]
  legend(fig, _present(styles, groups), styles, [
      (mpl_lines.Line2D([], [], color=ink, linestyle="-"), "unconditional"),
      (mpl_lines.Line2D([], [], color=ink, linestyle=":"), "conditional")])
  return True


def predicted_and_measured(fig: mpl_figure.Figure, groups: Sequence[Group], styles: Styles) -> bool:
  """The cost model's speedup against the measured one; the diagonal is a perfect prediction."""
  groups = [group for group in groups if group["method"] in styles.drafting
            and group["speedup"] is not None and group["predicted_speedup"] is not None]
  if not groups:
    return False
  fig.set_size_inches(5.6, 4.3)
  axes = fig.subplots()
  values = [group[field] for group in groups for field in ("speedup", "predicted_speedup")]
  values += [end for group in groups for end in group["speedup_interval"] or ()]
  low, high = min(values + [1]), max(values + [1])
  edge = 0.08 * (high - low) or 0.1
  ends = (low - edge, high + edge)
  ink = matplotlib.rcParams["text.color"]
  axes.plot(ends, ends, color=ink, linewidth=1, linestyle=(0, (4, 3)))
  points = [(group["predicted_speedup"], group["speedup"]) for group in groups]
  named = []  # the worst predicted first: their names are wanted most
  for group in sorted(groups, key=lambda group: -abs(group["speedup"] - group["predicted_speedup"])):
    overall = group["category"] == ALL
    x, y, colour = group["predicted_speedup"], group["speedup"], styles.colour(group["method"])
    bottom, top = group["speedup_interval"] or (y, y)
    axes.plot([x, x], [bottom, top], color=colour, linewidth=1, alpha=0.5)
    axes.plot(x, y, marker=styles.marker(group["method"]), color=colour, markersize=9 if overall else 5.5,
              markeredgecolor=ink if overall else matplotlib.rcParams["axes.facecolor"],
              markeredgewidth=1.2 if overall else 0.5)
    crossed = any(0 < a - x < 2 * edge and abs(b - y) < 0.3 * edge for a, b in points)
    if not crossed and all(abs(a - x) > 2 * edge or abs(b - y) > 0.5 * edge for a, b in named):
      named.append((x, y))
      axes.annotate(name(group["category"]), (x, y), (7, 0), textcoords="offset points", va="center", fontsize=6.5)
  axes.set_xlim(ends[0], ends[1] + edge)  # room for the last name
  axes.set_ylim(ends)
  axes.set_xlabel("predicted speedup")
  axes.set_ylabel("measured speedup")
  legend(fig, _present(styles, groups), styles)
  return True


def step_cost(fig: mpl_figure.Figure, groups: Sequence[Group], styles: Styles) -> bool:
  """Where the time of a step goes, over all categories (every category where the overall group is missing)."""
  groups = [group for group in groups if any(group[field] is not None for field, _, _ in _COSTS)]
  groups = [group for group in groups if group["category"] == ALL] or groups
  if not groups:
    return False
  fig.set_size_inches(7.2, 1.0 + 0.36 * len(groups))
  axes = fig.subplots()
  for i, group in enumerate(groups):
    left = 0.0
    for field, _, colour in _COSTS:
      width = max(group[field] or 0, 0)  # parts measured apart may exceed the step: the rest is then below zero
      axes.barh(i, width, 0.66, left=left, color=colour)
      left += width
    total = sum(group[field] or 0 for field, _, _ in _COSTS)
    axes.annotate(f"{total:.1f}", (left, i), (4, 0), textcoords="offset points", va="center", fontsize=8)
  labels = [styles.label(group["method"]) + ("" if group["category"] == ALL else f", {name(group['category'])}")
            for group in groups]
  axes.set_yticks(range(len(groups)), labels)
  axes.invert_yaxis()
  axes.margins(x=0.08)
  axes.set_xlabel("milliseconds per step")
  axes.grid(axis="y", visible=False)
  fig.legend([mpl_patches.Patch(color=colour) for _, _, colour in _COSTS], [label for _, label, _ in _COSTS],
             loc="outside upper left", ncols=4)
  return True


def experts_touched(fig: mpl_figure.Figure, groups: Sequence[Group], styles: Styles) -> bool:
  """Distinct experts of a pass by its tokens: as passes of the run had them, over the tokens of one text, and if every
  token chose at random."""
  groups = [group for group in groups if group.get("experts") and group["experts"]["by_width"]]
  groups = [group for group in groups if group["category"] == ALL] or groups
  if not groups:
    return False
  axes, extra = fig.subplots(), []
  fig.set_size_inches(7.2, 3.5)
  for group in groups:
    rows = [row for row in group["experts"]["by_width"] if row["nodes"] and row["distinct"]]
    drafting = group["method"] in styles.drafting
    axes.plot([row["nodes"] for row in rows], [row["distinct"] for row in rows], linestyle="",
              marker=styles.marker(group["method"]) if drafting else "s", color=styles.colour(group["method"]))
  first = groups[0]["experts"]
  ink = matplotlib.rcParams["text.color"]
  cost = next((group["experts"]["cost"] for group in groups if group["experts"]["cost"]), None)
  if cost:
    points = [point for point in cost["points"] if point["tokens"] == 1 or point["kind"] == "text"]
    extra += [(axes.plot([point["tokens"] for point in points], [point["distinct"] for point in points], color=ink,
                         linewidth=1.2)[0], "tokens of a text")]
  tokens = [2 ** (i / 4) for i in range(25)]
  at_random = [experts_theory.expected_distinct(int(first["experts"]), int(first["chosen"]), t) for t in tokens]
  extra += [(axes.plot(tokens, at_random, color=ink, linewidth=1, linestyle=(0, (4, 3)))[0], "at random")]
  axes.set_xscale("log", base=2)
  axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
  axes.set_ylim(bottom=0)
  axes.set_xlabel("tokens of a pass")
  axes.set_ylabel("distinct experts a layer")
  legend(fig, _present(styles, groups), styles, extra)
  return True


_FIELDS = ("accepted_per_position", "conditional_per_position")
_PLOTS: tuple[tuple[str, Draw, str, str], ...] = (
    ("speedup", speedup_bars, "Speedup by category",
     "Against plain decoding; lines are 95% intervals, the dashed line is plain decoding."),
    ("acceptance_overall", acceptance_overall, "Acceptance by position",
     "Unconditional: how often a draft was accepted up to this position. Conditional: given that the positions before "
     "it were accepted."),
    ("acceptance_by_category", acceptance_by_category, "Acceptance by position and category",
     "Solid: unconditional. Dotted: conditional."),
    ("predicted", predicted_and_measured, "Predicted and measured speedup",
     "One mark a category, the large one over all, named where there is room. On the dashed line the cost model is "
     "right."),
    ("step_cost", step_cost, "Where a step spends its time", "Means over all categories, in milliseconds."),
    ("experts", experts_touched, "Experts that a pass goes through",
     "Mean over layers; their weights are what a pass must read. Marks: verify passes of the run, a mark a width. Dashed: "
     "if every token chose at random, each for itself."))


def _has_positions(group: Group, styles: Styles) -> bool:
  return group["method"] in styles.drafting and any(
      value is not None for field in _FIELDS for value in group[field])


def _positions(axes: Any, group: Group, field: str, styles: Styles, line: str) -> None:
  values = [math.nan if value is None else value for value in group[field]]
  method = group["method"]
  axes.plot(range(1, len(values) + 1), values, line, color=styles.colour(method), marker=styles.marker(method),
            markersize=3.5, linewidth=1.4)


def _position_axes(axes: Any, title: str) -> None:
  axes.set_title(title, fontsize=9)
  axes.set_ylim(-0.03, 1.03)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))


def _categories(groups: Sequence[Group], present: set[str]) -> list[str]:
  """The categories with values, in the order of the summary, the overall one first."""
  order = [category for category in dict.fromkeys(group["category"] for group in groups) if category in present]
  return sorted(order, key=lambda category: category != ALL)


def _present(styles: Styles, groups: Any) -> list[str]:
  present = {group["method"] for group in groups}
  return [method for method in styles.drafting if method in present]


def legend(fig: mpl_figure.Figure, methods: Sequence[str], styles: Styles, extra: Sequence[tuple[Any, str]] = (), *,
            bars: bool = False) -> None:
  """Puts the legend above the axes, in as few lines as its names allow."""
  if bars:
    handles = [mpl_patches.Patch(facecolor=styles.colour(method), hatch=styles.hatch(method),
                                     edgecolor=matplotlib.rcParams["axes.facecolor"], linewidth=0)
               for method in methods]
  else:
    handles = [mpl_lines.Line2D([], [], color=styles.colour(method), marker=styles.marker(method), markersize=4)
               for method in methods]
  labels = [styles.label(method) for method in methods] + [label for _, label in extra]
  room = 13 * fig.get_figwidth()  # characters, of which a handle and its spacing take about seven
  if sum(len(label) + 7 for label in labels) <= room:
    columns = len(labels)
  else:
    columns = max(1, int(room / (max(map(len, labels)) + 7)))
  fig.legend(handles + [handle for handle, _ in extra], labels, loc="outside upper left", ncols=columns)


def render(draw: Draw, groups: Sequence[Group], styles: Styles, theme: dict[str, str],
            png: pathlib.Path | None) -> str | None:
  """Draws a plot and returns it as an SVG data URL; None where the groups hold nothing for it."""
  settings = {
      "text.parse_math": False, "font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "specjax", "text.color":
      theme["ink"], "axes.labelcolor": theme["ink"], "xtick.color": theme["ink"], "ytick.color": theme["ink"],
      "axes.edgecolor": theme["grid"], "axes.facecolor": theme["paper"], "figure.facecolor": theme["paper"],
      "axes.grid": True, "grid.color": theme["grid"], "grid.linewidth": 0.7, "axes.axisbelow": True,
      "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8.5,
      "xtick.major.size": 0, "ytick.major.size": 0}
  with matplotlib.rc_context(settings), warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a name in another script: boxes will do
    fig = mpl_figure.Figure(layout="constrained")
    if not draw(fig, groups, styles):
      return None
    if png is not None:
      fig.savefig(png, dpi=150)
    buffer = io.BytesIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
  return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
