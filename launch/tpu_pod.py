"""Runs an experiment, or a sweep of one, on all workers of a Cloud TPU pod, through gcloud.

  python launch/tpu_pod.py run --name=pod --zone=us-east5-a --accelerator_type=v6e-16 --spot \
    --sweep=launch/sweeps/draft_tokens.json --outdir=runs/draft_tokens
  python launch/tpu_pod.py run --name=pod --zone=us-east5-a --accelerator_type=v6e-16 -- \
    experiments.benchmark --mesh=data:4,model:4 --outdir=runs/bench
  python launch/tpu_pod.py create|sync|logs|delete --name=pod --zone=us-east5-a ...

`run` asks for the pod where there is none, sends the code and runs the same line on every worker, point after point;
JAX finds the others by itself. Worker 0 writes results, which are fetched after each point, so that only missing points
run again: with the same command, or by itself on a new pod after a preemption. --dry_run prints every command.
"""
import contextlib
import pathlib
import re
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags  # pylint: disable=wrong-import-position

from experiments.harness import sweep_file  # pylint: disable=wrong-import-position
from launch import pod as pod_lib  # pylint: disable=wrong-import-position
from launch import pod_logs  # pylint: disable=wrong-import-position
from launch import program  # pylint: disable=wrong-import-position
from launch import shell as shell_lib  # pylint: disable=wrong-import-position

VERBS = ("create", "sync", "run", "logs", "delete")
_RUNTIMES = {"v4": "tpu-ubuntu2204-base", "v5litepod": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5",
             "v6e": "v2-alpha-tpuv6e"}
_NAME = flags.DEFINE_string("name", None, "Name of the pod, and of its place in the queue.")
_ZONE = flags.DEFINE_string("zone", None, "Zone of the pod, such as us-east5-a.")
_PROJECT = flags.DEFINE_string("project", None, "Google Cloud project; gcloud's own by default.")
_TYPE = flags.DEFINE_string("accelerator_type", None, "What to ask for, such as v6e-16, if there is no such pod.")
_RUNTIME = flags.DEFINE_string("runtime_version", None, "Image of the workers; by default the usual one of the type.")
_SPOT = flags.DEFINE_bool("spot", False, "Ask for a pod that is cheaper and may be preempted.")
_QUEUED = flags.DEFINE_bool("queued", True, "Wait in Google's queue; with --noqueued, repeat the request until there "
                            "is room.")
_SWEEP = flags.DEFINE_string("sweep", None, "Sweep file; each of its points runs on the whole pod.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder here for results and logs; by default runs/NAME.")
_REVISION = flags.DEFINE_string("revision", None, "Commit to send; by default HEAD, if no file differs from it.")
_PYTHON = flags.DEFINE_string("python", "3.12", "Python on the workers; fetched where it is missing.")
_CREATE = flags.DEFINE_list("create_flags", [], "Further flags of gcloud's create, such as --network=NAME.")
_SSH = flags.DEFINE_list("ssh_flags", [], "Further flags of gcloud's ssh and scp, such as --internal-ip.")
_POLL = flags.DEFINE_float("poll_seconds", 30, "Seconds between two looks at a pod, and before the second request.",
                           lower_bound=0)
_WAIT = flags.DEFINE_float("wait_hours", 24, "Hours to wait for a pod before giving up.", lower_bound=0)
_GRACE = flags.DEFINE_float("grace_seconds", 120, "Seconds that other workers have to end after one failed.",
                            lower_bound=0)
_PREEMPTIONS = flags.DEFINE_integer("max_preemptions", 20, "Pods that may be lost before the launcher gives up.",
                                    lower_bound=0)
_DELETE = flags.DEFINE_bool("delete_after", False, "Delete the pod when all is done, whatever came of it.")
_DRY = flags.DEFINE_bool("dry_run", False, "Print every command and do nothing else.")


def the_pod() -> pod_lib.Pod:
  """The pod of the flags.

  Raises:
    ValueError: a flag is missing or malformed; names it.
  """
  if not _NAME.value or not _ZONE.value:
    raise ValueError("--name and --zone are both needed: which pod, and where it is")
  if not re.fullmatch(r"[a-z]([-a-z0-9]{0,60}[a-z0-9])?", _NAME.value):
    raise ValueError(f"--name={_NAME.value}: give small letters, digits and hyphens, a letter first, at most 62")
  runtime = _RUNTIME.value or _RUNTIMES.get((_TYPE.value or "").split("-")[0])
  if _TYPE.value and not runtime:
    raise ValueError(f"--accelerator_type={_TYPE.value}: its image is not known here (known: {', '.join(_RUNTIMES)}); "
                     "add --runtime_version")
  return pod_lib.Pod(
      shell=shell_lib.Shell(_DRY.value), name=_NAME.value, zone=_ZONE.value, project=_PROJECT.value,
      accelerator_type=_TYPE.value, runtime_version=runtime, spot=_SPOT.value, queued=_QUEUED.value,
      create_flags=tuple(_CREATE.value), ssh_flags=tuple(_SSH.value), poll_seconds=_POLL.value, wait_hours=_WAIT.value)


class Run:
  """What runs on a pod: the points of a sweep, or one line."""

  def __init__(self, pod: pod_lib.Pod, line: list[str]):
    self._pod = pod
    self._line = line[2:] if line[:2] == ["python", "-m"] else line
    self._python = f".venv-{_PYTHON.value}/bin/python"
    self._outdir = pathlib.Path(_OUTDIR.value or f"runs/{pod.name}")
    self._lost, self._had = 0, False

  def sync(self) -> None:
    """Sends the code to every worker and installs it there.

    Raises:
      ValueError: files differ from HEAD and no --revision says what to send; or a command failed.
    """
    self._send(self._commit())

  def _commit(self):
    """The commit to send, by its hash: a pod that is made in the middle of a sweep is to have the same."""
    shell = self._pod.shell
    if not _REVISION.value:
      changed = shell.run(["git", "status", "--porcelain", "--untracked-files=no"], quiet=True).out.split("\n")
      changed = [line[3:] for line in changed if line]
      if changed:
        raise ValueError(f"{len(changed)} files differ from HEAD ({', '.join(changed[:3])}): commit them, or give "
                         "--revision=HEAD to send what is committed, --revision=$(git stash create) for what is here")
    name = _REVISION.value or "HEAD"
    return shell.check(["git", "rev-parse", "--verify", f"{name}^{{commit}}"],
                       doing=f"looking for --revision={name}").out.strip() or name

  def _send(self, commit):
    shell = self._pod.shell
    with contextlib.nullcontext(".") if shell.dry_run else tempfile.TemporaryDirectory() as folder:
      archive = str(pathlib.Path(folder) / "specjax.tar.gz")
      shell.check(["git", "archive", "--format=tar.gz", f"--output={archive}", f"--prefix={pod_lib.FOLDER}/",
                   commit], doing="packing the code")
      self._pod.copy_to(archive)
    # What an earlier commit had and this one has not must go; environments, logs and runs stay.
    there = pod_lib.FOLDER
    unpack = (f"mkdir -p {there} && find {there} -mindepth 1 -maxdepth 1 ! -name '.venv*' ! -name logs ! -name runs "
              "-exec rm -rf {} + && tar -xzf specjax.tar.gz")
    prepare = pod_lib.in_folder(["bash", "launch/tpu_worker.sh", "prepare", _PYTHON.value])
    outcome = self._pod.everywhere(f"{unpack} && {prepare}")
    if outcome.code:
      raise ValueError(f"installing specjax failed: {outcome.words(self._pod.name)}")

  def go(self) -> list[str]:
    """Runs the line, or every point that is not done, on every worker; gives what failed.

    Raises:
      ValueError: the command line asks for nothing or for two things; a pod could not be had, or was lost too often.
    """
    if bool(_SWEEP.value) == bool(self._line):
      raise ValueError("give either --sweep=FILE or, behind --, an experiment with its flags: -- experiments.benchmark "
                       "--outdir=runs/bench")
    try:
      return self._go_line() if self._line else self._go_sweep()
    finally:
      if _DELETE.value and self._had:  # one that is not ready may be somebody else's
        self._pod.delete()

  def logs(self) -> None:
    """Fetches the logs of every worker, whole: what `run` keeps ends where the connection did."""
    for worker in range(self._pod.workers()):
      here = self._outdir / f"worker-{worker}"
      if not self._pod.shell.dry_run:
        here.mkdir(parents=True, exist_ok=True)
      self._pod.copy_from("logs", f"{here}/", worker)

  def _go_line(self):
    if not self._line[0].startswith("experiments."):
      raise ValueError(f"behind -- stands {self._line[0]!r}; give an experiment with its flags, such as -- "
                       "experiments.benchmark --outdir=runs/bench")
    if _OUTDIR.value:
      raise ValueError(f"--outdir={_OUTDIR.value} is of a sweep; an experiment's own --outdir stands behind --")
    own = [flag.partition("=")[2] for flag in self._line if flag.startswith("--outdir=")]
    self._prepare(commit := self._commit())
    # What is not below the code's folder is on a file system that outlives the pod, and stays there.
    results = own[-1] if own and not own[-1].startswith("/") else None
    code = self._everywhere(commit, "line", [self._python, "-m", *self._line], results,
                            pathlib.Path(results or self._outdir))
    return [self._line[0]] if code else []

  def _go_sweep(self):
    sweep = sweep_file.read(_SWEEP.value)
    dry, there = self._pod.shell.dry_run, f"runs/{self._outdir.name}"
    if dry:
      sweep_file.check_folder(sweep, self._outdir)
    else:
      sweep_file.claim(sweep, self._outdir)
    todo = [point for point in sweep.points if sweep_file.status(point, self._outdir) in ("missing", "failed")]
    shell_lib.note(f"{len(todo)} of {len(sweep.points)} points to run")
    if not todo:
      return []
    self._prepare(commit := self._commit())
    failed = []
    for point in todo:
      results = f"{there}/{point.name}"
      record = pod_logs.Record(point, sweep.command(point, there, python=self._python), self._outdir)
      if not dry:
        record.begin()
      # Only worker 0 has what an earlier attempt left: with it the workers would not all do the same.
      code = self._everywhere(commit, point.name, record.command, results, self._outdir / point.name, anew=True)
      if not dry:
        record.end(code)
      if code:
        failed.append(point.name)
    return failed

  def _prepare(self, commit):
    """Brings the pod about, and the code onto it."""
    self._pod.ensure()
    self._had = True
    self._send(commit)

  def _everywhere(self, commit, label, command, results, here, *, anew=False):
    """Runs a command on every worker and fetches the folder `results`, again on a new pod if this one is lost.

    `anew` removes that folder first.

    Returns:
      the exit code of a worker, of gcloud, or 1 if there are no results to fetch; 0 if all is well.
    """
    line = pod_lib.in_folder(*([["rm", "-rf", results]] if anew else []),
                             ["bash", "launch/tpu_worker.sh", "run", label, *command])
    while True:
      with pod_logs.worker_logs(here) as worker_line, self._end_of_others() as on_failure:
        outcome = self._pod.everywhere(line, worker_line=worker_line, on_failure=on_failure)
      if outcome.code:
        shell_lib.note(f"{label}: {outcome.words(self._pod.name)}")
      if not outcome.code or not self._pod.lost(outcome):
        fetched = self._fetch(results, here)  # what a failed run left, too
        if outcome.code or fetched or not self._pod.lost(outcome):
          return outcome.code or int(not fetched)
      self._lost += 1
      if self._lost > _PREEMPTIONS.value:
        raise ValueError(f"{self._pod.name} was lost {self._lost} times; what is finished is kept. Run the same "
                         "command again to go on, with more --max_preemptions or without --spot")
      shell_lib.note(f"{self._pod.name} was lost, as pods are that are preempted; {label} runs again on a new one")
      self._prepare(commit)

  def _fetch(self, results, here):
    """Copies a folder of worker 0, which alone writes results."""
    if not results:
      return True
    if not self._pod.shell.dry_run:
      here.parent.mkdir(parents=True, exist_ok=True)
    return self._pod.copy_from(results, f"{here.parent}/", 0)

  @contextlib.contextmanager
  def _end_of_others(self):
    """Ends the other workers some time after one failed, as they may wait for it for ever; all on an interrupt."""
    stop = lambda: self._pod.shell.run(self._pod.ssh(pod_lib.in_folder(["bash", "launch/tpu_worker.sh", "stop"])))
    timer = threading.Timer(_GRACE.value, stop)
    try:
      yield timer.start
    except KeyboardInterrupt:
      stop()
      raise
    finally:
      timer.cancel()


def main(verb: str, line: list[str]) -> None:
  """Does what a verb says; `line` is what stands behind --."""
  if verb not in VERBS:
    raise ValueError(f"the first argument is one of {', '.join(VERBS)}; {repr(verb) if verb else 'none'} was given")
  pod = the_pod()
  run = Run(pod, line)
  if verb == "run":
    if failed := run.go():
      shell_lib.note(f"failed: {', '.join(failed)}; the logs are beside the results")
      sys.exit(1)
  elif line:
    raise ValueError(f"{verb} takes nothing behind --")
  else:
    {"create": pod.ensure, "sync": run.sync, "logs": run.logs, "delete": pod.delete}[verb]()


if __name__ == "__main__":
  _verb, sys.argv, _line = shell_lib.arguments(sys.argv)
  program.run(lambda: main(_verb, _line))
