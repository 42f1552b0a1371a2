"""Ablations on a real model, over a tiny one: what they run, what they claim of given counts, and what they lack."""
import dataclasses
import pathlib
import re

import numpy as np
import pytest

from experiments import workloads
from experiments.ablations import base
from experiments.ablations import gallery
from experiments.ablations import real_drafts
from experiments.ablations import real_model
from experiments.ablations import real_requests
from experiments.ablations import registry
from experiments.ablations.real_model import HEAD, LOOKUP
from experiments.harness import draft_view
from specjax import checkpoints
from specjax import drivers
from specjax import proposers
from specjax import verifiers
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
ABLATIONS = {ablation.name: ablation for module in (real_drafts, real_requests) for ablation in module.ABLATIONS}
KINDS = ("chat", "code", "code_edit", "json", "math", "multilingual")


def request(name, kind, language="en", text="a list of numbers: 1 2 3 1 2 3 1 2"):
  return workloads.Request(id=name, category=kind, language=language, turns=(text, "more"), source="w.jsonl:1")


@pytest.fixture(scope="module")
def model():
  """A tiny target and head, and requests of several kinds and languages."""
  tokenizer = checkpoints.Tokenizer.from_folder(FIXTURES / "tiny_llama")
  target = tiny.decoder(layers=1, vocab=tokenizer.vocab_size, max_context=real_model.SLOTS)
  requests = [request(kind, kind, "ko" if kind == "multilingual" else "en") for kind in KINDS]
  requests += [request("chat 2", "chat"), request("multilingual 2", "multilingual", "es"),
               request("long", "rag", text="word " * 400)]
  sizes = {tuple(drivers.chunks(len(tokenizer.chat([{"role": "user", "content": r.turns[0]}])) - 1)) for r in requests}
  return real_model.Model(target, tokenizer, tiny.eagle3(target, tuple(range(0, tokenizer.vocab_size, 2))),
                          tuple(requests), tuple(sizes))


def over(ablation, model):
  """The ablation, over that model."""
  return dataclasses.replace(ablation, run=lambda options: ablation.run(options, model))


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
  """All of them, run once."""
  chosen = [over(ablation, model) for ablation in ABLATIONS.values()]
  return {done.ablation.name: done for done in gallery.run(chosen, base.Options(), tmp_path_factory.mktemp("real"))}


def test_the_registry():
  for name, ablation in ABLATIONS.items():
    assert registry.ALL[name] is ablation and ablation.kind == "toy" and ablation.run.__doc__
    assert set(ablation.items) <= set(registry.QUESTIONS)
  assert {item for ablation in ABLATIONS.values() for item in ablation.items} == {1, 2, 4, 5, 10, 16, 30, 33}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_one_runs(found, name):
  result = found[name].result
  assert result.verdict in base.VERDICTS and re.search(r"\d", result.why) and result.why.endswith(".")
  assert result.curves and result.rows and len(result.columns) == len(set(result.columns))
  assert all(value is None or np.isfinite(value) for series in result.curves for value in series.y)
  assert {points.of for points in result.published} <= {None, *(series.label for series in result.curves)}
  assert "<svg" in found[name].svg


def test_counts_are_the_same_in_every_run(found, model):
  for name in ("real_self_fed", "real_random_prompts"):
    assert ABLATIONS[name].run(base.Options(), model) == found[name].result


def generate(model, proposer, ids):
  result = drivers.generate(model.target, proposer, [ids], max_new_tokens=24)
  return result.token_ids, {name: np.asarray(getattr(result.counters, name)).tolist()
                            for name in ("steps", "drafted_tokens", "accepted_tokens")}


@pytest.mark.parametrize("long, short", [
    (lambda model: model.chain(2), lambda model: proposers.Eagle(head=model.head, num_tokens=2)),
    (lambda model: model.tree(8, 2), lambda model: proposers.EagleTree(head=model.head, nodes=8, depth=2, beam=4)),
    (lambda model: real_model.lookup(2), lambda model: proposers.NGram(num_tokens=2)),
    (lambda model: real_model.suffix(2), lambda model: proposers.Suffix(num_tokens=2))],
    ids=["chain", "tree", "lookup", "suffix"])
def test_a_depth_that_is_a_leaf_is_that_depth(model, long, short):
  """The same drafts as of a proposer made that short, and the same text: also where half of the prompt repeats."""
  ids = [*model.asked(24)[0].ids, *[5, 6, 7, 8] * 4]
  text, counted = generate(model, long(model), ids)
  assert (text, counted) == generate(model, short(model), ids)
  assert counted["drafted_tokens"][0] > 0
  compiled = drivers.compiled_programs()
  other = long(model)
  generate(model, other.replace(levels=np.int32(1)), ids)
  assert drivers.compiled_programs() == compiled


def test_drawn_drafts_are_judged_by_a_rule_of_drawn_drafts(model):
  drawn = model.drawn(3)
  assert drawn.samples and drawn.max_depth == 3
  asked = model.asked(24)[:1]
  arms = {"drawn": real_model.Arm(drawn, 1.0, verifiers.Rejection())}
  run = lambda seed: real_model.measure(model, arms, asked, new_tokens=24, seed=seed, label="test")["drawn"].texts
  assert run(0) == run(0) != run(1)


def test_requests(model):
  asked = model.asked(40)
  assert [one.request.id for one in asked] == list(KINDS)  # the first of each kind; the long one does not fit
  assert [one.request.id for one in model.asked(40, ("chat",), 2)] == ["chat", "chat 2"]
  assert all(one.ids == tuple(model.tokenizer.chat([{"role": "user", "content": one.request.turns[0]}]))
             for one in asked)
  assert not model.asked(real_model.SLOTS)
  narrow = dataclasses.replace(model, prefills=((32,),))
  assert not narrow.asked(40) and len(narrow.asked(40, any_length=True)) == len(KINDS)


def test_random_prompts_are_noise_of_the_same_lengths_in_the_template(model):
  real = model.asked(40)
  made = real_requests.randomised(model, real, 0)
  front, back = draft_view.template(model.tokenizer)
  assert front and back
  for a, b in zip(real, made, strict=True):
    assert len(a.ids) == len(b.ids) and a.request == b.request
    assert list(b.ids[:len(front)]) == front and list(b.ids[-len(back):]) == back
    inner = b.ids[len(front):-len(back)]
    assert len(set(inner)) > len(inner) / 3 and not any(map(model.tokenizer.is_special, inner))
    assert inner != a.ids[len(front):-len(back)]
  assert made == real_requests.randomised(model, real, 0) != real_requests.randomised(model, real, 1)


def counts(asked, rates, *, steps=1000, cost=1.0, drafting=1.0):
  """Counts of as many steps behind every request, of which a share drafts one token a rate, each accepted so often."""
  tried = steps * drafting * np.cumprod([1.0, *rates])
  here = lambda values: np.tile(np.round(values).astype(int), (len(asked), 1))
  accepted = here(tried[1:])
  drafted = here([steps * drafting] * len(rates))
  output = steps + accepted.sum(1)
  return real_model.Counts(
      tuple(asked), ((1, 2),) * len(asked),
      {"steps": np.full(len(asked), steps), "output_tokens": output, "drafted_tokens": drafted.sum(1),
       "accepted_tokens": accepted.sum(1), "drafted_per_position": drafted,
       "trials_per_position": here(tried[:-1]), "accepted_per_position": accepted},
      np.full(len(asked), steps * cost), output)


def pooled(*parts):
  """Counts of several lists of requests as one."""
  return real_model.Counts(
      sum((part.asked for part in parts), ()), sum((part.texts for part in parts), ()),
      {name: np.concatenate([part.counted[name] for part in parts]) for name in parts[0].counted},
      np.concatenate([part.seconds for part in parts]), np.concatenate([part.decoded for part in parts]))


def verdict(monkeypatch, model, name, made):
  """That of an ablation whose arms give what `made(arm's name, requests)` says, and why."""
  monkeypatch.setattr(real_model, "measure", lambda model, arms, asked, *, new_tokens, seed, label: {
      arm: made(arm, asked) for arm in arms})
  result = ABLATIONS[name].run(base.Options(), model)
  return result.verdict, result.why


def test_pooled_counts(model):
  asked = model.asked(40)
  one = counts(asked, [.5, .4], steps=100)
  assert one.tokens_per_step == pytest.approx(1.7) and one.accepted == pytest.approx(70 / 150)
  assert one.conditional(0, 0) == .5 and one.conditional(1, 1) == .4 and one.conditional(0, 1) == one.accepted
  assert one.ratios["acceptance_rate"] == pytest.approx(.35) and one.speed == pytest.approx(1.7)
  both = pooled(one, counts(asked[:1], [.9, .9], steps=100))
  assert both.of([len(asked)]).tokens_per_step == pytest.approx(2.71) and both.of(range(6)).tokens_per_step == 1.7
  assert both.pairs[0] == (170, 100) and both.pairs[-1] == (271, 100)
  assert real_model.rate(1, 0) == 0


def test_the_closed_form_of_counts(model):
  asked = model.asked(40)
  flat = counts(asked, [.6] * 7, steps=10**6)
  assert flat.predicted((0, 1, 3, 7)) == pytest.approx([1, 1.6, 2.176, (1 - .6**8) / .4], rel=1e-4)
  assert counts(asked, [.6] * 7, steps=10**6, drafting=.5).predicted((3,)) == pytest.approx([1.588], rel=1e-4)
  falling = counts(asked, [.8, .4, .2], steps=10**6)
  assert falling.predicted((3,)) == pytest.approx([1 + .8 + .32 + .064], rel=1e-4)
  mean = 1.184 / 2.12
  assert falling.predicted((3,), "geometric") == pytest.approx([1 + mean + mean**2 + mean**3], rel=1e-4)
  assert counts(asked, [.5] * 3, drafting=0.0).predicted((0, 3)) == [1, 1]


def test_claims_of_draft_length(monkeypatch, model):
  def made(cost, rate=lambda length: .6):
    return lambda arm, asked: (counts(asked, [], cost=1.0) if arm == "plain" else
                               counts(asked, [rate(arm[1])] * arm[1], cost=cost(arm[1])))
  run = lambda *args: verdict(monkeypatch, model, "real_draft_length", made(*args))
  smooth = lambda length: 1 + .1 * length
  assert run(smooth)[0] == base.AGREES
  says = run(lambda length: 1.1 if length < 4 else 2.2 if length < 5 else 1.2)
  assert says[0] == base.DIFFERS and "EAGLE-3 head: speed has one peak" in says[1] and "closed" not in says[1][-60:]
  says = run(smooth, lambda length: .6 if length < 6 else .2)
  assert says[0] == base.DIFFERS and "no longer draft yields fewer" in says[1] and "closed form is within 7%" in says[1]


def test_one_peak():
  assert real_drafts.one_peak([1, 2, 3, 2, 1], 0) and real_drafts.one_peak([1, 2, 3], 0)
  assert not real_drafts.one_peak([1, 3, 2, 2.5, 1], .05) and real_drafts.one_peak([1, 3, 2, 2.05, 1], .05)
  assert not real_drafts.one_peak([2, 1, 3], .05)


def test_claims_of_self_fed_features(monkeypatch, model):
  run = lambda rates, steps=1000: verdict(monkeypatch, model, "real_self_fed",
                                          lambda arm, asked: counts(asked, rates, steps=steps))
  assert run([.5] * 7)[0] == base.AGREES
  says = run([.5, .4, .4, .4, .3, .3, .3])
  assert says[0] == base.DIFFERS and "behind 1 to 3" in says[1] and "behind 4 to 6" in says[1]
  assert run([.5] * 4 + [.2] * 3)[0] == base.DIFFERS
  assert run([.5] * 7, 4)[0] == base.CANNOT_SAY


TREES = {("chain", 3): [.5] * 3, ("chain", 7): [.5] * 7, ("tree", 3): [.55] * 3, ("tree", 7): [.65] * 6,
         ("tree", 15): [.7] * 6, ("tree of 7, levels", 1): [.65], ("tree of 7, levels", 2): [.65] * 2,
         ("tree of 7, levels", 3): [.65] * 3, ("fixed tree", 15): [.6] * 6}


@pytest.mark.parametrize("arm, rates, broken", [
    (None, None, None), (("tree", 7), [.4] * 6, "of 7 nodes a tree yields more"), (("tree", 3), [.8] * 3, "lead grows"),
    (("tree", 15), [.6] * 6, "more nodes yield more"), (("fixed tree", 15), [.8] * 6, "more than a fixed one"),
    (("tree of 7, levels", 2), [.1], "more levels do not yield less"),
    (("tree of 7, levels", 3), [.65, .65], "levels behind the third add less")])
def test_claims_of_trees(monkeypatch, model, arm, rates, broken):
  given = TREES | ({arm: rates} if arm else {})
  says = verdict(monkeypatch, model, "real_trees", lambda arm, asked: counts(asked, given[arm]))
  assert says[0] == (base.DIFFERS if broken else base.AGREES)
  assert not broken or broken in says[1]


def test_claims_of_the_temperature(monkeypatch, model):
  run = lambda greedy, drawn: verdict(monkeypatch, model, "real_temperature", lambda arm, asked: counts(
      asked, [.6 - (greedy if arm[0] == "greedy drafts" else drawn) * arm[1]] * 3))
  assert run(.3, .1)[0] == base.AGREES
  assert run(.3, .001)[0] == base.CANNOT_SAY  # a fall inside the intervals
  says = run(.05, .1)
  assert says[0] == base.DIFFERS and "greedy drafts lose more" in says[1]
  says = run(.3, -.1)
  assert "drawn drafts are accepted less" in says[1] and "tokens a step fall" in says[1]


def test_claims_of_languages(monkeypatch, model):
  def run(head, lookup):
    made = lambda arm, asked: pooled(*(counts([one], [(head if arm == HEAD else lookup)(one.request)] * 3)
                                       for one in asked))
    return verdict(monkeypatch, model, "real_languages", made)
  english = lambda request: .6 if request.language == "en" else .2
  says = run(english, lambda request: .15)
  assert says[0] == base.AGREES and "too long and left out: rag" in says[1]
  says = run(lambda request: .6, english)
  assert "over languages" in says[1] and "over kinds" in says[1] and "most in English" in says[1]
  assert "less of a draft is accepted" not in says[1]
  assert "less of a draft is accepted" in run(english, lambda request: .9)[1]


def test_claims_of_random_prompts(monkeypatch, model):
  def run(head, lookup):
    made = lambda arm, asked: pooled(*(counts([one], [(.4, head if arm == HEAD else lookup)[place % 2]] * 3)
                                       for place, one in enumerate(asked)))
    return verdict(monkeypatch, model, "real_random_prompts", made)
  assert run(.6, .5)[0] == base.AGREES
  says = run(.6, .3)
  assert says[0] == base.DIFFERS and f"{LOOKUP}: random prompts" in says[1] and f"{HEAD}: random prompts" not in says[1]


def test_texts_that_differ_are_counted(model):
  asked = model.asked(40)[:3]
  one = counts(asked, [.5])
  other = dataclasses.replace(one, texts=((1, 2), (1, 3), (1, 2)))
  assert real_model.same_texts({"a": one, "b": other}) == "2 of 3 texts are the same in all 2 arms"


def test_without_the_model_the_others_go_on(monkeypatch, tmp_path):
  def missing(name):
    raise checkpoints.CheckpointError(f"{name} is not here; download it")
  monkeypatch.setattr(real_model.specjax, "load", missing)
  real_model.load.cache_clear()
  with pytest.raises(ValueError, match="smollm2-135m is not here"):
    ABLATIONS["real_trees"].run(base.Options())
  done = list(gallery.run([ABLATIONS["real_trees"], registry.ALL["tree_size"]], base.Options(), tmp_path))
  assert [one.result.verdict for one in done] == [base.CANNOT_SAY, base.AGREES]
  assert done[0].result.why == "smollm2-135m is not here; download it"
  page = gallery.write(done, "a command", tmp_path).read_text(encoding="utf-8")
  assert "smollm2-135m is not here" in page and (tmp_path / "real_trees" / "plot.png").exists()
