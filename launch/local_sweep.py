"""Runs the points of a sweep as processes on this machine.

  python launch/local_sweep.py --sweep=launch/sweeps/draft_tokens.json --outdir=runs/draft_tokens

The same line again runs only what is missing or failed, and goes on where a point was stopped. Ctrl-C interrupts the
points that run and keeps those that are done. Exit code 1 unless every point is done. Relative paths in a sweep are
seen from the repository's folder. Processes that share a device also share its time: compare times of one at a time.
"""
import pathlib
import shlex
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags  # pylint: disable=wrong-import-position

from experiments.harness import sweep_file  # pylint: disable=wrong-import-position
from experiments.harness import sweep_point  # pylint: disable=wrong-import-position
from launch import program  # pylint: disable=wrong-import-position

_SWEEP = flags.DEFINE_string("sweep", None, "The sweep's file.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Results folder of the sweep.")
_PROCESSES = flags.DEFINE_integer("processes", 1, "Points that run at a time.", lower_bound=1)
_DEVICES = flags.DEFINE_list("cuda_devices", None, "A CUDA device for each of the --processes: 0,1,2,3.")
_PYTHON = flags.DEFINE_string("python", sys.executable, "Interpreter of the experiments.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the commands of all points and run nothing.")


def main():
  if not _SWEEP.value or not _OUTDIR.value:
    raise ValueError("--sweep and --outdir are both needed: what to run, and the folder of its results")
  if _DEVICES.value is not None and len(_DEVICES.value) != _PROCESSES.value:
    raise ValueError(f"--cuda_devices={','.join(_DEVICES.value)} names {len(_DEVICES.value)} devices for --processes="
                     f"{_PROCESSES.value}; give each process one")
  sweep, outdir = sweep_file.read(_SWEEP.value), pathlib.Path(_OUTDIR.value).absolute()
  if _DRY_RUN.value:
    sweep_file.check_folder(sweep, outdir)
    for point in sweep.points:
      line = shlex.join(sweep.command(point, outdir, python=_PYTHON.value,
                                      resume=sweep_point.needs_resume(sweep, point, outdir)))
      state = sweep_file.status(point, outdir)
      print(f"# {state}: {line}" if state in ("done", "running") else line)
    return
  sweep_file.claim(sweep, outdir)
  sweep_point.heed_interrupts()
  ended = _run(sweep, outdir)
  states = [sweep_file.status(point, outdir) for point in sweep.points]
  print(f"{states.count('done')} of {len(states)} points are done, {ended.count(0)} of them now. Collect them: "
        f"python -m experiments.collect --outdir={_OUTDIR.value}")
  sys.exit(0 if set(states) == {"done"} else 1)


def _run(sweep, outdir):
  """Runs what is to run, at most so many at a time; exit codes."""
  todo = [point for point in sweep.points if sweep_file.status(point, outdir) in ("missing", "failed")]
  free, running, codes, whole = list(range(_PROCESSES.value)), {}, [], len(todo)
  try:
    while todo or running:
      while todo and free:
        point = todo.pop(0)
        if sweep_file.status(point, outdir) not in ("missing", "failed"):  # another launcher was faster
          whole -= 1
          continue
        place = free.pop(0)
        devices = {"CUDA_VISIBLE_DEVICES": _DEVICES.value[place]} if _DEVICES.value else {}
        running[place] = (time.monotonic(), sweep_point.Attempt(sweep, point, outdir, python=_PYTHON.value,
                                                                environment=devices))
      for place, (begin, attempt) in list(running.items()):
        if attempt.poll() is not None:
          codes.append(attempt.poll())
          free.append(place)
          del running[place]
          print(_line(attempt.point, codes, whole, time.monotonic() - begin, outdir), flush=True)
      time.sleep(0.1)
  except BaseException as error:
    for _, attempt in running.values():  # all together, then one after another
      attempt.interrupt()
    for _, attempt in running.values():
      attempt.stop()
    if isinstance(error, KeyboardInterrupt):
      print("\nthe same line goes on with what is missing", file=sys.stderr)
    raise
  return codes


def _line(point, codes, whole, seconds, outdir):
  how = "done" if not codes[-1] else f"FAILED with exit code {codes[-1]}, see {sweep_file.log_path(point, outdir)}"
  return f"[{len(codes)}/{whole}] {point.name}: {how} ({seconds:.0f} s)"


if __name__ == "__main__":
  program.run(main)
