"""Whether drafted text has the law of plain text, by counting: the first tokens over many seeds, on a real model.

  python -m experiments.chi_square --seeds=20000

Every lossless verifier judges drafts of a noisy copy of the target (its own logits at a higher temperature), and the
counts of the first tokens are tested against the exact law and against plain decoding (chi-square). Then the `coupled`
rule must give one text whatever drafts. `experiments.exactness` proves what this can only fail to refute.
"""
import json
import pathlib

from absl import flags
from tqdm import tqdm

from experiments.harness import cli
from experiments.harness import seeds
from experiments.harness import settings
import specjax

_SEEDS = flags.DEFINE_integer("seeds", 20000, "Seeds of every verifier.", lower_bound=1000)
_BATCH = flags.DEFINE_integer("batch_size", 250, "Seeds run together.", lower_bound=1)
_PROMPT = flags.DEFINE_string("prompt", "The capital of", "Text before the counted tokens, given as it is.")
_KEEP = flags.DEFINE_integer("keep", 6, "top-k of the counted law: k^3 texts are possible.", lower_bound=2)
_NOISE = flags.DEFINE_float("noise", 1.7, "Factor of the temperature on the draft side.", lower_bound=1e-3)
_OUTDIR = flags.DEFINE_string("outdir", None, "Writes chi_square.json there.")


def main():
  target, tokenizer = specjax.load(settings.TARGET.value)
  prompt = tokenizer.encode(_PROMPT.value, add_special_tokens=True)
  temperature = settings.TEMPERATURE.value or 1.0
  counted = seeds.Counted(target, prompt, temperature=temperature, top_k=_KEEP.value, noise=_NOISE.value)
  results = []
  with tqdm(total=len(seeds.CASES) * _SEEDS.value, unit=" seeds", leave=False) as bar:
    for name in seeds.CASES:
      results.append(counted.run(name, _SEEDS.value, _BATCH.value, bar.update))
      tqdm.write(seeds.line(results[-1]))
  real = counted.on_the_real_model(8)
  print(f"the same 8 seeds on the model itself: {real} of 8 texts equal")
  same = seeds.coupled_texts(target, prompt, temperature, settings.MAX_NEW_TOKENS.value)
  print(f"coupled, {same['tokens']} tokens of {same['seeds']} seeds: " + ", ".join(
      f"{name} {count} of {same['seeds']} equal to plain" for name, count in same["equal"].items()))
  if _OUTDIR.value:
    folder = pathlib.Path(_OUTDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chi_square.json").write_text(json.dumps({"cases": results, "coupled": same}, indent=1) + "\n")
  worst = min(result["p_value"] for result in results)
  if worst < seeds.LEAST_P or real < 8 or min(same["equal"].values()) < same["seeds"]:
    raise ValueError(f"a law was missed: the least p-value is {worst:.2g} (at least {seeds.LEAST_P} is expected), or "
                     "texts that must be equal differ")


if __name__ == "__main__":
  cli.run(main)
