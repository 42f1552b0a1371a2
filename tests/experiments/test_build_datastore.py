"""The datastore program: what it reads, what it writes, what it refuses."""
import json

import numpy as np
import pytest

from specjax import checkpoints
from specjax.proposers import retrieval
import programs

ROWS = [{"id": "1", "prompt": "ab ab cd", "category": "x"}, {"text": "ef", "response": "gh ab"}, {"output": ""}]
TEXTS = ["ab ab cd", "ef\ngh ab", "", "plain text\nof two lines"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  (folder / "eval").mkdir()
  for path in (folder / "rows.jsonl", folder / "eval" / "rows.jsonl"):
    path.write_text("\n\n".join(map(json.dumps, ROWS[:2])) + "\n" + json.dumps(ROWS[2]))
  (folder / "text.txt").write_text(TEXTS[-1])
  (folder / "empty.txt").write_text("")
  (folder / "no_field.jsonl").write_text('{"prompt": "a"}\n{"id": "2"}')
  (folder / "no_json.jsonl").write_text('{"prompt": "a"}\n{"id": ')
  (folder / "list.jsonl").write_text('["a"]')
  (folder / "eval_link").symlink_to(folder / "eval")
  return folder


CASES = {
    "all": (["rows.jsonl", "text.txt"], []), "short": (["rows.jsonl", "text.txt"], ["--max_tokens=5"]),
    "none": ([], []), "eval": (["eval/rows.jsonl"], []), "linked": (["eval_link/rows.jsonl"], []),
    "missing": (["missing.txt"], []), "empty": (["empty.txt"], []), "no field": (["no_field.jsonl"], []),
    "no json": (["no_json.jsonl"], []), "list": (["list.jsonl"], []), "unused": (["text.txt"], ["--temperature=1"]),
}


@pytest.fixture(scope="module")
def ended(folder, tmp_path_factory):
  cases = [("build_datastore", [f"--corpus={','.join(str(folder / name) for name in names)}",
                                f"--target={programs.TINY}", f"--out={folder / case}.npz", *flags], "")
           for case, (names, flags) in CASES.items()]
  return dict(zip(CASES, programs.run_all(cases, env=programs.environment(tmp_path_factory)), strict=True))


def test_a_datastore_holds_the_tokens_of_every_text(folder, ended):
  assert ended["all"].code == 0, ended["all"].err
  tokenizer = checkpoints.Tokenizer.from_folder(programs.ROOT / programs.TINY)
  wanted = retrieval.join([tokenizer.encode(text) for text in TEXTS])
  proposer = retrieval.Retrieval.load(folder / "all.npz", tokenizer)
  assert proposer.tokens.tolist() == wanted.tolist()
  assert proposer.suffix_array.tolist() == retrieval.suffix_array(wanted).tolist()
  assert f"{len(wanted)} tokens of" in ended["all"].out and "left" not in ended["all"].out
  assert "tokenizing" in ended["all"].err and "sorting" in ended["all"].err


def test_it_ends_at_the_greatest_number_of_tokens(folder, ended):
  assert ended["short"].code == 0 and "--max_tokens=5 cut 3 tokens off the last text and left 4 texts out" in ended["short"].out
  short, whole = (np.load(folder / f"{name}.npz")["tokens"] for name in ("short", "all"))
  assert len(short) == 5 and short[:-1].tolist() == whole[:4].tolist() and short[-1] == -1


@pytest.mark.parametrize("case,message", [
    ("none", "--corpus is empty"), ("eval", "lies in a folder named eval"), ("linked", "lies in a folder named eval"),
    ("missing", "missing.txt"), ("empty", "the datastore has no token"), ("no field", "line 2: has none of the fields"),
    ("no json", "line 2: is no JSON object"), ("list", "line 1: is no JSON object"), ("unused", "--temperature=1"),
])
def test_what_is_refused(folder, ended, case, message):
  assert ended[case].code == 2 and message in ended[case].message
  assert not (folder / f"{case}.npz").exists()
