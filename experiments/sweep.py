"""One setting at a time: what each value of a setting gains, per kind of request, everything else pinned.

  python -m experiments.sweep --vary=draft_tokens:1,2,4,8 --methods=ngram --outdir=runs/draft_tokens

The target is loaded once; every value is an arm of one interleaved run beside plain decoding under the same setting. A
second --vary gives the grid of both. The run folder holds sweep.json, summary.json, sweep.html, and plots as PNG and
SVG. (launch/ sweeps whole runs over machines; this is one run.) Of a draft model:

  --vary=draft_layers:6,12,18,24 --methods=draft_model --pair=qwen2.5-coder     cut to some of its layers
  --vary=chat_template:on,off, --vary=system_prompt:on,off                      given the target's, or without
  --vary=draft:qwen2.5-coder-0.5b,runs/distilled/draft                          before and after distillation, made by
    python -m experiments.distill --draft=qwen2.5-coder-0.5b --target=... --corpus=... --outdir=runs/distilled
    (or --draft_layers=0,1,28,29 for a drafter of the target's own layers)
"""
import datetime
import sys

from absl import flags
from tqdm import tqdm

from experiments import pairs
from experiments import workloads
from experiments.harness import cli
from experiments.harness import job
from experiments.harness import methods
from experiments.harness import settings
from experiments.harness import sweep_arms
from experiments.harness import sweep_job
from experiments.harness import sweep_setting
from experiments.harness import sweep_summary

_METHODS = flags.DEFINE_list("methods", ["ngram"], f"Methods to sweep, of {', '.join(methods.NAMES)}; plain decoding "
                             "runs beside them.")
_WORKLOAD = flags.DEFINE_string("workload", "bundled", "'bundled', or paths of .jsonl files, separated by commas.")
_CATEGORIES = flags.DEFINE_list("categories", None, "Categories to keep; all by default.")
_LANGUAGES = flags.DEFINE_list("languages", None, "Languages to keep; all by default.")
_LIMIT = flags.DEFINE_integer("limit", None, "Requests of each category, at most.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "Requests decoded together.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 1, "Times that every request is run by every arm.", lower_bound=1)
_RAW = flags.DEFINE_bool("raw", False, "Give prompts to the target as they are, without its chat template.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Run folder; runs/sweep-DATE by default.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Discard a run that stands in --outdir.")
_RESUME = flags.DEFINE_bool("resume", False, "Finish the run in --outdir: requests that it has are skipped.")


def main():
  pairs.apply()
  varied = sweep_setting.parse()
  sweep_arms.check(_METHODS.value, varied)
  requests = workloads.read_workload(_WORKLOAD.value, categories=_CATEGORIES.value, languages=_LANGUAGES.value,
                                     limit=_LIMIT.value)
  now = datetime.datetime.now()
  outdir = _OUTDIR.value or f"runs/sweep-{now:%Y-%m-%d-%H%M%S}"
  if _RESUME.value and not _OUTDIR.value:
    raise ValueError("--resume needs the run's folder: add --outdir=FOLDER")
  config = job.config(requests, command=" ".join(["python -m experiments.sweep", *sys.argv[1:]]),
                      date=now.isoformat(timespec="seconds"))
  run = sweep_job.SweepJob(settings.TARGET.value, _METHODS.value, requests, varied, batch_size=_BATCH_SIZE,
                           repeats=_REPEATS.value, raw=_RAW, outdir=outdir, overwrite=_OVERWRITE.value,
                           resume=_RESUME.value, config=config)
  print(sweep_summary.pinned_text(run.pinned), flush=True)
  try:
    run.warm_up()
    run.measure()
    sweep = run.finish()
    tqdm.write(sweep_summary.table(sweep), file=sys.stdout)
    print(f"\nreport: {run.write_report()}")
  except KeyboardInterrupt:
    run.interrupted()
    print(f"\ninterrupted; finished requests are kept. To go on: add --resume --outdir={outdir}", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
  cli.run(main)
