"""What an engine has done so far: counters, gauges and latencies, in plain Python; `prometheus` renders them.

The engine's thread writes and any other may read: every call holds a lock for a moment, so that what is read together
belongs together.
"""
import bisect
import copy
import dataclasses
import math
import threading

from specjax.serving import requests

# Upper bounds of the buckets, in seconds: vLLM's, with finer ones below for the tokens of small models.
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
          2560)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
          40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


def ratio(part: float, whole: float) -> float | None:
  """`part` / `whole`; None where there is nothing to divide by, which is no rate rather than a bad one."""
  return part / whole if whole else None


class Histogram:
  """How many observations were at most each bound, and their sum."""

  def __init__(self, bounds: tuple[float, ...]):
    self.bounds = bounds
    self.counts = [0] * (len(bounds) + 1)  # the last one: beyond every bound
    self.sum = 0.0

  def observe(self, value: float) -> None:
    """Counts one value; one on a bound is within it."""
    self.counts[bisect.bisect_left(self.bounds, value)] += 1
    self.sum += value

  @property
  def count(self) -> int:
    return sum(self.counts)

  def cumulative(self) -> list[tuple[float, int]]:
    """(bound, observations up to it), the last bound infinite."""
    found, total = [], 0
    for bound, count in zip((*self.bounds, math.inf), self.counts):
      total += count
      found.append((bound, total))
    return found


@dataclasses.dataclass
class Counts:
  """All of it, as numbers. Counters but for what the last step left: running, waiting and the slots."""
  submitted: int = 0
  admitted: int = 0
  prompt_tokens: int = 0      # of admitted requests, cached ones included
  cached_tokens: int = 0
  generation_tokens: int = 0
  finished: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(requests.FINISH_REASONS, 0))
  steps: int = 0
  step_seconds: float = 0.0
  device_seconds: float = 0.0
  running: int = 0
  waiting: int = 0
  slots_used: int = 0
  slots_allocated: int = 0
  verify_steps: int = 0       # a request's, of ended requests as all that follows
  drafts: int = 0
  drafted_tokens: int = 0
  accepted_tokens: int = 0
  forced_tokens: int = 0
  accepted_per_position: list[int] = dataclasses.field(default_factory=list)
  # Latencies of requests that came to their end: a cancelled one would look quick.
  queue: Histogram = dataclasses.field(default_factory=lambda: Histogram(_WHOLE))
  first_token: Histogram = dataclasses.field(default_factory=lambda: Histogram(_FIRST))
  gap: Histogram = dataclasses.field(default_factory=lambda: Histogram(_TOKEN))
  token: Histogram = dataclasses.field(default_factory=lambda: Histogram(_TOKEN))
  whole: Histogram = dataclasses.field(default_factory=lambda: Histogram(_WHOLE))

  def add_speculation(self, speculation: requests.Speculation) -> None:
    """What drafting brought one request."""
    self.verify_steps += speculation.steps
    self.drafts += speculation.drafts
    self.drafted_tokens += speculation.drafted_tokens
    self.accepted_tokens += speculation.accepted_tokens
    self.forced_tokens += speculation.forced_tokens
    positions = speculation.accepted_per_position
    self.accepted_per_position += [0] * (len(positions) - len(self.accepted_per_position))
    for position, count in enumerate(positions):
      self.accepted_per_position[position] += count

  def add_latencies(self, outcome: requests.Outcome) -> None:
    """Those of one request; what it never got to is not observed."""
    self.whole.observe(outcome.finished - outcome.submitted)
    for histogram, seconds in ((self.queue, outcome.queue_seconds), (self.first_token, outcome.first_token_seconds),
                               (self.token, outcome.token_seconds)):
      if seconds is not None:
        histogram.observe(seconds)
    for seconds in outcome.gaps:
      self.gap.observe(seconds)


class Stats:
  """The counts of one engine, which calls the methods `on_...` as things happen."""

  def __init__(self):
    self._lock, self._counts = threading.Lock(), Counts()

  def on_submit(self) -> None:
    """A request was taken into the queue."""
    with self._lock:
      self._counts.submitted += 1

  def on_admit(self, prompt_tokens: int, cached_tokens: int) -> None:
    """A request's prefill begins; `cached_tokens` of its prompt need not be run."""
    with self._lock:
      self._counts.admitted += 1
      self._counts.prompt_tokens += prompt_tokens
      self._counts.cached_tokens += cached_tokens

  def on_update(self, num_tokens: int) -> None:
    """Tokens were handed out."""
    with self._lock:
      self._counts.generation_tokens += num_tokens

  def on_finish(self, outcome: requests.Outcome) -> None:
    """A request ended, whatever the reason."""
    with self._lock:
      self._counts.finished[outcome.finish_reason] += 1
      self._counts.add_speculation(outcome.speculation)
      if outcome.finish_reason != requests.CANCELLED:
        self._counts.add_latencies(outcome)

  def on_step(self, running: int, waiting: int, seconds: float, device_seconds: float, slots_used: int,
              slots_allocated: int) -> None:
    """A turn of the engine ended.

    Args:
      running, waiting: requests, as they stand now.
      seconds, device_seconds: what the turn took, and how much of it the device was waited for.
      slots_used, slots_allocated: cache slots that hold a token of a request, and all there are.
    """
    with self._lock:
      counts = self._counts
      counts.steps += 1
      counts.step_seconds += seconds
      counts.device_seconds += device_seconds
      counts.running, counts.waiting = running, waiting
      counts.slots_used, counts.slots_allocated = slots_used, slots_allocated

  def counts(self) -> Counts:
    """A copy of all counts, of one moment."""
    with self._lock:
      return copy.deepcopy(self._counts)

  def snapshot(self) -> dict:
    """The counts of one moment as JSON has them, with the rates that follow; None for a rate of nothing.

    Histograms are given by their count and mean. `acceptance_length` counts the token that the target adds, as vLLM's
    does: 1 + accepted / drafts.
    """
    counts = self.counts()
    found = {field.name: getattr(counts, field.name) for field in dataclasses.fields(counts)}
    for name, value in found.items():
      if isinstance(value, Histogram):
        found[name] = {"count": value.count, "mean_seconds": ratio(value.sum, value.count)}
    per_draft = ratio(counts.accepted_tokens, counts.drafts)
    return found | {
        "acceptance_rate": ratio(counts.accepted_tokens, counts.drafted_tokens),
        "acceptance_length": None if per_draft is None else 1 + per_draft,
        "acceptance_rate_per_position": [ratio(count, counts.drafts) for count in counts.accepted_per_position],
        "prefix_cache_hit_rate": ratio(counts.cached_tokens, counts.prompt_tokens),
        "cache_usage": ratio(counts.slots_used, counts.slots_allocated)}
