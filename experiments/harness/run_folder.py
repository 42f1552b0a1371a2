"""The folder of a run: made once, refused when it would overwrite, read back to resume.

Of several processes the first one alone looks into it and writes; all others keep the records, by which the run goes,
in memory.
"""
import collections.abc
import json
import os
import pathlib
import shutil

from specjax.parallel import processes

RECORDS = "requests.jsonl"
STEPS = "steps.jsonl"  # the trace, see `tracing`
# What may differ between a run and its resumption: where it stands and how it was asked to go on.
_NOT_COMPARED = ("outdir", "resume", "overwrite", "command", "date")


def check_outdir(path: str) -> None:
  """Refuses an output folder that cannot be made.

  Raises:
    ValueError: it is a file or lies below one, which is named.
  """
  outdir = pathlib.Path(path)
  for part in (outdir, *outdir.parents):
    if part.exists() and not part.is_dir():
      raise ValueError(f"--outdir={path}: {part} is a file; name a folder")


class RunFolder:
  """Paths and files of one run. Records are appended request by request, so that an interrupt loses at most one."""

  def __init__(self, path: str, *, overwrite: bool, resume: bool, config: dict):
    """Checks that a run may stand there; touches nothing until `open`.

    Raises:
      ValueError: the folder is not empty and neither `overwrite` nor `resume` was asked for; both were; it holds no
        run; or it was made under another configuration (the differing setting is named).
    """
    self.path = pathlib.Path(path)
    self._config = config
    self._writes = processes.is_first()
    self._kept = []  # the records, where nothing is written
    if overwrite and resume:
      raise ValueError("--overwrite and --resume exclude each other: one discards what the other keeps")
    if not self._writes:  # what the first one refuses ends all
      return
    check_outdir(path)
    used = self.path.is_dir() and any(self.path.iterdir())
    if used and not (overwrite or resume):
      raise ValueError(f"--outdir={path} is not empty; choose another, or add --resume to finish the run in it or "
                       "--overwrite to discard it")
    if used and overwrite and self._read_config() is None:
      raise ValueError(f"--overwrite: {path} holds no config.json of specjax, so it is no run; remove it yourself")
    if resume:
      self._check_same(config)
    self._discard = used and overwrite

  def open(self) -> None:
    """Makes the folder, discarding a run that is to be overwritten, and writes `config.json`. Every process opens it,
    and has the same records from then on."""
    if self._writes:
      if self._discard:
        shutil.rmtree(self.path)
      self.path.mkdir(parents=True, exist_ok=True)
      self.write_json("config.json", self._config)
    self._kept = processes.from_first(self.records())

  def write_json(self, name: str, value) -> None:
    """Writes a JSON file whole or not at all."""
    if not self._writes:
      return
    temporary = self.path / f".{name}.part"
    temporary.write_text(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(self.path / name)

  def append(self, records: list[dict]) -> None:
    """Appends finished records and waits until the disk has them."""
    if not self._writes:
      self._kept = [*self._kept, *records]
      return
    with open(self.path / RECORDS, "ab") as file:
      file.write(_lines(records))
      file.flush()
      os.fsync(file.fileno())

  def rewrite(self, records: list[dict]) -> None:
    """Replaces all records."""
    if not self._writes:
      self._kept = list(records)
      return
    temporary = self.path / f".{RECORDS}.part"
    temporary.write_bytes(_lines(records))
    temporary.replace(self.path / RECORDS)

  def write_lines(self, name: str, lines: collections.abc.Iterable[dict]) -> None:
    """Writes a file of JSON lines whole or not at all, as they come."""
    if not self._writes:  # they may take part in making them
      collections.deque(lines, maxlen=0)
      return
    temporary = self.path / f".{name}.part"
    with open(temporary, "wb") as file:
      for line in lines:
        file.write(_lines([line]))
    temporary.replace(self.path / name)

  def records(self) -> list[dict]:
    """All whole records; a last line that an interrupt broke is left out.

    Raises:
      ValueError: another line is broken; names the file and the line.
    """
    if not self._writes:
      return self._kept
    path = self.path / RECORDS
    if not path.exists():
      return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
      try:
        records.append(json.loads(line))
      except ValueError as error:  # half a character is one, too
        raise ValueError(f"{path}:{number} is not a JSON record ({error}); remove the line to have its requests run "
                         "again by --resume, or start anew with --overwrite") from error
    return records

  def _read_config(self):
    """The run's `config.json`, or None: other programs, and models, have a file of that name too."""
    try:
      found = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
      return None
    return found if isinstance(found, dict) and {"target", "methods", "command"} <= set(found) else None

  def _check_same(self, config):
    old = self._read_config()
    if old is None:
      raise ValueError(f"--resume: {self.path} holds no readable config.json of a specjax run; nothing to resume")
    for name in sorted(set(old) | set(config)):
      if name not in _NOT_COMPARED and old.get(name) != config.get(name):
        raise ValueError(f"--resume: {name} was {old.get(name)!r} in {self.path} and is {config.get(name)!r} now; "
                         "give the same settings or another --outdir")


def _lines(records):
  return "".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records).encode("utf-8")
