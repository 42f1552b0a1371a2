"""The cost model of a run: what is timed, behind which texts, and that drift does not reach the ratios."""
import itertools
import types

import pytest

from experiments.harness import cost_model
from experiments.harness import costs as costs_lib
from specjax import proposers
from specjax.testing import tiny

TARGET = tiny.decoder()


def record(name, prompt, tokens=8, method="plain"):
  return {"id": name, "method": method, "repeat": 0, "batch_size": 1, "prompt_tokens": prompt,
          "prompt_ids": [3] * prompt, "token_ids": [4] * tokens}


@pytest.fixture
def parts(monkeypatch):
  """Timing stood in for: what each part would take; returns what was asked for."""
  asked = []

  def part_timers(target, proposer, text, **given):
    asked.append(("parts", type(proposer).__name__, given["rows"]))
    own = 0.5 * isinstance(proposer, proposers.Suffix)
    widths = costs_lib.decode.widths_for(proposer.max_nodes)
    return {"draft": lambda: 1.0 + own, "commit": lambda: 2.0} | {
        f"verify {w}": lambda w=w: 10.0 + w + own for w in widths}

  def draft_timer(target, proposer, text, **given):
    asked.append(("draft", type(proposer).__name__, given["rows"]))
    return lambda: 5.0

  monkeypatch.setattr(costs_lib, "part_timers", part_timers)
  monkeypatch.setattr(costs_lib, "draft_timer", draft_timer)
  monkeypatch.setattr(costs_lib, "device_peaks", lambda: None)
  return asked


def test_drafts_are_timed_behind_several_texts(parts):
  methods = {"plain": proposers.Plain(), "ngram": proposers.NGram(num_tokens=3)}
  records = [record("a", 20), record("b", 30), record("c", 40), record("x", 9, method="q")]
  found = cost_model.measure(TARGET, methods, records)
  assert parts.count(("draft", "NGram", 1)) == 2 and ("draft", "Plain", 1) not in parts
  assert found["methods"]["ngram"]["draft_ms"] == pytest.approx((1 + 5 + 5) / 3)
  assert found["methods"]["plain"]["draft_ms"] == 1
  assert found["methods"]["ngram"]["widths"] == [1, 4] and found["schema"] == 1 and found["rows"] == 1


def test_a_pass_costs_the_same_whoever_drafted(parts):
  methods = {"plain": proposers.Plain(), "ngram": proposers.NGram(num_tokens=3),
             "suffix": proposers.Suffix(num_tokens=3)}
  found = cost_model.measure(TARGET, methods, [record("a", 20)])["methods"]
  assert found["suffix"]["verify_ms"] == found["ngram"]["verify_ms"]
  assert found["suffix"]["draft_ms"] != found["ngram"]["draft_ms"]


def test_drift_does_not_reach_the_ratios():
  """A machine that slows down while it is measured: ratios are as at rest."""
  clock = itertools.count(1)
  slow = lambda ms: lambda: ms * (1 + 0.02 * next(clock))
  found = costs_lib.interleaved({"a": slow(10.0), "b": slow(20.0), "c": slow(5.0)}, "a")
  assert found["b"] / found["a"] == pytest.approx(2, rel=0.05)
  assert found["c"] / found["a"] == pytest.approx(0.5, rel=0.05)


def test_a_usual_and_a_long_bucket(monkeypatch):
  monkeypatch.setattr(cost_model.models, "encodes", lambda target: False)
  records = [record(str(i), size) for i, size in enumerate((20, 30, 300, 40, 900))]
  lengths, usual = cost_model._lengths(types.SimpleNamespace(max_context=4096), records, 8)
  assert usual == 256 and sorted(lengths) == [256, 1024]
  assert all(20 <= len(text) <= 48 for text in lengths[256]) and len(lengths[256]) == 3
