"""How an experiment starts and how it fails: one clear message and exit code 2, never a traceback, for bad input."""
import os
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
import jax

from specjax.checkpoints import registry


def run(main) -> None:
  """Runs `main()` under absl; flag errors and ValueErrors end the process with one message and code 2.

  SPECJAX_TRACEBACK=1 in the environment shows where an error came from.
  """

  def parse(argv):
    try:
      rest = flags.FLAGS(argv)
    except flags.Error as error:
      fail(error)
    except SystemExit:  # --help and its kin, which absl ends with code 1
      sys.exit(0)
    if len(rest) > 1:
      fail(f"unexpected argument {rest[1]!r}: options are given as --name=value (see --help)")
    return rest

  def guarded(_):
    logging.set_verbosity(logging.WARNING)
    keep_compiled_programs()
    try:
      main()
    except BrokenPipeError:  # whoever read our output has gone, as in `| head`
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(141)
    except (ValueError, OSError) as error:
      if os.environ.get("SPECJAX_TRACEBACK"):
        raise
      fail(error)
    except KeyboardInterrupt:
      print("\ninterrupted", file=sys.stderr, flush=True)
      sys.exit(130)

  app.run(guarded, flags_parser=parse)


def fail(message) -> None:
  """Prints `message` to standard error and exits with code 2."""
  text = str(message).strip()
  print(f"error: {text}", file=sys.stderr, flush=True)
  sys.exit(2)


def programs_folder() -> pathlib.Path:
  """Where compiled programs are kept."""
  return pathlib.Path(jax.config.jax_compilation_cache_dir or registry.cache_folder() / "programs")


def keep_compiled_programs() -> None:
  """Turns the persistent compilation cache on for every program, however fast it compiled."""
  if not jax.config.jax_compilation_cache_dir:
    jax.config.update("jax_compilation_cache_dir", str(programs_folder()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
