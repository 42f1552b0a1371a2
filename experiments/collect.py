"""Collects the results of a sweep into one table.

  python -m experiments.collect --outdir=runs/draft_tokens

Prints the table, with the flags that differ between points, and writes collected.json and collected.csv, which hold
every number, into the sweep's folder. Points that are missing, failed or still running are listed with the last line of
their log; then the exit code is 1.
"""
import sys

from absl import flags

from experiments.harness import cli
from experiments.harness import collecting

_OUTDIR = flags.DEFINE_string("outdir", None, "Results folder of the sweep.")


def main():
  if not _OUTDIR.value:
    raise ValueError("--outdir is needed: the results folder that a launcher was given")
  collected = collecting.collect(_OUTDIR.value)
  collecting.write(collected, _OUTDIR.value)
  print(collecting.render(collected))
  sys.exit(1 if collected.absent else 0)


if __name__ == "__main__":
  cli.run(main)
