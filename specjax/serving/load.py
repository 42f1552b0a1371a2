"""Puts a load on an engine in this process: requests come when a process of `arrivals` says, and what became of each is
kept. `load_http` does the same to a server; `load_metrics` says what a run was worth.

A request counts from the moment at which it came, not from the moment at which a busy client got round to it: a turn of
the engine takes milliseconds to seconds, and requests that come meanwhile wait for its end. Left out, that wait would
flatter the slower method (coordinated omission).
"""
import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.serving import arrivals as arrivals_lib
from specjax.serving import requests as requests_lib


@dataclasses.dataclass(frozen=True)
class Served:
  """What became of one request of a run.

  Attributes:
    index: its place in the list of requests. category: its own.
    arrived: when it came, in seconds of the clock; the outcome's `submitted` is the same.
    outcome: None where there is none, and `error` says why: it was refused, or its connection broke.
  """
  index: int
  category: str
  arrived: float
  outcome: requests_lib.Outcome | None = None
  error: str | None = None


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that has ended.

  Attributes:
    served: one a request, in the order of the list.
    begin, end: seconds of the clock: when the times of arrival began to count, and when the last request ended.
    turns: the engine's records of its turns in between; none of a server.
    counts: what drafting brought in all, where only a server's counters know; None: the outcomes say.
  """
  served: tuple[Served, ...]
  begin: float
  end: float
  turns: tuple[Any, ...] = ()
  counts: requests_lib.Speculation | None = None

  @property
  def outcomes(self) -> list[requests_lib.Outcome]:
    """Of all requests that have one, whatever their end."""
    return [served.outcome for served in self.served if served.outcome is not None]


@dataclasses.dataclass(frozen=True)
class Cancellations:
  """Requests that are given up: each one with chance `rate`, at a random point of its life, the queue included.

  The point is drawn as a number of turns (of updates, over HTTP) from 0 to the request's budget, so that it does not
  depend on how fast the machine is; a request that has ended by then ends well.
  """
  rate: float
  seed: int = 0

  def __post_init__(self):
    if not 0 <= self.rate <= 1:
      raise ValueError(f"rate={self.rate}: the share of requests that are cancelled must be in [0, 1]")

  def places(self, requests: Sequence[requests_lib.Request]) -> list[int | None]:
    """For each request after how many turns it is cancelled; None: it is not."""
    rng = np.random.default_rng(self.seed)
    chosen, shares = rng.random((2, len(requests)))
    return [int(share * request.max_new_tokens) if choice < self.rate else None
            for request, choice, share in zip(requests, chosen, shares)]


@dataclasses.dataclass(frozen=True)
class Clock:
  """What time it is, in seconds, and waiting; the engine's own times must be of the same clock."""
  now: Callable[[], float] = time.perf_counter
  sleep: Callable[[float], None] = time.sleep


@dataclasses.dataclass
class _InFlight:
  """A request that the engine holds."""
  index: int
  arrived: float
  turns: int = 0


def run(engine, requests: Sequence[requests_lib.Request], arrivals: arrivals_lib.Arrivals, *,
        cancellations: Cancellations | None = None, clock: Clock = Clock(),
        report: Callable[[Served], None] = lambda served: None) -> Run:
  """Runs all requests through the engine and waits for the last one.

  Args:
    engine: a `specjax.serving.engine.Engine` that is idle, and has compiled what it needs (see `warm_up`).
    requests: in the order in which they come.
    arrivals: when they come.
    cancellations: which of them are given up.
    clock: another one for tests.
    report: called as each request ends, for a progress bar.

  Raises:
    ValueError: fewer arrivals than requests, an engine at work, or a request that the engine cannot serve.
    RuntimeError: the engine is idle and has said nothing about the end of a request: it has lost it.
  """
  if engine.busy:
    raise ValueError("the engine is at work on requests of somebody else; wait for them, or take another one")
  loop = _Loop(engine, requests, due_times(arrivals, len(requests)), arrivals.concurrency, cancellations, clock, report)
  return loop.run()


def due_times(arrivals: arrivals_lib.Arrivals, count: int) -> list[float]:
  """When each of `count` requests comes, in seconds from the start.

  Raises:
    ValueError: the process has fewer times.
  """
  found = [due for due, _ in zip(arrivals.times(), range(count))]
  if len(found) < count:
    raise ValueError(f"{arrivals} has {len(found)} arrivals, and there are {count} requests; give as many")
  return found


class _Loop:
  """The state of one run."""

  def __init__(self, engine, requests, dues, concurrency, cancellations, clock, report):
    self._engine, self._requests, self._clock, self._report = engine, requests, clock, report
    self._concurrency = concurrency
    self._due = collections.deque(enumerate(dues))
    self._cancelled = cancellations.places(requests) if cancellations else [None] * len(requests)
    self._flying = {}  # by the engine's number
    self._served = {}  # by index

  def run(self):
    begin = self._clock.now()
    while self._due or self._flying:
      self._submit(begin)
      self._cancel()
      if self._flying:
        self._step()
      elif self._due:
        self._clock.sleep(max(0.0, begin + self._due[0][1] - self._clock.now()))
    end = max([begin, *(served.outcome.finished for served in self._served.values() if served.outcome)])
    return Run(served=tuple(self._served[i] for i in range(len(self._requests))), begin=begin, end=end,
               turns=tuple(turn for turn in self._engine.trace if turn.time > begin))

  def _submit(self, begin):
    """Hands over all that has come by now; under a limit, what there is a place for."""
    while self._due and (self._concurrency is None or len(self._flying) < self._concurrency):
      index, after = self._due[0]
      now = self._clock.now()
      if begin + after > now:
        return
      self._due.popleft()
      # Under a limit a request comes when there is a place for it, not when the list says.
      arrived = begin + after if self._concurrency is None else now
      try:
        self._flying[self._engine.submit(self._requests[index])] = _InFlight(index, arrived)
      except requests_lib.QueueFull as error:
        self._end(index, arrived, error=str(error) or "the queue is full")

  def _cancel(self):
    for number, flight in self._flying.items():
      if self._cancelled[flight.index] == flight.turns:
        self._engine.cancel(number)  # its outcome comes with the updates, as that of any other
      flight.turns += 1

  def _step(self):
    for update in self._engine.step():
      if update.outcome is not None:
        flight = self._flying.pop(update.id)
        # The engine saw it only between two turns.
        submitted = min(flight.arrived, update.outcome.submitted)
        self._end(flight.index, flight.arrived, dataclasses.replace(update.outcome, submitted=submitted))
    if self._flying and not self._engine.busy:
      raise RuntimeError(f"the engine is idle, and requests {sorted(self._flying)} have had no end: they are lost")

  def _end(self, index, arrived, outcome=None, error=None):
    served = Served(index, self._requests[index].category, arrived, outcome, error)
    self._served[index] = served
    self._report(served)


def warm_up(send: Callable[[Sequence[requests_lib.Request], arrivals_lib.Arrivals], Run],
            requests: Sequence[requests_lib.Request]) -> None:
  """Sends requests that nobody counts, all at once, and waits for them: what a first use costs is paid by then.

  Their prompts are turned by one token, so that they are as long and nearly as natural as those given and yet begin
  otherwise: nothing of them is found again in a cache of prefixes.

  Args:
    send: `run` with an engine, or `load_http.run` with a server.
    requests: as many as the load has in flight, so that batches of that size have been seen.

  Raises:
    ValueError: some were refused or failed.
  """
  turn = lambda prompt: np.roll(np.asarray(prompt), -1).tolist()
  turned = [dataclasses.replace(request, prompt=turn(request.prompt)) for request in requests]
  errors = [served.error for served in send(turned, arrivals_lib.AtOnce()).served if served.error]
  if errors:
    raise ValueError(f"{len(errors)} of {len(turned)} requests of the warm-up failed: {errors[0]}")
