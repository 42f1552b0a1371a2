"""What a pod's run leaves beside its results here: a log of each worker, and the status file of a point."""
import contextlib
import datetime
import os
import pathlib
import socket

from experiments.harness import sweep_file


@contextlib.contextmanager
def worker_logs(folder: pathlib.Path):
  """Gives a function of (worker, text) that appends a line to FOLDER.worker-N.log, beside the results' folder."""
  with contextlib.ExitStack() as stack:
    files = {}

    def worker_line(worker, text):
      if worker not in files:
        path = folder.with_name(f"{folder.name}.worker-{worker}.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        files[worker] = stack.enter_context(open(path, "a", encoding="utf-8", buffering=1))
      files[worker].write(f"{text}\n")

    yield worker_line


class Record:
  """The status file of a point that runs on a pod; its fields are those of `sweep_point`.

  It names this launcher's process, so that whoever asks knows whether the point still runs.
  """

  def __init__(self, point: sweep_file.Point, command: list[str], outdir: pathlib.Path):
    self.command = command
    self._path = sweep_file.status_path(point, outdir)
    before = sweep_file.read_status(point, outdir) or {}
    self._fields = {
        "number": point.number, "name": point.name, "attempt": 1 + (before.get("attempt") or 0), "resumed": False,
        "command": command, "host": socket.gethostname(), "pid": os.getpid(),
        "pid_start": sweep_file.process_start(os.getpid()), "job": None}

  def begin(self) -> None:
    """Says that the point runs."""
    self._fields |= {"started": _now(), "ended": None, "exit_code": None}
    sweep_file.write_json(self._path, self._fields)

  def end(self, code: int) -> None:
    """Says how it ended."""
    self._fields |= {"ended": _now(), "exit_code": code}
    sweep_file.write_json(self._path, self._fields)


def _now():
  return datetime.datetime.now().isoformat(timespec="seconds")
