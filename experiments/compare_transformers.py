"""Compares specjax with Hugging Face Transformers on the same weights, prompts and threads, and prints a table.

    python -m experiments.compare_transformers --target=smollm2-135m --max_new_tokens=96 --repeats=3

Needs `pip install -e .[peers]`. The ratios that the project set itself stand beside their bars; exit code 2 means that
a package is missing, 0 that everything was measured, whatever the ratios.
"""

import importlib.metadata
import json
import pathlib
import platform
import sys

from absl import app
from absl import flags

from experiments.harness import peers

_TARGET = flags.DEFINE_string("target", "smollm2-135m", "Model to measure: a name, or the path of its weights.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "The most tokens an answer has.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs of each arm on each prompt.", lower_bound=1)
_ARMS = flags.DEFINE_multi_enum(
  "arm", None, [*peers.TRANSFORMERS_ARMS, *peers.SPECJAX_ARMS], "An arm to measure; may be repeated. Default: all.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder to write compare.json into.")

_PROMPTS = pathlib.Path(__file__).parent / "workloads" / "prototype_prompts.json"
_PACKAGES = ("jax", "jaxlib", "numpy", "torch", "transformers", "tokenizers", "gguf", "accelerate")


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def main(argv: list[str]) -> None:
  """Measures, prints and writes."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  import specjax  # Here, so that --help does not start JAX.

  names = _ARMS.value or [*peers.TRANSFORMERS_ARMS, *peers.SPECJAX_ARMS]
  try:
    arms = peers.transformers_arms(specjax.checkpoints.resolve(_TARGET.value), _MAX_NEW_TOKENS.value, names)
  except peers.PeersMissingError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
  target, tokenizer = specjax.load(_TARGET.value)
  arms.update(peers.specjax_arms(target, _MAX_NEW_TOKENS.value, names))

  # The messages are encoded by the target's own tokenizer; for smollm2-135m that gives the `ids` in the file.
  listed = json.loads(_PROMPTS.read_text(encoding="utf-8"))
  prompts = {name: tokenizer.chat(prompt["messages"]) for name, prompt in listed.items()}
  cells = peers.measure({name: arms[name] for name in names}, prompts, _REPEATS.value)
  print(f"{_TARGET.value}, greedy, batch 1, at most {_MAX_NEW_TOKENS.value} tokens, {_REPEATS.value} repeats, "
        f"{peers.cores()} threads")
  print("\n".join(peers.render(cells)))
  if _OUTDIR.value:
    path = pathlib.Path(_OUTDIR.value) / "compare.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
      "schema": 1, "target": _TARGET.value, "max_new_tokens": _MAX_NEW_TOKENS.value, "repeats": _REPEATS.value,
      "threads": peers.cores(), "machine": platform.machine(), "python": platform.python_version(),
      "packages": {package: _version(package) for package in _PACKAGES},
      "prompt_tokens": {name: len(ids) for name, ids in prompts.items()},
      "cells": [cell.to_json() for cell in cells], "ratios": peers.ratios(cells),
      "agreement": peers.agreement(cells)}, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
  app.run(main)
