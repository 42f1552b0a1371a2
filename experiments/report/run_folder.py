"""Reading a run folder: four files in, one `Run` out, with everything doubtful said in `warnings`.

An interrupted run is still worth reading, so only a missing or malformed summary is an error; a missing companion
file or a broken line of `requests.jsonl` becomes a warning on the page.
"""

import dataclasses
import json
import math
import pathlib
from typing import Any

PLAIN = "plain"  # the method every other one is compared with
ALL = "all"  # the category, and the language, that pools the others
SCHEMA = 1

_NUMBERS = (
    "temperature", "batch_size", "requests", "prompt_tokens", "output_tokens", "steps", "drafted_tokens",
    "accepted_tokens", "tokens_per_step", "acceptance_rate", "tokens_per_second", "speedup", "speedup_without_repeats",
    "repeated_share", "draft_ms", "verify_ms", "commit_ms", "other_ms", "step_ms", "plain_step_ms", "verify_cost_ratio",
    "predicted_speedup", "first_difference_gap", "total_variation_bound")
_LISTS = ("accepted_per_position", "conditional_per_position")
_PAIRS = ("speedup_interval", "identical_to_plain")
_MAPPINGS = (
    "time_to_first_token_ms", "time_per_output_token_ms", "latency_ms", "utilization", "peak_memory_bytes")
_EXPERTS = ("layers", "experts", "chosen", "expert_bytes", "imbalance", "bytes_per_step", "bytes_per_token")
_OF_COST = ("bias", "dense", "expert", "grouped", "scale", "ridge", "error")
_OF_POINT = ("tokens", "distinct", "milliseconds", "fitted")
_BREAKDOWNS = ("by_language_pair", "by_output_length")
_OF_WIDTH = ("width", "passes", "nodes", "distinct", "at_random")


@dataclasses.dataclass(frozen=True)
class Run:
  """What a run folder holds.

  Attributes:
    config: `config.json`, empty where the file is missing.
    environment: `environment.json`, empty where the file is missing.
    groups: the cells of `summary.json` with every field of the schema present: numbers finite or None, lists and
      mappings possibly empty, pairs a tuple or None.
    requests: the readable lines of `requests.jsonl`, in order.
    warnings: what the reader of the page must know about the folder, one sentence each.
  """
  config: dict[str, Any]
  environment: dict[str, Any]
  groups: list[dict[str, Any]]
  requests: list[dict[str, Any]]
  warnings: list[str]


def load(folder: pathlib.Path) -> Run:
  """Reads a run folder.

  Raises:
    ValueError: the folder or its summary is missing, or a JSON file does not hold what it should.
  """
  if not folder.is_dir():
    raise ValueError(f"{folder} is not a folder: give the output folder of a benchmark run")
  summary = _object(folder / "summary.json")
  if summary is None:
    raise ValueError(f"{folder / 'summary.json'} is missing: the folder holds no finished or interrupted run")
  if summary.get("schema") != SCHEMA:
    raise ValueError(f"{folder / 'summary.json'}: schema is {summary.get('schema')!r}, this report reads {SCHEMA}")
  groups = summary.get("groups")
  if not isinstance(groups, list) or not groups:
    raise ValueError(f"{folder / 'summary.json'}: 'groups' must be a list with at least one group")

  warnings = []
  companions = {}
  for name in ("config.json", "environment.json"):
    companions[name] = _object(folder / name)
    if companions[name] is None:
      warnings.append(f"{name} is missing: the page cannot say all of how the run was made.")
  requests, broken = _lines(folder / "requests.jsonl")
  if requests is None:
    warnings.append("requests.jsonl is missing: no outputs are shown.")
  if broken:
    numbers = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
    warnings.append(f"Partial run: {len(broken)} unreadable line(s) of requests.jsonl skipped (line {numbers}).")
  holders = (summary, *(companion or {} for companion in companions.values()))
  if any(holder.get("partial") for holder in holders):
    warnings.append("Partial run: it ended before all of its requests were done.")
  for holder in holders:
    extra = holder.get("warnings") or []
    warnings.extend(str(warning) for warning in ([extra] if isinstance(extra, str) else extra))
  return Run(
      config=companions["config.json"] or {},
      environment=companions["environment.json"] or {},
      groups=[_group(group, f"{folder / 'summary.json'}: groups[{i}]") for i, group in enumerate(groups)],
      requests=requests or [],
      warnings=warnings)


def _object(path: pathlib.Path) -> dict[str, Any] | None:
  """The JSON object in a file; None where there is no such file."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return None
  except ValueError as error:
    raise ValueError(f"{path} is not readable JSON: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
  return value


def _lines(path: pathlib.Path) -> tuple[list[dict[str, Any]] | None, list[int]]:
  """The records of a JSON-lines file (None where there is no such file) and the numbers of the lines skipped."""
  try:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
  except FileNotFoundError:
    return None, []
  records, broken = [], []
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except ValueError:
      record = None
    if isinstance(record, dict) and "method" in record:
      records.append(record)
    else:
      broken.append(number)
  return records, broken


def _group(group: Any, where: str) -> dict[str, Any]:
  """A group of the summary with every field present and of its kind."""
  if not isinstance(group, dict):
    raise ValueError(f"{where} must be an object, got {type(group).__name__}")
  for name in ("method", "category"):
    if not isinstance(group.get(name), str):
      raise ValueError(f"{where}.{name} must be a string, got {group.get(name)!r}")
  result = dict(group, language=str(group.get("language") or ALL), quality=group.get("quality"))
  # A run from before there were lossy rules says neither, and was none.
  result["verifier"] = str(group.get("verifier") or "point")
  result["lossless"] = group.get("lossless") is not False
  for name in _NUMBERS:
    result[name] = _number(group.get(name), f"{where}.{name}")
  for name in _LISTS:
    result[name] = _numbers(group.get(name) or [], f"{where}.{name}")
  for name in _PAIRS:
    pair = _numbers(group.get(name) or [], f"{where}.{name}")
    if len(pair) not in (0, 2):
      raise ValueError(f"{where}.{name} must hold two numbers or be null, got {group[name]!r}")
    result[name] = tuple(pair) if pair and None not in pair else None
  for name in _MAPPINGS:
    mapping = group.get(name) or {}
    if not isinstance(mapping, dict):
      raise ValueError(f"{where}.{name} must be an object or null, got {mapping!r}")
    result[name] = {key: _number(value, f"{where}.{name}.{key}") for key, value in mapping.items()}
  result["experts"] = _experts(group.get("experts"), f"{where}.experts")
  result["windows"] = _windows(group.get("windows"), f"{where}.windows")
  for name in _BREAKDOWNS:
    result[name] = _breakdown(group.get(name) or {}, f"{where}.{name}")
  return result


def _breakdown(rows: Any, where: str) -> dict[str, dict[str, float | None]]:
  """Numbers by language pair or length; {} of a target without an encoder, or of an older run."""
  if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
    raise ValueError(f"{where} must be null or an object of objects, got {rows!r}")
  return {key: {name: _number(value, f"{where}.{key}.{name}") for name, value in row.items()}
          for key, row in rows.items()}


def _experts(experts: Any, where: str) -> dict[str, Any] | None:
  """What a run counted of mixtures of experts; None of a target without them, or of an older run."""
  if experts is None:
    return None
  by_width = experts.get("by_width") if isinstance(experts, dict) else None
  if not isinstance(by_width, list) or not all(isinstance(row, dict) for row in by_width):
    raise ValueError(f"{where} must be null or an object with 'by_width', a list of objects, got {experts!r}")
  result = {name: _number(experts.get(name), f"{where}.{name}") for name in _EXPERTS}
  result["by_width"] = []
  for i, row in enumerate(by_width):
    inside = f"{where}.by_width[{i}]"
    layers = _numbers(row.get("distinct_per_layer") or [], f"{inside}.distinct_per_layer")
    result["by_width"].append({name: _number(row.get(name), f"{inside}.{name}") for name in _OF_WIDTH}
                              | {"distinct_per_layer": layers})
  result["cost"] = _cost(experts.get("cost"), f"{where}.cost")
  return result


def _cost(cost: Any, where: str) -> dict[str, Any] | None:
  """What was fitted to passes through experts, and the passes; None where none were timed."""
  if cost is None:
    return None
  points = cost.get("points") if isinstance(cost, dict) else None
  if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
    raise ValueError(f"{where} must be null or an object with 'points', a list of objects, got {cost!r}")
  return {name: _number(cost.get(name), f"{where}.{name}") for name in _OF_COST} | {"points": [
      {name: _number(point.get(name), f"{where}.points[{i}].{name}") for name in _OF_POINT} | {
          "kind": str(point.get("kind"))} for i, point in enumerate(points)]}


def _windows(windows: Any, where: str) -> dict[str, Any] | None:
  """What a run says of layers with a window; None of a target without them, or of an older run."""
  if windows is None:
    return None
  if not isinstance(windows, dict):
    raise ValueError(f"{where} must be an object or null, got {windows!r}")
  return {name: _number(windows.get(name), f"{where}.{name}") for name in ("layers", "of_layers", "beyond")} | {
      "tokens": _numbers(windows.get("tokens") or [], f"{where}.tokens")}


def _numbers(values: Any, where: str) -> list[float | None]:
  if not isinstance(values, list):
    raise ValueError(f"{where} must be a list or null, got {values!r}")
  return [_number(value, f"{where}[{i}]") for i, value in enumerate(values)]


def _number(value: Any, where: str) -> float | None:
  """The number, with null and what is not finite as None."""
  if value is None:
    return None
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f"{where} must be a number or null, got {value!r}")
  return value if math.isfinite(value) else None
