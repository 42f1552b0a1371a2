"""The speed benchmark's parts: what its timers run, how samples are taken, and what figures are made of them."""
import types

import jax
import numpy as np
import pytest

from experiments.harness import costs
from experiments.harness import speed
from experiments.harness import speed_report
from experiments.harness import verifier_speed
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import sampling_params
from specjax import verifiers
from specjax.testing import DummyTarget

TARGET = DummyTarget(vocab=32, order=1)
PROMPT = [3, 4, 5, 3, 4, 5, 3, 4]


def test_samples_are_taken_in_turn_after_a_run_of_each():
  calls = []
  timers = {name: (lambda name=name: calls.append(name) or len(calls)) for name in "abc"}
  progress = []
  samples = speed.interleave(timers, 3, lambda: progress.append(1))
  assert calls == list("abc") * 4
  assert samples == {"a": [4, 7, 10], "b": [5, 8, 11], "c": [6, 9, 12]}
  assert len(progress) == 12


@pytest.mark.usefixtures("quick_compile_here")
def test_the_filler_fills_every_step_of_its_width_and_changes_nothing():
  plain = drivers.generate(TARGET, proposers.Plain(), [PROMPT], max_new_tokens=20)
  # An id that the text does not hold is accepted nowhere.
  token = next(i for i in range(32) if i not in plain.token_ids[0])
  filled = drivers.generate(TARGET, speed.Filler(3, token=token), [PROMPT], max_new_tokens=20)
  assert filled.token_ids == plain.token_ids
  assert int(filled.counters.steps[0]) == 20
  assert int(filled.counters.drafted_tokens[0]) == 3 * 20
  widths = dict(zip(decode.widths_for(4), filled.counters.steps_per_width[0].tolist(), strict=True))
  assert widths == {1: 0, 4: 20}


@pytest.mark.usefixtures("quick_compile_here")
def test_timers_give_milliseconds(monkeypatch):
  """Each with a clock that ticks a second a call, so that what it divides by is seen."""
  clock = iter(range(10**6))
  monkeypatch.setattr(speed, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
  assert speed.step_timer(TARGET, proposers.Plain(), PROMPT, 10)() == pytest.approx(1e3 / 10)
  assert speed.forward_timer(TARGET, proposers.Plain(), PROMPT, 5)() == pytest.approx(1e3 / 5)
  results = {}
  run = speed.request_timer(TARGET, proposers.Plain(), PROMPT, 20, results, "x")
  times = [run(), run()]
  assert [r.timings.total * 1e3 / 20 for r in results["x"]] == times
  assert results["x"][0].token_ids == results["x"][1].token_ids


@pytest.mark.usefixtures("quick_compile_here")
def test_compile_cost_leaves_the_cache_as_it_was():
  before = jax.config.jax_enable_compilation_cache
  seconds, size = speed.compile_cost(TARGET, proposers.Plain(), PROMPT, 20)
  assert seconds > 0.05  # nothing was reused
  assert size > 1000
  assert jax.config.jax_enable_compilation_cache == before


def test_costs_are_those_of_the_settings_and_the_verifier(monkeypatch):
  """A sampled step costs more than a greedy one, and so does another rule. A minimum length is no cost and fits in."""
  seen = []
  real = costs.decode.verify_at

  def verify_at(target, verifier, depth, width, node_ids, features, state, *args):
    seen.append((verifier, width, state.params.banned_ids is not None))
    return real(target, verifier, depth, width, node_ids, features, state, *args)

  def traced(turns, loop, *args):
    del turns
    jax.eval_shape(loop, *args)
    return 1.0

  monkeypatch.setattr(costs.decode, "verify_at", verify_at)
  monkeypatch.setattr(costs, "_timed", traced)
  params = sampling_params.SamplingParams(temperature=0.8, banned_ids=[3], min_new_tokens=500)
  found = costs.step_costs(TARGET, proposers.NGram(num_tokens=3), PROMPT, params=params, verifier=verifiers.Block())
  assert set(seen) == {(verifiers.Block(), width, True) for width in found["widths"]}


@pytest.mark.usefixtures("quick_compile_here")
def test_step_costs(monkeypatch):
  proposer = proposers.NGram(num_tokens=3)
  peaks = {"memory_bandwidth": 1e9, "arithmetic": 1e10}
  monkeypatch.setattr(costs, "_COMMIT_TURNS", 16)
  found = costs.step_costs(TARGET, proposer, PROMPT, rows=2, peaks=peaks)
  assert found["widths"] == list(decode.widths_for(4))
  assert len(found["verify_ms"]) == len(found["widths"])
  assert min(found["draft_ms"], found["commit_ms"], *found["verify_ms"]) > 0
  seconds = (found["draft_ms"] + found["verify_ms"][0] + found["commit_ms"]) / 1e3
  size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(TARGET))
  assert found["utilization"]["memory_bandwidth"] == pytest.approx(size / seconds / 1e9)
  assert found["utilization"]["arithmetic"] == pytest.approx(2 * 2 / seconds / 1e10)  # one value, two rows
  assert found["utilization"]["memory_bandwidth_peak_bytes_per_second"] == 1e9


def _results(first, total, length=97, first_tokens=1):
  timings = types.SimpleNamespace(first_token=first, total=total, first_tokens=np.array([first_tokens]))
  return types.SimpleNamespace(lengths=np.array([length]), timings=timings)


def _samples(prototype):
  widths = {f"step, width {w}": [10.0 * factor, 12.0 * factor, 11.0 * factor]
            for w, factor in ((1, 1), (4, 1.2), (8, 1.8), (16, 2))}
  samples = widths | {"forward and head, width 1": [10.0, 10.5, 11.0], "plain, chat": [20.0, 30.0, 25.0],
                      "ngram, chat": [25.0, 26.0, 24.0], "plain, summary": [25.0] * 3, "ngram, summary": [12.5] * 3}
  if prototype:
    samples |= {"prototype step, width 1": [11.0, 20.0, 5.0], "prototype plain, chat": [50.0] * 3,
                "prototype plain, summary": [20.0] * 3}
  return samples


@pytest.mark.parametrize("prototype", [True, False])
def test_figures(prototype):
  # The first result of each is of the run that compiled: it counts in no figure.
  slow = _results(99.0, 100.0)
  results = {f"{m}, {p}": [slow, _results(0.1, 1.1), _results(0.2, 1.2), _results(0.1, 1.1)]
             for m, p in (("plain", "chat"), ("ngram", "chat"), ("plain", "summary"))}
  results["ngram, summary"] = [slow, _results(0.4, 0.9, first_tokens=7), _results(0.1, 0.6, first_tokens=7),
                               _results(0.1, 0.6, first_tokens=7)]
  rows = {r["figure"]: r for r in speed_report.figures(_samples(prototype), results, ["chat", "summary"],
                                                       prototype=prototype)}
  reference = "prototype step, width 1" if prototype else "step, width 1"
  assert rows[f"step, width 8, of {reference}"]["value"] == pytest.approx(1.8)
  assert rows[f"step, width 8, of {reference}"]["bar"] == (("<=", 1.55) if prototype else None)
  assert rows["outside forward and head, of a width-1 step"]["value"] == pytest.approx(100 * 0.5 / 11)
  assert rows["ngram over plain, chat, end to end"]["value"] == pytest.approx(1.0)
  assert rows["ngram over plain, summary, end to end"]["value"] == pytest.approx(2.0)
  # 90 tokens in half a second against 96 in one: those of the first step were made before the clock of decoding.
  assert rows["ngram over plain, summary, decode"]["value"] == pytest.approx(180 / 96)
  assert rows["first token of a second request, slowest prompt"]["value"] == pytest.approx(0.4)
  assert ("plain over prototype, chat, end to end" in rows) == prototype
  if prototype:
    assert rows["plain over prototype, chat, end to end"]["value"] == pytest.approx(2.0)
    assert rows["plain over prototype, summary, end to end"]["value"] == pytest.approx(0.8)


def test_verification_stands_beside_its_bars():
  samples = {"verify, a": [3.0, 1.0, 2.0], "law": [9.0, 8.0, 7.0], "step, width 1": [20.0]}
  rows = speed_report.verification(samples, {"verify, a": 2.5, "law": None}, {"verify, a": 2.04})
  assert [(r["figure"], r["value"], r["unit"], r["bar"]) for r in rows] == [
      ("verify, a", 2.0, "ms", ("<=", 2.5)), ("law", 8.0, "ms", None), ("memory of verify, a", 2.04, "arrays", None)]
  assert rows[0]["note"] == "1.00 to 3.00"
  lines = speed_report.table(rows).splitlines()
  assert lines[0].split()[:7] == ["verify,", "a", "2.00", "ms", "<=", "2.5", "met"]
  assert len({line.index(unit) + len(unit) for line, unit in zip(lines, (" ms", " ms", " arrays"))}) == 1


def test_memory_is_in_arrays_of_logits(monkeypatch):
  size = 4 * verifier_speed.NODES * verifier_speed.VOCABULARY
  monkeypatch.setattr(verifier_speed, "memory", lambda name: 3 * size if name == "block" else size // 2)
  found = speed.verify_memory()
  assert set(found) < set(verifier_speed.bars())
  assert found.pop("verify, block") == 3
  assert set(found.values()) == {0.5}


def test_a_prototype_is_a_python_file(tmp_path):
  (tmp_path / "notes.txt").write_text("x")
  (tmp_path / "loop.py").write_text("")
  speed.check_prototype(None)
  speed.check_prototype(str(tmp_path / "loop.py"))
  for name in ("notes.txt", "none.py", "."):
    with pytest.raises(ValueError, match="--prototype=.*must be the path of a .py file"):
      speed.check_prototype(str(tmp_path / name))


def test_the_table_says_which_bars_are_met():
  rows = [{"figure": "a", "value": 1.5, "unit": "x", "bar": ("<=", 1.5), "note": "n"},
          {"figure": "bb", "value": 1.51, "unit": "x", "bar": ("<=", 1.5), "note": ""},
          {"figure": "c", "value": 2.0, "unit": "x", "bar": (">=", 2), "note": ""},
          {"figure": "d", "value": 1.99, "unit": "x", "bar": (">=", 2), "note": ""},
          {"figure": "e", "value": 7.0, "unit": "s", "bar": None, "note": "free"}]
  lines = [line.split() for line in speed_report.table(rows).splitlines()]
  assert lines == [["a", "1.50", "x", "<=", "1.5", "met", "n"], ["bb", "1.51", "x", "<=", "1.5", "NOT", "met"],
                   ["c", "2.00", "x", ">=", "2", "met"], ["d", "1.99", "x", ">=", "2", "NOT", "met"],
                   ["e", "7.00", "s", "free"]]


def test_device_peaks(monkeypatch):
  """What a second of work is divided by: with a clock of one second a call, the work itself."""
  monkeypatch.setattr(costs, "_seconds", lambda function, x: 1.0)
  peaks = costs.device_peaks()
  turns = 4 if jax.default_backend() == "cpu" else 64
  assert peaks["memory_bandwidth"] == pytest.approx(2**29 * turns)
  assert peaks["arithmetic"] == pytest.approx(2 * 2048**3 * turns)
