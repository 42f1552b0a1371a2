"""The summary: counters pooled and never averaged, pairs by request, nulls where there is nothing to divide."""
import itertools
import json

import pytest

from experiments import workloads
from experiments.harness import summary as summary_lib

SCHEMA = """method category language temperature batch_size requests prompt_tokens output_tokens steps drafted_tokens
  accepted_tokens tokens_per_step acceptance_rate accepted_per_position conditional_per_position tokens_per_second
  speedup speedup_interval time_to_first_token_ms time_per_output_token_ms latency_ms draft_ms verify_ms commit_ms
  other_ms utilization plain_step_ms verify_cost_ratio predicted_speedup peak_memory_bytes identical_to_plain
  first_difference_gap quality repeated_share verifier lossless total_variation_bound""".split()


def record(method="ngram", name="a", *, tokens=8, steps=4, drafted=(4, 2), trials=None, accepted=(3, 1), seconds=0.2,
           widths=(1, 3), ids=None, strayed=0.0, **changes):
  """A record of `requests.jsonl`; what is drafted and accepted is given by position."""
  ids = list(range(tokens)) if ids is None else ids
  if method == "plain":
    steps, drafted, accepted, widths = tokens, (), (), (tokens,)
  return {"id": name, "category": "chat", "language": "en", "method": method, "repeat": 0, "turn": 0, "batch": name,
          "batch_size": 1, "temperature": 0.0, "verifier": "point", "lossless": True,
          "prompt_tokens": 100, "token_ids": ids,
          "counters": {"steps": steps, "output_tokens": tokens, "drafted_tokens": sum(drafted),
                       "accepted_tokens": sum(accepted), "drafted_per_position": list(drafted),
                       "trials_per_position": list(drafted if trials is None else trials),
                       "accepted_per_position": list(accepted), "steps_per_width": list(widths), "strayed": strayed},
          "time_to_first_token_ms": seconds * 250, "time_per_output_token_ms": seconds * 750 / 7,
          "latency_ms": seconds * 1e3, "seconds": seconds, "decode_seconds": seconds * 0.75, "decode_steps": steps - 1,
          "finish_reason": "length"} | changes


def both(name="a", gain=2.0, **changes):
  """Plain and ngram on one request."""
  seconds = changes.pop("seconds", 0.2)
  return [record("plain", name, seconds=seconds * gain, **changes), record("ngram", name, seconds=seconds, **changes)]


def summarize(records, **kwargs):
  """Groups by (method, category, language), and by batch size too where there are several."""
  found = summary_lib.summarize(records, **kwargs)
  json.dumps(found, allow_nan=False)
  assert found["schema"] == 1 and set(found) == {"schema", "groups", "prediction_error"}
  several = len({r["batch_size"] for r in records}) > 1
  key = lambda g: (g["method"], g["category"], g["language"], *([g["batch_size"]] if several else []))
  groups = {key(g): g for g in found["groups"]}
  assert len(groups) == len(found["groups"])
  return groups


def overall(records, method="ngram", **kwargs):
  return summarize(records, **kwargs)[method, "all", "all"]


def test_every_group_has_every_field_of_the_schema():
  groups = summarize([*both("a"), *both("b", category="code"), *both("c", category="code", language="ko")])
  for group in groups.values():
    assert not set(SCHEMA) - set(group)


def test_cells():
  groups = summarize([*both("a"), *both("b", category="code"), *both("c", category="code", language="ko")])
  assert {key[1:] for key in groups} == {("all", "all"), ("chat", "all"), ("code", "all"), ("code", "en"),
                                         ("code", "ko")}
  requests = {key[1:]: group["requests"] for key, group in groups.items() if key[0] == "ngram"}
  assert requests == {("all", "all"): 3, ("chat", "all"): 1, ("code", "all"): 2, ("code", "en"): 1, ("code", "ko"): 1}


def test_methods_and_categories_keep_their_order():
  found = summary_lib.summarize([*both("a", category="z"), *both("b", category="b")])["groups"]
  assert [(g["category"], g["method"]) for g in found] == [
      ("all", "plain"), ("all", "ngram"), ("z", "plain"), ("z", "ngram"), ("b", "plain"), ("b", "ngram")]


@pytest.mark.parametrize("changes", [{"category": "all"}, {"language": "all"}])
def test_a_category_or_language_called_all(tmp_path, changes):
  """"all" names the pooled cell: a workload that uses it is refused, or it is counted right."""
  path = tmp_path / "w.jsonl"
  row = {"id": "a", "category": "chat", "lang": changes.get("language", "en"), "prompt": "x"}
  path.write_text(json.dumps(row | {"category": changes.get("category", "chat")}) + "\n")
  try:
    workloads.read_workload(str(path))
  except ValueError as error:
    assert "all" in str(error)
    return
  for group in summary_lib.summarize([*both("a", **changes), *both("b")])["groups"]:
    assert group["output_tokens"] == 8 * group["requests"], group


def test_counts_are_pooled_not_averaged():
  # Seven short requests accept everything, one long one nothing: averaging the ratios would show the short ones.
  records = [record(name=f"s{i}", tokens=4, steps=1, drafted=(1, 1, 1), accepted=(1, 1, 1), seconds=0.1)
             for i in range(7)]
  records.append(record(name="long", tokens=200, steps=200, drafted=(100, 100, 100), trials=(100, 0, 0),
                        accepted=(0, 0, 0), seconds=20.0))
  group = overall(records)
  assert group["requests"] == 8
  assert group["steps"] == 207
  assert group["output_tokens"] == 228
  assert group["drafted_tokens"] == 321
  assert group["accepted_tokens"] == 21
  assert group["tokens_per_step"] == pytest.approx(228 / 207)
  assert group["acceptance_rate"] == pytest.approx(21 / 321)
  assert group["accepted_per_position"] == pytest.approx([7 / 107, 7 / 107, 7 / 107])
  assert group["conditional_per_position"] == pytest.approx([7 / 107, 1, 1])
  assert group["tokens_per_second"] == pytest.approx(228 / 20.7)
  assert group["prompt_tokens"] == 800


def test_a_lossless_group_says_so():
  for group in summarize(both()).values():
    assert (group["verifier"], group["lossless"], group["total_variation_bound"]) == ("point", True, 0.0)


def test_the_bound_of_a_lossy_verifier_is_pooled_over_tokens():
  given = {"verifier": "lossy_typical"}
  records = [record("plain", "a", **given), record("plain", "b", tokens=24, **given),
             record("ngram", "a", strayed=4.0, lossless=False, **given),
             record("ngram", "a", strayed=4.0, lossless=False, repeat=1, **given),
             record("ngram", "b", tokens=24, strayed=0.0, lossless=False, **given)]
  groups = summarize(records)
  group = groups["ngram", "all", "all"]
  assert (group["verifier"], group["lossless"]) == ("lossy_typical", False)
  assert group["total_variation_bound"] == pytest.approx(4 / 32)
  plain = groups["plain", "all", "all"]
  assert (plain["verifier"], plain["lossless"], plain["total_variation_bound"]) == ("lossy_typical", True, 0)


def test_rates_by_position():
  group = overall([record(drafted=(10, 6, 2), trials=(9, 4, 2), accepted=(5, 3, 1))])
  assert group["accepted_per_position"] == pytest.approx([0.5, 0.3, 0.1])
  assert group["conditional_per_position"] == pytest.approx([5 / 9, 3 / 4, 1 / 2])


def test_a_position_that_was_never_tried_is_null():
  group = overall([record(drafted=(4, 2), trials=(4, 0), accepted=(0, 0))])
  assert group["acceptance_rate"] == 0
  assert group["accepted_per_position"] == [0, 0]
  assert group["conditional_per_position"] == [0, None]


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_nothing_drafted_is_null(method):
  nothing = {} if method == "plain" else {"drafted": (0, 0), "accepted": (0, 0)}
  group = overall([record(method, **nothing)], method)
  assert group["drafted_tokens"] == group["accepted_tokens"] == 0
  assert group["acceptance_rate"] is None
  assert group["accepted_per_position"] is None
  assert group["conditional_per_position"] is None


def test_the_baseline_is_not_compared_with_itself():
  group = overall(both(), "plain")
  for name in ("speedup", "speedup_interval", "speedup_without_repeats", "predicted_speedup", "identical_to_plain",
               "first_difference_gap"):
    assert group[name] is None, name


def test_without_a_baseline_there_is_no_speedup():
  group = overall([record(name=f"r{i}") for i in range(9)])
  for name in ("speedup", "speedup_interval", "speedup_without_repeats", "predicted_speedup", "identical_to_plain",
               "plain_step_ms", "verify_cost_ratio"):
    assert group[name] is None, name
  assert group["tokens_per_second"] == pytest.approx(40)


def test_later_fields_are_null_without_their_sources():
  group = overall(both())
  for name in ("draft_ms", "verify_ms", "commit_ms", "other_ms", "utilization", "predicted_speedup",
               "peak_memory_bytes", "quality", "first_difference_gap"):
    assert group[name] is None, name


def test_one_token_requests():
  group = overall([record(tokens=1, steps=1, drafted=(0, 0), accepted=(0, 0), decode_steps=0, decode_seconds=0.0,
                          time_per_output_token_ms=None)])
  assert group["step_ms"] is None
  assert group["time_per_output_token_ms"] is None
  assert group["tokens_per_step"] == 1


def test_speedup_is_pooled_over_the_pairs():
  records = [*both("a", gain=4, seconds=1.0), *both("b", gain=1, seconds=10.0), record(name="unpaired", seconds=99.0)]
  group = overall(records)
  assert group["speedup"] == pytest.approx(14 / 11)
  assert group["speedup_interval"] is None
  assert group["identical_to_plain"] == [2, 2]
  assert group["requests"] == 3


def test_pairs_are_made_by_id_not_by_place():
  records = [record("plain", f"r{i}", seconds=2.0 ** i) for i in range(9)]
  records += [record("ngram", f"r{i}", seconds=2.0 ** i / 3) for i in reversed(range(9))]
  group = overall(records)
  assert group["speedup"] == pytest.approx(3)
  assert group["speedup_interval"] == pytest.approx([3, 3])


def test_an_interval_from_three_requests_on():
  records = [r for i in range(8) for r in both(f"r{i}", gain=1 + i / 4)]
  assert overall(records[:4])["speedup_interval"] is None
  wide = overall(records[:6])["speedup_interval"]
  assert wide[0] < 1 < overall(records[:6])["speedup"] < wide[1]
  low, high = overall(records)["speedup_interval"]
  assert low < overall(records)["speedup"] < high


def test_identical_counts_requests():
  records = [*both("a"), *both("b")]
  records[3]["token_ids"] = [9, 9]
  assert overall(records)["identical_to_plain"] == [1, 2]


def test_a_request_with_one_differing_turn_is_not_identical():
  records = [*both("a"), *both("a", turn=1), *both("b")]
  records[3]["token_ids"] = [9, 9]
  assert overall(records)["identical_to_plain"] == [1, 2]


def test_a_missing_turn_is_not_identical():
  assert overall([*both("a"), record("plain", "a", turn=1)])["identical_to_plain"] == [0, 1]


def test_sampled_texts_are_not_called_identical():
  group = overall(both(temperature=0.8))
  assert group["identical_to_plain"] is None
  assert group["temperature"] == 0.8
  assert group["speedup"] == pytest.approx(2)


def test_first_difference_gap_is_the_worst_of_the_group():
  records = [*both("a"), *both("b"), *both("c", category="code")]
  gaps = {("a", 0, "ngram"): 1e-6, ("b", 0, "ngram"): 1e-4, ("c", 0, "ngram"): 0.5, ("a", 0, "other"): 9.0}
  groups = summarize(records, gaps=gaps)
  assert groups["ngram", "all", "all"]["first_difference_gap"] == 0.5
  assert groups["ngram", "chat", "all"]["first_difference_gap"] == 1e-4
  assert groups["plain", "all", "all"]["first_difference_gap"] is None


def test_turns_are_one_request():
  records = [r for turn in range(3) for r in both("a", turn=turn, gain=1 + turn)] + both("b", gain=2)
  group = overall(records)
  assert group["requests"] == 2
  assert group["output_tokens"] == 32
  assert group["steps"] == 16
  assert group["prompt_tokens"] == 400
  assert group["tokens_per_second"] == pytest.approx(32 / 0.8)
  assert group["speedup"] == pytest.approx((0.2 + 0.4 + 0.6 + 0.4) / 0.8)
  assert group["identical_to_plain"] == [2, 2]


def test_eight_turns_of_one_request_give_no_interval():
  assert overall([r for turn in range(8) for r in both("a", turn=turn)])["speedup_interval"] is None


def test_repeats_give_the_median_time_and_count_once():
  times = {"plain": (1.0, 1.0, 50.0), "ngram": (0.5, 99.0, 0.4)}
  records = [record(method, repeat=i, seconds=s) for method, values in times.items() for i, s in enumerate(values)]
  group = overall(records)
  assert group["speedup"] == pytest.approx(1.0 / 0.5)
  assert group["tokens_per_second"] == pytest.approx(8 / 0.5)
  assert (group["requests"], group["output_tokens"], group["steps"], group["prompt_tokens"]) == (1, 8, 4, 100)
  assert group["drafted_tokens"] == 6
  assert group["accepted_tokens"] == 4
  assert group["acceptance_rate"] == pytest.approx(4 / 6)
  assert group["latency_ms"]["p50"] == pytest.approx(500)  # percentiles are over every measurement
  assert group["latency_ms"]["p99"] > 9e4


def test_the_latency_of_a_conversation_is_that_of_its_turns_together():
  records = [r for repeat in range(3) for turn, s in enumerate((0.1, 0.2, 0.4))
             for r in both("a", turn=turn, repeat=repeat, seconds=s, gain=2)]
  group = overall(records)
  assert group["latency_ms"] == pytest.approx({"p50": 700, "p95": 700, "p99": 700})
  assert group["time_to_first_token_ms"]["p50"] == pytest.approx(50)  # every turn has a first token of its own


def rows(names, tokens, steps, seconds, method="ngram", **changes):
  """The records of one call."""
  n = len(names)
  given = {"batch": names[0], "batch_size": n, "seconds": seconds / n, "decode_seconds": seconds * 0.75 / n,
           "decode_steps": (max(steps) - 1) / n, "latency_ms": seconds * 1e3, "time_to_first_token_ms": seconds * 250}
  return [record(method, name, tokens=t, steps=s, **(given | changes))
          for name, t, s in zip(names, tokens, steps, strict=True)]


def test_rows_of_a_batch_share_its_time():
  group = overall(rows("ab", (10, 20), (6, 11), 2.0))
  assert group["batch_size"] == 2
  assert group["tokens_per_second"] == pytest.approx(30 / 2)
  assert group["step_ms"] == pytest.approx(1.5e3 / 10)
  assert group["latency_ms"]["p50"] == 2000
  assert group["tokens_per_step"] == pytest.approx(30 / 17)


def test_an_interval_draws_batches_not_rows():
  """Rows of a batch share one time, so eight requests in two batches are two measurements."""
  names = [f"r{i}" for i in range(32)]
  for size in (1, 4, 16):
    records = [r for i in range(0, 32, size) for method, seconds in (("plain", 2.0 + i), ("ngram", 1.0))
               for r in rows(names[i:i + size], [8] * size, [4] * size, seconds, method)]
    interval = overall(records)["speedup_interval"]
    assert (interval is None) == (size == 16)  # two batches


def test_a_smaller_last_batch_is_a_cell_of_its_own():
  records = [*rows("ab", (8, 8), (4, 4), 1.0), *rows("c", (8,), (4,), 1.0)]
  groups = summarize(records)
  assert {key[3]: g["requests"] for key, g in groups.items() if key[1] == "all"} == {2: 2, 1: 1}


def test_a_conversation_in_a_batch_is_one_request_in_one_cell():
  """Its later turns may run with fewer rows, the others of its batch having no more, and still count there."""
  records = [r for method in ("plain", "ngram") for r in (
      *rows("ab", (8, 8), (4, 4), 1.0, method), *rows("b", (8,), (4,), 1.0, method, turn=1, batch="a", batch_size=2))]
  found = summary_lib.summarize(records)["groups"]
  (group,) = [g for g in found if (g["method"], g["category"]) == ("ngram", "all")]
  assert (group["requests"], group["identical_to_plain"], group["output_tokens"]) == (2, [2, 2], 24)
  assert group["tokens_per_second"] == pytest.approx(24 / 2)
  assert sorted(group["latency_ms"].values()) == pytest.approx([1500, 1950, 1990])  # one and two seconds


def test_percentiles_are_over_requests():
  records = [record(name=f"r{i}", seconds=i / 10) for i in range(1, 102)]
  group = overall(records)
  assert group["latency_ms"] == pytest.approx({"p50": 5100, "p95": 9600, "p99": 10000})
  assert group["time_to_first_token_ms"]["p95"] == pytest.approx(9600 / 4)
  assert group["time_per_output_token_ms"]["p50"] == pytest.approx(5100 * 0.75 / 7)


def test_step_time_is_pooled_and_compared():
  group = overall(both())  # plain: 7 steps in 0.3 s; ngram: 3 in 0.15 s
  assert group["plain_step_ms"] == pytest.approx(300 / 7)
  assert group["step_ms"] == pytest.approx(50)
  assert group["verify_cost_ratio"] == pytest.approx(50 * 7 / 300)


def test_repeated_share_and_the_speedup_without_such_requests():
  records = [*both("a", gain=1), *both("b", gain=9, ids=[5] * 8)]
  group = overall(records)
  assert group["repeated_share"] == pytest.approx(0.5)
  assert group["speedup"] == pytest.approx(5)
  assert group["speedup_without_repeats"] == pytest.approx(1)
  assert overall(both(ids=[5] * 8))["speedup_without_repeats"] is None


@pytest.mark.parametrize("method", ["plain", "ngram"])
def test_a_request_that_repeats_under_either_arm_is_left_out(method):
  records = [*both("a", gain=1), *both("b", gain=9)]
  next(r for r in records if r["id"] == "b" and r["method"] == method)["token_ids"] = [5] * 8
  assert overall(records)["speedup_without_repeats"] == pytest.approx(1)


def test_a_short_repetition_does_not_exclude_a_request():
  ids = [7, 7, 7, *range(20, 37)]  # 3 of 20 tokens
  group = overall(both(tokens=20, ids=ids, gain=2))
  assert group["repeated_share"] == pytest.approx(0.15)
  assert group["speedup_without_repeats"] == pytest.approx(2)


COSTS = {"plain": {"draft_ms": 1.0, "commit_ms": 2.0, "verify_ms": [20.0], "widths": [1], "utilization": {"x": 0.5}},
         "ngram": {"draft_ms": 3.0, "commit_ms": 2.5, "verify_ms": [20.0, 28.0], "widths": [1, 4], "utilization": None}}


def test_costs_of_a_step():
  group = overall(both(), costs=COSTS)  # widths (1, 3): one narrow step and three wide ones
  assert group["draft_ms"] == 3
  assert group["commit_ms"] == 2.5
  assert group["verify_ms"] == pytest.approx((20 + 3 * 28) / 4)
  assert group["other_ms"] == pytest.approx(50 - 3 - 2.5 - 26)
  assert overall(both(), "plain", costs=COSTS)["utilization"] == {"x": 0.5}


def test_predicted_speedup():
  """Of whole requests: the measured time to the first token and plain steps, then steps at the cost of their parts
  beside that of plain ones."""
  scale = 300 / (7 * (1 + 20 + 2))  # plain decoding took 300 ms
  plain = 100 + 300
  ngram = 50 + scale * 3 * (3 + 26 + 2.5)
  assert overall(both(), costs=COSTS)["predicted_speedup"] == pytest.approx(plain / ngram)
  assert overall(both(), costs={"ngram": COSTS["ngram"]})["predicted_speedup"] is None
  # On the requests that both have, repeats once.
  records = [*both(), *both(repeat=1), record(name="unpaired", seconds=50.0)]
  assert overall(records, costs=COSTS)["predicted_speedup"] == pytest.approx(plain / ngram)


def test_predicted_speedup_of_a_batch():
  """Rows share the first token's time and the steps of their batch."""
  records = [*rows("ab", (8, 8), (8, 8), 0.8, "plain"), *rows("ab", (8, 8), (4, 3), 0.4)]
  plain, ngram = 800, 100 + 600 / (7 * 23) * 3 * (3 + 26 + 2.5)
  assert overall(records, costs=COSTS)["predicted_speedup"] == pytest.approx(plain / ngram)


def test_costs_of_other_lengths_are_interpolated():
  """A text of 100 + 4 tokens has 256 slots: halfway between the measured ones."""
  at = lambda slots, factor: {"slots": slots, "draft_ms": 3.0 * factor, "commit_ms": 2.5 * factor,
                              "verify_ms": [20.0 * factor, 28.0 * factor]}
  costs = COSTS | {"ngram": COSTS["ngram"] | {"by_slots": [at(128, 1), at(384, 3)]}}
  ngram = 50 + 300 / (7 * 23) * 3 * 2 * (3 + 26 + 2.5)
  assert overall(both(), costs=costs)["predicted_speedup"] == pytest.approx(400 / ngram)


def test_prediction_error():
  """Over the cells of methods and categories: neither the pooled cell nor languages count, which say the same again."""
  cells = lambda **costs: summary_lib.summarize([*both("a"), *both("b", category="code", gain=4.0)], **costs)
  found = cells(costs=COSTS)
  errors = sorted(abs(g["predicted_speedup"] / g["speedup"] - 1) for g in found["groups"]
                  if g["method"] == "ngram" and g["category"] != "all")
  assert found["prediction_error"] == {"median": pytest.approx(sum(errors) / 2), "cells": 2,
                                       "p90": pytest.approx(errors[0] + 0.9 * (errors[1] - errors[0]))}
  assert cells()["prediction_error"] is None


def test_memory_is_by_method():
  groups = summarize(both(), memory={"ngram": {"weights": 1, "cache": 2, "draft": 3}})
  assert groups["ngram", "all", "all"]["peak_memory_bytes"] == {"weights": 1, "cache": 2, "draft": 3}
  assert groups["plain", "all", "all"]["peak_memory_bytes"] is None


def test_the_records_are_left_alone():
  records = [*both("a"), *both("b", category="code", language="ko"), *both("c", category="code")]
  before = json.dumps(records)
  summary_lib.summarize(records, costs=COSTS)
  assert json.dumps(records) == before


def test_the_order_of_records_does_not_matter():
  records = [*both("a", gain=1), *both("b", gain=3, tokens=20), record("plain", "a", repeat=1, seconds=9.0)]
  expected = _rounded(overall(records))
  for order in itertools.islice(itertools.permutations(records), 0, 120, 7):
    assert _rounded(overall(order)) == expected


def _rounded(value):
  if isinstance(value, dict):
    return {name: _rounded(part) for name, part in value.items()}
  return float(f"{value:.9g}") if isinstance(value, float) else value


def test_tokens_beyond_a_window_have_more_before_them_than_it_holds():
  """Prompts within the window, at its end and behind it; the least of several windows counts."""
  records = [record("plain", name, prompt_tokens=size, tokens=6) for name, size in (("a", 5), ("b", 8), ("c", 20))]
  group, = (g for g in summary_lib.summarize(records, windows=(None, 9, 8))["groups"] if g["category"] == "all")
  wanted = sum(size + place > 8 for size in (5, 8, 20) for place in range(6))
  assert group["windows"] == {"layers": 2, "of_layers": 3, "tokens": [8, 9], "beyond": wanted / 18}
  assert summary_lib.summarize(records, windows=(None, None))["groups"][0]["windows"] is None
