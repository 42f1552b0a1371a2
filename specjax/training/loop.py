"""The training loop of every head: optimizer steps over batches that follow from a seed, kept so that a killed run goes
on as if nothing had happened.

A checkpoint (orbax) holds weights, optimizer state and step; the loss of every step stands in metrics.jsonl, of which a
resumed run drops what lies behind its checkpoint. Step n sees the same batch in every run, so the losses are equal.
"""
import dataclasses
import json
import pathlib
import time
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax

from specjax.training import corpus

_LEAST = 1e-3  # of a row, so that one of zeros still moves


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Optimizer and its length: AdamW, warm-up and cosine decay to a tenth, gradients clipped by their global norm.

  With `relative` a step is multiplied by the root mean square of the row of the weight that it changes, as Adafactor's
  are (arXiv 1804.04235, section 8; there by that of the whole matrix): for T5, whose first weights differ by a factor
  of hundreds in size, so that no step of one size fits all. Rows, since one matrix holds queries, keys and values here.

  A step takes the mean of the gradients of `accumulate` batches, each of the same weight.
  """
  steps: int
  learning_rate: float = 1e-3
  warmup: int = 100
  weight_decay: float = 0.0
  clip: float = 0.5
  b2: float = 0.95
  relative: bool = False
  accumulate: int = 1

  def optimizer(self) -> optax.GradientTransformation:
    warmup = min(self.warmup, max(self.steps // 10, 1))
    rate = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, warmup, max(self.steps, warmup + 1),
                                              self.learning_rate / 10)
    steps = [optax.clip_by_global_norm(self.clip),
             optax.adamw(rate, b1=0.9, b2=self.b2, weight_decay=self.weight_decay)]
    if self.relative:
      steps.append(optax.stateless(lambda changes, params: jax.tree.map(_by_row, changes, params)))
    return optax.chain(*steps)


def run(folder, params: Any, loss: Callable, batch: Callable, schedule: Schedule, *, arguments: tuple = (),
        prepare: Callable | None = None, save_every: int = 100, evaluate_every: int = 0,
        evaluate: Callable | None = None, report: Callable | None = None, places: Any = None) -> Any:
  """Trains, from the last checkpoint of `folder` if it has one.

  Args:
    folder: for checkpoints and metrics.jsonl.
    params: the weights at step 0, a pytree of float arrays.
    loss: (params, *arguments, batch) -> (loss, metrics), traced.
    batch: step -> batch. arguments: what the loss reads besides; arrays, not traced in as constants.
    prepare: (step, params, batch) -> what the loss reads in its place, on the host: for data that the weights
      themselves make. What it draws must follow from the step.
    evaluate: (step, params) -> dictionary of numbers, every `evaluate_every` steps and at the end.
    report: called with each row of metrics.
    places: a `parallel.training_places.Places`: weights and batches lie on its mesh. A run may go on on another mesh
      than the one that it began on.

  Returns:
    The trained weights.
  """
  folder = pathlib.Path(folder).resolve()
  folder.mkdir(parents=True, exist_ok=True)
  optimizer = schedule.optimizer()
  if places is not None:
    params, arguments = places.put(params), places.put(arguments)
    moments = optimizer.init(params)
    state = _state(params, jax.device_put(moments, places.weights(moments)), 0)
  else:
    state = _state(params, optimizer.init(params), 0)
  manager = orbax.CheckpointManager(folder / "checkpoints", options=orbax.CheckpointManagerOptions(
      max_to_keep=2, enable_async_checkpointing=False))
  if manager.latest_step() is not None:
    abstract = jax.tree.map(orbax.utils.to_shape_dtype_struct, state)
    state = manager.restore(manager.latest_step(), args=orbax.args.StandardRestore(abstract))
  metrics = _Metrics(folder / "metrics.jsonl", int(state["step"]))

  def slope(params, arguments, batch):
    return jax.value_and_grad(lambda p: loss(p, *arguments, batch), has_aux=True)(params)

  def apply(params, moments, found, gradient):
    value, more = found
    changes, moments = optimizer.update(gradient, moments, params)
    return optax.apply_updates(params, changes), moments, {
        "loss": value, "gradient_norm": optax.tree.norm(gradient), **more}

  params, moments = state["params"], state["optimizer"]
  stay = {} if places is None else {"out_shardings": (places.weights(params), places.weights(moments), None)}
  one_slope, apply_all = jax.jit(slope), jax.jit(apply, **stay)
  update = jax.jit(lambda params, moments, arguments, batch: apply(params, moments, *slope(params, arguments, batch)),
                   **stay)

  def batch_of(index):
    given = batch(index) if prepare is None else prepare(index, params, batch(index))
    return given if places is None else places.batch(given)

  def slopes(step):
    """The mean over the batches of a step: losses, metrics and gradients."""
    total = None
    for index in range(step * schedule.accumulate, (step + 1) * schedule.accumulate):
      found = one_slope(params, arguments, batch_of(index))
      total = found if total is None else jax.tree.map(jnp.add, total, found)
    return jax.tree.map(lambda x: x / schedule.accumulate, total)

  for step in range(int(state["step"]), schedule.steps):
    begin = time.perf_counter()
    if schedule.accumulate > 1:
      params, moments, found = apply_all(params, moments, *slopes(step))
    else:
      params, moments, found = update(params, moments, arguments, batch_of(step))
    row = {"step": step, **{name: float(x) for name, x in jax.device_get(found).items()},
           "seconds": time.perf_counter() - begin}
    broken = [name for name in ("loss", "gradient_norm") if not np.isfinite(row[name])]
    if broken:  # before it is kept: weights behind such a gradient are not numbers
      raise ValueError(f"the {broken[0]} of step {step} is {row[broken[0]]}: lower --learning_rate, or look at the "
                       f"data; the last checkpoint stays in {folder}")
    last = step + 1 == schedule.steps
    if evaluate is not None and (last or evaluate_every and (step + 1) % evaluate_every == 0):
      row |= {f"held_out/{name}": value for name, value in evaluate(step + 1, params).items()}
    metrics.add(row)
    if report is not None:
      report(row)
    if last or (step + 1) % save_every == 0:
      manager.save(step + 1, args=orbax.args.StandardSave(_state(params, moments, step + 1)))
  manager.wait_until_finished()
  manager.close()
  return params


def _by_row(change, weight):
  size = jnp.sqrt(jnp.mean(weight * weight, axis=-1, keepdims=weight.ndim > 1))
  return change * jnp.maximum(size, _LEAST)


def read_metrics(folder) -> list[dict]:
  """The rows of a run; a row that was being written when the run was killed is left out."""
  path = pathlib.Path(folder) / "metrics.jsonl"
  return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _state(params, moments, step):
  """What a checkpoint holds. A NumPy scalar in place of the array is written and never read again."""
  return {"params": params, "optimizer": moments, "step": np.asarray(step)}


class _Metrics:
  """metrics.jsonl, cut behind `step` at the start."""

  def __init__(self, path, step):
    rows = [row for row in read_metrics(path.parent) if row["step"] < step]
    corpus.write_whole(path, lambda file: file.write("".join(json.dumps(row) + "\n" for row in rows).encode()))
    self._path = path

  def add(self, row):
    with open(self._path, "a") as file:
      file.write(json.dumps(row) + "\n")
