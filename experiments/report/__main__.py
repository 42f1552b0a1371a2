"""Writes the report of a finished or interrupted run: `python -m experiments.report RUN_DIR`."""

from collections.abc import Sequence
import pathlib
import sys

from absl import app
from absl import flags

from experiments.report import page


def main(argv: Sequence[str]) -> int:
  """Returns the exit code: 0, or 2 after one message on standard error."""
  if len(argv) != 2:
    print(f"report: give one run folder, got {len(argv) - 1}: python -m experiments.report RUN_DIR", file=sys.stderr)
    return 2
  try:
    path = page.write_report(pathlib.Path(argv[1]))
  except (ValueError, OSError) as error:
    print(f"report: {error}", file=sys.stderr)
    return 2
  print(path)
  return 0


def parse(argv: Sequence[str]) -> list[str]:
  """Parses the flags of absl; asking for help is no failure, which absl takes it for."""
  try:
    return flags.FLAGS(argv)
  except SystemExit:
    sys.exit(0)


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
