"""Points of a sweep as an array of Slurm jobs, by submitit: what is submitted, and what happens when a job must go.

Before the time limit, or a preemption, Slurm sends SIGUSR2. submitit then asks the point for a checkpoint, which
interrupts the experiment (it keeps what it has), and puts the job back into the queue; there it goes on. A job that
Slurm itself puts back, since its node failed or was wanted, goes on in the same way.
"""
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

from experiments.harness import sweep_file
from experiments.harness import sweep_flags
from experiments.harness import sweep_point

_LAST_SECONDS = 120  # that a stopped job waits for Slurm to say what becomes of it


class SlurmPoint:
  """What a job runs: one point, in a process that does not hear the signals meant for submitit."""

  def __init__(self, outdir: str, number: int, python: str):
    self._outdir, self._number, self._python, self._attempt = outdir, number, python, None

  def __call__(self) -> None:
    """Runs the point.

    Raises:
      RuntimeError: its exit code was not 0, so that the job counts as failed.
    """
    sweep = sweep_file.load(self._outdir)
    point = sweep.point(self._number)
    if sweep_file.status(point, self._outdir) == "done":
      return
    self._attempt = sweep_point.Attempt(sweep, point, self._outdir, python=self._python, shielded=True)
    signal.signal(signal.SIGTERM, self._terminated)
    code = self._attempt.wait()
    if code:
      raise RuntimeError(f"point {point.number} ({point.name}) ended with exit code {code}; see "
                         f"{sweep_file.log_path(point, self._outdir)}")

  def checkpoint(self):
    """Stops the point; gives submitit what is to run when the job has come back."""
    from submitit import helpers  # pylint: disable=import-outside-toplevel
    if self._attempt:
      self._attempt.stop()
    return helpers.DelayedSubmission(SlurmPoint(self._outdir, self._number, self._python))

  def _terminated(self, number, frame):
    """A job is cancelled, or preempted with some grace: if it ended by itself, Slurm would not queue it again."""
    del number, frame
    self._attempt.stop()
    time.sleep(_LAST_SECONDS)


def submit(points, outdir: pathlib.Path, *, parameters: dict, requeues: int, python: str) -> list[str]:
  """Submits the points; their jobs' ids, which are also kept beside submitit's files in OUTDIR/slurm.

  Raises:
    ValueError: this is no machine of a Slurm cluster, or Slurm refuses the submission.
  """
  submitit = _submitit()
  if not submitit.SlurmExecutor.affinity() > 0:
    raise ValueError("srun was not found; submit from a machine of the Slurm cluster, or look with --dry_run")
  executor = submitit.SlurmExecutor(outdir / "slurm", max_num_timeout=requeues, python=shlex.quote(python))
  _set(executor, parameters)
  try:
    with executor.batch():
      jobs = [executor.submit(SlurmPoint(str(outdir), point.number, python)) for point in points]
  except submitit.core.utils.FailedJobError as error:
    raise ValueError(f"Slurm refused the submission: {str(error).strip()}") from error
  ids = [job.job_id for job in jobs]
  kept = submitted(outdir) | {point.name: job for point, job in zip(points, ids)}
  sweep_file.write_json(outdir / "slurm" / "submitted.json", kept)
  return ids


def script(points, outdir: pathlib.Path, *, parameters: dict, python: str) -> str:
  """The sbatch script that `submit` would submit; Slurm need not be there."""
  submitit = _submitit()

  class Writer(submitit.SlurmExecutor):
    """Only writes."""

    @classmethod
    def affinity(cls):
      return 1

  writer = Writer(outdir / "slurm", python=shlex.quote(python))
  _set(writer, parameters)
  if len(points) > 1:
    writer.parameters["map_count"] = len(points)
  return writer._make_submission_file_text(writer._submitit_command_str, "dry_run")  # pylint: disable=protected-access


def submitted(outdir: pathlib.Path) -> dict[str, str]:
  """The last job of each point by its name, of those that were ever submitted."""
  path = outdir / "slurm" / "submitted.json"
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def queued() -> set[str]:
  """Ids of this user's jobs that wait or run.

  Raises:
    ValueError: Slurm does not answer.
  """
  try:
    done = subprocess.run(["squeue", "--noheader", "--array", "--me", "--format=%i"], check=False, capture_output=True,
                          text=True)
  except FileNotFoundError as error:
    raise ValueError("squeue was not found; submit from a machine of the Slurm cluster, or look with --dry_run") \
        from error
  if done.returncode:
    raise ValueError(f"squeue failed with exit code {done.returncode}: {done.stderr.strip()}")
  return set(done.stdout.split())


def minutes(time_limit: str) -> int:
  """A time as sbatch's --time takes it, in whole minutes: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

  Raises:
    ValueError: it is none of these.
  """
  days, dash, rest = time_limit.rpartition("-")
  parts = rest.split(":")
  if all(part.isdecimal() for part in ([days] if dash else []) + parts) and len(parts) <= 3:
    numbers = [int(part) for part in parts]
    if dash:
      hours, mins, seconds = numbers + [0] * (3 - len(numbers))
    elif len(numbers) == 3:
      hours, mins, seconds = numbers
    else:
      hours, (mins, seconds) = 0, numbers + [0] * (2 - len(numbers))
    whole = int(days or 0) * 1440 + hours * 60 + mins + (seconds > 0)
    if whole:
      return whole
  raise ValueError(f"--time={time_limit}: give minutes, H:M:S, D-H, D-H:M or D-H:M:S, more than none, as to sbatch")


def _set(executor, parameters):
  root = shlex.quote(str(sweep_flags.ROOT))
  executor.update_parameters(setup=[f"cd {root}", f'export PYTHONPATH={root}"${{PYTHONPATH:+:$PYTHONPATH}}"'],
                             additional_parameters={"requeue": True}, **parameters)


def _submitit():
  try:
    import submitit  # pylint: disable=import-outside-toplevel
  except ImportError as error:
    raise ValueError(f"submitit is not installed in {sys.prefix}: pip install -e .[launch]") from error
  return submitit
