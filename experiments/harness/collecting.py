"""One table of all points of a sweep: what each point's summary says, and what became of points that have none.

A benchmark gives a row a method (`summary.json`, groups of category "all"), a load test a row a method and load. Of
other experiments the numbers at the top of summary.json, of NAME.json, or of the last line of metrics.jsonl are taken.
"""
import csv
import dataclasses
import json
import numbers
import pathlib

from experiments.harness import sweep_file

# What the table at a terminal shows of a row that has many numbers; the files hold all.
_SHOWN = ("method", "point", "output_tokens", "tokens_per_step", "acceptance_rate", "tokens_per_second",
          "metrics.output_throughput", "speedup", "speedup.median")
_MOST = 8  # columns of numbers without such names
_LONGEST = 40


@dataclasses.dataclass(frozen=True)
class Collected:
  """Rows of points that are done, all other points with why, and the flags that differ between points."""
  experiment: str
  points: int
  varied: list[str]
  rows: list[dict]    # number, name, the varied flags, and what the summary says
  absent: list[dict]  # number, name, status, last_line


def collect(outdir) -> Collected:
  """Reads a results folder.

  Raises:
    ValueError: it holds no sweep.
  """
  sweep, outdir = sweep_file.load(outdir), pathlib.Path(outdir)
  rows, absent, varied = [], [], sweep.varied()
  for point in sweep.points:
    state = sweep_file.status(point, outdir)
    found = _results(point, outdir / point.name) if state == "done" else []
    if found:
      told = {"number": point.number, "name": point.name} | {name: point.flags.get(name) for name in varied}
      rows += [told | {f"{name}_" if name in told else name: value for name, value in row.items()} for row in found]
    else:
      absent.append({"number": point.number, "name": point.name, "status": _why(point, outdir, state),
                     "last_line": _last_line(sweep_file.log_path(point, outdir))})
  return Collected(sweep.experiment, len(sweep.points), varied, rows, absent)


def write(collected: Collected, outdir) -> None:
  """Writes collected.json and collected.csv."""
  outdir = pathlib.Path(outdir)
  sweep_file.write_json(outdir / "collected.json", dataclasses.asdict(collected))
  columns = dict.fromkeys(name for row in collected.rows for name in row)
  with open(outdir / "collected.csv", "w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, list(columns) or ["number", "name"], lineterminator="\n")
    writer.writeheader()
    for row in collected.rows:
      writer.writerow({name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()})


def render(collected: Collected) -> str:
  """The table, and below it a line a point that is not there."""
  names = dict.fromkeys(name for row in collected.rows for name in row if name not in ("number", "name"))
  known = [name for name in names if any(row.get(name) is not None for row in collected.rows)]
  results = [name for name in known if name not in collected.varied]
  shown = [name for name in _SHOWN if name in results]
  if not shown:
    shown = [name for name in results if any(_is_number(row.get(name)) for row in collected.rows)][:_MOST]
  columns = ["number", *collected.varied, *shown]
  cells = [["point", *columns[1:]]] + [[_cell(row.get(name)) for name in columns] for row in collected.rows]
  widths = [max(map(len, column)) for column in zip(*cells)]
  lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
  lines.insert(1, "-" * len(lines[0]))
  lines = lines if collected.rows else []
  lines += ["", f"{collected.points - len(collected.absent)} of {collected.points} points of {collected.experiment}"]
  for point in collected.absent:
    last = f": {point['last_line']}" if point["last_line"] else ""
    lines.append(f"point {point['number']} ({point['name']}) {point['status']}{last}")
  return "\n".join(lines)


def _why(point, outdir, state):
  """Why a point has no rows, in a few words."""
  if state == "done":
    return "done, but left no numbers"
  code = (sweep_file.read_status(point, outdir) or {}).get("exit_code")
  return state if state != "failed" else f"failed, {'its process died' if code is None else f'exit code {code}'}"


def _results(point, folder):
  """Rows of a point that is done; none if it left no numbers."""
  found = _read(folder / "summary.json")
  if isinstance(found, dict) and isinstance(found.get("groups"), list):
    return [_flat(g) for g in found["groups"] if g.get("category") == "all" and g.get("language") in (None, "all")]
  if isinstance(found, dict) and isinstance(found.get("points"), list):
    return [_flat(one) for one in found["points"]]
  if found is None:
    found = _read(folder / f"{point.experiment.rpartition('.')[2]}.json")
  if found is None:
    found = _last_metrics(folder / "metrics.jsonl")
  if not isinstance(found, dict):
    return []
  top = {name: value for name, value in found.items() if _is_number(value) or isinstance(value, str | bool)}
  return [top] if top else []


def _read(path):
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None


def _last_metrics(path):
  """The last whole line of a training's metrics."""
  try:
    lines = path.read_text(encoding="utf-8").splitlines()
  except (OSError, ValueError):
    return None
  for line in reversed(lines):
    try:
      return json.loads(line)
    except ValueError:
      continue
  return None


def _flat(value, name=""):
  """Objects within objects as names with dots; lists stay what they are."""
  if not isinstance(value, dict):
    return {name: value}
  return {key: inner for part, one in value.items() for key, inner in _flat(one, f"{name}.{part}".lstrip(".")).items()}


def _last_line(path):
  """What a log says last, a progress bar's states being lines of their own."""
  try:
    text = path.read_text(encoding="utf-8", errors="replace")
  except OSError:
    return None
  return next((line.strip() for line in reversed(text.replace("\r", "\n").split("\n")) if line.strip()), None)


def _is_number(value):
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _cell(value):
  if value is None:
    return "-"
  if isinstance(value, float):
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
  text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST - 3]}..."
