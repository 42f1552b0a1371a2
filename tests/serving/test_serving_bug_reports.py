"""Public bug reports of other engines on stops, batches, sampling, grammars, streams and metrics, held by the engine.

A case is some requests that come and go, and of each what the drafter makes of it: the drafter knows every text, drafts
it rightly up to some place, wrongly behind it, and never heeds an end or a budget. What is served is compared with
plain decoding in NumPy, ids, text, log-probabilities and reasons, and counters with what was served.

The groups are those of the research notes: C stops, E batches, G sampling, I grammars, J streams, P metrics.
"""
import dataclasses
import functools
import json
import re

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dummy_law
from specjax import drivers
from specjax import keys
from specjax import proposers
from specjax import testing
from specjax import tree as tree_lib
from specjax import verifiers
from specjax.proposers import base
from specjax.sampling import SamplingParams
from specjax.serving import control
from specjax.serving import engine as engine_lib
from specjax.serving import grammars
from specjax.serving import openai_answers
from specjax.serving import openai_protocol
from specjax.serving import prometheus
from specjax.serving import requests
from specjax.serving import tool_calls
from specjax.testing import tiny
import tiny_tokenizers

pytestmark = pytest.mark.usefixtures("quick_compile")
# One id a byte of ASCII; bytes of two characters, one of them twice in a token; then what JSON has in one piece.
PARTS = [bytes([x]) for x in (*range(128), *"é한".encode())] + [b"\xa9\xc3", '{"', '": ', "true", "abc"]
TOKENIZER = tiny_tokenizers.byte_level(PARTS, special=("<tool_call>", "</tool_call>", "<end>"), eos="<end>")
HALVES, END = PARTS.index(b"\xa9\xc3"), TOKENIZER.eos_ids[0]
VOCAB, SLOTS, DEPTH = TOKENIZER.vocab_size, 256, 7
TARGET = testing.DummyTarget(vocab=VOCAB, max_context=SLOTS, eos_ids=(END,))
CONFIG = engine_lib.Config(rows=4, step_tokens=64)
RIGHT, LETTERS = 99, tuple(range(97, 113))  # no more than a table of ids has places for: one program


@struct.dataclass
class Scripted(base.Stateless):
  """Drafts every text as a table has it, found by the first id of its prompt: from place `wrong_from` of a draft on
  shifted by `shift`, `limit` tokens. Rows may move as they like."""
  texts: jax.Array       # i32[V, S]
  wrong_from: jax.Array  # i32[V]
  shift: jax.Array       # i32[V]
  limit: jax.Array       # i32[V]
  num_tokens: int = struct.field(pytree_node=False, default=DEPTH)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache, keys
    face, place = context.tokens[:, 0], jnp.arange(self.num_tokens, dtype=jnp.int32)[None]
    at = jnp.minimum(context.length[:, None] + place, self.texts.shape[1] - 1)
    truth = jnp.take_along_axis(self.texts[face], at, axis=1)
    wrong = (truth + self.shift[face][:, None]) % target.vocab_size
    draft = jnp.where(place >= self.wrong_from[face][:, None], wrong, truth)
    count = jnp.where(context.active, jnp.minimum(self.limit[face], self.num_tokens), 0)
    return tree_lib.chain(context.pending, draft, count), state


def scripted(rows):
  """The drafter of some rows."""
  texts, faces = np.zeros((VOCAB, SLOTS), np.int32), np.zeros((3, VOCAB), np.int32)
  for row in rows:
    text = [*row.request.prompt, *(row.draft or row.ids)][:SLOTS]
    texts[text[0], :len(text)] = text
    faces[:, text[0]] = row.wrong_from, row.shift, row.limit
  return Scripted(jnp.asarray(texts), *map(jnp.asarray, faces))


# --- plain decoding in NumPy ----------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Row:
  """A request, the turn in which it comes, and how it is drafted; `draft`: other tokens than its own."""
  request: requests.Request
  wrong_from: int = RIGHT
  shift: int = 1
  limit: int = RIGHT
  arrive: int = 0
  draft: list[int] | None = None

  @functools.cached_property
  def steps(self):
    """(id, log p, logs of the target's own law f64[V]) of every token, some behind the budget, none behind a text that
    its grammar ends."""
    request, found = self.request, []
    asked = {field.name: getattr(request.params, field.name) for field in dataclasses.fields(SamplingParams)}
    seed, least, asked["top_k"] = asked.pop("seed"), asked.pop("min_p"), min(asked["top_k"], VOCAB)
    text, count = list(request.prompt), min(request.max_new_tokens + DEPTH, SLOTS - len(request.prompt))
    drawn = uniforms(seed)[len(text):len(text) + count]
    matcher = None if request.grammar is None else compiler().matcher(request.grammar, request.eos_ids)
    for uniform in drawn:
      allowed = None if matcher is None else _bits(matcher.masks([0], [0], 1, -(-VOCAB // 32))[0])
      law, raw = dummy_law.law(TARGET, text, len(request.prompt), eos=self.ends, constraint=allowed, **asked)
      law = np.where(law >= least * law.max(), law, 0)
      token = int(np.argmax(np.cumsum(law) > uniform * law.sum()))
      with np.errstate(divide="ignore"):
        found.append((token, np.log(law[token] / law.sum()), np.log(raw)))
      text.append(token)
      if matcher is not None:
        matcher.advance([token])
        if matcher.complete:
          break
    return found

  @property
  def ids(self):
    """What plain decoding makes of the prompt, as if only its length or its grammar ended it."""
    return [token for token, _, _ in self.steps]

  @property
  def ends(self):
    return TARGET.eos_ids if self.request.eos_ids is None else self.request.eos_ids

  def expected(self):
    """(ids, text, reason) of the output."""
    request, ids = self.request, []
    for token in self.ids:
      ids.append(token)
      text = TOKENIZER.decode(ids)
      if found := [text.find(stop) for stop in request.stop if stop in text]:
        begins = np.cumsum([0, *map(len, TOKENIZER.pieces(ids))])
        return [token for token, begin in zip(ids, begins) if begin < min(found)], text[:min(found)], "stop"
      if token in self.ends or any(ids[-len(stop):] == list(stop) for stop in request.stop_sequences):
        return ids, text, "stop"
      if request.grammar is not None and len(ids) == len(self.ids):
        return ids, text, "stop"
      if len(ids) == request.max_new_tokens:
        return ids, text, "length"
    raise AssertionError("the text has no end")


@functools.cache
def uniforms(seed):
  """What a row of this seed draws from at every position: f64[S]."""
  row_keys, places = keys.row_keys(jax.random.key(0), np.array([seed])), np.arange(SLOTS)[None]
  return np.asarray(keys.token_uniforms(row_keys, places), np.float64)[0]


def _bits(words):
  return (words[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).ravel()[:VOCAB]


@functools.cache
def compiler():
  return grammars.Compiler(TOKENIZER, VOCAB, TARGET.eos_ids)


def row(*prompt, wrong_from=RIGHT, shift=1, limit=RIGHT, arrive=0, draft=None, new=24, **asked):
  """A row, known by its first id; fields of its request and of its parameters as they come. Its length or its grammar
  ends it, unless end ids are given."""
  own = {field.name for field in dataclasses.fields(requests.Request)}
  fields = {name: asked.pop(name) for name in list(asked) if name in own}
  if "grammar" not in fields:
    fields.setdefault("eos_ids", ())
  params = SamplingParams(**({"seed": 7 + prompt[0]} | asked))
  return Row(requests.Request(prompt=list(prompt), params=params, max_new_tokens=new, **fields), wrong_from=wrong_from,
             shift=shift, limit=limit, arrive=arrive, draft=draft)


def ids_of(*prompt, **kwargs):
  """What plain decoding says behind a prompt."""
  return row(*prompt, **kwargs).ids


# --- serving --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Served:
  """What became of some rows."""
  engine: engine_lib.Engine
  outcomes: list[requests.Outcome]
  updates: list[list[requests.Update]]

  @property
  def snapshot(self):
    return self.engine.stats.snapshot()

  def total(self, name):
    """A count of speculation, of all requests."""
    return sum(getattr(outcome.speculation, name) for outcome in self.outcomes)


def serve(wanted, proposer=None, *, exact=True, target=TARGET, controller=None, verifier=verifiers.Point(), **config):
  """Serves rows and compares each of them with plain decoding; `exact=False`: only their counts."""
  engine = engine_lib.Engine(target, scripted(wanted) if proposer is None else proposer,
                             TOKENIZER if target is TARGET else None, config=dataclasses.replace(CONFIG, **config),
                             verifier=verifier, controller=controller or control.Fixed())
  numbers, updates, turn = {}, [[] for _ in wanted], 0
  while len(numbers) < len(wanted) or engine.busy:
    for place, one in enumerate(wanted):
      if one.arrive == turn:
        numbers[engine.submit(one.request)] = place
    for update in engine.step():
      updates[numbers[update.id]].append(update)
    json.dumps(engine.stats.snapshot(), allow_nan=False)
    turn += 1
    assert turn < 1000, "it does not end"
  served = Served(engine, [of_row[-1].outcome for of_row in updates], updates)
  for one, outcome, of_row in zip(wanted, served.outcomes, updates, strict=True):
    counts_agree(outcome, of_row, bool(one.request.stop))
    if exact:
      assert (outcome.token_ids, outcome.text, outcome.finish_reason) == one.expected(), one.request
      logprobs_agree(one, of_row)
  return served


def counts_agree(outcome, updates, cut_at_text):
  """What no counter may say, and that a stream is its outcome."""
  flags = [flag for update in updates for flag in update.drafted]
  assert [token for update in updates for token in update.token_ids] == outcome.token_ids
  assert "".join(piece for update in updates for piece in update.pieces) == outcome.text
  assert [update.outcome is None for update in updates] == [True] * (len(updates) - 1) + [False]
  assert all(len(update.token_ids) == len(update.pieces) == len(update.drafted) for update in updates)
  spec, size = outcome.speculation, len(outcome.token_ids)
  assert 0 <= spec.accepted_tokens == sum(flags) <= spec.drafted_tokens <= DEPTH * spec.drafts
  assert spec.drafts <= spec.steps and sum(spec.accepted_per_position) == spec.accepted_tokens
  assert all(a >= b for a, b in zip(spec.accepted_per_position, spec.accepted_per_position[1:]))
  assert not spec.drafts or 1 <= 1 + spec.accepted_tokens / spec.drafts <= DEPTH + 1
  assert all(0 <= token < VOCAB for token in outcome.token_ids)
  if cut_at_text:  # tokens of the last steps may be gone
    assert size <= spec.accepted_tokens + spec.steps
  else:  # every step adds a token of the target's, but for the last one where its drafts were cut
    assert size == spec.accepted_tokens + spec.steps - flags[-1]


def logprobs_agree(one, updates):
  """Of every token that was handed out, and of no other: its own, and the alternatives asked for."""
  parts = [update.logprobs for update in updates if update.token_ids]
  if one.request.logprobs is None or not parts:
    assert all(part is None for part in parts)
    return
  joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("processed", "raw", "top_ids",
                                                                                 "top_raw")]
  count, top = sum(len(update.token_ids) for update in updates), one.request.logprobs
  assert [x.shape for x in joined] == [(count,), (count,), (count, top), (count, top)]
  for place, (token, processed, raw) in enumerate(one.steps[:count]):
    best = np.argsort(-raw, kind="stable")[:top]
    for got, wanted in zip(joined, (processed, raw[token], best, raw[best])):
      np.testing.assert_allclose(got[place], wanted, rtol=1e-4, atol=1e-5)


# --- C: stops, ends, lengths ----------------------------------------------------------------------------------------


def ends_at_every_place_of_a_draft():
  """An end id that is accepted within a draft, at each place and in the next one: nothing behind it is let out."""
  rows = []
  for place in range(12):
    asked = dict(temperature=0.0 if place % 2 else 0.9)
    rows.append(row(place, 2, 3, eos_ids=(ids_of(place, 2, 3, **asked)[place],), **asked))
  outcomes = serve(rows).outcomes
  assert {len(outcome.token_ids) for outcome in outcomes} >= set(range(1, DEPTH + 2))
  assert {outcome.finish_reason for outcome in outcomes} == {"stop"}


def stop_strings_and_sequences_at_every_place():
  """Completed at each place of a draft, within one, and from one step into the next."""
  rows = []
  for size in (1, 2, 3):
    for last in range(size - 1, 10):
      face = len(rows)
      stop = ids_of(face, 2, 3, allowed_ids=LETTERS)[last + 1 - size:last + 1]
      asked = dict(stop=("never", TOKENIZER.decode(stop))) if face % 2 else dict(stop_sequences=(tuple(stop), (1, 2)))
      rows.append(row(face, 2, 3, allowed_ids=LETTERS, limit=RIGHT if face % 3 else 2, **asked))
  served = serve(rows)
  assert all(outcome.finish_reason == "stop" for outcome in served.outcomes)


def a_stop_within_the_budget_beats_the_cap():
  """[10, 11, STOP, 20, 21, 22] and at most 5 tokens: the stop ends it, and 20 is never seen. Beyond the cap there is no
  stop."""
  rows, faces = [], iter(range(100))
  for new in (5, 3, 2, 1):
    for kind in range(3):
      face = next(face for face in faces if len(set(ids_of(face, 2, 3, allowed_ids=LETTERS)[:3])) == 3)
      stop = ids_of(face, 2, 3, allowed_ids=LETTERS)[2]
      asked = [dict(eos_ids=(stop,)), dict(stop_sequences=((stop,),)), dict(stop=(chr(stop),))][kind]
      rows.append(row(face, 2, 3, new=new, allowed_ids=LETTERS, **asked))
  served = serve(rows)
  assert [outcome.finish_reason for outcome in served.outcomes] == ["stop"] * 6 + ["length"] * 6
  assert all(outcome.speculation.steps == 1 for outcome in served.outcomes), "it is one burst"


def ids_and_logprobs_are_cut_with_the_text():
  """A stop string in the middle of a burst: what stands behind it is in none of the three."""
  rows = [row(face, 2, 3, logprobs=2, temperature=0.8, allowed_ids=LETTERS, wrong_from=face, stop=(TOKENIZER.decode(
      ids_of(face, 2, 3, temperature=0.8, allowed_ids=LETTERS)[4 + face:6 + face]),)) for face in range(6)]
  for outcome in serve(rows).outcomes:
    assert TOKENIZER.decode(outcome.token_ids) == outcome.text and outcome.finish_reason == "stop"


def nothing_behind_the_end_reaches_the_client():
  """Updates and what is made of them for OpenAI's clients."""
  rows = [row(face, 2, 3, temperature=0.8, eos_ids=(ids_of(face, 2, 3, temperature=0.8)[face + 1],))
          for face in range(6)]
  served = serve(rows)
  for one, outcome, updates in zip(rows, served.outcomes, served.updates):
    answer = openai_answers.Completion(openai_protocol.Call(one.request, "m", stream=True), TOKENIZER, ident="1",
                                       created=1)
    text = "".join(chunk["choices"][0]["text"] for update in updates for chunk in answer.push(update))
    whole = answer.whole()
    assert text == whole["choices"][0]["text"] == TOKENIZER.decode(one.ids[:one.ids.index(one.ends[0]) + 1])
    assert whole["usage"]["completion_tokens"] == len(outcome.token_ids) == one.ids.index(one.ends[0]) + 1


def the_last_slot_of_the_cache_is_used():
  """Prompt and output are just what fits: as many tokens as were asked for, and no draft beyond the cache."""
  rows = [row(face, *[5 + face] * (SLOTS - new - 1), new=new, wrong_from=face % 3 * 3)
          for face, new in enumerate((1, 2, 6, 7, 8, 9, 16, 20))]
  served = serve(rows, step_tokens=8 * SLOTS)
  assert [outcome.prompt_tokens + len(outcome.token_ids) for outcome in served.outcomes] == [SLOTS] * len(rows)
  with pytest.raises(ValueError, match=f"{SLOTS}"):
    served.engine.submit(requests.Request(prompt=[1] * SLOTS, max_new_tokens=1))


def a_minimum_of_tokens_holds_within_a_burst():
  """The model wants to end at the third token, and the drafter drafts that end; at the tenth it may."""
  rows = []
  for face in range(8):
    free = ids_of(face, 2, 3)
    rows.append(row(face, 2, 3, eos_ids=(free[2],), min_new_tokens=(10, 3, 2, 24)[face % 4],
                    draft=free if face % 2 else None))
  served = serve(rows)
  for one, outcome in zip(rows, served.outcomes):
    assert len(outcome.token_ids) >= one.request.params.min_new_tokens
  longest = serve([row(face, 2, 3, eos_ids=LETTERS[:8], allowed_ids=LETTERS, min_new_tokens=10, temperature=0.9)
                   for face in range(6)])
  assert {outcome.finish_reason for outcome in longest.outcomes} == {"stop"}


def lookup_without_an_end_id():
  """Prompt lookup compared its draft with an end id of None."""
  rows = [row(face, 5, 6, 7, 8, 9, 10, 11, 7, 8, eos_ids=()) for face in range(3)]
  assert serve(rows, proposers.NGram(num_tokens=3, min_ngram=1)).total("drafted_tokens") > 0


def what_is_counted_was_emitted():
  """Accepted drafts behind an end or a stop string count for nobody, in usage neither."""
  rows = [row(face, 2, 3, allowed_ids=LETTERS, stop=("never", chr(ids_of(face, 2, 3, allowed_ids=LETTERS)[face % 6])))
          for face in range(6)]
  for outcome in serve(rows).outcomes:
    details = openai_answers.usage(outcome)["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] <= len(outcome.token_ids)
    assert details["rejected_prediction_tokens"] >= 0


# --- E: batches -----------------------------------------------------------------------------------------------------


def temperatures_of_a_batch():
  """Greedy rows are plain beside sampled ones, and sampled ones beside greedy ones."""
  rows = [row(face, 2, 3, temperature=(0, 0.7, 0, 1.3)[face % 4], wrong_from=face % 3 * 4, arrive=face // 3)
          for face in range(8)]
  served = serve(rows)
  assert all(np.isfinite(turn.accepted) and 0 <= turn.accepted <= turn.drafted for turn in served.engine.trace)


def greedy_rows_divide_by_no_temperature():
  """The same with log-probabilities: finite, and no negative counts."""
  rows = [row(face, 2, 3, temperature=(0, 0.7, 0, 1.3)[face], logprobs=3, wrong_from=2 * face, new=14)
          for face in range(4)]
  served = serve(rows)
  for updates in served.updates:
    assert all(np.isfinite(x).all() for update in updates for x in jax.tree.leaves(update.logprobs))


def the_first_row_accepts_nothing():
  """An index of -1, which wraps around without a word."""
  served = serve([row(face, 2, 3, wrong_from=RIGHT if face else 0) for face in range(4)])
  accepted = [outcome.speculation.accepted_tokens for outcome in served.outcomes]
  assert accepted == [0, 21, 21, 21]


class _Turns:
  """A controller by which each row drafts in one step of `period`, one after the other."""
  weighs = False

  def __init__(self, period):
    self._period, self._step = period, 0

  def limits(self, view):
    """See `control.Controller`."""
    self._step += 1
    turns = (np.arange(len(view.rows)) + self._step) % self._period == 0
    return np.where(turns, view.most, 0).astype(np.int32)


def rows_that_do_not_draft_for_a_while():
  """Behind plain steps a draft model is fed what it missed: that of the target itself stays right about every token."""
  rows = [row(face, 2, 3, new=20 + face) for face in range(8)]
  own = proposers.DraftModel(model=TARGET, num_tokens=3)
  for period in (1, 3, 5):
    served = serve(rows, own, controller=_Turns(period))
    assert served.total("drafted_tokens") == served.total("accepted_tokens") > 0
    slower = [outcome.speculation.steps > -(-one.request.max_new_tokens // 4)
              for one, outcome in zip(rows, served.outcomes)]
    assert slower == [period > 1] * 8


def rows_accept_as_much_as_their_own_drafts_allow():
  """A right, a wrong and a mixed drafter and none in one batch: each row takes the steps that it takes alone."""
  make = lambda face, **kwargs: row(face, 2, 3, **[
      dict(), dict(wrong_from=0), dict(wrong_from=3), dict(limit=0), dict(speculate=False), dict(wrong_from=1)][face],
                                    **kwargs)
  together = serve([make(face, arrive=face) for face in range(6)])
  apart = serve([make(face, arrive=40 * face) for face in range(6)])
  steps = [outcome.speculation.steps for outcome in together.outcomes]
  assert steps == [outcome.speculation.steps for outcome in apart.outcomes] == [3, 24, 6, 24, 24, 12]


def equal_prompts_in_a_batch():
  """Beginnings are read once: those that come together each by itself, later ones not at all, and a block that is known
  behind another beginning is not this one."""
  block = lambda begin: [(begin + 5 * place) % 100 for place in range(32)]
  rows = [row(*block(first), *block(second), 7, arrive=arrive, temperature=0.9 * (arrive % 2), speculate=arrive > 0)
          for first, second, arrive in ((0, 1, 0), (0, 1, 0), (2, 3, 0), (0, 1, 2), (0, 3, 9), (2, 3, 9), (0, 1, 20))]
  served = serve(rows, step_tokens=SLOTS)
  assert [outcome.cached_tokens for outcome in served.outcomes] == [0, 0, 0, 64, 32, 64, 64]


def batches_of_one_and_of_eight():
  """The same ids, whatever the batch; also with Medusa's heads on a decoder with weights, which went wrong there."""
  decoder = tiny.decoder(vocab=12, max_context=SLOTS)
  medusa = proposers.Medusa(head=tiny.medusa(decoder, (0, 1, 2, 4, 7)), num_tokens=3)
  for asked in ({}, dict(proposer=medusa, target=decoder, exact=False)):
    rows = [row(face, 2, 3, temperature=0.9 if face % 2 else 0.0, wrong_from=face, new=16) for face in range(8)]
    served = [serve(rows, rows=count, step_tokens=SLOTS, **asked) for count in (8, 1)]
    assert [max(turn.batch for turn in one.engine.trace) for one in served] == [8, 1]
    assert len({str([outcome.token_ids for outcome in one.outcomes]) for one in served}) == 1
    assert served[0].total("accepted_tokens") > 5


def greedy_as_the_most_probable_of_one():
  """top_k=1 at any temperature is greedy decoding, beside rows that are."""
  rows = [row(face // 2 + 64 * (face % 2), 2, 3, temperature=face % 2 * 1.1, top_k=face % 2) for face in range(8)]
  serve(rows)
  assert all(np.isclose(log, 0) for one in rows for _, log, _ in one.steps)


def a_draft_model_of_other_sizes():
  """Another width, other layers and heads than the target: nothing of the one is written into the other's."""
  model = tiny.decoder(layers=2, vocab=VOCAB, max_context=SLOTS)
  served = serve([row(face, 2, 3, temperature=0.9 if face % 2 else 0.0) for face in range(8)],
                 proposers.DraftModel(model=model, num_tokens=3))
  assert served.total("drafted_tokens") > 100


# --- G: sampling parameters -----------------------------------------------------------------------------------------

FEW = (97, 98, 99, 100)  # with these alone, tokens return soon
EVERY = (dict(min_p=0.2), dict(logit_bias={5: 100.0, 6: -np.inf}), dict(banned_ids=LETTERS), dict(allowed_ids=LETTERS),
         dict(top_k=3), dict(top_p=0.4), dict(repetition_penalty=1.4), dict(presence_penalty=1.5),
         dict(frequency_penalty=1.2), dict(min_new_tokens=9, eos_ids=LETTERS[:8]), dict(top_k=9, top_p=0.8, min_p=0.05),
         dict(allowed_ids=FEW, repetition_penalty=0.7, frequency_penalty=-0.4, logit_bias={97: 2.0}), {})


def every_parameter_beside_every_other():
  """Each is applied at every place of a draft, in its own row, and in no neighbour's."""
  for temperature in (0.0, 0.9):
    rows = [row(face, 2, 3, temperature=temperature, wrong_from=(RIGHT, 0, 3)[face % 3], arrive=face // 4, **asked)
            for face, asked in enumerate(EVERY)]
    served = serve(rows)
    assert 6 not in served.outcomes[1].token_ids and not set(served.outcomes[2].token_ids) & set(LETTERS)
    assert set(served.outcomes[3].token_ids) <= set(LETTERS) and served.total("accepted_tokens") > 50
    if temperature == 0:
      assert set(served.outcomes[1].token_ids) == {5}, "a bias may change which is greatest"


def penalties_count_what_was_emitted():
  """Not only the last token of a burst: counts are those of prompt and output, token by token."""
  rows = [row(face, 97, 97, 98, allowed_ids=FEW, frequency_penalty=1.7, new=40, wrong_from=(RIGHT, 4)[face % 2],
              temperature=0.7 * (face % 3)) for face in range(6)]
  for one, outcome in zip(rows, serve(rows).outcomes):
    if float(one.request.params.temperature) == 0:  # nothing is ever far ahead
      assert np.ptp(np.bincount([*one.request.prompt[1:], *outcome.token_ids])[97:]) <= 6


def a_penalty_is_never_ignored():
  """Repetition: under drafting as without it, and none of 0, which would divide by it."""
  rows = [row(face, 97, 97, 98, allowed_ids=LETTERS, repetition_penalty=(1.0, 1.5)[face // 4]) for face in range(8)]
  served = serve(rows)
  unpenalised = [ids_of(face, 97, 97, 98, allowed_ids=LETTERS)[:24] for face in range(8)]
  assert [outcome.token_ids != text for outcome, text in zip(served.outcomes, unpenalised)] == [False] * 4 + [True] * 4
  with pytest.raises(ValueError, match="repetition_penalty=0.0"):
    served.engine.submit(row(1, repetition_penalty=0.0).request)


def what_cannot_be_honoured_is_refused():
  """With the name of the parameter; what is accepted changes the text."""
  engine = serve([row(1, 2, 3)]).engine
  grammar = grammars.Grammar.regex("[a-z]+")
  for asked, words in ((dict(banned_ids=[3], grammar=grammar), "banned_ids and a grammar"),
                       (dict(presence_penalty=2.5), "presence_penalty=2.5"), (dict(allowed_ids=[]), "allowed_ids"),
                       (dict(allowed_ids=[4], banned_ids=[4]), "all banned"), (dict(logprobs=VOCAB), "logprobs"),
                       (dict(logit_bias={VOCAB: 1.0}), "logit_bias"), (dict(min_p=1.5), "min_p=1.5")):
    with pytest.raises(ValueError, match=words):
      engine.submit(row(1, 2, 3, **asked).request)
  assert not engine.busy
  texts = {tuple(ids_of(1, 97, 97, 98, allowed_ids=LETTERS, **asked)) for asked in (
      {}, dict(repetition_penalty=1.4), dict(presence_penalty=1.5), dict(frequency_penalty=1.2))}
  assert len(texts) == 4


def history_of_a_draft_is_its_own_path():
  """At place i of a draft the history is the output and the i drafts before it, the last token counted once."""
  rows = [row(face, 97, 98, allowed_ids=FEW, frequency_penalty=0.9, presence_penalty=0.3, limit=1 + face, new=30)
          for face in range(DEPTH)]
  served = serve(rows)
  assert [outcome.speculation.steps for outcome in served.outcomes] == [-(-30 // (2 + face)) for face in range(DEPTH)]


def rejected_drafts_leave_no_counts():
  """Penalties behind drafts that are wrong at every place, step after step."""
  rows = [row(face, 97, 98, allowed_ids=FEW, frequency_penalty=1.1, repetition_penalty=1.2, wrong_from=face, shift=1,
              temperature=0.8 * (face % 2)) for face in range(DEPTH)]
  served = serve(rows)
  assert all(outcome.speculation.drafted_tokens > outcome.speculation.accepted_tokens for outcome in served.outcomes)


def seeds_are_a_rows_own():
  """The same text for a seed whatever stands beside it, wherever its row is, with and without other seeds."""
  same = dict(temperature=1.2, seed=11)
  orders = ([0, 1, 2, 3, 4], [4, 3, 0, 2, 1], [2, 0])
  texts = []
  for order in orders:
    rows = [row(face, 2, 3, **(same if face == 0 else dict(temperature=1.2, seed=face))) for face in order]
    texts.append(serve(rows).outcomes[order.index(0)].token_ids)
  assert texts[0] == texts[1] == texts[2]
  free = [row(face, 2, 3, temperature=1.2, seed=None if face % 2 else face) for face in range(4)]
  for number, one in enumerate(free):  # without a seed it is the request's number
    one.steps = row(*one.request.prompt, temperature=1.2, seed=number).steps
  serve(free)
  twice = [row(5, 2, 3, temperature=1.2, seed=seed) for seed in (3, 4, 3)]
  first, other, again = [outcome.token_ids for outcome in serve(twice).outcomes]
  assert first == again != other


def logprobs_of_every_token():
  """Of drafts that were accepted too, neither 0 nor missing, beside rows that ask for more, fewer and none."""
  asked = (dict(top_k=4), dict(frequency_penalty=1.0, allowed_ids=FEW), dict(temperature=0.0), dict(top_p=0.5), {})
  rows = [row(face, 2, 3, **(dict(temperature=0.9, logprobs=(3, None, 0, 5, 20)[face]) | some), arrive=face // 4,
              wrong_from=(RIGHT, 2)[face % 2]) for face, some in enumerate(asked)]
  served = serve(rows)
  raw = np.concatenate([update.logprobs.raw for update in served.updates[0]])
  assert (raw < 0).all() and served.outcomes[0].speculation.accepted_tokens > 10


def the_law_of_drawn_drafts_is_the_requests():
  """A drafter that draws from the target's own law under the request's filters is always right; were its law another,
  one in a few drafts would be rejected."""
  own = proposers.DraftModel(model=TARGET, num_tokens=3, drawing=proposers.Drawing(sampled=True))
  asked = (dict(top_k=1), dict(top_k=4), dict(top_p=0.3), dict(min_p=0.5), dict(temperature=0.0), {})
  rows = [row(face, 2, 3, **(dict(temperature=0.9) | some)) for face, some in enumerate(asked)]
  served = serve(rows, own, verifier=verifiers.Block(), exact=False)
  assert served.total("accepted_tokens") == served.total("drafted_tokens") > 60
  for face in (0, 4):
    assert served.outcomes[face].token_ids == ids_of(face, 2, 3)[:24]


def extreme_values():
  """Temperatures next to 0, more kept than there are, next to nothing kept: greedy, or all."""
  cold = (dict(temperature=1e-6), dict(temperature=1e-30), dict(temperature=0.9, top_k=1),
          dict(temperature=0.9, top_p=1e-9), dict(temperature=0.9, min_p=1.0), dict(top_p=0.1, top_k=2))
  warm = (dict(top_k=VOCAB + 100), dict(top_p=1.0), dict(top_k=VOCAB), dict(min_p=0.0), dict(min_p=1e-30))
  rows = [row(face, 2, 3, **some) for face, some in enumerate(cold)]
  rows += [row(20 + face, 2, 3, temperature=1.3, **some) for face, some in enumerate(warm)]
  rows += [row(40, 2, 3, temperature=1e-3), row(41, 2, 3, temperature=1e6)]
  served = serve(rows)
  for face, outcome in enumerate(served.outcomes[:len(cold)]):
    assert outcome.token_ids == ids_of(face, 2, 3)[:24]
  for face, outcome in enumerate(served.outcomes[len(cold):-2], 20):
    assert outcome.token_ids == ids_of(face, 2, 3, temperature=1.3)[:24]


# --- I: grammars ----------------------------------------------------------------------------------------------------

# A text that is free up to a mark, and digits behind it.
MARKED = grammars.Grammar.lark("start: FREE \"#\" DIGITS\nFREE: /[a-j]{0,9}/\nDIGITS: /[0-9]{5}/")
DIGITS = grammars.Grammar.regex("[0-9]{6,12}(x|yz)")
TO_LETTERS = ord("a") - ord("0")  # from a digit to a letter


def a_grammar_begins_within_a_draft():
  """The mark stands at each place of a draft, which goes on with what was allowed before it."""
  found = {}
  for seed in range(400):
    face = len(found)
    one = row(face, 2, 3, seed=seed, temperature=1.0, grammar=MARKED)
    if one.ids.index(ord("#")) not in found:
      found[one.ids.index(ord("#"))] = one
      mark = one.ids.index(ord("#"))
      one.draft = one.ids[:mark + 1] + [token + TO_LETTERS for token in one.ids[mark + 1:]]
    if len(found) == DEPTH + 2:
      break
  served = serve(list(found.values()))
  assert set(found) >= set(range(DEPTH + 1))
  for outcome in served.outcomes:
    assert re.fullmatch("[a-j]{0,9}#[0-9]{5}", outcome.text) and outcome.problem is None


def an_illegal_draft_is_cut():
  """Illegal from each place of a draft on: cut there, no error, and the drafts before it are accepted."""
  rows = [row(face, 2, 3, temperature=1.0, grammar=DIGITS, wrong_from=face, shift=TO_LETTERS)
          for face in range(DEPTH + 1)]
  served = serve(rows)
  for face, outcome in enumerate(served.outcomes):
    spec = outcome.speculation
    assert re.fullmatch("[0-9]{6,12}(x|yz)", outcome.text)
    assert spec.drafted_tokens == spec.accepted_tokens and bool(spec.drafted_tokens) == (face > 0)


def accepted_tokens_are_always_legal():
  """Drafts that are other texts altogether, beside rows without a grammar that share the step."""
  rows = []
  for face in range(12):
    grammar = (DIGITS, MARKED, None)[face % 3]
    rows.append(row(face, 2, 3, temperature=0.9 * (face % 2), grammar=grammar, draft=ids_of(face + 40, 2, 3),
                    arrive=face // 4))
  served = serve(rows)
  assert all(outcome.finish_reason == "stop" for one, outcome in zip(rows, served.outcomes) if one.request.grammar)


def only_what_was_accepted_moves_a_grammar():
  """One mask a place of the draft, and a place of the text that rejected drafts, though legal, do not move."""
  rows = [row(face, 2, 3, temperature=0.9, grammar=grammars.Grammar.regex("([a-y][0-8]){8}"), wrong_from=face % DEPTH,
              limit=RIGHT if face % 2 else 3) for face in range(10)]
  served = serve(rows)
  assert 0 < served.total("accepted_tokens") < served.total("drafted_tokens")


def an_end_of_a_grammar_is_the_same_with_drafts():
  """A text that is whole ends there, whether its last token was drafted, drawn behind drafts, or plain."""
  texts = []
  for kwargs in (dict(limit=0), dict(), dict(limit=1), dict(limit=2), dict(speculate=False)):
    rows = [row(face, 2, 3, temperature=0.9, grammar=(DIGITS, MARKED)[face % 2], **kwargs) for face in range(5)]
    texts.append([outcome.token_ids for outcome in serve(rows).outcomes])
  assert all(text == texts[0] for text in texts)


def what_a_grammar_forces_is_drafted_for_free():
  """Tokens without a choice, in front of the drafter's own: the same text in fewer steps. A request that asks for no
  drafts has none of these either."""
  rows = [row(face, 2, 3, temperature=1.0, grammar=grammars.Grammar.tool_calls([TOOL]), new=150, limit=face // 2,
              speculate=face % 2 == 0) for face in range(6)] + [row(9, 2, 3, limit=2)]
  served = serve(rows, forced=4)
  for one, outcome in zip(rows, served.outcomes):
    spec = outcome.speculation
    assert (spec.forced_tokens > 0) == bool(one.request.grammar and one.request.speculate)
    assert (spec.steps < len(outcome.token_ids)) == bool(spec.drafted_tokens) == one.request.speculate


# --- J: streams -----------------------------------------------------------------------------------------------------


def chunks_of_several_tokens():
  """All tokens of a step come in one update, each with its piece and its flag."""
  served = serve([row(face, 2, 3, allowed_ids=LETTERS, limit=face) for face in range(5)])
  for face, updates in enumerate(served.updates):
    assert max(len(update.token_ids) for update in updates) == face + 1
    assert all(update.drafted == [True] * (len(update.token_ids) - 1) + [False] for update in updates[:-1])
    assert all(update.pieces == [chr(token) for token in update.token_ids] for update in updates)


def stop_strings_across_the_borders_of_chunks():
  """No part of a stop string is ever let out, however the chunks fall; what only looks like one is."""
  rows = []
  for face in range(20):
    ids = ids_of(face, 2, 3, allowed_ids=LETTERS, new=30)
    stop = TOKENIZER.decode(ids[8 + face % 5:8 + face % 5 + 2 + face % 4])
    rows.append(row(face, 2, 3, allowed_ids=LETTERS, new=30, limit=face % 4, stop=(
        stop, TOKENIZER.decode(ids[2:4]) + "!", TOKENIZER.decode(ids[5:7]) + "??")))
  served = serve(rows)
  for one, updates in zip(rows, served.updates):
    whole, seen = one.expected()[1], ""
    for update in updates:
      seen += update.text
      assert whole.startswith(seen)
    assert seen == whole and one.request.stop[0] not in seen


def no_half_characters():
  """Characters of two and three tokens over the borders of chunks: each comes whole, with its last token."""
  grammar = grammars.Grammar.regex("(é|한|a){6,12}")
  served = serve([row(face, 2, 3, temperature=1.0, grammar=grammar, limit=face % 5, new=60) for face in range(8)])
  for outcome, updates in zip(served.outcomes, served.updates):
    assert re.fullmatch("[é한a]{6,12}", outcome.text)
    assert all(set(piece) <= set("é한a") for update in updates for piece in update.pieces)
  assert any(len(update.token_ids) > 2 for updates in served.updates for update in updates)


def stop_strings_that_begin_with_a_character_of_several_tokens():
  """While a stop string may have begun, none of the tokens of its first character are let out."""
  asked = dict(temperature=1.0, grammar=grammars.Grammar.regex("(é|한|a){6,12}"), new=60)
  rows = []
  for face in range(10):
    text = TOKENIZER.decode(ids_of(face, 2, 3, **asked))
    begin = next(place for place in range(2 + face % 3, len(text)) if text[place] != "a")
    rows.append(row(face, 2, 3, limit=face % 4, stop=(text[begin:begin + 2], "한!"), **asked))
  for outcome in serve(rows).outcomes:
    assert TOKENIZER.decode(outcome.token_ids) == outcome.text


def a_token_that_ends_one_character_and_begins_another():
  """What is left of a character at the end is told, whatever the token that began it had completed."""
  rows = [row(face, 2, 3, temperature=1.0, allowed_ids=(HALVES, *range(128, 133)), new=1 + face, eos_ids=())
          for face in range(12)]
  rows += [row(40 + face, 2, 3, allowed_ids=(HALVES,), new=1 + face, eos_ids=()) for face in range(3)]
  for outcome in serve(rows).outcomes:
    assert outcome.text == TOKENIZER.decode(outcome.token_ids)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"],
    "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}}}


def calls_of_tools_in_chunks_of_several_tokens():
  """A parser that expects a token a chunk loses calls: here tags, names and arguments begin and end within chunks."""
  grammar = grammars.Grammar.tool_calls([TOOL])
  rows = [row(face, 2, 3, temperature=1.0, grammar=grammar, new=150, limit=limit)
          for face, limit in enumerate((2, 3, 4, 5, RIGHT))]
  served = serve(rows)
  for one, outcome, updates in zip(rows, served.outcomes, served.updates):
    call = openai_protocol.Call(one.request, "m", stream=True, tools=("weather",))
    answer = openai_answers.Chat(call, TOKENIZER, ident="1", created=1)
    deltas = [chunk["choices"][0]["delta"] for update in updates for chunk in answer.push(update)]
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    choice = answer.whole()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert not any(delta.get("content") for delta in deltas)
    assert [call["function"] for call in streamed] == [call["function"] for call in choice["message"]["tool_calls"]]
    [function] = [call["function"] for call in streamed]
    assert function["name"] == "weather" and set(json.loads(function["arguments"])) == {"city"}
    finder = tool_calls.Finder(["weather"])
    spelt = TOKENIZER.decode([token for token in outcome.token_ids if token != END], skip_special_tokens=False)
    parts = [spelt[begin:begin + 7] for begin in range(0, len(spelt), 7)]
    found = [part for piece in parts for part in finder.push(piece)] + finder.flush()
    assert [(part.name, part.arguments) for part in found] == [("weather", function["arguments"])]
  assert max(len(update.token_ids) for update in served.updates[-1]) == DEPTH + 1


# --- P: metrics -----------------------------------------------------------------------------------------------------


def rates_of_nothing():
  """Without drafts there is no rate: None, in JSON null, and no NaN in what Prometheus reads."""
  for asked in (dict(limit=0), dict(speculate=False)):
    served = serve([row(face, 2, 3, **asked) for face in range(3)])
    snapshot = json.loads(json.dumps(served.snapshot, allow_nan=False))
    assert snapshot["acceptance_rate"] is None and snapshot["acceptance_length"] is None
    assert snapshot["acceptance_rate_per_position"] == [None] * DEPTH and snapshot["drafted_tokens"] == 0
  fresh = engine_lib.Engine(TARGET, proposers.Plain()).stats
  for stats in (fresh, served.engine.stats):
    json.dumps(stats.snapshot(), allow_nan=False)
    assert "nan" not in prometheus.Exposition(stats, "m").text().decode().lower()


def one_token_requests_have_no_time_per_token():
  """Requests of a token, that never began, or that gained nothing: no division by what is not there."""
  served = serve([row(face, 2, 3, new=1) for face in range(3)])
  assert all(outcome.token_seconds is None and outcome.gaps == [] for outcome in served.outcomes)
  assert served.snapshot["token"] == {"count": 0, "mean_seconds": None}
  engine = engine_lib.Engine(TARGET, proposers.Plain())
  assert engine.cancel(engine.submit(row(1).request))
  [update] = engine.step()
  assert (update.outcome.first_token_seconds, update.outcome.queue_seconds) == (None, None)
  json.dumps(engine.stats.snapshot(), allow_nan=False)


def rates_are_pooled():
  """Seven short requests of wrong drafts and a long one of right drafts: sums are divided, not ratios averaged."""
  rows = [row(face, 2, 3, new=3, wrong_from=0) for face in range(7)] + [row(9, 2, 3, new=80)]
  served = serve(rows)
  own = [outcome.speculation for outcome in served.outcomes]
  pooled = served.total("accepted_tokens") / served.total("drafted_tokens")
  mean = np.mean([spec.accepted_tokens / spec.drafted_tokens for spec in own])
  assert served.snapshot["acceptance_rate"] == pytest.approx(pooled) and pooled > 2 * mean
  length = 1 + served.total("accepted_tokens") / served.total("drafts")
  assert served.snapshot["acceptance_length"] == pytest.approx(length)


def counts_of_mixed_traffic():
  """Never negative, diluted by what was not drafted, or counted behind an end: the engine's are the requests' sums."""
  rows = [row(face, 2, 3, arrive=face // 2, temperature=0.8 * (face % 2), wrong_from=(RIGHT, 0, 3, 6)[face % 4],
              limit=(RIGHT, 2, 0)[face % 3], eos_ids=LETTERS[:3] if face % 5 else ()) for face in range(16)]
  served = serve(rows)
  snapshot, trace = served.snapshot, served.engine.trace
  for name in ("drafted_tokens", "accepted_tokens", "drafts"):
    assert snapshot[name] == served.total(name)
  assert snapshot["verify_steps"] == served.total("steps") == sum(turn.running for turn in trace)
  assert snapshot["generation_tokens"] == sum(len(outcome.token_ids) for outcome in served.outcomes)
  assert sum(turn.drafted for turn in trace) == served.total("drafted_tokens")
  assert sum(turn.accepted for turn in trace) == served.total("accepted_tokens")
  undrafted = [outcome.speculation for one, outcome in zip(rows, served.outcomes) if one.limit == 0]
  assert all(spec.drafts == spec.drafted_tokens == 0 for spec in undrafted)


def lengths_come_from_positions():
  """A rate alone gives no length: drafts and the count of every position do, and never rise from one to the next."""
  served = serve([row(face, 2, 3, wrong_from=face, new=40) for face in range(DEPTH + 1)])
  snapshot = served.snapshot
  per_position = snapshot["acceptance_rate_per_position"]
  assert all(1 >= a >= b >= 0 for a, b in zip(per_position, per_position[1:]))
  assert per_position[0] > per_position[-1] > 0
  assert snapshot["acceptance_length"] == pytest.approx(1 + sum(per_position))
  assert 1 <= snapshot["acceptance_length"] <= DEPTH + 1
  assert np.array_equal(snapshot["accepted_per_position"], np.sum(
      [outcome.speculation.accepted_per_position for outcome in served.outcomes], axis=0))


REPORTS = {
    "C transformers 47912": ends_at_every_place_of_a_draft,
    "C transformers 48039": stop_strings_and_sequences_at_every_place,
    "C sglang 31599": a_stop_within_the_budget_beats_the_cap,
    "C vllm 47616": ids_and_logprobs_are_cut_with_the_text,
    "C koboldcpp 1276": nothing_behind_the_end_reaches_the_client,
    "C exllamav2 274": the_last_slot_of_the_cache_is_used,
    "C vllm 26317, 41493": a_minimum_of_tokens_holds_within_a_burst,
    "C transformers 46790": lookup_without_an_end_id,
    "C sglang 39826": what_is_counted_was_emitted,
    "E tpu-inference 2860": temperatures_of_a_batch,
    "E vllm 27077": greedy_rows_divide_by_no_temperature,
    "E tokenspeed 298": the_first_row_accepts_nothing,
    "E vllm 40768, 46899, 32303": rows_that_do_not_draft_for_a_while,
    "E transformers 32165, 29769, 42655": rows_accept_as_much_as_their_own_drafts_allow,
    "E sglang 8726": equal_prompts_in_a_batch,
    "E TGI 1411": batches_of_one_and_of_eight,
    "E vllm-rbln 915": greedy_as_the_most_probable_of_one,
    "E vllm-ascend 7365": a_draft_model_of_other_sizes,
    "G vllm 42744": every_parameter_beside_every_other,
    "G sglang 33643": penalties_count_what_was_emitted,
    "G sglang 28180, 26330, 21258": a_penalty_is_never_ignored,
    "G TensorRT-LLM 17701": what_cannot_be_honoured_is_refused,
    "G vllm 33251": history_of_a_draft_is_its_own_path,
    "G vmlx-swift 357": rejected_drafts_leave_no_counts,
    "G vllm 6038, 11123, 9441": seeds_are_a_rows_own,
    "G llama.cpp 27972, vllm 17876, 34497": logprobs_of_every_token,
    "G TensorRT-LLM 15775": the_law_of_drawn_drafts_is_the_requests,
    "G extreme values": extreme_values,
    "I vllm 31858": a_grammar_begins_within_a_draft,
    "I vllm 53777": an_illegal_draft_is_cut,
    "I vllm 49694": accepted_tokens_are_always_legal,
    "I vllm 14702, fak 5271, sglang 13019": only_what_was_accepted_moves_a_grammar,
    "I the end of a text": an_end_of_a_grammar_is_the_same_with_drafts,
    "I forced tokens": what_a_grammar_forces_is_drafted_for_free,
    "J several tokens a chunk": chunks_of_several_tokens,
    "J stop strings": stop_strings_across_the_borders_of_chunks,
    "J half characters": no_half_characters,
    "J characters of stop strings": stop_strings_that_begin_with_a_character_of_several_tokens,
    "J the end of a character": a_token_that_ends_one_character_and_begins_another,
    "J calls of tools": calls_of_tools_in_chunks_of_several_tokens,
    "P vllm 24322, ArcticInference 40": rates_of_nothing,
    "P requests of one token": one_token_requests_have_no_time_per_token,
    "P slime 2240": rates_are_pooled,
    "P vllm 27077, 44054, ik_llama 2358": counts_of_mixed_traffic,
    "P vllm 16665": lengths_come_from_positions,
}


def test_what_is_compared_with_is_plain_decoding():
  """The one in NumPy says what `generate` says without drafts, whatever is asked for."""
  for temperature in (0.0, 0.9):
    rows = [row(face, 2, 3, temperature=temperature, **asked) for face, asked in enumerate(EVERY)
            if "eos_ids" not in asked]
    params = SamplingParams(**{field.name: [getattr(one.request.params, field.name) for one in rows]
                               for field in dataclasses.fields(SamplingParams)})
    result = drivers.generate(TARGET, proposers.Plain(), [one.request.prompt for one in rows], params,
                              max_new_tokens=24, eos_ids=())
    assert result.token_ids == [one.ids[:24] for one in rows]


@pytest.mark.parametrize("report", REPORTS)
def test_reports(report):
  """Each by the number of the issue or pull request in which it was told."""
  REPORTS[report]()
