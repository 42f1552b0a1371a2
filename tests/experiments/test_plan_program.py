"""`python -m experiments.plan` from the command line: its tables, its files, every flag, and bad input."""
import json
import re

import pytest

import programs

# Every flag with another value than its default, and what it changes in plan.json.
FLAGS = {
    "model": (["--model=llama-3.1-8b"], lambda got: got["model"] == "llama-3.1-8b"),
    "hardware": (["--hardware=v5e-16"], lambda got: got["hardware"] == "v5e-16"),
    "mesh": (["--mesh=data:4,model:4", "--batch_size=4"], lambda got: got["mesh"] == "data:4,model:4"),
    "batch_size": (["--batch_size=6,2"], lambda got: [r["batch_size"] for r in got["batches"]] == [6, 2]),
    "length": (["--length=100"], lambda got: got["length"] == 100 and _bytes(got)["cache"] < 2e7),
    "head": (["--head=lookup"], lambda got: _bytes(got)["draft_weights"] == 0 == got["batches"][0]["draft"]["total"]),
    "draft": (["--head=draft", "--draft=llama-3.2-1b"], lambda got: _bytes(got)["draft_weights"] == 2 * 1235814400),
    "draft_tokens": (["--draft_tokens=3"], lambda got: (got["draft"]["nodes"], got["width"]) == (3, 4)),
    "tree_nodes": (["--tree_nodes=60"], lambda got: (got["draft"]["nodes"], got["draft"]["depth"], got["width"]) ==
                   (60, 7, 64)),
    "draft_divided": (["--draft_divided"], lambda got: got["draft"]["divided"] and _bytes(got)["draft_weights"] < 4e8),
    "attention": (["--attention=whole"], lambda got: got["attention"] == "whole" and
                  "attention" not in [c["what"] for c in got["batches"][0]["collectives"]]),
    "dtype": (["--dtype=float32"], lambda got: got["itemsize"] == 4 and _bytes(got)["draft_weights"] > 5e9),
    "memory_efficiency": (["--memory_efficiency=0.5"], lambda got: got["memory_efficiency"] == 0.5),
    "flops_efficiency": (["--flops_efficiency=0.5"], lambda got: got["flops_efficiency"] == 0.5),
    "acceptance": (["--acceptance=0.25"], lambda got: list(got["loses_from_batch"]) == ["0.25"]),
}
BAD = {
    "model": (["--model=gpt-5"], "model 'gpt-5' is not in the table"),
    "hardware": (["--hardware=v5p-30"], "v5p-32.*two a chip"),
    "axis": (["--mesh=tensor:16"], "allowed are data, fsdp, expert, model"),
    "devices": (["--mesh=data:2,model:4"], "has 8 devices, and v5p-32 has 16"),
    "rows": (["--batch_size=3"], "batch_size=3 does not divide over data:2"),
    "experts": (["--mesh=expert:16"], "the model has no experts"),
    "batch": (["--batch_size=2,two"], "--batch_size: 'two' is not allowed"),
    "batch twice": (["--batch_size=2,2"], "--batch_size=2,2: give at least one number, and none twice"),
    "no batch": (["--batch_size="], "--batch_size"),
    "acceptance": (["--acceptance=1.5"], "--acceptance: '1.5' is not allowed; give numbers from 0 to 1"),
    "draft without": (["--head=draft"], "--head=draft takes the name of a draft model"),
    "draft beside": (["--draft=llama-3.2-1b"], "and nothing else does"),
    "lookup divided": (["--head=lookup", "--draft_divided"], "a lookup has no weights"),
    "tree": (["--tree_nodes=3"], "--tree_nodes"),
    "wide": (["--tree_nodes=64"], "wider than the widest step"),
    "share": (["--flops_efficiency=0"], "flops_efficiency=0.0"),
    "length": (["--length=0"], "length"),
    "file": (["--outdir=README.md"], "README.md is a file"),
}


# The process that runs the cases has imported other programs, some of whose flags have the same names.
_OWN_FLAGS = f"""
from absl import flags
for name in {[*FLAGS, "outdir"]}:
  if name in flags.FLAGS:
    delattr(flags.FLAGS, name)
"""


def _bytes(got):
  return got["batches"][0]["device_bytes"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
  """Each case has run: name -> (program, its folder)."""
  root = tmp_path_factory.mktemp("plans")
  given = {("good", "default"): []} | {("flag", name): args for name, (args, _) in FLAGS.items()} | {
      ("bad", name): args for name, (args, _) in BAD.items()}
  folders = {name: root / "-".join(name) for name in given}
  cases = [("plan", [f"--outdir={folders[name]}", *args], _OWN_FLAGS) for name, args in given.items()]
  found = programs.run_all(cases, env=programs.environment(tmp_path_factory),
                           imports=["experiments.harness.plan_report"])
  return {name: (end, folders[name]) for name, end in zip(given, found, strict=True)}


def test_the_tables(ended):
  """What is printed is what is written: the same cells in both, and the numbers of plan.json."""
  program, folder = ended["good", "default"]
  assert program.code == 0 and not program.err
  assert program.out.startswith("llama-3.1-70b on v5p-32 (16 x v5p, 2x2x4), mesh data:2,model:8")
  page, got = (folder / "plan.md").read_text(), json.loads((folder / "plan.json").read_text())
  cells = lambda line: [cell for cell in line.replace("|", "  ").split("  ") if cell.strip()]
  printed = [[c.strip() for c in cells(line)] for line in program.out.splitlines() if "  " in line]
  rows = [line for line in page.splitlines() if line.startswith("|") and "---" not in line]
  written = [[c.strip() for c in cells(line)] for line in rows]
  assert printed == written and len(printed) > 30
  first = got["batches"][0]
  assert [f"{first['device_bytes'][name] / 1e9:.2f}" for name in ("weights", "draft_weights")] == printed[1][1:3]
  assert printed[1][-1] == ("yes" if first["fits"] else "no") == "yes"
  assert f"{first['acceptance_needed']:.2f}" in program.out and got["schema"] == 1
  assert all(note in page for note in got["notes"])


def test_more_devices_than_key_heads_are_told(tmp_path_factory):
  """Devices in excess of key/value heads are no error where they are a multiple, and it is said what they hold."""
  program = programs.run("plan", "--mesh=data:1,model:16", "--batch_size=1,8,32", "--length=4096", "--draft_tokens=7",
                         env=programs.environment(tmp_path_factory))
  assert program.code == 0 and "8 key/value heads on 16 devices: each is kept by 2." in program.out


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_reaches_the_plan(ended, name):
  program, folder = ended["flag", name]
  assert program.code == 0, program.err
  got, default = (json.loads((where / "plan.json").read_text()) for where in (folder, ended["good", "default"][1]))
  assert FLAGS[name][1](got) and not FLAGS[name][1](default)
  times = lambda plan: [plan["batches"][0][part] for part in ("plain", "verify", "draft")]
  assert (times(got) == times(default)) == (name == "acceptance")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_writes_nothing(ended, name):
  program, folder = ended["bad", name]
  assert program.code == 2 and not program.out
  assert len(program.err.strip().splitlines()) == 1
  assert re.search(BAD[name][1], program.err), program.err
  assert not folder.exists()
