"""Reads workloads: files with the requests that an experiment sends to a model.

A workload file holds one JSON object a line:

- `id`: a name for the request, unique over everything that is read together;
- `category`: what kind of request it is (`CATEGORIES` lists those of the bundled file; others are welcome);
- `lang`: the language the answer is expected in, as a BCP-47 tag such as "en" or "ko";
- `prompt`, one user message, or `turns`, a list of user messages with the model's own replies fed in between.

Other fields are handed on as they are: those that judge an answer (`experiments.quality`) read a reference, tests or a
schema there. Blank lines are ignored.
"""

import collections
from collections.abc import Iterable
import dataclasses
import json
import pathlib
from typing import Any

BUNDLED = "bundled"
CATEGORIES = (
  "chat", "summarization", "rag", "code", "code_edit", "json", "tool_call", "math", "translation", "multilingual",
  "mixed_ko_en", "safety", "long_qa",
)

_OWN_FIELDS = ("id", "category", "lang", "prompt", "turns")
_BUNDLED_PATH = pathlib.Path(__file__).with_name("bundled.jsonl")
_BUNDLED_LABEL = "experiments/workloads/bundled.jsonl"  # The same on every machine, so that records can be compared.


@dataclasses.dataclass(frozen=True)
class Request:
  """One request of a workload.

  Attributes:
    id: The request's name, unique in the workload.
    category: The kind of request.
    language: The language the answer is expected in (BCP-47).
    turns: The user's messages, in order; a request with a single prompt has one.
    source: Where the request was read, as "file:line".
    fields: The line's other fields, as they are. Two requests are equal whatever stands there.
  """

  id: str
  category: str
  language: str
  turns: tuple[str, ...]
  source: str
  fields: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


def read_workload(
  spec: str,
  *,
  categories: Iterable[str] | None = None,
  languages: Iterable[str] | None = None,
  limit: int | None = None,
) -> list[Request]:
  """Reads the requests of a workload, in file order.

  Every line of every file is checked before any request is left out, so a mistake is reported whatever is selected.

  Args:
    spec: "bundled" for the project's own requests, paths of .jsonl files, or both, separated by commas. A file that is
      itself called "bundled" can be given as "./bundled".
    categories: The categories to keep; None keeps all of them.
    languages: The languages to keep; None keeps all of them.
    limit: Keeps the first `limit` requests of each category, counted after the selection by category and language;
      None keeps all of them.

  Returns:
    The requests, at least one.

  Raises:
    ValueError: A file cannot be read, a line is not a valid request, an id occurs twice, a category or language to keep
      occurs nowhere, the selection leaves nothing over, or `limit` is not a whole number of at least 1.
  """
  if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
    raise ValueError(f"limit is {limit!r}; a whole number of at least 1 is needed, or None to keep every request")
  parts = [part.strip() for part in spec.split(",")]
  if not all(parts):
    raise ValueError(
      f"the workload {spec!r} has an empty part; '{BUNDLED}', a path of a .jsonl file, or several of them separated by "
      "single commas are needed"
    )
  requests: list[Request] = []
  sources: dict[str, str] = {}
  for part in parts:
    for request in _read_file(part):
      if request.id in sources:
        raise ValueError(
          f"{request.source}: the id {request.id!r} was already used at {sources[request.id]}; every request of a "
          "workload needs an id of its own"
        )
      sources[request.id] = request.source
      requests.append(request)
  kept_categories = _check_names("category", categories, [request.category for request in requests], spec)
  kept_languages = _check_names("language", languages, [request.language for request in requests], spec)
  selected = []
  count: collections.Counter[str] = collections.Counter()
  for request in requests:
    if request.category not in kept_categories or request.language not in kept_languages:
      continue
    count[request.category] += 1
    if limit is None or count[request.category] <= limit:
      selected.append(request)
  if not selected:
    present = sorted({f"{r.category} in {r.language}" for r in requests if r.category in kept_categories})
    raise ValueError(
      f"the workload {spec!r} has no request in both the categories {sorted(kept_categories)} and the languages "
      f"{sorted(kept_languages)}; of these categories it has: {', '.join(present)}"
    )
  return selected


def _read_file(part: str) -> list[Request]:
  """Reads all requests of one part of a spec; ids are not compared."""
  bundled = part == BUNDLED
  path = _BUNDLED_PATH if bundled else pathlib.Path(part)
  label = _BUNDLED_LABEL if bundled else part
  try:
    data = path.read_bytes()
  except FileNotFoundError as error:
    raise ValueError(
      f"there is no workload file {str(path)!r}; an existing .jsonl file is needed, or '{BUNDLED}' for the requests "
      "that come with the project"
    ) from error
  except OSError as error:
    raise ValueError(
      f"the workload file {str(path)!r} cannot be read ({error.strerror}); a readable .jsonl file is needed, or "
      f"'{BUNDLED}' for the requests that come with the project"
    ) from error
  try:
    text = data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = data.count(b"\n", 0, error.start) + 1
    raise ValueError(
      f"{label}:{line}: this is not UTF-8 ({error.reason}); a workload file must be UTF-8 text"
    ) from error
  # Only newlines end a line: a JSON string may hold other separators, such as U+2028, as they are.
  lines = text.split("\n")
  requests = [_parse_line(line, f"{label}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
  if not requests:
    raise ValueError(f"the workload file {label!r} holds no request; one JSON object a line is needed")
  return requests


def _parse_line(line: str, source: str) -> Request:
  """Turns one line into a request or raises a ValueError that names its place."""
  try:
    row = json.loads(line, object_pairs_hook=_unique_fields)
  except RecursionError as error:
    raise ValueError(f"{source}: the JSON is nested too deeply; one JSON object with a request is needed") from error
  except ValueError as error:
    raise ValueError(f"{source}: this is not JSON ({error}); one JSON object with a request is needed") from error
  if not isinstance(row, dict):
    raise ValueError(f"{source}: found {_describe(row)}; a JSON object with a request is needed")
  name, category, language = (_text(row, field, source) for field in ("id", "category", "lang"))
  if ("prompt" in row) == ("turns" in row):
    found = "both 'prompt' and 'turns'" if "prompt" in row else "neither 'prompt' nor 'turns'"
    raise ValueError(
      f"{source}: found {found}; exactly one is needed: 'prompt' with one user message or 'turns' with a list of them"
    )
  if "prompt" in row:
    turns = (_text(row, "prompt", source),)
  else:
    values = row["turns"]
    if not isinstance(values, list) or not values:
      found = "an empty list" if values == [] else _describe(values)
      raise ValueError(f"{source}: 'turns' is {found}; a list of at least one user message is needed")
    turns = tuple(_check_text(value, f"turn {index} of 'turns'", source) for index, value in enumerate(values, 1))
  fields = {field: value for field, value in row.items() if field not in _OWN_FIELDS}
  return Request(id=name, category=category, language=language, turns=turns, source=source, fields=fields)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Builds a JSON object and refuses a field that is given twice, of which Python would keep the last."""
  row = dict(pairs)
  if len(row) < len(pairs):
    twice = next(field for field, count in collections.Counter(field for field, _ in pairs).items() if count > 1)
    raise ValueError(f"the field {twice!r} occurs twice in one object")
  return row


def _text(row: dict[str, Any], field: str, source: str) -> str:
  """Returns the text in a field that must be there."""
  if field not in row:
    fields = ", ".join(map(repr, row)) or "none"
    raise ValueError(
      f"{source}: the field {field!r} is missing (fields found: {fields}); a request needs 'id', 'category', 'lang' "
      "and 'prompt' or 'turns'"
    )
  return _check_text(row[field], f"{field!r}", source)


def _check_text(value: Any, what: str, source: str) -> str:
  """Returns a value that must be a string with something in it."""
  if not isinstance(value, str):
    raise ValueError(f"{source}: {what} is {_describe(value)}; a string is needed")
  if not value.strip():
    raise ValueError(f"{source}: {what} is empty or blank ({value!r}); a string with text in it is needed")
  try:
    value.encode("utf-8")
  except UnicodeEncodeError as error:
    raise ValueError(
      f"{source}: {what} holds half of a surrogate pair; text that can be written as UTF-8 is needed"
    ) from error
  return value


def _describe(value: Any) -> str:
  """Names a JSON value's type and shows the value, shortened."""
  if value is None:
    return "null"
  kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
  shown = json.dumps(value)
  return f"{kinds[type(value)]} ({shown if len(shown) <= 60 else shown[:57] + '...'})"


def _check_names(what: str, names: Iterable[str] | None, present: list[str], spec: str) -> set[str]:
  """Returns the names to keep, all of which must be present."""
  if names is None:
    return set(present)
  plural = {"category": "categories", "language": "languages"}[what]
  if isinstance(names, str):
    raise ValueError(f"{plural} is the string {names!r}; a list of names is needed, such as [{names!r}]")
  kept = list(names)
  available = ", ".join(dict.fromkeys(present))
  if not kept:
    raise ValueError(f"{plural} is empty; at least one of these is needed, or None to keep all: {available}")
  unknown = [name for name in kept if name not in present]
  if unknown:
    found = ", ".join(map(repr, unknown))
    raise ValueError(f"the workload {spec!r} has no {what} {found}; it has: {available}")
  return set(kept)
