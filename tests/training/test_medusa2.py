"""Medusa-2: its loss by definition, the frozen first stage, rates apart, and a target that stays what it was."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax.testing import tiny
from specjax.training import corpus
from specjax.training import loop
from specjax.training import medusa
from specjax.training import medusa2
from specjax.training import texts
from specjax.training import trainers

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = tiny.decoder(layers=2)
TARGET = TARGET.replace(weights=TARGET.weights.replace(head=3 * TARGET.weights.head))  # sure of what comes next
IDS = np.array([i for i in range(24) if i not in (4, 11, 17)], np.int32)
OTHER = jax.tree.map(lambda x: x * 1.05, TARGET)
PARAMS = medusa2.Joint(target=OTHER, heads=tiny.medusa(TARGET, IDS, heads=2).replace(ids=None))


@pytest.fixture(scope="module")
def some():
  rng = np.random.default_rng(3)
  return medusa2.Weighted(tokens=rng.integers(0, 24, (4, 32)).astype(np.int32),
                          length=np.array([30, 17, 0, 32], np.int32), start=np.array([5, 0, 0, 12], np.int32),
                          weight=np.float32(0.3), joint=np.float32(1))


def states(model, row):
  """Hidden states f[S, D] and logits f[S, V] of one text alone."""
  size = len(row)
  out = model.forward(jnp.asarray(row)[None], jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool)),
                      model.init_cache(1, 1))
  return np.asarray(out.hidden[0], np.float64), np.asarray(model.logits(out.hidden)[0], np.float64)


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("backbone", medusa2.BACKBONE)
def test_the_loss_is_the_published_one(some, backbone):
  """Behind token t the target is asked for token t + 1 and head i for token t + 2 + i, of the new hidden state."""
  recipe = medusa2.Recipe(backbone=backbone)
  found, metrics = jax.jit(lambda p, t: medusa2.loss(p, t, jnp.asarray(IDS), some, recipe))(PARAMS, TARGET)
  own, heads, kept = [], [[], []], []
  rows = np.asarray(OTHER.head, np.float64)[IDS]
  for row, length, start in zip(some.tokens, some.length, some.start):
    if not length:
      continue
    (new, logits), (_, old) = states(OTHER, row[:length]), states(TARGET, row[:length])
    p, q = log_softmax(old), log_softmax(logits)
    for t in range(max(start - 1, 0), length - 1):
      own.append((np.exp(p[t]) * (p[t] - q[t])).sum() if backbone == "distill" else -q[t, row[t + 1]])
      kept.append(old[t].argmax() == logits[t].argmax())
    for i in range(2):
      linear, bias = (np.asarray(x[i], np.float64) for x in (PARAMS.heads.linear, PARAMS.heads.bias))
      inner = new @ linear.T + bias
      made = log_softmax((new + inner / (1 + np.exp(-inner))) @ rows.T)
      for t in range(length - 2 - i):
        law = np.exp(log_softmax(old[t + 1 + i][IDS]))
        if t + 2 + i >= start and old[t + 1 + i].argmax() in IDS:
          heads[i].append(-(law * made[t]).sum())
  wanted = np.mean(heads[0]) + 0.8 * np.mean(heads[1])
  assert metrics["heads"] == pytest.approx(wanted, rel=1e-3)
  assert metrics["backbone"] == pytest.approx(np.mean(own), rel=1e-3)
  assert found == pytest.approx(np.mean(own) + 0.3 * wanted, rel=1e-3)
  assert metrics["kept"] == pytest.approx(np.mean(kept), abs=1e-6) and 0.2 < metrics["kept"] < 1


def test_the_original_asks_nothing_of_itself(some):
  same = PARAMS.replace(target=TARGET)
  _, metrics = jax.jit(lambda p, t: medusa2.loss(p, t, jnp.asarray(IDS), some, medusa2.Recipe()))(same, TARGET)
  assert abs(metrics["backbone"]) < 1e-5 and metrics["kept"] == 1


def test_the_heads_loss_reaches_the_target_only_when_both_learn(some):
  def gradient(joint):
    batch = some.replace(joint=np.float32(joint), weight=np.float32(1))
    return jax.jit(jax.grad(lambda p: medusa2.loss(p, TARGET, jnp.asarray(IDS), batch, medusa2.Recipe())[0]))(PARAMS)

  alone, both = gradient(0), gradient(1)
  assert not any(np.abs(x).max() > 0 for x in jax.tree.leaves(alone.target))
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves((alone.heads, both)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), alone.heads, both.heads)


def test_the_weight_of_the_heads_is_one_alone_and_then_grows_along_a_sine():
  schedule = medusa2.Schedule(steps=12, heads_first=4)
  found = [schedule.heads_weight(step, 0.2) for step in range(12)]
  np.testing.assert_allclose(found, [1] * 4 + [0.2 * math.sin(math.pi / 2 * i / 8) for i in range(1, 9)])
  assert medusa2.Schedule(steps=3).heads_weight(2, 0.2) == pytest.approx(0.2)


def test_heads_learn_faster_and_the_target_later():
  """AdamW's first updates are the rate itself, whatever the gradient."""
  schedule = medusa2.Schedule(steps=40, learning_rate=0.01, heads_first=3, heads_rate=4.0)
  optimizer, gradient = schedule.optimizer(), jax.tree.map(lambda x: jnp.full_like(x, 1e-4), PARAMS)
  state, sizes = optimizer.init(PARAMS), []
  for _ in range(6):
    change, state = optimizer.update(gradient, state, PARAMS)
    sizes.append([float(jnp.abs(jax.tree.leaves(part)[0]).max()) for part in (change.target, change.heads)])
  target, heads = np.transpose(sizes)
  assert (target[:3] == 0).all() and (target[3:] > 0).all()
  np.testing.assert_allclose(heads[3:], 4 * target[3:], rtol=1e-4)
  assert heads[1] > 0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
  prompts = [rng.integers(0, 23, rng.integers(2, 9)).tolist() for _ in range(96)]
  answers = drivers.generate(TARGET, proposers.Plain(), prompts, sampling.SamplingParams(temperature=0.7),
                             max_new_tokens=40).token_ids
  corpus.write(folder, 0, corpus.pack([([*p, *a], len(p)) for p, a in zip(prompts, answers)]))
  return texts.Texts(folders=(str(folder),), tokens=8 * 64, max_tokens=64, held_out=10)


def train(data, folder, schedule, recipe=medusa2.Recipe(), **options):
  trainer = trainers.train_joint(TARGET, medusa.init(TARGET, IDS, 2), data, IDS, recipe, schedule, 0)
  params = loop.run(folder, trainer.params, trainer.loss, trainer.batch, schedule, arguments=trainer.arguments,
                    **options)
  return trainer, params


class Killed(BaseException):
  """What no handler of errors takes."""


def test_the_target_is_frozen_first_and_a_killed_run_goes_on(data, tmp_path):
  schedule = medusa2.Schedule(steps=6, learning_rate=0.003, heads_first=3)
  seen = []
  _, whole = train(data, tmp_path / "whole", schedule, save_every=2)

  def kill(row):
    seen.append(row)
    if row["step"] == 4:
      raise Killed

  with pytest.raises(Killed):
    train(data, tmp_path / "killed", schedule, save_every=2, report=kill)
  _, params = train(data, tmp_path / "killed", schedule, save_every=2)
  keep = lambda folder: [{k: v for k, v in row.items() if k != "seconds"} for row in loop.read_metrics(folder)]
  assert keep(tmp_path / "killed") == keep(tmp_path / "whole")
  jax.tree.map(np.testing.assert_array_equal, params, whole)
  assert [row["kept"] for row in seen[:4]] == [1.0] * 4 and seen[3]["heads_weight"] < 0.2
  _, early = train(data, tmp_path / "early", dataclasses.replace(schedule, steps=3), save_every=2)
  jax.tree.map(np.testing.assert_array_equal, early.target, TARGET)
  changed = jax.tree.map(lambda a, b: bool(jnp.abs(a - b).max() > 0), whole.target, TARGET)
  assert all(jax.tree.leaves(changed))


def test_heads_of_a_target_that_learns_draft_better_and_exactly_for_it(data, tmp_path):
  """Better than heads that are trained as long on the frozen target; the new target still says mostly what it said."""
  rate, steps = 0.004, 60
  alone = medusa2.Schedule(steps=steps, learning_rate=rate, heads_first=steps)
  both = medusa2.Schedule(steps=steps, learning_rate=rate, heads_first=steps // 2)
  numbers = {}
  for name, schedule in (("alone", alone), ("both", both)):
    trainer, params = train(data, tmp_path / name, schedule, medusa2.Recipe(heads_weight=1.0), save_every=1000)
    numbers[name] = trainers.held_out(trainer)(params)
  assert numbers["alone"]["kept"] == 1 and numbers["both"]["kept"] > 0.7
  assert numbers["both"]["heads"] < numbers["alone"]["heads"] - 0.02
  joint = trainer.head(params)
  assert joint.heads.ids.tolist() == IDS.tolist()
  prompts = [[3, 9, 2, 11], [5, 1], [7, 7, 20]]
  plain = drivers.generate(joint.target, proposers.Plain(), prompts, max_new_tokens=40)
  drafted = drivers.generate(joint.target, trainer.proposer(joint), prompts, max_new_tokens=40)
  assert plain.token_ids == drafted.token_ids and drafted.counters.accepted_tokens.sum() > 5


def test_what_is_refused():
  with pytest.raises(ValueError, match="backbone='both'"):
    medusa2.Recipe(backbone="both")
  with pytest.raises(ValueError, match="heads_weight=0"):
    medusa2.Recipe(heads_weight=0.0)
  with pytest.raises(ValueError, match="heads_first=5"):
    medusa2.Schedule(steps=4, heads_first=5)
