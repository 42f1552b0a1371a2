"""The distribution of a request's latency under each method: the share of requests that were done by then."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from matplotlib import figure as mpl_figure
from matplotlib import ticker

from experiments.report import figures
from experiments.report.run_folder import PLAIN


def draw_all(lines: Sequence[dict[str, Any]], methods: Sequence[str] | Mapping[str, str], folder: pathlib.Path,
             suffix: str = "") -> list[figures.Plot]:
  """The plot, written to `folder` as PNG too; nothing where no record has a latency.

  Args:
    lines: records of `requests.jsonl`, one setting's. methods, folder, suffix: as in `figures.draw_all`.
  """
  folder.mkdir(parents=True, exist_ok=True)
  styles = figures.Styles(methods)
  light = figures.render(distribution, lines, styles, figures.LIGHT, folder / f"latency{suffix}.png")
  if light is None:
    return []
  return [figures.Plot("Latency", "Share of the requests that took no longer, turn by turn and repeat by repeat; the "
                       "time axis is logarithmic.", light,
                       figures.render(distribution, lines, styles, figures.DARK, None))]


def distribution(fig: mpl_figure.Figure, lines: Sequence[dict[str, Any]], styles: figures.Styles) -> bool:
  """A step line a method, plain decoding among them."""
  times = {}
  for line in lines:
    if isinstance(line.get("latency_ms"), int | float):
      times.setdefault(line["method"], []).append(line["latency_ms"])
  methods = [method for method in (PLAIN, *styles.drafting) if method in times]
  if not methods:
    return False
  fig.set_size_inches(7.2, 3.1)
  axes = fig.subplots()
  drawn = []
  for method in methods:
    ordered = sorted(times[method])
    shares = [i / len(ordered) for i in range(len(ordered) + 1)]
    drawn += axes.step([ordered[0], *ordered], shares, where="post", linewidth=1.4, color=styles.colour(method))
  axes.set_xscale("log")
  for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
    axis(ticker.LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
  axes.set_xlabel("milliseconds of a request")
  axes.set_ylim(-0.03, 1.03)
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  figures.legend(fig, [], styles, [(line, styles.label(method)) for line, method in zip(drawn, methods)])
  return True
