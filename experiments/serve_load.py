"""A load test: what methods of drafting gain, or lose, as more requests are served at a time.

  python -m experiments.serve_load --methods=plain,ngram,adaptive --sweep=concurrency:1,2,4,8,16,32 --outdir=runs/load
  python -m experiments.serve_load --methods=mine --base_url=http://localhost:8000 --sweep=rate:0.5,1,2

Prints a table and writes a run folder with summary.json, runs.json, requests.jsonl and report.html.
"""
import datetime
import sys

from absl import flags
from tqdm import tqdm

from experiments.harness import cli
from experiments.harness import job as job_lib
from experiments.harness import load_arms
from experiments.harness import load_job
from experiments.harness import load_sweep
from experiments.harness import methods
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.report import load_tables
from experiments import pairs
from experiments import workloads

_METHODS = flags.DEFINE_list("methods", ["plain", "ngram", load_arms.ADAPTIVE], "Methods to serve, of "
                             f"{', '.join(methods.NAMES)} and {load_arms.ADAPTIVE}. Speedups are relative to plain.")
_WORKLOAD = flags.DEFINE_string("workload", "bundled", "'bundled', or paths of .jsonl files, separated by commas.")
_CATEGORIES = flags.DEFINE_list("categories", None, "Categories to keep; all by default.")
_LANGUAGES = flags.DEFINE_list("languages", None, "Languages to keep; all by default.")
_LIMIT = flags.DEFINE_integer("limit", None, "Requests of each category, at most.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Rounds: times that every method runs every point.", lower_bound=1)
_RAW = flags.DEFINE_bool("raw", False, "Give prompts to the target as they are, without its chat template.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Run folder; runs/DATE by default.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Discard a run that stands in --outdir.")
_RESUME = flags.DEFINE_bool("resume", False, "Finish the test in --outdir: runs that it has are skipped.")


def main():
  pairs.apply()
  settings.sampling_params()
  sweep, _ = load_sweep.parse(), load_sweep.goodput()
  requests = workloads.read_workload(_WORKLOAD.value, categories=_CATEGORIES.value, languages=_LANGUAGES.value,
                                     limit=_LIMIT.value)
  now = datetime.datetime.now()
  outdir = _OUTDIR.value or f"runs/{now:%Y-%m-%d-%H%M%S}"
  if _RESUME.value and not _OUTDIR.value:
    raise ValueError("--resume needs the run's folder: add --outdir=FOLDER")
  config = job_lib.config(requests, command=" ".join(["python -m experiments.serve_load", *sys.argv[1:]]),
                          date=now.isoformat(timespec="seconds"))
  folder = run_folder.RunFolder(outdir, overwrite=_OVERWRITE.value, resume=_RESUME.value, config=config)
  arms = load_arms.build(_METHODS.value, rows=sweep.rows)
  job = load_job.Job(arms, requests, sweep, repeats=_REPEATS.value, raw=_RAW.value, folder=folder)
  try:
    job.warm_up()
    job.measure()
    summary = job.finish()
    tqdm.write(load_tables.render(summary), file=sys.stdout)
    print(f"\nreport: {job.write_report()}")
  except KeyboardInterrupt:
    job.interrupted()
    print(f"\ninterrupted; finished runs are kept. To go on: add --resume --outdir={outdir}", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
  cli.run(main)
