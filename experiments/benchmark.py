"""The main job: what methods of drafting gain on a target, per kind of request.

  python -m experiments.benchmark --methods=plain,ngram --workload=bundled --outdir=runs/bundled

Prints a table per category and writes a run folder with summary.json, requests.jsonl and report.html.
"""
import datetime
import sys

from absl import flags
from tqdm import tqdm

from experiments.harness import cli
from experiments.harness import job
from experiments.harness import methods
from experiments.harness import presets
from experiments.harness import rules
from experiments.harness import settings
from experiments.harness import table
from experiments import workloads

_METHODS = flags.DEFINE_list("methods", ["plain", "ngram"], f"Methods to compare, of {', '.join(methods.NAMES)}; "
                             "or all. Speedups are relative to plain.")
_WORKLOAD = flags.DEFINE_string("workload", "bundled", "'bundled', or paths of .jsonl files, separated by commas.")
_CATEGORIES = flags.DEFINE_list("categories", None, "Categories to keep; all by default.")
_LANGUAGES = flags.DEFINE_list("languages", None, "Languages to keep; all by default.")
_LIMIT = flags.DEFINE_integer("limit", None, "Requests of each category, at most.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Requests decoded together.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 1, "Times that every request is run by every method.", lower_bound=1)
_RAW = flags.DEFINE_bool("raw", False, "Give prompts to the target as they are, without its chat template.")
_COSTS = flags.DEFINE_bool("costs", True, "Time the parts of a step alone as well, for the predicted speedup.")
_TRACE = flags.DEFINE_integer("trace", 0, "Requests of each category that are run again, step by step, for the trace "
                              "explorer of the report.", lower_bound=0)
_QUALITY = flags.DEFINE_bool("quality", False, "Judge the answers as well, by kind of request: needs the extra "
                             "'quality' (pip install 'specjax[quality]').")
_RUN_CODE = flags.DEFINE_bool("run_code", False, "With --quality: execute the Python that models write, against the "
                              "rows' tests, in a process with limits.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Run folder; runs/DATE by default.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Discard a run that stands in --outdir.")
_RESUME = flags.DEFINE_bool("resume", False, "Finish the run in --outdir: requests that it has are skipped.")


def main():
  presets.apply_by_category()
  settings.sampling_params()
  requests = workloads.read_workload(_WORKLOAD.value, categories=_CATEGORIES.value, languages=_LANGUAGES.value,
                                     limit=_LIMIT.value)
  names, verifier = methods.check(_METHODS.value), rules.build()
  whatever_fits = _METHODS.value == [methods.ALL]
  if whatever_fits:
    names = rules.judged(names, verifier)
  rules.check({name: methods.outline(name) for name in names}, verifier)
  if _RUN_CODE.value and not _QUALITY.value:
    raise ValueError("--run_code runs code to judge it, and nothing is judged: add --quality")
  now = datetime.datetime.now()
  outdir = _OUTDIR.value or f"runs/{now:%Y-%m-%d-%H%M%S}"
  if _RESUME.value and not _OUTDIR.value:
    raise ValueError("--resume needs the run's folder: add --outdir=FOLDER")
  config = job.config(requests, command=" ".join(["python -m experiments.benchmark", *sys.argv[1:]]),
                      date=now.isoformat(timespec="seconds"))
  run = job.Job(settings.TARGET.value, names, requests, batch_size=_BATCH_SIZE.value, repeats=_REPEATS.value,
                raw=_RAW.value, outdir=outdir, overwrite=_OVERWRITE.value, resume=_RESUME.value, config=config,
                verifier=verifier, whatever_fits=whatever_fits, quality=_QUALITY.value, run_code=_RUN_CODE.value)
  try:
    run.warm_up()
    run.measure()
    summary = run.finish(costs=_COSTS.value)
    tqdm.write(table.render(summary["groups"]), file=sys.stdout)
    differing = run.trace(_TRACE.value)
    print(f"\nreport: {run.write_report()}")
    if differing:
      cli.fail("; ".join(differing))
  except KeyboardInterrupt:
    run.interrupted()
    print(f"\ninterrupted; finished requests are kept. To go on: add --resume --outdir={outdir}", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
  cli.run(main, several=True)
