"""Renders the counts of an engine as Prometheus text, through the package prometheus_client.

Names and meanings are vLLM's where it has such a metric: accepted tokens are drafts alone, without the token that the
target adds to every step, and the counter of a position counts over all drafts, also over those that were shorter.
"""
import math

from specjax.serving import metrics

_GAUGES = {
    "vllm:num_requests_running": ("Requests that are running.", lambda c: c.running),
    "vllm:num_requests_waiting": ("Requests that wait to be run.", lambda c: c.waiting),
    "vllm:kv_cache_usage_perc": ("Share of the cache slots in use, 0 to 1.",
                                 lambda c: metrics.ratio(c.slots_used, c.slots_allocated) or 0.0),
}
_COUNTERS = {
    "vllm:prefix_cache_queries": ("Prompt tokens that were looked for in the cache.", lambda c: c.prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens that were found there.", lambda c: c.cached_tokens),
    "vllm:prompt_tokens": ("Prompt tokens of admitted requests.", lambda c: c.prompt_tokens),
    "vllm:generation_tokens": ("Tokens handed out.", lambda c: c.generation_tokens),
    "vllm:spec_decode_num_drafts": ("Drafts.", lambda c: c.drafts),
    "vllm:spec_decode_num_draft_tokens": ("Drafted tokens.", lambda c: c.drafted_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Drafted tokens that are part of the output.",
                                             lambda c: c.accepted_tokens),
    "specjax:requests_submitted": ("Requests taken into the queue.", lambda c: c.submitted),
    "specjax:spec_decode_num_steps": ("Verify passes of requests, with a draft or without.",
                                      lambda c: c.verify_steps),
    "specjax:forced_tokens": ("Tokens that a grammar left no choice about.", lambda c: c.forced_tokens),
    "specjax:engine_steps": ("Turns of the engine.", lambda c: c.steps),
    "specjax:engine_step_seconds": ("Seconds that they took.", lambda c: c.step_seconds),
    "specjax:engine_device_seconds": ("Seconds of them that the device was waited for.", lambda c: c.device_seconds),
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Time to the first token, queue included.", lambda c: c.first_token),
    "vllm:inter_token_latency_seconds": ("Time between updates of a request, each of one token or several.",
                                         lambda c: c.gap),
    "vllm:request_time_per_output_token_seconds": ("Time per token behind the first, of a request.",
                                                   lambda c: c.token),
    "vllm:e2e_request_latency_seconds": ("Time from submission to the end.", lambda c: c.whole),
    "vllm:request_queue_time_seconds": ("Time from submission to the beginning of the prefill.", lambda c: c.queue),
}
# Counters with one more label: its name, and (value, count) pairs.
_LABELLED = {
    "vllm:request_success": ("Requests that ended, by their reason.", "finished_reason",
                             lambda c: c.finished.items()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Accepted drafts by their place in the draft.", "position",
        lambda c: [(str(place), count) for place, count in enumerate(c.accepted_per_position)]),
}


class Exposition:
  """Renders an engine's counts as Prometheus text, from a registry of its own."""

  def __init__(self, stats: metrics.Stats, model_name: str):
    """A registry of one engine.

    Args:
      stats: of the engine. model_name: value of the label of that name.

    Raises:
      ValueError: the package prometheus_client is missing.
    """
    try:
      import prometheus_client
      from prometheus_client import metrics_core
    except ImportError as error:
      raise ValueError(f"metrics for Prometheus need the package prometheus_client ({error}); install it with: "
                       "pip install 'specjax[serve]'") from error
    self._stats, self._families, self._label = stats, metrics_core, model_name
    self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
    self._registry.register(self)
    self._latest, self.content_type = prometheus_client.generate_latest, prometheus_client.CONTENT_TYPE_LATEST

  def text(self) -> bytes:
    """What a scrape is answered; its type is `content_type`."""
    return self._latest(self._registry)

  def collect(self):
    """The metric families of this moment, for `prometheus_client`."""
    counts, label = self._stats.counts(), [self._label]
    for kind, families in ((self._families.GaugeMetricFamily, _GAUGES),
                           (self._families.CounterMetricFamily, _COUNTERS)):
      for name, (meaning, read) in families.items():
        family = kind(name, meaning, labels=["model_name"])
        family.add_metric(label, read(counts))
        yield family
    for name, (meaning, extra, read) in _LABELLED.items():
      family = self._families.CounterMetricFamily(name, meaning, labels=["model_name", extra])
      for value, count in read(counts):
        family.add_metric([*label, value], count)
      yield family
    for name, (meaning, read) in _HISTOGRAMS.items():
      family, histogram = self._families.HistogramMetricFamily(name, meaning, labels=["model_name"]), read(counts)
      buckets = [("+Inf" if bound == math.inf else str(float(bound)), total)
                 for bound, total in histogram.cumulative()]
      family.add_metric(label, buckets=buckets, sum_value=histogram.sum)
      yield family

  def describe(self):
    """Nothing: the families are known once they are collected."""
    return []
