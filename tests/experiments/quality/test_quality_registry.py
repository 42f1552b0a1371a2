"""Which judges a request gets, and how what they find is pooled, beside plain decoding."""
import numpy as np
import pytest

from experiments.harness import statistics
from experiments.quality import libraries
from experiments.quality import registry
from experiments.report import quality_tables
from experiments.report import tables
from requests_of import request

SETTING = registry.Setting(max_new_tokens=4, max_context=512, eos_ids=(9,))


def record(name, text, method="plain", *, ids=None, turn=0, repeat=0, temperature=0.0, reason="length"):
  return {"id": name, "turn": turn, "repeat": repeat, "method": method, "text": text, "temperature": temperature,
          "token_ids": ids or [1, 2, 3, 4], "finish_reason": reason, "prompt_tokens": 100,
          "time_to_first_token_ms": 1.0, "time_per_output_token_ms": 2.0}


def judged(requests, records, method="ngram", setting=SETTING):
  of = lambda name: [r for r in records if r["method"] == name]
  return registry.Judged(requests, records, setting).pooled(of(method), of("plain") if method != "plain" else [])


@pytest.mark.parametrize("given, names", [
    ({"category": "chat"}, []), ({"category": "code_edit"}, ["code"]), ({"category": "json"}, ["json"]),
    ({"category": "tool_call"}, ["tools"]), ({"category": "long_qa"}, ["summary"]),
    ({"category": "own", "schema": {}}, ["json"]),
    ({"category": "own", "tests": ["assert 1"]}, ["code"]), ({"category": "math"}, ["math"]),
    ({"category": "safety"}, ["safety"]), ({"category": "translation"}, ["translation"])])
def test_who_judges(given, names):
  assert registry.applying(request(**given)) == [*names, "language", "stops", "length"]


def test_records_are_judged_once_by_their_first_repeat():
  requests = [request("1 + 1?", "math", name="m", reference="2")]
  records = [record("m", "2"), record("m", "3", repeat=1), record("m", "3", "ngram"), record("other", "2")]
  found = registry.judge_records(requests, records, SETTING)
  assert set(found) == {("m", 0, "plain"), ("m", 0, "ngram")}
  assert found["m", 0, "plain"]["math.right"] is True and found["m", 0, "ngram"]["math.right"] is False
  assert found["m", 0, "plain"]["stops.same_reason"] is None and found["m", 0, "ngram"]["stops.same_reason"] is True


def test_a_turn_is_judged_by_what_came_before_it():
  talk = request(["1 + 1?", "Write a Python function."], "code", name="t", tests=["assert False"])
  found = registry.judge_records([talk], [record("t", "x = 1"), record("t", "x = 1", turn=1)],
                                 registry.Setting(4, 512, run_code=True))
  assert [found["t", turn, "plain"]["code.parses"] for turn in (0, 1)] == [None, True]
  assert found["t", 1, "plain"]["code.passed"] is None  # whose tests?


def test_a_greedy_run_lists_what_differs():
  requests = [request("1 + 1?", "math", name=n, reference="2") for n in "abc"]
  records = [record(n, "2") for n in "abc"] + [record("a", "2", "ngram"), record("b", "3", "ngram", ids=[1, 2, 3, 5]),
                                               record("c", "2", "ngram", ids=[1, 2, 9], reason="stop")]
  found = judged(requests, records)
  assert found["identical"] == [1, 3]
  assert found["differences"] == [
      {"id": "b", "turn": 0, "metrics": {"math.right": [True, False]}},
      {"id": "c", "turn": 0, "metrics": {"language.tokens": [4, 3], "stops.stopped": [False, True],
                                         "length.tokens_per_slot": [pytest.approx(103 / 256),
                                                                    pytest.approx(102 / 256)]}}]
  assert found["math.right"] == {"mean": pytest.approx(2 / 3), "n": 3, "difference": pytest.approx(-1 / 3),
                                 "difference_interval": None}
  plain = judged(requests, records, "plain")
  assert plain["identical"] is plain["differences"] is None and plain["math.right"]["difference"] is None
  assert "math.answered" in plain and "safety.refused" not in plain


def test_sampled_runs_have_intervals():
  rng = np.random.default_rng(0)
  requests = [request("1 + 1?", "math", name=str(i), reference="2") for i in range(12)]
  answers = rng.choice(["2", "3"], (2, 12))
  records = [record(str(i), answers[k, i], method, temperature=0.8, ids=[i, k, 3, 4])
             for k, method in enumerate(("plain", "ngram")) for i in range(12)]
  found = judged(requests, records)
  right = (answers == "2").astype(float)
  assert found["identical"] is None and found["differences"] is None
  assert found["math.right"]["difference"] == pytest.approx((right[1] - right[0]).mean())
  assert found["math.right"]["difference_interval"] == statistics.difference_interval(*right)
  assert judged(requests[:7], records)["math.right"]["difference_interval"] is None


def test_only_requests_of_both_are_compared():
  requests = [request("1 + 1?", "math", name=n, reference="2") for n in "ab"]
  found = judged(requests, [record("a", "3"), record("a", "2", "ngram"), record("b", "3", "ngram")])
  assert found["math.right"] == {"mean": 0.5, "n": 2, "difference": 1.0, "difference_interval": None}
  assert judged(requests, [record("a", "2", "ngram")])["identical"] is None  # nothing to compare with


def test_turns_are_one_request():
  talk = [request(["Hi", "Ho"], "safety", name="t"), request("Hi", "safety", name="u")]
  found = judged(talk, [record("t", "I cannot help with that."), record("t", "Yes", turn=1), record("u", "Yes")],
                 "plain")
  assert found["safety.refused"]["mean"] == 0.25 and found["safety.refused"]["n"] == 2


def test_languages_lengths_and_corpora():
  requests = [request("T", "translation", "fr", name="a", reference="le chat noir dort ici"), request(name="b")]
  records = [record("a", "le chat noir dort ici"), record("b", "hello"), record("a", "un chien", "ngram"),
             record("b", "hello", "ngram")]
  found = judged(requests, records)
  assert found["by_language"]["en"] == {"answers": 1, "tokens": 4, "characters": 5, "characters_per_token": 1.25,
                                        "kept": None}
  assert found["by_prompt_length"]["64"]["answers"] == 2
  assert found["corpus"]["corpus_bleu"] < 10
  assert found["corpus"]["corpus_bleu_difference"] == pytest.approx(found["corpus"]["corpus_bleu"] - 100)
  assert judged(requests, records, "plain")["corpus"] == pytest.approx({"corpus_chrf": 100, "corpus_bleu": 100})
  assert judged([request(name="b")], [record("b", "x")], "plain")["corpus"] is None


def test_nothing_judged_is_null():
  assert judged([], [record("a", "x")], "plain") is None


def test_check(monkeypatch):
  assert registry.check(run_code=False) == ""
  assert "limits set" in registry.check(run_code=True)
  monkeypatch.setattr(libraries, "NAMES", ("no_such_library",))
  with pytest.raises(ValueError, match="no_such_library"):
    registry.check(run_code=False)


def group(method, quality, category="math", language="all"):
  return {"method": method, "category": category, "language": language, "quality": quality}


def test_the_table_of_the_report():
  score = lambda mean, difference=None, interval=None: {
      "mean": mean, "n": 9, "difference": difference, "difference_interval": interval}
  found = quality_tables.build(
      [group("plain", {"math.right": score(0.5)}, "all"),
       group("ngram", {"math.right": score(0.25, -0.25, [-0.5, 0.125])}),
       group("plain", {"math.right": score(0.5), "identical": [1, 2], "by_language": {"en": {}}, "corpus": None}),
       group("eagle", {"math.right": score(0.5, 0.0)}), group("eagle", None, "chat")], ["plain", "ngram", "eagle"])
  assert [s.title for s in found.sections] == ["math: math.right", "all categories: math.right"]
  assert [m for m, _ in found.sections[0].rows] == ["plain", "ngram", "eagle"]
  cells = {method: [(c.text, c.note) for c in cells] for method, cells in found.sections[0].rows}
  assert cells["ngram"] == [("0.25", ""), ("9", ""), ("-0.25", "[-0.5, +0.125]")]
  assert cells["plain"][2] == (tables.DASH, "") and cells["eagle"][2] == ("0", "")
  assert quality_tables.build([group("plain", None)], ["plain"]) is None


def test_the_lines_of_differences():
  quality = {"differences": [{"id": "a", "turn": 1,
                              "metrics": {"math.right": [True, False], "language.tokens": [4, 3]}},
                             {"id": "b", "turn": 0, "metrics": {}}]}
  assert quality_tables.differences([group("ngram", quality, "all"), group("ngram", quality),
                                     group("plain", None, "all")]) == [
      "ngram, a, turn 1: math.right true → false, language.tokens 4 → 3", "ngram, b: no metric moved"]
