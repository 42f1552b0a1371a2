"""Puts the page together: the facts of the run, its warnings, tables, plots and outputs, in one file.

The page opens without a network. Model, prompt and method text reaches it through the template's autoescape only, and
a content policy admits no script but the page's own.
"""

import base64
import collections
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib
import shlex
from typing import Any

import jinja2
import markupsafe

from experiments.report import figures, latency, outputs, quality_tables, run_folder, tables, traces
from experiments.report.run_folder import ALL, PLAIN

_HERE = pathlib.Path(__file__).parent
_OPEN = 3  # requests shown unfolded


@dataclasses.dataclass(frozen=True)
class Setting:
  """One temperature and batch size: its tables and plots. `title` is empty where the run has only one setting."""
  title: str
  findings: list[tables.Finding]
  best: list[tables.Best]
  prediction: str
  quality: tables.Table | None
  differences: list[str]
  results: tables.Table | None
  languages: tables.Table | None
  costs: tables.Table | None
  experts: tables.Table | None
  expert_cost: str
  breakdown: tables.Table | None
  plots: list[figures.Plot]
  no_interval: bool


def write_report(outdir: pathlib.Path) -> pathlib.Path:
  """Writes `report.html` and `plots/*.png` into a run folder.

  Args:
    outdir: a run folder with `summary.json`; `config.json`, `environment.json` and `requests.jsonl` as far as the run
      got.

  Returns:
    The path of the page.

  Raises:
    ValueError: the folder holds no run that can be read; the message names the file.
  """
  outdir = pathlib.Path(outdir)
  run = run_folder.load(outdir)
  random = _random_weights(run)
  appearance = dict.fromkeys(group["method"] for group in run.groups)
  methods = sorted(appearance, key=lambda method: method != PLAIN)
  shown, left_out = outputs.select(run.requests, methods)
  lossy = tables.lossy(run.groups)
  labels = {method: tables.label(method, lossy) for method in methods}
  styles = figures.Styles(methods)
  columns = tables.RESULTS + ((tables.BOUND,) if lossy else ())
  columns += (tables.ENCODER,) if any(group.get("encoder_share") for group in run.groups) else ()
  columns += (tables.WINDOWS,) if any(group.get("windows") for group in run.groups) else ()
  trace, trace_left_out = ("", 0) if random else traces.load(outdir, run.requests, methods)
  script = (_HERE / "report.js").read_text(encoding="utf-8")
  environment = jinja2.Environment(
      loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
      lstrip_blocks=True)
  html = environment.get_template("report.html.j2").render(
      title=f"{run.config.get('target') or outdir.name}: speculative decoding",
      facts=_facts(run, methods), command=_command(run), lossy=tables.lossy_lines(run.groups, rates=not random),
      warnings=_warnings(run, methods, random), random=random,
      settings=_settings(run, methods, labels, columns, outdir / "plots", random), plain=PLAIN,
      drafting=styles.drafting, colour=styles.colour, labels=labels, columns=columns, cost_columns=tables.COSTS,
      requests=shown, left_out=left_out,
      trace=markupsafe.Markup(trace), trace_left_out=trace_left_out,
      categories=list(dict.fromkeys(request.category for request in shown)), open_first=_OPEN,
      records=[(name, json.dumps(record, indent=2, ensure_ascii=False)) for name, record in (
          ("config.json", run.config), ("environment.json", run.environment)) if record],
      script=markupsafe.Markup(script), style=markupsafe.Markup((_HERE / "report.css").read_text(encoding="utf-8")),
      script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())
  path = outdir / "report.html"
  path.write_text(html, encoding="utf-8", errors="xmlcharrefreplace")  # half a surrogate pair is possible in a piece
  return path


def _settings(run: run_folder.Run, methods: Sequence[str], labels: dict[str, str], columns: Sequence[tables.Column],
              plots: pathlib.Path, random: bool) -> list[Setting]:
  """The tables and plots of each temperature and batch size.

  A run is split only where a cell occurs twice: the last batch of a category may be smaller than the others.
  """
  names = [(group["method"], group["category"], group["language"]) for group in run.groups]
  cells = {}
  for group in run.groups:
    key = (group["temperature"], group["batch_size"]) if len(set(names)) < len(names) else (None, None)
    cells.setdefault(key, []).append(group)
  result = []
  for temperature, batch in sorted(cells, key=lambda key: [(value is None, value or 0) for value in key]):
    groups = cells[temperature, batch]
    pooled = [group for group in groups if group["language"] == ALL]
    values = [_text(value) for value in (temperature, batch)]
    title = "temperature {}, batch size {}".format(*values) if len(cells) > 1 else ""
    suffix = "_t{}_b{}".format(*values) if len(cells) > 1 else ""
    drafting = [method for method in methods if method != PLAIN]
    result.append(Setting(
        title=title,
        findings=[] if random else tables.findings(pooled, drafting),
        best=[] if random else tables.best(pooled, drafting),
        prediction="" if random else tables.prediction(pooled),
        quality=None if random else quality_tables.build(groups, methods),
        differences=[] if random else quality_tables.differences(groups),
        results=tables.build(pooled, methods, columns, rates=not random),
        languages=tables.build(
            [group for group in groups if group["language"] != ALL], methods, columns, rates=not random),
        costs=tables.build(pooled, methods, tables.COSTS, rates=not random, keep_empty=False),
        experts=tables.experts(pooled, methods), expert_cost=tables.expert_cost(pooled),
        breakdown=None if random else tables.breakdown(pooled, methods),
        plots=[] if random else figures.draw_all(pooled, labels, plots, suffix) + latency.draw_all(
            _lines_of(run.requests, temperature, batch), labels, plots, suffix),
        no_interval=any(group["speedup"] is not None and group["speedup_interval"] is None and group["method"] != PLAIN
                        for group in pooled)))
  return result


def _lines_of(requests, temperature, batch):
  """The records of one setting, all where the run has only one."""
  wanted = {"temperature": temperature, "batch_size": batch}
  return [line for line in requests if all(value is None or line.get(name) == value for name, value in wanted.items())]


def _facts(run: run_folder.Run, methods: Sequence[str]) -> list[tuple[str, str]]:
  """The head of the page: what was run, on what, when. Unknown facts are a dash."""
  config, environment = run.config, run.environment
  packages = environment.get("packages") or {}
  overall = [group for group in run.groups if group["category"] == ALL and group["language"] == ALL]
  produced = sum(group["output_tokens"] or 0 for group in overall)
  facts = [
      ("target", config.get("target")),
      ("methods", config.get("methods") or list(methods)),
      ("verifier", config.get("verifier", _values(run, "verifier"))),
      ("workload", config.get("workload")),
      ("temperature", config.get("temperature", _values(run, "temperature"))),
      ("batch size", config.get("batch_size", _values(run, "batch_size"))),
      ("tokens", f"at most {_text(config.get('max_new_tokens'))} a request; {produced:,.0f} over all methods"),
      ("devices", _devices(environment)),
      ("CPU", environment.get("cpu_model")),
      ("jax", packages.get("jax")),
      ("revision", environment.get("revision")),
      ("date", config.get("date"))]
  return [(name, _text(value)) for name, value in facts]


def _warnings(run: run_folder.Run, methods: Sequence[str], random: bool) -> list[str]:
  """What a reader must know before believing a number."""
  result = list(run.warnings)
  if random:
    result.insert(0, "Random weights: shapes only. No rate of this run says anything about a model.")
  if _on_cpu(run.environment):
    result.append("Measured on a CPU: ratios between methods can differ on an accelerator.")
  wanted = [run.config["methods"]] if isinstance(run.config.get("methods"), str) else run.config.get("methods") or []
  missing = [str(method) for method in wanted if str(method) not in methods]
  if missing:
    result.append(f"Partial run: no results for {', '.join(missing)}.")
  for method in _fewer_requests(run):
    result.append(f"Partial run: {method} has fewer requests than other methods in at least one category.")
  for method in methods:
    if "lossy" in method.lower():
      result.append(f"{method} is lossy: its outputs do not follow the target's law.")
  for group in run.groups:
    same = group["identical_to_plain"]
    if group["category"] == group["language"] == ALL and same and same[0] < same[1] and group["temperature"] == 0:
      result.append(f"{group['method']}: {same[0]:g} of {same[1]:g} greedy outputs are identical to plain decoding "
                    f"(batch size {_text(group['batch_size'])}, gap {tables.gap(group['first_difference_gap'])}).")
  return list(dict.fromkeys(result))


def _fewer_requests(run: run_folder.Run) -> list[str]:
  """The methods that did fewer requests than another one somewhere."""
  most = collections.defaultdict(float)
  cells = []
  for group in run.groups:
    cell = tuple(group[name] for name in ("category", "language", "temperature"))
    cells.append((cell, group["method"], group["requests"] or 0))
    most[cell] = max(most[cell], group["requests"] or 0)
  return list(dict.fromkeys(method for cell, method, requests in cells if requests < most[cell]))


def _random_weights(run: run_folder.Run) -> bool:
  return bool(run.config.get("random_weights")) or run.config.get("weights") == "random"


def _on_cpu(environment: dict[str, Any]) -> bool:
  if environment.get("backend"):
    return environment["backend"] == "cpu"
  devices = environment.get("devices")
  return bool(devices) and "cpu" in str(devices).lower()


def _devices(environment: dict[str, Any]) -> str | None:
  """The devices by kind, counted."""
  devices = environment.get("devices")
  if not isinstance(devices, list):
    return devices
  kinds = [device.get("kind") or device.get("device_kind") if isinstance(device, dict) else device
           for device in devices]
  counts = collections.Counter(map(_text, kinds))
  return ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in counts.items())


def _command(run: run_folder.Run) -> str:
  command = run.config.get("command")
  return shlex.join(map(str, command)) if isinstance(command, list) else _text(command)


def _values(run: run_folder.Run, name: str) -> list[Any]:
  return sorted({group[name] for group in run.groups if group[name] is not None})


def _text(value: Any) -> str:
  """A value of the configuration as a reader expects it."""
  if value is None or value == "" or value == []:
    return tables.DASH
  if isinstance(value, list | tuple):
    return ", ".join(map(_text, value))
  if isinstance(value, dict):
    return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
  return f"{value:g}" if isinstance(value, float) else str(value)
