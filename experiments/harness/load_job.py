"""One load test from start to report: every point of a sweep, every method in turn, round by round, in a run folder.

Methods take turns at every point, so that drift of a shared machine hits all alike, in an order that rotates; what is
compared is compared within a round, in which requests, their order, seeds and times of arrival are the same for all.
"""
import dataclasses
import json
import sys
import zlib

from absl import flags
import numpy as np
from tqdm import tqdm

from experiments import workloads
from experiments.harness import environment
from experiments.harness import load_summary
from experiments.harness import load_sweep
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.report import load_report
from specjax.serving import load
from specjax.serving import load_metrics
from specjax.serving import requests as requests_lib

NUM_REQUESTS = flags.DEFINE_integer("num_requests", None, "Requests of every run; by default four for each that a "
                                    "point has in flight, at least 16, and 32 for rates.", lower_bound=1)
WARM_UP = flags.DEFINE_integer("warmup_requests", None, "Requests that are sent before every run and not counted; as "
                               "many as a point has in flight by default.", lower_bound=0)
CANCEL = flags.DEFINE_float("cancel_rate", 0.0, "Share of the requests that are given up at a random point.",
                            lower_bound=0, upper_bound=1)
RUNS = "runs.json"


def ask(workload: list[workloads.Request], tokenizer, *, raw: bool) -> list[requests_lib.Request]:
  """The first turn of every request of a workload, in an order in which categories are mixed: a load asks many things
  at a time. Says which turns are left out."""
  later = sum(len(request.turns) > 1 for request in workload)
  if later:
    print(f"{later} of {len(workload)} requests are conversations: their first turn is asked", file=sys.stderr)
  asked = []
  for request in workload:
    encoded = (tokenizer.encode(request.turns[0], add_special_tokens=True) if raw
               else tokenizer.chat([{"role": "user", "content": request.turns[0]}]))
    # A seed that depends on the request only, so that sampled texts are the same under every method and load.
    params = settings.sampling_params().replace(seed=zlib.crc32(request.id.encode()) >> 1)
    asked.append(requests_lib.Request(prompt=tuple(encoded), params=params, category=request.category,
                                      max_new_tokens=settings.MAX_NEW_TOKENS.value))
  return asked


@dataclasses.dataclass(frozen=True)
class _Cell:
  """One run: a method at a point of the sweep, in a round."""
  method: str
  point: float
  round: int


class Job:
  """A load test in a run folder."""

  def __init__(self, arms, workload: list[workloads.Request], sweep: load_sweep.Sweep, *, repeats: int, raw: bool,
               folder: run_folder.RunFolder):
    """Checks all requests before the folder is touched.

    Args:
      arms: of `load_arms.build`. repeats: rounds.

    Raises:
      ValueError: names the request that cannot be served.
    """
    order = np.random.default_rng(settings.SEED.value).permutation(len(workload))
    self._arms, self._sweep, self._folder, self._goodput = arms, sweep, folder, load_sweep.goodput()
    self._workload = [workload[i] for i in order]
    self._asked = ask(self._workload, arms.tokenizer, raw=raw)
    arms.fit(self._asked, [request.source for request in self._workload])
    folder.open()
    folder.write_json("environment.json", environment.describe())
    kept = folder.path / RUNS
    self._runs = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    done = {_cell(run) for run in self._runs}
    folder.rewrite([record for record in folder.records() if _cell(record) in done])
    cells = _cells(arms.names, sweep.values, repeats)
    self._cells, self._total = [cell for cell in cells if cell not in done], len(cells)

  def warm_up(self) -> None:
    """Compiles what is needed, with a bar."""
    if self._cells:
      with tqdm(total=len(self._arms.names), desc="compiling", unit="method", leave=False) as bar:
        self._arms.warm_up(lambda name: bar.set_postfix_str(name) or bar.update(1))

  def measure(self) -> None:
    """Makes all runs that are not done yet, and keeps each as it ends."""
    total = sum(self._count(cell.point) for cell in self._cells)
    with tqdm(total=total, desc="serving", unit="request", leave=False) as bar:
      for cell in self._cells:
        bar.set_postfix_str(f"{cell.method}, {cell.point:g}, round {cell.round + 1}")
        before = bar.n
        run = self._run(cell, lambda served: bar.update(1))
        bar.total += bar.n - before - self._count(cell.point)  # runs that were made again
        self._keep(cell, run)

  def finish(self, *, partial: bool = False) -> dict:
    """Writes and returns the summary of what there is."""
    summary = load_summary.summarize(self._runs, self._folder.records(), self._sweep, self._goodput)
    if partial:
      summary["partial"] = True
    self._folder.write_json("summary.json", summary)
    return summary

  def interrupted(self) -> None:
    """Summarises what there is, so that a report can be made of it."""
    if self._runs:
      self.finish(partial=len(self._runs) < self._total)

  def write_report(self):
    """Writes `report.html` and `plots/`; returns the report's path."""
    return load_report.write_report(self._folder.path)

  def _count(self, point):
    return NUM_REQUESTS.value or self._sweep.requests(point)

  def _requests(self, count, first=0):
    """So many requests; the workload begins anew where it ends."""
    return [self._asked[(first + i) % len(self._asked)] for i in range(count)]

  def _run(self, cell, report):
    count, together = self._count(cell.point), self._sweep.together(cell.point)
    warm = together if WARM_UP.value is None else WARM_UP.value
    seed = settings.SEED.value + cell.round
    return self._arms.run(
        cell.method, self._requests(count), self._sweep.arrivals(cell.point, seed),
        warm_up=self._requests(warm, first=count), cancellations=load.Cancellations(CANCEL.value, seed), report=report)

  def _keep(self, cell, run):
    if run.turns:
      load_metrics.check(run.outcomes)
    metrics = load_metrics.summarize(run, goodput=self._goodput)
    self._folder.append([self._record(cell, served, run.begin) for served in run.served])
    self._runs.append(dataclasses.asdict(cell) | {"metrics": metrics})
    self._folder.write_json(RUNS, self._runs)

  def _record(self, cell, served, begin):
    request = self._workload[served.index % len(self._workload)]
    common = dataclasses.asdict(cell) | {
        "id": request.id, "category": request.category, "language": request.language, "index": served.index,
        "arrived_ms": 1e3 * (served.arrived - begin), "error": served.error}
    return common | (_of_outcome(served.outcome) if served.outcome else {})


def _of_outcome(outcome):
  milliseconds = lambda seconds: None if seconds is None else 1e3 * seconds
  return {
      "finish_reason": outcome.finish_reason, "prompt_tokens": outcome.prompt_tokens,
      "cached_tokens": outcome.cached_tokens, "output_tokens": sum(count for _, count in outcome.arrivals),
      "token_ids": outcome.token_ids, "text": outcome.text, "counters": dataclasses.asdict(outcome.speculation),
      "queue_ms": milliseconds(outcome.queue_seconds), "ttft_ms": milliseconds(outcome.first_token_seconds),
      "tpot_ms": milliseconds(outcome.token_seconds), "itl_ms": [milliseconds(gap) for gap in outcome.gaps],
      "e2el_ms": milliseconds(outcome.finished - outcome.submitted)}


def _cells(methods, points, rounds):
  """All runs in order: methods take turns, and another one begins at every point and in every round."""
  return [_Cell(methods[(i + place + round_) % len(methods)], point, round_)
          for round_ in range(rounds) for place, point in enumerate(points) for i in range(len(methods))]


def _cell(record):
  return _Cell(record["method"], record["point"], record["round"])
