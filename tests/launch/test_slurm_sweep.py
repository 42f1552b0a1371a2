"""Sweeps on Slurm, with programs that stand in for it: what is submitted, and how a job that must go comes back.

launch/test_slurm.sh does the same with a real one.
"""
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import pytest

from experiments.harness import sweep_file
from experiments.harness import sweep_flags
from experiments.harness import sweep_slurm
import fake_experiment

ROOT = sweep_flags.ROOT


@pytest.fixture
def cluster(tmp_path):
  """A folder of programs for PATH: sbatch keeps its script, squeue tells `queue`, scontrol writes what it was told."""
  programs = tmp_path / "programs"
  programs.mkdir()
  for name, does in (("sbatch", f"cp $1 {tmp_path}/script; echo Submitted batch job 7"), ("srun", "exit 1"),
                     ("squeue", f"cat {tmp_path}/queue"), ("scontrol", f"echo $@ >>{tmp_path}/scontrol")):
    (programs / name).write_text(f"#!/bin/sh\n{does}\n")
    (programs / name).chmod(0o755)
  (tmp_path / "queue").write_text("")
  return tmp_path


def submit(folder, seeds, *args):
  (folder / "s.json").write_text(json.dumps({"experiment": "benchmark", "points": {"zip": {"seed": seeds}}}))
  path = f"{folder / 'programs'}:{os.environ['PATH']}"
  done = subprocess.run([sys.executable, "launch/slurm_sweep.py", f"--sweep={folder / 's.json'}",
                         f"--outdir={folder / 'out'}", *args], cwd=ROOT, env=os.environ | {"PATH": path}, check=False,
                        capture_output=True, text=True, timeout=120)
  return done.returncode, done.stdout, done.stderr


def test_a_dry_run_prints_lines_and_script(cluster):
  code, out, err = submit(cluster, [0, 1], "--dry_run", "--python=py thon", "--time=1-2", "--partition=gpu",
                          "--gpus_per_node=2", "--mem=3G", "--at_a_time=1", "--notice=60")
  assert (code, err) == (0, "")
  lines = out.splitlines()
  assert lines[:2] == [f"'py thon' -m experiments.benchmark --seed={seed} --outdir={cluster}/out/seed={seed}"
                       for seed in (0, 1)]
  for told in ("array=0-1%1", "time=1560", "partition=gpu", "gpus-per-node=2", "mem=3G", "signal=USR2@60", "requeue",
               "job-name=specjax-s"):
    assert f"#SBATCH --{told}" in lines
  assert f"cd {ROOT}" in lines and out.rstrip().endswith(f"'py thon' -u -m submitit.core._submit {cluster}/out/slurm")
  assert not (cluster / "out").exists() and not (cluster / "script").exists()


def test_what_is_done_or_queued_is_not_submitted(cluster):
  code, out, err = submit(cluster, [0, 1, 2, 3])
  assert code == 0, err
  assert out.splitlines()[:4] == [f"7_{seed}  seed={seed}" for seed in range(4)]
  assert "4 of 4 points submitted; 0 are queued already, 0 done or running" in out
  assert "--array=0-3%4" in (cluster / "script").read_text()
  sweep = sweep_file.load(cluster / "out")
  (cluster / "out" / "seed=0").mkdir()
  for number, code in ((0, 0), (2, 1)):  # one is done, one failed
    sweep_file.write_json(sweep_file.status_path(sweep.points[number], cluster / "out"), {"exit_code": code})
  (cluster / "queue").write_text("7_1\n7_3\n99\n")
  _, out, _ = submit(cluster, [0, 1, 2, 3])
  assert out.startswith("7  seed=2\n1 of 4 points submitted; 2 are queued already, 1 done or running")
  assert "--array" not in (cluster / "script").read_text()
  assert sweep_slurm.submitted(cluster / "out") == {"seed=0": "7_0", "seed=1": "7_1", "seed=2": "7", "seed=3": "7_3"}


@pytest.mark.parametrize("program, does, message", [
    ("sbatch", "echo no such partition >&2; exit 1", "Slurm refused the submission: .*no such partition"),
    ("squeue", "echo no controller >&2; exit 1", "squeue failed with exit code 1: no controller")])
def test_what_slurm_refuses_is_told(cluster, program, does, message, monkeypatch):
  (cluster / "programs" / program).write_text(f"#!/bin/sh\n{does}\n")
  monkeypatch.setenv("PATH", f"{cluster / 'programs'}:{os.environ['PATH']}")
  points = [sweep_file.Point(0, "p", "benchmark", {})]
  with pytest.raises(ValueError, match=message):
    sweep_slurm.queued()
    sweep_slurm.submit(points, cluster / "out", parameters={}, requeues=1, python=sys.executable)
  assert sweep_slurm.submitted(cluster / "out") == {}


def test_no_slurm_no_submission(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(ValueError, match="squeue was not found.*--dry_run"):
    sweep_slurm.queued()
  with pytest.raises(ValueError, match="srun was not found.*--dry_run"):
    sweep_slurm.submit([], tmp_path, parameters={}, requeues=1, python=sys.executable)


def test_no_submitit_is_told(monkeypatch):
  monkeypatch.setitem(sys.modules, "submitit", None)
  with pytest.raises(ValueError, match=r"submitit is not installed.*\[launch\]"):
    sweep_slurm.script([], pathlib.Path("x"), parameters={}, python="python")


@pytest.mark.parametrize("text, minutes", [("5", 5), ("90:00", 90), ("90:01", 91), ("1:30:00", 90), ("0:00:01", 1),
                                           ("1-2", 1560), ("1-2:30", 1590), ("2-0:00:30", 2881)])
def test_times_are_sbatch_s(text, minutes):
  assert sweep_slurm.minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "1h", "1:2:3:4", "-5", "1-", "1-2:3:4:5", "a-1", "1.5", "0:00"])
def test_times_that_are_none(text):
  with pytest.raises(ValueError, match=f"--time={text}: give minutes"):
    sweep_slurm.minutes(text)


def job(cluster, **env):
  """What `srun` starts: submitit's runner, in a job."""
  path = f"{cluster / 'programs'}:{os.environ['PATH']}"
  return subprocess.Popen(
      [sys.executable, "-m", "submitit.core._submit", str(cluster / "out" / "slurm")], cwd=ROOT, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {
          "PATH": path, "PYTHONPATH": str(ROOT), "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "7",
          "SLURM_PROCID": "0"} | env)


def until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it never came to that"
    time.sleep(0.01)


@pytest.fixture
def submitted(cluster):
  """A point that works until it is stopped, submitted; its sweep."""
  sweep = sweep_file.Sweep("benchmark", (sweep_file.Point(0, "seed=8", "benchmark", {"seed": 8}),), True)
  out = cluster / "out"
  sweep_file.claim(sweep, out)
  python = fake_experiment.make(cluster)
  before = os.environ["PATH"]
  os.environ["PATH"] = f"{cluster / 'programs'}:{before}"
  try:
    assert sweep_slurm.submit(sweep.points, out, parameters={"time": 60}, requeues=2, python=python) == ["7"]
  finally:
    os.environ["PATH"] = before
  return sweep


def test_a_job_that_must_go_comes_back_and_goes_on(cluster, submitted):
  point, out = submitted.points[0], cluster / "out"
  working = out / "seed=8" / "working"
  process = job(cluster)
  until(working.exists)
  child = sweep_file.read_status(point, out)["pid"]
  for pid in (child, process.pid):  # Slurm tells all processes of a job
    os.kill(pid, signal.SIGUSR2)
  said, _ = process.communicate(timeout=60)
  assert "Requeued job 7" in said and (cluster / "scontrol").read_text() == "requeue 7\n"
  assert sweep_file.read_status(point, out)["exit_code"] == 130  # interrupted, not killed
  assert sweep_file.status(point, out) == "failed"
  process = job(cluster, SLURM_RESTART_COUNT="1")
  said, _ = process.communicate(timeout=60)
  assert process.returncode == 0, said
  record = sweep_file.read_status(point, out)
  assert (record["attempt"], record["resumed"], record["exit_code"]) == (2, True, 0)
  assert record["job"] == ["7", "1.0"]
  process = job(cluster)  # a point that is done is left alone
  assert process.communicate(timeout=60) and process.returncode == 0
  assert sweep_file.read_status(point, out) == record


def test_a_cancelled_job_leaves_a_failed_point_and_waits_for_its_end(cluster, submitted):
  """If it ended by itself, Slurm would take a preempted job for one that is over."""
  point, out = submitted.points[0], cluster / "out"
  process = job(cluster)
  until((out / "seed=8" / "working").exists)
  process.send_signal(signal.SIGTERM)
  until(lambda: sweep_file.status(point, out) == "failed")
  assert process.poll() is None
  process.send_signal(signal.SIGUSR2)  # a preemption with grace says so after all
  said, _ = process.communicate(timeout=60)
  assert "Requeued job 7" in said


def test_a_point_that_fails_fails_its_job(cluster, submitted):
  point, out = submitted.points[0], cluster / "out"
  process = job(cluster)
  until((out / "seed=8" / "working").exists)
  os.kill(sweep_file.read_status(point, out)["pid"], signal.SIGKILL)
  said, _ = process.communicate(timeout=60)
  assert process.returncode == 1 and "point 0 (seed=8) ended with exit code -9; see" in said
  assert not (cluster / "scontrol").exists()


def test_what_is_pickled_is_small_and_needs_no_launcher(cluster, submitted):
  """A node unpickles by the names of modules that it imports."""
  path, = (cluster / "out" / "slurm").glob("*submitted.pkl")
  function = pickle.loads(path.read_bytes()).function
  assert type(function) is sweep_slurm.SlurmPoint and path.stat().st_size < 2000
