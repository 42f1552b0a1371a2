"""Submits the points of a sweep to Slurm, as an array of jobs.

  python launch/slurm_sweep.py --sweep=launch/sweeps/draft_tokens.json --outdir=runs/draft_tokens --gpus_per_node=1

Run it on a machine from which sbatch works, in a clone on a file system that all nodes share. Only what is missing or
failed and not queued is submitted, so the same line completes a sweep. A job whose time is over, or that is preempted,
goes back into the queue and goes on where it was. Flags without a word about them are sbatch's.
"""
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags  # pylint: disable=wrong-import-position

from experiments.harness import sweep_file  # pylint: disable=wrong-import-position
from experiments.harness import sweep_point  # pylint: disable=wrong-import-position
from experiments.harness import sweep_slurm  # pylint: disable=wrong-import-position
from launch import program  # pylint: disable=wrong-import-position

_SWEEP = flags.DEFINE_string("sweep", None, "The sweep's file.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Results folder of the sweep, on a file system that all nodes share.")
_TIME = flags.DEFINE_string("time", "1:00:00", "Time limit of a point, between two turns in the queue.")
_PARTITION = flags.DEFINE_string("partition", None, "Partition.")
_NODES = flags.DEFINE_integer("nodes", 1, "Nodes of a point.", lower_bound=1)
_TASKS = flags.DEFINE_integer("ntasks_per_node", 1, "Processes of a point on each node.", lower_bound=1)
_CPUS = flags.DEFINE_integer("cpus_per_task", None, "Cores of a process.", lower_bound=1)
_GPUS = flags.DEFINE_integer("gpus_per_node", None, "GPUs of a point on each node.", lower_bound=1)
_MEMORY = flags.DEFINE_string("mem", None, "Memory of a point on each node, such as 32G.")
_ACCOUNT = flags.DEFINE_string("account", None, "Account.")
_QOS = flags.DEFINE_string("qos", None, "Quality of service.")
_CONSTRAINT = flags.DEFINE_string("constraint", None, "Features that nodes must have.")
_AT_A_TIME = flags.DEFINE_integer("at_a_time", 256, "Points that run at a time, at most.", lower_bound=1)
_NOTICE = flags.DEFINE_integer("notice", 90, "Seconds before the time limit at which a point is interrupted.",
                               lower_bound=sweep_point.GRACE_SECONDS + 10)
_REQUEUES = flags.DEFINE_integer("requeues", 10, "Times that a point whose time is over goes back into the queue.",
                                 lower_bound=0)
_PYTHON = flags.DEFINE_string("python", sys.executable, "Interpreter on the nodes.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the commands of the points and the script, and submit nothing.")


def main():
  if not _SWEEP.value or not _OUTDIR.value:
    raise ValueError("--sweep and --outdir are both needed: what to run, and the folder of its results")
  parameters = {name: value for name, value in {
      "time": sweep_slurm.minutes(_TIME.value), "partition": _PARTITION.value, "nodes": _NODES.value,
      "ntasks_per_node": _TASKS.value, "cpus_per_task": _CPUS.value, "gpus_per_node": _GPUS.value, "mem": _MEMORY.value,
      "account": _ACCOUNT.value, "qos": _QOS.value, "constraint": _CONSTRAINT.value,
      "array_parallelism": _AT_A_TIME.value, "signal_delay_s": _NOTICE.value,
      "job_name": f"specjax-{pathlib.Path(_SWEEP.value).stem}"}.items() if value is not None}
  sweep, outdir = sweep_file.read(_SWEEP.value), pathlib.Path(_OUTDIR.value).absolute()
  sweep_file.check_folder(sweep, outdir)
  left = [point for point in sweep.points if sweep_file.status(point, outdir) in ("missing", "failed")]
  if _DRY_RUN.value:
    for point in left:
      print(shlex.join(sweep.command(point, outdir, python=_PYTHON.value,
                                     resume=sweep_point.needs_resume(sweep, point, outdir))))
    if left:
      print(f"\n{sweep_slurm.script(left, outdir, parameters=parameters, python=_PYTHON.value)}")
    return
  last = sweep_slurm.submitted(outdir)
  in_queue = sweep_slurm.queued()
  waiting = [point for point in left if last.get(point.name) in in_queue]
  todo = [point for point in left if point not in waiting]
  sweep_file.claim(sweep, outdir)
  if todo:
    for point, job in zip(todo, sweep_slurm.submit(todo, outdir, parameters=parameters, requeues=_REQUEUES.value,
                                                   python=_PYTHON.value)):
      print(f"{job}  {point.name}")
  running = len(sweep.points) - len(left)
  print(f"{len(todo)} of {len(sweep.points)} points submitted; {len(waiting)} are queued already, {running} done or "
        f"running. Look: squeue --me; collect: python -m experiments.collect --outdir={_OUTDIR.value}")


if __name__ == "__main__":
  program.run(main)
