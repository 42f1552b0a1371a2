"""Runs one point of a sweep and records how it went: what a job of any scheduler does.

  python launch/run_point.py --outdir=runs/x --sweep=launch/sweeps/draft_tokens.json --point=3

The number of the point comes from SLURM_ARRAY_TASK_ID if it is not given, so that `sbatch --array=0-5` can run this
line. The exit code is the experiment's; 0 if the point was done before. SIGTERM, by which schedulers announce the end,
interrupts the experiment, which keeps what it has; the next run goes on from there.
"""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags  # pylint: disable=wrong-import-position

from experiments.harness import sweep_file  # pylint: disable=wrong-import-position
from experiments.harness import sweep_point  # pylint: disable=wrong-import-position
from launch import program  # pylint: disable=wrong-import-position

_SWEEP = flags.DEFINE_string("sweep", None, "The sweep's file; by default what --outdir holds already.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Results folder of the sweep.")
_POINT = flags.DEFINE_integer("point", None, "Number of the point, from 0; by default $SLURM_ARRAY_TASK_ID.")
_PYTHON = flags.DEFINE_string("python", sys.executable, "Interpreter of the experiment.")


def main():
  task = os.environ.get("SLURM_ARRAY_TASK_ID")
  if not _OUTDIR.value or (_POINT.value is None and task is None):
    raise ValueError("--outdir and --point are needed: the results folder, and which point to run into it")
  if _SWEEP.value:
    sweep_file.claim(sweep_file.read(_SWEEP.value), _OUTDIR.value)
  sweep = sweep_file.load(_OUTDIR.value)
  point = sweep.point(int(task) if _POINT.value is None else _POINT.value)
  if sweep_file.status(point, _OUTDIR.value) == "done":
    print(f"point {point.number} ({point.name}) is done already")
    return
  sweep_point.heed_interrupts()
  attempt = sweep_point.Attempt(sweep, point, _OUTDIR.value, python=_PYTHON.value)
  print(f"point {point.number} ({point.name}): log in {sweep_file.log_path(point, _OUTDIR.value)}", flush=True)
  code = attempt.wait()
  print(f"point {point.number} ({point.name}): {'done' if not code else f'failed with exit code {code}'}", flush=True)
  sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
  program.run(main)
