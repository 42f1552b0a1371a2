"""From measurements to advice: which method for which kind of request, decided by measured speedups alone.

Requests of a kind are halved. On the first half all methods are tried and the best is chosen; on the second half, which
had no part in the choice, its speedup is measured. A method that is not faster than plain decoding on both is never
recommended.
"""
from collections.abc import Sequence
import dataclasses

from experiments.harness import advice_rules
from experiments.harness import statistics

MARGIN = 1.02  # speedup on the first half from which a method is tried on the second
PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method on a kind of request.

  Attributes:
    arm: its name in the advice; settings: the flags that build it, beside its method.
    score: speedup on the first half by which the arm was chosen, see `advising`; None: `tried`.
    tried, expected: speedup measured on the first half, and that of the cost model from its counts; None: not tried.
    speedup, interval: on the second half; None: not measured there, or too few requests.
    facts: what the rules read. stopped: why it was not tried, or not any further.
  """
  arm: str
  method: str
  settings: dict
  tried: float | None = None
  score: float | None = None
  expected: float | None = None
  speedup: float | None = None
  interval: list[float] | None = None
  facts: advice_rules.Facts | None = None
  stopped: str | None = None


def halves(requests: Sequence) -> tuple[list, list]:
  """Every second request, and the others: the first half has the odd one. Nothing is random."""
  return list(requests[::2]), list(requests[1::2])


def kinds(requests: Sequence) -> dict[tuple[str, str], list]:
  """Requests by (category, language), in order. Languages of a category with a single request, which cannot be halved,
  are taken together as "other", or with the category's largest language where one is left alone."""
  found = {}
  for request in requests:
    found.setdefault((request.category, request.language), []).append(request)
  for category in dict.fromkeys(request.category for request in requests):
    alone = [key for key in found if key[0] == category and len(found[key]) < 2]
    together = [request for key in alone for request in found[key]]
    others = [key for key in found if key[0] == category and len(found[key]) >= 2]
    if len(together) >= 2:
      for key in alone:
        del found[key]
      found[category, "other"] = together
    elif together and others:
      del found[alone[0]]
      found[max(others, key=lambda key: len(found[key]))].extend(together)
  return found


def best_tried(candidates: Sequence[Candidate], margin: float = MARGIN) -> Candidate | None:
  """The fastest on the first half, if it is faster than plain decoding by more than noise: it goes to the second."""
  score = lambda each: each.tried if each.score is None else each.score
  fast = [each for each in candidates if each.tried is not None and each.tried > 1 and score(each) >= margin]
  return max(fast, key=score, default=None)


def decide(category: str, language: str, candidates: Sequence[Candidate], memory: dict | None = None) -> dict:
  """The decision for a kind of request, as `advice.json` holds it.

  Args:
    candidates: all that were tried, or stopped, on it. memory: bytes of each arm, beside the target's.
  """
  sure = [each for each in candidates if each.speedup is not None and each.speedup > 1 and not each.stopped]
  chosen = best_tried(sure)
  reasons, risks = [], []
  if chosen is None:
    for each in candidates:
      why = [{"rule": "bound", "text": each.stopped}] if each.stopped else []
      why += advice_rules.fired(advice_rules.AGAINST, each.facts) if each.facts else []
      slower = [{"rule": "measured", "text": _measured(each)}] if each.tried is not None else []
      reasons += [{"method": each.arm} | one for one in slower + why]
    return {"category": category, "language": language, "method": PLAIN, "arm": PLAIN, "settings": {}, "expected": 1.0,
            "measured": None, "interval": None, "memory_bytes": 0, "risks": [], "reasons": reasons,
            "candidates": [_row(each) for each in candidates]}
  reasons.append({"method": chosen.arm, "rule": "measured", "text": _measured(chosen)})
  if chosen.facts:
    reasons += [{"method": chosen.arm} | one for one in advice_rules.fired(advice_rules.AGAINST, chosen.facts)]
    risks = advice_rules.fired(advice_rules.RISKS, chosen.facts)
  if chosen.interval and chosen.interval[0] <= 1:
    risks.insert(0, {"rule": "gain_within_noise", "text": f"the interval of its speedup, {chosen.interval[0]:.2f} to "
                     f"{chosen.interval[1]:.2f}, holds 1"})
  for each in candidates:
    if each is not chosen and each.stopped:
      reasons.append({"method": each.arm, "rule": "bound", "text": each.stopped})
  return {"category": category, "language": language, "method": chosen.method, "arm": chosen.arm,
          "settings": chosen.settings, "expected": chosen.expected, "measured": chosen.speedup,
          "interval": chosen.interval, "memory_bytes": (memory or {}).get(chosen.arm), "risks": risks,
          "reasons": reasons, "candidates": [_row(each) for each in candidates]}


def pairs(records: Sequence[dict]) -> list[tuple[int, float]]:
  """(tokens, seconds) a request, turns together, in order."""
  found = {}
  for record in records:
    tokens, seconds = found.get(record["id"], (0, 0.0))
    found[record["id"]] = tokens + len(record["token_ids"]), seconds + record["seconds"]
  return list(found.values())


def paired(base: Sequence[tuple], other: Sequence[tuple]) -> tuple[float | None, list[float] | None]:
  """Speedup and its interval, of (tokens, seconds) a request, both in one order; see `statistics`."""
  return statistics.speedup(base, other), statistics.speedup_interval(base, other)


def _measured(each):
  held = "not measured on the held-out half" if each.speedup is None else f"{each.speedup:.2f} on the held-out half"
  return f"{each.arm}: {each.tried:.2f} times plain decoding's speed on the half for tuning, {held}"


def _row(each):
  return {"arm": each.arm, "method": each.method, "settings": each.settings, "tried": each.tried, "score": each.score,
          "expected": each.expected, "measured": each.speedup, "interval": each.interval, "stopped": each.stopped}
