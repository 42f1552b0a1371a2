"""Proves, by enumeration, that every lossless verifier keeps the target's law, and says how far the lossy ones stray.

  python -m experiments.exactness --outdir=runs/exactness

Draft rules x verifiers x trees that go together, over context-dependent random tables: the main rules under eleven
processor settings, three of them under three extreme ones too, the others under three settings. The draws that run,
integrated over their uniforms; two steps under the real keys; and known-wrong rules, which must be caught.
Prints a line a cell group and writes exactness.json and exactness.html. Exit code 1 if anything is not as it must be.
"""
import json
import pathlib
import sys
import time

from absl import flags
from tqdm import tqdm

from experiments.harness import cli
from experiments.harness import exactness
from experiments.harness import exactness_draws
from experiments.report import exactness as page

_OUTDIR = flags.DEFINE_string("outdir", "runs/exactness", "Folder for exactness.json and exactness.html.")
_SEED = flags.DEFINE_integer("seed", 1, "Seed of the random tables, and of the key of what is drawn.", lower_bound=0)


def main():
  begin = time.perf_counter()
  folder = pathlib.Path(_OUTDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  bar = lambda x, **kwargs: tqdm(x, leave=False, **kwargs)
  lines = [exactness.judge(cell, _SEED.value) for cell in bar(exactness.cells(), desc="cells", unit="cell")]
  groups = exactness.groups(lines)
  for group in groups:
    print(exactness.line_of(group))
  draws = list(bar(exactness_draws.fast_draws(_SEED.value), desc="fast draws", unit="draw"))
  two_steps = list(bar(exactness_draws.two_steps(_SEED.value), desc="two steps", unit="verifier"))
  negatives = list(bar(exactness.negatives(), desc="negatives", unit="rule"))
  for negative in negatives:
    print(f"negative {negative['name']:24} error {negative['max_error']:.4f}, done properly "
          f"{negative['right_twin']:.1e}")
  others = list(bar(exactness.other_seeds(_SEED.value), desc="other seeds", unit="cell"))
  block = exactness.block_against_rejection([*lines, *others])
  failures = exactness.failures(lines, draws, two_steps, negatives, block)
  result = {"cells": lines, "negatives": negatives, "draws": draws, "two_steps": two_steps,
            "block_against_rejection": block, "failures": failures, "seed": _SEED.value,
            "seconds": round(time.perf_counter() - begin, 1)}
  (folder / "exactness.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
  page.write(folder / "exactness.html", result, groups)
  lossless = [line for line in lines if line["lossless"]]
  print(f"\n{len(lines)} cells, {len(lossless)} of them lossless: greatest error "
        f"{max(x['max_error'] for x in lossless):.1e} in f32 (bound {exactness.BOUND:g}), "
        f"{max(x['max_error_x64'] for x in lossless):.1e} under x64 (bound {exactness.BOUND_X64:g})")
  counted = [x for x in draws if "standard_errors" in x]
  print(f"fast draws: greatest error {max(x['max_error'] for x in draws if x not in counted):.1e}; counted ones off by "
        f"{max(x['standard_errors'] for x in counted):.1f} standard errors; two steps: "
        f"{max(x['max_error'] for x in two_steps):.1e}; negatives caught: "
        f"{sum(x['max_error'] > exactness.CAUGHT for x in negatives)} of {len(negatives)}")
  print(f"block accepts at least what rejection does in {block['at_least']} of {block['cells']} chains, as much in "
        f"{block['equal']} of {block['point_cells']} chains of points")
  print(f"report: {folder / 'exactness.html'} ({result['seconds']:.0f} s)")
  if failures:
    print("\n".join(["", "NOT EXACT:", *failures]), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  cli.run(main)
