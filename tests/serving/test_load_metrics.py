"""The numbers of a load run, on runs that can be reckoned by hand."""
import dataclasses
import json

import pytest

from specjax.serving import arrivals
from specjax.serving import load
from specjax.serving import load_metrics
from specjax.serving import requests
import fake_engine


def outcome(number, submitted, arrivals_, *, admitted=None, finished=None, prompt=10, reason="length", category="all",
            speculation=None, cached=0):
  """An outcome with `arrivals_` of (time, tokens); a step an update, unless `speculation` is given."""
  count = sum(tokens for _, tokens in arrivals_)
  steps = len(arrivals_)
  accepted = count - steps
  speculation = speculation or requests.Speculation(steps, 0, 0, accepted, ())
  return requests.Outcome(
      id=number, category=category, token_ids=[7] * count, text="", finish_reason=reason, prompt_tokens=prompt,
      cached_tokens=cached, speculation=speculation, submitted=submitted, admitted=submitted if admitted is None else
      admitted, finished=finished if finished is not None else arrivals_[-1][0], arrivals=tuple(arrivals_))


def make_run(outcomes, *, begin=0.0, refused=0, **given):
  served = [load.Served(i, o.category, o.submitted, o) for i, o in enumerate(outcomes)]
  served += [load.Served(len(served) + i, "all", 0.0, None, "refused") for i in range(refused)]
  return load.Run(tuple(served), begin, max(o.finished for o in outcomes), **given)


# Three requests over ten seconds; the third one is cancelled.
THREE = [
    outcome(1, 0.0, [(1.0, 1), (2.0, 2), (4.0, 1)], prompt=10, admitted=0.5),
    outcome(2, 1.0, [(3.0, 1), (10.0, 5)], prompt=20, admitted=2.0, category="code"),
    outcome(3, 2.0, [(5.0, 2)], prompt=30, admitted=4.0, reason="cancelled", finished=6.0),
]


def test_throughput_is_over_completed_requests_and_the_whole_time():
  found = load_metrics.summarize(make_run(THREE, refused=2))
  assert found["duration"] == 10.0 and found["num_requests"] == 5
  assert (found["completed"], found["cancelled"], found["deadline_exceeded"], found["failed"]) == (2, 1, 0, 2)
  assert found["total_input_tokens"] == 30 and found["total_output_tokens"] == 10
  assert found["unfinished_tokens"] == 2
  assert found["request_throughput"] == pytest.approx(0.2)
  assert found["output_throughput"] == pytest.approx(1.0)
  assert found["total_token_throughput"] == pytest.approx(4.0)
  assert found["request_goodput"] is None and found["max_concurrent_requests"] == 3


def test_latencies_in_milliseconds():
  """TPOT is the time behind the first update over all tokens but one; ITL is between updates, of one token or more."""
  found = load_metrics.summarize(make_run(THREE))
  assert found["mean_ttft_ms"] == pytest.approx(1500) and found["std_ttft_ms"] == pytest.approx(500)
  assert found["mean_tpot_ms"] == pytest.approx(1e3 * (3 / 3 + 7 / 5) / 2)
  assert found["median_itl_ms"] == pytest.approx(2000) and found["mean_itl_ms"] == pytest.approx(1e4 / 3)
  assert found["median_e2el_ms"] == pytest.approx(6500) and found["p50_e2el_ms"] == pytest.approx(6500)
  assert found["p95_e2el_ms"] == pytest.approx(4000 + 0.95 * 5000)
  assert found["p99_queue_ms"] == pytest.approx(500 + 0.99 * 500)


def test_nothing_measured_is_none_and_json():
  """One token has no time per token; a run in which nothing completed has no latency at all."""
  one = load_metrics.summarize(make_run([outcome(1, 0.0, [(1.0, 1)])]))
  assert one["mean_tpot_ms"] is None and one["p99_itl_ms"] is None and one["mean_ttft_ms"] == 1000
  none = load_metrics.summarize(make_run([dataclasses.replace(THREE[2], id=1)]))
  assert none["completed"] == 0 and none["mean_e2el_ms"] is None and none["steady"] is None
  json.dumps([one, none], allow_nan=False)


@pytest.mark.parametrize("limits, good", [
    ({"ttft": 1000}, 1), ({"ttft": 2000}, 2), ({"ttft": 999.9}, 0), ({"tpot": 1000}, 1), ({"tpot": 1400}, 2),
    ({"e2el": 8999}, 1), ({"e2el": 9000}, 2), ({"ttft": 2000, "tpot": 1000}, 1), ({"ttft": 0.0, "e2el": 1e9}, 0)])
def test_goodput_counts_requests_that_keep_every_limit(limits, good):
  found = load_metrics.summarize(make_run(THREE), goodput=limits)
  assert found["request_goodput"] == pytest.approx(good / 10)


def test_a_single_token_keeps_any_limit_per_token():
  found = load_metrics.summarize(make_run([outcome(1, 0.0, [(1.0, 1)])]), goodput={"tpot": 0.0})
  assert found["request_goodput"] == 1.0


@pytest.mark.parametrize("limits", [{"itl": 5.0}, {"ttft": -1.0}, {"e2el": float("nan")}])
def test_limits_that_mean_nothing_are_refused(limits):
  with pytest.raises(ValueError, match="ttft, tpot, e2el"):
    load_metrics.summarize(make_run(THREE), goodput=limits)


def test_drafts_are_pooled():
  """Seven short requests of which all drafts pass, and a long one of which few do: the mean of the ratios would be .89,
  of the lengths 1.89 (THUDM/slime#2240)."""
  short = requests.Speculation(steps=1, drafts=1, drafted_tokens=1, accepted_tokens=1, accepted_per_position=(1,))
  long = requests.Speculation(steps=100, drafts=90, drafted_tokens=180, accepted_tokens=20,
                              accepted_per_position=(15, 5))
  found = load_metrics.speculation([short] * 7 + [long])
  assert found["spec_decode_num_steps"] == 107 and found["spec_decode_num_drafts"] == 97
  assert found["spec_decode_draft_tokens"] == 187 and found["spec_decode_accepted_tokens"] == 27
  assert found["spec_decode_acceptance_rate"] == pytest.approx(100 * 27 / 187)
  assert found["spec_decode_acceptance_length"] == pytest.approx(1 + 27 / 97)
  assert found["spec_decode_per_position_acceptance_rates"] == pytest.approx([22 / 97, 5 / 97])


def test_no_drafts_are_no_rate():
  found = load_metrics.speculation([requests.Speculation(9, 0, 0, 0, ())])
  assert found["spec_decode_acceptance_rate"] is None and found["spec_decode_acceptance_length"] is None
  assert found["spec_decode_per_position_acceptance_rates"] is None and found["spec_decode_num_steps"] == 9
  assert load_metrics.speculation([])["spec_decode_acceptance_rate"] is None


def test_categories_have_their_own_counts():
  found = load_metrics.summarize(make_run(THREE))["categories"]
  assert list(found) == ["all", "code"]
  assert found["all"]["completed"] == 1 and found["all"]["total_output_tokens"] == 4
  assert found["all"]["spec_decode_num_steps"] == 4  # the cancelled request ran, too
  assert found["code"]["total_output_tokens"] == 6 and found["code"]["spec_decode_acceptance_rate"] is None


def test_counters_of_a_server_stand_for_the_outcomes():
  counts = requests.Speculation(10, 8, 16, 4, (3, 1))
  found = load_metrics.summarize(make_run(THREE, counts=counts))
  assert found["spec_decode_acceptance_rate"] == 25.0 and found["spec_decode_num_drafts"] == 8


def test_the_steady_window_leaves_out_ramp_up_and_drain():
  """Two users and seven requests of two turns: the first two end at 2, the last one is admitted at 6 and ends alone."""
  time = fake_engine.FakeTime()
  engine = fake_engine.FakeEngine(time, rows=4)
  asked = [requests.Request(prompt=[1, 2, 3], max_new_tokens=2) for _ in range(7)]
  run = load.run(engine, asked, arrivals.Closed(2), clock=time.clock)
  assert tuple(t - run.begin for t in load_metrics.steady_window(run)) == (2, 6)
  found = load_metrics.summarize(run)
  steady = found["steady"]
  assert found["output_throughput"] == pytest.approx(14 / 8)
  assert (steady["begin"], steady["duration"]) == (2, 4) and steady["output_throughput"] == pytest.approx(2)
  assert steady["completed"] == 4 and steady["request_throughput"] == 1
  assert steady["total_input_tokens"] == 12 and steady["total_token_throughput"] == pytest.approx(5)
  assert steady["arrived"] == 5 and steady["mean_e2el_ms"] == 2000


def test_requests_that_fit_into_one_batch_have_no_steady_window():
  time = fake_engine.FakeTime()
  run = load.run(fake_engine.FakeEngine(time, rows=4), [requests.Request([1], max_new_tokens=2)] * 3, arrivals.AtOnce(),
                 clock=time.clock)
  assert load_metrics.steady_window(run) is None and load_metrics.summarize(run)["steady"] is None


def test_of_a_server_the_last_arrival_ends_the_steady_window():
  far = [dataclasses.replace(o, admitted=None) for o in THREE[:2]] + [
      dataclasses.replace(outcome(4, 8.0, [(9.0, 1)]), admitted=None)]
  assert load_metrics.steady_window(make_run(far)) == (4.0, 8.0)


def test_what_the_turns_say():
  """Three requests of two tokens in two rows: two turns with both, two with one; a turn that only reads has no step."""
  time = fake_engine.FakeTime()
  engine = fake_engine.FakeEngine(time, rows=2, drafted=3)
  run = load.run(engine, [requests.Request([1], max_new_tokens=2)] * 3, arrivals.AtOnce(), clock=time.clock)
  reading = dataclasses.replace(run.turns[0], running=0, batch=0, slots=0, used=0, width=0, programs=2)
  run = dataclasses.replace(run, turns=(*run.turns, reading), end=run.end + 3)
  found = load_metrics.summarize(run)["engine"]
  assert found["turns"] == 5 and found["steps"] == 4 and found["programs"] == 2
  assert found["mean_rows_running"] == 1.5 and found["mean_rows_computed"] == 2 and found["row_occupancy"] == 0.75
  assert found["mean_waiting"] == 0.5 and found["mean_draft_limit"] == 3 and found["mean_width"] == 4
  assert found["mean_slots_used"] == 24 and found["mean_slots_allocated"] == 128 and found["slot_occupancy"] == 24 / 128
  assert found["drafting_share"] == 1 and found["mean_draft_tokens"] == 3
  assert found["turn_seconds"] == 5 and found["outside_turns_share"] == pytest.approx(1 - 5 / 7)
  assert found["device_seconds"] == 3.75 and found["outside_device_share"] == pytest.approx(1 - 3.75 / 7)
  assert load_metrics.summarize(make_run(THREE))["engine"] is None


def test_peak_memory_is_that_of_the_process():
  assert 2**20 < load_metrics.peak_memory_bytes() < 2**45


GOOD = outcome(1, 0.0, [(1.0, 3), (2.0, 2)], speculation=requests.Speculation(2, 2, 6, 3, (2, 1, 0)))


@pytest.mark.parametrize("accepted, drafted", [(0, 0), (2, 3), (1, 3)])
@pytest.mark.parametrize("budget", range(1, 8))
def test_counts_that_are_right_pass(accepted, drafted, budget):
  time = fake_engine.FakeTime()
  engine = fake_engine.FakeEngine(time, accepted=accepted, drafted=drafted)
  run = load.run(engine, [requests.Request([1], max_new_tokens=budget)] * 2, arrivals.AtOnce(), clock=time.clock)
  load_metrics.check(run.outcomes)
  load_metrics.check([GOOD])


def _drafted(**given):
  return {"speculation": dataclasses.replace(GOOD.speculation, **given)}


@pytest.mark.parametrize("change, named", [
    (_drafted(accepted_tokens=7, accepted_per_position=(2, 2, 3)), "accepted <= drafted"),
    (_drafted(accepted_tokens=-1), "0 <= accepted"),
    (_drafted(drafts=3), "drafts <= steps"),
    (_drafted(drafts=0), "a draft has a token"),
    (_drafted(steps=4), "tokens = accepted \\+ steps"),
    (_drafted(steps=1, drafts=1, accepted_per_position=(1, 1, 1)), "tokens = accepted \\+ steps"),
    (_drafted(accepted_per_position=(2, 2, 0)), "sums to accepted"),
    (_drafted(accepted_per_position=(1, 2, 0)), "never increases"),
    (_drafted(accepted_per_position=(3, 0, 0)), "never increases"),
    (_drafted(forced_tokens=4), "forced"),
    ({"token_ids": [7] * 4, "speculation": dataclasses.replace(GOOD.speculation, accepted_tokens=2,
                                                                accepted_per_position=(1, 1, 0))}, "updates hold"),
    ({"arrivals": ((1.0, 5), (2.0, 0))}, "an update has a token"),
    ({"finish_reason": "eos"}, "finish_reason"),
    ({"cached_tokens": 11}, "cached"),
    ({"admitted": 1.5}, "times are in order"),
    ({"finished": 1.5}, "times are in order"),
])
def test_counts_that_are_wrong_are_named(change, named):
  with pytest.raises(ValueError, match=f"request 1 .*{named}"):
    load_metrics.check([dataclasses.replace(GOOD, **change)])


def test_steps_that_wrote_a_stop_string_have_no_tokens():
  """It ended at "stop", of three tokens that are no part of the text."""
  ended = dataclasses.replace(GOOD, finish_reason="stop", **_drafted(steps=5))
  load_metrics.check([ended], stop_strings=True)
  for strict, outcome in ((False, ended), (True, dataclasses.replace(ended, finish_reason="length"))):
    with pytest.raises(ValueError, match="tokens = accepted"):
      load_metrics.check([outcome], stop_strings=strict)


def test_two_ends_of_one_request_are_named():
  with pytest.raises(ValueError, match="request 1 has two outcomes"):
    load_metrics.check([GOOD, dataclasses.replace(GOOD, text="other")])
