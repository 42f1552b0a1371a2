"""From prompts to a head that drafts, as a user does it: training data, runs of every kind, and what is refused.

What a head learns is held by tests/training; here a run is a few steps on a tiny target of random weights.
"""
import json

import numpy as np
import pytest

from specjax import checkpoints
from specjax.checkpoints import heads
from specjax.training import corpus
from specjax.training import loop
import programs

TARGET = f"--target={programs.TINY}"
TRAIN = [TARGET, "--steps=5", "--batch_tokens=512", "--max_tokens=64"]
KINDS = {"eagle3": ["--passes=2"], "eagle": ["--passes=2", "--noise=0.05"],
         "mtp": ["--passes=2", "--pass_decay=1", "--loss=text_ce"], "medusa": ["--heads=2"],
         "hydra": ["--heads=2", "--blocks=2"], "dflash": ["--block=4", "--head_layers=1", "--causal"],
         "dspark": ["--block=3", "--head_layers=1", "--markov_rank=4"], "peagle": ["--depths=3", "--head_layers=2"]}
FIRST = "--batch_size=8", "--max_new_tokens=20"
# Drafts with the heads that were written, beside plain decoding.
DRAFT = """
import json, pathlib
import specjax
from experiments.harness import cli
from specjax import proposers
from specjax.checkpoints import heads
cli.keep_compiled_programs()
target, _ = specjax.load({tiny!r})
made = {{"eagle3": lambda head: proposers.Eagle(head=head, num_tokens=2),
         "eagle": lambda head: proposers.Eagle(head=head, num_tokens=2),
         "mtp": lambda head: proposers.Eagle(head=head, num_tokens=2),
         "medusa": lambda head: proposers.Medusa(head=head, num_tokens=2),
         "hydra": lambda head: proposers.Hydra(head=head, num_tokens=2),
         "dflash": lambda head: proposers.DFlash(head=head, num_tokens=3),
         "dspark": lambda head: proposers.DSpark(head=head, num_tokens=3),
         "peagle": lambda head: proposers.PEagle(head=head, num_tokens=3)}}
texts = {{}}
for kind in ("plain", *made):
  folder = pathlib.Path({root!r}) / kind / "head"
  proposer = made[kind](heads.load_head(folder, target=target)) if kind in made else proposers.Plain()
  result = specjax.generate(target, proposer, [{prompt!r}], max_new_tokens=64)
  texts[kind] = [result.token_ids[0], int(result.counters.drafted_tokens[0])]
print(json.dumps(texts))
raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """Prompts, and corpora that are refused."""
  root, rng = tmp_path_factory.mktemp("training"), np.random.default_rng(0)
  text = lambda: "".join(rng.choice(list("abcd ef"), rng.integers(1, 12)))
  rows = [{"id": str(i), "category": "chat", "turns": [text(), text()]} for i in range(69)]
  rows.append({"id": "long", "category": "chat", "prompt": "x" * 250})
  (root / "eval").mkdir()
  for path in (root / "prompts.jsonl", root / "eval" / "prompts.jsonl"):
    path.write_text("\n".join(map(json.dumps, rows)))
  (root / "few.jsonl").write_text("\n".join(map(json.dumps, rows[:3])))
  plain = [{"id": str(i), "category": "plain_text", "prompt": "ab ab cd " * 30} for i in range(2)]
  (root / "plain.jsonl").write_text("\n".join(map(json.dumps, plain)))
  (root / "broken.jsonl").write_text(json.dumps(rows[0]) + '\n{"category": "chat"}')
  corpus.open_folder(root / "foreign", {"target": "smollm2-135m"})
  return root


@pytest.fixture(scope="module")
def ended(root, tmp_path_factory):
  def write(prompts, name, *flags, target=TARGET):
    return ["write_training_data", [target, f"--prompts={root / prompts}", f"--corpus={root / name}", *flags]]

  def write_own(*flags):
    return ["write_training_data", [TARGET, f"--corpus={root / 'own'}", "--max_prompt_tokens=200", *FIRST, *flags]]

  def train(kind, outdir, *flags, corpora=("data",)):
    names = ",".join(str(root / name) for name in corpora)
    own = [] if any(flag.startswith("--start_from=") for flag in flags) else ["--draft_vocab=40"]
    return ["train", [*TRAIN, *own, *KINDS[kind], f"--head={kind}", f"--corpus={names}", f"--outdir={root / outdir}", *flags]]

  both = ["--temperatures=0,0.7", *FIRST]
  first, second, third = (str(corpus.path(root / "data", index)) for index in range(3))
  cases = {
      "write": (*write("prompts.jsonl", "data", *both), ""),
      "write on": (*write("prompts.jsonl", "data", *both), f"import os; os.remove({second!r})"),
      "write other": (*write("prompts.jsonl", "data", "--temperatures=1", *FIRST), ""),
      "write few": (*write("few.jsonl", "few", *FIRST), ""),
      "write plain": (*write("plain.jsonl", "plain", "--max_new_tokens=20", "--max_prompt_tokens=30"), ""),
      "write own": (*write_own("--own_prompts=90"), ""),
      "write own on": (*write_own("--own_prompts=90"), "import os; os.remove({!r})".format(str(corpus.path(root / "own", 1)))),
      "write eval": (*write("eval/prompts.jsonl", "refused"), ""),
      "write broken": (*write("broken.jsonl", "refused"), ""),
      "write hot": (*write("prompts.jsonl", "refused", "--temperatures=0,hot"), ""),
      "write nothing": ("write_training_data", [TARGET, "--corpus=x"], ""),
      "write sampled": (*write("prompts.jsonl", "refused", "--temperature=1"), ""),
      **{kind: (*train(kind, kind), "") for kind in KINDS},
      "mesh": (*train("eagle3", "mesh", "--mesh=data:2,fsdp:2,model:2"),
               "import jax; jax.config.update('jax_num_cpu_devices', 8)"),
      "mesh unread": (*train("eagle3", "refused", "--mesh=data:1", "--draft_sharding=divided"), ""),
      "again": (*train("medusa", "medusa"), f"import os; os.remove({str(root / 'medusa' / 'curves.png')!r})"),
      "draft": ("train", [], DRAFT.format(tiny=programs.TINY, root=str(root), prompt=[5, 1, 9, 9, 30, 2, 17])),
      "changed": (*train("medusa", "medusa", "--learning_rate=0.1"), ""),
      "grown": (*train("medusa", "medusa"), f"import shutil; shutil.copy({first!r}, {third!r})"),
      "other flag": (*train("medusa", "refused", "--passes=3"), ""),
      "flag of two": (*train("dflash", "refused", "--heads=3"), ""),
      "other loss": (*train("dspark", "refused", "--loss=text_ce"), ""),
      "foreign": (*train("medusa", "refused", corpora=("foreign",)), ""),
      "no corpus": (*train("medusa", "refused", corpora=("eval",)), ""),
      "few": (*train("medusa", "refused", corpora=("few",)), ""),
      "other start": (*train("medusa", "refused", f"--start_from={root / 'eagle3' / 'head'}"), ""),
      "other size": (*train("medusa", "refused", "--heads=3", f"--start_from={root / 'medusa' / 'head'}"), ""),
      "own ids": (*train("medusa", "refused", f"--start_from={root / 'medusa' / 'head'}", "--draft_vocab=9"), ""),
      "too deep": (*train("dflash", "refused", "--head_layers=3"), ""),
      "no outdir": ("train", [*TRAIN, "--corpus=x"], ""),
      "sampled": (*train("medusa", "refused", "--temperature=1"), ""),
  }
  imports = ["experiments.harness.training", "experiments.harness.training_data"]
  found = programs.run_all(list(cases.values()), env=programs.environment(tmp_path_factory), imports=imports)
  return dict(zip(cases, found, strict=True))


def test_a_head_that_is_trained_on_a_mesh_has_the_losses_of_one_device(root, ended):
  """Features by a target that is divided, the head and its optimizer over all three axes."""
  assert ended["mesh"].code == ended["eagle3"].code == 0, ended["mesh"].err
  losses = lambda name: [row["loss"] for row in loop.read_metrics(root / name)]
  np.testing.assert_allclose(losses("mesh"), losses("eagle3"), rtol=1e-4)
  assert ended["mesh unread"].code == 2 and "no draft model is loaded here" in ended["mesh unread"].message


def test_the_target_writes_its_own_prompts(root, ended):
  """Complete ones, each once in a file, and the same ones whenever they are written."""
  assert ended["write own"].code == 0, ended["write own"].err
  first, again = (json.loads(ended[name].out.split(": ", 1)[1]) for name in ("write own", "write own on"))
  assert first == again and 0 < first["sequences"] <= 90
  for index in corpus.indices(root / "own"):
    sequences = corpus.read(root / "own", index)
    prompts = [tuple(sequences[i][:start].tolist()) for i, start in enumerate(sequences.starts)]
    assert len(set(prompts)) == len(prompts) and min(map(len, prompts)) > 3


# --- training data ----------------------------------------------------------------------------------------------------


def test_training_data_are_prompts_with_the_targets_answers(root, ended):
  assert ended["write"].code == 0, ended["write"].err
  found = json.loads(ended["write"].out.split(": ", 1)[1])
  files = [corpus.read(root / "data", i) for i in corpus.indices(root / "data")]
  assert [len(file) for file in files[:2]] == [64, 5] and found["prompts_too_long"] == 1 and found["sequences"] == 69
  assert found["tokens"] == sum(len(file.tokens) for file in files[:2])
  answers = np.concatenate([np.diff(file.offsets) - file.starts for file in files[:2]])
  assert found["answer_tokens"] == answers.sum() and 1 <= answers.min()
  assert answers.max() == 19 and len(list((root / "data").glob("features-*.top.npy"))) >= 2  # the last token has no features
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  prompts = {tuple(tokenizer.chat([{"role": "user", "content": json.loads(line)["turns"][0]}]))
             for line in (root / "prompts.jsonl").read_text().splitlines()[:69]}
  assert {tuple(file[i][:file.starts[i]].tolist()) for file in files[:2] for i in range(len(file))} <= prompts
  assert corpus.facts(root / "data")["prompts"] == ["prompts.jsonl"]


def test_a_corpus_goes_on_where_it_was(ended):
  assert ended["write on"].code == 0, ended["write on"].err
  assert ended["write on"].out == ended["write"].out


def test_plain_text_is_cut_and_has_no_answer(root, ended):
  assert ended["write plain"].code == 0, ended["write plain"].err
  sequences = corpus.read(root / "plain", 0)
  assert set(np.diff(sequences.offsets)[:-1]) >= {50} and not sequences.starts.any()
  assert json.loads(ended["write plain"].out.split(": ", 1)[1])["answer_tokens"] == 0


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_a_head_its_numbers_and_their_picture(root, ended, kind):
  end = ended[kind]
  assert end.code == 0, end.err
  assert f"{root / kind}/head: " in end.out and "measured on held-out prompts" in end.out
  rows = loop.read_metrics(root / kind)
  assert [row["step"] for row in rows] == list(range(5)) and rows[-1]["held_out/tokens_per_step"] >= 1
  assert (root / kind / "curves.png").read_bytes()[:4] == b"\x89PNG"
  card = (root / kind / "head" / "README.md").read_text()
  assert programs.TINY in card and str(root) not in card
  head = heads.load_head(root / kind / "head")
  assert len(head.ids) == 40 and list(head.ids) == sorted(set(head.ids.tolist()))
  sizes = {kind: ("draft_vocab", 40) for kind in ("eagle3", "eagle", "mtp", "peagle")} | {
      "medusa": ("heads", 2), "hydra": ("blocks", 2), "dflash": ("block", 4), "dspark": ("block", 3)}
  assert getattr(head.config, sizes[kind][0]) == sizes[kind][1]
  assert kind != "dflash" or head.config.causal
  assert kind != "peagle" or (head.depths, head.depth) == (3, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_drafts_and_the_text_stays_the_targets(ended, kind):
  assert ended["draft"].code == 0, ended["draft"].err
  texts = json.loads(ended["draft"].out)
  assert texts[kind][0] == texts["plain"][0] and len(texts[kind][0]) > 10 and texts[kind][1] > 10


def test_a_run_that_is_done_writes_again_what_is_lost_and_trains_no_more(ended):
  assert ended["again"].code == 0, ended["again"].err
  assert ended["again"].out.splitlines()[-1] == ended["medusa"].out.splitlines()[-1]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case,message", [
    ("write other", "begun with temperatures=[0.0, 0.7]"), ("write eval", "lies in a folder named eval"),
    ("write broken", "line 2: is no request"), ("write hot", "'hot' is no temperature"),
    ("write nothing", "--prompts, files of them, or --own_prompts"), ("write sampled", "--temperature=1"),
    ("changed", "holds a run with learning_rate=0.001, not 0.1"), ("grown", "choose another folder"),
    ("other flag", "--passes=3 is an option of --head=eagle3"),
    ("flag of two", "--heads=3 is an option of --head=medusa and --head=hydra, and this is --head=dflash"),
    ("other loss", "--loss=text_ce is for --head=eagle3 or mtp or medusa or hydra, and this is --head=dspark"),
    ("foreign", "was written by 'smollm2-135m'"),
    ("no corpus", "holds no corpus"), ("few", "too few; write more"),
    ("other start", "is a head of the kind eagle3"), ("other size", "has 2"), ("own ids", "--draft_vocab=9"), ("too deep", "--head_layers"),
    ("no outdir", "--corpus and --outdir are both needed"), ("sampled", "--temperature=1")])
def test_what_is_refused(root, ended, case, message):
  assert ended[case].code == 2 and message in ended[case].message, ended[case].err
  assert not (root / "refused" / "config.json").exists() and not (root / "refused" / "corpus.json").exists()
