"""Loads on an engine: when requests come, that none is lost, and what is said of each."""
import functools

import pytest

from specjax import proposers
from specjax.serving import arrivals
from specjax.serving import control
from specjax.serving import engine as engine_lib
from specjax.serving import load
from specjax.serving import load_metrics
from specjax.serving import requests
from specjax.testing import dummy
import fake_engine


def ask(tokens=4, prompt=3, category="all", first=0):
  return requests.Request(prompt=list(range(first, first + prompt)), max_new_tokens=tokens, category=category)


def drive(asked, process, *, time=None, report=lambda served: None, cancellations=None, **engine):
  time = time or fake_engine.FakeTime()
  engine = fake_engine.FakeEngine(time, **engine)
  return load.run(engine, asked, process, clock=time.clock, report=report, cancellations=cancellations), engine, time


def test_requests_come_when_the_process_says():
  """A turn takes a second: what comes in the middle of one is taken up at its end, and counts from when it came."""
  found, engine, time = drive([ask(2), ask(3), ask(1)], arrivals.Recorded((0.5, 0.75, 9.0)))
  assert [served.arrived - found.begin for served in found.served] == [0.5, 0.75, 9.0]
  first, second, third = found.outcomes
  assert [o.submitted - found.begin for o in (first, second, third)] == [0.5, 0.75, 9.0]
  assert [o.admitted - found.begin for o in (first, second, third)] == [0.5, 1.5, 9.0]
  assert first.first_token_seconds == 1.0 and second.first_token_seconds == 1.75 and third.first_token_seconds == 1.0
  assert [o.finished - found.begin for o in (first, second, third)] == [2.5, 4.5, 10.0]
  assert found.end == third.finished and len(found.turns) == len(engine.trace) == 5
  assert time.slept == [0.5, 4.5]  # to the first arrival, and from the end of the second request to the third
  load_metrics.check(found.outcomes)


def test_a_closed_loop_keeps_its_users_busy_and_no_more():
  found, engine, time = drive([ask(2) for _ in range(5)], arrivals.Closed(2), rows=4)
  assert max(turn.running for turn in engine.trace) == 2 and not time.slept
  assert [served.arrived - found.begin for served in found.served] == [0, 0, 2, 2, 4]
  assert all(o.queue_seconds == 0 for o in found.outcomes)
  assert load_metrics.summarize(found)["max_concurrent_requests"] == 2


def test_all_at_once_fill_the_queue():
  found, *_ = drive([ask(2) for _ in range(5)], arrivals.AtOnce(), rows=2)
  assert [o.queue_seconds for o in found.outcomes] == [0, 0, 2, 2, 4]
  assert load_metrics.summarize(found)["max_concurrent_requests"] == 5


def test_requests_are_handed_over_as_they_are_and_reported_as_they_end():
  asked, reported = [ask(4, first=7), ask(1, prompt=5, category="code")], []
  found, engine, _ = drive(asked, arrivals.AtOnce(), report=reported.append)
  assert engine.submitted == asked
  assert [served.index for served in reported] == [1, 0] and [served.index for served in found.served] == [0, 1]
  assert [served.category for served in found.served] == ["all", "code"]


def test_a_full_queue_refuses_and_that_is_said():
  found, *_ = drive([ask(2) for _ in range(5)], arrivals.AtOnce(), rows=1, queue=2)
  assert [served.outcome is None for served in found.served] == [False, False, True, True, True]
  assert "2 requests wait" in found.served[4].error and len(found.outcomes) == 2
  summary = load_metrics.summarize(found)
  assert summary["completed"] == 2 and summary["failed"] == 3 and summary["num_requests"] == 5


def test_a_lost_request_is_an_error():
  with pytest.raises(RuntimeError, match=r"requests \[2\] have had no end"):
    drive([ask(2), ask(2), ask(4)], arrivals.AtOnce(), loses=(2,))


def test_an_engine_at_work_is_refused():
  time = fake_engine.FakeTime()
  engine = fake_engine.FakeEngine(time)
  engine.submit(ask())
  with pytest.raises(ValueError, match="at work"):
    load.run(engine, [ask()], arrivals.AtOnce(), clock=time.clock)


def test_too_few_arrivals_are_refused():
  with pytest.raises(ValueError, match="1 arrivals, and there are 2 requests"):
    drive([ask(), ask()], arrivals.Recorded((0.0,)))


def test_cancelled_requests_are_all_accounted_for():
  """In every state: waiting, running and ended already. Whatever is drawn, each request has one end."""
  asked = [ask(1 + i % 7, category="abc"[i % 3]) for i in range(200)]
  found, _, _ = drive(asked, arrivals.Closed(8), rows=3, cancellations=load.Cancellations(rate=0.5, seed=2))
  reasons = [served.outcome.finish_reason for served in found.served]
  outcomes = found.outcomes
  assert len(outcomes) == 200 and set(reasons) == {"length", "cancelled"}
  assert 40 < reasons.count("cancelled") <= 120
  gone = [o for o in outcomes if o.finish_reason == "cancelled"]
  assert any(o.admitted is None for o in gone) and any(o.token_ids for o in gone)
  load_metrics.check(outcomes)
  summary = load_metrics.summarize(found)
  assert summary["completed"] + summary["cancelled"] == 200 and not summary["failed"]
  assert summary["unfinished_tokens"] == sum(len(o.token_ids) for o in gone)
  assert summary["total_output_tokens"] == sum(a.max_new_tokens for a, r in zip(asked, reasons) if r == "length")


def test_which_requests_are_cancelled_is_a_matter_of_the_seed():
  asked = [ask(10) for _ in range(400)]
  places = load.Cancellations(0.25, seed=1).places(asked)
  assert places == load.Cancellations(0.25, seed=1).places(asked) != load.Cancellations(0.25, seed=2).places(asked)
  chosen = [place for place in places if place is not None]
  assert 70 < len(chosen) < 130 and set(chosen) == set(range(10))
  assert load.Cancellations(0.0).places(asked) == [None] * 400
  assert None not in load.Cancellations(1.0).places(asked)
  with pytest.raises(ValueError, match="rate=1.5"):
    load.Cancellations(1.5)


def test_warm_up_asks_something_else_of_the_same_lengths():
  time = fake_engine.FakeTime()
  engine = fake_engine.FakeEngine(time)
  load.warm_up(functools.partial(load.run, engine, clock=time.clock), [ask(3, prompt=4), ask(2, prompt=1)])
  assert [list(r.prompt) for r in engine.submitted] == [[1, 2, 3, 0], [0]]
  assert [r.max_new_tokens for r in engine.submitted] == [3, 2] and not engine.busy
  found = load.run(engine, [ask(2)], arrivals.AtOnce(), clock=time.clock)
  assert len(found.turns) == 2 < len(engine.trace)  # of the warm-up nothing counts


def test_a_warm_up_that_is_refused_is_an_error():
  time = fake_engine.FakeTime()
  send = functools.partial(load.run, fake_engine.FakeEngine(time, queue=2), clock=time.clock)
  with pytest.raises(ValueError, match="2 of 4 requests of the warm-up failed: 2 requests wait already"):
    load.warm_up(send, [ask()] * 4)


@pytest.mark.usefixtures("quick_compile_here")
def test_an_engine_loses_nothing_under_load():
  """The real one, on the dummy target: requests come, end and are given up in every state; counts hold for each."""
  target = dummy.DummyTarget(order=2, max_context=256)
  engine = engine_lib.Engine(target, proposers.NGram(num_tokens=3), controller=control.Gate(probe=2),
                             config=engine_lib.Config(rows=3, max_tokens=64, step_tokens=32))
  asked = [requests.Request([i % 16, *range(i % 11)], max_new_tokens=1 + i % 24, category="ab"[i % 2])
           for i in range(60)]
  found = load.run(engine, asked, arrivals.Closed(6), cancellations=load.Cancellations(0.4, seed=1))
  load_metrics.check(found.outcomes)
  summary = load_metrics.summarize(found)
  assert summary["completed"] + summary["cancelled"] == 60 and summary["cancelled"] > 5 and not engine.busy
  for served, request in zip(found.served, asked):
    if served.outcome.finish_reason == "length":
      assert len(served.outcome.token_ids) == request.max_new_tokens
  assert summary["spec_decode_num_steps"] + summary["spec_decode_accepted_tokens"] >= summary["total_output_tokens"]
  assert summary["engine"]["mean_rows_running"] <= 3 and 0 < summary["engine"]["slot_occupancy"] < 1
