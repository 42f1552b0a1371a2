"""Experiments over several devices and processes: what they write is what one device writes."""
import json
import subprocess

import pytest

import many_devices
import many_processes
import programs

BENCHMARK = (f"--target={programs.TINY}", "--methods=plain,ngram,draft_model",
             "--draft=tests/fixtures/tiny_llama_untied", "--categories=math", "--limit=2", "--batch_size=2",
             "--max_new_tokens=12", "--nocosts")


@pytest.fixture(scope="module")
def env(tmp_path_factory):
  return programs.environment(tmp_path_factory)


def on(devices, env):
  """Programs there start with so many devices."""
  return many_devices.environment(devices) | env | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}


def texts(folder):
  """Token ids by request and method."""
  rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
  return {(row["id"], row["method"]): row["token_ids"] for row in rows}


@pytest.fixture(scope="module")
def alone(env, tmp_path_factory):
  folder = tmp_path_factory.mktemp("one") / "run"
  done = programs.run("benchmark", *BENCHMARK, f"--outdir={folder}", env=env)
  assert not done.code, done.err
  return texts(folder)


@pytest.mark.parametrize("flags", [["--mesh=data:2,model:4"], ["--mesh=model:8", "--draft_sharding=divided"]],
                         ids=["both", "model"])
def test_a_benchmark_on_a_mesh_writes_the_texts_of_one_device(flags, alone, env, tmp_path):
  done = programs.run("benchmark", *BENCHMARK, *flags, f"--outdir={tmp_path}/run", env=on(8, env))
  assert not done.code, done.err
  assert texts(tmp_path / "run") == alone
  assert json.loads((tmp_path / "run" / "config.json").read_text())["mesh"] == flags[0].partition("=")[2]
  if "model:8" in flags[0]:
    assert "--mesh=model:8: llama: heads: 4 cannot be divided among 8 devices" in done.err


def test_two_processes_of_two_devices_write_one_run(alone, env, tmp_path):
  """One mesh over both: rows over processes, heads over the devices of each."""
  port = many_processes.free_port()
  start = lambda process: subprocess.Popen(
      programs.command("benchmark", *BENCHMARK, "--mesh=data:2,model:2", f"--outdir={tmp_path}/run",
                       *many_processes.flags(process, 2, port)),
      cwd=programs.ROOT, env=on(2, env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  running = [start(0), start(1)]
  ended = [(*process.communicate(timeout=300), process.returncode) for process in running]
  assert [code for *_, code in ended] == [0, 0], ended
  assert texts(tmp_path / "run") == alone
  assert "overall" in ended[0][0] and not ended[1][0].strip(), "the first one speaks"


BAD = {
    "devices": (["--mesh=data:2,model:4"], "mesh=data:2,model:4 has 8 devices, and there are 2"),
    "axis": (["--mesh=rows:2"], "'rows' is no axis of a mesh; allowed are data, fsdp, expert, model"),
    "size": (["--mesh=data:x"], "must be axis:size with a size of 1 or more"),
    "required": (["--mesh=model:2", "--must_divide=vocab,experts,hands"], "'hands' is none of heads, kv_heads, mlp"),
    "unread": (["--draft_sharding=divided"], "--draft_sharding=divided: it says how things lie on a mesh; add --mesh"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_writes_nothing(name, env, tmp_path):
  flags, said = BAD[name]
  done = programs.run("benchmark", f"--target={programs.TINY}", *flags, f"--outdir={tmp_path}/run", env=on(2, env))
  assert done.code == 2 and said in done.message and "Traceback" not in done.err
  assert not (tmp_path / "run").exists()


def test_what_must_divide_and_does_not_is_refused(env, tmp_path):
  done = programs.run("benchmark", f"--target={programs.TINY}", "--mesh=data:1,model:8", "--must_divide=heads",
                      f"--outdir={tmp_path}/run", env=on(8, env))
  assert done.code == 2 and "cannot be divided among 8 devices" in done.message and "require" in done.message


def test_collectives_are_those_of_the_closed_form(env, tmp_path):
  """Bytes and operations of every part, of a dense decoder and of a mixture."""
  small = "--width=32", "--layers=2", "--mlp_width=64", "--vocab_size=2048", "--batch_size=4", "--repeats=1", "--length=4"
  for flags in (["--mesh=data:2,model:4"], ["--mesh=data:2,expert:2,model:2", "--experts=4"]):
    folder = tmp_path / str(len(flags))
    done = programs.run("collectives", *small, *flags, f"--outdir={folder}", env=on(8, env))
    assert not done.code, done.err
    found = json.loads((folder / "collectives.json").read_text())
    assert {row["what"] for row in found["bytes"]} == {
        "embedding", "attention", "experts" if len(flags) > 1 else "feed-forward", "greatest logit and its id"}
    for row in found["bytes"]:
      assert (row["count"], row["bytes"]) == (row["expected_count"], row["expected_bytes"]), row
    assert all(row["step"] > 0 and row["collectives"] > 0 for row in found["times"])
