"""A failure in one process ends all of them, soon and with a word of what happened.

A process that dies without a word is noticed by JAX's runtime: its heartbeats stop, or its connection breaks, and every
other process aborts, with a message. A process that fails in Python and lives on to say so would be waited for; so it
leaves word in the runtime's store, and a thread of every other process, which waits for such word, ends it, whatever it
is busy with: a collective never returns when one process takes no part.
"""
import contextlib
import json
import os
import sys
import threading
import time
from typing import NoReturn

from specjax.parallel import processes

_WORD = "specjax/word"  # the last one of a run: of a failure, or that all is done
_GRACE = 0.5  # seconds in which a process that fails of the same cause may say so itself
_FAREWELL = 10.0  # seconds that the first process, which holds the store, gives the others to read it
_FINISH = 120.0  # seconds in which all processes should have failed alike
_leaving = threading.Lock()  # held by the thread that ends this process


def watch() -> threading.Thread | None:
  """Has this process ended when another one fails; to be called once, behind `processes.start`."""
  if processes.store() is None:
    return None
  thread = threading.Thread(target=_watch, daemon=True)
  thread.start()
  return thread


def end(message: str, code: int) -> NoReturn:
  """Ends this process with a message and an exit code, and all others with it."""
  _leaving.acquire()
  word = {"process": processes.index(), "message": message, "code": code}
  try:
    processes.store().key_value_set(_WORD, json.dumps(word))
  except RuntimeError:  # another was first, or nobody is left to be told
    earlier = _earlier()
    if earlier and earlier["message"] not in ("", message):
      message = f"{message} (process {earlier['process']} failed first: {earlier['message']})"
  _heard()
  if "Gloo" in message:
    message += "; a process that it talked to has gone, whose own output says why"
  _say(message)
  if processes.is_first():
    _wait_for_readers()
  leave(code)


def finish(code: int = 0) -> None:
  """Waits until every process has got here, so that none is missed while it still writes. With `code` 0 all have ended
  well; with another, they are expected to have failed alike, and one that is alone with it soon ends all."""
  if processes.store() is None:
    return
  try:
    processes.store().wait_at_barrier("specjax/finish", processes.FOREVER_MS if not code else int(_FINISH * 1000))
  except RuntimeError as error:
    end(f"ended with code {code}, and the others did not" if code else f"other processes did not end: {error}",
        code or 1)
  if processes.is_first():
    processes.store().key_value_set(_WORD, json.dumps({"process": 0, "message": "", "code": 0}))


def leave(code: int) -> NoReturn:
  """Ends this process at once. Python's own end would wait for the other processes."""
  for stream in (sys.stdout, sys.stderr, sys.__stderr__):
    stream.flush()
  os._exit(code)


def _watch():
  try:
    word = json.loads(processes.store().blocking_key_value_get(_WORD, processes.FOREVER_MS))
  except RuntimeError:  # the runtime is being shut down, or aborts this process for a reason of its own
    return
  if not word["code"]:
    return
  _heard()
  if word["process"] == processes.index():
    return
  time.sleep(_GRACE)
  _leaving.acquire()
  _say(f"process {word['process']} failed: {word['message']}")
  if processes.is_first():
    _wait_for_readers()
  leave(word["code"])


def _earlier():
  try:
    return json.loads(processes.store().key_value_try_get(_WORD))
  except RuntimeError:
    return None


def _heard():
  with contextlib.suppress(RuntimeError):
    processes.store().key_value_set(f"specjax/heard/{processes.index()}", "", allow_overwrite=True)


def _say(message):
  print(f"error: process {processes.index()} of {processes.count()}: {message}", file=sys.__stderr__, flush=True)


def _wait_for_readers():
  """Until all have heard the word and had the time to say so."""
  until = time.monotonic() + _FAREWELL
  try:
    while time.monotonic() < until:
      if len(processes.store().key_value_dir_get("specjax/heard/")) >= processes.count():
        time.sleep(2 * _GRACE)
        return
      time.sleep(0.05)
  except RuntimeError:
    return
