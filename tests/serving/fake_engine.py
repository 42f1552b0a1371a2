"""An engine without a model and a clock without time, for tests of what drives and measures engines."""
import collections

from specjax.serving import engine
from specjax.serving import load
from specjax.serving import requests


class FakeTime:
  """Seconds that pass only when somebody says so."""

  def __init__(self):
    self.seconds = 100.0  # not 0: times are differences
    self.slept = []

  def now(self):
    return self.seconds

  def sleep(self, seconds):
    self.slept.append(seconds)
    self.seconds += seconds

  @property
  def clock(self):
    return load.Clock(now=self.now, sleep=self.sleep)


class FakeEngine:
  """Decodes `rows` requests at a time. A turn takes `seconds`; a request gains in it one token and `accepted` of
  `drafted` drafts. Tokens count up from the length of the prompt."""

  def __init__(self, time, *, rows=2, seconds=1.0, drafted=0, accepted=0, queue=None, loses=()):
    self._time, self._rows, self._seconds, self._queue, self._loses = time, rows, seconds, queue, loses
    self._drafted, self._accepted = drafted, accepted
    self._waiting, self._running, self._cancelled = collections.OrderedDict(), {}, set()
    self._next, self.trace, self.submitted = 0, [], []

  @property
  def busy(self):
    return bool(self._waiting or self._running)

  def submit(self, request):
    if self._queue is not None and len(self._waiting) >= self._queue:
      raise requests.QueueFull(f"{self._queue} requests wait already")
    self.submitted.append(request)
    self._next += 1
    self._waiting[self._next] = {"request": request, "submitted": self._time.now(), "admitted": None, "tokens": [],
                                 "arrivals": [], "steps": 0, "places": [0] * self._accepted}
    return self._next

  def cancel(self, number):
    known = number in self._waiting or number in self._running
    self._cancelled |= {number} if known else set()
    return known

  def step(self):
    if not self.busy:
      return []
    updates = [self._end(number, requests.CANCELLED, []) for number in sorted(self._cancelled)]
    self._cancelled.clear()
    while self._waiting and len(self._running) < self._rows:
      number, row = self._waiting.popitem(last=False)
      self._running[number] = row | {"admitted": self._time.now()}
    self._time.seconds += self._seconds
    rows = list(self._running.items())
    for number, row in rows:
      updates += self._decode(number, row)
    drafts = self._drafted if rows else 0
    self.trace.append(engine.Turn(
        time=self._time.now(), running=len(rows), waiting=len(self._waiting), batch=self._rows if rows else 0,
        slots=64 if rows else 0, used=16 * len(rows), draft_limit=drafts, width=4 if drafts else 1,
        emitted=sum(len(update.token_ids) for update in updates), drafted=drafts * len(rows),
        accepted=self._accepted * len(rows), prefilled=0, seconds=self._seconds,
        device_seconds=0.75 * self._seconds, programs=0))
    return updates

  def _decode(self, number, row):
    room = row["request"].max_new_tokens - len(row["tokens"])
    gained = [len(row["request"].prompt) + len(row["tokens"]) + i for i in range(min(1 + self._accepted, room))]
    row["tokens"] += gained
    row["steps"] += 1
    row["places"] = [count + (place < len(gained)) for place, count in enumerate(row["places"])]
    row["arrivals"].append((self._time.now(), len(gained)))
    if number in self._loses:
      del self._running[number]
      return []
    if len(gained) == room:
      return [self._end(number, requests.LENGTH, gained)]
    return [requests.Update(number, gained, [""] * len(gained), [False] * len(gained), None)]

  def _end(self, number, reason, gained):
    row = self._waiting.pop(number, None) or self._running.pop(number)
    drafts = row["steps"] if self._drafted else 0
    outcome = requests.Outcome(
        id=number, category=row["request"].category, token_ids=row["tokens"], text="", finish_reason=reason,
        prompt_tokens=len(row["request"].prompt), cached_tokens=0,
        speculation=requests.Speculation(row["steps"], drafts, drafts * self._drafted, sum(row["places"]),
                                          tuple(row["places"])),
        submitted=row["submitted"], admitted=row["admitted"], finished=self._time.now(),
        arrivals=tuple(row["arrivals"]))
    return requests.Update(number, gained, [""] * len(gained), [False] * len(gained), None, outcome)
