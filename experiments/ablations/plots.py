"""The plot of an ablation: our curves as lines, published points as hollow marks of the same colours."""
import base64
import html
import pathlib
import re

import matplotlib
from matplotlib import figure as mpl_figure
from matplotlib import lines as mpl_lines
from matplotlib import ticker

from experiments.ablations import base
from experiments.report import figures


def draw(ablation: base.Ablation, result: base.Result, folder: pathlib.Path) -> str:
  """Writes `plot.png` and `plot.svg` and returns the SVG as an element for a page.

  The element's text and lines take the page's colours (`--ink`, `--line`, `--paper`), and its ids are its own, so that
  many stand in one page.
  """
  lines = lambda fig, _, styles: _draw(fig, ablation, result, styles)
  styles = figures.Styles([series.label for series in result.curves])
  url = figures.render(lines, [], styles, figures.LIGHT, folder / "plot.png")
  svg = base64.b64decode(url.partition(",")[2]).decode("utf-8")
  (folder / "plot.svg").write_text(svg, encoding="utf-8")
  return _inline(svg, ablation)


def _draw(fig: mpl_figure.Figure, ablation: base.Ablation, result: base.Result, styles: figures.Styles) -> bool:
  entries = len(result.curves) + len(result.published)
  fig.set_size_inches(7.2, 3.6 + .17 * ((entries + 1) // 2))
  axes, ink = fig.subplots(), matplotlib.rcParams["text.color"]
  handles = []
  for series in result.curves:
    y = [float("nan") if value is None else value for value in series.y]
    # Between names there is nothing.
    handles += axes.plot(series.x, y, linestyle="" if result.ticks else "-", color=styles.colour(series.label),
                         linewidth=1.4, marker=styles.marker(series.label), markersize=3.5, label=series.label)
  for points in result.published:
    colour = styles.colour(points.of) if points.of else ink
    axes.plot(points.x, points.y, linestyle=":" if points.joined else "", linewidth=1.2, color=colour, marker="s",
              markersize=7, markerfacecolor="none", markeredgewidth=1.3, zorder=5)
    handles.append(mpl_lines.Line2D([], [], linestyle=":" if points.joined else "", color=colour, marker="s",
                                    markersize=6, markerfacecolor="none", label=points.label))
  if result.level is not None:
    axes.axhline(result.level, color=ink, linewidth=1, linestyle=(0, (4, 3)))
  if result.log_x:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
  if result.ticks:
    axes.set_xticks(range(len(result.ticks)), result.ticks, fontsize=8)
  axes.set_xlabel(result.x_axis)
  axes.set_ylabel(result.y_axis)
  axes.set_title(f"{ablation.title} ({result.verdict})", fontsize=10)
  fig.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=8)
  return True


def _inline(svg: str, ablation: base.Ablation) -> str:
  svg = svg[svg.index("<svg"):]
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  for theme, name in (("ink", "--ink"), ("grid", "--line"), ("paper", "--paper")):
    svg = svg.replace(figures.LIGHT[theme], f"var({name})")
  for before in ('id="', 'url(#', 'href="#'):
    svg = svg.replace(before, f"{before}{ablation.name}-")
  # The drawing's size in points would keep it from shrinking on a phone; its view box says the proportions.
  head, body = svg.split(">", 1)
  head = re.sub(r' (?:width|height)="[^"]*"', "", head)
  label = html.escape(ablation.title)
  return head.replace("<svg", f'<svg role="img" aria-label="{label}"') + ">" + body
