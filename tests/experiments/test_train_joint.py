"""Medusa-2 as a user trains it: both folders, drafts that are exact for the new target, and what is refused."""
import json

import numpy as np
import pytest

from specjax import checkpoints
from specjax.checkpoints import heads
from specjax.training import corpus
from specjax.training import loop
import programs

TARGET = f"--target={programs.TINY}"
# Decodes with the new target, alone and with its heads.
DRAFT = """
import json
import specjax
from experiments.harness import cli
from specjax import proposers
cli.keep_compiled_programs()
target, _ = specjax.load({folder!r} + "/target")
head = specjax.load_head({folder!r} + "/head", target=target)
texts = [specjax.generate(target, proposer, [[5, 1, 9, 9, 30, 2, 17]], max_new_tokens=64)
         for proposer in (proposers.Plain(), proposers.Medusa(head=head, num_tokens=2))]
print(json.dumps([[text.token_ids[0], int(text.counters.drafted_tokens[0])] for text in texts]))
raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A corpus of made-up answers, and one that is refused."""
  root, rng = tmp_path_factory.mktemp("joint"), np.random.default_rng(0)
  sequences = [(rng.integers(3, 60, rng.integers(12, 40)).tolist(), int(rng.integers(2, 6))) for _ in range(120)]
  for name, target in (("data", programs.TINY), ("foreign", "smollm2-135m")):
    corpus.open_folder(root / name, {"target": target})
    corpus.write(root / name, 0, corpus.pack(sequences))
  return root


@pytest.fixture(scope="module")
def ended(root, tmp_path_factory):
  def run(outdir, *flags, data="data", ids=("--draft_vocab=40",)):
    return ["train_joint", [TARGET, "--steps=4", "--heads_first=2", "--heads=2", "--batch_tokens=512",
                            "--max_tokens=64", "--learning_rate=0.001", *ids, f"--corpus={root / data}",
                            f"--outdir={root / outdir}",
                            *flags]]

  start = f"--start_from={root / 'first' / 'head'}"
  cases = {
      "first": (*run("first"), ""),
      "draft": ("train_joint", [], DRAFT.format(folder=str(root / "first"))),
      "second": (*run("second", start, "--heads_first=0", "--backbone_loss=data", ids=()), ""),
      "changed": (*run("first", "--heads_weight=0.5"), ""),
      "other size": (*run("refused", start, "--heads=3", ids=()), ""),
      "own ids": (*run("refused", start), ""),
      "too late": (*run("refused", "--heads_first=9"), ""),
      "foreign": (*run("refused", data="foreign"), ""),
      "sampled": (*run("refused", "--temperature=1"), ""),
      "no corpus": ("train_joint", [TARGET, "--outdir=x"], ""),
  }
  found = programs.run_all(list(cases.values()), env=programs.environment(tmp_path_factory),
                           imports=["experiments.harness.joint_training"])
  return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_run_leaves_a_target_its_heads_and_their_numbers(root, ended, name):
  end = ended[name]
  assert end.code == 0, end.err
  rows = loop.read_metrics(root / name)
  assert len(rows) == 4 and rows[-1]["held_out/tokens_per_step"] >= 1
  assert f"{root / name}/target and {root / name}/head: " in end.out
  assert (root / name / "curves.png").read_bytes()[:4] == b"\x89PNG"
  config, weights, _ = checkpoints.load(root / name / "target")
  theirs = checkpoints.load(programs.ROOT / programs.TINY)
  assert config == theirs[0]
  assert np.abs(np.asarray(weights.embedding) - np.asarray(theirs[1].embedding)).max() > 0
  head = heads.load_head(root / name / "head")
  assert head.config.heads == 2 and len(head.ids) == 40
  if name == "first":
    assert [row["heads_weight"] for row in rows[:2]] == [1, 1] and rows[2]["kept"] == 1  # before the first joint step
    assert abs(rows[0]["backbone"]) < 1e-4
  else:
    assert rows[0]["heads_weight"] < 0.2 and rows[0]["backbone"] > 1  # of the text, not of the original


def test_the_heads_draft_for_the_new_target(ended):
  assert ended["draft"].code == 0, ended["draft"].err
  plain, drafted = json.loads(ended["draft"].out)
  assert plain[0] == drafted[0] and len(plain[0]) > 10 and drafted[1] > 10


@pytest.mark.parametrize("case,message", [
    ("changed", "holds a run with heads_weight=0.2, not 0.5"), ("other size", "has 2"), ("own ids", "--draft_vocab=40"),
    ("too late", "heads_first=9"), ("foreign", "was written by 'smollm2-135m'"), ("sampled", "--temperature=1"),
    ("no corpus", "--corpus and --outdir are both needed")])
def test_what_is_refused(root, ended, case, message):
  assert ended[case].code == 2 and message in ended[case].message, ended[case].err
  assert not (root / "refused" / "config.json").exists()
