"""A run that was killed anywhere and goes on is the run that never was: same losses, same weights, every step once."""
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compiling
from specjax.training import loop

pytestmark = pytest.mark.usefixtures("quick_compile")
STEPS, EVERY = 11, 3

# Trains until it is killed; slowly behind the second checkpoint.
SLOW = """
import sys, time
import test_loop
test_loop.train(sys.argv[1], report=lambda row: time.sleep(100 if row["step"] == 7 else 0))
"""


@struct.dataclass
class Params:
  """As a head has them: pairs, absent parts, and what is no weight."""
  first: tuple[jax.Array, ...]
  second: jax.Array
  absent: Any = None
  size: int = struct.field(pytree_node=False, default=4)


def initial():
  return Params(first=(jnp.full((4, 4), 0.3), jnp.eye(4)), second=jnp.full((4,), 0.5))


def loss(params, scale, batch):
  made = jnp.tanh(batch @ params.first[0] @ params.first[1]) @ params.second
  error = ((made - scale * jnp.sin(batch.sum(-1))) ** 2).mean()
  return error, {"size": jnp.abs(params.second).sum()}


def batch(step):
  return np.random.default_rng(step).standard_normal((8, 4)).astype(np.float32)


def train(folder, steps=STEPS, loss=loss, **options):
  schedule = loop.Schedule(steps=steps, learning_rate=0.05, weight_decay=0.1)
  return loop.run(folder, initial(), loss, batch, schedule, arguments=(jnp.float32(0.7),), save_every=EVERY, **options)


def rows_of(folder):
  """Rows of metrics without the times that they took."""
  return [{name: value for name, value in row.items() if name != "seconds"} for row in loop.read_metrics(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Weights and rows of a run that nobody disturbs, evaluated every 4 steps."""
  folder = tmp_path_factory.mktemp("whole")
  return train(folder), rows_of(folder)


class Killed(BaseException):
  """What no handler of errors takes."""


def kill_at(step):
  def report(row):
    if row["step"] == step:
      raise Killed
  return report


def test_training_lowers_the_loss_and_writes_every_step_once(whole):
  _, rows = whole
  assert [row["step"] for row in rows] == list(range(STEPS))
  assert all(row.keys() == {"step", "loss", "gradient_norm", "size"} for row in rows)
  assert rows[-1]["loss"] < rows[0]["loss"] / 2


def test_relative_steps_are_those_of_adamw_times_the_size_of_each_row():
  weights = {"matrix": jnp.asarray([[3.0, -4.0], [0.3, 0.4], [0.0, 0.0]]), "vector": jnp.asarray([6.0, 8.0])}
  gradient = jax.tree.map(lambda x: 0.1 + jnp.cos(x), weights)
  made = []
  for relative in (False, True):
    optimizer = loop.Schedule(steps=50, learning_rate=0.1, relative=relative).optimizer()
    state = optimizer.init(weights)
    for _ in range(3):
      change, state = optimizer.update(gradient, state, weights)
    made.append(change)
  half = 0.5 ** 0.5
  rows = np.array([[5 * half], [0.5 * half], [1e-3]])
  np.testing.assert_allclose(made[1]["matrix"], made[0]["matrix"] * rows, rtol=1e-5)
  np.testing.assert_allclose(made[1]["vector"], made[0]["vector"] * 10 * half, rtol=1e-5)
  assert jnp.abs(made[0]["matrix"]).min() > 1e-3


def test_a_run_that_is_killed_at_every_step_in_turn_is_the_run_that_never_was(whole, tmp_path):
  for step in range(STEPS):
    with pytest.raises(Killed):
      train(tmp_path, report=kill_at(step))
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(step + 1))
  params = train(tmp_path)
  assert rows_of(tmp_path) == whole[1]
  jax.tree.map(np.testing.assert_array_equal, params, whole[0])
  again = train(tmp_path, report=kill_at(STEPS - 1))  # a run that is done has nothing left to do
  jax.tree.map(np.testing.assert_array_equal, again, whole[0])
  assert rows_of(tmp_path) == whole[1]


def test_a_run_goes_on_from_its_last_checkpoint_and_not_from_the_beginning(whole, tmp_path):
  with pytest.raises(Killed):
    train(tmp_path, report=kill_at(7))
  seen = []
  train(tmp_path, report=lambda row: seen.append(row["step"]))
  assert seen == list(range(6, STEPS))
  assert rows_of(tmp_path) == whole[1]


def test_a_process_that_is_killed_leaves_a_run_that_goes_on(whole, tmp_path):
  env = {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"} | compiling.environment({})
  with subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)], env=env) as process:
    end = time.monotonic() + 120
    while not [row for row in loop.read_metrics(tmp_path) if row["step"] == 7]:
      assert process.poll() is None and time.monotonic() < end
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"step": 8, "lo')  # as if in the middle of a row
  unfinished = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"  # as if in the middle of a checkpoint
  unfinished.mkdir()
  (unfinished / "half").write_text("")
  assert [row["step"] for row in rows_of(tmp_path)] == list(range(8))
  seen = []
  params = train(tmp_path, report=lambda row: seen.append(row["step"]))
  assert seen[0] == 6
  assert rows_of(tmp_path) == whole[1]
  jax.tree.map(np.testing.assert_array_equal, params, whole[0])


def test_held_out_numbers_stand_in_their_rows(tmp_path, whole):
  """And training goes on behind an evaluation as without one (SpecForge 563: an eval() that nobody took back)."""
  evaluate = lambda step, params: {"doubled": 2 * step, "second": float(params.second.sum())}
  params = train(tmp_path, evaluate_every=4, evaluate=evaluate)
  rows = rows_of(tmp_path)
  assert {row["step"]: row["held_out/doubled"] for row in rows if "held_out/doubled" in row} == {3: 8, 7: 16, 10: 22}
  assert rows[-1]["held_out/second"] == pytest.approx(float(params.second.sum()))
  assert [row["loss"] for row in rows] == [row["loss"] for row in whole[1]]


@pytest.mark.parametrize("what", ["loss", "gradient_norm"])
@pytest.mark.parametrize("when", [0, 5])
def test_a_loss_that_is_no_number_ends_the_run_and_is_never_kept(what, when, tmp_path):
  """A gradient can be none where the loss still is one; weights behind it would be kept as the last checkpoint."""
  mark = batch(when)[0, 0]

  def breaks(params, scale, batch):
    value, found = loss(params, scale, batch)
    zero = (params.second - params.second).sum()
    now = batch[0, 0] == mark
    steep = jnp.sqrt(jnp.where(now, zero, zero + 1))  # of infinite slope
    return value + (jnp.where(now, jnp.nan, 0) if what == "loss" else steep), found

  with pytest.raises(ValueError, match=f"the {what} of step {when} is nan.*learning_rate"):
    train(tmp_path, loss=breaks)
  assert [row["step"] for row in rows_of(tmp_path)] == list(range(when))
  seen = []
  train(tmp_path, report=lambda row: seen.append(row["step"]))  # with better data
  assert seen[0] == when // EVERY * EVERY and rows_of(tmp_path)[-1]["step"] == STEPS - 1


def test_a_run_of_one_step(tmp_path):
  train(tmp_path, steps=1)
  assert len(rows_of(tmp_path)) == 1


def test_the_rate_warms_up_and_falls_to_a_tenth():
  """AdamW's first update is the rate itself, whatever the gradient."""
  def rates(schedule):
    optimizer, weights = schedule.optimizer(), jnp.zeros(1)
    def turn(state, _):
      change, state = optimizer.update(jnp.full((1,), 0.01), state, weights)
      return state, -change[0]
    return np.asarray(jax.jit(lambda: jax.lax.scan(turn, optimizer.init(weights), None, schedule.steps)[1])())

  found = rates(loop.Schedule(steps=200, learning_rate=0.01, warmup=10))
  np.testing.assert_allclose(found[:11], np.arange(11) * 1e-3, rtol=1e-3, atol=1e-9)
  assert (np.diff(found[10:]) < 0).all() and found[-1] == pytest.approx(1e-3, rel=0.01)
  assert rates(loop.Schedule(steps=20, learning_rate=0.01))[2] == pytest.approx(0.01, rel=1e-3)  # a tenth of the run


def test_rows_are_json_a_line(tmp_path):
  train(tmp_path, steps=2)
  text = (tmp_path / "metrics.jsonl").read_text()
  assert [json.loads(line)["step"] for line in text.splitlines()] == [0, 1] and text.endswith("\n")
