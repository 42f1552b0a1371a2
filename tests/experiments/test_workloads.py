"""Tests for the bundled workload and for the reader of workload files."""

import collections
import dataclasses
import json
import re

import pytest

from experiments.workloads import CATEGORIES
from experiments.workloads import read_workload
from experiments.workloads import Request


def _row(name="a", **changes):
  """Returns a valid row with some fields changed; a field changed to ... is left out."""
  row = {"id": name, "category": "chat", "lang": "en", "prompt": "Hello there"} | changes
  return {field: value for field, value in row.items() if value is not ...}


def _write(path, *rows):
  """Writes rows (objects, or lines as they are) to a file and returns its name as a spec."""
  lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
  path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
  return str(path)


def test_bundled_covers_every_category():
  requests = read_workload("bundled")
  count = collections.Counter(request.category for request in requests)
  assert tuple(count) == CATEGORIES
  assert len(CATEGORIES) == 13
  assert min(count.values()) >= 5


def test_bundled_ids_and_texts_are_unique():
  requests = read_workload("bundled")
  assert len({request.id for request in requests}) == len(requests)
  assert len({request.turns for request in requests}) == len(requests)


def test_bundled_languages():
  requests = read_workload("bundled")
  assert {"ko", "ja", "zh", "ar", "es"} <= {r.language for r in requests if r.category == "multilingual"}
  assert {r.language for r in requests if r.category == "mixed_ko_en"} == {"ko"}


def test_bundled_sizes_suit_a_small_model():
  for request in read_workload("bundled"):
    length = sum(map(len, request.turns))
    if request.category == "long_qa":
      assert 2000 <= length <= 4000, request.id
    else:
      assert length <= 1500, request.id


def test_other_fields_are_handed_on(tmp_path):
  spec = _write(tmp_path / "own.jsonl", _row("a", reference="4", tests=["assert 1"], schema={"type": "object"}), _row("b"))
  first, second = read_workload(spec)
  assert first.fields == {"reference": "4", "tests": ["assert 1"], "schema": {"type": "object"}} and second.fields == {}
  assert hash(first) != hash(second)


def test_bundled_has_conversations():
  chats = read_workload("bundled", categories=["chat"])
  assert sum(len(request.turns) > 1 for request in chats) >= 2


def test_bundled_does_not_depend_on_the_working_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert read_workload("bundled")[0].source == "experiments/workloads/bundled.jsonl:1"


def test_reads_prompts_and_turns(tmp_path):
  second = _row("b", prompt=..., turns=["One", "둘"], category="own", lang="ko")
  spec = _write(tmp_path / "own.jsonl", _row("a"), "", "  \t", second)
  assert read_workload(spec) == [
    Request(id="a", category="chat", language="en", turns=("Hello there",), source=f"{spec}:1"),
    Request(id="b", category="own", language="ko", turns=("One", "둘"), source=f"{spec}:4"),
  ]


def test_requests_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    read_workload("bundled")[0].id = "other"


def test_text_is_kept_as_it_is(tmp_path):
  # U+2028 and U+0085 would end a line for str.splitlines; other fields, a byte order mark and CRLF do no harm.
  text = "  first\u2028second\x85third\n\n  end "
  path = tmp_path / "own.jsonl"
  line = json.dumps(_row(prompt=text, reference=[1], note=None), ensure_ascii=False)
  path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\r\n")
  assert [request.turns for request in read_workload(str(path))] == [(text,)]


def test_reads_several_files_in_order(tmp_path):
  first = _write(tmp_path / "first.jsonl", _row("a"), _row("b"))
  second = _write(tmp_path / "second.jsonl", _row("c"))
  requests = read_workload(f"{second}, bundled,{first}")
  own = [request.id for request in requests if request.source.startswith(str(tmp_path))]
  assert own == ["c", "a", "b"]
  assert requests[1:-2] == read_workload("bundled")


def test_selects_categories_and_languages():
  requests = read_workload("bundled", categories=["multilingual", "translation"], languages=iter(["ko", "es"]))
  assert {(r.category, r.language) for r in requests} == {
    ("multilingual", "ko"), ("multilingual", "es"), ("translation", "ko"), ("translation", "es")}
  assert requests == [r for r in read_workload("bundled") if r in requests]


def test_limit_counts_per_category():
  requests = read_workload("bundled", limit=1)
  assert [request.category for request in requests] == list(CATEGORIES)
  everything = read_workload("bundled")
  assert requests == [next(r for r in everything if r.category == name) for name in CATEGORIES]
  assert len(read_workload("bundled", limit=2)) == 26
  assert read_workload("bundled", limit=1000) == everything


def test_limit_counts_after_the_selection():
  requests = read_workload("bundled", categories=["multilingual"], languages=["ja"], limit=1)
  assert [request.language for request in requests] == ["ja"]


@pytest.mark.parametrize(
  ("line", "found", "needed"),
  [
    ("{'id': 1}", "is not JSON (Expecting property name", "one JSON object"),
    ('{"id": "a"', "is not JSON", "one JSON object"),
    ('{"id": "a"} {"id": "b"}', "is not JSON (Extra data", "one JSON object"),
    ("[" * 100_000, "", "one JSON object with a request is needed"),
    ('{"id": "a", "id": "b"}', "the field 'id' occurs twice", "one JSON object"),
    ('["a"]', 'found a list (["a"])', "a JSON object"),
    ('"text"', 'found a string ("text")', "a JSON object"),
    ("7", "found a number (7)", "a JSON object"),
    ("null", "found null", "a JSON object"),
    ("{}", "the field 'id' is missing (fields found: none)", "needs 'id', 'category', 'lang'"),
    (_row(id=...), "the field 'id' is missing", "needs 'id', 'category', 'lang'"),
    (_row(category=...), "the field 'category' is missing (fields found: 'id', 'lang', 'prompt')", "needs 'id'"),
    (_row(lang=...), "the field 'lang' is missing", "needs 'id', 'category', 'lang'"),
    (_row(prompt=...), "found neither 'prompt' nor 'turns'", "exactly one is needed"),
    (_row(turns=["Hi"]), "found both 'prompt' and 'turns'", "exactly one is needed"),
    (_row(id=3), "'id' is a number (3)", "a string is needed"),
    (_row(category=None), "'category' is null", "a string is needed"),
    (_row(lang=["en"]), "'lang' is a list", "a string is needed"),
    (_row(prompt=True), "'prompt' is a boolean (true)", "a string is needed"),
    (_row(prompt={"text": "x" * 100}), "'prompt' is an object ({\"text\": \"xxx", "a string is needed"),
    (_row(id=""), "'id' is empty or blank ('')", "text in it is needed"),
    (_row(lang=" "), "'lang' is empty or blank (' ')", "text in it is needed"),
    (_row(prompt=" \n"), "'prompt' is empty or blank", "text in it is needed"),
    (_row(prompt=..., turns="Hi"), "'turns' is a string (\"Hi\")", "a list of at least one user message"),
    (_row(prompt=..., turns=[]), "'turns' is an empty list", "a list of at least one user message"),
    (_row(prompt=..., turns=["Hi", 5]), "turn 2 of 'turns' is a number (5)", "a string is needed"),
    (_row(prompt=..., turns=["Hi", ""]), "turn 2 of 'turns' is empty", "text in it is needed"),
    (json.dumps(_row(prompt="x\ud800")), "'prompt' holds half of a surrogate pair", "UTF-8 is needed"),
  ],
)
def test_bad_line_is_named(tmp_path, line, found, needed):
  spec = _write(tmp_path / "own.jsonl", _row("first"), "", line)
  with pytest.raises(ValueError, match="^" + re.escape(f"{spec}:3: ")) as error:
    read_workload(spec)
  assert found in str(error.value)
  assert needed in str(error.value)


def test_everything_is_checked_before_the_selection(tmp_path):
  good = _write(tmp_path / "good.jsonl", _row("a"))
  bad = _write(tmp_path / "bad.jsonl", _row("b"), _row("c", category="math", prompt=""))
  with pytest.raises(ValueError, match=re.escape(f"{bad}:2: 'prompt' is empty")):
    read_workload(f"{good},{bad}", categories=["chat"], limit=1)


def test_duplicate_id_in_one_file(tmp_path):
  spec = _write(tmp_path / "own.jsonl", _row("a"), _row("b"), _row("a"))
  with pytest.raises(ValueError, match=re.escape(f"{spec}:3: the id 'a' was already used at {spec}:1; every request")):
    read_workload(spec)


def test_duplicate_id_across_files(tmp_path):
  spec = _write(tmp_path / "own.jsonl", _row("b"), _row("chat-02"))
  message = f"{spec}:2: the id 'chat-02' was already used at experiments/workloads/bundled.jsonl:2; every request"
  with pytest.raises(ValueError, match=re.escape(message)):
    read_workload(f"bundled,{spec}")


def test_missing_file(tmp_path):
  path = str(tmp_path / "nowhere.jsonl")
  with pytest.raises(ValueError, match=re.escape(f"there is no workload file {path!r}") + ".*'bundled'"):
    read_workload(path)


def test_folder_is_not_a_workload(tmp_path):
  with pytest.raises(ValueError, match=re.escape(f"{str(tmp_path)!r} cannot be read (Is a directory)") + ".*'bundled'"):
    read_workload(str(tmp_path))


def test_file_that_is_not_utf8(tmp_path):
  path = tmp_path / "own.jsonl"
  path.write_bytes(json.dumps(_row("a")).encode() + b"\n" + b'{"id": "b\xff"}\n')
  message = f"{path}:2: this is not UTF-8 (invalid start byte); a workload file must be UTF-8 text"
  with pytest.raises(ValueError, match=re.escape(message)):
    read_workload(str(path))


def test_file_without_requests(tmp_path):
  spec = _write(tmp_path / "own.jsonl", "", " ")
  with pytest.raises(ValueError, match=re.escape(f"{spec!r} holds no request; one JSON object a line is needed")):
    read_workload(f"bundled,{spec}")


@pytest.mark.parametrize("spec", ["", " ", "bundled,", ",bundled"])
def test_empty_part_of_a_spec(spec):
  with pytest.raises(ValueError, match=re.escape(f"the workload {spec!r} has an empty part")):
    read_workload(spec)


def test_unknown_category_lists_those_present(tmp_path):
  spec = _write(tmp_path / "own.jsonl", _row("a", category="poems"), _row("b"), _row("c", category="poems"))
  with pytest.raises(ValueError, match=re.escape("has no category 'math', 'x'; it has: poems, chat") + "$"):
    read_workload(spec, categories=["math", "chat", "x"])


def test_unknown_language_lists_those_present(tmp_path):
  spec = _write(tmp_path / "own.jsonl", _row("a", lang="fi"), _row("b"))
  with pytest.raises(ValueError, match=re.escape("has no language 'ko'; it has: fi, en") + "$"):
    read_workload(spec, languages=["ko"])


def test_selection_that_leaves_nothing():
  with pytest.raises(ValueError, match=r"no request in both the categories \['code'\] and .*\['ko'\]; .*: code in en$"):
    read_workload("bundled", categories=["code"], languages=["ko"])


@pytest.mark.parametrize("argument", ["categories", "languages"])
def test_selection_must_be_a_list_of_names(argument):
  with pytest.raises(ValueError, match=re.escape(f"{argument} is the string 'en'; a list of names is needed")):
    read_workload("bundled", **{argument: "en"})
  with pytest.raises(ValueError, match=f"{argument} is empty; at least one of these is needed, .* all: (chat|en), "):
    read_workload("bundled", **{argument: []})


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_bad_limit(limit):
  with pytest.raises(ValueError, match=re.escape(f"limit is {limit!r}; a whole number of at least 1 is needed")):
    read_workload("bundled", limit=limit)
