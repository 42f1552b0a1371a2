"""Whether advice holds on requests that it was not made from.

Every arm that the advice knows, advised or not, runs on new requests beside plain decoding. Of each kind of request the
advised one's speedup is set against the best measured one's, which has the advantage of being picked after the fact:
what is missing to it is an upper bound of what the advice loses.
"""
from collections.abc import Sequence

from experiments.harness import advice
from experiments.harness import flag_values
from experiments.harness import methods

NEAR = 0.95  # of the best one's speed: as good as it
COLUMNS = ("requests", "number", "advised", "speedup", "95% interval", "best measured", "its speedup", "share of it")


def kind_of(category: str, language: str, types: Sequence[dict]) -> tuple[str, str] | None:
  """The kind of advice that a request falls under: its category and language, then its category's other languages, then
  the first kind of its category; None where the advice does not know its category."""
  known = [(each["category"], each["language"]) for each in types if each["category"] == category]
  wanted = [kind for kind in ((category, language), (category, "other")) if kind in known]
  return (wanted or known or [None])[0]


def arms(found: dict) -> dict[str, tuple[str, dict]]:
  """(method, settings) of every arm that the advice names, by its name."""
  rows = [row for each in found["types"] for row in each["candidates"]]
  return {row["arm"]: (row["method"], row["settings"]) for row in rows}


def same(found: dict, **conditions) -> None:
  """Raises ValueError where the advice was made under other conditions, such as max_new_tokens, and names the flag."""
  for name, value in conditions.items():
    if name in found and found[name] != value:
      raise ValueError(f"--{name}={value}: the advice was made with --{name}={found[name]}, and what it says is of that; "
                       "give the same")


def build(found: dict, given: methods.Given) -> dict:
  """Proposers of plain decoding and all arms, by name. Errors as of `methods.build_all`."""
  built = {"plain": methods.build("plain", given)}
  for name, (method, settings) in arms(found).items():
    with flag_values.applied(settings):
      built[name] = methods.build_all([method], given)[method]
  return built


def judge(found: dict, records: Sequence[dict]) -> dict:
  """What records of all arms say of the advice.

  Args:
    found: the advice. records: of a run, their "method" being the arm's name.

  Returns:
    {"types": one a kind {"category", "language", "requests", "advised", "speedup", "interval", "best", "best_speedup",
    "share", "near"}, "near": share of kinds whose advised arm is within 5% of the best, "slower": kinds whose advised
    arm was slower than plain decoding, "surely_slower": of these, with an interval below 1}. "share" is the advised
    one's speed over the best one's.

  Raises:
    ValueError: no record falls under a kind of the advice.
  """
  by_kind, decided = {}, {(each["category"], each["language"]): each["arm"] for each in found["types"]}
  for record in records:
    kind = kind_of(record["category"], record["language"], found["types"])
    if kind:
      by_kind.setdefault(kind, []).append(record)
  if not by_kind:
    raise ValueError(f"the advice knows {', '.join(dict.fromkeys(kind[0] for kind in decided))}, and no request is of "
                     "these categories; give others by --workload")
  types = []
  for kind, mine in by_kind.items():
    pairs = {name: advice.pairs([r for r in mine if r["method"] == name])
             for name in dict.fromkeys(r["method"] for r in mine)}
    speeds = {name: speed for name, each in pairs.items()
              if name != "plain" and (speed := advice.paired(pairs["plain"], each))[0]}
    speeds["plain"] = 1.0, None
    if decided[kind] not in speeds:  # it wrote nothing
      continue
    best, advised = max(speeds, key=lambda name: speeds[name][0]), decided[kind]
    share = speeds[advised][0] / speeds[best][0]
    types.append({"category": kind[0], "language": kind[1], "requests": len(pairs["plain"]), "advised": advised,
                  "speedup": speeds[advised][0], "interval": speeds[advised][1], "best": best,
                  "best_speedup": speeds[best][0], "share": share, "near": share >= NEAR})
  name = lambda each: f"{each['category']} ({each['language']})"
  slower = [each for each in types if each["speedup"] < 1]
  return {"types": types, "near": sum(each["near"] for each in types) / max(1, len(types)), "slower": list(map(name, slower)),
          "surely_slower": [name(each) for each in slower if each["interval"] and each["interval"][1] < 1]}


def rows(judged: dict) -> list[tuple[str, ...]]:
  """Cells of `COLUMNS`, one row a kind."""
  shown = lambda interval: f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "-"
  return [(f"{each['category']} ({each['language']})", str(each["requests"]), each["advised"],
           f"{each['speedup']:.2f}", shown(each["interval"]), each["best"], f"{each['best_speedup']:.2f}",
           f"{each['share']:.0%}") for each in judged["types"]]


def headline(judged: dict) -> str:
  """One sentence on all kinds."""
  count = len(judged["types"])
  text = (f"What is advised is within {1 - NEAR:.0%} of the best measured method in {judged['near']:.0%} of {count} "
          "kinds of request")
  if not judged["slower"]:
    return f"{text}, and slower than plain decoding in none."
  sure = ", ".join(judged["surely_slower"]) or "none of them"
  return f"{text}; slower than plain decoding in {', '.join(judged['slower'])}, beyond its interval in {sure}."
