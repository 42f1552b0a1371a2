"""Whether advice holds on requests it was not made from: all of its arms run on them, and what it advised is judged.

  python -m experiments.check_advice --preset=runs/advice/advice.json --workload=new.jsonl --outdir=runs/advice-check

Prints a line per kind of request: the advised arm's speedup beside the best one's, and in how many kinds it is within 5%
of it. The run folder holds the records and check.json. Exit 1 where an advised arm is slower than plain decoding beyond
its interval.
"""
import datetime
import sys

from absl import flags
from tqdm import tqdm

from experiments.harness import advice_check
from experiments.harness import cli
from experiments.harness import environment
from experiments.harness import job
from experiments.harness import measure
from experiments.harness import method_options
from experiments.harness import methods
from experiments.harness import presets
from experiments.harness import rules
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.harness import sharded
from experiments.harness import text_table
from experiments import workloads

_WORKLOAD = flags.DEFINE_string("workload", None, "'bundled', or paths of .jsonl files, separated by commas: requests "
                                "that the advice was not made from.")
_CATEGORIES = flags.DEFINE_list("categories", None, "Categories to keep; all by default.")
_LIMIT = flags.DEFINE_integer("limit", None, "Requests of each category, at most.", lower_bound=1)
_RAW = flags.DEFINE_bool("raw", False, "Give prompts to the target as they are, without its chat template.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Run folder; runs/advice-check-DATE by default.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Discard a run that stands in --outdir.")


def main():
  settings.sampling_params()
  method_options.uses_only()
  if not presets.PRESET.value:
    raise ValueError("--preset is needed: the advice.json of experiments.advise that is judged")
  if not _WORKLOAD.value:
    raise ValueError("--workload is needed: requests that the advice was not made from")
  found, verifier = presets.apply_target(), rules.build()
  advice_check.same(found, max_new_tokens=settings.MAX_NEW_TOKENS.value, temperature=settings.TEMPERATURE.value,
                    raw=_RAW.value)
  requests = workloads.read_workload(_WORKLOAD.value, categories=_CATEGORIES.value, limit=_LIMIT.value)
  now = datetime.datetime.now()
  config = job.config(requests, command=" ".join(["python -m experiments.check_advice", *sys.argv[1:]]),
                      date=now.isoformat(timespec="seconds")) | {"methods": ["plain", *advice_check.arms(found)]}
  folder = run_folder.RunFolder(_OUTDIR.value or f"runs/advice-check-{now:%Y-%m-%d-%H%M%S}",
                                overwrite=_OVERWRITE.value, resume=False, config=config)
  target, tokenizer = sharded.load(found["target"])
  plan = measure.Plan(target=target, tokenizer=tokenizer, batches=[[request] for request in requests], repeats=1,
                      methods=advice_check.build(found, methods.Given(target, tokenizer, found["target"])),
                      max_new_tokens=settings.MAX_NEW_TOKENS.value, raw=_RAW.value, verifier=verifier)
  measure.check(plan)
  folder.open()
  folder.write_json("environment.json", environment.describe())
  with tqdm(total=plan.runs, unit="run", leave=False, desc="compiling") as bar:
    measure.warm_up(plan, lambda done, total: bar.set_postfix_str(f"{done} of {total} programs"))
    bar.set_description("measuring")
    bar.set_postfix_str("")
    for records in measure.measure(plan, lambda: bar.update(1)):
      folder.append(records)
  judged = advice_check.judge(found, folder.records())
  folder.write_json("check.json", judged)
  print(text_table.Table("Advice on new requests", advice_check.COLUMNS, advice_check.rows(judged)).text())
  print(f"\n{advice_check.headline(judged)}\ncheck: {folder.path / 'check.json'}")
  if judged["surely_slower"]:
    sys.exit(1)


if __name__ == "__main__":
  cli.run(main)
