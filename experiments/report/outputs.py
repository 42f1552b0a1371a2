"""What the models wrote: requests chosen for the page, with the outputs of all methods side by side.

Every string here is raw model or prompt text. The template escapes it; nothing in this module may.
"""

from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from experiments.report import tables
from experiments.report.run_folder import PLAIN

MAX_REQUESTS = 60
MAX_TOKENS = 60_000  # over all shown outputs: keeps the page at a few MB, whatever the number of methods


@dataclasses.dataclass(frozen=True)
class Token:
  """A token of an output: its id, its text, a visible mark where the text is blank, and where it came from."""
  id: int | None
  piece: str
  mark: str
  drafted: bool


@dataclasses.dataclass(frozen=True)
class Output:
  """What one method wrote. `tokens` is empty where the run kept only the text."""
  method: str
  tokens: list[Token]
  text: str
  facts: list[str]
  note: str


@dataclasses.dataclass(frozen=True)
class Request:
  """A request with its outputs, in the order in which the methods are listed."""
  id: str
  category: str
  label: str
  prompt: str
  excerpt: str
  outputs: list[Output]


def select(lines: Sequence[dict[str, Any]], methods: Sequence[str], *, max_requests: int = MAX_REQUESTS,
           max_tokens: int = MAX_TOKENS) -> tuple[list[Request], int]:
  """Chooses requests of the first repeat, taking turns between categories so that each is represented.

  Args:
    lines: the records of `requests.jsonl`.
    methods: the order of the outputs within a request.
    max_requests: how many requests to show at most.
    max_tokens: how many output tokens to show at most; the first request is shown whatever its length.

  Returns:
    The requests, in the order of the file, and how many were left out.
  """
  together = {}
  for line in lines:
    if line.get("repeat") in (None, 0):
      key = tuple(str(line.get(name)) for name in ("id", "turn", "category", "language", "temperature"))
      together.setdefault(key, []).append(line)
  seen = {}
  turns = []
  for index, (key, members) in enumerate(together.items()):
    place = seen[key[2]] = seen.get(key[2], -1) + 1
    turns.append((place, index, members))
  chosen, room = [], max_tokens
  for _, index, members in sorted(turns, key=lambda turn: turn[:2])[:max_requests]:
    room -= sum(len(_list(line, "token_ids")) for line in members)
    if chosen and room < 0:
      break
    chosen.append((index, members))
  requests = [_request(members, methods) for _, members in sorted(chosen, key=lambda item: item[0])]
  return requests, len(together) - len(requests)


def _request(members: Sequence[dict[str, Any]], methods: Sequence[str]) -> Request:
  first = members[0]
  order = {method: place for place, method in enumerate(methods)}
  members = sorted(members, key=lambda line: order.get(line["method"], len(order)))
  plain = next((_list(line, "token_ids") for line in members if line["method"] == PLAIN), None)
  prompt = first.get("prompt") or ""
  if not isinstance(prompt, str):
    prompt = json.dumps(prompt, ensure_ascii=False, indent=2)
  label = [str(first.get("id"))]
  if first.get("turn"):
    label.append(f"turn {first['turn']}")
  if first.get("language"):
    label.append(str(first["language"]))
  if first.get("temperature"):
    label.append(f"temperature {first['temperature']}")
  excerpt = " ".join(prompt[:400].split())
  return Request(
      id=str(first.get("id")), category=str(first.get("category")), label=" · ".join(label), prompt=prompt,
      excerpt=excerpt if len(excerpt) <= 90 else excerpt[:89] + "…",
      outputs=[_output(line, plain) for line in members])


def _output(line: dict[str, Any], plain: list[int] | None) -> Output:
  ids, pieces, drafted = (_list(line, name) for name in ("token_ids", "pieces", "from_draft"))
  notes = []
  tokens = []
  if pieces and len(ids) == len(pieces) == len(drafted):
    tokens = [Token(i, str(piece), _mark(str(piece)), bool(d)) for i, piece, d in zip(ids, pieces, drafted)]
  elif pieces:
    notes.append("token ids, pieces and origins differ in number: text only")
  elif ids:
    notes.append("no token pieces recorded: text only")
  if plain is not None and line["method"] != PLAIN and ids:
    if ids == plain:
      notes.append("same tokens as plain")
    else:
      first = next((i for i, (a, b) in enumerate(zip(ids, plain)) if a != b), min(len(ids), len(plain)))
      notes.append(f"differs from plain from token {first} on")
  return Output(
      method=str(line["method"]), tokens=tokens, text=str(line.get("text") or ""), facts=_facts(line, drafted),
      note="; ".join(notes))


def _facts(line: dict[str, Any], drafted: list[bool]) -> list[str]:
  """The finish reason, the counters and the times of an output."""
  facts = [f"finish: {line.get('finish_reason') or tables.DASH}"]
  if line.get("batch_size") not in (None, 1):
    facts.append(f"batch size {line['batch_size']}")
  if drafted:
    facts.append(f"{sum(map(bool, drafted))} of {len(drafted)} tokens from the draft")
  counters = line.get("counters")
  for name, value in (counters.items() if isinstance(counters, dict) else ()):
    if isinstance(value, int):
      facts.append(f"{name.replace('_', ' ')} {value:,}")
    elif isinstance(value, float) and value:  # of a lossy verifier
      facts.append(f"{name.replace('_', ' ')} {value:.3g}")
  for name, value in line.items():
    if name.endswith("_ms") and isinstance(value, int | float):
      facts.append(f"{name.removesuffix('_ms').replace('_', ' ')} {tables.short(value)} ms")
  return facts


def _mark(piece: str) -> str:
  """A sign for a piece that would show nothing to colour."""
  if piece.strip():
    return ""
  return "↵" if "\n" in piece else "" if piece else "∅"


def _list(line: dict[str, Any], name: str) -> list[Any]:
  value = line.get(name)
  return value if isinstance(value, list) else []
