"""Runs code that a model wrote, against tests, in a process of its own with little to spend.

`python -I -S` in an empty folder, without the environment; limits on processor time, memory, processes (none can be
started), files (nothing can be written) and open descriptors; the group of processes is killed at the end or after a
time. Where the system lets a user have them, namespaces of its own take away the network and other processes. A root
user's code runs as nobody: no limit on processes holds for root.

This guards against accidents. It is no jail: what the user may read the code may read, and code that looks for the
program around it can tell it that tests passed.
"""
import contextlib
import functools
import json
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time

_PROGRAM = pathlib.Path(__file__).with_name("sandbox_program.py").read_text(encoding="utf-8")
_NOBODY = 65534
_ALONE = ("unshare", "--user", "--map-current-user", "--net", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL")
_MEMORY = 512 << 20
_OUTPUT = 1 << 16  # bytes that are read of what a run says


def run(code: str, tests: list[str], *, seconds: int = 5) -> tuple[bool, int]:
  """Runs `code`, then each test behind it in a copy of its names.

  Args:
    seconds: of processor time; twice as many by the clock, since the machine may be busy.

  Returns:
    Whether the code itself ran to its end, and how many tests passed. What was killed keeps what had passed by then.

  Raises:
    ValueError: nothing can be run here; says why.
  """
  return _run(_way(), code, tests, seconds)


def describe() -> str:
  """How code is kept apart here, in words; tries it once.

  Raises:
    ValueError: nothing can be run here; says why.
  """
  wrapper, python = _way()
  apart = "network and processes apart" if wrapper else "THE NETWORK STAYS OPEN (no user namespaces here)"
  return f"code runs under {python} {'as nobody' if _is_root() else 'as this user'}, limits set, {apart}"


@functools.cache
def _way():
  """(wrapper, interpreter): the strictest that works."""
  for wrapper in (_ALONE, ()):
    # An interpreter in root's own folder cannot be started by nobody.
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
      with contextlib.suppress(OSError):
        if _run((wrapper, python), "one = 1", ["assert one == 1"], 10) == (True, 1):
          return wrapper, python
  raise ValueError("--run_code: no Python can be started with limits here" + (
      ", as the user nobody: install one outside root's own folder or start as another user" if _is_root() else "") +
      "; or leave --run_code out")


def _is_root():
  return os.geteuid() == 0


def _run(way, code, tests, seconds):
  wrapper, python = way
  word = secrets.token_hex(8)
  limits = {"RLIMIT_CPU": seconds, "RLIMIT_AS": _MEMORY, "RLIMIT_NPROC": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0}
  task = {"code": code, "tests": tests, "word": word, "limits": limits}
  user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if _is_root() else {}
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as given:
    os.chmod(folder, 0o555)  # empty, and stays so; whoever runs the code may look
    given.write(json.dumps(task).encode())
    given.seek(0)
    process = subprocess.Popen([*wrapper, python, "-I", "-S", "-c", _PROGRAM], stdin=given, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, cwd=folder, env={"PATH": "/usr/bin:/bin"},
                               start_new_session=True, **user)
    try:
      said = _read(process.stdout.fileno(), time.monotonic() + 2 * seconds)
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
      process.stdout.close()
  lines = said.decode(errors="replace").split("\n")
  return f"{word} ran" in lines, min(len(tests), lines.count(f"{word} passed"))


def _read(descriptor, until):
  """Bytes until the end, the time or the most that is read."""
  said = b""
  while len(said) < _OUTPUT:
    if not select.select([descriptor], [], [], max(0, until - time.monotonic()))[0]:
      break
    more = os.read(descriptor, _OUTPUT)
    if not more:
      break
    said += more
  return said
