"""DistillSpec's training of a draft model: its loss by definition, texts of the drafter's own, runs that are killed,
and a drafter that learns, from its own texts, too."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import verifiers
from specjax.testing import tiny
from specjax.training import batches
from specjax.training import corpus
from specjax.training import distill
from specjax.training import loop
from specjax.training import texts
from specjax.training import trainers

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = tiny.decoder(layers=3, scale=0.3)
TARGET = TARGET.replace(weights=TARGET.weights.replace(head=3 * TARGET.weights.head))  # sure of what comes next
DRAFT = TARGET.keep((0,))
RECIPE = distill.Recipe(on_policy=0.5, temperature=1.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
  prompts = [rng.integers(0, 23, rng.integers(2, 9)).tolist() for _ in range(96)]
  params = sampling.SamplingParams(temperature=1.0)
  answers = drivers.generate(TARGET, proposers.Plain(), prompts, params, max_new_tokens=40).token_ids
  corpus.write(folder, 0, corpus.pack([([*p, *a], len(p)) for p, a in zip(prompts, answers)]))
  return texts.Texts(folders=(str(folder),), tokens=8 * 64, max_tokens=64, held_out=10)


def logits_of(model, row):
  """f[S, V] of one text, by a pass of its own without a batch around it."""
  size = len(row)
  out = model.forward(jnp.asarray(row)[None], jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool)),
                      model.init_cache(1, 1))
  return np.asarray(model.logits(out.hidden)[0], np.float64)


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


DIVERGENCES = {
    "kl": lambda p, q: (p * np.log(p / q)).sum(-1), "reverse_kl": lambda p, q: (q * np.log(q / p)).sum(-1),
    "tv": lambda p, q: np.abs(p - q).sum(-1) / 2,
    "jsd": lambda p, q: (p * np.log(2 * p / (p + q)) + q * np.log(2 * q / (p + q))).sum(-1) / 2}


@pytest.fixture(scope="module")
def some():
  """A batch of texts of three lengths, one of them empty and one without an answer; longer than one piece of places."""
  rng = np.random.default_rng(3)
  length, start = np.array([50, 31, 0, 20, 62], np.int32), np.array([4, 0, 0, 20, 61], np.int32)
  tokens = rng.integers(0, 24, (5, 64)).astype(np.int32)
  return texts.Text(tokens=tokens, length=length, start=start, own=np.float32(0))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_is_the_mean_over_texts_of_the_mean_over_their_answers(some, name):
  found, metrics = jax.jit(lambda p, t: distill.loss(p, t, some, dataclasses.replace(RECIPE, loss=name)))(DRAFT, TARGET)
  means, rates = [], []
  for row, length, start in zip(some.tokens, some.length, some.start):
    # The law behind token t is asked for token t + 1.
    places = [t for t in range(length - 1) if t + 1 >= start]
    if places:
      p, q = softmax(logits_of(TARGET, row[:length]))[places], softmax(logits_of(DRAFT, row[:length]))[places]
      means.append(DIVERGENCES[name](p, q).mean())
      rates.extend(np.minimum(p, q).sum(-1))
  assert len(means) == 3
  assert found == pytest.approx(np.mean(means), rel=1e-4) and metrics["loss_0"] == found
  assert metrics["acceptance"] == pytest.approx(np.mean(rates), rel=1e-4)
  assert found != pytest.approx(np.mean([DIVERGENCES[name](
      softmax(logits_of(TARGET, row[:n])), softmax(logits_of(DRAFT, row[:n]))).mean()
      for row, n in zip(some.tokens, some.length) if n]), rel=1e-2)  # prompts would count for something


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_chain_is_accepted_as_far_as_all_of_its_places_are(some, temperature):
  close = TARGET.keep((0, 1))
  recipe = dataclasses.replace(RECIPE, temperature=temperature, drafted=3)
  metrics = jax.jit(lambda p, t: distill.loss(p, t, some, recipe)[1])(close, TARGET)
  shares = [[], [], []]
  for row, length, start in zip(some.tokens, some.length, some.start):
    p, q = (logits_of(model, row[:length]) if length else np.zeros((0, 24)) for model in (TARGET, close))
    accepted = (p.argmax(-1) == q.argmax(-1)).astype(float) if length and not temperature else np.zeros(0)
    if length and temperature:
      accepted = np.minimum(softmax(p / temperature), softmax(q / temperature)).sum(-1)
    for t in range(max(start - 1, 0), length - 1):
      for i in range(3):
        if t + 1 + i < length:
          shares[i].append(np.prod(accepted[t:t + i + 1]))
  for i, share in enumerate(shares):
    assert metrics[f"share_{i}"] == pytest.approx(np.mean(share), rel=1e-3), i
  assert metrics["accuracy_0"] == pytest.approx(float(metrics["share_0"]), rel=1e-5)
  assert 0 < metrics["share_2"] < metrics["share_1"] < metrics["share_0"] < 1


def test_the_gradient_is_that_of_the_loss_and_reaches_every_weight_of_the_drafter_alone(some):
  small = dataclasses.replace(RECIPE, loss="kl")
  loss = lambda p, t: distill.loss(p, t, some, small)[0]
  value = jax.jit(loss)
  gradient, of_target = jax.jit(jax.grad(loss, argnums=(0, 1)))(DRAFT, TARGET)
  for leaf in jax.tree.leaves(gradient):
    assert float(jnp.abs(leaf).max()) > 0
  assert not any(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(of_target))
  direction = jax.tree.map(lambda g: g / 10000, gradient)
  moved = [jax.tree.map(lambda w, d: w + sign * d, DRAFT, direction) for sign in (1, -1)]
  slope = (value(moved[0], TARGET) - value(moved[1], TARGET)) / 2
  expected = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
  assert slope == pytest.approx(expected, rel=0.02)


def test_acceptance_is_what_rejection_sampling_accepts():
  """Counted on the first draft of many rows of one prompt, within four standard deviations."""
  rows, prompt, close = 512, [5, 1, 17], TARGET.keep((0, 1))
  proposer = proposers.DraftModel(model=close, num_tokens=1, drawing=proposers.Drawing(sampled=True))
  result = drivers.generate(TARGET, proposer, [prompt] * rows, sampling.SamplingParams(temperature=0.9),
                            max_new_tokens=2, verifier=verifiers.Rejection())
  p, q = logits_of(TARGET, prompt)[-1], logits_of(close, prompt)[-1]
  rate = float(distill.acceptance(jnp.asarray(q, jnp.float32), jnp.asarray(p, jnp.float32), 0.9))
  counted = np.asarray(result.drafted)[:, 0].mean()
  assert 0.05 < rate < 0.95 and abs(counted - rate) < 4 * np.sqrt(rate * (1 - rate) / rows)


# --- texts of the drafter's own ---------------------------------------------------------------------------------------


def test_batches_are_those_of_the_corpus_and_need_no_features(data):
  (folder,) = data.folders
  sequences = corpus.read(folder, 0)
  known = {tuple(sequences[i].tolist()): int(start) for i, start in enumerate(sequences.starts)}
  seen = set()
  for batch in [*(data.batch(step, 0) for step in range(data.epoch_steps())), *data.evaluation()]:
    for row, length, start in zip(batch.tokens, batch.length, batch.start):
      if length:
        assert known[tuple(row[:length].tolist())] == start
        seen.add(tuple(row[:length].tolist()))
  assert len(seen) == len(known) and data.held
  plain = dict(folders=data.folders, tokens=8 * 64, max_tokens=64, held_out=10)
  other = batches.Data(layers=(1,), width=TARGET.config.width, **plain)
  assert other.held == data.held and other.places == data.places


def test_own_answers_stand_behind_the_same_prompts(data):
  """Row by row what the drafter writes alone at temperature 0; plain text is continued behind its half."""
  batch = data.batch(0, 0)
  batch = batch.replace(start=np.where(np.arange(len(batch.start)) == 1, 0, batch.start).astype(np.int32))
  own = distill.written(DRAFT, batch, 0.0, jax.random.key(0))
  assert own.tokens.shape == batch.tokens.shape and own.own == 1 and batch.own == 0
  for row in np.flatnonzero(batch.length)[:5]:
    start = int(batch.start[row]) or int(batch.length[row]) // 2
    assert own.start[row] == start and (own.tokens[row, :start] == batch.tokens[row, :start]).all()
    answer = drivers.generate(DRAFT, proposers.Plain(), [batch.tokens[row, :start].tolist()],
                              max_new_tokens=64 - start).token_ids[0]
    assert own.tokens[row, start:own.length[row]].tolist() == answer
  drawn = [distill.written(DRAFT, batch, 1.0, jax.random.key(key)).tokens for key in (0, 0, 1)]
  assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).any()


def test_rows_that_fill_a_batch_up_stay_empty_and_a_prompt_as_long_as_the_batch_gets_one_token():
  tokens = np.zeros((3, 16), np.int32)
  tokens[0], tokens[1, :4] = 5, 7
  batch = texts.Text(tokens=tokens, length=np.array([16, 4, 0], np.int32), start=np.array([16, 4, 0], np.int32),
                     own=np.float32(0))
  own = distill.written(DRAFT, batch, 1.0, jax.random.key(0))
  assert own.length.tolist()[0] == 16 and own.start.tolist() == [15, 4, 0] and own.length[2] == 0
  assert not own.tokens[2].any() and (own.tokens[1, :4] == 7).all() and own.length[1] > 4


def test_the_share_of_own_texts_is_that_of_the_recipe(data):
  batch = data.batch(0, 0)
  own = lambda share: [float(distill.prepare(step, DRAFT, batch, distill.Recipe(on_policy=share), 0).own)
                       for step in range(40)]
  assert sum(own(0.0)) == 0
  drawn = own(0.3)
  assert 4 < sum(drawn) < 22 and drawn == own(0.3)
  assert sum(own(1.0)[:3]) == 3
  with pytest.raises(ValueError, match="on_policy=1.5"):
    distill.Recipe(on_policy=1.5)
  with pytest.raises(ValueError, match="temperature=-1"):
    distill.Recipe(temperature=-1)


# --- runs -------------------------------------------------------------------------------------------------------------


def train(data, folder, steps, recipe=RECIPE, **options):
  trainer = trainers.train_draft_model(TARGET, DRAFT, data, recipe, 0)
  params = loop.run(folder, trainer.params, trainer.loss, trainer.batch, loop.Schedule(steps=steps, learning_rate=0.01),
                    arguments=trainer.arguments, prepare=trainer.prepare, **options)
  return trainer, params


class Killed(BaseException):
  """What no handler of errors takes."""


def test_a_run_on_own_texts_that_is_killed_goes_on_as_if_it_had_not_been(data, tmp_path):
  """The texts follow from weights and step, so they are written again as they were."""
  keep = lambda folder: [{k: v for k, v in row.items() if k != "seconds"} for row in loop.read_metrics(folder)]
  _, whole = train(data, tmp_path / "whole", 5, save_every=2)
  own = [row["on_policy"] for row in keep(tmp_path / "whole")]
  assert 0 < sum(own) < 5

  def kill(row):
    if row["step"] == step:
      raise Killed

  for step in (1, 2):
    with pytest.raises(Killed):
      train(data, tmp_path / "killed", 5, save_every=2, report=kill)
  _, params = train(data, tmp_path / "killed", 5, save_every=2)
  assert keep(tmp_path / "killed") == keep(tmp_path / "whole")
  jax.tree.map(np.testing.assert_array_equal, params, whole)


@pytest.mark.parametrize("loss,on_policy", [("kl", 0.0), ("tv", 1.0)])
def test_a_drafter_learns_and_more_of_its_drafts_are_accepted(data, tmp_path, loss, on_policy):
  recipe = distill.Recipe(loss=loss, on_policy=on_policy, temperature=1.0)
  trainer, params = train(data, tmp_path, 40, recipe)
  measure = trainers.held_out(trainer)
  before, after = measure(trainer.params), measure(params)
  assert after["acceptance"] > before["acceptance"] + 0.05
  assert after["expected_tokens"] > before["expected_tokens"] + 0.05
  prompts = [[3, 9, 2, 11], [5, 1], [7, 7, 20]] * 4
  rates = []
  for weights in (trainer.params, params):
    result = drivers.generate(TARGET, trainer.proposer(trainer.head(weights)), prompts,
                              sampling.SamplingParams(temperature=1.0), max_new_tokens=60,
                              verifier=verifiers.Rejection())
    rates.append(result.counters.output_tokens.sum() / result.counters.steps.sum())
  assert rates[1] > rates[0]


def test_layers_of_the_target_are_copied_and_the_target_stays_as_it_was(data, tmp_path):
  before = jax.tree.map(np.array, TARGET)
  trainer, params = train(data, tmp_path, 2)
  assert float(jnp.abs(params.weights.embedding - TARGET.weights.embedding).max()) > 0
  jax.tree.map(np.testing.assert_array_equal, TARGET, before)
  assert trainer.head(params).config == DRAFT.config
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), DRAFT)
  other = trainers.train_draft_model(TARGET, half, data, RECIPE, 0)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(other.params))
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(other.head(other.params)))


def test_a_draft_model_that_does_not_fit_is_refused(data):
  with pytest.raises(ValueError, match="12 token ids and the target 24"):
    trainers.train_draft_model(TARGET, tiny.decoder(vocab=12), data, RECIPE, 0)
  with pytest.raises(ValueError, match="max_tokens=64.*32 tokens"):
    trainers.train_draft_model(TARGET, tiny.decoder(max_context=32), data, RECIPE, 0)
