"""What a row of a workload tells its judges, from its own fields or, where it has none, from the text of its prompt.

Read are `reference`, `tests` (a list of statements, or `test` and `entry_point` as HumanEval has them, or `test_list`
as MBPP has it), `schema`, `tools` and `document`. Without them:
- tests are the lines `assert ...` of the prompt, else those of its examples `>>> expression` (in the docstrings of its
  code and in its words) whose value is a literal or whose expression compares something;
- a schema is the first JSON object of the prompt that has "$schema", or "type" with "properties" or "items";
- tools are the names in the prompt's JSON of functions;
- the document of a summary is the prompt.
A conversation has a reference for none of its turns: nothing says which turn a row's reference belongs to.
"""
import ast
import doctest
import json

from experiments.quality import fences
from experiments.workloads import Request

_DECODER = json.JSONDecoder()


def reference(request: Request) -> str | None:
  """The right answer as text; None where there is none."""
  value = request.fields.get("reference")
  if len(request.turns) > 1 or not isinstance(value, str) or not value.strip():
    return None
  return value


def document(request: Request) -> str:
  """The text that an answer must be true to."""
  value = request.fields.get("document")
  return value if isinstance(value, str) else "\n".join(request.turns)


def tests(request: Request) -> list[str]:
  """Python statements that a right answer lets pass, each alone; empty where there are none."""
  fields = request.fields
  given = fields.get("tests", fields.get("test_list"))
  if isinstance(given, str):
    return [given]
  if isinstance(given, list):
    return [test for test in given if isinstance(test, str)]
  if isinstance(fields.get("test"), str):
    call = f"\ncheck({fields['entry_point']})" if isinstance(fields.get("entry_point"), str) else ""
    return [fields["test"] + call]
  prompt = request.turns[-1]
  found = [line.strip() for line in prompt.split("\n") if line.lstrip().startswith("assert ")]
  return list(filter(_parsed, found)) or _examples(prompt)


def _examples(prompt):
  blocks, around = fences.split(prompt)
  found = []
  for text in [*(doc for block in blocks for doc in _docstrings(block.body)), around]:
    try:
      examples = doctest.DocTestParser().get_examples(text)
    except ValueError:  # a prompt may hold anything
      continue
    found += filter(None, map(_test, examples))
  return found


def _docstrings(source):
  tree = _parsed(source)
  nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)] if tree is not None else []
  return [doc for doc in map(ast.get_docstring, nodes) if doc]


def _test(example):
  """The statement that holds an example; None where it cannot be told what it wants."""
  expression, want = _parsed(example.source, "eval"), _literal(example.want)
  if expression is None:
    return None
  if want is not None:
    return f"assert ({example.source.strip()}) == ({want})"
  compares = not example.want.strip() and isinstance(expression.body, ast.Compare)
  return f"assert {example.source.strip()}" if compares else None


def _parsed(source, mode="exec"):
  try:
    return ast.parse(source.strip(), mode=mode)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def _literal(want):
  try:
    ast.literal_eval(want.strip())
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
    return None
  return want.strip()


def schema(request: Request) -> dict | None:
  """The JSON schema that the answer must keep."""
  value = request.fields.get("schema")
  if isinstance(value, str):
    value = next(_values(value), None)
  if isinstance(value, dict):
    return value
  return next((found for found in _values(request.turns[-1]) if isinstance(found, dict) and _is_schema(found)), None)


def _is_schema(value):
  return "$schema" in value or isinstance(value.get("type"), str) and ("properties" in value or "items" in value)


def tool_names(request: Request) -> set[str]:
  """Names of the functions that an answer may call."""
  given = request.fields.get("tools")
  return set().union(*map(_names, [given] if given is not None else _values(request.turns[0])))


def _names(value):
  if isinstance(value, list):
    return set().union(*map(_names, value))
  if not isinstance(value, dict):
    return set()
  if isinstance(value.get("function"), dict):
    return _names(value["function"])
  return {value["name"]} if isinstance(value.get("name"), str) and "parameters" in value else set()


def _values(text):
  """The JSON objects and lists that stand in a text, outermost ones, in order."""
  at = 0
  while True:
    at = min((i for i in (text.find("{", at), text.find("[", at)) if i >= 0), default=-1)
    if at < 0:
      return
    try:
      value, at = _DECODER.raw_decode(text, at)
      yield value
    except (ValueError, RecursionError):
      at += 1
