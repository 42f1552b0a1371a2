"""Which judges a request gets, and what they found, pooled over the requests of a group.

A metric is named "judge.metric". Repeats of a request write one text: the first is judged. What a judge cannot say is
null, and counts nowhere.
"""
import collections
from collections.abc import Callable
import dataclasses

from experiments.harness import statistics
from experiments.quality import code
from experiments.quality import json_output
from experiments.quality import language
from experiments.quality import libraries
from experiments.quality import long_documents
from experiments.quality import math
from experiments.quality import rows
from experiments.quality import safety
from experiments.quality import sandbox
from experiments.quality import stops
from experiments.quality import summarization
from experiments.quality import tool_calls
from experiments.quality import translation
from experiments.workloads import Request

_WITHOUT_LANGUAGE = ("code", "code_edit", "json", "tool_call", "math")  # or hardly any


@dataclasses.dataclass(frozen=True)
class Setting:
  """What judges must know of the run: its budget of output tokens, the target's context and end ids, and whether code
  that the models wrote may be executed."""
  max_new_tokens: int
  max_context: int
  eos_ids: tuple[int, ...] = ()
  run_code: bool = False


@dataclasses.dataclass(frozen=True)
class Judge:
  """Its call, (request, record, plain decoding's record or None, setting) -> metrics, and the categories that get it,
  None for all; a row that has one of `fields` gets it in any category."""
  call: Callable[[Request, dict, dict | None, Setting], dict[str, float | bool | None]]
  categories: tuple[str, ...] | None
  fields: tuple[str, ...] = ()


def _language(request, record, plain, setting):
  del plain, setting
  return language.judge(request, record["text"], tokens=len(record["token_ids"]),
                        prose=request.category not in _WITHOUT_LANGUAGE)


def _stops(request, record, plain, setting):
  return stops.judge(request, record["text"], token_ids=record["token_ids"], finish_reason=record["finish_reason"],
                     max_new_tokens=setting.max_new_tokens, eos_ids=setting.eos_ids,
                     plain_reason=plain and plain["finish_reason"])


JUDGES = {
    "code": Judge(lambda q, r, p, s: code.judge(q, r["text"], run_code=s.run_code), ("code", "code_edit"),
                  ("tests", "test_list", "entry_point")),
    "json": Judge(lambda q, r, p, s: json_output.judge(q, r["text"]), ("json",), ("schema",)),
    "tools": Judge(lambda q, r, p, s: tool_calls.judge(q, r["text"]), ("tool_call",), ("tools",)),
    "summary": Judge(lambda q, r, p, s: summarization.judge(q, r["text"]), ("summarization", "rag", "long_qa"),
                     ("document",)),
    "translation": Judge(lambda q, r, p, s: translation.judge(q, r["text"]), ("translation",)),
    "math": Judge(lambda q, r, p, s: math.judge(q, r["text"]), ("math",)),
    "safety": Judge(lambda q, r, p, s: safety.judge(q, r["text"], plain=p and p["text"]), ("safety",)),
    "language": Judge(_language, None),
    "stops": Judge(_stops, None),
    "length": Judge(lambda q, r, p, s: long_documents.judge(
        q, r["text"], prompt_tokens=r["prompt_tokens"], output_tokens=len(r["token_ids"]), max_context=s.max_context),
                    None),
}


def check(*, run_code: bool) -> str:
  """Imports every library and tries the sandbox if code may be run, before anything is measured.

  Returns:
    How code is kept apart, "" where none is run.

  Raises:
    ValueError: a library is missing, or nothing can be run here; says which and what to do.
  """
  for name in libraries.NAMES:
    libraries.load(name)
  return sandbox.describe() if run_code else ""


def applying(request: Request) -> list[str]:
  """Names of the judges that a request gets."""
  return [name for name, judge in JUDGES.items() if judge.categories is None or request.category in judge.categories or
          any(field in request.fields for field in judge.fields)]


def judge_records(requests: list[Request], records: list[dict], setting: Setting) -> dict[tuple, dict]:
  """What the judges say of each record's text.

  Args:
    requests: of the workload; a record of another one is left out.
    records: lines of `requests.jsonl`; those of the first repeat are judged.

  Returns:
    {(id, turn, method): {"judge.metric": value or None}}.
  """
  by_id = {request.id: request for request in requests}
  first = [r for r in records if r["repeat"] == 0 and r["id"] in by_id]
  plain = {(r["id"], r["turn"]): r for r in first if r["method"] == "plain"}
  found, known = {}, {}
  for record in first:
    request = by_id[record["id"]]
    # A judge sees the turn that was answered, and of the row what belongs to the whole of it.
    request = request if len(request.turns) == 1 else dataclasses.replace(
        request, turns=request.turns[:record["turn"] + 1], fields=_of_turn(request))
    base = None if record["method"] == "plain" else plain.get((record["id"], record["turn"]))
    # Greedy methods write one text: the same answer is judged once, which for code counts.
    same = (record["id"], record["turn"], base is None, record["text"], tuple(record["token_ids"]),
            record["finish_reason"])
    if same not in known:
      known[same] = {f"{name}.{metric}": value for name in applying(request)
                     for metric, value in JUDGES[name].call(request, record, base, setting).items()}
    found[record["id"], record["turn"], record["method"]] = known[same]
  return found


def _of_turn(request):
  """Nothing says which turn of a conversation a reference or tests belong to."""
  return {name: value for name, value in request.fields.items() if name in ("tools", "document")}


class Judged:
  """A run's judgements, to be pooled group by group."""

  def __init__(self, requests: list[Request], records: list[dict], setting: Setting):
    """Judges the records; see `judge_records`."""
    self._requests = {request.id: request for request in requests}
    self._found = judge_records(requests, records, setting)

  def pooled(self, records: list[dict], base: list[dict]) -> dict | None:
    """One group's `quality`.

    Args:
      records: the group's, of one method. base: those of plain decoding; empty for plain decoding itself.

    Returns:
      None if nothing of it was judged; else by name of a metric its `mean` over requests (their turns averaged first),
      `n` requests, and against plain decoding on the requests that both have the mean `difference` with its
      `difference_interval` (95%, paired bootstrap over requests, which share their seeds; null below 8 pairs, and for
      a greedy run, whose texts are equal or wrong). Beside them stand, null where there is nothing to say:
      `identical`, `differences`: of a greedy run against plain decoding, [texts that are the same, of how many], and
        for each other one its `id`, `turn` and the `metrics` that moved, as [plain, own].
      `corpus`: see `translation.pool`, with the difference to plain decoding's.
      `by_language`, `by_prompt_length`: see the `pool` of `language` and of `long_documents`.
    """
    own = {(r["id"], r["turn"]): r for r in records if (r["id"], r["turn"], r["method"]) in self._found}
    if not own:
      return None
    other = {(r["id"], r["turn"]): r for r in base if (r["id"], r["turn"], r["method"]) in self._found}
    greedy = all(r["temperature"] == 0 for r in own.values())
    result = _metrics(self._by_request(own), self._by_request(other), intervals=not greedy) | {
        "identical": None, "differences": None, "corpus": self._corpus(own, other),
        "by_language": self._by_language(own), "by_prompt_length": self._by_prompt_length(own)}
    if greedy and other:
      both = [key for key in own if key in other]
      changed = [key for key in both if own[key]["token_ids"] != other[key]["token_ids"]]
      result |= {"identical": [len(both) - len(changed), len(both)], "differences": [
          {"id": key[0], "turn": key[1], "metrics": self._moved(own[key], other[key])} for key in changed]}
    return result

  def _of(self, record):
    return self._found[record["id"], record["turn"], record["method"]]

  def _by_request(self, records):
    """{metric: {id: mean over turns}}."""
    turns = collections.defaultdict(lambda: collections.defaultdict(list))
    for record in records.values():
      for name, value in self._of(record).items():
        if value is not None:
          turns[name][record["id"]].append(value)
    return {name: {key: sum(values) / len(values) for key, values in of.items()} for name, of in turns.items()}

  def _moved(self, own, other):
    own, other = self._of(own), self._of(other)
    return {name: [other[name], own[name]] for name in own
            if name in other and None not in (own[name], other[name]) and own[name] != other[name]}

  def _corpus(self, own, other):
    """Of the requests that both have, if there is anything to compare with."""
    shared = [key for key in own if key in other] if other else list(own)
    pool = lambda records: translation.pool([(self._requests[key[0]], records[key]["text"]) for key in shared if
                                             "translation.chrf" in self._of(records[key]) and
                                             rows.reference(self._requests[key[0]]) is not None])
    found = pool(own)
    if other:
      base = pool(other)
      found |= {f"{name}_difference": found[name] - base[name] for name in list(found)}
    return found or None

  def _by_language(self, own):
    strip = lambda found: {name.partition(".")[2]: value for name, value in found.items()
                           if name.startswith("language.")}
    return language.pool([(self._requests[key[0]], strip(self._of(record))) for key, record in own.items()])

  def _by_prompt_length(self, own):
    records = list(own.values())
    return long_documents.pool(records, [
        {"prompt_tokens": self._of(r)["length.prompt_tokens"], "tokens_per_slot": self._of(r)["length.tokens_per_slot"]}
        for r in records])


def _metrics(own, base, *, intervals):
  found = {}
  for name, values in own.items():
    paired = [key for key in values if key in base.get(name, {})]
    sides = [base[name][key] for key in paired] if paired else [], [values[key] for key in paired]
    found[name] = {"mean": sum(values.values()) / len(values), "n": len(values),
                   "difference": statistics.mean_difference(*sides),
                   "difference_interval": statistics.difference_interval(*sides) if intervals else None}
  return found
