"""The table of a sweep: rows of what is done, in any form that experiments write, and a line for all that is not."""
import csv
import json
import os
import subprocess
import sys

import pytest

from experiments.harness import collecting
from experiments.harness import sweep_file
import programs


def sweep_of(outdir, *flags, experiment="benchmark"):
  sweep = sweep_file.Sweep(experiment, tuple(sweep_file.Point(number, f"p{number}", experiment, given)
                                             for number, given in enumerate(flags)), True)
  sweep_file.claim(sweep, outdir)
  return sweep


def end(sweep, number, outdir, code=0, log=None, **files):
  """A point has ended with that exit code and left files (a value is written as JSON)."""
  point = sweep.points[number]
  (outdir / point.name).mkdir()
  for name, value in files.items():
    text = value if isinstance(value, str) else json.dumps(value)
    (outdir / point.name / name.replace("_", ".")).write_text(text)
  sweep_file.write_json(sweep_file.status_path(point, outdir), {"exit_code": code})
  if log is not None:
    sweep_file.log_path(point, outdir).write_text(log)


def group(method, **numbers):
  return {"method": method, "category": "all", "language": "all", "latency_ms": {"p50": 2.0},
          "accepted_per_position": [0.5, 0.25]} | numbers


def test_a_benchmark_gives_a_row_a_method(tmp_path):
  sweep = sweep_of(tmp_path, {"limit": 1, "top_p": 0.5}, {"limit": 1, "top_p": 0.9, "methods": ["a", "b"]})
  other = [group("plain", tokens_per_second=1.0) | part for part in ({"category": "code"}, {"language": "ko"})]
  end(sweep, 0, tmp_path, summary_json={"schema": 1, "groups": [
      *other, group("plain", tokens_per_second=50.25, speedup=None),
      group("ngram", tokens_per_second=75.0, speedup=1.5)]})
  end(sweep, 1, tmp_path, summary_json={"schema": 1, "groups": [group("plain", tokens_per_second=40)]})
  found = collecting.collect(tmp_path)
  assert found.varied == ["top_p", "methods"] and not found.absent
  assert [(r["number"], r["top_p"], r["methods"], r["method"], r["tokens_per_second"]) for r in found.rows] == [
      (0, 0.5, None, "plain", 50.25), (0, 0.5, None, "ngram", 75.0), (1, 0.9, ["a", "b"], "plain", 40)]
  assert found.rows[0]["latency_ms.p50"] == 2.0 and found.rows[0]["accepted_per_position"] == [0.5, 0.25]
  lines = collecting.render(found).splitlines()
  assert lines[0].split() == ["point", "top_p", "methods", "method", "tokens_per_second", "speedup"]
  assert [line.split() for line in lines[2:5]] == [
      ["0", "0.5", "-", "plain", "50.25", "-"], ["0", "0.5", "-", "ngram", "75", "1.5"],
      ["1", "0.9", "a+b", "plain", "40", "-"]]
  assert lines[-1] == "2 of 2 points of benchmark"


def test_files_hold_every_number(tmp_path):
  sweep = sweep_of(tmp_path, {"seed": 0}, {"seed": 1})
  end(sweep, 0, tmp_path, summary_json={"groups": [group("plain", speedup=1.25)]})
  collecting.write(collecting.collect(tmp_path), tmp_path)
  rows = list(csv.DictReader((tmp_path / "collected.csv").read_text().splitlines()))
  assert rows == [{"number": "0", "name": "p0", "seed": "0", "method": "plain", "category": "all", "language": "all",
                   "latency_ms.p50": "2.0", "accepted_per_position": "[0.5, 0.25]", "speedup": "1.25"}]
  found = json.loads((tmp_path / "collected.json").read_text())
  assert found["rows"][0]["speedup"] == 1.25 and found["points"] == 2
  assert [(p["number"], p["status"], p["last_line"]) for p in found["absent"]] == [(1, "missing", None)]


def test_a_load_test_gives_a_row_a_method_and_load(tmp_path):
  sweep = sweep_of(tmp_path, {"seed": 0}, experiment="serve_load")
  end(sweep, 0, tmp_path, summary_json={"schema": 1, "points": [
      {"method": "plain", "point": 2, "speedup": None, "metrics": {"output_throughput": 30.0}},
      {"method": "ngram", "point": 2, "speedup": {"median": 1.5}, "metrics": {"output_throughput": 45.0}}]})
  table = collecting.render(collecting.collect(tmp_path))
  assert [line.split() for line in table.splitlines()[2:4]] == [
      ["0", "plain", "2", "30", "-"], ["0", "ngram", "2", "45", "1.5"]]


@pytest.mark.parametrize("files, row", [
    ({"summary_json": {"loss": 0.5, "ok": True, "head": "eagle3", "list": [1]}},
     {"loss": 0.5, "ok": True, "head": "eagle3"}),
    ({"exactness_json": {"seconds": 12.5, "cells": [1, 2]}}, {"seconds": 12.5}),
    ({"metrics_jsonl": '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2.5}\n{"step'}, {"step": 2, "loss": 2.5}),
    ({"summary_json": {"number": 3}}, {"number_": 3})])
def test_other_experiments_give_their_top_numbers(tmp_path, files, row):
  sweep = sweep_of(tmp_path, {"seed": 0}, {"seed": 1}, experiment="exactness")
  end(sweep, 0, tmp_path, **files)
  found = collecting.collect(tmp_path)
  assert found.rows == [{"number": 0, "name": "p0", "seed": 0} | row]
  shown = collecting.render(found).splitlines()[0].split()
  assert shown[:2] == ["point", "seed"] and set(shown[2:]) == {n for n, v in row.items() if type(v) in (int, float)}


def test_what_is_not_there_is_told_with_the_end_of_its_log(tmp_path):
  sweep = sweep_of(tmp_path, *({"seed": seed} for seed in range(6)))
  end(sweep, 0, tmp_path, summary_json={"groups": [group("plain")]})
  end(sweep, 1, tmp_path, 2, "== attempt 1\nmeasuring: 1%\rmeasuring: 3%\nerror: no such thing\n\n")
  end(sweep, 2, tmp_path, -9, "compiling: 10%\rcompiling: 90%   \r")
  end(sweep, 3, tmp_path, 0, "fine\n")
  lost = {"exit_code": None, "host": os.uname().nodename, "pid": 2**22 + 1, "pid_start": "1"}
  sweep_file.write_json(sweep_file.status_path(sweep.points[4], tmp_path), lost)
  found = collecting.collect(tmp_path)
  assert [row["number"] for row in found.rows] == [0]
  assert collecting.render(found).splitlines()[-6:] == [
      "1 of 6 points of benchmark",
      "point 1 (p1) failed, exit code 2: error: no such thing",
      "point 2 (p2) failed, exit code -9: compiling: 90%",
      "point 3 (p3) done, but left no numbers: fine",
      "point 4 (p4) failed, its process died",
      "point 5 (p5) missing"]


def test_a_broken_summary_is_no_summary(tmp_path):
  sweep = sweep_of(tmp_path, {"seed": 0})
  end(sweep, 0, tmp_path, summary_json="{oops")
  assert collecting.collect(tmp_path).absent[0]["status"] == "done, but left no numbers"


def test_a_sweep_of_real_runs(tmp_path, tmp_path_factory):
  """Two seeds of a benchmark on the tiny target, launched, collected, and one of them removed."""
  env = programs.environment(tmp_path_factory) | {"JAX_PLATFORMS": "cpu"}
  (tmp_path / "s.json").write_text(json.dumps({
      "experiment": "benchmark", "points": {"zip": {"seed": [3, 4]}},
      "flags": {"target": programs.TINY, "methods": ["plain"], "categories": ["code"], "limit": 1,
                "max_new_tokens": 8, "costs": False, "temperature": 0.8}}))
  out = tmp_path / "out"
  launch = [sys.executable, "launch/local_sweep.py", f"--sweep={tmp_path / 's.json'}", f"--outdir={out}"]
  done = subprocess.run(launch, cwd=programs.ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stdout + done.stderr + (out / "seed=3.log").read_text()
  config = json.loads((out / "seed=4" / "config.json").read_text())
  assert config["seed"] == 4
  (out / "seed=3" / "summary.json").unlink()
  few, nothing, refused = programs.run_all(
      [("collect", [f"--outdir={out}"], ""), ("collect", [], ""), ("collect", [f"--outdir={tmp_path}"], "")], env=env)
  assert few.code == 1 and "1 of 2 points" in few.out and "point 0 (seed=3) done, but left no numbers" in few.out
  assert "plain" in few.out and (out / "collected.csv").exists()
  assert (nothing.code, refused.code) == (2, 2)
  assert "--outdir is needed" in nothing.message and "no readable sweep" in refused.message
