"""The counts add up, a rate of nothing is None, and what Prometheus reads is what was counted."""
import builtins
import json
import math
import threading

import pytest

from specjax.serving import metrics
from specjax.serving import prometheus
from specjax.serving import requests

NOTHING = requests.Speculation(steps=0, drafts=0, drafted_tokens=0, accepted_tokens=0, accepted_per_position=())


def outcome(reason="stop", *, speculation=NOTHING, arrivals=((1.5, 2), (1.75, 3)), admitted=1.25):
  return requests.Outcome(id=0, category="all", token_ids=[1] * sum(count for _, count in arrivals), text="",
                          finish_reason=reason, prompt_tokens=10, cached_tokens=4, speculation=speculation,
                          submitted=1.0, admitted=admitted, finished=2.0, arrivals=arrivals)


def scrape(stats):
  """{(name, labels but for the model's): value}, by Prometheus's own parser."""
  parser = pytest.importorskip("prometheus_client.parser")
  text = prometheus.Exposition(stats, "m").text().decode()
  found = {}
  for family in parser.text_string_to_metric_families(text):
    for sample in family.samples:
      labels = dict(sample.labels)
      assert labels.pop("model_name") == "m"
      found[sample.name, tuple(labels.values())] = sample.value
  return found


def filled():
  stats = metrics.Stats()
  for prompt, cached in ((10, 4), (20, 0), (5, 0)):
    stats.on_submit()
    stats.on_admit(prompt, cached)
  stats.on_update(2)
  stats.on_update(3)
  stats.on_finish(outcome(speculation=requests.Speculation(3, 2, 6, 3, (2, 1, 0), 1)))
  stats.on_finish(outcome("length", speculation=requests.Speculation(4, 4, 4, 3, (3,))))
  stats.on_finish(outcome("cancelled", arrivals=(), admitted=None))
  stats.on_step(2, 1, 0.5, 0.25, 30, 120)
  return stats


def test_the_counts():
  found = filled().snapshot()
  assert (found["submitted"], found["admitted"], found["prompt_tokens"], found["cached_tokens"]) == (3, 3, 35, 4)
  assert found["finished"] == {"stop": 1, "length": 1, "cancelled": 1, "deadline": 0}
  assert (found["drafts"], found["drafted_tokens"], found["accepted_tokens"]) == (6, 10, 6)
  assert found["accepted_per_position"] == [5, 1, 0]
  assert found["acceptance_rate"] == 0.6 and found["acceptance_length"] == 2.0
  assert found["acceptance_rate_per_position"] == [5 / 6, 1 / 6, 0]
  assert found["prefix_cache_hit_rate"] == 4 / 35 and found["cache_usage"] == 0.25
  # The cancelled one is in no latency.
  assert found["whole"] == {"count": 2, "mean_seconds": 1.0}
  assert found["queue"] == {"count": 2, "mean_seconds": 0.25}
  assert found["first_token"] == {"count": 2, "mean_seconds": 0.5}
  assert found["token"] == {"count": 2, "mean_seconds": 0.0625}


def test_no_rate_of_nothing():
  """vllm#24322, ArcticInference#40: no exception and no NaN without drafts, and JSON that any reader takes."""
  stats = metrics.Stats()
  stats.on_finish(outcome())
  found = stats.snapshot()
  for name in ("acceptance_rate", "acceptance_length", "prefix_cache_hit_rate", "cache_usage"):
    assert found[name] is None
  assert found["acceptance_rate_per_position"] == []
  json.dumps(found, allow_nan=False)
  assert not any(math.isnan(value) for value in scrape(stats).values())


def test_prometheus_reads_what_was_counted():
  found = scrape(filled())
  assert found["vllm:num_requests_running", ()] == 2 and found["vllm:num_requests_waiting", ()] == 1
  assert found["vllm:kv_cache_usage_perc", ()] == 0.25
  assert found["vllm:prefix_cache_queries_total", ()] == 35 and found["vllm:prefix_cache_hits_total", ()] == 4
  assert found["vllm:prompt_tokens_total", ()] == 35 and found["vllm:generation_tokens_total", ()] == 5
  assert found["vllm:request_success_total", ("stop",)] == 1
  assert found["vllm:spec_decode_num_drafts_total", ()] == 6
  assert found["vllm:spec_decode_num_draft_tokens_total", ()] == 10
  assert found["vllm:spec_decode_num_accepted_tokens_total", ()] == 6
  places = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(place),)] for place in range(3)]
  assert places == [5, 1, 0]
  for name, count, total in (("time_to_first_token", 2, 1.0), ("inter_token_latency", 2, 0.5),
                             ("request_time_per_output_token", 2, 0.125), ("e2e_request_latency", 2, 2.0),
                             ("request_queue_time", 2, 0.5)):
    assert found[f"vllm:{name}_seconds_count", ()] == count and found[f"vllm:{name}_seconds_sum", ()] == total


def test_buckets_are_cumulative_and_closed_above():
  histogram = metrics.Histogram((1.0, 2.0))
  for value in (0.5, 1.0, 1.5, 9.0):
    histogram.observe(value)
  assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (math.inf, 4)]
  assert histogram.count == 4 and histogram.sum == 12.0


def test_what_is_read_together_belongs_together():
  stats, ended = metrics.Stats(), threading.Event()

  def write():
    for _ in range(2000):
      stats.on_admit(7, 7)
    ended.set()

  writer = threading.Thread(target=write)
  writer.start()
  while not ended.is_set():
    counts = stats.counts()
    assert counts.prompt_tokens == counts.cached_tokens == 7 * counts.admitted
  writer.join()
  assert stats.counts().admitted == 2000


def test_without_the_package(monkeypatch):
  real = builtins.__import__

  def missing(name, *args, **kwargs):
    if name == "prometheus_client":
      raise ImportError("No module named 'prometheus_client'")
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", missing)
  stats = filled()
  assert stats.snapshot()["admitted"] == 3
  with pytest.raises(ValueError, match=r"pip install 'specjax\[serve\]'"):
    prometheus.Exposition(stats, "m")
