"""Advice: rules that fire where they should, decisions that never lose to plain decoding, and a whole run."""
import itertools
import json
import re
import types

from absl import flags
import numpy as np
import pytest

from experiments import workloads
from experiments.harness import advice
from experiments.harness import advice_arms
from experiments.harness import advice_page
from experiments.harness import advice_rules
from experiments.harness import advising
from experiments.harness import methods
from experiments.harness import presets
from experiments.harness import settings
import specjax
from specjax import decode
from specjax import proposers
import programs

Facts = advice_rules.Facts

# By rule: facts under which it fires, what its sentence says, and the change after which it does not.
RULES = {
    "steps_cost_more_than_they_bring": (dict(tokens_per_step=1.2, tokens_needed=1.5), "1.20 tokens.*1.50",
                                        dict(tokens_per_step=1.6)),
    "short_outputs": (dict(prefill_share=0.8), "80% .* 1.25 times", dict(prefill_share=0.2)),
    "small_target": (dict(model=True, draft_share=0.4, plain_ms=3.0), "0.40 of a plain step of 3.0 ms",
                     dict(draft_share=0.1)),
    "draft_costs_more_than_it_is_accepted": (dict(model=True, draft_share=0.6, first_acceptance=0.5), "0.60 .* 0.50",
                                             dict(draft_share=0.4)),
    "no_memory": (dict(memory_bytes=3 * 10**9, free_bytes=10**9), "3.00 GB and 1.00 GB", dict(free_bytes=4 * 10**9)),
    "high_temperature": (dict(temperature=1.0), "temperature 1 .*--draft_sampled", dict(sampled=True)),
    "nothing_to_look_up": (dict(lookup=True, tokens_per_step=1.05), "1.05 tokens a step", dict(tokens_per_step=1.5)),
    "first_position_collapses": (dict(model=True, first_acceptance=0.1), "0.10 only.*chat template",
                                 dict(first_acceptance=0.5)),
    "low_acceptance_in_language": (dict(model=True, language="ko", acceptance=0.2, other_acceptance=0.5),
                                   "language ko: 0.20 against 0.50", dict(acceptance=0.45)),
    "long_prompts": (dict(beyond_context=0.25), "25% of the steps", dict(beyond_context=0.0)),
    "few_experts_shared": (dict(experts=(128, 8), nodes=8), "8 tokens .* 128 experts", dict(batch=6)),
    "beyond_the_ridge": (dict(ridge=100.0, batch=16, nodes=8), "16 rows of 8 nodes", dict(batch=2)),
    "deep_drafter": (dict(model=True, layers=(12, 30)), "12 layers .* 30", dict(layers=(3, 30))),
    "format_constraints": (dict(category="json"), "grammar", dict(category="chat")),
    "few_requests": (dict(requests=3), "3 held-out requests only", dict(requests=8)),
    "larger_batches": (dict(nodes=8), "batch 1", dict(method="plain")),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule(name):
  given, says, mended = RULES[name]
  rule = getattr(advice_rules, name)
  facts = {"method": "ngram"} | given
  fired = advice_rules.fired([rule], Facts(**facts))
  assert [each["rule"] for each in fired] == [name]
  assert re.search(says, fired[0]["text"])
  assert not advice_rules.fired([rule], Facts(**facts | mended))
  assert not advice_rules.fired([rule], Facts(method="plain"))  # nothing is known


def test_every_rule_is_tried():
  assert {rule.__name__ for rule in (*advice_rules.AGAINST, *advice_rules.RISKS)} == set(RULES)


def candidate(arm, tried, speedup=None, **changes):
  return advice.Candidate(arm=arm, method=arm, settings={}, tried=tried, speedup=speedup, **changes)


def test_it_never_recommends_a_method_that_was_slower_than_plain():
  """Over random measurements: what is recommended was faster on both halves, and plain is where nothing was."""
  rng = np.random.default_rng(0)
  recommended = 0
  for _ in range(500):
    speeds = rng.lognormal(0, 0.25, size=(4, 2))
    arms = [candidate(f"m{i}", tried) for i, (tried, _) in enumerate(speeds)]
    best = advice.best_tried(arms)
    measured = [candidate(each.arm, each.tried, speeds[i][1] if best and each.arm == best.arm else None)
                for i, each in enumerate(arms)]
    found = advice.decide("chat", "en", measured)
    if found["method"] == "plain":
      assert best is None or speeds[int(best.arm[1:])][1] <= 1
      continue
    recommended += 1
    tried, held = speeds[int(found["arm"][1:])]
    assert tried >= advice.MARGIN and held > 1 and found["measured"] == held
    assert tried == max(s for s, _ in speeds)
  assert 50 < recommended < 450


def test_reasons_and_risks():
  facts = Facts(method="eagle3", category="json", requests=3, prefill_share=0.9, nodes=4)
  found = advice.decide("json", "en", [
      candidate("ngram", None, stopped="even if all were accepted"),
      candidate("eagle3", 1.5, 1.3, interval=[0.9, 1.6], facts=facts)], {"eagle3": 7})
  assert (found["method"], found["measured"], found["memory_bytes"]) == ("eagle3", 1.3, 7)
  assert {each["rule"] for each in found["risks"]} == {"gain_within_noise", "format_constraints", "few_requests",
                                                       "larger_batches"}
  assert {(each["method"], each["rule"]) for each in found["reasons"]} == {
      ("eagle3", "measured"), ("eagle3", "short_outputs"), ("ngram", "bound")}


def test_a_score_chooses_and_a_loss_on_the_first_half_excludes():
  arms = [candidate("a", 1.5, score=1.1), candidate("b", 1.2, score=1.3), candidate("c", 0.99, score=1.4)]
  assert advice.best_tried(arms).arm == "b" and advice.best_tried(arms[2:]) is None


class Clock:
  """Seconds that pass by `step` at every look."""

  def __init__(self, step):
    self.now, self.step = 0.0, step

  def __call__(self):
    self.now += self.step
    return self.now


@pytest.fixture
def advisor(quick_compile, monkeypatch):
  """An advisor of the tiny target with five requests of a kind, and ngram; its clock is made."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  monkeypatch.setattr(settings.MAX_NEW_TOKENS._flagvalues["max_new_tokens"], "value", 8)
  target, tokenizer = specjax.load(programs.ROOT / programs.TINY)

  def made(step, minutes, arms=("ngram",)):
    requests = [workloads.Request(id=f"{category}-{i}", category=category, language="en",
                                  turns=("a b a b a b " * (i + 1),), source="here")
                for category, i in itertools.product(("chat", "code"), range(5))]
    kept = []
    found = advising.Advisor(target, tokenizer, "tiny", requests, [[advice_arms.Arm(name, name) for name in arms]],
                             minutes=minutes, raw=True, keep=kept.extend, clock=Clock(step))
    monkeypatch.setattr(found, "_open", lambda *args: True)
    monkeypatch.setattr(found, "_tune_lengths", lambda: None)
    return found, kept
  return made


def test_time_that_is_left_is_spent_on_more_requests(advisor, monkeypatch):
  """With time enough all requests of both halves are run by an arm that is near the best; without, one of each."""
  counts = []
  for step in (1e-4, 22.0):
    found, kept = advisor(step, minutes=10)
    monkeypatch.setattr(found, "_score", lambda name, kind: 1.2)
    monkeypatch.setattr(found, "_first", lambda name, kinds=None: 1.2)
    monkeypatch.setattr(found, "_tuning", lambda name: 1.2)
    found.run()
    halves = {half: {r["id"] for r in kept if r["half"] == half} for half in ("tuning", "held_out")}
    assert not halves["tuning"] & halves["held_out"]
    counts.append((len(halves["tuning"]), len(halves["held_out"])))
  assert counts[0] == (6, 4) and counts[1] == (2, 2)


def test_only_arms_near_the_best_race(advisor, monkeypatch):
  found, _ = advisor(1e-3, minutes=10)
  kind = next(iter(found.kinds))
  scores = {"a": 1.5, "b": 1.36, "c": 1.34, "d": 0.9, "e": 1.4, "f": 1.45, "g": None}
  found._draft_ms = dict.fromkeys(scores, 0.0)
  monkeypatch.setattr(found, "_score", lambda name, kind: scores[name])
  monkeypatch.setattr(found, "_bounded", lambda name, kind: None)
  assert found._racers(kind) == ["a", "e", "f"]  # three at most, in the order of all arms
  scores |= {"a": 0.8, "b": 0.91, "c": 0.89, "e": None, "f": None}
  assert found._racers(kind) == ["b", "d"]  # near plain decoding, which nothing beats
  found._stopped["b", kind] = "closed"
  monkeypatch.setattr(found, "_bounded", lambda name, kind: "cannot pay")
  assert found._racers(kind) == []


def test_a_kind_of_few_requests_is_drawn_towards_all_kinds(advisor, monkeypatch):
  found, _ = advisor(1e-3, minutes=10)
  kind = next(iter(found.kinds))
  monkeypatch.setattr(found, "_first", lambda name, kinds=None: 1.0)
  found._pairs["a", kind, False] = [(10, 2.0)], [(10, 1.0)]
  found._pairs["b", kind, False] = [(10, 2.0)] * 6, [(10, 1.0)] * 6
  assert found._score("a", kind) == pytest.approx(2 ** (1 / 9)) and found._score("b", kind) == pytest.approx(2 ** (6 / 14))
  assert found._score("c", kind) is None


def test_a_length_that_was_hardly_tried_does_not_close_the_old_one(advisor, monkeypatch):
  """Tried on one kind of two, the new length is closed whatever it did there; on both, the faster one stays."""
  for kinds, faster in ((1, "ngram"), (2, "ngram, draft_tokens=2")):
    found, _ = advisor(1e-3, minutes=10)
    monkeypatch.undo()
    monkeypatch.setattr(advising.advice_lengths, "best", lambda *args: (2, 1.5))
    monkeypatch.setattr(found, "_width", lambda nodes: nodes)
    found._draft_ms["ngram"] = 0.0
    found._proposers["ngram"] = proposers.NGram(num_tokens=7)
    every = list(found.kinds)
    for kind in every:
      found._pairs["ngram", kind, False] = [(10, 2.0)], [(10, 1.5)]
      found._counts["ngram", kind] = [{}]

    def stage(arms, every=every, kinds=kinds, found=found):
      for kind in every[:kinds]:
        found._pairs[arms[0].name, kind, False] = [(10, 2.0)], [(10, 1.0)]

    monkeypatch.setattr(found, "_stage", stage)
    found._tune_lengths()
    slower, = {"ngram", "ngram, draft_tokens=2"} - {faster}
    assert {name for name, _ in found._stopped} == {slower} and len(found._stopped) == 2


def test_passes_are_timed_at_every_width_that_a_length_may_ask_for(advisor, monkeypatch):
  found, _ = advisor(1e-3, minutes=10)
  widths = lambda target, proposer, text, **kwargs: {
      "widths": decode.widths_for(proposer.max_nodes), "verify_ms": [1.0] * len(decode.widths_for(proposer.max_nodes))}
  monkeypatch.setattr(advising.costs_lib, "step_costs", widths)
  monkeypatch.setattr(advising.costs_lib, "draft_timer", lambda *args, **kwargs: lambda: 0.5)
  found._time_parts("ngram", proposers.NGram())
  assert {point.width for point in found._times.points} == {1, 4, 8, 16} and found._draft_ms == {"ngram": 0.5}


def test_a_warm_up_beyond_the_time_still_ends_in_advice(advisor):
  """Everything but plain decoding is left out, and said to be."""
  found, kept = advisor(1000.0, minutes=0.1)
  said = found.run()
  assert said["overall"]["method"] == "plain" and {each["method"] for each in said["types"]} == {"plain"}
  assert [each["arm"] for each in said["left_out"]] == ["ngram"] and not kept


def test_halves_share_no_request():
  for count in range(7):
    first, second = advice.halves(list(range(count)))
    assert sorted(first + second) == list(range(count)) and 0 <= len(first) - len(second) <= 1


def test_kinds_lose_no_request_and_can_be_halved():
  requests = workloads.read_workload("bundled")
  kinds = advice.kinds(requests)
  assert sorted(r.id for each in kinds.values() for r in each) == sorted(r.id for r in requests)
  assert min(map(len, kinds.values())) >= 2
  assert ("multilingual", "es") in kinds and ("multilingual", "other") in kinds and ("multilingual", "ja") not in kinds
  one = [r for r in requests if (r.category, r.language) in (("translation", "en"), ("translation", "ko"))]
  assert {key: len(each) for key, each in advice.kinds(one).items()} == {("translation", "en"): 4}


def test_stages():
  shipped = lambda target, kind: kind in ("eagle3", "medusa")
  names = lambda *args: [[arm.name for arm in stage] for stage in advice_arms.stages_of(*args, "t", shipped)]
  assert names(None, []) == [["ngram", "suffix", "auto_lookup"], ["eagle3", "medusa"]]
  assert names(None, ["a", "b"])[1] == ["draft_model a", "draft_model b"]
  assert names(["suffix", "eagle3"], []) == [["suffix"], ["eagle3"]]
  for given, says in (((["magic"], []), "'magic'"), ((["draft_model"], []), "--drafts"),
                      ((["ngram"], ["a"]), "--drafts=a")):
    with pytest.raises(ValueError, match=says):
      names(*given)


OVERALL = {"method": "suffix", "arm": "suffix", "settings": {"draft_tokens": 5}, "measured": 1.2, 
           "interval": [1.1, 1.3], "memory_bytes": 0}


def an_advice(**changes):
  chat = advice.decide("chat", "en", [candidate("ngram", 0.8)])
  eagle3 = advice.Candidate("eagle3", "eagle3", {"draft_tokens": 3}, tried=1.4, speedup=1.3)
  code = advice.decide("code", "en", [eagle3])
  return {"schema": 1, "target": "x/y", "overall": OVERALL, "types": [chat, code], "left_out": [], "device": "a<b>",
          "max_new_tokens": 8, "requests_of_a_half": 3} | changes


@pytest.fixture
def write(tmp_path):
  def written(found):
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(found))
    return str(path)
  return written


@pytest.fixture
def preset(monkeypatch):
  """What a program's flags are after `apply`; of `given` as on its command line."""
  def applied(path, apply, **given):
    program = flags.FlagValues()
    flags.DEFINE_string("target", "t", "", flag_values=program)
    flags.DEFINE_list("methods", ["plain", "ngram"], "", flag_values=program)
    flags.DEFINE_string("method", "ngram", "", flag_values=program)
    flags.DEFINE_list("categories", None, "", flag_values=program)
    flags.DEFINE_integer("draft_tokens", None, "", flag_values=program)
    program(["program", *(f"--{name}={value}" for name, value in given.items())])
    monkeypatch.setattr(presets, "flags", types.SimpleNamespace(FLAGS=program))
    monkeypatch.setattr(presets, "PRESET", types.SimpleNamespace(value=path))
    pair = types.SimpleNamespace(value=None)
    monkeypatch.setattr(presets, "pairs", types.SimpleNamespace(apply=lambda: None, PAIR=pair))
    monkeypatch.setattr(methods, "_OWN", {})
    apply()
    assert all(program[name].using_default_value == (program[name].value == program[name].default) for name in program)
    return {name: program[name].value for name in ("target", "method", "methods", "draft_tokens")}
  return applied


def test_a_preset_is_what_was_advised(write, preset):
  found = preset(write(an_advice()), presets.apply_overall)
  assert (found["target"], found["method"], found["draft_tokens"]) == ("x/y", "suffix", 5)
  each = preset(write(an_advice()), presets.apply_by_category)
  assert (each["target"], each["methods"], each["draft_tokens"]) == ("x/y", ["plain", "eagle3", "suffix"], None)
  assert methods.given() == {"eagle3": {"draft_tokens": 3}, "suffix": {"draft_tokens": 5}}  # each its own
  for apply in (presets.apply_overall, presets.apply_by_category):
    untouched = {"target": "t", "method": "ngram", "methods": ["plain", "ngram"], "draft_tokens": None}
    assert preset(None, apply) == untouched


def test_a_preset_by_category(write, preset):
  path = write(an_advice())
  found = preset(path, presets.apply_by_category, categories="code")
  assert found["methods"] == ["plain", "eagle3"] and methods.given() == {"eagle3": {"draft_tokens": 3}}
  assert preset(path, presets.apply_by_category, categories="chat")["methods"] == ["plain"] and not methods.given()
  with pytest.raises(ValueError, match="no advice on --categories=math; it knows chat, code"):
    preset(path, presets.apply_by_category, categories="math")
  other = OVERALL | {"method": "eagle3", "arm": "eagle3"}
  with pytest.raises(ValueError, match="eagle3 with --draft_tokens=3 for some requests and with --draft_tokens=5 .*--cat"):
    preset(write(an_advice(overall=other)), presets.apply_by_category)


@pytest.mark.parametrize("name, value", [("target", "z"), ("draft_tokens", 4), ("method", "ngram")])
def test_a_preset_beside_what_it_stands_for(write, preset, name, value):
  with pytest.raises(ValueError, match=f"--preset=.*--{name}.*leave one"):
    preset(write(an_advice()), presets.apply_overall, **{name: value})


def test_a_preset_beside_a_pair(write, preset, monkeypatch):
  def paired():
    monkeypatch.setattr(presets.pairs.PAIR, "value", "p")
    presets.apply_overall()
  with pytest.raises(ValueError, match="--preset=.*--pair=p"):
    preset(write(an_advice()), paired)


def test_presets_that_are_none(write, preset, tmp_path):
  for found, says in (([1], "no advice"), ({"schema": 1}, "it needs schema, target"),
                      (an_advice(overall=OVERALL | {"settings": {"magic": 1}}), "'magic' that is no flag")):
    with pytest.raises(ValueError, match=says):
      preset(write(found), presets.apply_overall)
  with pytest.raises(ValueError, match="can be read"):
    preset(str(tmp_path / "none.json"), presets.apply_by_category)


def test_pages_say_what_was_decided():
  found = an_advice()
  for text in (advice_page.markdown(found), advice_page.page(found)):
    assert "Use suffix by default: 1.20 times" in text and "1 of 2 kinds" not in text.split("by default")[0]
    assert "chat (en): plain" in text and "code (en): eagle3" in text and "--draft_tokens=3" in text
  assert "a&lt;b&gt;" in advice_page.page(found) and "a<b>" not in advice_page.page(found)
  assert advice_page.headline(found | {"overall": OVERALL | {"method": "plain"}}).startswith("Decode plainly")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A whole run on the tiny target, and its preset given to the benchmark."""
  folder = tmp_path_factory.mktemp("advise")
  lines = [{"id": f"{category}-{i}", "category": category, "lang": "en", "prompt": "a b a b a b " * (i + 1)}
           for category, i in itertools.product(("chat", "code"), range(3))]
  (folder / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  given = [f"--target={programs.TINY}", f"--workload={folder}/w.jsonl", "--max_new_tokens=12", "--raw"]
  cases = [("advise", [*given, "--methods=ngram,suffix", "--minutes=2", f"--outdir={folder}/advice"], ""),
           ("advise", [*given, "--methods=magic", f"--outdir={folder}/bad"], ""),
           ("advise", [*given, "--draft_tokens=3", f"--outdir={folder}/bad"], "")]
  return folder, programs.run_all(cases, env=programs.environment(tmp_path_factory))


def test_a_run_ends_in_advice(run):
  folder, (ended, *_) = run
  assert ended.code == 0, ended.err
  found = json.loads((folder / "advice" / "advice.json").read_text())
  assert [(each["category"], each["language"]) for each in found["types"]] == [("chat", "en"), ("code", "en")]
  records = [json.loads(line) for line in (folder / "advice" / "requests.jsonl").read_text().splitlines()]
  tuning, held = ({r["id"] for r in records if r["half"] == half} for half in ("tuning", "held_out"))
  assert not tuning & held and tuning
  for each in found["types"]:
    assert {row["arm"].partition(", draft_tokens=")[0] for row in each["candidates"]} == {"ngram", "suffix"}
    assert each["method"] == "plain" or each["measured"] > 1
  assert found["overall"]["method"] == "plain" or found["overall"]["measured"] > 1
  assert advice_page.headline(found) in ended.out
  assert advice_page.page(found) == (folder / "advice" / "advice.html").read_text()
  assert presets.read(str(folder / "advice" / "advice.json")) == found


def test_bad_input(run):
  folder, (_, method, option) = run
  assert method.code == 2 and "'magic'" in method.message
  assert option.code == 2 and "--draft_tokens" in option.message
  assert not (folder / "bad").exists()


@pytest.mark.parametrize("faster", ["ngram", "ngram, draft_tokens=2"])
def test_another_length_is_tried_and_one_of_both_is_kept(quick_compile, monkeypatch, faster):
  """Where counts ask for another length, it is an arm of its own, measured like any; the slower of both is closed."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  monkeypatch.setattr(settings.MAX_NEW_TOKENS._flagvalues["max_new_tokens"], "value", 12)
  target, tokenizer = specjax.load(programs.ROOT / programs.TINY)
  requests = [workloads.Request(id=f"{category}-{i}", category=category, language="en", turns=("a b a b a b " * (i + 1),),
                                source="here") for category, i in itertools.product(("chat", "code"), range(2))]
  kept = []
  found = advising.Advisor(target, tokenizer, "tiny", requests, [[advice_arms.Arm("ngram", "ngram")]], minutes=5,
                           raw=True, keep=kept.extend)
  monkeypatch.setattr(advising.advice_lengths, "best", lambda records, depth, *rest: (2, 1.5))
  monkeypatch.setattr(advising.Advisor, "_bounded", lambda *args: None)
  monkeypatch.setattr(advising.Advisor, "_open", lambda *args: True)
  speeds = {"ngram": 1.1, "ngram, draft_tokens=2": 1.1} | {faster: 1.3}
  monkeypatch.setattr(advising.Advisor, "_first", lambda self, name, kinds=None: speeds[name])
  monkeypatch.setattr(advising.Advisor, "_tuning", lambda self, name: speeds[name])
  monkeypatch.setattr(advising.Advisor, "_held", lambda self, name, kinds: (speeds[name], None))
  said = found.run()
  assert [[arm.name for arm in arms] for arms in found.stages] == [["ngram"], ["ngram, draft_tokens=2"]]
  assert {r["method"] for r in kept if r["half"] == "tuning"} == {"plain", "ngram", "ngram, draft_tokens=2"}
  slower, = set(speeds) - {faster}
  for each in said["types"]:
    rows = {row["arm"]: row for row in each["candidates"]}
    assert rows[slower]["stopped"].startswith("over 2 kinds it was 1.10 times") and each["arm"] != slower
    assert rows[faster]["stopped"] is None and rows["ngram, draft_tokens=2"]["settings"] == {"draft_tokens": 2}
  assert said["overall"]["arm"] == faster
  assert found._proposers["ngram, draft_tokens=2"].max_depth == 2 and found._proposers["ngram"].max_depth == 7
