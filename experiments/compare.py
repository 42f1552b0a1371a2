"""Runs side by side: each later one against the first, with intervals over the requests that both have.

  python -m experiments.compare runs/before runs/after --threshold=0.03

Prints a table and with --outdir writes compare.html. Ends with code 1 where a method became slower than the threshold
allows in a category, for certain: usable as a gate.
"""
import sys

from absl import flags

from experiments.harness import cli
from experiments.harness import comparing
from experiments.harness import run_folder
from experiments.report import comparison

_THRESHOLD = flags.DEFINE_float("threshold", 0.03, "Share of its throughput that a method may lose in a category; more "
                                "than that, with the whole 95% interval below 1, is a regression.", lower_bound=0,
                                upper_bound=1)
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder for compare.html; no page by default.")


def main(folders):
  if len(folders) < 2:
    raise ValueError(f"{len(folders)} run folder(s) given; at least two are needed: python -m experiments.compare RUN "
                     "RUN")
  if len(set(folders)) < len(folders):
    raise ValueError(f"a run folder is named twice in {' '.join(folders)}; name each once")
  if _OUTDIR.value:
    run_folder.check_outdir(_OUTDIR.value)
  runs = [comparing.load(folder) for folder in folders]
  cells, notes = comparing.compare(runs, _THRESHOLD.value), comparing.notes(runs)
  print(comparing.render(runs, cells))
  for note in notes:
    print(f"note: {note}")
  if _OUTDIR.value:
    print(f"\nreport: {comparison.write_page(_OUTDIR.value, runs, cells, notes, _THRESHOLD.value)}")
  worse = [cell for cell in cells if cell.verdict == comparing.REGRESSION]
  for cell in worse:
    print(f"regression: {cell.method}, {cell.category}: {cell.ratio:.3f} of the throughput of {folders[0]} in "
          f"{cell.run}", file=sys.stderr)
  sys.exit(1 if worse else 0)


if __name__ == "__main__":
  cli.run(main, positional=True)
