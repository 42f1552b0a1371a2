"""The page of a sweep: the best values, curves and every point of one run folder, in a file that needs no network."""
import json
import pathlib

import jinja2
import markupsafe

from experiments.harness import sweep_setting
from experiments.harness import sweep_summary
from experiments.report import sweep_figures

_HERE = pathlib.Path(__file__).parent


def write_report(outdir: pathlib.Path) -> pathlib.Path:
  """Writes `sweep.html` and `plots/` (PNG and SVG) into the folder of a sweep, and returns the path of the page.

  Args:
    outdir: a folder with `sweep.json`, `config.json` and `environment.json`.

  Raises:
    ValueError: the folder holds no sweep; the message names the file.
  """
  outdir = pathlib.Path(outdir)
  sweep, config, environment = (_read(outdir / name) for name in ("sweep.json", "config.json", "environment.json"))
  if sweep.get("kind") != "sweep":
    raise ValueError(f"{outdir / 'sweep.json'} is of no sweep; experiments.sweep writes one")
  template = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True,
                                lstrip_blocks=True, undefined=jinja2.StrictUndefined).get_template("sweep.html.j2")
  names = [setting["name"] for setting in sweep["vary"]]
  html = template.render(
      title=f"{config.get('target')}: {' and '.join(names)} varied", facts=_facts(sweep, config, environment),
      command=config.get("command", ""), warnings=_warnings(sweep, environment), names=names,
      best=[(one["category"], one["method"], sweep_setting.label(one["values"]), f"{one['speedup']:.2f}",
             _span(one["interval"]), sweep_summary.verdict(one)) for one in sweep["best"]],
      sections=[(category, [_cells(p, names) for p in sweep["points"] if p["category"] == category])
                for category in sweep["categories"]],
      pinned=sweep_summary.pinned_text(sweep["pinned"]), plots=sweep_figures.draw_all(sweep, outdir / "plots"),
      records=[(name, json.dumps(record, indent=2, ensure_ascii=False)) for name, record in (
          ("config.json", config), ("environment.json", environment))],
      style=markupsafe.Markup((_HERE / "report.css").read_text(encoding="utf-8")))
  path = outdir / "sweep.html"
  path.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")
  return path


def _read(path):
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} cannot be read ({error}); give the folder of a sweep") from error
  if not isinstance(found, dict):
    raise ValueError(f"{path} holds no JSON object; give the folder of a sweep")
  return found


def _facts(sweep, config, environment):
  """The head of the page: what was varied, on what, when."""
  listed = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else value
  varied = "; ".join(f"{s['name']}: {', '.join(map(sweep_setting.shown, s['values']))}" for s in sweep["vary"])
  facts = [("target", config.get("target")), ("varied", varied), ("methods", sweep["methods"]),
           ("workload", config.get("workload")), ("requests", len(config.get("request_ids", []))),
           ("repeats", config.get("repeats")), ("devices", environment.get("devices")),
           ("CPU", environment.get("cpu_model")), ("jax", (environment.get("packages") or {}).get("jax")),
           ("revision", environment.get("revision")), ("date", config.get("date"))]
  return [(name, listed(value)) for name, value in facts if value not in (None, "", [])]


def _warnings(sweep, environment):
  found = []
  if sweep.get("partial"):
    found.append("Partial run: it ended before all requests were measured.")
  if environment.get("backend") == "cpu":
    found.append("Measured on a CPU: the best value can differ on an accelerator.")
  if any(p["speedup"] is not None and p["speedup_interval"] is None for p in sweep["points"]):
    found.append("Cells of fewer than 3 requests have no interval: which of their values is best is not settled.")
  for point in sweep["points"]:
    same = point["identical_to_plain"]
    if point["category"] == "all" and same and same[0] < same[1]:
      found.append(f"{point['method']}, {sweep_setting.label(point['values'])}: {same[0]} of {same[1]} greedy outputs "
                   "are identical to plain decoding.")
    if point["category"] == "all" and not point["lossless"]:
      found.append(f"{point['method']}, {sweep_setting.label(point['values'])}: {point['verifier']} is lossy; its text "
                   "does not follow the target's law.")
  return found


def _cells(point, names):
  """One row: the method, and its cells as text."""
  number = lambda value, digits=2: "–" if value is None else f"{value:.{digits}f}"
  rate = lambda name, digits=2: number(point[name], digits) + (
      f" ({_span(point['intervals'][name], digits)})" if point["intervals"][name] else "")
  return point["method"], [
      *(sweep_setting.shown(point["values"][name]) if name in point["values"] else "–" for name in names),
      str(point["requests"]), rate("tokens_per_step"), rate("acceptance_rate"), rate("tokens_per_second", 1),
      number(point["speedup"]), _span(point["speedup_interval"]), number(sweep_figures.value_of(point, "latency"), 0),
      number(sweep_figures.value_of(point, "memory"), 0)]


def _span(ends, digits=2):
  return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}" if ends else "–"
