"""The engine: rows come and go, and none of them can tell."""
import dataclasses
import re

import numpy as np
import pytest

import every_proposer
from specjax import decode
from specjax import drivers
from specjax import logprobs as logprobs_lib
from specjax import proposers
from specjax import testing
from specjax import verifiers
from specjax.proposers import fallback
from specjax.sampling import SamplingParams
from specjax.serving import control
from specjax.serving import engine as engine_lib
from specjax.serving import requests
from specjax.testing import tiny
import tiny_tokenizers

pytestmark = pytest.mark.usefixtures("quick_compile")
VOCAB = 16
TARGET = testing.DummyTarget(vocab=VOCAB, order=3, max_context=600, eos_ids=(0,))
LOOKUP = proposers.NGram(max_ngram=3, min_ngram=1, num_tokens=7)
LETTERS = tiny_tokenizers.byte_level("\nabcdefghijklmno")
CONFIG = engine_lib.Config(rows=4, max_tokens=600, step_tokens=64)


def serve(engine, wanted, *, arrive=None, after=None):
  """Runs requests to their end; `arrive` maps each to the turn in which it comes. Outcomes by the order of `wanted`.
  `after(engine, numbers)` is called behind every turn."""
  arrive = [0] * len(wanted) if arrive is None else arrive
  numbers, outcomes, seen, turn = {}, {}, {}, 0
  while len(outcomes) < len(wanted):
    for place, request in enumerate(wanted):
      if arrive[place] == turn:
        numbers[engine.submit(request)] = place
    for update in engine.step():
      ids, text = seen.setdefault(update.id, ([], []))
      ids += update.token_ids
      text.append(update.text)
      assert len(update.token_ids) == len(update.pieces) == len(update.drafted)
      if update.outcome is not None:
        assert update.outcome.token_ids == ids and update.outcome.text == "".join(text)
        outcomes[numbers[update.id]] = update.outcome
    turn += 1
    if after is not None:
      after(engine, numbers)
    assert turn < 5000, "it does not end"
  assert not engine.busy and not engine.step()
  return [outcomes[place] for place in range(len(wanted))]


def alone(target, proposer, request, **kwargs):
  """The request by `generate`, a batch of one."""
  return drivers.generate(target, proposer, [request.prompt], request.params, max_new_tokens=request.max_new_tokens,
                          eos_ids=request.eos_ids, stop_sequences=[list(s) for s in request.stop_sequences], **kwargs)


def random_requests(count, seed, vocab=VOCAB, longest=150):
  rng = np.random.default_rng(seed)
  made = []
  for i in range(count):
    params = SamplingParams(temperature=float(rng.choice([0.0, 0.8])), seed=int(rng.integers(1000)),
                            top_p=float(rng.choice([1.0, 0.9])),
                            repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])))
    stops = ((tuple(rng.integers(1, vocab, 2).tolist()),) if rng.random() < 0.3 else ())
    made.append(requests.Request(prompt=rng.integers(1, vocab, rng.integers(1, longest)).tolist(), params=params,
                                 max_new_tokens=int(rng.integers(1, 90)), stop_sequences=stops,
                                 eos_ids=() if rng.random() < 0.5 else None, speculate=bool(rng.random() < 0.9)))
  return made


@pytest.mark.parametrize("proposer", [proposers.Plain(), LOOKUP], ids=["plain", "ngram"])
def test_rows_do_not_depend_on_their_neighbours(proposer):
  """Random schedules against each request alone, byte for byte: another order, other sizes, other controllers."""
  wanted = random_requests(24, seed=1)
  single = [alone(TARGET, proposer, request) for request in wanted]
  for seed, config, controller in [
      (0, CONFIG, control.Goodput(probe=2, longest=4)),
      (1, dataclasses.replace(CONFIG, order="shortest", rows=8), None),
      (2, dataclasses.replace(CONFIG, prefix_tokens=0, step_tokens=32, rows=3), control.Fixed()),
      (3, dataclasses.replace(CONFIG, total_tokens=700), control.Budget(tokens=6))]:
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(wanted))
    engine = engine_lib.Engine(TARGET, proposer, config=config, controller=controller)
    outcomes = serve(engine, [wanted[i] for i in order], arrive=rng.integers(0, 30, len(wanted)))
    for place, outcome in zip(order, outcomes):
      assert outcome.token_ids == single[place].token_ids[0], (seed, place)
      assert outcome.finish_reason == single[place].finish_reasons[0], (seed, place)
      spec = outcome.speculation
      assert 0 <= spec.accepted_tokens <= spec.drafted_tokens
      assert sum(spec.accepted_per_position) == spec.accepted_tokens
      assert len(outcome.token_ids) <= spec.accepted_tokens + spec.steps, "engines.md P5"
      if not wanted[place].speculate:
        assert spec.drafted_tokens == 0


# One of every kind of state: neither drawn drafts nor trees have another than the chains of the same drafter.
SERVED = [entry for entry in every_proposer.ENTRIES
          if not entry.proposer.samples and not re.search("tree|earliest|middle|JetSpec|MTP", entry.name)]


@pytest.mark.parametrize("entry", SERVED, ids=lambda e: e.name)
def test_every_proposer_is_served(entry):
  """States of every kind are inserted, moved and freed: the text stays that of plain decoding."""
  rng = np.random.default_rng(5)
  wanted = [requests.Request(prompt=rng.integers(0, every_proposer.VOCAB, size).tolist(), max_new_tokens=new,
                             eos_ids=(), params=SamplingParams(temperature=temperature, seed=size))
            for size, new, temperature in [(5, 20, 0.0), (40, 12, 0.0), (1, 30, 0.8), (17, 9, 0.8), (33, 16, 0.0)]]
  config = engine_lib.Config(rows=2, max_tokens=128, step_tokens=32)
  engine = engine_lib.Engine(entry.target, entry.proposer, config=config, verifier=entry.verifier,
                             controller=control.Fixed())
  outcomes = serve(engine, wanted, arrive=[0, 0, 1, 3, 4])
  drafted = 0
  for request, outcome in zip(wanted, outcomes):
    single, spec = alone(entry.target, entry.proposer, request, verifier=entry.verifier), outcome.speculation
    assert outcome.token_ids == single.token_ids[0]
    # A state that was lost on the way would draft something else.
    counted = [int(getattr(single.counters, name)[0]) for name in ("steps", "drafted_tokens", "accepted_tokens")]
    assert [spec.steps, spec.drafted_tokens, spec.accepted_tokens] == counted
    drafted += spec.drafted_tokens
  assert (drafted > 0) == (entry.proposer.max_nodes > 1)


@pytest.mark.parametrize("verifier_entry", [e for e in every_proposer.ENTRIES if e.name in (
    "draft model, drawn", "EAGLE-3, drawn", "draft tree, drawn")], ids=lambda e: e.name)
def test_sampled_drafts_are_served(verifier_entry):
  """Drawn drafts under every controller: sound, and greedy rows are plain."""
  wanted = [requests.Request(prompt=[1, 2, 3, 1, 2], max_new_tokens=20, eos_ids=(),
                             params=SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i)) for i in range(5)]
  for controller in (control.Fixed(), control.Fixed(1), control.Budget(3)):
    engine = engine_lib.Engine(verifier_entry.target, verifier_entry.proposer, verifier=verifier_entry.verifier,
                               config=engine_lib.Config(rows=4, max_tokens=64), controller=controller)
    for request, outcome in zip(wanted, serve(engine, wanted)):
      assert len(outcome.token_ids) == 20 and outcome.speculation.accepted_tokens <= outcome.speculation.drafted_tokens
      if verifier_entry.target is every_proposer.TARGET and float(request.params.temperature) == 0:
        assert outcome.token_ids == alone(verifier_entry.target, proposers.Plain(), request).token_ids[0]


def test_costs_cut_points_and_never_what_was_drawn():
  """Which sampled nodes are verified may not depend on what was drawn; point drafts may be cut by anything."""
  for sampled in (False, True):
    drawing = proposers.Drawing(sampled=sampled)
    proposer = proposers.DraftModel(model=TARGET, num_tokens=3, drawing=drawing)
    state = drivers.start(TARGET, proposer, [[1, 2], [3, 4]], SamplingParams(temperature=0.9), max_new_tokens=9)
    held = lambda cost, limit: decode.Control(
        limit=np.array([limit, 3], np.int32), gain=np.tile(np.arange(4, dtype=np.float32), (2, 1)),
        cost=np.array(cost, np.float32), offered=np.zeros(2, np.int32))
    verified = []
    for cost, limit in (((1, 1), 3), ((1, 100), 3), ((1, 1), 1), ((1, 1), 0)):
      asked = state.replace(control=held(cost, limit))
      tree, own = decode.draft(TARGET, proposer, asked)
      rule = verifiers.Block() if sampled else verifiers.Point()
      outcome = decode.verify(TARGET, proposer, rule, asked.replace(proposer=own), tree)
      verified.append(outcome.drafted.tolist())
    assert verified == [[3, 3], [3, 3] if sampled else [0, 0], [1, 3], [0, 3]]


def test_nothing_is_compiled_behind_the_warm_up():
  """500 random requests that come and go, of all lengths, with and without penalties, some beginning alike."""
  engine = engine_lib.Engine(TARGET, LOOKUP, config=dataclasses.replace(CONFIG, max_tokens=400))
  engine.warm_up(full=True)
  rng = np.random.default_rng(7)
  wanted = random_requests(500, seed=9, longest=300)
  wanted = [dataclasses.replace(request, prompt=wanted[0].prompt[:100] + request.prompt[100:]) if i % 5 == 0 else request
            for i, request in enumerate(wanted)]
  serve(engine, wanted, arrive=rng.integers(0, 600, len(wanted)))
  assert sum(turn.programs for turn in engine.trace) == 0
  assert len({turn.slots for turn in engine.trace if turn.width}) == 2
  assert len({turn.batch for turn in engine.trace}) > 2 and max(turn.running for turn in engine.trace) == CONFIG.rows


def test_a_host_proposer_and_moves_are_warmed_up_too():
  host = fallback_host()
  engine = engine_lib.Engine(TARGET, host, config=engine_lib.Config(rows=2, max_tokens=120))
  engine.warm_up(full=True)
  serve(engine, random_requests(6, seed=2, longest=30), arrive=[0, 0, 2, 5, 7, 9])
  assert not sum(turn.programs for turn in engine.trace)


def fallback_host():
  from test_host_driver import HostLookup
  return HostLookup()


def test_a_short_context_is_warmed_up():
  engine = engine_lib.Engine(TARGET.replace(max_context=20), LOOKUP, config=engine_lib.Config(rows=1))
  engine.warm_up()
  serve(engine, [requests.Request(prompt=[1, 2], max_new_tokens=18, eos_ids=())])
  assert not sum(turn.programs for turn in engine.trace)


def test_requests_are_cancelled_wherever_they_stand():
  """In the queue, in prefill and while they run; the others do not notice."""
  wanted = [requests.Request(prompt=[1 + i % 15] * (200 if i == 2 else 3), max_new_tokens=40, eos_ids=(),
                             params=SamplingParams(temperature=0.8, seed=i)) for i in range(6)]
  engine = engine_lib.Engine(TARGET, LOOKUP, config=dataclasses.replace(CONFIG, rows=3, step_tokens=32))
  numbers = [engine.submit(request) for request in wanted]
  outcomes = {}
  for turn in range(200):
    if turn == 2:
      assert all(engine.cancel(numbers[i]) for i in (0, 2, 5)) and not engine.cancel(99)
    for update in engine.step():
      if update.outcome:
        outcomes[update.id] = update.outcome
  assert not engine.busy and set(outcomes) == set(numbers)
  for place, number in enumerate(numbers):
    outcome, single = outcomes[number], alone(TARGET, LOOKUP, wanted[place]).token_ids[0]
    if place in (0, 2, 5):
      assert outcome.finish_reason == requests.CANCELLED and outcome.token_ids == single[:len(outcome.token_ids)]
      assert (outcome.admitted is None) == (place == 5)
    else:
      assert outcome.finish_reason == "length" and outcome.token_ids == single
  assert not engine.cancel(numbers[1]), "it has ended"


def test_deadlines_end_requests_where_they_stand():
  now = [0.0]
  engine = engine_lib.Engine(TARGET, LOOKUP, config=dataclasses.replace(CONFIG, rows=1), clock=lambda: now[0])
  for deadline in (5.0, 3.0, None):
    engine.submit(requests.Request(prompt=[1, 2], max_new_tokens=30, eos_ids=(), deadline=deadline))
  ended = {}
  while engine.busy:
    now[0] += 1.0
    for update in engine.step():
      if update.outcome:
        ended[update.id] = update.outcome
  assert [ended[i].finish_reason for i in range(3)] == [requests.DEADLINE, requests.DEADLINE, "length"]
  assert ended[0].token_ids and ended[1].admitted is None and not ended[1].token_ids
  assert ended[2].queue_seconds >= 4 and ended[2].first_token_seconds >= ended[2].queue_seconds


def test_stop_strings_cut_text_ids_and_logprobs_together():
  """Found across tokens, drafts and steps; what stands behind it counts for nobody (vLLM 47616)."""
  engine = engine_lib.Engine(TARGET.replace(order=1), LOOKUP, LETTERS, config=CONFIG, controller=control.Fixed())
  text = LETTERS.decode(alone(TARGET.replace(order=1), LOOKUP, requests.Request(
      prompt=[1, 2, 3], max_new_tokens=60, eos_ids=(), params=SamplingParams(temperature=0.8, seed=0))).token_ids[0])
  for begin, size in ((20, 2), (10, 1), (25, 3), (40, 5)):
    cut_at(engine, text[begin:begin + size])


def cut_at(engine, stop):
  wanted = [requests.Request(prompt=[1 + i, 2, 3], max_new_tokens=60, eos_ids=(), stop=(stop, "never\n"), logprobs=2,
                             params=SamplingParams(temperature=0.8, seed=i)) for i in range(6)]
  counts = {}
  outcomes = serve(engine, wanted)
  for request, outcome in zip(wanted, outcomes):
    whole = LETTERS.decode(alone(TARGET.replace(order=1), LOOKUP, request).token_ids[0])
    found = whole.find(stop)
    assert outcome.text == (whole if found < 0 else whole[:found])
    assert outcome.finish_reason == ("length" if found < 0 else "stop")
    assert LETTERS.decode(outcome.token_ids) == outcome.text
    assert sum(count for _, count in outcome.arrivals) == len(outcome.token_ids)
    counts[outcome.finish_reason] = counts.get(outcome.finish_reason, 0) + 1
  assert counts.get("stop")


def test_logprobs_are_those_of_a_request_alone():
  """With neighbours that ask for more, fewer and none."""
  engine = engine_lib.Engine(TARGET, LOOKUP, config=CONFIG)
  wanted = [requests.Request(prompt=[1 + i, 2, 3] * 5, max_new_tokens=30, eos_ids=(), logprobs=asked,
                             params=SamplingParams(temperature=0.8, seed=i)) for i, asked in enumerate((3, None, 0, 5))]
  got = {}
  for request in wanted:
    engine.submit(request)
  while engine.busy:
    for update in engine.step():
      if update.token_ids:
        got.setdefault(update.id, []).append(update.logprobs)
  for number, request in enumerate(wanted):
    if request.logprobs is None:
      assert all(part is None for part in got[number])
      continue
    single = alone(TARGET, LOOKUP, request, logprobs=request.logprobs).logprobs
    for field in dataclasses.fields(logprobs_lib.Logprobs):
      joined = np.concatenate([np.asarray(getattr(part, field.name)) for part in got[number]])
      np.testing.assert_allclose(joined, getattr(single, field.name)[0], rtol=1e-5, atol=1e-6)


def test_beginnings_are_read_once():
  """A shared system prompt is read by the first request and taken over by the others; the text is the same."""
  target = tiny.decoder(vocab=VOCAB, max_context=600)
  shared = np.random.default_rng(0).integers(1, VOCAB, 100).tolist()
  wanted = [requests.Request(prompt=shared + [i + 1] * 5, max_new_tokens=8, eos_ids=()) for i in range(4)]
  engine = engine_lib.Engine(target, LOOKUP, config=CONFIG)
  outcomes = serve(engine, wanted, arrive=[0, 4, 4, 8])
  assert [outcome.cached_tokens for outcome in outcomes] == [0, 96, 96, 96]
  assert sum(turn.prefilled for turn in engine.trace) == 104 + 3 * 8
  for request, outcome in zip(wanted, outcomes):
    assert outcome.token_ids == alone(target, LOOKUP, request).token_ids[0]


def test_beginnings_are_kept_where_prompts_share_turns():
  """Whatever is left of a turn's tokens for a long prompt, its chunks begin where a block does."""
  target = TARGET.replace(max_context=400)
  shared = np.random.default_rng(0).integers(1, VOCAB, 300).tolist()
  short = [requests.Request(prompt=[1 + i] * 12, max_new_tokens=3, eos_ids=()) for i in range(3)]
  wanted = [requests.Request(prompt=shared, max_new_tokens=3, eos_ids=()), *short,
            requests.Request(prompt=shared, max_new_tokens=3, eos_ids=())]
  engine = engine_lib.Engine(target, LOOKUP, config=dataclasses.replace(CONFIG, max_tokens=400, step_tokens=48))
  outcomes = serve(engine, wanted, arrive=[0, 1, 2, 3, 20])
  assert outcomes[-1].cached_tokens == 288 and outcomes[-1].token_ids == outcomes[0].token_ids


def test_two_equal_prompts_of_one_turn_do_not_share_what_is_not_there():
  """vLLM 41838: a block that is known by its name before it has been read."""
  wanted = [requests.Request(prompt=[1, 2, 3, 4] * 30, max_new_tokens=10, eos_ids=()) for _ in range(3)]
  outcomes = serve(engine_lib.Engine(TARGET, LOOKUP, config=CONFIG), wanted)
  assert len({tuple(outcome.token_ids) for outcome in outcomes}) == 1
  assert outcomes[0].token_ids == alone(TARGET, LOOKUP, wanted[0]).token_ids[0]


def test_short_prompts_are_not_held_up_by_a_long_one():
  """Its chunks are read between the steps of the others, and a short prompt that comes later is read first."""
  long = requests.Request(prompt=[3] * 500, max_new_tokens=2, eos_ids=())
  short = requests.Request(prompt=[4] * 10, max_new_tokens=2, eos_ids=())
  engine = engine_lib.Engine(TARGET, proposers.Plain(), config=dataclasses.replace(CONFIG, step_tokens=32))
  first, second = engine.submit(long), None
  ended = []
  for turn in range(100):
    if turn == 2:
      second = engine.submit(short)
    ended += [update.id for update in engine.step() if update.outcome]
  assert ended == [second, first]
  assert max(turn.prefilled for turn in engine.trace) <= 32


@pytest.mark.parametrize("request_, words", [
    (dict(prompt=[]), "prompt 0 is empty"),
    (dict(prompt=[1, VOCAB]), "ids of this target are 0 to 15"),
    (dict(prompt=[1] * 500, max_new_tokens=200), "600"),
    (dict(max_new_tokens=0), "max_new_tokens=0"),
    (dict(max_new_tokens=None), "max_new_tokens=None"),
    (dict(deadline=0), "deadline=0"), (dict(deadline="5"), "deadline='5'"),
    (dict(max_new_tokens=[5]), r"max_new_tokens=\[5\]"), (dict(stop="abc"), "give \\[text\\]"),
    (dict(stop_sequences=(1, 2)), "each is a list of token ids"),
    (dict(logprobs=17), "0 to 16"),
    (dict(stop=("",)), "one character"),
    (dict(params=SamplingParams(top_p=0.0)), "top_p=0.0"),
    (dict(params=SamplingParams(seed=-1)), "seed=-1"),
    (dict(params=SamplingParams(min_new_tokens=9), max_new_tokens=8), "min_new_tokens=9")], ids=str)
def test_bad_requests_are_refused_when_they_come(request_, words):
  engine = engine_lib.Engine(TARGET, LOOKUP, LETTERS, config=CONFIG)
  with pytest.raises(ValueError, match=words):
    engine.submit(requests.Request(**{"prompt": [1, 2], **request_}))
  assert not engine.busy


def test_what_an_engine_cannot_serve_is_refused():
  with pytest.raises(ValueError, match="max_tokens=601: the target's context is 600"):
    engine_lib.Engine(TARGET, LOOKUP, config=dataclasses.replace(CONFIG, max_tokens=601))
  with pytest.raises(ValueError, match="the target has 17 ids and the tokenizer text for 16"):
    engine_lib.Engine(TARGET.replace(vocab=17), LOOKUP, LETTERS)
  with pytest.raises(ValueError, match="need the engine to have a tokenizer"):
    engine_lib.Engine(TARGET, LOOKUP).submit(requests.Request(prompt=[1], stop=("a",)))
  for wrong in (dict(rows=0), dict(step_tokens=31), dict(total_tokens=-5), dict(rows=2.5), dict(turns=-1)):
    with pytest.raises(ValueError, match=f"{list(wrong)[0]}={list(wrong.values())[0]}: it must be a whole number"):
      engine_lib.Config(**wrong)
  tree = proposers.DraftTree(model=TARGET, parents=(0, 0, 0, 1), children="independent")
  with pytest.raises(ValueError, match="Block verifies chains only"):
    engine_lib.Engine(TARGET, tree, verifier=verifiers.Block())
  with pytest.raises(ValueError, match="forced=4: HostLookup drafts on the host"):
    engine_lib.Engine(TARGET, fallback_host(), config=dataclasses.replace(CONFIG, forced=4))
  engine = engine_lib.Engine(TARGET, LOOKUP, config=dataclasses.replace(CONFIG, waiting=1))
  engine.submit(requests.Request(prompt=[1]))
  with pytest.raises(requests.QueueFull, match="1 requests wait"):
    engine.submit(requests.Request(prompt=[1]))
  with pytest.raises(ValueError, match="warm_up"):
    engine.warm_up()


def test_several_proposers_with_grammar_drafts_first():
  """`forced` puts a drafter of known tokens in front, which changes nothing for requests without a grammar."""
  engine = engine_lib.Engine(TARGET, LOOKUP, LETTERS, config=dataclasses.replace(CONFIG, forced=4))
  assert isinstance(engine.proposer, fallback.Fallback)
  wanted = random_requests(5, seed=11)
  for request, outcome in zip(wanted, serve(engine, wanted)):
    assert outcome.token_ids == alone(TARGET, LOOKUP, request).token_ids[0]


def test_figures_of_turns_agree_with_outcomes():
  engine = engine_lib.Engine(TARGET, LOOKUP, config=CONFIG, controller=control.Fixed())
  outcomes = serve(engine, random_requests(10, seed=4))
  total = lambda name: sum(getattr(turn, name) for turn in engine.trace)
  assert total("emitted") == sum(len(outcome.token_ids) for outcome in outcomes)
  assert total("accepted") == sum(outcome.speculation.accepted_tokens for outcome in outcomes)
  assert total("accepted") > 0
  assert total("drafted") == sum(outcome.speculation.drafted_tokens for outcome in outcomes)
  assert all(0 < turn.used <= turn.batch * turn.slots and turn.device_seconds <= turn.seconds for turn in engine.trace
             if turn.width)
