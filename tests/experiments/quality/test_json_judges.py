"""JSON and tool calls: right, wrong, broken and hostile answers."""
import json
import urllib.request

import pytest

from experiments.quality import json_output
from experiments.quality import rows
from experiments.quality import tool_calls
from requests_of import request

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def judge(text, prompt="Write it.", **fields):
  return json_output.judge(request(prompt, "json", **fields), text)


@pytest.mark.parametrize("text, only, parses, valid", [
    ('{"a": 1}', True, True, True), ('{"a": "1"}', True, True, False), ('{"a": 1, "b": 2}', True, True, False),
    ('Here:\n```json\n{"a": 1}\n```', False, True, True), ('Here: {"a": 1}', False, False, False),
    ('```json\n{"a": 1\n```', False, False, False), ('{"a": 1}\n{"a": 1}', False, False, False),
    ('{"a": NaN}', False, False, False), ('{"a": 1, "a": 2}', False, False, False), ("", False, False, False),
    ("[" * 100_000, False, False, False), ("9" * 10_000, False, False, False), ("null", True, True, False)])
def test_json(text, only, parses, valid):
  found = judge(text, schema=SCHEMA)
  assert found == {"only_json": only, "parses": parses, "valid": valid, "fields_right": None}
  assert judge(text)["valid"] is None


def test_where_a_schema_comes_from():
  text = json.dumps(SCHEMA)
  assert rows.schema(request(schema=text)) == SCHEMA
  assert rows.schema(request(f"Give [one] {{object}} valid under {text} please. {{}}")) == SCHEMA
  assert rows.schema(request('Use the keys {"name": "", "date": ""}')) is None
  assert rows.schema(request("Nothing [1, 2] here {")) is None


def test_nothing_is_fetched_for_a_schema(monkeypatch):
  monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: pytest.fail("it was fetched"))
  assert judge("1", schema={"$ref": "http://example.com/schema.json"})["valid"] is None
  assert judge("1", schema={"$ref": "#/nowhere"})["valid"] is None


def test_a_wrong_schema_says_nothing():
  assert judge("1", schema={"type": "nonsense"})["valid"] is None
  assert judge("1", schema={"$ref": "#"})["valid"] is None  # it never ends


def test_fields_of_a_reference():
  reference = '{"a": 1, "b": true, "c": [1, {"d": null}], "e": "x"}'
  judged = lambda text: judge(text, reference=reference)["fields_right"]
  assert judged(reference) == 1
  assert judged('{"a": 1.0, "b": 1, "c": [1, {"d": null}], "more": 2}') == 0.5
  assert judged("[1]") == judged("broken") == 0
  assert judge("{}", reference="words")["fields_right"] is None


PROMPT = 'Functions:\n[{"name": "f", "parameters": {}}, ' \
         '{"type": "function", "function": {"name": "g", "parameters": {}}}]'
F = {"name": "f", "arguments": {"x": 1, "y": "Google"}}


def calls(text, reference=None, prompt=PROMPT, **fields):
  text = text if isinstance(text, str) else json.dumps(text)
  fields |= {} if reference is None else {"reference": reference if isinstance(reference,
                                                                               str) else json.dumps(reference)}
  return tool_calls.judge(request(prompt, "tool_call", **fields), text)


def test_a_right_call():
  right = {"parses": True, "known": True, "names_right": True, "right": True}
  assert calls(F, F) == calls([F], F) == calls(F, [F]) == right
  assert calls({"function": {"name": "f", "parameters": {"x": 1.0, "y": "google"}}}, F) == right
  assert calls({"name": "f", "arguments": json.dumps(F["arguments"])}, F) == right
  assert calls(f"```json\n{json.dumps(F)}\n```", F) == right


@pytest.mark.parametrize("text, names", [
    ({"name": "f", "arguments": {"x": 2, "y": "Google"}}, True), ({"name": "f", "arguments": {"x": 1}}, True),
    ({"name": "f", "arguments": {"x": 1, "y": "Google", "z": 1}}, True),
    ({"name": "f", "arguments": {"x": True, "y": "Google"}}, True), ({"name": "g", "arguments": F["arguments"]}, False),
    ([F, F], False), ([], False), ("I call f.", False), ({"name": "f", "arguments": "{"}, False), ({"name": 1}, False),
    ({"name": "f", "arguments": [1]}, False), ("null", False), ("[[[[", False)])
def test_wrong_calls(text, names):
  found = calls(text, F)
  assert (found["names_right"], found["right"]) == (names, False)


def test_the_leaderboards_references():
  wanted = [{"f": {"x": [1, 2], "y": ["", "a b"], "z": [[1, 2]]}},
            {"f": {"x": [3], "z": [[]], "o": [{"k": ["v", "w"]}]}}]
  first, second = {"x": 2, "z": [1, 2]}, {"x": 3, "z": [], "o": {"k": "W"}}
  call = lambda *arguments: [{"name": "f", "arguments": a} for a in arguments]
  assert calls(call(first, second), wanted)["right"] and calls(call(second, first), wanted)["right"]
  assert calls(call(first | {"y": "A-B"}, second), wanted)["right"]
  for wrong in (call(first), call(first, first), call(first, second | {"o": {"k": "x"}}),
                call(first, second | {"o": {}}),
                call(first | {"x": 3}, second)):
    assert not calls(wrong, wanted)["right"]


def test_no_call_may_be_right():
  assert calls("None of them fits.", "[]")["right"] is True
  assert calls(F, "[]")["right"] is False


def test_unknown_names_and_missing_references():
  assert calls({"name": "h", "arguments": {}}) == {"parses": True, "known": False, "names_right": None, "right": None}
  assert calls("no", prompt="Call something.") == {"parses": False, "known": None, "names_right": None, "right": None}
  assert calls(F, tools=[{"name": "h", "parameters": {}}])["known"] is False
  assert calls(F, "not JSON")["right"] is None


def test_many_equal_calls_end():
  many = [{"name": "f", "arguments": {"x": i}} for i in range(40)]
  assert calls(many, many)["right"] is True
  assert calls(many, many[:-1] + [{"name": "f", "arguments": {"x": -1}}])["right"] is False
