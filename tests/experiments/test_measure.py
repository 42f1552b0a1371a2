"""The measuring loop: order of the arms, equal conversations and seeds, thrown-away measurements, refusals up front."""
import collections
import dataclasses
import json
import pathlib

from absl.testing import flagsaver
from absl import flags
from flax import struct
import jax
import numpy as np
import pytest

from experiments import workloads
from experiments.harness import measure
import specjax
from specjax import checkpoints
from specjax import counters as counters_lib
from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax import verifiers
from specjax.testing import DummyTarget

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
TINY = FIXTURES / "tiny_llama"
METHODS = {"plain": proposers.Plain(), "ngram": proposers.NGram(num_tokens=3)}


@pytest.fixture(autouse=True)
def parsed_flags():
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture(scope="module")
def tokenizer():
  return checkpoints.Tokenizer.from_folder(TINY)


def request(name="a", *turns, category="chat", language="en", source="w.jsonl:1"):
  turns = turns or ("hello there",)
  return workloads.Request(id=name, category=category, language=language, turns=turns, source=source)


def make_plan(tokenizer, requests, *, methods=None, batch_size=1, repeats=1, max_new_tokens=12, raw=False,
              verifier=verifiers.Point(), **target):
  return measure.Plan(target=DummyTarget(vocab=tokenizer.vocab_size, order=1, **target), tokenizer=tokenizer,
                      methods=methods or METHODS, batches=measure.batches(requests, batch_size), repeats=repeats,
                      max_new_tokens=max_new_tokens, raw=raw, verifier=verifier)


class Driver:
  """Stands in for `drivers.generate`: notes its calls and answers at once, a text of its own for every method."""

  def __init__(self, monkeypatch, compiles=()):
    self.calls = []
    self.programs = 0
    self._compiles = set(compiles)  # calls that compile something
    monkeypatch.setattr(measure.drivers, "generate", self.generate)
    monkeypatch.setattr(measure.drivers, "compiled_programs", lambda: self.programs)

  @property
  def arms(self):
    return ["ngram" if isinstance(call["proposer"], proposers.NGram) else "plain" for call in self.calls]

  def generate(self, target, proposer, prompts, params=None, *, max_new_tokens, key, verifier,
               keep=False, kept=None):
    del target
    self.programs += len(self.calls) in self._compiles
    self.calls.append({"proposer": proposer, "prompts": prompts, "seeds": list(params.seed), "key": key,
                       "params": params, "verifier": verifier, "keep": keep, "kept": kept})
    rows, mine = len(prompts), 30 + len(self.calls)
    counters = counters_lib.zero_counters(rows, proposer.max_depth, 3)
    counters = jax.tree.map(np.asarray, counters).replace(steps=np.arange(rows) + 3)
    tokens = np.full((rows, max_new_tokens), -1, np.int32)
    tokens[:, :2] = mine
    return drivers.GenerateResult(tokens=tokens, lengths=np.full(rows, 2), drafted=np.zeros_like(tokens, bool),
                                  finish_reasons=("length",) * rows, counters=counters,
                                  timings=drivers.Timings(first_token=1.0 * len(self.calls),
                                                          total=3.0 * len(self.calls),
                                                          first_tokens=np.ones(rows, np.int32)),
                                  reused=np.zeros(rows, np.int32), kept=np.int32(mine) if keep else None)


def run(plan):
  return list(measure.measure(plan))


def test_batches_hold_one_category_in_the_order_listed():
  requests = [request("a"), request("b", category="code"), request("c"), request("d", language="ko"), request("e")]
  found = measure.batches(requests, 2)
  assert sorted([r.id for r in batch] for batch in found) == [["a", "c"], ["b"], ["d", "e"]]
  assert [len(batch) for batch in measure.batches(requests, 1)] == [1] * 5
  assert sorted(len(batch) for batch in measure.batches(requests, 9)) == [1, 4]


@struct.dataclass
class Keeps(proposers.NGram):
  """Remembers every output."""
  known: tuple = struct.field(pytree_node=False, default=())

  def remember(self, state, outputs):
    return self.replace(known=(*self.known, *(output[0] for output in outputs)))

  def forget(self):
    return self.replace(known=())


def test_what_outlives_a_request_belongs_to_one_arm_and_one_repeat(monkeypatch, tokenizer):
  """Empty at first, whatever was left in it; of other requests only, in the listed order, all turns of each."""
  driver = Driver(monkeypatch)
  methods = {"a": Keeps(known=(7,)), "b": Keeps(max_ngram=4)}
  run(make_plan(tokenizer, [request("x"), request("y", "one", "two"), request("z")], methods=methods, repeats=2))
  said = [30 + i + 1 for i in range(len(driver.calls))]
  for ngrams, repeat in ((3, 0), (3, 1), (4, 0), (4, 1)):
    mine = [(call["proposer"].known, said[i]) for i, call in enumerate(driver.calls)
            if call["proposer"].max_ngram == ngrams]
    # Calls of one arm: request x twice, the first turn of y twice, its second twice, z twice.
    x, first, second, z = (mine[2 * i + repeat] for i in range(4))
    assert x[0] == () and first[0] == second[0] == (x[1],) and z[0] == (x[1], first[1], second[1])


def test_every_arm_runs_a_request_before_the_next_and_the_order_rotates(monkeypatch, tokenizer):
  driver = Driver(monkeypatch)
  run(make_plan(tokenizer, [request(name) for name in "abc"], repeats=2))
  assert driver.arms == ["plain", "ngram", "ngram", "plain"] + ["ngram", "plain", "plain", "ngram"] + [
      "plain", "ngram", "ngram", "plain"]


def test_three_arms_rotate(monkeypatch, tokenizer):
  methods = {"a": proposers.NGram(num_tokens=1), "b": proposers.NGram(num_tokens=2), "c": proposers.NGram(num_tokens=3)}
  driver = Driver(monkeypatch)
  run(make_plan(tokenizer, [request(name) for name in "abc"], methods=methods))
  assert [call["proposer"].num_tokens for call in driver.calls] == [1, 2, 3, 2, 3, 1, 3, 1, 2]


def test_one_record_a_run(monkeypatch, tokenizer):
  Driver(monkeypatch)
  plan = make_plan(tokenizer, [request("a", "x", "y"), request("b")], repeats=2)
  progress = []
  records = [r for batch in measure.measure(plan, lambda: progress.append(1)) for r in batch]
  expected = [(name, turn, repeat, method) for name, turns in (("a", 2), ("b", 1)) for turn in range(turns)
              for repeat in range(2) for method in METHODS]
  assert sorted((r["id"], r["turn"], r["repeat"], r["method"]) for r in records) == sorted(expected)
  assert len(progress) == plan.runs == 12
  json.dumps(records, allow_nan=False)


def test_a_measurement_that_compiled_is_made_again(monkeypatch, tokenizer):
  driver = Driver(monkeypatch, compiles=(0, 3, 4))
  records = [r for batch in run(make_plan(tokenizer, [request("a"), request("b")])) for r in batch]
  assert driver.arms == ["plain", "plain", "ngram"] + ["ngram", "ngram", "ngram", "plain"]
  # The driver's times tell its calls apart: those of calls 1, 4 and 5, which compiled, stand nowhere.
  assert [r["latency_ms"] for r in records] == [6e3, 9e3, 18e3, 21e3]


@pytest.mark.parametrize("names", [("plain", "ngram"), ("ngram", "plain")])
def test_every_arm_continues_the_same_conversation(monkeypatch, tokenizer, names):
  driver = Driver(monkeypatch)
  methods = {name: METHODS[name] for name in names}
  records = run(make_plan(tokenizer, [request("z"), request("a", "one", "two", "three")], methods=methods, repeats=2))
  records = [r for batch in records for r in batch if r["id"] == "a"]
  replies = {r["turn"]: r["text"] for r in records if r["method"] == names[0] and r["repeat"] == 0}
  assert len(set(replies.values())) == 3
  messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": replies[0]},
              {"role": "user", "content": "two"}, {"role": "assistant", "content": replies[1]},
              {"role": "user", "content": "three"}]
  for record in records:
    expected = tokenizer.chat(messages[:2 * record["turn"] + 1])
    assert record["prompt_ids"] == expected
    assert record["prompt_tokens"] == len(expected)
    assert record["prompt"] == ("one", "two", "three")[record["turn"]]
  given = collections.Counter(tuple(call["prompts"][0]) for call in driver.calls)
  assert set(given.values()) == {4}  # two methods, two repeats


@pytest.mark.parametrize("different", [False, True])
def test_a_turn_goes_on_behind_the_last_one_if_all_methods_can(monkeypatch, tokenizer, different):
  """A state a method is kept for as long as there are turns. The fake's outputs are all different, as if sampled, unless
  told to be one: then every run of a method is given its state of the turn before."""
  driver = Driver(monkeypatch)
  if not different:
    def alike(*args, **kwargs):
      result = driver.generate(*args, **kwargs)
      return dataclasses.replace(result, tokens=np.where(result.tokens < 0, result.tokens, 31))

    monkeypatch.setattr(measure.drivers, "generate", alike)
  plan = make_plan(tokenizer, [request("z"), request("a", "one", "two", "three")], repeats=2)
  run(plan)
  # Calls of a turn: both methods, and both again in the other order.
  assert [call["keep"] for call in driver.calls] == [False] * 4 + [True, True, False, False] * 2 + [False] * 4
  kept = [None if call["kept"] is None else int(call["kept"]) for call in driver.calls]
  assert kept[:8] == [None] * 8
  for index in range(8, 16):
    turn = 4 * (index // 4)
    own = next(i for i in (turn - 4, turn - 3) if driver.arms[i] == driver.arms[index])
    assert kept[index] == (None if different else 30 + own + 1)
  # In another bucket of slots a drafter's own cache would have to grow: then no method goes on.
  del driver.calls[:]
  monkeypatch.setattr(measure.drivers, "bucket", lambda needed, greatest: needed)
  run(plan)
  assert all(call["kept"] is None for call in driver.calls)


def test_raw_prompts_are_not_laid_out(monkeypatch, tokenizer):
  driver = Driver(monkeypatch)
  run(make_plan(tokenizer, [request("a", "hello")], raw=True))
  assert driver.calls[0]["prompts"] == [tokenizer.encode("hello", add_special_tokens=True)]


def test_raw_conversations_are_refused(tokenizer):
  """Without a template nothing separates the turns, and a later one must not be sent alone."""
  measure.check(make_plan(tokenizer, [request("a", "hello")], raw=True))
  with pytest.raises(ValueError, match="w.jsonl:1.*--raw"):
    measure.check(make_plan(tokenizer, [request("a", "hello", "there")], raw=True))


def test_a_batch_goes_on_with_the_rows_that_have_turns_left(monkeypatch, tokenizer):
  driver = Driver(monkeypatch)
  records = [r for b in run(make_plan(tokenizer, [request("a"), request("b", "x", "y")], batch_size=2)) for r in b]
  assert [len(call["prompts"]) for call in driver.calls] == [2, 2, 1, 1]
  # It stays one batch of two: its size names the cell in which a conversation is counted, all turns together.
  assert {(r["id"], r["turn"], r["batch_size"], r["batch"]) for r in records} == {
      ("a", 0, 2, "a"), ("b", 0, 2, "a"), ("b", 1, 2, "a")}
  alone = [r for r in records if r["turn"] == 1]
  assert all(r["seconds"] * 1e3 == pytest.approx(r["latency_ms"]) for r in alone)  # nobody shares its time
  assert driver.calls[2]["prompts"] == [tokenizer.chat([
      {"role": "user", "content": "x"},
      {"role": "assistant", "content": next(r["text"] for r in records if r["id"] == "b" and r["method"] == "plain")},
      {"role": "user", "content": "y"}])]


def test_rows_share_the_time_of_their_batch(monkeypatch, tokenizer):
  Driver(monkeypatch)
  (records,) = run(make_plan(tokenizer, [request(name) for name in "abc"], batch_size=3))
  plain = [r for r in records if r["method"] == "plain"]
  assert len(plain) == 3
  assert sum(r["seconds"] for r in plain) == pytest.approx(3)
  assert sum(r["decode_seconds"] for r in plain) == pytest.approx(2)
  assert sum(r["decode_steps"] for r in plain) == pytest.approx(4)  # the longest row took 5, the first is in the TTFT
  assert {r["latency_ms"] for r in plain} == {3000}
  assert {r["time_to_first_token_ms"] for r in plain} == {1000}
  assert {r["time_per_output_token_ms"] for r in plain} == {2000}


def test_seeds_depend_on_the_request_alone(monkeypatch, tokenizer):
  names = ["a", "b", "c", "d"]
  first, second = Driver(monkeypatch), None
  run(make_plan(tokenizer, [request(name, "x", "y") for name in names], repeats=2))
  seeds = collections.defaultdict(set)
  for index, call in enumerate(first.calls):
    seeds[names[index // 8], index // 4 % 2].update(call["seeds"])
  assert all(len(found) == 1 for found in seeds.values())
  assert len(set.union(*seeds.values())) == 8  # by request and turn
  assert all(0 <= seed < 2**31 for found in seeds.values() for seed in found)
  second = Driver(monkeypatch)
  run(make_plan(tokenizer, [request(name) for name in "dxb"], batch_size=3))
  assert second.calls[0]["seeds"] == [*seeds["d", 0], second.calls[0]["seeds"][1], *seeds["b", 0]]


def test_flags_reach_the_driver(monkeypatch, tokenizer):
  driver = Driver(monkeypatch)
  warmed = []
  monkeypatch.setattr(measure.drivers, "warm_up", lambda *args, **kwargs: warmed.append((args[3], kwargs["verifier"])))
  with flagsaver.flagsaver(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=11, presence_penalty=0.5,
                           logit_bias=["3:-1", "4: -inf"], banned_ids=["8"], allowed_ids=["1", "3"],
                           min_new_tokens=2):
    plan = make_plan(tokenizer, [request()], verifier=verifiers.Block())
    measure.warm_up(plan)
    records = [r for batch in run(plan) for r in batch]
  params = driver.calls[0]["params"]
  assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 5, 0.9, 0.05)
  assert (params.presence_penalty, params.logit_bias, params.min_new_tokens) == (0.5, {3: -1, 4: -np.inf}, 2)
  assert (params.banned_ids, params.allowed_ids) == ([8], [1, 3])
  assert warmed == [(params.replace(seed=None), verifiers.Block())] * 2
  assert {call["verifier"] for call in driver.calls} == {verifiers.Block()}
  assert {(r["verifier"], r["lossless"]) for r in records} == {("block", True)}
  assert (jax.random.key_data(driver.calls[0]["key"]) == jax.random.key_data(jax.random.key(11))).all()
  assert {r["temperature"] for r in records} == {0.7}


def test_what_is_left_to_do(monkeypatch, tokenizer):
  """A request is finished when every method, repeat and turn of it and of its batch is there; else it is made again."""
  Driver(monkeypatch)
  plan = make_plan(tokenizer, [request("a", "x", "y"), request("b"), request("c")], batch_size=2, repeats=2)
  records = [r for batch in run(plan) for r in batch]
  ids = lambda batches: [[r.id for r in batch] for batch in batches]
  assert ids(plan.batches) == [["a", "b"], ["c"]]
  assert measure.split_done(plan, records) == (records, [])
  assert measure.split_done(plan, []) == ([], plan.batches)
  for lost in records:
    kept, left = measure.split_done(plan, [r for r in records if r is not lost])
    assert ids(left) == [["c"] if lost["id"] == "c" else ["a", "b"]]
    assert {r["id"] for r in kept} == ({"a", "b"} if lost["id"] == "c" else {"c"})
    assert all(any(r is record for record in records) for r in kept)
  kept, left = measure.split_done(dataclasses.replace(plan, repeats=3), records)
  assert (kept, ids(left)) == ([], [["a", "b"], ["c"]])


def test_check_holds_prompt_and_new_tokens_against_the_context(tokenizer):
  size = len(tokenizer.chat([{"role": "user", "content": "hello there"}]))
  requests = [request("ok", "x"), request("long", source="dir/w.jsonl:7")]
  measure.check(make_plan(tokenizer, requests, max_context=size + 12))
  with pytest.raises(ValueError) as error:
    measure.check(make_plan(tokenizer, requests, max_context=size + 11))
  for part in ("dir/w.jsonl:7", "long", f"{size} tokens", "max_new_tokens=12", str(size + 11), "--max_new_tokens"):
    assert part in str(error.value)


def test_check_looks_at_every_turn(tokenizer):
  """A conversation that may outgrow the context, replies included, is refused before anything runs."""
  requests = [request("ok"), request("t", *["z" * 20] * 3, source="w.jsonl:2")]
  messages = [{"role": role, "content": "z" * 20 if role == "user" else ""} for role in ("user", "assistant") * 2]
  size = len(tokenizer.chat([*messages, messages[0]])) + 3 * 12
  with pytest.raises(ValueError, match="w.jsonl:2"):
    measure.check(make_plan(tokenizer, requests, max_context=size - 1))
  measure.check(make_plan(tokenizer, requests, max_context=size + 100))


def test_check_holds_every_turn_against_an_encoder(tokenizer):
  """Which reads turns alone, so that their number does not count."""
  target, theirs = specjax.load(str(FIXTURES / "encoder_decoder" / "bart"))
  plan = dataclasses.replace(make_plan(tokenizer, [request("t", *["the model"] * 30)]), target=target, tokenizer=theirs)
  measure.check(plan)
  long = request("long", "x", "z" * 120, source="w.jsonl:2")
  with pytest.raises(ValueError, match="w.jsonl:2: request long has up to 12. tokens .*more than the 100 and 100"):
    measure.check(dataclasses.replace(plan, batches=[[long]]))
  with pytest.raises(ValueError, match="max_new_tokens=99"):
    measure.check(dataclasses.replace(plan, max_new_tokens=99))


def test_check_counts_raw_prompts_without_the_template(tokenizer):
  requests = [request("a", "x" * 20)]
  measure.check(make_plan(tokenizer, requests, raw=True, max_context=32))
  with pytest.raises(ValueError):
    measure.check(make_plan(tokenizer, requests, max_context=32))


def test_plain_decoding_is_lossless_under_any_verifier(monkeypatch, tokenizer):
  Driver(monkeypatch)
  records = [r for b in run(make_plan(tokenizer, [request()], verifier=verifiers.LossyTypical())) for r in b]
  assert {(r["method"], r["verifier"], r["lossless"]) for r in records} == {("plain", "lossy_typical", True),
                                                                           ("ngram", "lossy_typical", False)}


@pytest.mark.parametrize("given, parts", [
    ({"banned_ids": ["7", "99999"]}, ["banned_ids", "99999", "target's ids"]),
    ({"allowed_ids": ["1"], "min_new_tokens": 2}, ["min_new_tokens=2", "[1]"]),
    ({"min_new_tokens": 13}, ["min_new_tokens=13", "max_new_tokens=12"]),
])
def test_check_holds_sampling_parameters_against_the_target(tokenizer, given, parts):
  plan = make_plan(tokenizer, [request()], eos_ids=(1,))
  with flagsaver.flagsaver(**given), pytest.raises(ValueError) as error:
    measure.check(plan)
  for part in parts:
    assert part in str(error.value)


def test_check_holds_the_verifier_against_the_drafts(tokenizer):
  """The driver's own word on it, for what `rules.check` cannot know without a target; plain takes any."""
  noisy = testing.NoisySelf(parents=(0, 0, 0), rule="without_replacement")
  measure.check(make_plan(tokenizer, [request()], methods={"plain": METHODS["plain"]}, verifier=verifiers.KSeq()))
  with pytest.raises(ValueError, match="KSeq cannot verify.*with replacement"):
    measure.check(make_plan(tokenizer, [request()], methods={"a": noisy}, verifier=verifiers.KSeq()))
  with pytest.raises(ValueError, match="Block verifies chains only"):
    measure.check(make_plan(tokenizer, [request()], methods={"a": noisy}, verifier=verifiers.Block()))


@pytest.mark.usefixtures("quick_compile_here")
def test_real_runs(tokenizer):
  """On the dummy target: records add up, all arms give one text, and after the warm-up nothing is measured twice."""
  requests = [request("a", "ab ab ab ab ab"), request("b", "cd cd cd cd"), request("c", "hello")]
  plan = make_plan(tokenizer, requests, batch_size=2, max_new_tokens=24)
  for temperature in (0.0, 0.8):
    with flagsaver.flagsaver(temperature=temperature):
      if not temperature:
        progress = []
        measure.warm_up(plan, lambda done, total: progress.append((done, total)))
        assert progress[0][0] == 0 and progress[-1] == (4, 4)
        measure.warm_up(dataclasses.replace(plan, batches=[[requests[1]]]))
        before = drivers.compiled_programs()
      records = [r for batch in run(plan) for r in batch]
      alone = [r for batch in run(dataclasses.replace(plan, batches=[[requests[1]]])) for r in batch]
    texts = collections.defaultdict(set)
    for record in records + alone:
      counts = record["counters"]
      assert counts["output_tokens"] == len(record["token_ids"]) == len(record["pieces"]) == len(record["from_draft"])
      assert counts["accepted_tokens"] == sum(record["from_draft"])
      assert "".join(record["pieces"]) == record["text"]
      assert sum(counts["steps_per_width"]) == counts["steps"]
      assert 0 < record["time_to_first_token_ms"] <= record["latency_ms"]
      texts[record["id"], record["turn"]].add(tuple(record["token_ids"]))
    assert all(len(found) == 1 for found in texts.values())  # plain and drafted, in a batch and alone
    assert sum(r["counters"]["accepted_tokens"] for r in records) or temperature
  assert drivers.compiled_programs() == before
