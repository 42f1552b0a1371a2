"""Which way of drafting to use for which kind of request: measured on your target and your requests, in plain words.

  python -m experiments.advise --target=smollm2-135m --workload=bundled --outdir=runs/advice

Writes advice.md, advice.html, the records, and advice.json, which `benchmark` and `serve` take as --preset.
"""
import datetime
import sys

from absl import flags
from tqdm import tqdm

from experiments.harness import advice_arms
from experiments.harness import advice_page
from experiments.harness import advising
from experiments.harness import cli
from experiments.harness import environment
from experiments.harness import job
from experiments.harness import method_options
from experiments.harness import rules
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.harness import sharded
from experiments import workloads
from specjax.checkpoints import heads

_WORKLOAD = flags.DEFINE_string("workload", "bundled", "'bundled', or paths of .jsonl files, separated by commas.")
_CATEGORIES = flags.DEFINE_list("categories", None, "Categories to keep; all by default.")
_LANGUAGES = flags.DEFINE_list("languages", None, "Languages to keep; all by default.")
_LIMIT = flags.DEFINE_integer("limit", None, "Requests of each category, at most; half of them choose, half of them "
                              "measure.", lower_bound=2)
_METHODS = flags.DEFINE_list("methods", None, "Methods to try, of " + ", ".join(
    (*advice_arms.CHEAP, *advice_arms.MODELS, *advice_arms.HEADS)) + "; by default all that can be had.")
_DRAFTS = flags.DEFINE_list("drafts", [], "Draft models to try, each a known name, a path or a Hub id.")
_MINUTES = flags.DEFINE_float("minutes", 20.0, "Time for all of it, about; fewer requests are measured where it is "
                              "short.", lower_bound=0.1)
_RAW = flags.DEFINE_bool("raw", False, "Give prompts to the target as they are, without its chat template.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder of the advice; runs/advice-DATE by default.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Discard a run that stands in --outdir.")
_HEADS = [getattr(method_options, kind.upper()) for kind in advice_arms.HEADS]


def main():
  settings.sampling_params()
  verifier = rules.build()
  method_options.uses_only(*_HEADS)
  requests = workloads.read_workload(_WORKLOAD.value, categories=_CATEGORIES.value, languages=_LANGUAGES.value,
                                     limit=_LIMIT.value)
  stages = advice_arms.stages_of(_METHODS.value, _DRAFTS.value, settings.TARGET.value, heads.shipped)
  now = datetime.datetime.now()
  config = job.config(requests, command=" ".join(["python -m experiments.advise", *sys.argv[1:]]),
                      date=now.isoformat(timespec="seconds"))
  folder = run_folder.RunFolder(_OUTDIR.value or f"runs/advice-{now:%Y-%m-%d-%H%M%S}", overwrite=_OVERWRITE.value,
                                resume=False, config=config)
  target, tokenizer = sharded.load(settings.TARGET.value)
  advisor = advising.Advisor(target, tokenizer, settings.TARGET.value, requests, stages, minutes=_MINUTES.value,
                             raw=_RAW.value, verifier=verifier, log=lambda text: tqdm.write(text, file=sys.stderr),
                             keep=folder.append)
  folder.open()
  folder.write_json("environment.json", environment.describe())
  found = advisor.run()
  folder.write_json("advice.json", found)
  (folder.path / "advice.md").write_text(advice_page.markdown(found), encoding="utf-8")
  (folder.path / "advice.html").write_text(advice_page.page(found), encoding="utf-8")
  print(advice_page.markdown(found))
  print(f"advice: {folder.path / 'advice.html'}; --preset={folder.path / 'advice.json'}")


if __name__ == "__main__":
  cli.run(main)
