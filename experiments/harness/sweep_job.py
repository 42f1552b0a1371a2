"""One sweep from start to report: a plan for each value of a setting of requests, all of them interleaved.

Within a plan each batch is run by all arms before the next one (see `measure`); plans take turns batch by batch, in an
order that rotates, so that drift of a shared machine hits all values alike.
"""
import dataclasses
import math
import sys

from absl import flags
from tqdm import tqdm

from experiments.harness import draft_view
from experiments.harness import environment
from experiments.harness import flag_values
from experiments.harness import job
from experiments.harness import measure
from experiments.harness import methods
from experiments.harness import rules
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.harness import sharded
from experiments.harness import summary as summary_lib
from experiments.harness import sweep_arms
from experiments.harness import sweep_prompts
from experiments.harness import sweep_summary
from experiments.report import sweep_report
from specjax.models import base as models
from specjax.parallel import processes


@dataclasses.dataclass
class Point:
  """Values of the settings of requests, and the plan that measures them."""
  values: dict
  plan: measure.Plan
  left: measure.Plan  # what is not measured yet


class SweepJob(job.Job):
  """A run of methods under several values of one or two settings, in a run folder."""

  def __init__(self, target_name: str, names: list[str], requests: list, varied, *, batch_size, repeats: int, raw,
               outdir: str, overwrite: bool, resume: bool, config: dict):
    """Loads the target once and checks everything that can be checked before the folder is touched.

    Args:
      varied: of `sweep_setting.parse`. batch_size, raw: the flags, whose values may be varied.
    """
    run_folder.check_outdir(outdir)
    self.folder = run_folder.RunFolder(outdir, overwrite=overwrite, resume=resume, config=config)
    self.varied, self.pinned = varied, pinned(config, varied)
    target, tokenizer = sharded.load(target_name)
    built = sweep_arms.build(names, varied, methods.Given(target=target, tokenizer=tokenizer, name=target_name))
    self.arms = {name: arm for name, (arm, _) in built.items()}
    proposers = {name: proposer for name, (_, proposer) in built.items()}
    requests = self._selected(requests, batch_size)
    self.points = []
    for values in sweep_arms.combinations([setting for setting in varied if setting.of_request]):
      with flag_values.applied(values):
        fitted = requests
        if sweep_prompts.TOKENS.value is not None:
          fitted = sweep_prompts.fit(requests, requests, sweep_prompts.TOKENS.value, tokenizer,
                                     raw=raw.value or models.encodes(target))
        plan = measure.Plan(target=target, tokenizer=tokenizer, methods=proposers,
                            batches=measure.batches(fitted, batch_size.value), repeats=repeats,
                            max_new_tokens=settings.MAX_NEW_TOKENS.value, raw=raw.value, verifier=rules.build())
        if plan.raw and any(isinstance(proposer, draft_view.View) for proposer in proposers.values()):
          raise ValueError("--raw gives prompts without the chat template, of which chat_template=off and "
                           "system_prompt=off leave something out; leave one of the two out")
        rules.check(proposers, plan.verifier)
        measure.check(plan)
      self.points.append(Point(values, plan, plan))
    self.plan = self.points[0].plan  # of which the parent class takes the target
    self.folder.open()
    self.folder.write_json("environment.json", environment.describe())
    records, whole = self.folder.records(), []
    for point in self.points:
      done, left = measure.split_done(point.plan, [r for r in records if r["values"] == point.values])
      whole += done
      point.left = dataclasses.replace(point.plan, batches=left)
    if resume:
      self.folder.rewrite(whole)
    self._measured = not any(point.left.batches for point in self.points)

  def _selected(self, requests, batch_size):
    """Requests that every value can have in whole batches; their first turns where a value is of one turn."""
    names = {setting.name: setting for setting in self.varied}
    first = {"prompt_tokens", "chat_template"} & set(names)
    if first or sweep_prompts.TOKENS.value is not None or not sweep_arms.TEMPLATE.value:
      requests = sweep_prompts.first_turns(requests)
    sizes = names["batch_size"].values if "batch_size" in names else (batch_size.value,)
    together, found = math.lcm(*sizes), []
    for category in dict.fromkeys(request.category for request in requests):
      members = [request for request in requests if request.category == category]
      if len(members) < together:
        raise ValueError(f"the category {category} has {len(members)} requests, and whole batches of "
                         f"{', '.join(map(str, sizes))} take {together}; lower batch_size, raise --limit, or leave the "
                         "category out by --categories")
      found += members[:len(members) // together * together]
    if len(found) < len(requests):
      print(f"{len(requests) - len(found)} of {len(requests)} requests fill no whole batch of every size and are left "
            "out", file=sys.stderr)
    return found

  def warm_up(self) -> None:
    """Compiles everything, with a bar."""
    with tqdm(desc="compiling", unit="program", leave=False) as bar:
      for point in self.points:
        behind = bar.n

        def report_progress(done, total, behind=behind):
          bar.total = max(bar.total or 0, behind + total)
          bar.update(behind + done - bar.n)
          bar.refresh()

        with flag_values.applied(point.values):
          measure.warm_up(point.left, report_progress)

  def measure(self) -> None:
    """Says how long it will take, then runs what is not done yet, appending records as batches finish."""
    waiting = [_Turn(place, point) for place, point in enumerate(self.points) if point.left.batches]
    if not waiting:
      return
    seconds = sum(map(_estimate, [turn.point for turn in waiting]))
    runs = sum(turn.point.left.runs for turn in waiting)
    print(f"measuring {len(self.points)} setting(s) of requests with {len(self.arms)} arms, {runs} runs: at most about "
          f"{max(1, round(seconds / 60))} min", file=sys.stderr, flush=True)
    with tqdm(total=runs, desc="measuring", unit="run", leave=False) as bar:
      measured = {turn.place: measure.measure(turn.point.left, lambda: bar.update(1)) for turn in waiting}
      for turn in in_turns(waiting):
        with flag_values.applied(turn.point.values):
          records = next(measured[turn.place])
        turn.done += 1
        self.folder.append([record | {"values": turn.point.values} for record in records])
    self._measured = True

  def interrupted(self) -> None:
    """Summarises what there is."""
    if self.folder.records():
      self.finish(partial=not self._measured)

  def finish(self, *, partial: bool = False) -> dict:
    """Summarises the records into `summary.json` and `sweep.json`, and returns the latter.

    Parts of a step are not timed alone, so nothing is predicted.
    """
    records, groups = self.folder.records(), []
    for point in self.points:
      mine = [r for r in records if r["values"] == point.values]
      if not mine:
        continue
      with flag_values.applied(point.values):
        memory = {name: self._memory(proposer, mine) for name, proposer in point.plan.methods.items()}
        summary = summary_lib.summarize(mine, memory=memory, gaps=self._gaps(mine))
      groups += [sweep_summary.placed(group, self.arms[group["method"]], point.values) for group in summary["groups"]]
    sweep = sweep_summary.summarize(groups, records, self.varied, self.pinned)
    for name, found in (("summary.json", {"schema": 1, "groups": groups}), ("sweep.json", sweep)):
      if partial:
        found["partial"] = True
      self.folder.write_json(name, found)
    return sweep

  def write_report(self):
    """Writes `sweep.html` and `plots/`; returns the page's path, in the process that writes."""
    return sweep_report.write_report(self.folder.path) if processes.is_first() else None


def pinned(config: dict, varied) -> dict:
  """What does not vary, by name: all settings of `config.json` but those varied."""
  leave = {"vary", "command", "date", "request_ids", "requests_sha256", *(setting.name for setting in varied)}
  return {name: value for name, value in config.items() if name not in leave and name in flags.FLAGS}


@dataclasses.dataclass
class _Turn:
  """A point that is being measured, and how many of its batches are done."""
  place: int
  point: Point
  done: int = 0

  @property
  def total(self):
    return len(self.point.left.batches)


def in_turns(waiting):
  """Yields what is behind most, by its share of `total` that is `done`; ties go round, a different one first each time.

  Whoever takes one has to raise its `done`.
  """
  count, turn = len(waiting), 0
  while left := [one for one in waiting if one.done < one.total]:
    first = turn // count
    yield min(left, key=lambda one: (one.done / one.total, (one.place - first) % count))
    turn += 1


def _estimate(point):
  with flag_values.applied(point.values):
    return measure.estimate(point.left)
