"""How an experiment starts and how it fails: one clear message and exit code 2, never a traceback, for bad input."""
import math
import os
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
import jax

from experiments.harness import distributed
from specjax.checkpoints import registry


def run(main, *, several: bool = False, positional: bool = False) -> None:
  """Runs `main()` under absl; flag errors and ValueErrors end the process with one message and code 2.

  With `positional` it is `main(arguments)`, the list of what is no flag; others refuse such arguments.
  With `several` it may be one of several processes that run it together: see `distributed`.
  SPECJAX_TRACEBACK=1 in the environment shows where an error came from.
  """

  def parse(argv):
    try:
      rest = flags.FLAGS(argv)
    except flags.Error as error:
      fail(error)
    except SystemExit:  # --help and its kin, which absl ends with code 1
      sys.exit(0)
    if len(rest) > 1 and not positional:
      fail(f"unexpected argument {rest[1]!r}: options are given as --name=value (see --help)")
    return rest

  def guarded(argv):
    logging.set_verbosity(logging.WARNING)
    keep_compiled_programs()
    try:
      with distributed.joined(several=several):
        main(*([argv[1:]] if positional else []))
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


def numbers(flag, kind: type[int] | type[float]) -> list:
  """The numbers of a list flag: whole ones of 1 or more, or shares from 0 to 1.

  Raises:
    ValueError: names the flag and what is none.
  """
  found = []
  for item in flag.value:
    try:
      value = kind(item)
    except ValueError:
      value = math.nan
    if not (value >= 1 if kind is int else 0 <= value <= 1):
      allowed = "whole numbers of 1 or more" if kind is int else "numbers from 0 to 1"
      raise ValueError(f"--{flag.name}: {item!r} is not allowed; give {allowed}, separated by commas")
    found.append(value)
  if not found or len(set(found)) < len(found):
    raise ValueError(f"--{flag.name}={','.join(flag.value)}: give at least one number, and none twice")
  return found


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
