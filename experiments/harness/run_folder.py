"""The folder of a run: made once, refused when it would overwrite, read back to resume."""
import json
import pathlib
import shutil

RECORDS = "requests.jsonl"
# What may differ between a run and its resumption: where it stands and how it was asked to go on.
_NOT_COMPARED = ("outdir", "resume", "overwrite", "command", "date")


class RunFolder:
  """Paths and files of one run. Records are appended request by request, so that an interrupt loses at most one."""

  def __init__(self, path: str, *, overwrite: bool, resume: bool, config: dict):
    """Makes or reopens the folder and writes `config.json`.

    Raises:
      ValueError: the folder is not empty and neither `overwrite` nor `resume` was asked for; both were; it holds no
        run; or it was made under another configuration (the differing setting is named).
    """
    self.path = pathlib.Path(path)
    if overwrite and resume:
      raise ValueError("--overwrite and --resume exclude each other: one discards what the other keeps")
    if self.path.exists() and not self.path.is_dir():
      raise ValueError(f"--outdir={path} is a file; name a folder")
    used = self.path.is_dir() and any(self.path.iterdir())
    if used and not (overwrite or resume):
      raise ValueError(f"--outdir={path} is not empty; choose another, or add --resume to finish the run in it or "
                       "--overwrite to discard it")
    if used and overwrite:
      if not (self.path / "config.json").exists():
        raise ValueError(f"--overwrite: {path} holds no config.json, so it is no run of specjax; remove it yourself")
      shutil.rmtree(self.path)
    self.path.mkdir(parents=True, exist_ok=True)
    if resume and used:
      self._check_same(config)
    self.write_json("config.json", config)

  def write_json(self, name: str, value) -> None:
    """Writes a JSON file whole or not at all."""
    temporary = self.path / f".{name}.part"
    temporary.write_text(json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(self.path / name)

  def append(self, records: list[dict]) -> None:
    """Appends finished records in one write."""
    text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    with open(self.path / RECORDS, "a", encoding="utf-8") as file:
      file.write(text)

  def records(self) -> list[dict]:
    """All whole records; a last line that an interrupt broke is dropped from the file."""
    path = self.path / RECORDS
    if not path.exists():
      return []
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
      path.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))
    return [json.loads(line) for line in lines[:-1]]

  def _check_same(self, config):
    try:
      old = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
      raise ValueError(f"--resume: {self.path} holds no readable config.json ({error}); nothing to resume") from error
    for name in sorted(set(old) | set(config)):
      if name not in _NOT_COMPARED and old.get(name) != config.get(name):
        raise ValueError(f"--resume: {name} was {old.get(name)!r} in {self.path} and is {config.get(name)!r} now; "
                         "give the same settings or another --outdir")
