"""A soak: hundreds of mixed requests through one engine, some cancelled or out of time wherever they stand. None is
lost, mixed up or kept alive, and behind every turn all counts agree.

Nothing in it depends on time: the clock counts turns, and the controller draws its limits. What requests are compared
with is plain decoding in NumPy, as in `test_serving_bug_reports`.
"""
import collections
import dataclasses
import gc
import json
import weakref

import jax
import numpy as np
import pytest

from specjax import proposers
from specjax.serving import engine as engine_lib
from specjax.serving import grammars
from specjax.serving import requests
import test_serving_bug_reports as reports

pytestmark = pytest.mark.usefixtures("quick_compile")
COUNTS = (300,)  # requests of a run
DRAFTER = proposers.DraftModel(model=reports.TARGET, num_tokens=3)  # right about greedy rows, seldom about others
CONFIG = engine_lib.Config(rows=4, max_tokens=220, step_tokens=32, total_tokens=560, waiting=8, order="shortest",
                           prefix_tokens=256, logprobs=3, forced=3, turns=40)
GRAMMARS = (reports.DIGITS, reports.MARKED, grammars.Grammar.choice(["yes", "no", "not sure"]))
BEGINNINGS = [np.random.default_rng(seed).integers(0, 128, 70).tolist() for seed in range(3)]
PICKY = dict(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={5: 2.0, 6: -np.inf},
             banned_ids=(7, 8), min_new_tokens=4, eos_ids=reports.LETTERS[:8])


@dataclasses.dataclass(frozen=True)
class Plan:
  """A request, and what its client does: in turn `arrive` it comes, `cancel` turns later, if any, it goes."""
  row: reports.Row
  arrive: int
  cancel: int | None


class Moody:
  """A controller that draws every row's limit."""
  weighs = False

  def __init__(self, seed):
    self._rng = np.random.default_rng(seed)

  def limits(self, view):
    """See `control.Controller`."""
    return self._rng.integers(0, view.most + 1, len(view.rows)).astype(np.int32)


def plans(count, seed):
  """Requests of every kind, a few more than are served at once. So that few programs are compiled, the first ones fill
  the batch in one turn, and each asks for a penalty and for log-probabilities."""
  rng, turn, made = np.random.default_rng(seed), 0.0, []
  for place in range(count):
    first = place < CONFIG.rows
    turn += 0.0 if first else rng.exponential(1.8)
    made.append(Plan(row=random_row(rng, longest=1 if first else 160), arrive=int(turn),
                     cancel=int(rng.exponential(6.0)) if rng.random() < 0.25 else None))
  return made


def random_row(rng, longest):
  """A request that shares its beginning with others or does not, plain, picky or under a grammar; its stop, if it has
  one, is somewhere in its own text."""
  prompt = [*(BEGINNINGS[rng.integers(3)] if rng.random() < 0.4 else []), *rng.integers(0, 128, rng.integers(1, 90))]
  asked = dict(new=int(rng.integers(1, 41)), temperature=float(rng.choice([0.0, 0.0, 0.9])),
               seed=int(rng.integers(50)), min_p=float(rng.choice([0.0, 0.1])), presence_penalty=0.1,
               speculate=bool(rng.random() < 0.9), logprobs=int(rng.integers(0, 4)),
               deadline=float(rng.integers(1, 60)) if rng.random() < 0.15 else None)
  kind = rng.random()
  if kind < 0.15:
    asked |= dict(grammar=GRAMMARS[rng.integers(3)])
  elif kind < 0.35:
    asked |= PICKY | dict(new=asked["new"] + 4)
  row = reports.row(*map(int, prompt[:longest]), **asked)
  return row if 0.15 < kind < 0.35 else with_a_stop(row, rng)


def with_a_stop(row, rng):
  """The same row, with a stop or an end within its text, or as it is."""
  ids, kind = row.ids[:row.request.max_new_tokens], rng.random()
  place, size = int(rng.integers(len(ids))), int(rng.integers(1, 4))
  text = reports.TOKENIZER.decode(ids[:place + 1])[-size:]
  fields = {}
  if kind < 0.3 and text and "\ufffd" not in text:
    fields = dict(stop=("never", text))
  elif kind < 0.5:
    fields = dict(stop_sequences=((1, 2, 3), tuple(ids[max(place + 1 - size, 0):place + 1])))
  elif kind < 0.6 and row.request.grammar is None:
    fields = dict(eos_ids=(ids[place],))
  stopped = reports.Row(dataclasses.replace(row.request, **fields))
  stopped.steps = row.steps  # only a minimum of tokens or a grammar asks which ids end a text
  return stopped


class Soak:
  """One run of some plans, and what has been seen of it."""

  def __init__(self, made, seed):
    self.now, self.turn = 0.0, 0
    self.engine = engine_lib.Engine(reports.TARGET, DRAFTER, reports.TOKENIZER, config=CONFIG, controller=Moody(seed),
                                    clock=lambda: self.now)
    self._coming = collections.deque(made)
    self._live = {}     # number: (plan, turn of its submission)
    self._updates = {}  # number: its updates so far
    self._jobs = {}     # number: the engine's own record of it, as a weak reference
    self.ended = []     # (plan, outcome)
    self.seen = collections.Counter()

  def run(self):
    """All turns."""
    while self._coming or self.engine.busy:
      self._submit()
      self._cancel()
      for update in self.engine.step():
        self._take(update)
      self._check_turn()
      self.turn, self.now = self.turn + 1, self.now + 1.0
      assert self.turn < 100 * len(self.ended) + 1000, "it does not end"
    return self

  def _submit(self):
    while self._coming and self._coming[0].arrive <= self.turn:
      try:
        number = self.engine.submit(self._coming[0].row.request)
      except requests.QueueFull:
        self.seen["refused"] += 1  # its client tries again in the next turn, and those behind it wait
        return
      self._jobs[number] = weakref.ref(self.engine._queue._waiting[number])
      self._live[number], self._updates[number] = (self._coming.popleft(), self.turn), []

  def _cancel(self):
    for number, (plan, since) in self._live.items():
      if plan.cancel is not None and self.turn - since >= plan.cancel:
        self.seen[f"cancelled while {self._places()[number]}"] += 1
        assert self.engine.cancel(number)

  def _places(self):
    """Where each request is."""
    places = [("waiting", self.engine._queue._waiting), ("read", self.engine._reading),
              ("running", [job.id for job in self.engine._batch.jobs])]
    listed = [(number, name) for name, numbers in places for number in numbers]
    assert len(dict(listed)) == len(listed), "one is in two places"
    return dict(listed)

  def _take(self, update):
    self._updates[update.id].append(update)
    self.seen["tokens"] += len(update.token_ids)
    if update.outcome is not None:
      plan, _ = self._live.pop(update.id)
      self.ended.append((plan, update.outcome))
      self.seen[update.outcome.finish_reason] += 1
      if update.outcome.finish_reason == requests.DEADLINE:
        self.seen["late with tokens" if update.outcome.token_ids else "late without"] += 1
      check(plan, update.outcome, self._updates.pop(update.id))

  def _check_turn(self):
    engine, snapshot = self.engine, self.engine.stats.snapshot()
    assert set(self._places()) == set(self._live), "one is lost, or stays"
    for plan, since in self._live.values():
      times = [time for time in (plan.cancel, plan.row.request.deadline) if time is not None]
      assert all(self.turn - since < time for time in times), "one outstays its time"
    assert {number for number, job in self._jobs.items() if job() is not None} == set(self._live), "one is kept alive"
    assert engine.waiting <= CONFIG.waiting and engine.running <= CONFIG.rows
    admitted = [*engine._reading.values(), *engine._batch.jobs]
    assert sum(job.total_tokens for job in admitted) <= CONFIG.total_tokens
    assert engine._reader._prefixes.tokens <= CONFIG.prefix_tokens and len(engine.trace) <= CONFIG.turns
    assert not engine.trace or engine.trace[-1].prefilled <= CONFIG.step_tokens
    json.dumps(snapshot, allow_nan=False)
    assert snapshot["submitted"] == len(self._live) + sum(snapshot["finished"].values()) == len(self._jobs)
    assert snapshot["generation_tokens"] == self.seen["tokens"]
    assert 0 <= snapshot["accepted_tokens"] <= snapshot["drafted_tokens"] <= DRAFTER.num_tokens * snapshot["drafts"]
    assert snapshot["drafts"] <= snapshot["verify_steps"]
    positions = snapshot["accepted_per_position"]
    assert sum(positions) == snapshot["accepted_tokens"] and sorted(positions, reverse=True) == positions
    self._check_rows()

  def _check_rows(self):
    """What stands in the rows on the device is what their requests say."""
    if not self.engine._batch.jobs:
      return
    state = self.engine._batch._state
    tokens, lengths = jax.device_get((state.tokens, state.length))
    for row, job in enumerate(self.engine._batch._rows):
      if job is not None:
        text = [*job.prompt, *self._live[job.id][0].row.ids][:job.length]
        assert lengths[row] == job.length and tokens[row, :job.length].tolist() == text


def check(plan, outcome, updates):
  """That a request got its own text, whole if it was left alone."""
  row, left = plan.row, outcome.finish_reason in (requests.CANCELLED, requests.DEADLINE)
  reports.counts_agree(outcome, updates, left or bool(row.request.stop))
  reports.logprobs_agree(row, updates)
  if not left:
    assert (outcome.token_ids, outcome.text, outcome.finish_reason) == row.expected(), row.request
    return
  assert plan.cancel is not None or row.request.deadline is not None
  assert outcome.token_ids == row.ids[:len(outcome.token_ids)], row.request
  assert outcome.text == reports.TOKENIZER.decode(outcome.token_ids)


@pytest.mark.parametrize("count", COUNTS)
def test_none_is_lost_mixed_up_or_kept(count):
  made, arrays = plans(count, seed=0), len(jax.live_arrays())
  soak = Soak(made, seed=0).run()
  assert sorted(id(plan) for plan, _ in soak.ended) == sorted(map(id, made)), "each ends once"
  wanted = {"stop", "length", "refused", "cancelled while waiting", "cancelled while read", "cancelled while running",
            "late with tokens", "late without"}
  assert wanted <= set(soak.seen), soak.seen
  counts = soak.engine.stats.counts()
  assert counts.cached_tokens > 0 and counts.forced_tokens > 0 and counts.accepted_tokens > count
  engine = soak.engine
  assert not (engine.busy or engine.waiting or engine.running or engine._queue._passed or engine._leaving)
  gc.collect()
  assert not any(job() for job in soak._jobs.values())
  assert len(jax.live_arrays()) < arrays + 200, "the batch's own, and some blocks of prompts"


def test_it_is_the_same_every_time():
  """Ids, counts and times of every request, so that what is found here can be found again."""
  first, again = ([(plan.row.request.prompt, outcome) for plan, outcome in Soak(plans(40, seed=1), seed=1).run().ended]
                  for _ in range(2))
  assert first == again
