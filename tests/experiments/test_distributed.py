"""Experiments in several processes: the same flags everywhere, one voice, one run folder, one end."""
import json
import os

from absl import flags
from absl.testing import flagsaver
import jax
import pytest

import compiling
from experiments.harness import distributed
from experiments.harness import run_folder
import many_processes
import programs
from specjax.parallel import processes

# A main of its own, for the frame alone.
MAIN = """
import sys, time
from absl import flags
from absl.testing import flagsaver
import jax
from jax._src import xla_bridge
from experiments.harness import cli
from specjax.parallel import processes
WHAT = flags.DEFINE_string("what", None, "")
LIMIT = flags.DEFINE_integer("limit", 0, "")
def main():
  untouched = not xla_bridge.backends_are_initialized()
  print("out", processes.index(), processes.count(), jax.distributed.is_initialized(), untouched)
  print("err", processes.index(), file=sys.stderr)
  if processes.index() == processes.count() - 1:
    if WHAT.value == "value": raise ValueError("the lamp is broken")
    if WHAT.value == "bug": {}["lamp"]
    if WHAT.value == "interrupt": raise KeyboardInterrupt
  if WHAT.value in ("value", "bug", "interrupt"): time.sleep(200)
  if WHAT.value == "exit": sys.exit(3)
if __name__ == "__main__":
  cli.run(main, several=SEVERAL)
"""
OTHER_CODE = """
from experiments.harness import distributed
distributed._code = lambda code="0123" if "=0" in argv[-1] else "4567": code
"""
TWO_DEVICES = 'os.environ.update(JAX_NUM_CPU_DEVICES="2" if "=0" in argv[-1] else "1"); import jax; ' \
    'jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))'
CUT = """
if "=0" in argv[-1]:
  open(records, "r+").truncate(sum(map(len, open(records, "rb").readlines()[:1])))
from experiments.harness import measure
def split(plan, records, real=measure.split_done):
  found = real(plan, records)
  os.write(2, f"kept {len(found[0])} left {len(found[1])}\\n".encode())
  return found
measure.split_done = split
"""
MODEL = [f"--target={programs.TINY}", "--methods=plain", "--categories=chat,code", "--limit=1",
         "--max_new_tokens=8", "--nocosts"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  """By name of a case, how its processes ended; and by "folder", where they ran."""
  folder = tmp_path_factory.mktemp("runs")
  for name, several in (("both", True), ("alone", False)):
    (folder / f"{name}.py").write_text(MAIN.replace("SEVERAL", str(several)))
  (folder / "thesis").mkdir()
  (folder / "thesis" / "thesis.tex").write_text("years of work")
  cases = {}

  def case(name, program, *shared, count=2, own=lambda process: [], setup="", joined=True, which=None):
    port = many_processes.free_port()
    cases[name] = [[program, *shared, *own(process), *(many_processes.flags(process, count, port) if joined else [])]
                   for process in which or range(count)], setup

  both, benchmark = folder / "both.py", "experiments.benchmark"
  case("alone", both, joined=False, count=1)
  case("one of one", both, count=1)
  case("fine", both, "--what=nothing")
  for what in ("value", "bug", "interrupt", "exit"):
    case(what, both, f"--what={what}")
  case("flags differ", benchmark, *MODEL, count=4, own=lambda process: [f"--seed={process // 3}", f"--top_k={process}"])
  case("code differs", both, setup=OTHER_CODE)
  case("devices differ", both, setup=TWO_DEVICES)
  case("not in several", folder / "alone.py", count=2, which=[1])
  case("no coordinator", both, "--coordinator_timeout=1", which=[1])
  for name, given in WRONG.items():
    case(name, both, *given[0], joined=False, count=1)
  case("used folder", benchmark, *MODEL, f"--outdir={folder}/thesis")
  # One process writes where the other, on another host, would.
  own = lambda process: [f"--outdir={folder}/run"]
  case("benchmark", benchmark, *MODEL, own=own)
  case("resumed", benchmark, *MODEL, "--resume", own=own, setup=f'records = "{folder}/run/requests.jsonl"\n' + CUT)
  env = many_processes.environment() | compiling.environment(dict(os.environ)) | {
      "SPECJAX_CACHE": str(tmp_path_factory.getbasetemp() / "specjax_cache")}
  found = many_processes.run_all(cases.values(), folder=folder, imports=(
      "experiments.harness.job", "experiments.workloads"), env=env)
  return dict(zip(cases, found, strict=True)) | {"folder": folder}


def lines(text):
  """What is printed, progress bars apart."""
  return [line for line in text.replace("\r", "\n").splitlines() if line.strip()]


def test_a_process_alone_touches_nothing(ended):
  end, = ended["alone"]
  assert end.code == 0, end.err
  assert lines(end.out) == ["out 0 1 False True"]


def test_one_process_may_be_all(ended):
  end, = ended["one of one"]
  assert end.code == 0, end.err
  assert lines(end.out) == ["out 0 1 True False"]


def test_only_the_first_speaks(ended):
  first, second = ended["fine"]
  assert (first.code, second.code) == (0, 0), second.err
  assert lines(first.out) == ["out 0 2 True False"] and lines(first.err) == ["err 0"]
  assert not second.out and not second.err


@pytest.mark.parametrize("what, code, parts", [
    ("value", 2, ["the lamp is broken"]),
    ("bug", 1, ["KeyError: 'lamp'", "Traceback", "in main"]),
    ("interrupt", 130, ["interrupted"]),
])
def test_an_error_in_one_process_is_told_by_all(ended, what, code, parts):
  first, second = ended[what]
  assert (first.code, second.code) == (code, code)
  for part in parts:
    assert part in first.err and part in second.err
  assert "error: process 1 of 2: " in second.err
  assert "error: process 0 of 2: process 1 failed: " in first.err


def test_a_code_of_all_is_kept(ended):
  assert [end.code for end in ended["exit"]] == [3, 3]
  assert not any("error" in end.err for end in ended["exit"])


def test_flags_that_differ_are_named_by_all(ended):
  for process, end in enumerate(ended["flags differ"]):
    assert end.code == 2
    assert not end.out and "Traceback" not in end.err
    assert (f"error: process {process} of 4: processes differ, and must not: --seed is 0 in processes 0, 1, 2, 1 in "
            "process 3; --top_k is 0 in process 0, 1 in process 1, 2 in process 2, 3 in process 3") in end.err
    assert "--process_id" not in end.err


@pytest.mark.parametrize("name, part", [
    ("code differs", 'the source code is "0123" in process 0, "4567" in process 1'),
    ("devices differ", "devices of a process is 2 in process 0, 1 in process 1"),
])
def test_other_things_that_differ(ended, name, part):
  for process, end in enumerate(ended[name]):
    assert end.code == 2
    assert f"error: process {process} of 2: processes differ, and must not: {part}" in end.err


def test_an_experiment_for_one_process_refuses_several(ended):
  end, = ended["not in several"]
  assert end.code == 2
  assert "runs in one process" in end.err and "--distributed=off" in end.err
  assert not end.out


def test_a_coordinator_that_does_not_answer(ended):
  end, = ended["no coordinator"]
  assert end.code == 2
  assert "--coordinator=127.0.0.1:" in end.err and "did not answer within 1 s" in end.err
  assert "Traceback" not in end.err and "error: " in end.err


# Flags of a process alone that are refused, and what the message must name.
WRONG = {
    "no count": (["--coordinator=127.0.0.1:9"], ["--coordinator=127.0.0.1:9", "--num_processes and --process_id"]),
    "no coordinator's name": (["--num_processes=2", "--process_id=0"], ["--coordinator must be given"]),
    "number beyond the count": (["--coordinator=127.0.0.1:9", "--num_processes=2", "--process_id=2"],
                                ["--process_id=2", "--num_processes=2", "0 to 1"]),
    "on without a cluster": (["--distributed=on"], ["--coordinator", "cluster"]),
    "off with a coordinator": (["--distributed=off", "--coordinator=127.0.0.1:9"],
                               ["--distributed=off", "--coordinator"]),
    "timeout of nothing": (["--coordinator_timeout=5"], ["--coordinator_timeout=5", "alone"]),
    "heartbeat of nothing": (["--heartbeat_timeout=5"], ["--heartbeat_timeout=5", "alone"]),
    "unknown mode": (["--distributed=maybe"], ["--distributed=maybe"]),
    "heartbeat too fast": (["--heartbeat_timeout=1"], ["--heartbeat_timeout=1"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_are_wrong(ended, name):
  end, = ended[name]
  assert end.code == 2 and not end.out
  message, = lines(end.err)
  assert message.startswith("error: ")
  for part in WRONG[name][1]:
    assert part in message


def test_what_the_first_process_refuses_ends_all(ended):
  for end in ended["used folder"]:
    assert end.code == 2
    assert "thesis is not empty" in end.err and "--overwrite" in end.err
  assert [path.name for path in (ended["folder"] / "thesis").iterdir()] == ["thesis.tex"]


def test_only_the_first_process_writes_a_run(ended):
  first, second = ended["benchmark"]
  assert (first.code, second.code) == (0, 0), first.err + second.err
  assert "report: " in first.out and not second.out and not second.err
  run = ended["folder"] / "run"
  assert {path.name for path in run.iterdir()} == {"config.json", "environment.json", "requests.jsonl", "summary.json",
                                                   "report.html", "plots"}
  config = json.loads((run / "config.json").read_text())
  assert config["limit"] == 1 and not set(distributed.NAMES) & set(config)


def test_a_run_is_resumed_by_all(ended):
  """The second process, which has read nothing, leaves out what the first one has on its disk."""
  first, second = ended["resumed"]
  assert (first.code, second.code) == (0, 0), first.err + second.err
  assert "kept 1 left 1" in first.err and "kept 1 left 1" in second.err
  records = [json.loads(line) for line in (ended["folder"] / "run" / "requests.jsonl").read_text().splitlines()]
  assert len(records) == len({(r["id"], r["method"]) for r in records}) == 2


def test_a_folder_of_another_process_holds_records_and_writes_nothing(tmp_path, monkeypatch):
  (tmp_path / "config.json").write_text("not a run")
  monkeypatch.setattr(processes, "is_first", lambda: False)
  told = []
  monkeypatch.setattr(processes, "from_first", lambda value: told.append(value) or [{"id": "a"}])
  folder = run_folder.RunFolder(str(tmp_path), overwrite=False, resume=False, config={})
  folder.open()
  assert told == [[]] and folder.records() == [{"id": "a"}]
  folder.append([{"id": "b"}])
  assert folder.records() == [{"id": "a"}, {"id": "b"}]
  folder.rewrite([{"id": "b"}])
  folder.write_json("summary.json", {})
  assert folder.records() == [{"id": "b"}]
  assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("mode, cluster, address, wanted", [
    ("auto", True, None, True), ("off", True, None, False), ("auto", False, None, False), ("on", False, None, True),
    ("auto", False, "host:1", True), ("off", False, "host:1", False)])
def test_a_cluster_starts_several_unless_it_is_told_not_to(monkeypatch, mode, cluster, address, wanted):
  flags.FLAGS.mark_as_parsed()
  monkeypatch.setattr(processes, "detected", lambda: object if cluster else None)
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  if address:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
  with flagsaver.flagsaver(distributed=mode):
    assert distributed.wanted() is wanted
  assert not jax.distributed.is_initialized()
