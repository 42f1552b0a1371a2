"""Heads on the toy target: trained by the library's own trainers, once a process, and replayed on held-out text.

What the trainers have no option for stands here: EAGLE's head with some of its inputs cut (`CutHead`).

Letters: B sequences, S tokens, E width, D places of a chain.
"""
from collections.abc import Callable
import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations import toy_acceptance
from experiments.ablations import toy_models
from specjax.models import eagle as eagle_head
from specjax.training import eagle
from specjax.training import eagle3
from specjax.training import hydra
from specjax.training import medusa
from specjax.training import shifts
from specjax.training import trainers

_EVERY_TOKEN = dict(answers_only=False)  # prompts are SmolLM2's own text, too
INPUTS = ("token", "feature")


@struct.dataclass
class CutHead(eagle_head.EagleHead):
  """EAGLE's head that reads one of its inputs; zeros stand for the other, the target's and its own alike.

  With "token" it is a decoder layer over the text and what it drafted; with "feature" it drafts from features without
  knowing which token was emitted behind them.
  """
  reads: str = struct.field(pytree_node=False, default="feature")

  def apply(self, embedded, feature, positions, attends):
    """As `EagleHead.apply`."""
    if self.reads == "token":
      feature = jnp.zeros_like(feature)
    else:
      embedded = jnp.zeros_like(embedded)
    return super().apply(embedded, feature, positions, attends)


def cut(head: eagle_head.EagleHead, reads: str) -> CutHead:
  """First weights of `eagle.init`, of a head that reads one input; an embedding then passes as a feature does."""
  fuse, width = head.fuse, head.config.shape.width
  if reads == "token":
    fuse = jnp.concatenate([fuse[:, width:], fuse[:, :width]], axis=1)
  kept = {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
  return CutHead(**{**kept, "fuse": fuse, "reads": reads})


@dataclasses.dataclass(frozen=True)
class Kind:
  """A way to train a head.

  Attributes:
    trainer: (lab, share of the text, ids i32[V], seed) -> a `trainers.Trainer`.
    logits: (head, frozen, batch, D) -> D x f[B, S, V]; behind drafts that are the text's tokens.
    fused: whether it reads EAGLE-3's layers, not the last one's output.
  """
  trainer: Callable
  logits: Callable
  fused: bool = False


def _eagle(passes=1, reads=None, **recipe):
  def trainer(lab, share, ids, seed):
    start = None if reads is None else cut(eagle.init(lab.target, ids, jax.random.key(seed)), reads)
    return trainers.train_eagle(lab.target, lab.data(share=share), ids,
                                eagle.Recipe(passes=passes or lab.size.passes, **_EVERY_TOKEN, **recipe), seed, start)

  return Kind(trainer, lambda head, frozen, batch, depth: [
      logits for _, logits in eagle.passes(head, frozen, batch.replace(features=batch.hidden), depth)])


def _eagle3(fused):
  def trainer(lab, share, ids, seed):
    return trainers.train_eagle3(lab.target, lab.data(lab.fused if fused else lab.last, share), ids,
                                 eagle3.Recipe(passes=lab.size.passes, **_EVERY_TOKEN), seed)

  return Kind(trainer, lambda head, frozen, batch, depth: eagle3.passes(head, frozen.embedding, batch, depth), fused)


def _medusa(lab, share, ids, seed):
  return trainers.train_medusa(lab.target, lab.data(share=share), ids, medusa.Recipe(**_EVERY_TOKEN), seed,
                               heads=lab.size.heads)


def _hydra(**parts):
  def trainer(lab, share, ids, seed):
    return trainers.train_hydra(lab.target, lab.data(share=share), ids, hydra.Recipe(**_EVERY_TOKEN), seed,
                                heads=lab.size.heads, **parts)

  return Kind(trainer, lambda head, frozen, batch, depth: hydra.head_logits(head, frozen, batch)[:depth])


KINDS = {
    "Medusa": Kind(_medusa, lambda head, frozen, batch, depth: medusa.head_logits(head, frozen.head, batch)[:depth]),
    "Hydra": _hydra(blocks=1, prefix=False), "Hydra++": _hydra(blocks=4, prefix=True),
    "EAGLE": _eagle(), "HASS": _eagle(passes=None),
    "EAGLE, tokens alone": _eagle(reads="token"), "EAGLE, features alone": _eagle(reads="feature"),
    "EAGLE-3": _eagle3(True), "EAGLE-3, one feature": _eagle3(False)}


@functools.cache
def trained(size: toy_models.Size, seed: int, kind: str, share: float = 1.0):
  """The head of a name of `KINDS`, trained on a share of the text for `passes_over` passes over it."""
  lab = toy_models.lab(size, seed)
  trainer = KINDS[kind].trainer(lab, share, all_ids(size), seed)
  steps = max(round(size.passes_over * lab.data(share=share).epoch_steps()), 1)
  title = kind if share == 1 else f"{kind} on {share:.0%} of the text"
  return trainer.head(toy_models.run(title, trainer.params, trainer.loss, trainer.batch, steps, size.head_rate,
                                     arguments=trainer.arguments, clip=0.5))


@functools.cache
def measured(size: toy_models.Size, seed: int, kind: str, depth: int,
             share: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """`toy_acceptance.ranks` i32[N, S, D] and `ratios` f32[N, S, D] of a trained head over all held-out text, and the
  room of `toy_acceptance.Replay`, i32[N, S]."""
  lab, head = toy_models.lab(size, seed), trained(size, seed, kind, share)
  frozen = shifts.frozen(lab.target, all_ids(size))
  given = lab.measured(lab.fused if KINDS[kind].fused else lab.last)
  found = [jax.device_get(_measured(head, frozen, batch, kind=kind, depth=depth)) for batch in given]
  room = np.concatenate([toy_acceptance.room_of(batch) for batch in given])
  real = room.any(1)  # rows that fill a batch up are empty
  return *(np.concatenate(parts)[real] for parts in zip(*found)), room[real]


@functools.partial(jax.jit, static_argnames=("kind", "depth"))
def _measured(head, frozen, batch, *, kind, depth):
  made = KINDS[kind].logits(head, frozen, batch, depth)
  theirs = jnp.einsum("bsd,vd->bsv", batch.hidden.astype(jnp.float32), frozen.head)
  return toy_acceptance.ranks(made, batch.tokens), toy_acceptance.ratios(made, theirs, batch.tokens)


def replay(size: toy_models.Size, seed: int, kind: str, depth: int, share: float = 1.0) -> toy_acceptance.Replay:
  """The chains that a trained head draws, at temperature 1."""
  _, ratios, room = measured(size, seed, kind, depth, share)
  return toy_acceptance.of_drawn(ratios, room)


def all_ids(size: toy_models.Size) -> np.ndarray:
  """Heads draft every id of the target."""
  return np.arange(size.ids, dtype=np.int32)
