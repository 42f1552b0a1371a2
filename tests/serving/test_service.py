"""Requests as asynchronous iterators over an engine in its own thread."""
import asyncio

import pytest

from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax.sampling import SamplingParams
from specjax.serving import engine as engine_lib
from specjax.serving import requests
from specjax.serving import service as service_lib

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = testing.DummyTarget(vocab=16, order=3, max_context=256)
LOOKUP = proposers.NGram(max_ngram=3, min_ngram=1, num_tokens=3)


def request(i, new=30, **kwargs):
  return requests.Request(prompt=[1 + i % 15, 2, 3], max_new_tokens=new, eos_ids=(),
                          params=SamplingParams(temperature=0.8, seed=i), **kwargs)


def engine(**kwargs):
  return engine_lib.Engine(TARGET, LOOKUP, config=engine_lib.Config(rows=4, **kwargs))


def run(coroutine):
  return asyncio.run(asyncio.wait_for(coroutine, 120))


async def collect(service, wanted):
  ids = []
  async for update in service.generate(wanted):
    ids += update.token_ids
  return ids, update.outcome


def test_requests_of_many_tasks_get_their_own_text():
  async def main():
    async with service_lib.Service(engine()) as service:
      return await asyncio.gather(*(collect(service, request(i)) for i in range(10)))

  for i, (ids, outcome) in enumerate(run(main())):
    assert ids == outcome.token_ids == drivers.generate(
        TARGET, LOOKUP, [request(i).prompt], request(i).params, max_new_tokens=30).token_ids[0]


def test_a_closed_iterator_or_a_cancelled_task_frees_its_row():
  async def main():
    async with service_lib.Service(engine()) as service:
      first = service.generate(request(0, 200))
      await anext(first)
      await first.aclose()
      task = asyncio.create_task(collect(service, request(1, 200)))
      await asyncio.sleep(0.05)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task
      ids, outcome = await collect(service, request(2))
      assert len(ids) == 30
      while service.engine.busy:
        await asyncio.sleep(0.01)
      return service.engine.stats.snapshot()

  seen = run(main())
  assert seen["finished"]["cancelled"] == 2 and seen["generation_tokens"] < 400, seen


def test_bad_requests_concern_nobody_else():
  async def main():
    async with service_lib.Service(engine(waiting=2)) as service:
      good = asyncio.create_task(collect(service, request(0, 100)))
      await asyncio.sleep(0)
      with pytest.raises(ValueError, match="is empty"):
        await collect(service, requests.Request(prompt=[]))
      with pytest.raises(Exception):
        await collect(service, requests.Request(prompt=None))
      return await good

  ids, outcome = run(main())
  assert len(ids) == 100 and outcome.finish_reason == "length"


def test_a_failed_engine_says_so_to_all_and_to_those_that_come_later():
  async def main():
    broken = engine()

    def step():
      raise OSError("out of memory")

    broken.step = step
    async with service_lib.Service(broken) as service:
      results = await asyncio.gather(*(collect(service, request(i)) for i in range(3)), return_exceptions=True)
      assert all(isinstance(result, RuntimeError) for result in results)
      with pytest.raises(RuntimeError, match="out of memory"):
        await collect(service, request(5))

  run(main())


def test_closing_ends_what_still_runs():
  async def main():
    service = service_lib.Service(engine())
    with pytest.raises(RuntimeError, match="not started"):
      await collect(service, request(1))
    service.start()
    running = asyncio.create_task(collect(service, request(0, 200)))
    await asyncio.sleep(0.05)
    await service.close()
    with pytest.raises(RuntimeError, match="closed"):
      await running
    with pytest.raises(RuntimeError, match="closed"):
      await collect(service, request(1))

  run(main())
