"""Pods through a gcloud of our own: stockouts, preemption, a worker that fails, and what is printed without running."""
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# What Python is on the workers: it makes environments and runs "experiments" that do what $BEHAVIOUR says.
PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
  "-c "*print*) echo 3.12 ;;
  "-c "*) ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "$WORKER $*" >>"$FAKE/installed" ;;
  *)
    for flag in "$@"; do case $flag in --outdir=*) out=${flag#--outdir=} ;; esac; done
    printf '%s\\n' "$@" >"$FAKE/arguments-$WORKER"
    echo "begun on $WORKER"
    eval "$BEHAVIOUR"
    [ "$WORKER" != 0 ] || { mkdir -p "$out" && echo '{}' >"$out/summary.json"; }
    echo "done on $WORKER" >&2 ;;
esac
"""
# Experiments are imported to check their flags, for which JAX takes seconds: only tests of that check ask for it.
UNCHECKED = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
from experiments.harness import sweep_flags
sweep_flags.check = lambda experiment, overlays: True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SWEEP = {"experiment": "benchmark", "flags": {"methods": ["plain"]}, "points": {"product": {"seed": [0, 1]}}}


@dataclasses.dataclass
class Cloud:
  """A machine with a repository and our gcloud, and what became of it."""
  folder: pathlib.Path
  env: dict

  def scenario(self, **scenario):
    (self.folder / "scenario.json").write_text(json.dumps({"workers": 2} | scenario))

  def run(self, *arguments, behaviour="true"):
    """Calls the launcher in the repository's folder."""
    return subprocess.run([sys.executable, "-c", UNCHECKED, str(ROOT), str(ROOT / "launch/tpu_pod.py"), *arguments],
                          cwd=self.folder / "repository", env=self.env | {"BEHAVIOUR": behaviour}, capture_output=True,
                          text=True, timeout=120, check=False)

  @property
  def calls(self):
    """Kind and verb of each call of gcloud, those that only look apart."""
    path = self.folder / "calls.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [" ".join(call[2:4]) for call in map(json.loads, lines) if call[3] != "describe"]


@pytest.fixture(name="cloud")
def _cloud(tmp_path):
  programs, repository = tmp_path / "programs", tmp_path / "repository"
  programs.mkdir()
  gcloud = f"#!/bin/sh\nexec {shlex.join([sys.executable, str(ROOT / 'tests/launch/fake_gcloud.py')])} \"$@\"\n"
  for name, text in {"gcloud": gcloud, "python3.12": PYTHON, "curl": "#!/bin/sh\necho $WORKER\n"}.items():
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
  (repository / "launch").mkdir(parents=True)
  for name in ("setup.cfg", "launch/environment.sh", "launch/tpu_worker.sh"):
    shutil.copy(ROOT / name, repository / name)
  git = lambda *args: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=repository,
                                     check=True, capture_output=True)
  git("init")
  git("add", ".")
  git("commit", "--message=all")
  cloud = Cloud(tmp_path, os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "FAKE": str(tmp_path),
                                        "STOP_SECONDS": "0.1", "PYTHONPATH": ""})
  cloud.scenario()
  return cloud


def runs(pid):
  """Whether a process lives; one that has ended may wait for somebody to take notice."""
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
  except OSError:
    return False


def wait_until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.02)


POD = ("--name=pod", "--zone=us-east5-a", "--accelerator_type=v6e-8", "--poll_seconds=0")
LINE = ("--", "experiments.benchmark", "--methods=plain", "--outdir=runs/bench")


def test_dry_run_prints_each_command_and_runs_none(cloud):
  cloud.scenario(refusal="nothing may be asked")
  done = cloud.run("run", *POD, "--spot", "--project=p", "--dry_run", "--delete_after", "--", "python", "-m",
                   *LINE[1:], "--prompt=it's $HOME")
  assert done.returncode == 0, done.stderr
  at = "--zone=us-east5-a --project=p"
  remote = ("cd specjax && bash launch/tpu_worker.sh run line .venv-3.12/bin/python -m experiments.benchmark "
            "--methods=plain --outdir=runs/bench " + shlex.quote("--prompt=it's $HOME"))
  unpack = ("mkdir -p specjax && find specjax -mindepth 1 -maxdepth 1 ! -name '.venv*' ! -name logs ! -name runs "
            "-exec rm -rf {} + && tar -xzf specjax.tar.gz && cd specjax && bash launch/tpu_worker.sh prepare 3.12")
  assert done.stdout.splitlines() == [
      "git status --porcelain --untracked-files=no",
      "git rev-parse --verify 'HEAD^{commit}'",
      f"gcloud compute tpus queued-resources describe pod {at} --format=json",
      f"gcloud compute tpus queued-resources create pod --node-id=pod {at} --accelerator-type=v6e-8 "
      "--runtime-version=v2-alpha-tpuv6e --spot",
      f"gcloud compute tpus queued-resources describe pod {at} --format=json",
      "git archive --format=tar.gz --output=specjax.tar.gz --prefix=specjax/ HEAD",
      f"gcloud compute tpus tpu-vm scp specjax.tar.gz pod: {at} --worker=all",
      f"gcloud compute tpus tpu-vm ssh pod {at} --worker=all {shlex.quote('--command=' + unpack)}",
      f"gcloud compute tpus tpu-vm ssh pod {at} --worker=all {shlex.quote('--command=' + remote)}",
      f"gcloud compute tpus tpu-vm scp pod:specjax/runs/bench runs/ --recurse {at} --worker=0",
      f"gcloud compute tpus queued-resources delete pod {at} --force --quiet"]
  assert not cloud.calls and not (cloud.folder / "repository/runs").exists()


def test_one_line_on_every_worker_after_a_stockout(cloud):
  cloud.scenario(stockouts=2)
  done = cloud.run("run", *POD, "--noqueued", "--delete_after", *LINE, "--prompt=it's $HOME")
  assert done.returncode == 0, done.stderr
  assert cloud.calls == ["tpu-vm create"] * 3 + [
      f"tpu-vm {verb}" for verb in ("scp", "ssh", "ssh", "scp", "delete")]
  assert done.stderr.count("no room for v6e-8 in us-east5-a; asking again") == 2
  for worker in "01":
    sent = (cloud.folder / f"arguments-{worker}").read_text().splitlines()
    assert sent == ["-m", "experiments.benchmark", *LINE[2:], "--prompt=it's $HOME"]
    log = cloud.folder / f"repository/runs/bench.worker-{worker}.log"
    assert sorted(log.read_text().splitlines()) == [f"begun on {worker}", f"done on {worker}"]
    assert f"[worker {worker}] done on {worker}" in done.stdout
  assert sorted((cloud.folder / "installed").read_text().splitlines()) == [
      f"{worker} -m pip install --disable-pip-version-check --progress-bar on -e .[tpu]" for worker in "01"]
  assert (cloud.folder / "repository/runs/bench/summary.json").exists()


def test_the_queue_is_waited_for_and_a_pod_that_is_there_is_used(cloud):
  cloud.scenario(queue=["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"])
  done = cloud.run("create", *POD)
  assert (done.returncode, cloud.calls) == (0, ["queued-resources create"]), done.stderr
  told = [line for line in done.stderr.splitlines() if line.startswith("== pod is")]
  assert [line.split()[3].rstrip(";") for line in told] == [
      "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ready"]
  assert cloud.run("create", *POD).returncode == 0
  assert cloud.calls == ["queued-resources create"]
  assert cloud.run("delete", *POD).returncode == 0
  assert cloud.calls[1:] == ["queued-resources delete"]


@pytest.mark.parametrize("scenario, message", [
    ({"refusal": "PERMISSION_DENIED: tpu.queuedResources.create"}, "error: pod was not created: ERROR: "
     "(gcloud.compute.tpus.queued-resources.create) PERMISSION_DENIED: tpu.queuedResources.create"),
    ({"queue": ["FAILED"] * 9, "details": {"failedData": {"error": {"message": "no such type"}}}},
     "error: the request for pod failed: no such type")])
def test_a_request_that_is_wrong_is_made_once(cloud, scenario, message):
  cloud.scenario(**scenario)
  done = cloud.run("create", *POD)
  assert (done.returncode, done.stderr.splitlines()[-1]) == (2, message)
  assert cloud.calls == ["queued-resources create"]


def test_waiting_ends(cloud):
  cloud.scenario(stockouts=10**6)
  done = cloud.run("create", *POD, "--wait_hours=0.0001")
  assert done.returncode == 2
  assert "error: pod is not ready after --wait_hours=0.0001 (not there)" in done.stderr


def test_a_worker_that_fails_is_named_and_ends_the_others(cloud):
  done = cloud.run("run", *POD, "--grace_seconds=0.1", *LINE, behaviour='[ $WORKER = 0 ] && exec sleep 100; exit 3')
  assert done.returncode == 1
  assert ("== line: worker 0 of pod was lost (ssh's exit code 255); worker 1 of pod failed with exit code 3"
          in done.stderr)
  assert cloud.calls[-2:] == ["tpu-vm ssh", "tpu-vm scp"]  # the second shell ended the first
  assert (cloud.folder / "repository/runs/bench.worker-1.log").read_text() == "begun on 1\n"
  whole = cloud.run("logs", *POD, "--outdir=runs/logs")
  assert whole.returncode == 0, whole.stderr
  for worker in "01":
    log = cloud.folder / f"repository/runs/logs/worker-{worker}/logs/line.log"
    assert log.read_text() == f"begun on {worker}\n"


def test_an_interrupt_ends_the_workers(cloud):
  behaviour = 'echo $$ >"$FAKE/process-$WORKER"; exec sleep 100'
  arguments = [sys.executable, str(ROOT / "launch/tpu_pod.py"), "run", *POD, *LINE]
  with subprocess.Popen(arguments, cwd=cloud.folder / "repository", env=cloud.env | {"BEHAVIOUR": behaviour},
                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
    files = [cloud.folder / f"process-{worker}" for worker in "01"]
    wait_until(lambda: process.poll() is not None or all(file.exists() and file.read_text() for file in files))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].splitlines()[-1] == "interrupted"
  assert process.returncode == 130
  wait_until(lambda: not any(runs(file.read_text().strip()) for file in files))


def test_one_worker_alone_is_named_too(cloud):
  cloud.scenario(workers=1)
  done = cloud.run("run", *POD, *LINE, behaviour="exit 7")
  assert (done.returncode, "line: worker 0 of pod failed with exit code 7" in done.stderr) == (1, True)


def test_a_sweep_goes_on_after_a_preemption_and_runs_only_what_is_missing(cloud):
  (cloud.folder / "repository/sweep.json").write_text(json.dumps(SWEEP))
  sweep = ("--sweep=sweep.json", "--outdir=runs/sweep")
  # The second point finds its pod preempted once; then it fails on one worker for as long as `fails` is there.
  behaviour = """case $out in *seed=1*)
    [ $WORKER = 0 ] && [ ! -e "$FAKE/once" ] && printf PREEMPTED >"$FAKE/state" && touch "$FAKE/once" && exit 1
    while [ ! -e "$FAKE/once" ]; do sleep 0.02; done
    [ $WORKER = 1 ] && [ -e "$FAKE/fails" ] && exit 3 ;; esac; echo x >>"$FAKE/ran-${out##*/}-$WORKER" """
  (cloud.folder / "fails").touch()
  done = cloud.run("run", *POD, *sweep, behaviour=behaviour)
  assert done.returncode == 1, done.stderr
  assert "seed=1: worker 0 of pod was lost (ssh's exit code 255); worker 1 of pod was lost" in done.stderr
  assert "pod was lost, as pods are that are preempted; seed=1 runs again on a new one" in done.stderr
  assert "seed=1: worker 1 of pod failed with exit code 3" in done.stderr and "== failed: seed=1" in done.stderr
  assert cloud.calls.count("queued-resources create") == 2 and cloud.calls.count("queued-resources delete") == 1
  outdir = cloud.folder / "repository/runs/sweep"
  status = lambda name: json.loads((outdir / f"{name}.status.json").read_text())
  assert (status("seed=0")["exit_code"], status("seed=1")["exit_code"]) == (0, 3)
  (cloud.folder / "fails").unlink()
  again = cloud.run("run", *POD, *sweep, behaviour=behaviour)
  assert again.returncode == 0, again.stderr
  assert "== 1 of 2 points to run" in again.stderr
  assert (status("seed=1")["exit_code"], status("seed=1")["attempt"]) == (0, 2)
  assert (cloud.folder / "ran-seed=0-1").read_text() == "x\n"  # the first point never ran again
  assert (outdir / "seed=1/summary.json").exists()
  before = len(cloud.calls)
  third = cloud.run("run", *POD, *sweep)
  assert (third.returncode, len(cloud.calls)) == (0, before)  # all is there, and no pod is asked for
  (cloud.folder / "repository/sweep.json").write_text(json.dumps(SWEEP | {"flags": {}}))
  other = cloud.run("run", *POD, *sweep)
  assert other.returncode == 2 and "holds another sweep" in other.stderr


def test_a_pod_that_is_always_lost_is_given_up(cloud):
  done = cloud.run("run", *POD, "--max_preemptions=1", "--delete_after", *LINE,
                   behaviour='printf PREEMPTED >"$FAKE/state"')
  assert done.returncode == 2
  assert "error: pod was lost 2 times; what is finished is kept" in done.stderr
  assert cloud.calls.count("queued-resources delete") == 2 and cloud.calls[-1] == "queued-resources delete"


def test_a_pod_that_somebody_stopped_is_left_alone(cloud):
  assert cloud.run("create", *POD).returncode == 0
  (cloud.folder / "state").write_text("STOPPED")
  done = cloud.run("run", *POD, "--delete_after", *LINE)
  assert (done.returncode, done.stderr.splitlines()[-1]) == (
      2, "error: pod is STOPPED: start it, delete it, or choose another --name")
  assert cloud.calls == ["queued-resources create"]


def test_an_unknown_revision(cloud):
  done = cloud.run("run", *POD, "--revision=nowhere", *LINE)
  assert done.returncode == 2 and "looking for --revision=nowhere failed with exit code 128" in done.stderr
  assert not cloud.calls


def test_changes_that_are_not_committed_are_not_left_behind_silently(cloud):
  with open(cloud.folder / "repository/setup.cfg", "a", encoding="utf-8") as file:
    file.write("# changed\n")
  done = cloud.run("run", *POD, *LINE)
  assert done.returncode == 2
  assert "1 files differ from HEAD (setup.cfg): commit them, or give --revision=HEAD" in done.stderr
  assert not cloud.calls  # before a pod is waited for
  assert cloud.run("create", *POD).returncode == 0
  sent = cloud.run("sync", *POD, "--revision=HEAD")
  assert sent.returncode == 0, sent.stderr
  assert "# changed" not in (cloud.folder / "worker-0/specjax/setup.cfg").read_text()


def test_sync_removes_what_a_commit_removed_and_keeps_environments_and_runs(cloud):
  done = cloud.run("sync", *POD)
  assert (done.returncode, done.stderr.splitlines()[-1]) == (
      2, "error: copying specjax.tar.gz to the workers of pod failed with exit code 1: ERROR: "
      "(gcloud.compute.tpus.tpu-vm.scp) NOT_FOUND: there is no such node")
  assert cloud.run("create", *POD).returncode == 0
  there = cloud.folder / "worker-1/specjax"
  for kept in (".venv-3.12/mine", "runs/old/mine", "logs/mine", "stale/module"):
    (there / kept).parent.mkdir(parents=True)
    (there / kept).touch()
  done = cloud.run("sync", *POD)
  assert done.returncode == 0, done.stderr
  assert (there / "launch/tpu_worker.sh").exists() and not (there / "stale").exists()
  assert all((there / kept).exists() for kept in (".venv-3.12/mine", "runs/old/mine", "logs/mine"))


@pytest.mark.parametrize("arguments, message", [
    (["start"], "the first argument is one of create, sync, run, logs, delete; 'start' was given"),
    ([*POD], "the first argument is one of create, sync, run, logs, delete; none was given"),
    (["run", "--zone=z", *LINE], "--name and --zone are both needed: which pod, and where it is"),
    (["run", "--name=My_pod", "--zone=z", *LINE], "--name=My_pod: give small letters"),
    (["run", *POD], "give either --sweep=FILE or, behind --"),
    (["run", *POD, "--sweep=a", *LINE], "give either --sweep=FILE or, behind --"),
    (["run", *POD, "--", "benchmark"], "behind -- stands 'benchmark'; give an experiment with its flags"),
    (["run", *POD, "--outdir=a", *LINE], "--outdir=a is of a sweep; an experiment's own --outdir stands behind --"),
    (["create", *POD, *LINE], "create takes nothing behind --"),
    (["create", "--name=a", "--zone=z", "--accelerator_type=v9-8"], "add --runtime_version"),
    (["create", "--name=a", "--zone=z"], "there is no pod a in z: add --accelerator_type to ask for it"),
    (["create", *POD, "--poll_seconds=-1"], "poll_seconds")])
def test_bad_input(cloud, arguments, message):
  done = cloud.run(*arguments)
  assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
  assert not cloud.calls


def test_without_gcloud(cloud):
  (cloud.folder / "programs/gcloud").unlink()
  cloud.env["PATH"] = str(cloud.folder / "programs")
  done = cloud.run("create", *POD)
  assert (done.returncode, done.stderr.splitlines()[-1]) == (
      2, "error: gcloud was not found; install it and log in, or look at the commands with --dry_run")
