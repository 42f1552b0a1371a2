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
from specjax.models.hydra import HydraHead
from specjax.training import batches
from specjax.training import dflash
from specjax.training import distill
from specjax.training import dspark
from specjax.training import eagle
from specjax.training import eagle3
from specjax.training import hydra
from specjax.training import medusa
from specjax.training import medusa2
from specjax.training import mtp
from specjax.training import peagle
from specjax.training import shifts
from specjax.training import texts


@dataclasses.dataclass(frozen=True)
class Trainer:
  """What `loop.run` takes, and what becomes of the weights.

  Attributes:
    params: at step 0. loss: (params, *arguments, batch) -> (loss, metrics). arguments: arrays.
    measure: the loss over answers alone, whatever it is trained on, so that runs can be compared.
    batch: step -> what the loss takes. evaluation: the same of held-out sequences, all of them.
    head: params -> the head. proposer: head -> a proposer of chains.
    prepare: see `loop.run`.
  """
  params: Any
  loss: Callable
  measure: Callable
  arguments: tuple
  batch: Callable
  evaluation: Callable
  head: Callable
  proposer: Callable
  prepare: Callable | None = None


def layers_of_eagle3(layers: int) -> tuple[int, ...]:
  """The layers that EAGLE-3's own heads read of a target of `layers`: those entered by hidden states 2, L / 2, L - 3.
  A target of fewer than 7 layers has no such three: its middle, what lies around it, and the last."""
  if layers < 7:
    return tuple(sorted({max(layers // 4, 1), max(layers // 2, 1), max(layers - 1, 1)}))
  return (2, layers // 2, layers - 3)


def train_eagle3(target, data: batches.Data, ids: np.ndarray, recipe: eagle3.Recipe, seed: int,
                 start: Any = None) -> Trainer:
  """An EAGLE-3 head; from `start`, another head of the same shape, if given."""
  head = start or eagle3.init(target, ids, data.layers, jax.random.key(seed))
  return Trainer(params=_trainable(head), **_losses(eagle3.loss, recipe),
                 arguments=(shifts.frozen(target, ids), jnp.asarray(ids)),
                 batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 head=functools.partial(_made_of, head),
                 proposer=lambda head: proposers.Eagle(head=head, num_tokens=recipe.passes))


def train_peagle(target, data: batches.Data, ids: np.ndarray, recipe: peagle.Recipe, seed: int, *, layers: int,
                 depths: int, mask_id: int, start: Any = None) -> Trainer:
  """A P-EAGLE head; from `start` if given."""
  head = start or peagle.init(target, ids, data.layers, layers=layers, depths=depths, mask_id=mask_id,
                              key=jax.random.key(seed))
  return Trainer(params=_trainable(head), **_losses(peagle.loss, recipe),
                 arguments=(shifts.frozen(target, ids), jnp.asarray(ids)),
                 batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 head=functools.partial(_made_of, head),
                 proposer=lambda head: proposers.PEagle(head=head, num_tokens=depths))


def train_eagle(target, data: batches.Data, ids: np.ndarray, recipe: eagle.Recipe, seed: int,
                start: Any = None) -> Trainer:
  """EAGLE-1's head; from `start` if given."""
  head = start or eagle.init(target, ids, jax.random.key(seed))
  drafts = max(recipe.passes, recipe.measured)  # it learns one token ahead, and drafts several

  def noisy(step):
    return eagle.read(data.batch(step, seed), recipe.noise, np.random.default_rng((seed, step)))

  return Trainer(params=_trainable(head), loss=functools.partial(eagle.loss, recipe=recipe),
                 measure=_losses(eagle.loss, dataclasses.replace(recipe, passes=drafts))["measure"],
                 arguments=(shifts.frozen(target, ids), jnp.asarray(ids)), batch=noisy,
                 evaluation=lambda: [eagle.read(batch) for batch in data.evaluation()],
                 head=functools.partial(_made_of, head),
                 proposer=lambda head: proposers.Eagle(head=head, num_tokens=drafts))


def train_mtp(target, data: batches.Data, ids: np.ndarray, recipe: mtp.Recipe, seed: int, start: Any = None) -> Trainer:
  """A module of multi-token prediction; from `start` if given."""
  head = start or mtp.init(target, ids, jax.random.key(seed))
  return Trainer(params=_trainable(head), **_losses(mtp.loss, recipe),
                 arguments=(shifts.frozen(target, ids), jnp.asarray(ids)),
                 batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 head=functools.partial(_made_of, head),
                 proposer=lambda head: proposers.Eagle(head=head, num_tokens=recipe.passes))


def train_medusa(target, data: batches.Data, ids: np.ndarray, recipe: medusa.Recipe, seed: int, *, heads: int,
                 blocks: int = 1, own_vocabulary: bool = False, start: Any = None) -> Trainer:
  """Medusa's heads; from `start` if given."""
  head = start or medusa.init(target, ids, heads, blocks=blocks, own_vocabulary=own_vocabulary)
  return Trainer(params=_trainable(head), **_losses(medusa.loss, recipe),
                 arguments=(shifts.head_rows(target, ids), jnp.asarray(ids)),
                 batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 head=functools.partial(_made_of, head),
                 proposer=lambda head: proposers.Medusa(head=head, num_tokens=heads))


def train_hydra(target, data: batches.Data, ids: np.ndarray, recipe: hydra.Recipe, seed: int, *, heads: int,
                blocks: int = 4, prefix: bool = True, own_vocabulary: bool = False, start: Any = None) -> Trainer:
  """Hydra's heads, with a layer of prefix attention those of Hydra++; from `start` if given."""
  head = start or hydra.init(target, ids, heads, blocks=blocks, prefix=prefix, own_vocabulary=own_vocabulary)
  return Trainer(params=_trainable(head), **_losses(hydra.loss, recipe),
                 arguments=(shifts.frozen(target, ids), jnp.asarray(ids)),
                 batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 head=functools.partial(_made_of, head),
                 proposer=lambda head: proposers.Hydra(head=head, num_tokens=heads))


def train_dflash(target, data: batches.Data, ids: np.ndarray, recipe: dflash.Recipe, seed: int, *, layers: int,
                 block: int, mask_id: int, anchors: int = 32, causal: bool = False, start: Any = None) -> Trainer:
  """A DFlash drafter; from `start` if given."""
  head = start or dflash.init(target, ids, data.layers, layers=layers, block=block, mask_id=mask_id,
                              key=jax.random.key(seed), causal=causal)
  return _blocks(head, dflash.loss, target, data, ids, recipe, seed, anchors,
                 lambda head: proposers.DFlash(head=head, num_tokens=block - 1))


def train_dspark(target, data: batches.Data, ids: np.ndarray, recipe: dspark.Recipe, seed: int, *, layers: int,
                 block: int, mask_id: int, rank: int, anchors: int = 32, start: Any = None) -> Trainer:
  """A DSpark drafter; from `start` if given."""
  head = start or dspark.init(target, ids, data.layers, layers=layers, block=block, mask_id=mask_id, rank=rank,
                              key=jax.random.key(seed))
  return _blocks(head, dspark.loss, target, data, ids, recipe, seed, anchors,
                 lambda head: proposers.DSpark(head=head, num_tokens=block))


def train_draft_model(target, draft, data: texts.Texts, recipe: distill.Recipe, seed: int) -> Trainer:
  """A draft model, from `draft`, a decoder with the target's ids; its weights are copied where they are the target's.

  Raises:
    ValueError: it has another number of ids, or a shorter context than the data's texts.
  """
  proposers.base.same_vocabulary(target, draft)
  if draft.max_context < data.max_tokens:
    raise ValueError(f"max_tokens={data.max_tokens}: the draft model's context has {draft.max_context} tokens; texts "
                     "must be cut there or before")
  drawing, loss = proposers.Drawing(sampled=recipe.temperature > 0), functools.partial(distill.loss, recipe=recipe)
  return Trainer(params=jax.tree.map(lambda x: jnp.array(x, jnp.float32), draft), loss=loss, measure=loss,
                 arguments=(target,), batch=lambda step: data.batch(step, seed), evaluation=data.evaluation,
                 prepare=lambda step, params, batch: distill.prepare(step, params, batch, recipe, seed),
                 head=lambda params: jax.tree.map(lambda x, like: x.astype(like.dtype), params, draft),
                 proposer=lambda head: proposers.DraftModel(model=head, num_tokens=recipe.drafted, drawing=drawing))


def train_joint(target, heads: Any, data: texts.Texts, ids: np.ndarray, recipe: medusa2.Recipe,
                schedule: medusa2.Schedule, seed: int) -> Trainer:
  """A target together with Medusa's heads on it, from `heads` of `ids` i32[U]; `head` and `proposer` take a
  `medusa2.Joint` of a new target and its heads."""
  first = medusa2.Joint(target=target, heads=heads)
  loss = functools.partial(medusa2.loss, recipe=recipe)

  def made_of(params):
    return medusa2.Joint(target=jax.tree.map(lambda x, like: x.astype(like.dtype), params.target, first.target),
                         heads=_made_of(heads, params.heads))

  return Trainer(params=medusa2.Joint(target=jax.tree.map(lambda x: jnp.array(x, jnp.float32), target),
                                      heads=_trainable(heads)),
                 loss=loss, measure=loss, arguments=(target, jnp.asarray(ids)),
                 batch=lambda step: medusa2.weighted(data.batch(step, seed), schedule, recipe, step // schedule.accumulate),
                 evaluation=lambda: [medusa2.weighted(batch, schedule, recipe, schedule.steps)
                                     for batch in data.evaluation()],
                 head=made_of,
                 proposer=lambda joint: proposers.Medusa(head=joint.heads, num_tokens=heads.config.heads))


def _blocks(head, loss, target, data, ids, recipe, seed, anchors, proposer):
  """A trainer of blocks behind anchors."""
  def drawn(batch, *entropy, answers_only=recipe.answers_only):
    return dflash.anchored(batch, anchors, np.random.default_rng(entropy), answers_only)

  return Trainer(params=_trainable(head), **_losses(loss, recipe),
                 arguments=(target.weights.embedding, shifts.head_rows(target, ids), jnp.asarray(ids)),
                 batch=lambda step: drawn(data.batch(step, seed), seed, step),
                 evaluation=lambda: [drawn(batch, seed, 0, i, answers_only=True)
                                     for i, batch in enumerate(data.evaluation())],
                 head=functools.partial(_made_of, head), proposer=proposer)


def with_accuracy(head, data: batches.Data, target, ids: np.ndarray, ranks: int = 8):
  """Medusa's or Hydra's heads with their table of accuracy by rank, from held-out text."""
  kind, given = medusa, shifts.head_rows(target, ids)
  if isinstance(head, HydraHead):
    kind, given = hydra, shifts.frozen(target, ids)
  count = jax.jit(functools.partial(kind.rank_hits, ranks=min(ranks, len(ids))))
  found = [jax.device_get(count(head, given, jnp.asarray(ids), batch)) for batch in data.evaluation()]
  hits, places = (np.sum([row[i] for row in found], axis=0) for i in range(2))
  table = np.round(hits / np.maximum(places, 1)[:, None], 4)
  return head.replace(config=dataclasses.replace(head.config, accuracy=tuple(tuple(row) for row in table.tolist())))


def held_out(trainer: Trainer) -> Callable:
  """params -> metrics of the answers of held-out sequences, and the tokens of a step that a chain of these drafts makes
  on that very text."""
  measure = jax.jit(lambda params, arguments, batch: trainer.measure(params, *arguments, batch)[1])

  def evaluate(params):
    given = trainer.evaluation()
    if not given:
      return {}
    found = [jax.device_get(measure(params, trainer.arguments, batch)) for batch in given]
    weights = [max(_labels(batch), 1e-9) for batch in given]
    mean = {name: float(np.average([row[name] for row in found], weights=weights)) for name in found[0]}
    return mean | {"expected_tokens": 1 + sum(value for name, value in mean.items() if name.startswith("share_"))}

  return evaluate


def _losses(loss, recipe):
  """As trained, and as measured."""
  return {"loss": functools.partial(loss, recipe=recipe),
          "measure": functools.partial(loss, recipe=dataclasses.replace(recipe, answers_only=True))}


def _labels(batch):
  """Tokens of answers: what a batch weighs among others."""
  batch = batch.batch if isinstance(batch, dflash.Anchored) else batch
  return int(np.maximum(batch.length - batch.start, 0).sum())


def _trainable(head):
  """What an optimizer holds: no ids, and float32 whatever the weights are, as small steps are lost on bfloat16."""
  return jax.tree.map(lambda x: x.astype(jnp.float32), head.replace(ids=None))


def _made_of(head, params):
  """The head that `params` make, weights of the type that `head` has them in."""
  return jax.tree.map(lambda x, like: x.astype(like.dtype), params, head.replace(ids=None)).replace(ids=head.ids)
