"""Sweeps on one machine: what runs and what does not, what an interrupt and a kill leave, and how it goes on."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.harness import sweep_file
from experiments.harness import sweep_flags
from experiments.harness import sweep_point
import fake_experiment

ROOT = sweep_flags.ROOT


def sweep_of(*seeds, resumes=True):
  return sweep_file.Sweep("benchmark", tuple(sweep_file.Point(n, f"seed={seed}", "benchmark", {"seed": seed})
                                             for n, seed in enumerate(seeds)), resumes)


@pytest.fixture
def results(tmp_path):
  """`results(*seeds)` claims a folder for a sweep; (sweep, folder, the stand-in for Python)."""
  def make(*seeds, **kwargs):
    sweep = sweep_of(*seeds, **kwargs)
    sweep_file.claim(sweep, tmp_path / "out")
    return sweep, tmp_path / "out", fake_experiment.make(tmp_path)
  return make


def until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it never came to that"
    time.sleep(0.01)


def files(folder):
  return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def states(sweep, folder):
  return [sweep_file.status(point, folder) for point in sweep.points]


def attempt(sweep, number, folder, python, **kwargs):
  return sweep_point.Attempt(sweep, sweep.points[number], folder, python=python, **kwargs)


def test_an_attempt_is_recorded(results):
  sweep, folder, python = results(0, 7)
  assert attempt(sweep, 0, folder, python, environment={"CUDA_VISIBLE_DEVICES": "5"}).wait() == 0
  assert attempt(sweep, 1, folder, python).wait() == 3
  assert states(sweep, folder) == ["done", "failed"]
  assert (folder / "seed=0.log").read_text().endswith("seed 0, resume False, device 5\n")
  record = sweep_file.read_status(sweep.points[1], folder)
  assert (record["attempt"], record["resumed"], record["exit_code"]) == (1, False, 3)
  assert record["started"] <= record["ended"] and record["command"][-1] == f"--outdir={folder}/seed=7"
  assert not list(folder.glob(".*"))


def test_what_failed_resumes_and_what_is_done_does_not_run(results):
  sweep, folder, python = results(7)
  assert attempt(sweep, 0, folder, python).wait() == 3
  assert attempt(sweep, 0, folder, python).wait() == 0
  record = sweep_file.read_status(sweep.points[0], folder)
  assert (record["attempt"], record["resumed"]) == (2, True)
  assert (folder / "seed=7.log").read_text().count("== attempt") == 2  # the first one's words stay
  before = files(folder)
  with pytest.raises(ValueError, match=r"point 0 \(seed=7\) is done; to run it again, remove"):
    attempt(sweep, 0, folder, python)
  assert files(folder) == before


def test_an_experiment_without_the_flag_is_never_told_to_resume(results):
  sweep, folder, python = results(7, resumes=False)
  attempt(sweep, 0, folder, python).wait()
  attempt(sweep, 0, folder, python).wait()
  assert not sweep_file.read_status(sweep.points[0], folder)["resumed"]


def test_a_point_runs_once_at_a_time(results):
  sweep, folder, python = results(8)
  first = attempt(sweep, 0, folder, python)
  with pytest.raises(ValueError, match="runs on .* since .*process"):
    attempt(sweep, 0, folder, python)
  assert first.poll() is None and states(sweep, folder) == ["running"]
  until((folder / "seed=8" / "working").exists)
  assert first.stop() == 130
  assert states(sweep, folder) == ["failed"]
  assert "interrupted" in (folder / "seed=8.log").read_text()
  assert attempt(sweep, 0, folder, python).wait() == 0


def test_a_killed_process_is_a_failed_point(results):
  sweep, folder, python = results(8)
  first = attempt(sweep, 0, folder, python)
  until((folder / "seed=8" / "working").exists)
  os.kill(sweep_file.read_status(sweep.points[0], folder)["pid"], signal.SIGKILL)
  assert first.wait() == -9
  assert states(sweep, folder) == ["failed"]


def test_who_hears_no_interrupt_is_killed(results, monkeypatch):
  monkeypatch.setattr(sweep_point, "GRACE_SECONDS", 0.2)
  sweep, folder, python = results(9)
  first = attempt(sweep, 0, folder, python)
  until((folder / "seed=9" / "working").exists)
  assert first.stop() == -9


def test_a_shielded_process_hears_no_scheduler(results):
  sweep, folder, python = results(8)
  first = attempt(sweep, 0, folder, python, shielded=True)
  until((folder / "seed=8" / "working").exists)
  pid = sweep_file.read_status(sweep.points[0], folder)["pid"]
  for number in (signal.SIGTERM, signal.SIGUSR2):
    os.kill(pid, number)
  time.sleep(0.2)
  assert first.poll() is None
  assert first.stop() == 130  # that is, of the interrupt


def test_it_says_now_and_then_that_it_lives(results, monkeypatch):
  monkeypatch.setattr(sweep_point, "_HEARTBEAT_SECONDS", 0)
  sweep, folder, python = results(8)
  first = attempt(sweep, 0, folder, python)
  path = sweep_file.status_path(sweep.points[0], folder)
  os.utime(path, (0, 0))
  first.poll()
  assert path.stat().st_mtime > 0
  first.stop()


def test_processes_of_one_job_start_alike(results, monkeypatch):
  """The first decides whether to resume; the others follow it, whatever they see when they look."""
  sweep, folder, python = results(7)
  monkeypatch.setenv("SLURM_JOB_ID", "12")
  assert attempt(sweep, 0, folder, python).wait() == 3
  monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
  monkeypatch.setenv("SLURM_PROCID", "1")
  monkeypatch.setattr(sweep_point, "_LEADER_SECONDS", 0.3)
  with pytest.raises(ValueError, match="process 1 waited 0.3 s for the first process"):
    attempt(sweep, 0, folder, python)  # the status is of the job's earlier start
  monkeypatch.setenv("SLURM_PROCID", "0")
  assert attempt(sweep, 0, folder, python).wait() == 0
  before = sweep_file.read_status(sweep.points[0], folder)
  monkeypatch.setenv("SLURM_PROCID", "1")
  assert attempt(sweep, 0, folder, python).wait() == 0
  assert "resume True" in (folder / "seed=7.process-1.log").read_text()
  assert sweep_file.read_status(sweep.points[0], folder) == before


def test_a_job_that_starts_again_takes_its_own_point(results, monkeypatch):
  """It died with its node, which is silent for less than it takes to be given up."""
  sweep, folder, python = results(0)
  monkeypatch.setenv("SLURM_JOB_ID", "12")
  path = sweep_file.status_path(sweep.points[0], folder)
  lost = {"exit_code": None, "host": "elsewhere", "pid": 1, "pid_start": "1", "started": "then"}
  path.write_text(json.dumps(lost | {"job": ["13", "0.0"]}))
  with pytest.raises(ValueError, match="runs on elsewhere since then"):
    attempt(sweep, 0, folder, python)
  path.write_text(json.dumps(lost | {"job": ["12", "0.0"]}))
  assert attempt(sweep, 0, folder, python).wait() == 0


def launcher(name, *args, **env):
  # As a script starts it behind an "&": interrupts must be heeded all the same.
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    return subprocess.Popen([sys.executable, f"launch/{name}.py", *map(str, args)], cwd=ROOT, text=True,
                            env=os.environ | {"PYTHONPATH": ""} | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  finally:
    signal.signal(signal.SIGINT, before)


def ended(name, *args, **env):
  process = launcher(name, *args, **env)
  out, err = process.communicate(timeout=120)
  return process.returncode, out, err


def test_run_point(results):
  sweep, folder, python = results(0, 7, 8)
  run = lambda *args, **env: ended("run_point", f"--outdir={folder}", f"--python={python}", *args, **env)
  code, out, _ = run("--point=0")
  assert code == 0 and "point 0 (seed=0): done" in out
  assert "is done already" in run(SLURM_ARRAY_TASK_ID="0")[1]
  code, out, _ = run(SLURM_ARRAY_TASK_ID="1")
  assert code == 3 and "failed with exit code 3" in out
  assert states(sweep, folder) == ["done", "failed", "missing"]
  for args in (["--point=3"], []):
    code, _, err = run(*args)
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1


def test_run_point_is_interrupted_by_what_ends_a_job(results):
  sweep, folder, python = results(8)
  process = launcher("run_point", f"--outdir={folder}", f"--python={python}", "--point=0")
  until((folder / "seed=8" / "working").exists)
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=60)
  assert process.returncode == 130
  assert sweep_file.read_status(sweep.points[0], folder)["exit_code"] == 130


def given(tmp_path, *seeds):
  path = tmp_path / "s.json"
  path.write_text(json.dumps({"experiment": "benchmark", "points": {"zip": {"seed": seeds}}}))
  return [f"--sweep={path}", f"--outdir={tmp_path / 'out'}", f"--python={fake_experiment.make(tmp_path)}"]


def test_a_dry_run_prints_and_touches_nothing(tmp_path):
  code, out, err = ended("local_sweep", *given(tmp_path, 0, 1), "--dry_run")
  python = tmp_path / "fake_python"
  assert (code, err) == (0, "")
  assert out.splitlines() == [f"{python} -m experiments.benchmark --seed={seed} --outdir={tmp_path}/out/seed={seed}"
                              for seed in (0, 1)]
  assert not (tmp_path / "out").exists()


def test_a_sweep_runs_and_the_same_line_completes_it(tmp_path):
  args = given(tmp_path, 0, 7, 1)
  code, out, _ = ended("local_sweep", *args, "--processes=2", "--cuda_devices=3,4")
  assert code == 1 and "seed=7: FAILED with exit code 3" in out and "2 of 3 points are done, 2 of them now" in out
  folder = tmp_path / "out"
  logs = {seed: (folder / f"seed={seed}.log").read_text() for seed in (0, 7, 1)}
  assert "device 3" in logs[0] and "device 4" in logs[7] and ("device 3" in logs[1] or "device 4" in logs[1])
  done = {name: text for name, text in files(folder).items() if "seed=7" not in name}
  code, out, _ = ended("local_sweep", *args)
  assert code == 0 and out.startswith("[1/1] seed=7: done") and "3 of 3 points are done, 1 of them now" in out
  assert {name: text for name, text in files(folder).items() if "seed=7" not in name} == done
  code, out, _ = ended("local_sweep", *args)
  assert code == 0 and "3 of 3 points are done, 0 of them now" in out
  code, _, err = ended("local_sweep", *given(tmp_path, 0, 7))
  assert code == 2 and "holds another sweep" in err


def test_two_launchers_share_a_sweep(tmp_path):
  """On two machines, say: each takes what the other has not begun."""
  args = given(tmp_path, 8, 0, 1)
  first = launcher("local_sweep", *args)
  until((tmp_path / "out" / "seed=8" / "working").exists)
  code, out, _ = ended("local_sweep", *args)
  assert code == 1 and "2 of 3 points are done, 2 of them now" in out and "seed=8" not in out
  first.send_signal(signal.SIGTERM)
  first.communicate(timeout=60)
  code, out, _ = ended("local_sweep", *args)
  assert code == 0 and "[1/1] seed=8: done" in out


def test_an_interrupt_keeps_what_is_done(tmp_path):
  args = given(tmp_path, 0, 8, 1)
  process = launcher("local_sweep", *args)
  until((tmp_path / "out" / "seed=8" / "working").exists)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 130 and "the same line goes on" in err
  sweep = sweep_file.load(tmp_path / "out")
  assert states(sweep, tmp_path / "out") == ["done", "failed", "missing"]
  assert ended("local_sweep", *args)[0] == 0
  assert states(sweep, tmp_path / "out") == ["done", "done", "done"]


@pytest.mark.parametrize("args, message", [
    (["--outdir=x"], "--sweep and --outdir"),
    (["--sweep=x"], "--sweep and --outdir"),
    (["--sweep=x", "--outdir=y", "--processes=2", "--cuda_devices=0"], "--cuda_devices=0 names 1 devices"),
    (["--sweep=none.json", "--outdir=y"], "--sweep=none.json: cannot be read"),
    (["--sweeps=x"], "'sweeps'"),
    (["sweep.json"], "unexpected argument 'sweep.json'")])
def test_bad_input_is_one_line(args, message):
  code, out, err = ended("local_sweep", *args)
  assert code == 2 and out == "" and err.startswith("error: ") and message in err
  assert "Traceback" not in err


def test_the_examples_of_the_page_are_lines_that_run():
  """Each line of the page's sections on one machine and on Slurm, as a dry run."""
  page = (ROOT / "launch" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
  lines = [line.split() for line in page.splitlines() if line.startswith("python launch/") and "_sweep.py" in line]
  assert {pathlib.Path(line[1]).stem for line in lines} >= {"local_sweep", "slurm_sweep"}
  for _, program, *args in lines:
    code, out, err = ended(pathlib.Path(program).stem, *args, "--dry_run")
    assert code == 0 and out.count("-m experiments.benchmark") == 6, err
