"""specjax beside Hugging Face Transformers, on the same weights, prompts and threads.

  python -m experiments.compare_transformers --target=smollm2-135m --max_new_tokens=96 --repeats=3

Needs `pip install -e .[peers]`. The ratios that the project set itself stand beside their bars. Exit code 2 means that
a package is missing, 0 that everything was measured, whatever the ratios.
"""
import json
import pathlib

from absl import flags

from experiments.harness import cli
from experiments.harness import environment
from experiments.harness import peers
from experiments.harness import settings
import specjax
from specjax.models import base as models

_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs of each arm on each prompt.", lower_bound=1)
_ARMS = flags.DEFINE_multi_enum("arm", None, [*peers.TRANSFORMERS_ARMS, *peers.SPECJAX_ARMS],
                                "An arm to measure; may be repeated. Default: all.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder to write compare.json into.")
_PROMPTS = pathlib.Path(__file__).parent / "workloads" / "prototype_prompts.json"


def main():
  names = _ARMS.value or [*peers.TRANSFORMERS_ARMS, *peers.SPECJAX_ARMS]
  settings.uses_only(settings.TARGET, settings.MAX_NEW_TOKENS)
  new = settings.MAX_NEW_TOKENS.value
  arms = peers.transformers_arms(specjax.checkpoints.resolve(settings.TARGET.value), new, names)
  target, tokenizer = specjax.load(settings.TARGET.value)
  models.decoder_only(target, "this comparison")
  arms.update(peers.specjax_arms(target, new, names))
  listed = json.loads(_PROMPTS.read_text(encoding="utf-8"))
  prompts = {name: tokenizer.chat(prompt["messages"]) for name, prompt in listed.items()}
  cells = peers.measure({name: arms[name] for name in names}, prompts, _REPEATS.value)
  print(f"{settings.TARGET.value}, greedy, batch 1, at most {new} tokens, {_REPEATS.value} repeats, "
        f"{peers.cores()} threads")
  print("\n".join(peers.render(cells)))
  if _OUTDIR.value:
    path = pathlib.Path(_OUTDIR.value) / "compare.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "schema": 1, "target": settings.TARGET.value, "max_new_tokens": new, "repeats": _REPEATS.value,
        "environment": environment.describe(), "prompt_tokens": {name: len(ids) for name, ids in prompts.items()},
        "cells": [cell.to_json() for cell in cells], "ratios": peers.ratios(cells),
        "agreement": peers.agreement(cells)}, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
  flags.FLAGS.set_default("max_new_tokens", 96)
  cli.run(main)
