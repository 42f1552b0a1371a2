"""Small models from nothing, as a user trains them: runs, their folders, a second start, what is refused."""
import json
import string

import numpy as np
import pytest

import programs
import specjax
from specjax.checkpoints import new_tokenizer
from specjax.training import loop

pytestmark = pytest.mark.usefixtures("quick_compile")
# Trains until it is killed, behind the first checkpoint.
KILLED = """
import os
from specjax.training import loop
add = loop._Metrics.add
def killed(self, row):
  add(self, row)
  if row["step"] == 3:
    os._exit(9)
loop._Metrics.add = killed
run = loop.run
loop.run = lambda *given, **options: run(*given, save_every=2, **options)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """Rows with and without a reference, made of a few words; and files that are refused."""
  root, rng = tmp_path_factory.mktemp("pretrain"), np.random.default_rng(0)
  words = ["".join(rng.choice(list(string.ascii_lowercase), rng.integers(2, 7))) for _ in range(40)]
  text = lambda count: " ".join(rng.choice(words, count))
  rows = [{"id": f"p{i}", "prompt": f"Turn round: {text(6)}", "reference": text(6)} for i in range(160)]
  rows += [{"id": f"t{i}", "prompt": text(40)} for i in range(60)] + [{"id": "turns", "turns": [text(9), text(9)]}]
  write = lambda name, lines: (root / name).write_text("".join(f"{line}\n" for line in lines))
  (root / "eval").mkdir()
  write("rows.jsonl", map(json.dumps, rows))
  write("eval/rows.jsonl", map(json.dumps, rows))
  write("pairs.jsonl", map(json.dumps, rows[:20]))
  write("broken.jsonl", [json.dumps(rows[0]), '{"id": "x", "prompt": 3}'])
  write("empty.jsonl", [""])
  return root


@pytest.fixture(scope="module")
def ended(root, tmp_path_factory):
  def run(outdir, family, *flags, data="rows.jsonl", size=("--layers=1", "--width=16", "--heads=2"), vocab="400"):
    vocab = [f"--vocab={vocab}"] if vocab else []
    return ["pretrain", [f"--family={family}", *size, *vocab, "--batch_tokens=256", "--max_tokens=32",
                         "--evaluate_every=3", f"--data={root / data}", f"--outdir={root / outdir}", *flags]]

  shared = f"--tokenizer={root / 'mixture' / 'tokenizer'}"
  cases = {
      "t5": (*run("t5", "t5", "--steps=6"), ""),
      "killed": (*run("again", "t5", "--steps=6"), KILLED),
      "again": (*run("again", "t5", "--steps=6"), ""),
      "mixture": (*run("mixture", "mixtral", "--steps=4", "--experts=4"), ""),
      "drafter": (*run("drafter", "llama", "--minutes=0.001", shared, vocab=None), ""),
      "changed": (*run("t5", "t5", "--steps=6", "--span_corruption=0.25"), ""),
      "other family": (*run("no", "llama", "--steps=2", "--experts=4"), ""),
      "spans of a decoder": (*run("no", "mixtral", "--steps=2", "--span_corruption=0.5"), ""),
      "two vocabularies": (*run("no", "llama", "--steps=2", shared), ""),
      "no length": (*run("no", "t5"), ""),
      "two lengths": (*run("no", "t5", "--steps=2", "--minutes=1"), ""),
      "heads": (*run("no", "t5", "--steps=2", size=("--width=18", "--heads=6")), ""),
      "eval": (*run("no", "t5", "--steps=2", data="eval/rows.jsonl"), ""),
      "broken": (*run("no", "t5", "--steps=2", data="broken.jsonl"), ""),
      "empty": (*run("no", "t5", "--steps=2", data="empty.jsonl"), ""),
      "no pieces": (*run("no", "t5", "--steps=2", data="pairs.jsonl", vocab="380"), ""),
      "no sentinels": (*run("no", "t5", "--steps=2", shared, vocab=None), ""),
      "too many ids": (*run("no", "llama", "--steps=2", vocab="90000"), ""),
      "chosen": (*run("no", "mixtral", "--steps=2", "--experts=2", "--chosen=3"), ""),
      "other setting": (*run("no", "t5", "--steps=2", "--top_k=4"), ""),
      "no data": ("pretrain", ["--outdir=x", "--steps=2"], ""),
  }
  found = programs.run_all(list(cases.values()), env=programs.environment(tmp_path_factory),
                           imports=["experiments.harness.pretraining"])
  return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name, steps", [("t5", 6), ("mixture", 4)])
def test_a_run_leaves_a_model_its_numbers_and_their_picture(root, ended, name, steps):
  end = ended[name]
  assert end.code == 0, end.err
  rows = loop.read_metrics(root / name)
  assert [row["step"] for row in rows] == list(range(steps))
  assert end.out.splitlines()[-1].startswith(f"{root / name}/model: held-out cross entropy "
                                             f"{rows[-1]['held_out/cross_entropy']:.3f}")
  assert (root / name / "curves.png").read_bytes()[:4] == b"\x89PNG"
  target, tokenizer = specjax.load(str(root / name / "model"))
  assert (target.config.width, target.config.layers, target.config.num_tokens, target.eos_ids) == (16, 1, 400, (1,))
  prompt = tokenizer.encode("Turn round: one two", add_special_tokens=True)
  assert (prompt[-1] == 1) == (name == "t5")
  result = specjax.generate(target, specjax.proposers.NGram(num_tokens=2), [prompt], max_new_tokens=4)
  assert len(result.token_ids[0]) > 0


def test_a_mixture_has_its_experts_and_says_how_evenly_they_are_used(root, ended):
  assert "busiest expert" in ended["mixture"].out
  target, _ = specjax.load(str(root / "mixture" / "model"))
  assert (target.config.family, target.config.moe.experts, target.config.moe.chosen) == ("mixtral", 4, 2)
  assert 1 <= loop.read_metrics(root / "mixture")[-1]["held_out/busiest"] <= 2


def test_a_run_that_was_killed_is_the_run_that_never_was(root, ended):
  assert ended["killed"].code == 9 and ended["again"].code == 0, ended["again"].err
  keep = lambda name: [{k: v for k, v in row.items() if k != "seconds"} for row in loop.read_metrics(root / name)]
  assert keep("again") == keep("t5")
  files = [(root / name / "model" / "model.safetensors").read_bytes() for name in ("t5", "again")]
  assert files[0] == files[1]


def test_a_drafter_has_the_targets_tokenizer_and_steps_by_time(root, ended):
  assert ended["drafter"].code == 0, ended["drafter"].err
  draft, tokenizer = specjax.load(str(root / "drafter" / "model"))
  _, theirs = specjax.load(str(root / "mixture" / "model"))
  assert tokenizer.tokens() == theirs.tokens() and new_tokenizer.sentinels(theirs) == ()
  planned = json.loads((root / "drafter" / "steps.json").read_text())["steps"]
  assert len(loop.read_metrics(root / "drafter")) == planned >= 1 and draft.config.family == "llama"


@pytest.mark.parametrize("case, message", [
    ("changed", "holds a run with span_corruption=0.5, not 0.25"), ("other family", "--experts=4 is an option of "
                                                                    "--family=mixtral, and this is --family=llama"),
    ("spans of a decoder", "--span_corruption=0.5 is an option of --family=t5"),
    ("two vocabularies", "--vocab=400: the tokenizer of --tokenizer="),
    ("no length", "one of --steps and --minutes"), ("two lengths", "one of --steps and --minutes"),
    ("heads", "--width=18, --heads=6"), ("eval", "in a folder named eval"), ("broken", "broken.jsonl, line 2"),
    ("empty", "hold no rows"), ("no pieces", "no pieces to train on"), ("no sentinels", "no sentinels"),
    ("too many ids", "ids, not 90000"), ("chosen", "chosen=3"), ("other setting", "--top_k=4"),
    ("no data", "--data and --outdir are both needed")])
def test_what_is_refused(root, ended, case, message):
  assert ended[case].code == 2 and message in ended[case].message, ended[case].err
  assert not (root / "no").exists()
