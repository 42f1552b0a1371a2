"""Advice judged on new requests: hand records, kinds that languages fall under, and a whole run."""
import itertools
import json

import pytest

from experiments.harness import advice_check
import programs


def advised(**arms):
  """Advice of an arm by category_language."""
  rows = [{"arm": name, "method": "ngram", "settings": {}} for name in ("ngram", "ngram, draft_tokens=3")]
  rows[1]["settings"] = {"draft_tokens": 3}
  types = [dict(zip(("category", "language"), kind.split("_")), arm=arm, candidates=rows) for kind, arm in arms.items()]
  return {"types": types}


def records(category, language, **speeds):
  """Three requests of ten tokens a second by plain decoding."""
  arms = {"plain": 1.0} | {name.replace("_", ", draft_tokens="): speed for name, speed in speeds.items()}
  return [{"id": f"{category}-{language}-{i}", "category": category, "language": language, "method": arm,
           "token_ids": [0] * 10 * (i + 1), "seconds": (i + 1) / speed}
          for i in range(3) for arm, speed in arms.items()]


def test_a_kind_is_judged_by_its_speeds():
  found = advised(chat_en="ngram", code_en="plain", json_en="ngram")
  judged = advice_check.judge(found, [*records("chat", "en", ngram=1.2, ngram_3=1.25),
                                      *records("code", "en", ngram=1.5, ngram_3=0.9),
                                      *records("json", "en", ngram=0.9, ngram_3=0.8)])
  chat, code, json_ = judged["types"]
  assert chat["speedup"] == pytest.approx(1.2) and chat["best"] == "ngram, draft_tokens=3" and chat["near"]
  assert chat["share"] == pytest.approx(0.96) and chat["requests"] == 3
  assert (code["speedup"], code["best"], code["near"]) == (1.0, "ngram", False)
  assert json_["best"] == "plain" and json_["best_speedup"] == 1.0 and not json_["near"]
  assert judged["near"] == pytest.approx(1 / 3) and judged["slower"] == ["json (en)"] == judged["surely_slower"]
  assert advice_check.headline(judged).startswith("What is advised is within 5% of the best measured method in 33% of 3")
  assert [row[0] for row in advice_check.rows(judged)] == ["chat (en)", "code (en)", "json (en)"]


def test_slower_within_its_interval_is_not_surely_slower():
  noisy = records("chat", "en", ngram=1.0, ngram_3=1.0)
  for record in noisy:
    if record["method"] == "ngram":
      record["seconds"] *= (0.8, 0.9, 1.2)[int(record["id"][-1])]
  judged = advice_check.judge(advised(chat_en="ngram"), noisy)
  assert judged["slower"] == ["chat (en)"] and judged["surely_slower"] == []


def test_languages_fall_under_their_kind():
  types = advised(chat_en="ngram", chat_other="plain", code_de="ngram")["types"]
  of = lambda *kind: advice_check.kind_of(*kind, types)
  assert of("chat", "en") == ("chat", "en") and of("chat", "ko") == ("chat", "other")
  assert of("code", "en") == ("code", "de") and of("math", "en") is None


def test_requests_of_no_known_kind():
  with pytest.raises(ValueError, match="knows chat, and no request"):
    advice_check.judge(advised(chat_en="ngram"), records("math", "en", ngram=1.0))


def test_other_conditions_than_those_of_the_advice_are_refused():
  advice_check.same({"max_new_tokens": 8, "raw": False}, max_new_tokens=8, raw=False, temperature=0.5)
  with pytest.raises(ValueError, match="--max_new_tokens=9: the advice was made with --max_new_tokens=8"):
    advice_check.same({"max_new_tokens": 8}, max_new_tokens=9)


def test_arms_are_those_of_all_kinds():
  assert advice_check.arms(advised(chat_en="plain", code_en="ngram")) == {
      "ngram": ("ngram", {}), "ngram, draft_tokens=3": ("ngram", {"draft_tokens": 3})}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("check")
  lines = [{"id": f"{category}-{i}", "category": category, "lang": "en", "prompt": "a b a b a b " * (i + 1)}
           for category, i in itertools.product(("chat", "code"), range(3))]
  (folder / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  found = {"schema": 1, "target": programs.TINY, "overall": {}} | advised(chat_en="plain", code_en="plain")
  (folder / "advice.json").write_text(json.dumps(found))
  given = [f"--preset={folder}/advice.json", "--max_new_tokens=8", "--raw"]
  cases = [("check_advice", [*given, f"--workload={folder}/w.jsonl", f"--outdir={folder}/out"], ""),
           ("check_advice", [*given, f"--workload={folder}/w.jsonl", f"--outdir={folder}/out", "--overwrite"],
            "import json, pathlib; from experiments.harness import advice_check; judge = advice_check.judge\n"
            "advice_check.judge = lambda *args: judge(*args) | {'surely_slower': ['chat (en)'], 'slower': ['chat (en)']}"),
           ("check_advice", [*given, f"--outdir={folder}/bad"], ""),
           ("check_advice", [*given, f"--workload={folder}/w.jsonl", "--target=x", f"--outdir={folder}/bad"], ""),
           ("check_advice", [*given, f"--workload={folder}/w.jsonl", "--draft_tokens=2", f"--outdir={folder}/bad"], "")]
  return folder, programs.run_all(cases, env=programs.environment(tmp_path_factory))


def test_a_run_judges_every_kind(run):
  folder, (ended, again, *_) = run
  assert ended.code == 0, ended.err
  assert again.code == 1 and "slower than plain decoding in chat (en)" in again.out, again.err
  judged = json.loads((folder / "out" / "check.json").read_text())
  assert [each["category"] for each in judged["types"]] == ["chat", "code"]
  made = [json.loads(line) for line in (folder / "out" / "requests.jsonl").read_text().splitlines()]
  assert {r["method"] for r in made} == {"plain", "ngram", "ngram, draft_tokens=3"} and len(made) == 18
  assert {tuple(r["token_ids"]) for r in made if r["id"] == "chat-2"} == {tuple(made[6]["token_ids"])}
  assert advice_check.headline(judged) in again.out and "slower than plain decoding in none" in ended.out


def test_bad_input(run):
  folder, (_, _, workload, target, option) = run
  assert workload.code == 2 and "--workload is needed" in workload.message
  assert target.code == 2 and "--preset" in target.message and "--target" in target.message
  assert option.code == 2 and "--draft_tokens" in option.message
  assert not (folder / "bad").exists()
