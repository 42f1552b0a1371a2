"""A sweep: a JSON file of flags that every point shares and of overlays over them, expanded to numbered, named points.

  {"experiment": "benchmark",
   "flags": {"methods": ["plain", "ngram"], "limit": 1},
   "points": {"product": [{"zip": {"draft_tokens": [3, 7], "max_ngram": [2, 3]}},
                          {"list": [{}, {"temperature": 0.8}]}]}}

See `sweep_overlays` for the words. A point is named by what its overlay says, whatever other points there are, or by a
"name" in the overlay. A results folder holds the expanded sweep and, for each point, its folder, its log and its status
file, from which everybody learns what is done: nothing else is remembered anywhere.
"""
import dataclasses
import json
import os
import pathlib
import socket
import time

from experiments.harness import sweep_flags
from experiments.harness import sweep_overlays

SWEEP = "sweep.json"
SILENT_SECONDS = 180  # a point on another machine that has not been heard of for so long has died
_TAKEN = ("slurm", SWEEP)  # and whatever ends like a file of the results


@dataclasses.dataclass(frozen=True)
class Point:
  """One run of a sweep: its place from 0, its name, which is its folder's, and its flags, shared ones included."""
  number: int
  name: str
  experiment: str
  flags: dict[str, sweep_overlays.Value]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """All points of an experiment; `resumes` says whether it has a flag --resume."""
  experiment: str
  points: tuple[Point, ...]
  resumes: bool

  def command(self, point: Point, outdir, *, python: str = "python", resume: bool = False) -> list[str]:
    """The line that runs a point into OUTDIR/NAME, to be run in the repository's folder."""
    flags = [f"--{name}={value}" for name, value in _as_text(point).items()]
    return [python, "-m", f"experiments.{self.experiment}", *flags, f"--outdir={pathlib.Path(outdir) / point.name}",
            *(["--resume"] if resume else [])]

  def point(self, number: int) -> Point:
    """The point of that number.

    Raises:
      ValueError: there is none.
    """
    if not 0 <= number < len(self.points):
      raise ValueError(f"point {number}: this sweep has points 0 to {len(self.points) - 1}")
    return self.points[number]

  def varied(self) -> list[str]:
    """Flags that are not the same in all points."""
    names = dict.fromkeys(name for point in self.points for name in point.flags)
    return [name for name in names if len({_as_text(point).get(name) for point in self.points}) > 1]


def read(path: str) -> Sweep:
  """Reads and expands a sweep; flags and their values are checked against the experiment's.

  Raises:
    ValueError: it is not readable JSON of this form, has no point, names a flag, a value or an experiment that there
      is not, gives two points one name, or zips lists of unequal length.
  """
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"--sweep={path}: cannot be read ({error})") from error
  try:
    experiment, points = _expanded(json.loads(text, object_pairs_hook=_object, parse_constant=_no_value))
    return Sweep(experiment, points, sweep_flags.check(experiment, [_as_text(point) for point in points]))
  except ValueError as error:
    raise ValueError(f"--sweep={path}: {error}") from error


def claim(sweep: Sweep, outdir) -> None:
  """Makes the results folder of a sweep, or takes the one that is this very sweep's.

  Raises:
    ValueError: see `check_folder`.
  """
  check_folder(sweep, outdir)
  outdir = pathlib.Path(outdir)
  outdir.mkdir(parents=True, exist_ok=True)
  write_json(outdir / SWEEP, {"experiment": sweep.experiment, "resumes": sweep.resumes, "points": [
      {"number": p.number, "name": p.name, "flags": p.flags} for p in sweep.points]})


def check_folder(sweep: Sweep, outdir) -> None:
  """Refuses a results folder that holds something else; touches nothing.

  Raises:
    ValueError: it is a file, holds another sweep (says what differs), or holds files and no sweep.
  """
  outdir = pathlib.Path(outdir)
  blocked = [part for part in (outdir, *outdir.parents) if part.exists() and not part.is_dir()]
  if blocked:
    raise ValueError(f"--outdir={outdir}: {blocked[0]} is a file; name a folder")
  # Of several processes that claim it at a time, one may be writing its copy of the sweep.
  if not outdir.exists() or all(path.name.startswith(f".{SWEEP}.") for path in outdir.iterdir()):
    return
  if not (outdir / SWEEP).exists():
    raise ValueError(f"--outdir={outdir} is not empty and holds no {SWEEP}; choose another folder")
  before = load(outdir)
  old, new = ({p.name: (p.number, _as_text(p)) for p in one.points} for one in (before, sweep))
  differs = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
  if before.experiment != sweep.experiment:
    differs = [f"experiment {before.experiment!r}, and not {sweep.experiment!r}"]
  if differs:
    raise ValueError(f"--outdir={outdir} holds another sweep; what differs: {', '.join(differs[:5])}"
                     f"{' and more' if len(differs) > 5 else ''}. Choose another folder")


def load(outdir) -> Sweep:
  """The sweep that a results folder holds.

  Raises:
    ValueError: there is none.
  """
  path = pathlib.Path(outdir) / SWEEP
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
    points = tuple(Point(experiment=found["experiment"], **point) for point in found["points"])
    return Sweep(found["experiment"], points, found["resumes"])
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f"--outdir={outdir}: {path} is no readable sweep ({error!r}); start one there with --sweep=FILE") \
        from error


def status(point: Point, outdir) -> str:
  """"done", "failed", "running" or "missing", by the point's status file and whether what it names still lives."""
  record = read_status(point, outdir)
  if record is None:
    return "missing"
  if record.get("exit_code") is None:
    return "running" if _lives(record, status_path(point, outdir)) else "failed"
  if record["exit_code"]:
    return "failed"
  return "done" if (pathlib.Path(outdir) / point.name).is_dir() else "missing"  # its folder was removed


def read_status(point: Point, outdir) -> dict | None:
  """What the last attempt at a point left; None if there was none. See `sweep_point` for what it holds."""
  try:
    found = json.loads(status_path(point, outdir).read_text(encoding="utf-8"))
  except FileNotFoundError:
    return None
  except ValueError:  # not ours to judge: the attempt is made again
    return {"exit_code": 1}
  return found if isinstance(found, dict) else {"exit_code": 1}


def status_path(point: Point, outdir) -> pathlib.Path:
  """The status file of a point: beside its folder, since experiments refuse one that is not empty."""
  return pathlib.Path(outdir) / f"{point.name}.status.json"


def log_path(point: Point, outdir) -> pathlib.Path:
  """What a point printed, attempt after attempt."""
  return pathlib.Path(outdir) / f"{point.name}.log"


def write_json(path: pathlib.Path, value) -> None:
  """Writes a file whole or not at all, also where several processes write it."""
  temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
  temporary.write_text(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
  temporary.replace(path)


def process_start(pid: int) -> str | None:
  """When a process of this machine began, in a form to compare: an id alone may be used again. None: it has ended."""
  try:
    state, *rest = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]
  except OSError:
    if pathlib.Path("/proc/self/stat").exists():
      return None
  try:  # another system than Linux
    os.kill(pid, 0)
    return ""
  except ProcessLookupError:
    return None


def _lives(record, path):
  if record["host"] == socket.gethostname():
    return process_start(record["pid"]) == record["pid_start"]
  return time.time() - path.stat().st_mtime < SILENT_SECONDS


def _expanded(given):
  """(experiment, points) of a file's content."""
  if not isinstance(given, dict) or set(given) - {"experiment", "flags", "points"} or \
      not isinstance(given.get("experiment"), str) or "points" not in given:
    raise ValueError('a sweep is {"experiment": NAME, "flags": {FLAG: VALUE}, "points": {...}}; flags may be left out')
  shared = sweep_overlays.overlay(given.get("flags", {}), "flags")
  if shared.names:
    raise ValueError("flags: only an overlay of the points can have a name")
  overlays = sweep_overlays.expand(given["points"], "points")
  if not overlays:
    raise ValueError("points: the sweep is empty; give at least one overlay, which may be {}")
  points = tuple(Point(number, overlay.name, given["experiment"], shared.flags | overlay.flags)
                 for number, overlay in enumerate(overlays))
  first = {}
  for point in points:
    same = first.setdefault(point.name.casefold(), point)  # there are file systems that take A and a for one
    if same is not point:
      raise ValueError(f"points {same.number} and {point.number} are both named {point.name!r}; leave one out, or give "
                       'its overlay a "name" of its own')
    if point.name in _TAKEN or point.name.endswith((".json", ".csv", ".log")):
      raise ValueError(f'point {point.number} would be named {point.name!r}, as a file of the results may be; give its '
                       'overlay a "name"')
  return given["experiment"], points


def _as_text(point):
  return {name: sweep_overlays.text(value) for name, value in point.flags.items()}


def _object(pairs):
  found = dict(pairs)
  if len(found) < len(pairs):
    twice = next(name for name in found if sum(name == other for other, _ in pairs) > 1)
    raise ValueError(f"{twice!r} stands twice in one object")
  return found


def _no_value(name):
  raise ValueError(f"{name} is no value of a flag")
