"""One measured run from start to report: what `benchmark` and its siblings do between their flags and their table."""
import dataclasses
import hashlib
import itertools
import json
import sys

from absl import flags
import jax
import numpy as np
from tqdm import tqdm

from experiments import report
from experiments.harness import cost_model
from experiments.harness import distributed
from experiments.harness import environment
from experiments.harness import expert_costs
from experiments.harness import measure
from experiments.harness import methods
from experiments.harness import near_ties
from experiments.harness import rules
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.harness import sharded
from experiments.harness import summary as summary_lib
from experiments.harness import tracing
from experiments.quality import registry
from specjax import decode
from specjax import drivers
from specjax.parallel import processes
from specjax.verifiers import point

_NOT_SETTINGS = ("outdir", "overwrite", "resume", "costs", "trace", "quality", "run_code", *distributed.NAMES)


def config(requests, *, command: str, date: str) -> dict:
  """`config.json`: every flag of the experiments, the requests' ids, the command and the date."""
  # absl files the flags of the program that was started under its path, all others under their module's name.
  ours = {flag.name: flag.value for module, defined in flags.FLAGS.flags_by_module_dict().items()
          if module.startswith("experiments.") or module == sys.argv[0] for flag in defined
          if flag.name not in _NOT_SETTINGS}
  text = json.dumps([(r.id, r.turns) for r in requests], ensure_ascii=False).encode("utf-8")
  own = {"method_settings": methods.given()} if methods.given() else {}
  return ours | own | {"request_ids": [r.id for r in requests], "requests_sha256": hashlib.sha256(text).hexdigest(),
                 "command": command, "date": date}


class Job:
  """A run of several methods over requests, in a run folder."""

  def __init__(self, target_name: str, names: list[str], requests: list, *, batch_size: int, repeats: int, raw: bool,
               outdir: str, overwrite: bool, resume: bool, config: dict, verifier=point.Point(),
               whatever_fits: bool = False, quality: bool = False, run_code: bool = False):
    """Loads the target and checks everything that can be checked before the folder is touched.

    `whatever_fits` leaves out, and names, methods that the target does not support; `config` then lists the others.
    `quality` has the answers judged at the end, `run_code` with what running their code against tests says.
    """
    run_folder.check_outdir(outdir)
    self._quality, self._run_code = quality, run_code
    apart = registry.check(run_code=run_code) if quality else ""
    if apart:
      print(f"--run_code: {apart}", file=sys.stderr, flush=True)
    folder = lambda: run_folder.RunFolder(outdir, overwrite=overwrite, resume=resume, config=config)
    self.folder = None if whatever_fits else folder()
    target, tokenizer = sharded.load(target_name)
    built = methods.build_all(names, methods.Given(target=target, tokenizer=tokenizer, name=target_name),
                              fitting=whatever_fits)
    if whatever_fits:
      config["methods"] = list(built)
      self.folder = folder()
    rules.check(built, verifier)
    self.plan = measure.Plan(target=target, tokenizer=tokenizer, methods=built,
                             batches=measure.batches(requests, batch_size), repeats=repeats,
                             max_new_tokens=settings.MAX_NEW_TOKENS.value, raw=raw, verifier=verifier)
    measure.check(self.plan)
    self.folder.open()
    self.folder.write_json("environment.json", environment.describe())
    kept, left = measure.split_done(self.plan, self.folder.records())
    if resume:
      self.folder.rewrite(kept)
    self._todo = dataclasses.replace(self.plan, batches=left)
    self._measured = not left

  def warm_up(self) -> None:
    """Compiles everything, with a bar."""
    with tqdm(desc="compiling", unit="program", leave=False) as bar:
      def report_progress(done, total):
        bar.total = total
        bar.update(done - bar.n)
        bar.refresh()
      measure.warm_up(self._todo, report_progress)

  def measure(self) -> None:
    """Says how long it will take, then runs what is not done yet, appending records as batches finish."""
    if not self._todo.batches:
      return
    seconds = measure.estimate(self._todo)
    print(f"measuring {sum(map(len, self._todo.batches))} requests with {', '.join(self.plan.methods)}, "
          f"{self.plan.repeats} time(s) each: about {max(1, round(seconds / 60))} min", file=sys.stderr, flush=True)
    with tqdm(total=self._todo.runs, desc="measuring", unit="run", leave=False) as bar:
      for records in measure.measure(self._todo, lambda: bar.update(1)):
        self.folder.append(records)
    self._measured = True

  def interrupted(self) -> None:
    """Summarises what there is, so that a report can be made of it."""
    if self.folder.records():
      self.finish(costs=False, partial=not self._measured)

  def finish(self, *, costs: bool, partial: bool = False) -> dict:
    """Summarises the records into `summary.json` and returns the summary.

    `partial` says that an interrupt left requests out. The summary is written before step costs are timed and again
    with them, so that nothing measured depends on what comes last.
    """
    records = self.folder.records()
    memory = {name: self._memory(proposer, records) for name, proposer in self.plan.methods.items()}
    gaps = self._gaps(records)
    widths = {name: decode.widths_for(proposer.max_nodes) for name, proposer in self.plan.methods.items()}
    target = self.plan.target
    judged = self._judged(records) if self._quality else None
    routing, windows = getattr(target, "routing", None), getattr(getattr(target, "config", None), "windows", ())

    def write(measured, expert_cost=None):
      summary = summary_lib.summarize(records, costs=measured, memory=memory, gaps=gaps, routing=routing,
                                      widths=widths, expert_cost=expert_cost, windows=windows, quality=judged)
      if partial:
        summary["partial"] = True
      self.folder.write_json("summary.json", summary)
      return summary

    summary = write(None)
    if not costs:
      return summary
    longest = max((r["prompt_ids"] + r["token_ids"] for r in records), key=len)
    # Passes of up to 64 tokens are timed behind a text: it must leave room for them.
    text = longest[:max(1, target.max_context - decode.WIDTHS[-1])]
    step_costs = self._step_costs(records)
    summary = write(step_costs)
    return summary if routing is None else write(step_costs, expert_costs.measure(target, text))

  def trace(self, requests: int) -> list[str]:
    """Runs the first `requests` of each category again and writes `steps.jsonl`, see `tracing.trace`; none, nothing.

    Returns:
      A sentence for every traced text that should be the measured one and is not. Greedy ones that part at a near tie
      are printed and not among them.
    """
    differing, faults = [], []
    if requests:
      lines = tracing.trace(self.plan, self.folder.records(), requests, differing)
      self.folder.write_lines(run_folder.STEPS, tqdm(lines, desc="tracing", unit="step", leave=False))
    for each in differing:
      lead = near_ties.gap(self.plan.target, each.prompt, each.shared) if each.greedy else None
      if lead is not None and lead < near_ties.NEAR_TIE:
        print(f"{each}, at a near tie: the two best logits are {lead:.1e} apart", file=sys.stderr, flush=True)
      else:
        faults.append(str(each))
    return faults

  def _judged(self, records):
    target = self.plan.target
    setting = registry.Setting(max_new_tokens=self.plan.max_new_tokens, max_context=target.max_context,
                               eos_ids=tuple(target.eos_ids), run_code=self._run_code)
    return registry.Judged(list(itertools.chain(*self.plan.batches)), records, setting)

  def write_report(self):
    """Writes `report.html` and `plots/`; returns the report's path, in the process that writes."""
    return report.write_report(self.folder.path) if processes.is_first() else None

  def _step_costs(self, records):
    """Costs of every method at the run's batch size and lengths, kept as `costs.json`."""
    found = cost_model.measure(
        self.plan.target, self.plan.methods, records, params=settings.sampling_params(), verifier=self.plan.verifier,
        progress=lambda lengths: tqdm(lengths, desc="timing the parts of a step", unit="length", leave=False))
    self.folder.write_json("costs.json", found)
    return found["methods"]

  def _memory(self, proposer, records):
    """Bytes of weights, of the largest cache that a request needed, of the same without rings if it has windows, and
    of the proposer with its state."""
    # A leaf may be a plain number, such as a threshold.
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in map(_described, jax.tree.leaves(tree)))
    target = self.plan.target
    longest = max(r["prompt_tokens"] + len(r["token_ids"]) for r in records)
    slots = drivers.bucket(min(longest + proposer.max_depth + 1, target.max_context), target.max_context)
    rows = max(r["batch_size"] for r in records)
    cache = jax.eval_shape(lambda: target.init_cache(rows, slots))
    state = jax.eval_shape(lambda: proposer.init(target, rows, slots))
    found = {"weights": size(target), "cache": size(cache), "draft": size(proposer) + size(state)}
    if any(getattr(cache, "windows", ())):
      found["cache_without_rings"] = sum(size((keys, values)) * slots // keys.shape[3]
                                         for keys, values in zip(cache.keys, cache.values))
    return found

  def _gaps(self, records):
    """Where a greedy text differs from plain decoding's: the target's top-2 logit gap at the first difference."""
    plain = {(r["id"], r["turn"]): r for r in records if r["method"] == "plain" and r["repeat"] == 0}
    gaps = {}
    for record in records:
      base = plain.get((record["id"], record["turn"]))
      if base is None or record["repeat"] or record["temperature"] or record["token_ids"] == base["token_ids"]:
        continue
      shared = near_ties.first_difference(record["token_ids"], base["token_ids"])
      gaps[record["id"], record["turn"], record["method"]] = near_ties.gap(self.plan.target, base["prompt_ids"],
                                                                           base["token_ids"][:shared])
    return gaps


def _described(leaf):
  return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
