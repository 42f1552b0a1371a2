"""Loads over HTTP, on a server that writes what it is told to: what is sent, what is measured, what fails."""
import contextlib
import json

import numpy as np
import pytest

from specjax import proposers
from specjax import sampling_params
from specjax.serving import arrivals
from specjax.serving import control
from specjax.serving import engine as engine_lib
from specjax.serving import load
from specjax.serving import load_http
from specjax.serving import load_metrics
from specjax.serving import requests
from specjax.serving import service as service_lib
from specjax.testing import tiny

openai_server = pytest.importorskip("openai_server")
Server, serving = openai_server.Server, openai_server.serving


def ask(**given):
  return requests.Request(**{"prompt": (1, 2, 3), "max_new_tokens": 5} | given)


def test_answers_are_measured_by_the_client():
  reported = []
  server = Server()
  with serving(server) as url:
    run = load_http.run(url + "/v1/", [ask(category="a"), ask(category="b"), ask()], arrivals.Closed(2),
                        report=reported.append)
  assert server.most == 2 and len(reported) == 3 and [served.index for served in run.served] == [0, 1, 2]
  for outcome in run.outcomes:
    assert outcome.text == "Hellö" and outcome.finish_reason == "length" and outcome.admitted is None
    assert [count for _, count in outcome.arrivals] == [2, 3] and outcome.cached_tokens == 2
    assert outcome.first_token_seconds > 0.015 and outcome.gaps[0] > 0.01  # the server sleeps 0.02 before each
    assert outcome.finished == outcome.arrivals[-1][0]
  assert server.seen[0] == {"model": "the-model", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True,
                            "stream_options": {"include_usage": True}, "temperature": 0.0}
  # The counters' differences: three requests of two drafts each.
  assert run.counts == requests.Speculation(0, 6, 24, 9, (9, 0))
  found = load_metrics.summarize(run)
  assert found["completed"] == 3 and found["total_output_tokens"] == 15 and found["mean_queue_ms"] is None
  assert found["spec_decode_acceptance_rate"] == 37.5 and found["engine"] is None
  assert found["categories"]["a"]["spec_decode_num_drafts"] is None  # the counters know nothing of categories


def test_a_server_without_counters_leaves_drafts_unknown():
  with serving(Server(metrics=False)) as url:
    found = load_metrics.summarize(load_http.run(url, [ask()], arrivals.AtOnce(), model="mine"))
  assert found["spec_decode_num_drafts"] is None and found["spec_decode_acceptance_rate"] is None
  assert found["completed"] == 1


def test_events_may_be_cut_anywhere():
  with serving(Server(chunk=3)) as url:
    run = load_http.run(url, [ask()], arrivals.AtOnce())
  assert run.outcomes[0].text == "Hellö" and len(run.outcomes[0].arrivals) == 2


def test_the_event_that_only_says_why_it_ended_is_no_update():
  with serving(Server(updates=("a", "b", ""))) as url:
    run = load_http.run(url, [ask()], arrivals.AtOnce())
  assert len(run.outcomes[0].arrivals) == 2 and run.outcomes[0].finished > run.outcomes[0].arrivals[-1][0]


def test_open_arrivals_count_from_when_they_were_due():
  with serving(Server()) as url:
    run = load_http.run(url, [ask()] * 2, arrivals.Recorded((0.0, 0.1)))
  assert [round(served.arrived - run.begin, 6) for served in run.served] == [0.0, 0.1]
  assert run.end - run.begin > 0.13


def test_connections_are_closed_on_those_that_are_given_up():
  with serving(Server(updates="abcdef")) as url:
    run = load_http.run(url, [ask(max_new_tokens=4)] * 6, arrivals.AtOnce(), cancellations=load.Cancellations(1.0, 3))
  assert len(run.outcomes) == 6 and all(o.finish_reason == "cancelled" for o in run.outcomes)
  counts = [len(o.arrivals) for o in run.outcomes]
  assert counts == load.Cancellations(1.0, 3).places([ask(max_new_tokens=4)] * 6) and len(set(counts)) > 1
  assert load_metrics.summarize(run)["cancelled"] == 6


@pytest.mark.parametrize("server, named", [
    (Server(error="too many requests"), "429: .*too many requests"),
    (Server(usage=False), "without `usage`"),
    (Server(tail={"error": {"message": "out of memory"}}), "out of memory"),
])
def test_what_fails_is_kept_with_its_reason(server, named):
  with serving(server) as url:
    run = load_http.run(url, [ask()] * 2, arrivals.AtOnce())
  assert not run.outcomes and run.end == run.begin
  assert load_metrics.summarize(run)["failed"] == 2
  with pytest.raises(AssertionError, match=named):
    raise AssertionError(run.served[1].error)


def test_a_server_that_is_not_there_is_an_error():
  with pytest.raises(ValueError, match="is the server running"):
    load_http.run("http://127.0.0.1:9", [ask()], arrivals.AtOnce())


def test_a_body_says_all_that_a_request_asks():
  params = sampling_params.SamplingParams(
      temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=0, repetition_penalty=1.1, presence_penalty=0.2,
      frequency_penalty=0.3, logit_bias={7: -1.0}, allowed_ids=[7, 8], min_new_tokens=2)
  body = load_http.body(ask(params=params, prompt=np.array([5, 6]), stop=("x",), eos_ids=(9,), deadline=3.0,
                            speculate=False))
  assert body == {
      "prompt": [5, 6], "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5,
      "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 0, "repetition_penalty": 1.1, "presence_penalty": 0.2,
      "frequency_penalty": 0.3, "logit_bias": {"7": -1.0}, "allowed_token_ids": [7, 8], "min_tokens": 2, "stop": ["x"],
      "ignore_eos": True, "stop_token_ids": [9], "deadline": 3.0, "speculate": False}
  json.dumps(body)
  assert load_http.body(ask(eos_ids=()))["ignore_eos"] is True


@pytest.mark.parametrize("change, named", [
    ({"stop_sequences": ((1, 2),)}, "stop_sequences"), ({"logprobs": 0}, "logprobs=0"),
    ({"params": sampling_params.SamplingParams(banned_ids=[3])}, "banned_ids")])
def test_what_cannot_be_sent_is_refused(change, named):
  with pytest.raises(ValueError, match=named):
    load_http.body(ask(**change))


class Own:
  """specjax's own server, of a tiny target and prompt lookup that is never held down."""

  @contextlib.asynccontextmanager
  async def listening(self):
    from specjax.serving import http  # it needs aiohttp

    target, _, tokenizer = tiny.pair()
    engine = engine_lib.Engine(target, proposers.NGram(num_tokens=3), tokenizer, controller=control.Fixed(),
                               config=engine_lib.Config(rows=2, max_tokens=64))
    async with service_lib.Service(engine) as service:
      async with http.listening(http.application(service, model_name="tiny"), port=0) as url:
        yield url


@pytest.mark.usefixtures("quick_compile_here")
def test_a_load_on_our_own_server():
  """It takes what is sent, and what the client adds up is what the engine counts."""
  params = sampling_params.SamplingParams(temperature=0.8, top_k=5, seed=3)
  asked = [requests.Request([i % 5, 1, 2, 1, 2], params, max_new_tokens=6 + i) for i in range(5)]
  with serving(Own()) as url:
    run = load_http.run(url, asked, arrivals.Closed(3))
  assert [served.error for served in run.served] == [None] * 5
  assert [sum(count for _, count in o.arrivals) for o in run.outcomes] == [r.max_new_tokens for r in asked]
  assert all(0 < len(o.text) <= r.max_new_tokens for o, r in zip(run.outcomes, asked))  # the end id has no text
  found = load_metrics.summarize(run)
  assert found["completed"] == 5 and found["spec_decode_draft_tokens"] >= found["spec_decode_accepted_tokens"] >= 0
