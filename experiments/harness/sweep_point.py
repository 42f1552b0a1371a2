"""One attempt at a point of a sweep: the experiment as a process, its log, and the status file that all others read.

The status file holds where the attempt runs (host, pid), when it began, whether it resumed what an earlier one left,
and at the end its exit code. A point that was stopped in the middle goes on: with --resume where the experiment has
that flag and left a config.json, with the same command where it goes on by itself.
"""
import datetime
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from experiments.harness import sweep_file
from experiments.harness import sweep_flags

GRACE_SECONDS = 20  # from an interrupt to a kill: schedulers leave 30
_HEARTBEAT_SECONDS = 20
_LEADER_SECONDS = 300
# What a process ignores, the program that takes its place ignores as well.
_SHIELD = ("sh", "-c", 'trap "" TERM USR2; exec "$@"', "sh")


class Attempt:
  """A point that runs. Whoever made it calls `poll` until that gives the exit code."""

  def __init__(self, sweep: sweep_file.Sweep, point: sweep_file.Point, outdir, *, python: str = sys.executable,
               environment: dict[str, str] | None = None, shielded: bool = False):
    """Starts the process.

    Under Slurm a point may be several processes (`srun`). The first decides whether to resume and has the status file,
    the others follow it and have logs of their own.

    Args:
      outdir: the results folder, which `sweep_file.claim` made.
      python: interpreter of the experiment. environment: variables to set in it.
      shielded: the process does not hear SIGTERM and SIGUSR2, which schedulers send to everything in a job: whoever
        made the attempt decides what is to happen.

    Raises:
      ValueError: the point is done, or runs elsewhere.
    """
    self.point, self._outdir = point, pathlib.Path(outdir).absolute()
    self._leads = _rank() == 0
    before = sweep_file.read_status(point, self._outdir) if self._leads else _leader_status(point, self._outdir)
    if self._leads:
      _check_free(point, self._outdir, before)
    resume = needs_resume(sweep, point, self._outdir) if self._leads else before["resumed"]
    command = sweep.command(point, self._outdir, python=python, resume=resume)
    log = sweep_file.log_path(point, self._outdir)
    log = log if self._leads else log.with_name(f"{point.name}.process-{_rank()}.log")
    self._record = {
        "number": point.number, "name": point.name, "attempt": 1 + ((before or {}).get("attempt") or 0),
        "resumed": resume, "command": command, "host": socket.gethostname(), "pid": os.getpid(),
        "pid_start": sweep_file.process_start(os.getpid()), "job": _job(), "started": _now(), "ended": None,
        "exit_code": None}
    self._write()  # before there is a process: followers wait for it
    with open(log, "ab") as file:
      file.write(f"== attempt {self._record['attempt']} on {self._record['host']} at {self._record['started']}: "
                 f"{' '.join(command)}\n".encode())
      file.flush()
      # A process group of its own: an interrupt at the terminal is for the launcher, which hands it on.
      self._process = subprocess.Popen(
          [*(_SHIELD if shielded else ()), *command], cwd=sweep_flags.ROOT, stdin=subprocess.DEVNULL, stdout=file,
          stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
          start_new_session=True)
    self._record |= {"pid": self._process.pid, "pid_start": sweep_file.process_start(self._process.pid)}
    self._write()
    self._heard = time.monotonic()

  def poll(self) -> int | None:
    """The exit code, or None while it runs; says now and then in the status file that it lives."""
    code = self._process.poll()
    if code is None:
      if self._leads and time.monotonic() - self._heard > _HEARTBEAT_SECONDS:
        self._heard = time.monotonic()
        self._write()
    elif self._record["ended"] is None:
      self._record |= {"exit_code": code, "ended": _now()}
      self._write()
    return code

  def interrupt(self) -> None:
    """What Ctrl-C does, to the process and those that it started."""
    self._signal(signal.SIGINT)

  def stop(self) -> int:
    """Interrupts it, kills it if it goes on for `GRACE_SECONDS`, and gives its exit code."""
    self.interrupt()
    try:
      self._process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
      self._signal(signal.SIGKILL)
      self._process.wait()
    return self.poll()

  def wait(self) -> int:
    """Waits for the exit code; whatever ends the waiting, such as an interrupt, stops the process first."""
    try:
      while self.poll() is None:
        time.sleep(0.1)
    except BaseException:
      self.stop()
      raise
    return self.poll()

  def _signal(self, number):
    if self._process.poll() is None:
      os.killpg(self._process.pid, number)

  def _write(self):
    if self._leads:
      sweep_file.write_json(sweep_file.status_path(self.point, self._outdir), self._record)


def heed_interrupts() -> None:
  """Makes SIGTERM, by which schedulers announce the end, a KeyboardInterrupt in this process, and SIGINT in any case:
  it is ignored in all that a script starts behind an "&", and in what such a process starts."""
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)


def needs_resume(sweep: sweep_file.Sweep, point: sweep_file.Point, outdir) -> bool:
  """Whether the next attempt is to be started with --resume."""
  return sweep.resumes and (pathlib.Path(outdir) / point.name / "config.json").exists()


def _check_free(point, outdir, before):
  state = sweep_file.status(point, outdir)
  if state == "done":
    raise ValueError(f"point {point.number} ({point.name}) is done; to run it again, remove {outdir / point.name}")
  # A job that its scheduler started again finds its own earlier life.
  if state == "running" and not (_job() and before["job"] and before["job"][0] == _job()[0]):
    raise ValueError(f"point {point.number} ({point.name}) runs on {before['host']} since {before['started']} (process "
                     f"{before['pid']}); wait for it, or end it")


def _leader_status(point, outdir):
  """The status that the first process of this job wrote in this very start of it."""
  end = time.monotonic() + _LEADER_SECONDS
  while time.monotonic() < end:
    found = sweep_file.read_status(point, outdir)
    if found and found.get("job") == _job():
      return found
    time.sleep(0.2)
  raise ValueError(f"point {point.number} ({point.name}): process {_rank()} waited {_LEADER_SECONDS} s for the first "
                   f"process to write {sweep_file.status_path(point, outdir)}; all must see one folder")


def _rank():
  return int(os.environ.get("SLURM_PROCID") or 0)


def _job():
  """[job, start of it] under Slurm, else None: a job that was started again is the same job."""
  job = os.environ.get("SLURM_JOB_ID")
  return job and [job, f"{os.environ.get('SLURM_RESTART_COUNT') or 0}.{os.environ.get('SLURM_STEP_ID') or 0}"]


def _now():
  return datetime.datetime.now().isoformat(timespec="seconds")
