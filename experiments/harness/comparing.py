"""Runs side by side: each later run against the first, method by method and category by category.

Paired where they can be: only requests that both runs have are compared, their throughputs as in a speedup, with the
bootstrap over requests (over batches, whose rows share their time). A cell is a regression where the whole interval
lies below 1 and the ratio itself below 1 - threshold; without an interval, below 3 requests, none is called.
"""
import collections
import dataclasses
import pathlib

import numpy as np

from experiments.harness import statistics
from experiments.harness import summary
from experiments.harness import text_table
from experiments.report import run_folder
from experiments.report import tables

REGRESSION, SLOWER, FASTER, SAME, TOO_FEW = "REGRESSION", "slower", "faster", "no difference", "too few requests"
# What changes the work and not only its speed; told, where two runs differ in it.
_TOLD = ("target", "workload", "max_new_tokens", "temperature", "batch_size", "verifier", "seed",
         "method_settings")
_NEEDED = ("id", "category", "method", "seconds", "token_ids", "repeat", "turn", "batch", "counters")


@dataclasses.dataclass(frozen=True)
class Run:
  """A run as it is compared: its name and folder, what its files say, and its records by (method, request)."""
  name: str
  config: dict
  environment: dict
  records: dict[tuple[str, str], list[dict]]


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run against the first one, for a method and a category."""
  run: str
  method: str
  category: str
  requests: int                    # that both have
  base: float                      # tokens a second of the first run
  other: float                     # and of this one
  ratio: float                     # other / base
  interval: list[float] | None     # 95%, see `statistics.speedup_interval`
  steps: tuple[float, float]       # tokens a step of both
  same_texts: int                  # requests whose tokens are those of the first run
  verdict: str


def load(path: str) -> Run:
  """Reads a run folder.

  Raises:
    ValueError: it holds no run, or one without records to compare; names the file.
  """
  folder = pathlib.Path(path)
  found = run_folder.load(folder)
  records = collections.defaultdict(list)
  for record in found.requests:
    missing = [name for name in _NEEDED if name not in record]
    if missing:
      raise ValueError(f"{folder / 'requests.jsonl'}: the record of request {record.get('id')!r} has no {missing[0]!r}; "
                       "runs of experiments.benchmark can be compared")
    records[record["method"], record["id"]].append(record)
  if not records:
    raise ValueError(f"{folder / 'requests.jsonl'} holds no records: nothing of this run can be compared")
  return Run(name=str(folder), config=found.config, environment=found.environment, records=dict(records))


def compare(runs: list[Run], threshold: float) -> list[Cell]:
  """Every later run against the first; cells in the order of the first run, a method's categories together.

  Raises:
    ValueError: a run has no request under a method in common with the first one.
  """
  base, cells = runs[0], []
  for other in runs[1:]:
    common = [key for key in base.records if key in other.records]
    if not common:
      raise ValueError(f"{base.name} and {other.name} have no request under one method in common; compare runs of the "
                       "same workload and methods")
    groups = collections.defaultdict(list)
    for method, name in common:
      for category in dict.fromkeys(("all", base.records[method, name][0]["category"])):  # once, even for one named so
        groups[method, category].append((method, name))
    for (method, category), keys in groups.items():
      cells.append(_cell(base, other, method, category, keys, threshold))
  return cells


def notes(runs: list[Run]) -> list[str]:
  """What else differs between the first run and each later one, a sentence each: it may explain a difference."""
  first, found = runs[0], []
  for other in runs[1:]:
    for where, a, b in (("", first.config, other.config), ("environment: ", first.environment, other.environment)):
      for name in _TOLD if not where else sorted(set(a) | set(b)):
        if a.get(name) != b.get(name):
          found.append(f"{other.name}: {where}{name} is {_short(b.get(name))}, and {_short(a.get(name))} in "
                       f"{first.name}")
    lost = [key for key in first.records if key not in other.records]
    more = [key for key in other.records if key not in first.records]
    if lost or more:
      found.append(f"{other.name}: left out are {len(lost)} requests under a method that only {first.name} has, and "
                   f"{len(more)} that only {other.name} has")
  return found


COLUMNS = ("method", "category", "requests", "base tok/s", "tok/s", "ratio", "95% interval", "base tok/step",
           "tok/step", "same texts", "verdict")


def row(cell: Cell) -> tuple[str, ...]:
  """The cell as text, a column each."""
  interval = tables.DASH if cell.interval is None else "[{:.3f}, {:.3f}]".format(*cell.interval)
  return (cell.method, cell.category, str(cell.requests), tables.short(cell.base), tables.short(cell.other),
          f"{cell.ratio:.3f}", interval, *map(tables.short, cell.steps), f"{cell.same_texts} of {cell.requests}",
          cell.verdict)


def render(runs: list[Run], cells: list[Cell]) -> str:
  """A table for each later run."""
  return "\n\n".join(text_table.Table(f"{run.name} against {runs[0].name}", COLUMNS,
                                      [row(cell) for cell in cells if cell.run == run.name]).text() for run in runs[1:])


def _cell(base, other, method, category, keys, threshold):
  units = collections.defaultdict(list)
  for key in keys:
    units[base.records[key][0]["batch"]].append(key)
  pooled = [[np.sum([summary.tokens_and_seconds(run.records[key]) for key in unit], axis=0) for unit in units.values()]
            for run in (base, other)]
  ratio, interval = statistics.speedup(*pooled), statistics.speedup_interval(*pooled)
  if ratio is None:
    raise ValueError(f"{other.name} and {base.name}: {method} made no token or took no time in category {category}; "
                     "nothing can be compared")
  rates = [float(np.divide(*np.sum(side, axis=0))) for side in pooled]
  return Cell(run=other.name, method=method, category=category, requests=len(keys), base=rates[0], other=rates[1],
              ratio=ratio, interval=interval, steps=(_per_step(base, keys), _per_step(other, keys)),
              same_texts=sum(_text(base.records[key]) == _text(other.records[key]) for key in keys),
              verdict=_verdict(ratio, interval, threshold))


def _verdict(ratio, interval, threshold):
  if interval is None:
    return TOO_FEW
  if interval[1] < 1:
    return REGRESSION if ratio < 1 - threshold else SLOWER
  return FASTER if interval[0] > 1 else SAME


def _per_step(run, keys):
  first = [r["counters"] for key in keys for r in run.records[key] if r["repeat"] == 0]
  return sum(c["output_tokens"] for c in first) / max(1, sum(c["steps"] for c in first))


def _text(records):
  return {r["turn"]: r["token_ids"] for r in records if r["repeat"] == 0}


def _short(value):
  text = str(value)
  return text if len(text) <= 60 else text[:59] + "…"
