"""Reads what an answer must be: functions to call, a JSON schema, a regular expression, one of some choices."""
from collections.abc import Callable
import functools
import json

from specjax.serving import grammars
from specjax.serving.openai_fields import Fields, Refused

# Makes a grammar, or raises ValueError; called when it is known that nothing else says what the text must be.
Maker = Callable[[], grammars.Grammar]


def tools(fields: Fields) -> tuple[list[dict], Maker | None]:
  """The functions that the model is told of, and the grammar of a call where one is demanded; raises Refused."""
  given = fields.items("tools", lambda _: True, "functions")
  names = [_name(Fields(tool, f"tools[{index}]")) for index, tool in enumerate(given)]
  if len(set(names)) < len(names):
    raise Refused(f"tools holds a name twice: {', '.join(names)}; give each function its own", "tools")
  choice, parallel = fields.value("tool_choice", "auto" if given else "none"), fields.flag("parallel_tool_calls", True)
  if choice == "none":
    return [], None
  if not given:
    fields.refuse("tool_choice", "it needs tools")
  if choice == "auto":
    _check_free(fields, given, parallel)
    return given, None
  if choice == "required":
    return given, functools.partial(grammars.Grammar.tool_calls, given, parallel=parallel)
  if not isinstance(choice, dict):
    fields.refuse("tool_choice", "it must be none, auto, required or a function's name in an object")
  chosen = _chosen(Fields(choice, "tool_choice"), names)
  return given, functools.partial(grammars.Grammar.tool_calls, [given[names.index(chosen)]], parallel=False)


def _name(fields):
  """The name of a function that is what it should be."""
  fields.one_of("type", ("function",))
  function = Fields(fields.required("function"), fields.path("function"))
  function.required("name")
  name = function.text("name")
  if not name:
    function.refuse("name", "it must not be empty")
  function.text("description")
  Fields(function.value("parameters", {}), function.path("parameters"))
  function.flag("strict")
  function.done()
  fields.done()
  return name


def _check_free(fields, given, parallel):
  """Refuses what only holds where calls are enforced."""
  why = 'only tool_choice "required" or a named function can enforce it'
  if not parallel:
    fields.refuse("parallel_tool_calls", why)
  for index, tool in enumerate(given):
    if tool["function"].get("strict"):
      Fields(tool["function"], f"tools[{index}].function").refuse("strict", why)


def _chosen(choice, names):
  choice.one_of("type", ("function",))
  function = Fields(choice.required("function"), choice.path("function"))
  name = function.one_of("name", tuple(names))
  function.done()
  choice.done()
  return name


def grammar(fields: Fields, forced: Maker | None = None) -> grammars.Grammar | None:
  """What the text must be, None for anything.

  It is said by `response_format`, `structured_outputs` or a `guided_` field, or by `forced`, a demanded call.

  Raises:
    Refused: two of them at once, or something that no grammar says.
  """
  found = {} if forced is None else {"tool_choice": forced}
  _add_format(fields, found)
  _add_structured(fields, found)
  for kind in _MAKERS:
    _add(found, fields, f"guided_{kind}", kind)
  if len(found) > 1:
    raise Refused(f"{' and '.join(found)} each say what the text must be; give one of them", list(found)[-1])
  for field, make in found.items():
    try:
      return make()
    except ValueError as error:
      raise Refused(f"{field}: {error}", field) from error
  return None


def _add_format(fields, found):
  if "response_format" not in fields:
    return
  given = Fields(fields.value("response_format"), "response_format")
  kind = given.one_of("type", ("text", "json_object", "json_schema"))
  if kind == "json_object":
    found["response_format"] = grammars.Grammar.json_object
  if kind == "json_schema":
    inner = Fields(given.required("json_schema"), given.path("json_schema"))
    inner.required("schema")
    _add(found, inner, "schema", "json")
    inner.text("name")
    inner.text("description")
    inner.flag("strict")
    inner.done()
  given.done()


def _add_structured(fields, found):
  if "structured_outputs" not in fields:
    return
  given = Fields(fields.value("structured_outputs"), "structured_outputs")
  for kind in _MAKERS:
    _add(found, given, kind, kind)
  if given.flag("json_object"):
    found[given.path("json_object")] = grammars.Grammar.json_object
  given.done()


def _add(found, fields, field, kind):
  """Notes what makes the grammar of a field, if it is there. What its value says is the grammar's to judge."""
  value = fields.value(field)
  if value is not None:
    found[fields.path(field)] = _MAKERS[kind](fields, field, value)


def _schema(fields, field, value):
  try:
    schema = json.loads(value) if isinstance(value, str) else value
  except ValueError:
    schema = None
  if not isinstance(schema, dict):
    fields.refuse(field, "it must be a JSON schema, an object")
  return functools.partial(grammars.Grammar.json_schema, schema)


def _regex(fields, field, value):
  if not isinstance(value, str):
    fields.refuse(field, "it must be a string")
  return functools.partial(grammars.Grammar.regex, value)


def _lark(fields, field, value):
  if not isinstance(value, str):
    fields.refuse(field, "it must be a string, a grammar in Lark as llguidance reads it")
  return functools.partial(grammars.Grammar.lark, value)


def _choice(fields, field, value):
  if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
    fields.refuse(field, "it must be a list of strings, one or more")
  return functools.partial(grammars.Grammar.choice, value)


_MAKERS = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _lark}
