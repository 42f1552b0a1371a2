"""The queue: its orders, its bounds, and that nobody waits forever."""
import dataclasses

import pytest

from specjax.serving import scheduler


@dataclasses.dataclass
class Waiting:
  prompt_tokens: int
  total_tokens: int = 10
  expires: float | None = None


def test_first_come_first_served_waits_for_room():
  queue = scheduler.Queue()
  for id, total in enumerate((5, 50, 5)):
    queue.add(id, Waiting(1, total))
  assert queue.take(10)[0] == 0
  assert queue.take(10) is None, "the long one is not overtaken"
  assert queue.take(50)[0] == 1 and queue.take(50)[0] == 2 and queue.take(50) is None


def test_shortest_first_until_patience_ends():
  queue = scheduler.Queue("shortest", patience=3)
  queue.add(0, Waiting(100))
  for id in range(1, 8):
    queue.add(id, Waiting(id))
  assert [queue.take(99)[0] for _ in range(8)] == [1, 2, 3, 0, 4, 5, 6, 7]


def test_bounds_removal_and_time():
  queue = scheduler.Queue(longest=2)
  queue.add(0, Waiting(1, expires=5.0))
  assert not queue.full
  queue.add(1, Waiting(1))
  assert queue.full and queue.expired(4.9) == [] and queue.expired(5.0) == [0]
  assert queue.remove(0).expires == 5.0 and queue.remove(0) is None and len(queue) == 1
  with pytest.raises(ValueError, match="order='lifo': allowed are fcfs, shortest"):
    scheduler.Queue("lifo")


def test_the_prompt_with_least_left_is_read_next_but_every_fourth_turn():
  left = {3: 500, 4: 20, 7: 20}
  assert [scheduler.next_chunk(left, turn) for turn in range(5)] == [4, 4, 4, 3, 4]
