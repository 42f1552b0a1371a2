"""Starts programs in several processes each, as a cluster does, and waits for all of them."""
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Ended:
  """A process that has ended."""
  code: int
  out: str
  err: str


def free_port() -> int:
  """A port of this machine that was free a moment ago."""
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    return taken.getsockname()[1]


def environment(inherited: dict | None = None) -> dict:
  """The environment of a process with one CPU device: this one's, but for what it says of clusters and devices."""
  given = os.environ if inherited is None else inherited
  ours = {name: value for name, value in given.items()
          if not name.startswith(("SLURM_", "OMPI_", "PMI", "JAX_", "TPU_", "KUBERNETES_", "JOB_COMPLETION"))}
  return ours | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def flags(process: int, count: int, port: int) -> list[str]:
  """What tells an experiment where the others are."""
  return [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={process}"]


# One process imports, then forks all others; none of it starts a backend. Cases run one after another, the processes of
# one at once, each in a group of its own that a timeout kills.
_SERVER = """
import importlib, json, os, pathlib, runpy, signal, sys, time, traceback
given = json.load(sys.stdin)
for name in given["imports"]:
  importlib.import_module(name)

def child(argv, setup, path):
  os.setpgrp()
  for number, end in ((1, "out"), (2, "err")):
    os.dup2(os.open(path + end, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
  code = 0
  try:
    exec(setup)
    sys.argv = argv
    if argv[0].endswith(".py"):
      runpy.run_path(argv[0], run_name="__main__")
    else:
      runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
  except SystemExit as error:
    code = error.code or 0
  except BaseException:
    traceback.print_exc()
    code = 1
  try:
    sys.modules["jax"].distributed.shutdown()  # as at the end of every Python that has started it
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

found = []
for number, (lines, setup) in enumerate(given["cases"]):
  folder = pathlib.Path(given["folder"], str(number))
  folder.mkdir()
  running, codes, until = {}, {}, time.monotonic() + given["seconds"]
  for place, argv in enumerate(lines):
    running[os.fork() or child(argv, setup, f"{folder}/{place}.")] = place
  while running and time.monotonic() < until:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
      codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
    else:
      time.sleep(0.01)
  for pid, place in running.items():
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    codes[place] = None
  read = lambda place, end: pathlib.Path(f"{folder}/{place}.{end}").read_text(errors="replace")
  found.append([[codes[place], read(place, "out"), read(place, "err")] for place in range(len(lines))])
json.dump(found, sys.stdout)
"""


def run_all(cases, *, folder: pathlib.Path, imports=("specjax",), env: dict | None = None,
            seconds: float = 120) -> list[list[Ended]]:
  """Runs cases of (a command line for each process, Python code to execute in each before), one after another.

  Args:
    cases: a command line is [module or path of a .py file, argument ...].
    folder: for what they print. imports: modules that most need.
    seconds: a process of a case that has not ended by then fails the test, with what all of the case have printed.
  """
  lines = [[[list(map(str, line)) for line in lines], setup] for lines, setup in cases]
  done = subprocess.run(
      [sys.executable, "-c", _SERVER], cwd=ROOT, text=True, capture_output=True, check=False,
      env=(environment() if env is None else env) | {"OPENBLAS_NUM_THREADS": "1"}, timeout=len(lines) * (seconds + 30),
      input=json.dumps({"cases": lines, "folder": str(folder), "imports": list(imports), "seconds": seconds}))
  assert not done.returncode, done.stderr
  found = [[Ended(*end) for end in ends] for ends in json.loads(done.stdout)]
  for (lines, _), ends in zip(cases, found, strict=True):
    if None in [end.code for end in ends]:
      shown = "\n".join(f"--- {line} ended with {end.code}\n{end.out[-2000:]}\n{end.err[-3000:]}"
                        for line, end in zip(lines, ends, strict=True))
      raise AssertionError(f"still running after {seconds} s:\n{shown}")
  return found
