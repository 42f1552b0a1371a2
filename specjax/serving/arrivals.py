"""When requests come: arrival processes, in seconds from the start of a run. Seeded NumPy, nothing else.

Open processes (`Gamma`, `Bursts`, `AtOnce`, `Recorded`) send requests whether or not earlier ones are answered, as the
world does to a server. The closed one (`Closed`) is a fixed number of users, each of whom asks again when answered: the
load then follows the server, and a slow server hides its queue. Say which one a number comes from.
"""
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import ClassVar, Protocol

import numpy as np

_BLOCK = 256  # intervals drawn together; another size gives other draws


class Arrivals(Protocol):
  """What the drivers of `load` take."""

  @property
  def concurrency(self) -> int | None:
    """Requests in flight at most: the next one waits at the client for one to end. None: the times alone decide."""

  def times(self) -> Iterator[float]:
    """When each request comes, never decreasing; the same every time that it is asked for."""


@dataclasses.dataclass(frozen=True)
class Gamma:
  """Independent intervals of a gamma law: `rate` requests a second in the mean, endlessly.

  The law is that of `vllm bench serve --request-rate --burstiness` (vllm/benchmarks/serve.py), shape `burstiness` and
  scale 1 / (rate · burstiness), so their variance is 1 / (rate² · burstiness). 1 is a Poisson process, less is more
  bursty, more is more even, infinity is a fixed beat. Unlike there the times are not stretched to end at requests over
  rate: a stretched process is no Poisson process.
  """
  rate: float
  burstiness: float = 1.0
  seed: int = 0
  concurrency: ClassVar[None] = None

  def __post_init__(self):
    if not (self.rate > 0 and math.isfinite(self.rate)):
      raise ValueError(f"rate={self.rate}: requests a second must be greater than 0 and finite; for all at once use "
                       "AtOnce")
    if not self.burstiness > 0:
      raise ValueError(f"burstiness={self.burstiness}: it must be greater than 0; 1 is a Poisson process")

  def times(self) -> Iterator[float]:
    """See `Arrivals.times`. The first request comes an interval behind the start."""
    rng, now = np.random.default_rng(self.seed), 0.0
    while True:
      for interval in self._intervals(rng):
        now += float(interval)
        yield now

  def _intervals(self, rng):
    if math.isinf(self.burstiness):
      return np.full(_BLOCK, 1 / self.rate)
    return rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), _BLOCK)


def poisson(rate: float, seed: int = 0) -> Gamma:
  """`rate` requests a second in the mean, each without memory of the others."""
  return Gamma(rate=rate, seed=seed)


@dataclasses.dataclass(frozen=True)
class Bursts:
  """`size` requests together at the start and every `period` seconds from there on."""
  size: int
  period: float
  concurrency: ClassVar[None] = None

  def __post_init__(self):
    _check_count("size", self.size, "requests of a burst")
    if not (self.period > 0 and math.isfinite(self.period)):
      raise ValueError(f"period={self.period}: seconds between bursts must be greater than 0 and finite")

  def times(self) -> Iterator[float]:
    """See `Arrivals.times`."""
    for burst in itertools.count():
      yield from itertools.repeat(burst * self.period, self.size)


@dataclasses.dataclass(frozen=True)
class AtOnce:
  """All requests at the start: what a batch job does, and the most that a server can be asked for."""
  concurrency: ClassVar[None] = None

  def times(self) -> Iterator[float]:
    """See `Arrivals.times`."""
    return itertools.repeat(0.0)


@dataclasses.dataclass(frozen=True)
class Closed:
  """`concurrency` users without a pause: a request comes as soon as fewer are in flight."""
  concurrency: int

  def __post_init__(self):
    _check_count("concurrency", self.concurrency, "requests in flight")

  def times(self) -> Iterator[float]:
    """See `Arrivals.times`: none waits for anything but a place."""
    return itertools.repeat(0.0)


@dataclasses.dataclass(frozen=True)
class Recorded:
  """Times as they were recorded, or made up, one a request."""
  seconds: tuple[float, ...]
  concurrency: ClassVar[None] = None

  def __post_init__(self):
    found = np.asarray(self.seconds, float)
    if found.ndim != 1 or not np.isfinite(found).all() or (np.diff(found, prepend=0.0) < 0).any():
      raise ValueError(f"seconds={self.seconds}: times are finite, 0 or more, and never decrease; sort them")

  def times(self) -> Iterator[float]:
    """See `Arrivals.times`."""
    return iter(self.seconds)


def _check_count(name, value, what):
  if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
    raise ValueError(f"{name}={value!r}: {what} must be a whole number of at least 1")
