"""The folder of a run: never overwritten by mistake, whole at every moment, resumed only under the same settings."""
import json

import pytest

from experiments.harness import run_folder

CONFIG = {"request_ids": ["a", "b"], "target": "t", "temperature": 0.0, "methods": ["plain", "ngram"], "command": "c",
          "date": "d"}


def make(path, *, overwrite=False, resume=False, config=None):
  folder = run_folder.RunFolder(str(path), overwrite=overwrite, resume=resume, config=config or CONFIG)
  folder.open()
  return folder


def files(path):
  return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_new_folder_is_made_with_its_config(tmp_path):
  folder = make(tmp_path / "a" / "b")
  assert folder.path == tmp_path / "a" / "b"
  assert json.loads((folder.path / "config.json").read_text()) == CONFIG
  assert set(files(folder.path)) == {"config.json"}


def test_nothing_is_touched_before_it_is_opened(tmp_path):
  run_folder.RunFolder(str(tmp_path / "new"), overwrite=False, resume=False, config=CONFIG)
  assert not (tmp_path / "new").exists()
  make(tmp_path / "old").append([{"id": "a"}])
  before = files(tmp_path / "old")
  for flags in ({"overwrite": True, "resume": False}, {"overwrite": False, "resume": True}):
    run_folder.RunFolder(str(tmp_path / "old"), **flags, config=CONFIG)
  assert files(tmp_path / "old") == before


def test_an_empty_folder_is_taken(tmp_path):
  assert files(make(tmp_path).path)


def test_a_used_folder_is_refused_and_left_alone(tmp_path):
  make(tmp_path).append([{"id": "a"}])
  before = files(tmp_path)
  with pytest.raises(ValueError, match="not empty.*--resume.*--overwrite"):
    make(tmp_path)
  assert files(tmp_path) == before


def test_a_folder_with_only_a_hidden_file_or_a_folder_is_not_empty(tmp_path):
  (tmp_path / ".git").mkdir()
  with pytest.raises(ValueError, match="not empty"):
    make(tmp_path)


def test_overwrite_discards_a_run(tmp_path):
  folder = make(tmp_path)
  folder.append([{"id": "a"}])
  (tmp_path / "plots").mkdir()
  (tmp_path / "plots" / "x.svg").write_text("x")
  folder = make(tmp_path, overwrite=True, config=CONFIG | {"target": "other"})
  assert set(files(tmp_path)) == {"config.json"}
  assert folder.records() == []


def test_overwrite_does_not_touch_what_is_no_run(tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  before = files(tmp_path)
  with pytest.raises(ValueError, match="--overwrite.*remove it yourself"):
    make(tmp_path, overwrite=True)
  assert files(tmp_path) == before


def test_overwrite_does_not_delete_a_model(tmp_path):
  """Model folders have a config.json as well: its name alone does not make a folder a run."""
  (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 32}))
  (tmp_path / "model.safetensors").write_bytes(b"weights")
  before = files(tmp_path)
  with pytest.raises(ValueError, match="--overwrite"):
    make(tmp_path, overwrite=True)
  assert files(tmp_path) == before


def test_overwrite_of_nothing_is_a_new_run(tmp_path):
  assert files(make(tmp_path / "new", overwrite=True).path)


def test_overwrite_and_resume_exclude_each_other(tmp_path):
  make(tmp_path).append([{"id": "a"}])
  before = files(tmp_path)
  with pytest.raises(ValueError, match="--overwrite and --resume"):
    make(tmp_path, overwrite=True, resume=True)
  assert files(tmp_path) == before


def test_a_file_is_no_folder(tmp_path):
  (tmp_path / "file").write_text("x")
  for flags in ({}, {"overwrite": True}, {"resume": True}):
    with pytest.raises(ValueError, match="is a file"):
      make(tmp_path / "file", **flags)
  assert (tmp_path / "file").read_text() == "x"


def test_a_folder_below_a_file_names_the_file(tmp_path):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ValueError, match="--outdir=.*/file/a/b: .*/file is a file"):
    make(tmp_path / "file" / "a" / "b")


@pytest.mark.parametrize("broken", [b'{"id": "b"', b"", b'{"id": "\xc3"}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path, broken):
  """Only the last line can be an interrupt's work."""
  folder = make(tmp_path)
  (tmp_path / run_folder.RECORDS).write_bytes(b'{"id": "a"}\n' + broken + b'\n{"id": "c"}\n')
  with pytest.raises(ValueError, match=f"{run_folder.RECORDS}:2 is not a JSON record"):
    folder.records()


def test_resume_keeps_the_records(tmp_path):
  make(tmp_path).append([{"id": "a"}, {"id": "b"}])
  folder = make(tmp_path, resume=True, config=CONFIG | {"command": "again", "date": "later"})
  folder.append([{"id": "c"}])
  assert [r["id"] for r in folder.records()] == ["a", "b", "c"]


@pytest.mark.parametrize("name, value", [("temperature", 0.8), ("methods", ["plain"]), ("new_flag", 1)])
def test_resume_names_the_setting_that_differs(tmp_path, name, value):
  make(tmp_path).append([{"id": "a"}])
  before = files(tmp_path)
  with pytest.raises(ValueError) as error:
    make(tmp_path, resume=True, config=CONFIG | {name: value})
  assert f"--resume: {name} was {CONFIG.get(name)!r}" in str(error.value)
  assert f"is {value!r} now" in str(error.value)
  assert files(tmp_path) == before


def test_resume_names_a_setting_that_is_gone(tmp_path):
  make(tmp_path)
  with pytest.raises(ValueError, match="--resume: target was 't'"):
    make(tmp_path, resume=True, config={k: v for k, v in CONFIG.items() if k != "target"})


@pytest.mark.parametrize("content", [None, "", "{oops", "[1]", "null", "7"])
def test_resume_needs_a_config(tmp_path, content):
  (tmp_path / "x").write_text("x")
  if content is not None:
    (tmp_path / "config.json").write_text(content)
  before = files(tmp_path)
  with pytest.raises(ValueError, match="--resume.*config.json"):
    make(tmp_path, resume=True)
  assert files(tmp_path) == before


def test_settings_survive_json(tmp_path):
  config = CONFIG | {"top_p": 1.0, "limit": None, "request_ids": ["é", "日本"]}
  make(tmp_path, config=config)
  make(tmp_path, config=config, resume=True)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_broken_last_line_is_dropped(tmp_path, cut):
  folder = make(tmp_path)
  folder.append([{"id": "a", "text": "é" * 4}, {"id": "b", "text": "日本語" * 4}])
  path = tmp_path / run_folder.RECORDS
  path.write_bytes(path.read_bytes()[:-cut])
  folder = make(tmp_path, resume=True)
  assert [r["id"] for r in folder.records()] == ["a"]
  folder.rewrite(folder.records())  # as a resumed run does before it appends
  folder.append([{"id": "c"}])
  assert [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()] == ["a", "c"]


def test_whole_records_are_not_touched(tmp_path):
  folder = make(tmp_path)
  assert folder.records() == []
  records = [{"id": "a", "text": "line\nbreak \u2028 \x85 \r \u0000"}, {"id": "b", "x": [1.5, None, True]}]
  folder.append(records[:1])
  folder.append(records[1:])
  assert folder.records() == records
  assert folder.records() == records
  assert (tmp_path / run_folder.RECORDS).read_bytes().count(b"\n") == 2


def test_not_a_number_is_refused_before_anything_is_written(tmp_path):
  folder = make(tmp_path)
  with pytest.raises(ValueError):
    folder.append([{"id": "a"}, {"id": "b", "x": float("nan")}])
  assert folder.records() == []
  folder.write_json("summary.json", {"a": 1})
  with pytest.raises(ValueError):
    folder.write_json("summary.json", {"a": float("inf")})
  assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}
  assert set(files(tmp_path)) - {run_folder.RECORDS} == {"config.json", "summary.json"}


def test_rewrite_replaces_all_records(tmp_path):
  folder = make(tmp_path)
  folder.append([{"id": "a"}, {"id": "b"}])
  folder.rewrite([{"id": "b"}])
  assert folder.records() == [{"id": "b"}]
  folder.rewrite([])
  assert folder.records() == []
  assert set(files(tmp_path)) == {"config.json", run_folder.RECORDS}


def test_resume_of_nothing_is_refused(tmp_path):
  """A slip in the folder's name must not start all over."""
  with pytest.raises(ValueError, match="--resume"):
    make(tmp_path / "slip", resume=True)
  assert not (tmp_path / "slip").exists()
