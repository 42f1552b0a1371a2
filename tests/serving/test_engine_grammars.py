"""Structured output through the engine: always valid, the same text whatever drafts, and forced tokens for free."""
import json
import re

import jsonschema
import numpy as np
import pytest

from specjax import proposers
from specjax import testing
from specjax.sampling import SamplingParams
from specjax.serving import control
from specjax.serving import engine as engine_lib
from specjax.serving import grammars
from specjax.serving import requests
import every_proposer
import tiny_tokenizers

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = tiny_tokenizers.byte_level([bytes([x]) for x in range(128)] + ['{"', '":', "true", "name", " ", "  "],
                                       special=("<end>",), eos="<end>")
END = TOKENIZER.eos_ids[0]
VOCAB = TOKENIZER.vocab_size
TARGET = testing.DummyTarget(vocab=VOCAB, order=2, max_context=256, eos_ids=(END,))
LOOKUP = proposers.NGram(max_ngram=3, min_ngram=1, num_tokens=7)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"type": "integer",
          "minimum": 0, "maximum": 99}, "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2}},
          "required": ["name", "size", "tags"], "additionalProperties": False,
          "x-guidance": {"whitespace_flexible": False}}
GRAMMARS = {
    "schema": (grammars.Grammar.json_schema(SCHEMA), lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    "regex": (grammars.Grammar.regex("[a-c]{2,4}-[0-9]{3}"), lambda text: _matches("[a-c]{2,4}-[0-9]{3}", text)),
    "choice": (grammars.Grammar.choice(["yes", "no", "not sure"]), lambda text: _in(("yes", "no", "not sure"), text)),
}


def _matches(pattern, text):
  assert re.fullmatch(pattern, text), text


def _in(choices, text):
  assert text in choices


def run(proposer, wanted, **kwargs):
  """Outcomes in order."""
  config = engine_lib.Config(rows=4, max_tokens=256, **kwargs)
  engine = engine_lib.Engine(TARGET, proposer, TOKENIZER, config=config, controller=control.Fixed())
  numbers, outcomes = [engine.submit(request) for request in wanted], {}
  while engine.busy:
    for update in engine.step():
      if update.outcome:
        outcomes[update.id] = update.outcome
  return [outcomes[number] for number in numbers]


def mixed(count=12, eos_ids=None):
  """Requests with each grammar and without one, sampled and greedy."""
  names = [*GRAMMARS, None]
  return [requests.Request(prompt=[65 + i, 66], max_new_tokens=120, eos_ids=eos_ids, params=SamplingParams(
      temperature=0.9 if i % 3 else 0.0, seed=i), grammar=names[i % 4] and GRAMMARS[names[i % 4]][0])
          for i in range(count)], [names[i % 4] for i in range(count)]


@pytest.mark.parametrize("eos_ids", [None, ()], ids=["an end id", "no end id"])
def test_texts_are_valid_and_the_same_whatever_drafts(eos_ids):
  """Masks at every node, drafts cut where they are illegal (vLLM 53777), forced tokens, neighbours without any."""
  wanted, names = mixed(eos_ids=eos_ids)
  plain = run(proposers.Plain(), wanted)
  for outcome, name in zip(plain, names):
    if name is not None:
      assert outcome.finish_reason == "stop" and outcome.problem is None
      GRAMMARS[name][1](outcome.text)
  for proposer, forced in ((LOOKUP, 0), (LOOKUP, 7), (proposers.Plain(), 7)):
    outcomes = run(proposer, wanted, forced=forced)
    # A forced end id is drafted and said; without drafts the request ends before it.
    strip = lambda outcome: [token for token in outcome.token_ids if token != END]
    assert [strip(a) for a in outcomes] == [strip(b) for b in plain], (proposer, forced)
    if forced:
      assert sum(outcome.speculation.forced_tokens for outcome in outcomes) > 20
      assert sum(o.speculation.steps for o in outcomes) < sum(o.speculation.steps for o in plain)


@pytest.mark.parametrize("name", ["draft tree, drawn", "dynamic tree", "draft model, drawn"])
def test_trees_and_sampled_drafts_stay_legal(name):
  """vLLM 49694: accepted tokens are always legal, with a drafter that knows nothing of the grammar."""
  entry = next(entry for entry in every_proposer.ENTRIES if entry.name == name)
  model = testing.DummyTarget(vocab=VOCAB, order=2, salt=np.uint32(4), max_context=256)
  proposer = entry.proposer.replace(model=model)
  wanted, names = mixed(8)
  config = engine_lib.Config(rows=4, max_tokens=256)
  engine = engine_lib.Engine(TARGET, proposer, TOKENIZER, config=config, controller=control.Fixed(),
                             verifier=entry.verifier)
  numbers, ended = [engine.submit(request) for request in wanted], {}
  while engine.busy:
    for update in engine.step():
      if update.outcome:
        ended[update.id] = update.outcome
  for number, kind in zip(numbers, names):
    if kind is not None:
      GRAMMARS[kind][1](ended[number].text)
  assert sum(outcome.speculation.drafted_tokens for outcome in ended.values()) > 50


def test_what_does_not_go_with_a_grammar_is_refused():
  engine = engine_lib.Engine(TARGET, LOOKUP, TOKENIZER)
  grammar = GRAMMARS["choice"][0]
  for params, words in ((SamplingParams(banned_ids=[3]), "banned_ids and a grammar"),
                        (SamplingParams(min_new_tokens=2), "min_new_tokens and a grammar"),
                        (SamplingParams(logit_bias={4: -np.inf}), "logit_bias of -inf and a grammar")):
    with pytest.raises(ValueError, match=words):
      engine.submit(requests.Request(prompt=[65], grammar=grammar, params=params))
  with pytest.raises(ValueError, match="needs the engine to have a tokenizer"):
    engine_lib.Engine(TARGET, LOOKUP).submit(requests.Request(prompt=[65], grammar=grammar))
  with pytest.raises(ValueError, match="cannot be compiled"):
    engine.submit(requests.Request(prompt=[65], grammar=grammars.Grammar.json_schema({"type": "nothing"})))
  assert not engine.busy


def test_masks_are_part_of_the_warm_up():
  engine = engine_lib.Engine(TARGET, LOOKUP, TOKENIZER, config=engine_lib.Config(rows=2, max_tokens=200))
  engine.warm_up(masks=True)
  for request in mixed(4)[0]:
    engine.submit(request)
  while engine.busy:
    engine.step()
  assert sum(turn.programs for turn in engine.trace) == 0
