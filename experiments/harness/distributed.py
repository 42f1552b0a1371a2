"""Experiments in several processes: the flags that say where the others are, and the frame around a `main`.

Every process is given the same flags but those of this module. The frame joins them, compares all other flags, the code
and the devices, silences all but the first, and makes an error of one the end of all.
"""
import contextlib
import hashlib
import os
import pathlib
import sys
import traceback

from absl import flags
from absl import logging
import jax
import jaxlib

import specjax
from specjax.parallel import failures
from specjax.parallel import processes

_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT at which process 0 listens for the others. A "
                                   "cluster that is recognized (Slurm, Open MPI, Cloud TPU, Kubernetes) gives it.")
_COUNT = flags.DEFINE_integer("num_processes", None, "Processes that run this together; as --coordinator.")
_ID = flags.DEFINE_integer("process_id", None, "Which one of them this is, from 0; as --coordinator.")
_TIMEOUT = flags.DEFINE_float("coordinator_timeout", 300.0, "Seconds to wait for process 0, and for all to come.",
                              lower_bound=0.1)
_HEARTBEAT = flags.DEFINE_float("heartbeat_timeout", 60.0, "Seconds after which a process that gives no sign of life "
                                "is taken for dead, and the others end.", lower_bound=5)
_MODE = flags.DEFINE_enum("distributed", "auto", ["auto", "on", "off"], "Run in several processes: auto, if "
                          "--coordinator is given or a cluster has started several; off, for independent runs there.")
# How a process finds the others. They may differ between processes, and between a run and its resumption.
NAMES = tuple(flag.name for flag in (_COORDINATOR, _COUNT, _ID, _TIMEOUT, _HEARTBEAT, _MODE))
# Settings of JAX that change numbers.
_NUMERICS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_ROOTS = (pathlib.Path(specjax.__file__).parent, pathlib.Path(__file__).parents[1])


@contextlib.contextmanager
def joined(*, several: bool):
  """What a `main` runs in: nothing at all for a process alone.

  Args:
    several: whether this experiment can run in several processes.

  Raises:
    ValueError: settings of a process alone that are wrong. Where there are several, every error is told with the number
      of its process, and ends all.
  """
  if not wanted():
    yield
    return
  if not several:
    raise ValueError("this experiment runs in one process, and this is one of several (--coordinator is given, or a "
                     "cluster has started several); start one, or give --distributed=off for independent runs")
  try:
    processes.start(_COORDINATOR.value, _COUNT.value, _ID.value, timeout=_TIMEOUT.value, heartbeat=_HEARTBEAT.value)
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    failures.leave(2)
  failures.watch()
  try:
    processes.same_everywhere(_facts())
    processes.same_everywhere(_devices())
    with _only_the_first_speaks():
      yield
  except SystemExit as error:
    failures.finish(error.code if isinstance(error.code, int) else bool(error.code))
    raise
  except BrokenPipeError:
    failures.end("whoever read its output has gone", 141)
  except (ValueError, OSError) as error:
    failures.end(_text(error), 2)
  except KeyboardInterrupt:
    failures.end("interrupted", 130)
  except BaseException as error:
    failures.end(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", 1)
  failures.finish()


def wanted() -> bool:
  """Whether the flags or the cluster say that this is one of several processes; touches nothing.

  Raises:
    ValueError: for flags of this module that would go unread.
  """
  given = [flag for flag in (_COORDINATOR, _COUNT, _ID) if flag.value is not None]
  if _MODE.value == "off":
    if given:
      raise ValueError(f"--distributed=off: a process alone reads no --{given[0].name}={given[0].value}; leave out one")
    found = False
  else:
    found = _MODE.value == "on" or bool(given) or "JAX_COORDINATOR_ADDRESS" in os.environ or bool(processes.detected())
  unread = [flag for flag in (_TIMEOUT, _HEARTBEAT) if flag.present]
  if unread and not found:
    raise ValueError(f"--{unread[0].name}={unread[0].value}: this is a process alone; give --coordinator, "
                     "--num_processes and --process_id as well, or leave it out")
  return found


def _facts():
  """What must be the same in every process before devices are looked at. Paths are compared too: a file that lies
  elsewhere on another host needs a link."""
  main = sys.modules["__main__"]
  found = {"the program": main.__spec__.name if main.__spec__ else pathlib.Path(main.__file__).name}
  for module, defined in flags.FLAGS.flags_by_module_dict().items():
    if module.startswith("experiments.") or module == sys.argv[0]:
      found |= {f"--{flag.name}": flag.value for flag in defined if flag.name not in NAMES}
  found["--num_processes"] = processes.count()
  found |= {name: getattr(jax.config, name) for name in _NUMERICS}
  return found | {"specjax": specjax.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__,
                  "python": ".".join(map(str, sys.version_info[:2])), "the source code": _code()}


def _code():
  """A hash of the package and the experiments as they stand on this host."""
  digest = hashlib.sha256()
  for root in _ROOTS:
    for path in sorted(root.rglob("*.py")):
      digest.update(f"{path.relative_to(root.parent)}\n".encode() + path.read_bytes())
  return digest.hexdigest()[:12]


def _devices():
  return {"the backend": jax.default_backend(), "devices of a process": jax.local_device_count(),
          "the kind of devices": jax.local_devices()[0].device_kind}


@contextlib.contextmanager
def _only_the_first_speaks():
  """The output of all other processes is dropped: tables, progress bars, warnings, and what gloo prints of its peers.
  Errors pass by it."""
  if processes.is_first():
    yield
    return
  logging.set_verbosity(logging.ERROR)
  with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
    os.dup2(nowhere.fileno(), 1)  # libraries write there; their last words before they abort go to standard error
    yield


def _text(error):
  return traceback.format_exc() if os.environ.get("SPECJAX_TRACEBACK") else str(error).strip()
