"""Training from nothing: what is trained is what is served, losses by definition, batches that hold everything once,
and models that learn. Runs that are killed are in tests/experiments/test_pretraining.py."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import DecoderConfig
from specjax.models.config import MoE
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.training import fresh
from specjax.training import loop
from specjax.training import packed
from specjax.training import pairs
from specjax.training import pretrain

pytestmark = pytest.mark.usefixtures("quick_compile")
_SIZES = dict(vocab_size=40, num_tokens=40, width=16, layers=2, heads=2, head_width=8, mlp_width=24, eos_ids=(1,))
MIXTURE = fresh.decoder(DecoderConfig(
    kv_heads=2, norm_eps=1e-5, rope_theta=1e4, max_context=64, family="mixtral",
    moe=MoE(experts=4, chosen=2, width=24, renormalised=True), **_SIZES), 0)
T5 = fresh.encoder_decoder(EncoderDecoderConfig(
    encoder_layers=1, norm_eps=1e-6, buckets=8, max_distance=20, opening=(0,), scaled_head=True,
    **_SIZES), 0)


def log_softmax(x):
  x = np.asarray(x, np.float64)
  return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


# Token by token, each committed before the next: what decoding does.
@jax.jit
def step(model, token, cache):
  out = model.forward(token[None, None], cache.length[:, None], jnp.ones((1, 1, 1), bool), cache)
  return model.logits(out.hidden)[0, 0], cache.commit(out.in_flight, jnp.ones((1,), jnp.int32))


def served(model, tokens, cache):
  """Logits f[S, V] behind each token."""
  found = []
  for token in tokens:
    logits, cache = step(model, jnp.int32(token), cache)
    found.append(np.asarray(logits))
  return np.stack(found)


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
  """Two rows of documents, one of them filled up."""
  rng = np.random.default_rng(0)
  document = np.array([[1] * 9 + [2] * 4 + [3] * 11, [4] * 10 + [5] + [0] * 13], np.int32)
  return packed.Rows(tokens=rng.integers(2, 40, (2, 24)).astype(np.int32), document=document)


def test_a_decoder_is_trained_on_the_law_that_is_served_and_documents_do_not_see_each_other(rows):
  found, metrics = jax.jit(lambda p: pretrain.next_token(p, rows, 0.0))(MIXTURE)
  nats, right = [], []
  for row, document in ((row, document) for row in (0, 1) for document in np.unique(rows.document[row]) if document):
    text = rows.tokens[row][rows.document[row] == document]
    logits = served(MIXTURE, text, MIXTURE.init_cache(1, 32))  # from position 0, with nothing before it
    nats += [-log_softmax(logits)[t, text[t + 1]] for t in range(len(text) - 1)]
    right += [logits[t].argmax() == text[t + 1] for t in range(len(text) - 1)]
  assert len(nats) == 8 + 3 + 10 + 9 == metrics["counted"]
  assert found == pytest.approx(np.mean(nats), rel=1e-5) and metrics["accuracy"] == pytest.approx(np.mean(right))


@pytest.fixture(scope="module")
def batch():
  """Three pairs, of which one is empty, in a batch that is filled up with other ids."""
  rng = np.random.default_rng(1)
  return pairs.Pairs(inputs=rng.integers(2, 40, (3, 12)).astype(np.int32), inputs_length=np.array([12, 5, 0], np.int32),
                     answers=rng.integers(2, 40, (3, 8)).astype(np.int32), answers_length=np.array([3, 8, 0], np.int32))


def test_an_encoder_decoder_is_trained_on_the_law_that_is_served(batch):
  found, metrics = jax.jit(pretrain.answer)(T5, batch)
  nats = []
  for row in (0, 1):
    inputs, answer = (x[row, :n[row]] for x, n in ((batch.inputs, batch.inputs_length),
                                                   (batch.answers, batch.answers_length)))
    cache = T5.encode(T5.init_cache(1, 32, 12), jnp.asarray(inputs)[None], jnp.asarray([len(inputs)], jnp.int32))
    logits = served(T5, [*T5.opening, *answer[:-1]], cache)
    nats += [-log_softmax(logits)[t, token] for t, token in enumerate(answer)]
  assert len(nats) == 11 == metrics["counted"] and found == pytest.approx(np.mean(nats), rel=1e-5)


def test_the_balance_of_experts_by_hand():
  """k where the router has no preference, whatever it chooses; X where all tokens go, with all of their share and one
  choice, to one expert."""
  some = jnp.asarray([[0, 1], [2, 3], [1, 0]])
  value, busiest = pretrain.load_balance(jnp.zeros((3, 4)), some, jnp.ones(3, bool))
  assert value == pytest.approx(2.0) and busiest == pytest.approx(4 / 3)
  one = jnp.full((5, 8), -50.0).at[:, 3].set(50.0)
  value, busiest = pretrain.load_balance(one, jnp.full((5, 1), 3), jnp.ones(5, bool))
  assert value == pytest.approx(8.0) and busiest == pytest.approx(8.0)


def test_the_balance_of_experts_as_switch_transformers_have_it():
  """Equation 4 with k choices, token by token; what does not count changes nothing."""
  rng = np.random.default_rng(2)
  logits, real = rng.standard_normal((17, 6)), rng.random(17) < 0.7
  chosen = np.argsort(-logits, axis=1)[:, :3]
  fraction, share = np.zeros(6), np.zeros(6)
  for token in np.flatnonzero(real):
    share += np.exp(logits[token]) / np.exp(logits[token]).sum() / real.sum()
    for expert in chosen[token]:
      fraction[expert] += 1 / real.sum()
  value, busiest = pretrain.load_balance(jnp.asarray(logits, jnp.float32), jnp.asarray(chosen), jnp.asarray(real))
  assert value == pytest.approx(6 * (fraction * share).sum(), rel=1e-5)
  assert busiest == pytest.approx(fraction.max() / fraction.mean(), rel=1e-5)


def test_the_balance_is_added_by_its_weight(rows):
  loss = jax.jit(lambda p, weight: pretrain.next_token(p, rows, weight))
  (plain, metrics), (more, _) = loss(MIXTURE, 0.0), loss(MIXTURE, 0.5)
  assert more - plain == pytest.approx(0.5 * float(metrics["balance"]), rel=1e-4) and metrics["busiest"] >= 1


def test_gradients_are_those_of_the_loss_and_reach_every_weight(rows, batch):
  for model, loss in ((MIXTURE, lambda p: pretrain.next_token(p, rows, 0.02)[0]),
                      (T5, lambda p: pretrain.answer(p, batch)[0])):
    value, gradient = jax.jit(loss), jax.jit(jax.grad(loss))(model)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient))
    # Small against the deviation of the weights, so that no token changes its experts.
    size = 2e-3 / float(jnp.sqrt(sum((leaf ** 2).sum() for leaf in jax.tree.leaves(gradient))))
    ahead, behind = (jax.tree.map(lambda w, g, s=sign: w + s * size * g, model, gradient) for sign in (1, -1))
    squares = sum(float((leaf ** 2).sum()) for leaf in jax.tree.leaves(gradient))
    assert (value(ahead) - value(behind)) / (2 * size) == pytest.approx(squares, rel=0.05)


# --- batches ----------------------------------------------------------------------------------------------------------


def some_documents(count, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(2, 36, rng.integers(3, 20)) for _ in range(count)]


def test_an_epoch_of_rows_holds_documents_one_behind_the_other():
  documents = some_documents(30)
  data = packed.RowData(documents=documents, held=documents[:3], eos=1, size=16, tokens=50)
  batches = [data.batch(step, 5) for step in range(data.epoch_steps())]
  assert all(rows.tokens.shape == rows.document.shape == (3, 16) for rows in batches)
  line, number = (np.concatenate([getattr(rows, name).reshape(-1) for rows in batches])
                  for name in ("tokens", "document"))
  known = [[*ids.tolist(), 1] for ids in documents]
  found = [line[number == n].tolist() for n in range(1, number.max())]  # the last one may be cut
  assert len(found) >= 27 and all(text in known for text in found)
  assert len({tuple(text) for text in found}) == len(found)
  again = data.batch(data.epoch_steps(), 5)
  assert (again.tokens != batches[0].tokens).any() and (data.batch(0, 5).tokens == batches[0].tokens).all()
  held = data.evaluation()[0]
  assert held.tokens[held.document == 2].tolist() == known[1]
  with pytest.raises(ValueError, match="do not fill one batch of 3 rows of 500"):
    packed.RowData(documents=documents, held=[], eos=1, size=500, tokens=1500)


def pair_data(share, **changes):
  documents = some_documents(48, 1)
  examples = pairs.Examples(pairs=[(a, b[:6]) for a, b in zip(documents[:20], documents[20:40])],
                            pieces=documents[40:])
  given = dict(examples=examples, held=pairs.Examples(pairs=examples.pairs[:2], pieces=examples.pieces[:1]),
               span_share=share, eos=1, sentinels=(39, 38, 37), tokens=96, max_tokens=24)
  return pairs.PairData(**given | changes)


def test_pairs_and_pieces_take_turns_by_their_share():
  data = pair_data(0.25)
  known = {(*a.tolist(), 1): [*b.tolist(), 1] for a, b in data.examples.pairs}
  kinds, seen = [], []
  for step in range(16):
    batch = data.batch(step, 3)
    assert batch.inputs.shape == batch.answers.shape == (2, 24)
    inputs = [tuple(row[:n].tolist()) for row, n in zip(batch.inputs, batch.inputs_length) if n]
    answers = [row[:n].tolist() for row, n in zip(batch.answers, batch.answers_length) if n]
    pieces = [39 in row for row in inputs]
    kinds.append(all(pieces))
    assert any(pieces) == all(pieces) and all(row[-1] == 1 for row in (*inputs, *answers))
    if not any(pieces):
      seen += inputs
      assert all(known[row] == answer for row, answer in zip(inputs, answers))
  assert sum(kinds) == 4 and len(seen) > 20 and set(seen[:20]) == set(known)
  same = lambda a, b: all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
  assert same(data.batch(7, 3), data.batch(7, 3)) and not same(data.batch(7, 3), data.batch(7, 4))
  assert [len(jax.tree.leaves(batch)) for batch in data.evaluation()] == [4, 4]


def test_inputs_and_answers_that_are_long_are_cut_and_still_end():
  long = pairs.Examples(pairs=[(np.full(90, 5), np.full(70, 6))], pieces=())
  batch = pair_data(0.0, examples=long).batch(0, 0)
  assert batch.inputs_length[0] == batch.answers_length[0] == 24
  assert batch.inputs[0, -1] == batch.answers[0, -1] == 1 and batch.inputs[0, -2] == 5


@pytest.mark.parametrize("share, changes, named", [
    (1.5, {}, "span_share=1.5"), (0.5, {"sentinels": ()}, "no sentinels"),
    (0.5, {"examples": pairs.Examples(pairs=(), pieces=[np.arange(9)])}, "no pairs to train on.*greater share"),
    (0.5, {"examples": pairs.Examples(pairs=[([3], [4])], pieces=())}, "no pieces to train on.*smaller share")])
def test_data_that_are_refused(share, changes, named):
  with pytest.raises(ValueError, match=named):
    pair_data(share, **changes)


def test_other_parts_of_decoders_get_no_first_weights():
  with pytest.raises(ValueError, match="qk_norm='head'"):
    fresh.decoder(dataclasses.replace(MIXTURE.config, qk_norm="head"), 0)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_mixture_learns_a_small_text_and_keeps_its_experts_alike(tmp_path):
  data = packed.RowData(documents=[np.tile([5, 9, 17, 30, 8, 22], 4)] * 8, held=[], eos=1, size=32, tokens=128)
  schedule = loop.Schedule(steps=80, learning_rate=0.01, clip=1.0)
  params = loop.run(tmp_path, MIXTURE, functools.partial(pretrain.next_token, balance=0.02),
                    lambda step: data.batch(step, 0), schedule)
  rows = loop.read_metrics(tmp_path)
  assert rows[-1]["cross_entropy"] < 0.5 < 3 < rows[0]["cross_entropy"]
  assert rows[-1]["accuracy"] > 0.9 and rows[-1]["busiest"] < 2  # of at most 2: X / k
  assert params.config == MIXTURE.config


def test_an_encoder_decoder_learns_which_answer_belongs_to_which_inputs(tmp_path):
  """Answers repeat the inputs' first token, which no decoder without them could know."""
  examples = pairs.Examples(pairs=[([a, 7, 9], [a, a]) for a in range(10, 18)], pieces=())
  data = pair_data(0.0, examples=examples, held=examples, tokens=8 * 48)
  schedule = loop.Schedule(steps=120, learning_rate=0.03, clip=1.0, relative=True)
  loop.run(tmp_path, T5, pretrain.answer, lambda step: data.batch(step, 0), schedule)
  rows = loop.read_metrics(tmp_path)
  assert rows[-1]["cross_entropy"] < 0.35 < 2 / 3 * np.log(2) < rows[0]["cross_entropy"] and rows[-1]["accuracy"] > 0.9
