"""Runs the experiments' programs as a user does, many in one go: a process imports them once and forks for each run.

The forked child sets `sys.argv` and runs the module as `python -m` does; only the import of JAX, a second a start, is
shared. The parent never starts a backend, so that the child starts its own.
"""
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import compiling

ROOT = pathlib.Path(__file__).parents[2]
TINY = "tests/fixtures/tiny_llama"

_SERVER = """
import importlib, json, os, runpy, signal, sys, tempfile, traceback
import experiments.harness.job, experiments.harness.speed, experiments.workloads
found = []
for name in sys.argv[1:]:
  importlib.import_module(name)
for argv, setup in json.load(sys.stdin):
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    pid = os.fork()
    if not pid:
      signal.alarm(120)
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      code = 0
      try:
        exec(setup)
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
      except SystemExit as exit:
        code = exit.code or 0
      except BaseException:
        traceback.print_exc()
        code = 1
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    read = lambda file: (file.seek(0), file.read().decode())[1]
    found.append([status, read(out), read(err)])
json.dump(found, sys.stdout)
"""


@dataclasses.dataclass(frozen=True)
class Ended:
  """A program that has ended."""
  code: int
  out: str
  err: str

  @property
  def message(self) -> str:
    """What the user is told last, progress bars apart."""
    return self.err.replace("\r", "\n").strip().split("\n")[-1].strip()


def environment(tmp_path_factory) -> dict:
  """The environment of a program: a cache of the test session, and no network.

  Programs are compiled with few optimizations, as by `quick_compile`, and kept for every other test of the session.
  """
  cache = tmp_path_factory.getbasetemp() / "specjax_cache"
  # JAX puts a log level into the environment of the process that runs the tests; a user's has none.
  inherited = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
  return inherited | compiling.environment(inherited) | {
      "SPECJAX_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache / "hub"), "PYTHONPATH": str(ROOT),
      "PYTHONWARNINGS": "ignore"}


def command(program: str, *args) -> list[str]:
  """The command line of a real start."""
  return [sys.executable, "-m", f"experiments.{program}", *map(str, args)]


def run(program: str, *args, env: dict) -> Ended:
  """A real start, waited for."""
  done = subprocess.run(command(program, *args), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
                        check=False)
  return Ended(done.returncode, done.stdout, done.stderr)


def run_all(cases, *, env: dict, imports=()) -> list[Ended]:
  """Runs cases of (program, arguments, Python code to execute before), in order; most need the modules `imports`."""
  given = [[[f"experiments.{program}", *map(str, args)], setup] for program, args, setup in cases]
  # One thread: a process with several, such as those of OpenBLAS, should not fork.
  done = subprocess.run([sys.executable, "-c", _SERVER, *imports], cwd=ROOT, env=env | {"OPENBLAS_NUM_THREADS": "1"},
                        check=False, input=json.dumps(given), capture_output=True, text=True, timeout=900)
  assert not done.returncode, done.stderr
  return [Ended(*found) for found in json.loads(done.stdout)]


@contextlib.contextmanager
def interruptible():
  """Programs that are started in here heed SIGINT, which is ignored in all that a script starts behind an "&"."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)


def interrupt_when(process: subprocess.Popen, condition, seconds=120) -> None:
  """Sends SIGINT as soon as `condition()` holds."""
  end = time.monotonic() + seconds
  while not condition():
    assert process.poll() is None, "the program ended before it could be interrupted"
    assert time.monotonic() < end, "the program never got there"
    time.sleep(0.005)
  process.send_signal(signal.SIGINT)
