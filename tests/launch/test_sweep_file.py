"""Sweeps: what a file expands to, what points are called, and what is refused before anything is touched."""
import json
import os
import subprocess
import sys
import time

import pytest

from experiments.harness import sweep_file
from experiments.harness import sweep_flags
from experiments.harness import sweep_overlays


@pytest.fixture
def unchecked(monkeypatch):
  """The experiment is not asked for its flags: a process and two seconds less for tests of other things."""
  monkeypatch.setattr(sweep_flags, "check", lambda experiment, overlays: True)


def write(tmp_path, sweep):
  path = tmp_path / "sweep.json"
  path.write_text(sweep if isinstance(sweep, str) else json.dumps(sweep), encoding="utf-8")
  return str(path)


def read(tmp_path, points, flags=None):
  return sweep_file.read(write(tmp_path, {"experiment": "benchmark", "flags": flags or {}, "points": points}))


def flags_of(part):
  return [overlay.flags for overlay in sweep_overlays.expand(part, "points")]


A, B, C = {"a": 1}, {"a": 2}, {"a": 3}


@pytest.mark.parametrize("part, expected", [
    (A, [A]),
    ({}, [{}]),
    ({"list": [A, {}, B]}, [A, {}, B]),
    ({"list": []}, []),
    ({"chain": [{"list": [A, B]}, C]}, [A, B, C]),
    ({"product": {"a": [1, 2], "b": ["x", "y"]}},
     [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]),
    ({"product": [{"list": [A, {}]}, {"b": True}]}, [{"a": 1, "b": True}, {"b": True}]),
    ({"product": [{"list": []}, A]}, []),
    ({"product": []}, []),
    ({"zip": {"a": [1, 2], "b": [[1, 2], [3]]}}, [{"a": 1, "b": [1, 2]}, {"a": 2, "b": [3]}]),
    ({"zip": [{"list": [A, B]}, {"product": {"b": [0.5, 1.5]}}]}, [{"a": 1, "b": 0.5}, {"a": 2, "b": 1.5}]),
    ({"zip": {"a": [1, 2, 3]}}, [A, B, C]),
    ({"chain": [{"product": [{"zip": {"a": [1, 2]}}, {"chain": [{"b": 1}, {"b": 2}]}]}, {"list": [C]}]},
     [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 2}, C])])
def test_the_four_words(part, expected):
  assert flags_of(part) == expected


@pytest.mark.parametrize("part, message", [
    ([A], r"points: \[.* is no object"),
    ({"list": A}, "points.list: .* is no list"),
    ({"list": [{"product": {"a": [1]}}]}, r"points.list\[0\]: a list holds overlays of flags only"),
    ({"product": 3}, "points.product: 3 is no list, nor an object"),
    ({"product": {"a": 1}}, "points.product: a must have a list of values, not 1"),
    ({"zip": {"a": [1, 2], "b": [1]}}, "points.zip: lengths differ: a has 2, b has 1"),
    ({"zip": [{"list": [A, B]}, {"b": 1}]}, "points.zip: lengths differ: part 0 has 2, part 1 has 1"),
    ({"product": [A, {"chain": [B]}]}, "points.product: two parts set a"),
    ({"zip": {"a": [1]}, "b": 2}, "points: 'zip' must stand alone in its object, and b stands beside it"),
    ({"a": None}, "points: a is null"),
    ({"a": {"b": 1}}, "points: a is {"),
    ({"a": ["x,y"]}, "no item of a list can hold a comma"),
    ({"a": 1, "name": "../up"}, "name '../up' must be"),
    ({"a": 1, "name": ""}, "name '' must be"),
    ({"a": 1, "name": ".hidden"}, "name '.hidden' must be"),
    ({"a": 1, "name": 3}, "name 3 must be")])
def test_parts_that_are_none(part, message):
  with pytest.raises(ValueError, match=message):
    flags_of(part)


@pytest.mark.parametrize("overlay, name", [
    ({"top_p": 0.95, "draft_tokens": 3}, "draft_tokens=3,top_p=0.95"),
    ({"draft_tokens": 3, "top_p": 0.95}, "draft_tokens=3,top_p=0.95"),
    ({"raw": True, "methods": ["plain", "ngram"]}, "methods=plain+ngram,raw=true"),
    ({"target": "my models/a b.gguf"}, "target=my-models-a-b.gguf"),
    ({"target": "日本"}, "target=-"),
    ({"temperature": 1e-05}, "temperature=1e-05"),
    ({"temperature": 0, "name": "greedy"}, "greedy"),
    ({}, "default")])
def test_a_point_is_named_by_its_overlay(overlay, name):
  assert sweep_overlays.expand(overlay, "points")[0].name == name


def test_a_given_name_stands_for_its_own_flags_only():
  part = {"product": [{"list": [{"temperature": 0, "name": "greedy"}, {"temperature": 0.8, "top_p": 0.9}]},
                      {"zip": {"draft_tokens": [3, 7]}}]}
  assert [overlay.name for overlay in sweep_overlays.expand(part, "points")] == [
      "greedy,draft_tokens=3", "greedy,draft_tokens=7", "draft_tokens=3,temperature=0.8,top_p=0.9",
      "draft_tokens=7,temperature=0.8,top_p=0.9"]


def test_long_names_are_cut_and_stay_apart():
  names = [sweep_overlays.expand({"workload": "x" * 300 + end}, "points")[0].name for end in "ab"]
  assert len(set(names)) == 2 and all(len(name) == 100 for name in names)


def test_a_sweep_is_read(tmp_path, unchecked):
  sweep = read(tmp_path, {"list": [{}, {"limit": 2}, {"raw": True}]}, {"limit": 1, "methods": ["plain", "ngram"]})
  assert [(p.number, p.name, p.experiment) for p in sweep.points] == [
      (0, "default", "benchmark"), (1, "limit=2", "benchmark"), (2, "raw=true", "benchmark")]
  assert sweep.points[1].flags == {"limit": 2, "methods": ["plain", "ngram"]}  # an overlay lies over what is shared
  assert sweep.varied() == ["limit", "raw"]
  assert sweep.command(sweep.points[2], "runs/x") == [
      "python", "-m", "experiments.benchmark", "--limit=1", "--methods=plain,ngram", "--raw=true",
      "--outdir=runs/x/raw=true"]
  assert sweep.command(sweep.points[0], "runs/x", python="py", resume=True)[::5] == ["py", "--outdir=runs/x/default"]
  assert sweep.command(sweep.points[0], "runs/x", resume=True)[-1] == "--resume"
  with pytest.raises(ValueError, match="point 3: this sweep has points 0 to 2"):
    sweep.point(3)


def test_names_do_not_depend_on_other_points(tmp_path, unchecked):
  few, many = (read(tmp_path, {"product": {"seed": seeds, "top_p": tops}})
               for seeds, tops in (([1], [0.5]), ([3, 1, 2], [0.9, 0.5])))
  same, = (p for p in many.points if p.flags == few.points[0].flags)
  assert same.name == few.points[0].name and same.number != few.points[0].number


@pytest.mark.parametrize("sweep, message", [
    ("{oops", "sweep.json: "),
    ("[]", 'a sweep is {"experiment"'),
    ({"experiment": "benchmark"}, 'a sweep is {"experiment"'),
    ({"experiment": 3, "points": {}}, 'a sweep is {"experiment"'),
    ({"experiment": "benchmark", "points": {}, "flag": {}}, 'a sweep is {"experiment"'),
    ({"experiment": "benchmark", "flags": {"name": "x"}, "points": {}}, "flags: only an overlay"),
    ({"experiment": "benchmark", "points": {"list": []}}, "the sweep is empty"),
    ({"experiment": "benchmark", "points": {"list": [{"limit": 1}, {"limit": 1}]}},
     "points 0 and 1 are both named 'limit=1'"),
    ({"experiment": "benchmark", "points": {"list": [{"workload": "a/b"}, {"workload": "a b"}]}},
     "both named 'workload=a-b'.*\"name\""),
    ({"experiment": "benchmark", "points": {"list": [{"name": "A"}, {"name": "a"}]}}, "both named 'a'"),
    ({"experiment": "benchmark", "points": {"name": "sweep.json"}}, "would be named 'sweep.json'"),
    ({"experiment": "benchmark", "points": {"name": "slurm"}}, "would be named 'slurm'"),
    ('{"experiment": "benchmark", "points": {"limit": 1, "limit": 2}}', "'limit' stands twice"),
    ('{"experiment": "benchmark", "points": {"top_p": NaN}}', "NaN is no value")])
def test_files_that_are_no_sweep(tmp_path, unchecked, sweep, message):
  with pytest.raises(ValueError, match=message) as error:
    sweep_file.read(write(tmp_path, sweep))
  assert "sweep.json: " in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
  with pytest.raises(ValueError, match="none.json: cannot be read"):
    sweep_file.read(str(tmp_path / "none.json"))


@pytest.mark.parametrize("experiment, overlay, message", [
    ("nope", {}, "experiment 'nope' is not known.*benchmark.*speed"),
    ("chat", {}, "experiment 'chat' is not known"),  # takes no --outdir
    ("harness.job", {}, "experiment 'harness.job' is not known"),
    ("../benchmark", {}, "is not known"),
    ("speed", {"repeat": "3"}, "experiments.speed: --repeat is no flag of it; did you mean --repeats"),
    ("speed", {"repeats": "0"}, "experiments.speed: flag --repeats=0: "),
    ("speed", {"only": "all"}, "experiments.speed: flag --only=all: .*verify"),
    ("speed", {"outdir": "x"}, "--outdir is said by the launcher"),
    ("speed", {"help": "true"}, "--help is no flag of it")])
def test_flags_are_the_experiment_s(experiment, overlay, message):
  with pytest.raises(ValueError, match=message):
    sweep_flags.check(experiment, [{}, overlay])


def test_the_example_is_a_sweep():
  sweep = sweep_file.read(str(sweep_flags.ROOT / "launch/sweeps/draft_tokens.json"))
  assert len(sweep.points) == 6 and sweep.resumes
  assert {p.name for p in sweep.points} >= {"draft_tokens=3,temperature=0", "sampled,draft_tokens=15"}


def sweep_of(*overlays, experiment="benchmark"):
  return sweep_file.Sweep(experiment, tuple(
      sweep_file.Point(number, f"p{number}", experiment, flags) for number, flags in enumerate(overlays)), True)


def test_a_results_folder_holds_its_sweep(tmp_path):
  sweep = sweep_of({"limit": 1}, {"methods": ["plain"]})
  sweep_file.claim(sweep, tmp_path / "a" / "b")
  assert sweep_file.load(tmp_path / "a" / "b") == sweep
  sweep_file.claim(sweep, tmp_path / "a" / "b")
  assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["sweep.json"]


def test_a_folder_that_another_process_is_claiming_is_taken(tmp_path):
  (tmp_path / ".sweep.json.elsewhere.7.part").write_text("{")
  sweep_file.claim(sweep_of({}), tmp_path)
  assert sweep_file.load(tmp_path) == sweep_of({})


@pytest.mark.parametrize("other, message", [
    (sweep_of({"limit": 1}, {"limit": 2}, experiment="speed"), "experiment 'benchmark', and not 'speed'"),
    (sweep_of({"limit": 1}, {"limit": 3}), "what differs: p1"),
    (sweep_of({"limit": 1}), "what differs: p1"),
    (sweep_of({"limit": 1}, {"limit": 2}, {}), "what differs: p2")])
def test_another_sweep_is_refused(tmp_path, other, message):
  sweep_file.claim(sweep_of({"limit": 1}, {"limit": 2}), tmp_path)
  before = (tmp_path / "sweep.json").read_bytes()
  with pytest.raises(ValueError, match=f"holds another sweep.*{message}"):
    sweep_file.claim(other, tmp_path)
  assert (tmp_path / "sweep.json").read_bytes() == before


def test_folders_of_something_else_are_refused(tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  with pytest.raises(ValueError, match="is not empty and holds no sweep.json"):
    sweep_file.claim(sweep_of({}), tmp_path)
  with pytest.raises(ValueError, match="thesis.tex is a file"):
    sweep_file.claim(sweep_of({}), tmp_path / "thesis.tex" / "x")
  with pytest.raises(ValueError, match="no readable sweep"):
    sweep_file.load(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def record(tmp_path, **fields):
  point = sweep_of({}).points[0]
  sweep_file.status_path(point, tmp_path).write_text(json.dumps(fields))
  return point


def test_the_status_of_a_point(tmp_path):
  point = sweep_of({}).points[0]
  state = lambda: sweep_file.status(point, tmp_path)
  assert state() == "missing"
  record(tmp_path, exit_code=0)
  assert state() == "missing"  # somebody removed its folder
  (tmp_path / "p0").mkdir()
  assert state() == "done"
  record(tmp_path, exit_code=2)
  assert state() == "failed"
  sweep_file.status_path(point, tmp_path).write_text("{")
  assert state() == "failed"


def test_a_process_of_this_machine_runs_while_it_lives(tmp_path):
  host = os.uname().nodename
  with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
    start = sweep_file.process_start(process.pid)
    point = record(tmp_path, exit_code=None, host=host, pid=process.pid, pid_start=start)
    assert start and sweep_file.status(point, tmp_path) == "running"
    record(tmp_path, exit_code=None, host=host, pid=process.pid, pid_start=f"{start}0")  # its id was used again
    assert sweep_file.status(point, tmp_path) == "failed"
    record(tmp_path, exit_code=None, host=host, pid=process.pid, pid_start=start)
    process.kill()
  assert sweep_file.process_start(process.pid) is None
  assert sweep_file.status(point, tmp_path) == "failed"


def test_a_process_of_another_machine_runs_while_it_is_heard_of(tmp_path):
  point = record(tmp_path, exit_code=None, host="elsewhere", pid=1, pid_start="1")
  assert sweep_file.status(point, tmp_path) == "running"
  long_ago = time.time() - sweep_file.SILENT_SECONDS - 1
  os.utime(sweep_file.status_path(point, tmp_path), (long_ago, long_ago))
  assert sweep_file.status(point, tmp_path) == "failed"
