"""A Cloud TPU pod through gcloud: asked for until it is there, looked at, and spoken to on all workers at once.

Two ways to get one. Queued resources, Google's recommendation, wait in its queue; without it a request is repeated,
ever more slowly, until there is room. What was preempted is deleted and asked for again. The commands are those of
gcloud 528; `--output-directory` of its ssh is not used, as that version writes to a folder called None.
"""
import dataclasses
import json
import pathlib
import re
import shlex
import time

from launch import shell as shell_lib

FOLDER = "specjax"  # in the home of every worker
_LONGEST_DELAY = 600.0
_STOCKOUT = re.compile(r"no more capacity|insufficient \w*\s?capacity|stockout|resource_pool_exhausted|"
                       r"not have enough resources|currently unavailable", re.IGNORECASE)
_ABSENT = re.compile(r"not[ _]found", re.IGNORECASE)
_ENDED = ("FAILED", "SUSPENDED", "PREEMPTED", "TERMINATED")  # of themselves they never become ready again
_HELD = ("STOPPED", "STOPPING", "HIDDEN", "HIDING")           # somebody did that, and has data there
_LINE = re.compile(r"^\[worker (\d+)\] (.*)$")
_FAILED = re.compile(r"##### Command execution on worker (\d+) failed with exit status (\d+)")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a command ended on the workers: gcloud's exit code, and that of each worker that failed."""
  code: int
  failed: dict[int, int]

  def words(self, pod: str) -> str:
    """`worker 3 of pod failed with exit code 1`, for each."""
    if not self.failed:
      return f"gcloud could not reach the workers of {pod} (exit code {self.code})"
    return "; ".join(f"worker {worker} of {pod} " + ("was lost (ssh's exit code 255)" if code == 255 else
                                                     f"failed with exit code {code}")
                     for worker, code in sorted(self.failed.items()))


@dataclasses.dataclass(frozen=True)
class Pod:
  """A pod by its name, and what to ask for when it is not there."""
  shell: shell_lib.Shell
  name: str
  zone: str
  project: str | None
  accelerator_type: str
  runtime_version: str
  spot: bool
  queued: bool
  create_flags: tuple[str, ...]
  ssh_flags: tuple[str, ...]
  poll_seconds: float
  wait_hours: float

  def ensure(self) -> None:
    """Waits until the pod is ready, asking for it as often as needed.

    Raises:
      ValueError: a request was refused for another reason than want of room (quota, rights, a wrong type), or
        `wait_hours` are over; says what gcloud said.
    """
    if self.shell.dry_run:
      for command in (self._describe(), self._create(), self._describe()):
        self.shell.show(command)
      return
    deadline, delay, said = time.monotonic() + 3600 * self.wait_hours, self.poll_seconds, None
    while (state := self.state()) != "READY":
      if time.monotonic() > deadline:
        raise ValueError(f"{self.name} is not ready after --wait_hours={self.wait_hours:g} ({state or 'not there'}): "
                         "wait longer, or choose another --zone or --accelerator_type")
      if state in _HELD:
        raise ValueError(f"{self.name} is {state}: start it, delete it, or choose another --name")
      if state is None and not self._created():
        shell_lib.note(f"no room for {self.accelerator_type} in {self.zone}; asking again in {delay:g} s")
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY)
      elif state in _ENDED:
        self._check_reason(state)
        shell_lib.note(f"{self.name} is {state}: it is deleted and asked for again, in {delay:g} s")
        self.delete()
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY)
      elif state is not None:
        if state != said:
          shell_lib.note(f"{self.name} is {state}; looking every {self.poll_seconds:g} s")
        said = state
        time.sleep(self.poll_seconds)
    shell_lib.note(f"{self.name} is ready")

  def state(self) -> str | None:
    """READY, another state of the pod or of its place in the queue, or None where there is no such pod.

    Raises:
      ValueError: gcloud could not tell.
    """
    if self.queued:
      found = self._look(self._describe())
      state = None if found is None else found.get("state", {}).get("state", "UNKNOWN")
      if state != "ACTIVE":
        return state
    node = self._look(self._node())
    if node is None:  # behind an active place in the queue there was one, which is gone
      return "PREEMPTED" if self.queued else None
    return node.get("state", "UNKNOWN")

  def lost(self, outcome: Outcome) -> bool:
    """Whether a command failed because its pod is gone; if ssh was what failed, Google may need a while to say so."""
    cut_off = not outcome.failed or 255 in outcome.failed.values()
    for look in range(6 if cut_off else 1):
      if look:
        time.sleep(self.poll_seconds)
      if self.state() != "READY":
        return True
    return False

  def workers(self) -> int:
    """How many workers the pod has."""
    if self.shell.dry_run:
      return 1
    return len((self._look(self._node()) or {}).get("networkEndpoints", [])) or 1

  def delete(self) -> None:
    """Deletes the pod and its place in the queue, and waits until both are gone.

    Raises:
      ValueError: gcloud could not delete them.
    """
    kind, force = ("queued-resources", ["--force"]) if self.queued else ("tpu-vm", [])
    done = self.shell.run(["gcloud", "compute", "tpus", kind, "delete", self.name, *self._where(), *force, "--quiet"])
    if done.code and not _ABSENT.search(done.err):
      raise ValueError(f"{self.name} was not deleted: {shell_lib.last_words(done)}")

  def copy_to(self, path: str) -> None:
    """Copies a file into the home of every worker."""
    self.shell.check(self._scp([path, f"{self.name}:"], "all"),
                     doing=f"copying {pathlib.Path(path).name} to the workers of {self.name}")

  def copy_from(self, path: str, folder: str, worker: int) -> bool:
    """Copies a folder of one worker, seen from its `FOLDER`, into a folder here; False, and said so, where it fails."""
    done = self.shell.run(self._scp([f"{self.name}:{FOLDER}/{path}", folder, "--recurse"], str(worker)))
    if done.code:
      shell_lib.note(f"copying {path} from worker {worker} of {self.name} failed: {shell_lib.last_words(done)}")
    return not done.code

  def everywhere(self, command: str, *, worker_line=None, on_failure=None) -> Outcome:
    """Runs a line of shell on every worker at once.

    Args:
      command: the line.
      worker_line: called with (worker, text) for each line that `tpu_worker.sh run` wrote.
      on_failure: called once, when the first worker fails; the others still run then.
    """
    failed = {}

    def read(line):
      if match := _LINE.match(line):
        if worker_line:
          worker_line(int(match[1]), match[2])
      elif match := _FAILED.search(line):
        failed[int(match[1])] = int(match[2])
        if on_failure and len(failed) == 1:
          on_failure()
      print(line, flush=True)

    code = self.shell.follow(self.ssh(command), read)
    if code and not failed and self.workers() == 1:  # gcloud names a worker only where there are several
      failed[0] = code
    return Outcome(code, failed)

  def ssh(self, command: str) -> list[str]:
    """The command that runs a line of shell on every worker."""
    return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", self.name, *self._where(), "--worker=all",
            *self.ssh_flags, f"--command={command}"]

  def _created(self):
    """Asks for the pod; False where there is no room for it."""
    done = self.shell.run(self._create())
    if done.code and not _STOCKOUT.search(done.err):
      raise ValueError(f"{self.name} was not created: {shell_lib.last_words(done)}")
    return not done.code

  def _check_reason(self, state):
    """Refuses to ask again where the queue says that the request itself was wrong."""
    if state == "FAILED" and self.queued:
      found = self._look(self._describe()) or {}
      reason = found.get("state", {}).get("failedData", {}).get("error", {}).get("message", "")
      if reason and not _STOCKOUT.search(reason):
        raise ValueError(f"the request for {self.name} failed: {reason}")

  def _create(self):
    if not self.accelerator_type:
      raise ValueError(f"there is no pod {self.name} in {self.zone}: add --accelerator_type to ask for it")
    spot = ["--spot"] if self.spot else []
    if self.queued:
      return ["gcloud", "compute", "tpus", "queued-resources", "create", self.name, f"--node-id={self.name}",
              *self._where(), f"--accelerator-type={self.accelerator_type}",
              f"--runtime-version={self.runtime_version}", *spot, *self.create_flags]
    return ["gcloud", "compute", "tpus", "tpu-vm", "create", self.name, *self._where(),
            f"--accelerator-type={self.accelerator_type}", f"--version={self.runtime_version}", *spot,
            *self.create_flags]

  def _describe(self):
    if not self.queued:
      return self._node()
    return ["gcloud", "compute", "tpus", "queued-resources", "describe", self.name, *self._where(), "--format=json"]

  def _node(self):
    return ["gcloud", "compute", "tpus", "tpu-vm", "describe", self.name, *self._where(), "--format=json"]

  def _scp(self, paths, worker):
    return ["gcloud", "compute", "tpus", "tpu-vm", "scp", *paths, *self._where(), f"--worker={worker}",
            *self.ssh_flags]

  def _where(self):
    return [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]

  def _look(self, command):
    """What gcloud describes, or None where it is not there."""
    done = self.shell.run(command, quiet=True)
    if done.code and _ABSENT.search(done.err):
      return None
    if done.code:
      raise ValueError(f"gcloud could not describe {self.name}: {shell_lib.last_words(done)}")
    return json.loads(done.out)


def in_folder(*commands: list[str]) -> str:
  """A line of shell that runs commands, one after another, in the worker's `FOLDER`."""
  return " && ".join([f"cd {FOLDER}", *map(shlex.join, commands)])
