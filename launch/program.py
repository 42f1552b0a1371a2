"""How a launcher of sweeps starts and fails: one clear message and exit code 2 for bad input, as an experiment does.

It is no experiment: it starts within a second, for JAX is not imported, and never joins the processes of a cluster,
among which it may well run.
"""
import os
import sys

from absl import app
from absl import flags


def run(main) -> None:
  """Runs `main()` under absl. SPECJAX_TRACEBACK=1 in the environment shows where an error came from."""

  def parse(argv):
    try:
      rest = flags.FLAGS(argv)
    except flags.Error as error:
      _fail(error)
    except SystemExit:  # --help and its kin, which absl ends with code 1
      sys.exit(0)
    if len(rest) > 1:
      _fail(f"unexpected argument {rest[1]!r}: options are given as --name=value (see --help)")
    return rest

  def guarded(_):
    try:
      main()
    except (ValueError, OSError) as error:
      if os.environ.get("SPECJAX_TRACEBACK"):
        raise
      _fail(error)
    except KeyboardInterrupt:
      print("\ninterrupted", file=sys.stderr, flush=True)
      sys.exit(130)

  app.run(guarded, flags_parser=parse)


def _fail(message):
  print(f"error: {str(message).strip()}", file=sys.stderr, flush=True)
  sys.exit(2)
