"""Who runs next: the queue, its order, and how many tokens may be in play at once.

Pure bookkeeping on the host, of anything that has `prompt_tokens`, `total_tokens` and `expires`.
"""
import collections
from typing import Protocol

ORDERS = ("fcfs", "shortest")


class Waiting(Protocol):
  """A request in the queue.

  Attributes:
    prompt_tokens: tokens of its prompt. total_tokens: those and its budget.
    expires: time at which it ends wherever it stands; None: never.
  """
  prompt_tokens: int
  total_tokens: int
  expires: float | None


class Queue:
  """Requests that wait, at most `longest` of them.

  Order "fcfs" is that of arrival. "shortest" takes the shortest prompt first; a request that was passed over `patience`
  times goes before all others, so that none waits forever.
  """

  def __init__(self, order: str = "fcfs", longest: int = 1024, patience: int = 16):
    if order not in ORDERS:
      raise ValueError(f"order={order!r}: allowed are {', '.join(ORDERS)}")
    self._order, self._longest, self._patience = order, longest, patience
    self._waiting: collections.OrderedDict[int, Waiting] = collections.OrderedDict()
    self._passed: dict[int, int] = {}

  def __len__(self) -> int:
    return len(self._waiting)

  @property
  def full(self) -> bool:
    return len(self._waiting) >= self._longest

  def add(self, id: int, request: Waiting) -> None:
    """Puts a request at the end."""
    self._waiting[id], self._passed[id] = request, 0

  def remove(self, id: int) -> Waiting | None:
    """Takes one out, wherever it stands; None if it does not wait."""
    self._passed.pop(id, None)
    return self._waiting.pop(id, None)

  def take(self, room: int) -> tuple[int, Waiting] | None:
    """The next request, if `room` tokens hold it: what is too long for now is waited for, not overtaken."""
    if not self._waiting:
      return None
    id = self._next()
    if self._waiting[id].total_tokens > room:
      return None
    for other in self._waiting:
      if other < id:
        self._passed[other] += 1
    return id, self.remove(id)

  def expired(self, now: float) -> list[int]:
    """Those whose time is over."""
    return [id for id, request in self._waiting.items() if request.expires is not None and request.expires <= now]

  def _next(self):
    first = next(iter(self._waiting))
    if self._order == "fcfs" or self._passed[first] >= self._patience:
      return first
    return min(self._waiting, key=lambda id: (self._waiting[id].prompt_tokens, id))


def next_chunk(left: dict[int, int], turn: int) -> int:
  """Which of the prompts in prefill is read next: the one with fewest tokens `left`, so that a long prompt holds up
  none that is short; every fourth turn the first that came, so that it is not held up forever."""
  if turn % 4 == 3:
    return min(left)
  return min(left, key=lambda id: (left[id], id))
