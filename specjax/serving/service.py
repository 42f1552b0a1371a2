"""An engine in a thread of its own, and its requests as asynchronous iterators.

The thread does nothing but turns. What callers want goes to it through a queue, and what requests gain comes back to
the event loop that they live in, so that neither waits for the other. A request whose iterator is closed, or whose task
is cancelled, is cancelled in the engine. What a reader has not taken yet waits for it, at most the request's budget.
"""
import asyncio
import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import AsyncIterator

from specjax.serving import engine as engine_lib
from specjax.serving import requests


@dataclasses.dataclass(eq=False)
class _Reader:
  """Who waits for the updates of one request."""
  request: requests.Request
  loop: asyncio.AbstractEventLoop
  accepted: concurrent.futures.Future  # of the request's number
  updates: asyncio.Queue
  gone: bool = False

  def hand(self, update) -> None:
    """From the engine's thread. A loop that has been closed reads nothing any more."""
    try:
      self.loop.call_soon_threadsafe(self.updates.put_nowait, update)
    except RuntimeError:
      self.gone = True


class Service:
  """Runs an engine. `start` it once, `close` it at the end; both may be called by `async with`."""

  def __init__(self, engine: engine_lib.Engine):
    self.engine = engine
    self._readers: dict[int, _Reader] = {}
    self._arrived: collections.deque[_Reader] = collections.deque()
    self._wake, self._closing, self._fault = threading.Event(), False, None
    self._entrance = threading.Lock()
    self._thread = threading.Thread(target=self._run, name="specjax-engine", daemon=True)

  @property
  def problem(self) -> str | None:
    """Why the engine does not run any more; None while it does."""
    if self._fault is not None:
      return f"{type(self._fault).__name__}: {self._fault}"
    return "it was closed" if self._closing else None

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  async def close(self) -> None:
    """Ends the thread behind its turn; requests that still run are cancelled."""
    with self._entrance:
      self._closing = True
    self._wake.set()
    if self._thread.ident is not None:
      await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

  async def __aenter__(self) -> "Service":
    self.start()
    return self

  async def __aexit__(self, *_) -> None:
    await self.close()

  async def generate(self, request: requests.Request) -> AsyncIterator[requests.Update]:
    """Updates of one request, the last with its outcome. Closing the iterator cancels the request.

    Raises:
      ValueError: as `Engine.submit`. requests.QueueFull: too many requests wait. RuntimeError: the engine has failed or
        was closed; all before the first update, the last one at any time.
    """
    reader = _Reader(request, asyncio.get_running_loop(), concurrent.futures.Future(), asyncio.Queue())
    with self._entrance:  # who comes in before the end is told of it, and who comes later sees it
      if self._thread.ident is None:
        raise RuntimeError("the service was not started; call start() first, or use `async with`")
      if self.problem is not None:
        raise RuntimeError(f"the engine does not run any more: {self.problem}")
      self._arrived.append(reader)
    self._wake.set()
    done = False
    try:
      await asyncio.wrap_future(reader.accepted)
      while not done:
        update = await reader.updates.get()
        if isinstance(update, BaseException):
          done = True
          raise RuntimeError(f"the engine has failed: {update}") from update
        done = update.outcome is not None
        yield update
    finally:
      if not done:
        reader.gone = True
        self._wake.set()

  # In the engine's thread.

  def _run(self):
    try:
      while not self._closing:
        self._wake.clear()
        self._take_in()
        self._drop()
        if not self.engine.busy:
          if not self._closing:  # said behind `clear`, it is seen here; said later, it wakes the thread
            self._wake.wait()
          continue
        self._hand_over(self.engine.step())
      self._end(RuntimeError("it was closed"))
      self.engine.step()  # in which they end, and are counted
    except BaseException as error:  # whatever it is, nobody may wait for it forever
      with self._entrance:
        self._fault = error
      self._end(error)

  def _take_in(self):
    while self._arrived:
      reader = self._arrived.popleft()
      if reader.gone or not reader.accepted.set_running_or_notify_cancel():
        continue
      try:
        id = self.engine.submit(reader.request)
      except Exception as error:  # a bad request, whatever is bad about it, concerns nobody else
        reader.accepted.set_exception(error)
        continue
      self._readers[id] = reader
      reader.accepted.set_result(id)

  def _drop(self):
    for id, reader in self._readers.items():
      if reader.gone:
        self.engine.cancel(id)

  def _hand_over(self, updates):
    for update in updates:
      reader = self._readers.get(update.id)  # None for a request that somebody gave to the engine itself
      if reader is not None and not reader.gone:
        reader.hand(update)
      if update.outcome is not None:
        self._readers.pop(update.id, None)

  def _end(self, error):
    for id, reader in self._readers.items():
      reader.hand(error)
      self.engine.cancel(id)
    self._readers.clear()
    while self._arrived:
      reader = self._arrived.popleft()
      if reader.accepted.set_running_or_notify_cancel():
        reader.accepted.set_exception(RuntimeError(f"the engine does not run any more: {error}"))
