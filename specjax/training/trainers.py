"""One trainer a kind of head: its first weights, its loss, its batches, and the proposer that the weights make.

Letters: U draft ids.
"""
import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import proposers
from specjax.training import batches
from specjax.training import dflash
from specjax.training import eagle3
from specjax.training import medusa
from specjax.training import shifts


@dataclasses.dataclass(frozen=True)
class Trainer:
  """What `loop.run` takes, and what becomes of the weights.

  Attributes:
    params: at step 0. loss: (params, *arguments, batch) -> (loss, metrics). arguments: arrays.
    batch: step -> what the loss takes. evaluation: the same of held-out sequences, all of them.
    head: params -> the head. proposer: head -> a proposer of chains.
  """
  params: Any
  loss: Callable
  arguments: tuple
  batch: Callable
  evaluation: Callable
  head: Callable
  proposer: Callable


def layers_of_eagle3(layers: int) -> tuple[int, ...]:
  """The layers that EAGLE-3's own heads read of a target of `layers`: those entered by hidden states 2, L / 2, L - 3."""
  return (2, layers // 2, layers - 3)


def train_eagle3(target, data: batches.Data, ids: np.ndarray, recipe: eagle3.Recipe, seed: int,
                 start: Any = None) -> Trainer:
  """An EAGLE-3 head; from `start`, another head of the same shape, if given."""
  head = start or eagle3.init(target, ids, data.layers, jax.random.key(seed))
  return Trainer(params=eagle3.trainable(head), loss=functools.partial(eagle3.loss, recipe=recipe),
                 arguments=(eagle3.frozen(target, ids), jnp.asarray(ids)),
                 batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 head=lambda params: params.replace(ids=head.ids),
                 proposer=lambda head: proposers.Eagle3(head=head, num_tokens=recipe.passes))


def train_medusa(target, data: batches.Data, ids: np.ndarray, recipe: medusa.Recipe, seed: int, *, heads: int,
                 blocks: int = 1, own_vocabulary: bool = False, start: Any = None) -> Trainer:
  """Medusa's heads; from `start` if given."""
  head = start or medusa.init(target, ids, heads, blocks=blocks, own_vocabulary=own_vocabulary)
  return Trainer(params=head.replace(ids=None), loss=functools.partial(medusa.loss, recipe=recipe),
                 arguments=(shifts.head_rows(target, ids), jnp.asarray(ids)),
                 batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 head=lambda params: params.replace(ids=head.ids),
                 proposer=lambda head: proposers.Medusa(head=head, num_tokens=heads))


def train_dflash(target, data: batches.Data, ids: np.ndarray, recipe: dflash.Recipe, seed: int, *, layers: int,
                 block: int, mask_id: int, anchors: int = 32, causal: bool = False, start: Any = None) -> Trainer:
  """A DFlash drafter; from `start` if given."""
  head = start or dflash.init(target, ids, data.layers, layers=layers, block=block, mask_id=mask_id,
                              key=jax.random.key(seed), causal=causal)
  drawn = lambda batch, *entropy: dflash.anchored(batch, anchors, np.random.default_rng(entropy), recipe.answers_only)
  return Trainer(params=head.replace(ids=None), loss=functools.partial(dflash.loss, recipe=recipe),
                 arguments=(target.weights.embedding, shifts.head_rows(target, ids), jnp.asarray(ids)),
                 batch=lambda step: drawn(data.batch(step, seed), seed, step),
                 evaluation=lambda: [drawn(batch, seed, 0, i) for i, batch in enumerate(data.evaluation())],
                 head=lambda params: params.replace(ids=head.ids),
                 proposer=lambda head: proposers.DFlash(head=head, num_tokens=block - 1))


def held_out(trainer: Trainer) -> Callable:
  """params -> metrics of the held-out sequences, and the tokens of a step that these drafts make of a chain."""
  measure = jax.jit(lambda params, arguments, batch: trainer.loss(params, *arguments, batch)[1])

  def evaluate(params):
    found = [jax.device_get(measure(params, trainer.arguments, batch)) for batch in trainer.evaluation()]
    mean = {name: float(np.mean([row[name] for row in found])) for name in found[0]} if found else {}
    shares = [value for name, value in mean.items() if name.startswith("share_")]
    return mean | ({"expected_tokens": 1 + sum(shares)} if shares else {})

  return evaluate
