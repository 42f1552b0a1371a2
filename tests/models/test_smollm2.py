"""The default model with its real weights: it loads, agrees with Transformers, drafts, and drafting changes no text."""
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drivers
from specjax import proposers
from specjax import serving
from specjax.checkpoints import heads

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
NAMES = ("chat", "summary", "code")
NEAR_TIE = 1e-4  # gap of the two best logits below which rounding may choose


@pytest.fixture(scope="session")
def model():
  return specjax.load("smollm2-135m", dtype=jnp.float32)


@pytest.fixture(scope="session")
def golden():
  with np.load(FIXTURES / "golden_smollm2.npz") as file:
    return dict(file)


def agree(ids, wanted, gaps):
  """Equal, or different only from a near tie on (then what follows is another text)."""
  length = min(len(ids), len(wanted))
  differing = np.flatnonzero(np.asarray(ids[:length]) != np.asarray(wanted[:length]))
  if differing.size:
    first = int(differing[0])
    assert gaps[first] < NEAR_TIE, f"token {first}: {ids[first]} for {wanted[first]}, the gap is {gaps[first]:.5f}"
  else:
    assert len(ids) == len(wanted)


@pytest.fixture(scope="session")
def last_logits(model, golden):
  """Logits after the last token of each prompt, all prompts in one batch: ragged prefill, then one pass of one node."""
  target, _ = model
  prompts = [golden[f"{name}_ids"].tolist() for name in NAMES]
  state = drivers.start(target, specjax.proposers.Plain(), prompts, max_new_tokens=1)
  one_node = jax.jit(lambda target, tokens, positions, mask, cache: target.logits(
      target.forward(tokens, positions, mask, cache).hidden))
  tokens = jnp.asarray([[prompt[-1]] for prompt in prompts], jnp.int32)
  logits = one_node(target, tokens, state.length[:, None] - 1, np.ones((3, 1, 1), bool), state.cache)
  return dict(zip(NAMES, np.asarray(logits[:, 0])))


@pytest.mark.parametrize("name", NAMES)
def test_logits(last_logits, golden, name):
  logits = last_logits[name]
  assert logits.shape == (49152,)
  np.testing.assert_allclose(logits[golden[f"{name}_top_ids"]], golden[f"{name}_top_logits"], atol=5e-3)
  np.testing.assert_allclose(logits[golden["fixed_ids"]], golden[f"{name}_fixed_logits"], atol=5e-3)
  logsumexp = np.log(np.exp(logits.astype(np.float64) - logits.max()).sum()) + logits.max()
  np.testing.assert_allclose(logsumexp, golden[f"{name}_logsumexp"], atol=5e-3)
  assert logits.argmax() == golden[f"{name}_top_ids"][0]


@pytest.fixture(scope="session")
def greedy(model, golden):
  """Each prompt alone, plain and with prompt lookup."""
  target, _ = model
  run = lambda name, proposer: specjax.generate(target, proposer, [golden[f"{name}_ids"].tolist()],
                                                max_new_tokens=len(golden[f"{name}_continuation"]))
  return {name: (run(name, specjax.proposers.Plain()), run(name, specjax.proposers.NGram(num_tokens=7)))
          for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation(greedy, golden, name):
  for result in greedy[name]:
    ids = result.tokens[0, :result.lengths[0]].tolist()
    agree(ids, golden[f"{name}_continuation"].tolist(), golden[f"{name}_gaps"])


@pytest.mark.parametrize("name", NAMES)
def test_prompt_lookup_is_plain_text(greedy, golden, name):
  plain, lookup = ((result.tokens[0, :result.lengths[0]]).tolist() for result in greedy[name])
  agree(lookup, plain, golden[f"{name}_gaps"])


def test_prompt_lookup_finds_something(greedy):
  drafted, accepted = (sum(int(getattr(lookup.counters, kind)[0]) for _, lookup in greedy.values())
                       for kind in ("drafted_tokens", "accepted_tokens"))
  assert 0 < accepted < drafted
  saved = [plain.counters.steps[0] - lookup.counters.steps[0] for plain, lookup in greedy.values()]
  assert max(saved) > 5 and min(saved) >= 0


@pytest.mark.parametrize("kind, tokens_a_step", [("eagle3", 1.4), ("medusa", 1.15), ("dspark", 1.15)])
def test_a_shipped_head_drafts_what_the_target_writes(model, greedy, golden, kind, tokens_a_step):
  """In chains of three behind a request for an answer in words, where lookup finds nothing. Far less than its card says
  would mean that it no longer sees what it saw in training."""
  target, _ = model
  head = heads.load_head(heads.shipped("smollm2-135m", kind), target=target)
  proposer = {"eagle3": proposers.Eagle, "medusa": proposers.Medusa, "dspark": proposers.DSpark}[kind](
      head=head, num_tokens=3)
  plain, _ = greedy["chat"]
  result = specjax.generate(target, proposer, [golden["chat_ids"].tolist()], max_new_tokens=int(plain.lengths[0]))
  agree(result.token_ids[0], plain.token_ids[0], golden["chat_gaps"])
  assert result.lengths[0] / result.counters.steps[0] >= tokens_a_step


def test_a_stream_is_the_text(model, greedy, golden):
  target, tokenizer = model
  result = greedy["chat"][0]
  ids = result.tokens[0, :result.lengths[0]].tolist()
  deltas = list(specjax.stream(target, specjax.proposers.Plain(), golden["chat_ids"].tolist(), tokenizer=tokenizer,
                               max_new_tokens=len(golden["chat_continuation"])))
  assert [i for delta in deltas for i in delta.token_ids] == ids
  text = "".join(delta.text for delta in deltas)
  assert text == tokenizer.decode(ids, skip_special_tokens=True) and len(text) > 20


@pytest.mark.parametrize("rows", [2, 4])
def test_an_engine_serves_the_same_text(model, greedy, golden, rows):
  """With neighbours that come and go, sampled ones among them, and lookup: the greedy text of each alone."""
  target, tokenizer = model
  engine = serving.Engine(target, specjax.proposers.NGram(num_tokens=7), tokenizer,
                          config=serving.Config(rows=rows, max_tokens=512))
  numbers, outcomes = {}, {}
  for place, name in enumerate(NAMES):
    prompt, new = golden[f"{name}_ids"].tolist(), len(golden[f"{name}_continuation"])
    numbers[engine.submit(serving.Request(prompt=prompt, max_new_tokens=new))] = name
    engine.submit(serving.Request(prompt=prompt, max_new_tokens=8, params=specjax.SamplingParams(
        temperature=0.8, seed=place)))
  while engine.busy:
    outcomes |= {update.id: update.outcome for update in engine.step() if update.outcome}
  for number, name in numbers.items():
    plain = greedy[name][0]
    agree(outcomes[number].token_ids, plain.token_ids[0], golden[f"{name}_gaps"])
    assert outcomes[number].text == tokenizer.decode(outcomes[number].token_ids)


def test_tokenizer_ids(model):
  _, tokenizer = model
  wanted = json.loads((FIXTURES / "golden_smollm2_tokens.json").read_text())
  for entry in wanted["texts"]:
    assert tokenizer.encode(entry["text"]) == entry["ids"], entry["text"]


def test_end_ids(model):
  target, tokenizer = model
  assert target.eos_ids == tokenizer.eos_ids and 2 in target.eos_ids  # <|im_end|>
  assert target.vocab_size == tokenizer.vocab_size == 49152
