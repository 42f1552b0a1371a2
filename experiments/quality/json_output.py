"""JSON: does it parse, does it keep the schema, has it the wanted values.

- `only_json`: the whole text is JSON, nothing around it.
- `parses`: the whole text, or else its first fenced block, is JSON (RFC 8259: no NaN, no key twice).
- `valid`: it keeps the row's schema (see `rows.schema`); false where nothing parses. Null without a schema, or where
  the schema itself is wrong or refers to another document: nothing is fetched.
- `fields_right`: where the reference is a JSON object, the share of its fields that the answer has with an equal value.
"""
import json

from experiments.quality import fences
from experiments.quality import libraries
from experiments.quality import rows
from experiments.workloads import Request

NOTHING = object()  # no JSON: null is a value


def judge(request: Request, text: str) -> dict[str, float | bool | None]:
  """See the module.

  Raises:
    ValueError: jsonschema is not installed, and the row has a schema.
  """
  value = read(text)
  return {"only_json": strict(text) is not NOTHING, "parses": value is not NOTHING,
          "valid": _valid(value, rows.schema(request)), "fields_right": _fields_right(request, value)}


def read(text: str):
  """The JSON of a whole text, else of its first fenced block, else `NOTHING`."""
  value = strict(text)
  blocks = fences.split(text)[0] if value is NOTHING else ()
  return strict(blocks[0].body) if blocks else value


def strict(text: str):
  """The JSON that a text is, or `NOTHING`."""
  try:
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
  except (ValueError, RecursionError):
    return NOTHING


def _refuse(name):
  raise ValueError(name)


def _once(pairs):
  row = dict(pairs)
  if len(row) < len(pairs):
    raise ValueError("a key stands there twice")
  return row


def _valid(value, schema):
  if schema is None:
    return None
  jsonschema, referencing = libraries.load("jsonschema"), libraries.load("referencing")
  kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
  try:
    kind.check_schema(schema)
    # A registry of its own: the default one would fetch what a "$ref" names.
    checker = kind(schema, registry=referencing.Registry())
    return value is not NOTHING and checker.is_valid(value)
  except (jsonschema.SchemaError, referencing.exceptions.Unresolvable, ValueError, TypeError, RecursionError):
    return None


def _fields_right(request, value):
  wanted = strict(rows.reference(request) or "")
  if not isinstance(wanted, dict) or not wanted:
    return None
  given = value if isinstance(value, dict) else {}
  return sum(name in given and same(given[name], wanted[name]) for name in wanted) / len(wanted)


def same(a, b) -> bool:
  """Equality of JSON: 1 is 1.0, and neither is true."""
  if isinstance(a, bool) or isinstance(b, bool):
    return a is b
  if isinstance(a, list) and isinstance(b, list):
    return len(a) == len(b) and all(map(same, a, b))
  if isinstance(a, dict) and isinstance(b, dict):
    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
  return a == b
