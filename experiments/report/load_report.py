"""The page of a load test: facts, tables and plots of one run folder, in one file that opens without a network."""
import json
import pathlib

import jinja2
import markupsafe

from experiments.report import figures
from experiments.report import load_figures
from experiments.report import load_tables

_HERE = pathlib.Path(__file__).parent
_COMPARED = {"output_throughput": "the throughput of output tokens", "median_e2el_ms": "the median latency of requests"}
_BASES = {"steady": "in the steady window", "whole": "over whole runs"}


def write_report(outdir: pathlib.Path) -> pathlib.Path:
  """Writes `report.html` and `plots/*.png` into the folder of a load test, and returns the path of the page.

  Args:
    outdir: a folder with `summary.json`, `config.json` and `environment.json`.

  Raises:
    ValueError: the folder holds no load test; the message names the file.
  """
  outdir = pathlib.Path(outdir)
  summary, config, environment = (_read(outdir / name) for name in ("summary.json", "config.json", "environment.json"))
  if summary.get("kind") != "serve_load":
    raise ValueError(f"{outdir / 'summary.json'} is of no load test; experiments.serve_load writes one")
  template = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True,
                                lstrip_blocks=True, undefined=jinja2.StrictUndefined).get_template("load.html.j2")
  html = template.render(
      title=f"{config.get('target')}: serving under load", facts=_facts(summary, config, environment),
      command=config.get("command", ""), warnings=_warnings(summary, environment),
      colour=figures.Styles(summary["methods"]).colour, break_even=load_tables.break_even(summary),
      compared=f"{_COMPARED[summary['compares']]}, {_BASES[summary['basis']]}",
      results=load_tables.build(summary, load_tables.RESULTS, keep_empty=False),
      engine=load_tables.build(summary, load_tables.ENGINE, keep_empty=False),
      categories=load_tables.categories(summary), plots=load_figures.draw_all(summary, outdir / "plots"),
      records=[(name, json.dumps(record, indent=2, ensure_ascii=False)) for name, record in (
          ("config.json", config), ("environment.json", environment))],
      style=markupsafe.Markup((_HERE / "report.css").read_text(encoding="utf-8")))
  path = outdir / "report.html"
  path.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")
  return path


def _read(path):
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} cannot be read ({error}); give the folder of a load test") from error


def _facts(summary, config, environment):
  """The head of the page: what was run, on what, when."""
  listed = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else value
  values = ", ".join(f"{value:g}" for value in summary["sweep"]["values"])
  limits = summary["goodput"] and ", ".join(f"{name} {limit:g} ms" for name, limit in summary["goodput"].items())
  facts = [
      ("target", config.get("target")), ("methods", summary["methods"]), ("servers", config.get("base_url")),
      ("load", summary["sweep"]["unit"] + (f": {values}" if summary["sweep"]["kind"] != "at_once" else "")),
      ("rounds", max(point["rounds"] for point in summary["points"])), ("workload", config.get("workload")),
      ("output tokens", f"at most {config.get('max_new_tokens')} a request"),
      ("temperature", config.get("temperature")), ("verifier", config.get("verifier")), ("goodput limits", limits),
      ("devices", environment.get("devices")), ("CPU", environment.get("cpu_model")),
      ("CPU cores", environment.get("cpu_cores")), ("jax", (environment.get("packages") or {}).get("jax")),
      ("revision", environment.get("revision")), ("date", config.get("date"))]
  return [(name, listed(value)) for name, value in facts if value not in (None, "", [])]


def _warnings(summary, environment):
  found = list(summary["warnings"])
  if summary.get("partial"):
    found.append("Partial test: it ended before all of its runs were made.")
  if environment.get("backend") == "cpu":
    found.append("Measured on a CPU, where the client, the engine's host part and the model share the cores: where "
                 "drafting ceases to pay differs on an accelerator.")
  for point in summary["points"]:
    same = point["identical_to_plain"]
    if same and same[0] < same[1]:
      found.append(f"{point['method']} at {point['point']:g}: {same[0]} of {same[1]} outputs are those of plain "
                   "decoding.")
  return found
