"""Tool calls: does the answer call the right functions with the right arguments.

- `parses`: the answer is a JSON object or list of calls, {"name": ..., "arguments": {...}}; "parameters" for
  "arguments", a call inside "function", and arguments as JSON text are taken too.
- `known`: every name is a function of the prompt (or of the row's `tools`). Null where the prompt names none.
- `names_right`, `right`: the calls have the names, and the names and arguments, of the reference, in any order. Null
  without a reference; a reference `[]` wants no call, which an answer in words is.

A reference holds calls as above, with one allowed value an argument, or as the Berkeley leaderboard (BFCL) has them:
{name: {argument: [allowed values]}}, where "" among the values lets the argument be left out. Its comparison is taken
over as well: text without case, spaces and the signs ,./-_*^ ; 1 is 1.0.
"""
import re

from experiments.quality import json_output
from experiments.quality import rows
from experiments.workloads import Request


def judge(request: Request, text: str) -> dict[str, float | bool | None]:
  """See the module."""
  calls, known, wanted = _calls(json_output.read(text)), rows.tool_names(request), _wanted(request)
  found = {"parses": calls is not None, "known": None, "names_right": None, "right": None}
  if known:
    found["known"] = calls is not None and all(name in known for name, _ in calls)
  if wanted is not None:
    # An answer in words calls nothing: right where nothing was to be called.
    given = calls or []
    found["names_right"] = bool(calls or not wanted) and sorted(n for n, _ in given) == sorted(n for n, _ in wanted)
    found["right"] = found["names_right"] and _pair(given, wanted)
  return found


def _calls(value):
  """[(name, arguments)] of parsed JSON; None where it is anything else."""
  found = []
  for call in value if isinstance(value, list) else [value]:
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
      return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
      arguments = json_output.strict(arguments)
    if not isinstance(arguments, dict):
      return None
    found.append((call["name"], arguments))
  return found


def _wanted(request):
  """[(name, {argument: allowed values})] of the reference; None without one that can be read."""
  value = json_output.strict(rows.reference(request) or "")
  if value is json_output.NOTHING:
    return None
  exact = _calls(value)
  if exact is not None:
    return [(name, {key: [argument] for key, argument in arguments.items()}) for name, arguments in exact]
  value = value if isinstance(value, list) else [value]
  if not all(isinstance(call, dict) and all(isinstance(of, dict) for of in call.values()) for call in value):
    return None
  return [(name, {key: allowed if isinstance(allowed, list) else [allowed] for key, allowed in arguments.items()})
          for call in value for name, arguments in call.items()]


def _pair(given, wanted):
  """Whether the calls can be paired, each with one that allows it."""
  if not given:
    return True
  name, arguments = given[0]
  return any(name == wanted[i][0] and _allowed(arguments, wanted[i][1]) and
             _pair(given[1:], wanted[:i] + wanted[i + 1:]) for i in range(len(wanted)))


def _allowed(arguments, wanted):
  return set(arguments) <= set(wanted) and all(
      any(_same(arguments[key], value) for value in values) if key in arguments else "" in values
      for key, values in wanted.items())


def _same(given, wanted):
  """Below the first level BFCL lists the allowed values of an object's fields, too."""
  if isinstance(given, str) and isinstance(wanted, str):
    return _plain(given) == _plain(wanted)
  if isinstance(given, list) and isinstance(wanted, list):
    return len(given) == len(wanted) and all(map(_same, given, wanted))
  if isinstance(given, dict) and isinstance(wanted, dict):
    if json_output.same(given, wanted):
      return True
    return all(isinstance(values, list) for values in wanted.values()) and _allowed(given, wanted)
  return json_output.same(given, wanted)


def _plain(text):
  return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
