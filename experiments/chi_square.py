"""Whether drafted text has the law of plain text, by counting: the first tokens over many seeds, on a real model.

  python -m experiments.chi_square --seeds=20000

Every lossless verifier judges drafts of a noisy copy of the target (its own logits at a higher temperature), and the
counts of the first tokens are tested against the exact law and against plain decoding (chi-square). The logits behind
the few texts that top-k leaves are computed once, by the model, and every seed then runs through the real step with
that table as its target; some seeds of every case run on the model itself and must give the table's text. Then the
`coupled` rule must give one text whatever drafts. `experiments.exactness` proves what this can only fail to refute.
"""
import json
import pathlib
import sys

from absl import flags
from tqdm import tqdm

from experiments.harness import cli
from experiments.harness import seeds
from experiments.harness import settings
from experiments.harness import sharded
from specjax.models import base as models

_SEEDS = flags.DEFINE_integer("seeds", 20000, "Seeds of every verifier.", lower_bound=1000)
_BATCH = flags.DEFINE_integer("batch_size", 32, "Seeds run together.", lower_bound=1)
_PROMPT = flags.DEFINE_string("prompt", "The capital of", "Text before the counted tokens, given as it is.")
_KEEP = flags.DEFINE_integer("keep", 6, "top-k of the counted law: k^3 texts are possible.", lower_bound=2)
_NOISE = flags.DEFINE_float("noise", 1.7, "Factor of the temperature on the draft side.", lower_bound=1e-3)
_OUTDIR = flags.DEFINE_string("outdir", None, "Writes chi_square.json there.")
_REAL = 8  # seeds of every case that also run on the model itself


def main():
  settings.uses_only(settings.TARGET, settings.TEMPERATURE, settings.MAX_NEW_TOKENS)
  temperature = settings.TEMPERATURE.value
  if not temperature > 0:
    raise ValueError(f"--temperature={temperature}: a greedy text is one text; give a temperature above 0 to count")
  target, tokenizer = sharded.load(settings.TARGET.value)
  models.decoder_only(target, "this test")
  prompt = tokenizer.encode(_PROMPT.value, add_special_tokens=True)
  counted = seeds.Counted(target, prompt, temperature=temperature, top_k=_KEEP.value, noise=_NOISE.value)
  results = []
  with tqdm(total=len(seeds.CASES) * _SEEDS.value, unit=" seeds", leave=False) as bar:
    for name in seeds.CASES:
      results.append(counted.run(name, _SEEDS.value, _BATCH.value, bar.update))
      results[-1]["equal_on_the_model"] = counted.on_the_real_model(name, _REAL)
      tqdm.write(f"{seeds.line(results[-1])}, {results[-1]['equal_on_the_model']} of {_REAL} texts equal on the model")
  same = seeds.coupled_texts(target, prompt, temperature, settings.MAX_NEW_TOKENS.value)
  for name, count in same["equal"].items():
    print(f"coupled, {name}: {count} of {same['seeds']} texts of {same['tokens']} tokens equal to plain at one width, "
          f"{same['accepted'][name]} drafts accepted")
  print(f"coupled across widths: {len(same['differences'])} texts differ, greatest gap of the race "
        f"{max((d['gap'] for d in same['differences']), default=0):.1e}")
  if _OUTDIR.value:
    folder = pathlib.Path(_OUTDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chi_square.json").write_text(json.dumps({"cases": results, "coupled": same}, indent=1) + "\n")
  failures = seeds.failures(results, same, _REAL)
  if failures:
    print("\n".join(["", "A LAW WAS MISSED:", *failures]), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  flags.FLAGS.set_default("temperature", 1.0)
  cli.run(main)
