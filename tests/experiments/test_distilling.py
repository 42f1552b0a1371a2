"""A draft model from layers of a target, as a user trains it: a run, its folder, a second start, what is refused."""
import json

import numpy as np
import pytest

from specjax import checkpoints
from specjax.training import corpus
from specjax.training import loop
import programs

TARGET = f"--target={programs.TINY}"
# Decodes with the draft model that was written, beside plain decoding.
DRAFT = """
import json
import specjax
from experiments.harness import cli
from specjax import proposers
cli.keep_compiled_programs()
target, _ = specjax.load({tiny!r})
draft, _ = specjax.load({folder!r})
texts = [specjax.generate(target, proposer, [[5, 1, 9, 9, 30, 2, 17]], max_new_tokens=64)
         for proposer in (proposers.Plain(), proposers.DraftModel(model=draft, num_tokens=3))]
print(json.dumps([[text.token_ids[0], int(text.counters.drafted_tokens[0])] for text in texts]))
raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A corpus of made-up answers, and corpora that are refused."""
  root, rng = tmp_path_factory.mktemp("distill"), np.random.default_rng(0)
  sequences = [(rng.integers(3, 90, rng.integers(12, 40)).tolist(), int(rng.integers(2, 6))) for _ in range(120)]
  for name, target, count in (("data", programs.TINY, 120), ("few", programs.TINY, 2), ("foreign", "smollm2-135m", 9)):
    corpus.open_folder(root / name, {"target": target})
    corpus.write(root / name, 0, corpus.pack(sequences[:count]))
  return root


@pytest.fixture(scope="module")
def ended(root, tmp_path_factory):
  def run(outdir, *flags, data="data", start=("--draft_layers=1",)):
    return ["distill", [TARGET, "--steps=4", "--batch_tokens=256", "--max_tokens=64", *start, f"--corpus={root / data}",
                        f"--outdir={root / outdir}", *flags]]

  sampled = ["--temperature=0.8", "--loss=tv", "--on_policy=1", "--own_temperature=0.9", "--draft_tokens=2"]
  model = [f"--draft={root / 'first' / 'draft'}"]
  cases = {
      "first": (*run("first"), ""),
      "again": (*run("first"), f"import os; os.remove({str(root / 'first' / 'curves.png')!r})"),
      "draft": ("distill", [], DRAFT.format(tiny=programs.TINY, folder=str(root / "first" / "draft"))),
      "second": (*run("second", *sampled, start=model), ""),
      "changed": (*run("first", "--loss=jsd"), ""),
      "cut": (*run("cut", start=[f"--draft={programs.TINY}", "--draft_layers=0"]), ""),
      "no layer of it": (*run("refused", *model), ""),
      "none": (*run("refused", start=()), ""),
      "no layer": (*run("refused", start=["--draft_layers=1,7"]), ""),
      "disorder": (*run("refused", start=["--draft_layers=1,0"]), ""),
      "no list": (*run("refused", start=["--draft_layers=first"]), ""),
      "few": (*run("refused", data="few"), ""),
      "foreign": (*run("refused", data="foreign"), ""),
      "too long": (*run("refused", "--max_tokens=999"), ""),
      "other option": (*run("refused", "--tree_nodes=4"), ""),
      "other setting": (*run("refused", "--top_k=4"), ""),
      "no corpus": ("distill", [TARGET, "--draft_layers=1", "--outdir=x"], ""),
  }
  found = programs.run_all(list(cases.values()), env=programs.environment(tmp_path_factory),
                           imports=["experiments.harness.distilling"])
  return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", ["first", "second", "cut"])
def test_a_run_leaves_a_draft_model_its_numbers_and_their_picture(root, ended, name):
  end = ended[name]
  assert end.code == 0, end.err
  rows = loop.read_metrics(root / name)
  before = json.loads((root / name / "before.json").read_text())
  assert [row["step"] for row in rows] == list(range(4))
  assert end.out.splitlines()[-1].startswith(f"{root / name}/draft, held out, ")
  assert f"acceptance {before['acceptance']:.3f} before and {rows[-1]['held_out/acceptance']:.3f} after" in end.out
  assert before["tokens_per_step"] >= 1 and 0 < before["acceptance"] < 1 or name != "second"
  assert (root / name / "curves.png").read_bytes()[:4] == b"\x89PNG"
  config, weights, tokenizer = checkpoints.load(root / name / "draft")
  theirs = checkpoints.load(programs.ROOT / programs.TINY)
  assert config.layers == 1 and (config.width, config.num_tokens) == (theirs[0].width, theirs[0].num_tokens)
  assert tokenizer.encode("ab cd") == theirs[2].encode("ab cd")
  assert np.abs(np.asarray(weights.embedding) - np.asarray(theirs[1].embedding)).max() > 0


def test_the_settings_reach_the_run(root, ended):
  assert ended["second"].code == 0 and "at temperature 0.8" in ended["second"].out
  facts = json.loads((root / "second" / "config.json").read_text())
  assert (facts["loss"], facts["on_policy"], facts["own_temperature"], facts["drafted"]) == ("tv", 1, 0.9, 2)
  rows = loop.read_metrics(root / "second")
  assert all(row["on_policy"] == 1 for row in rows) and "share_1" in rows[0] and "share_2" not in rows[0]
  assert {row["on_policy"] for row in loop.read_metrics(root / "first")} == {0, 1}


def test_the_draft_model_drafts_and_the_text_stays_the_targets(ended):
  assert ended["draft"].code == 0, ended["draft"].err
  plain, drafted = json.loads(ended["draft"].out)
  assert plain[0] == drafted[0] and len(plain[0]) > 10 and drafted[1] > 10


def test_a_run_that_is_done_writes_again_what_is_lost_and_trains_no_more(ended):
  assert ended["again"].code == 0, ended["again"].err
  assert ended["again"].out.splitlines()[-1] == ended["first"].out.splitlines()[-1]


@pytest.mark.parametrize("case,message", [
    ("changed", "holds a run with loss='kl', not 'jsd'"), ("no layer of it", "--draft_layers=1: layers=(1,)"),
    ("none", "--draft or --draft_layers is needed"), ("no layer", "--draft_layers=1,7: layers=(1, 7)"),
    ("disorder", "--draft_layers=1,0"), ("no list", "--draft_layers=first"), ("few", "too few; write more"),
    ("foreign", "was written by 'smollm2-135m'"), ("too long", "--max_tokens=999"),
    ("other option", "--tree_nodes is an option of methods"), ("other setting", "--top_k=4"),
    ("no corpus", "--corpus and --outdir are both needed")])
def test_what_is_refused(root, ended, case, message):
  assert ended[case].code == 2 and message in ended[case].message, ended[case].err
  assert not (root / "refused" / "config.json").exists()
