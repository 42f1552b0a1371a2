"""Training of Medusa's heads together with the target: Medusa-2. What results is another target, and heads for it.

Medusa-2 (arXiv 2401.10774, section 2.2.2): the loss is that of the language model plus lambda_0 times the heads'. Heads
are trained alone first, on the frozen target, so that their first errors do not spoil it; then both, the heads at a
greater rate, while lambda_0 grows. The language model's loss is the cross entropy with the data, or, by
self-distillation (section 2.3.2), the KL divergence from the original target. Self-distillation as published trains
low-rank adapters beside frozen weights; here every weight of the target learns, and a second copy of it is the
original. In both cases heads meet the original's law, as in `medusa`.

Drafts and exactness are relative to the new target.

Letters: B sequences, S tokens, U draft ids.
"""
import dataclasses
import math

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.models import medusa as models
from specjax.models.decoder import Decoder
from specjax.training import batches
from specjax.training import by_depth
from specjax.training import distill
from specjax.training import loop
from specjax.training import losses
from specjax.training import medusa
from specjax.training import shifts
from specjax.training import texts

BACKBONE = ("distill", "data")


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How both are trained.

  Attributes:
    heads_weight: the greatest lambda_0.
    backbone: "distill", KL(original || new) over the whole vocabulary, or "data", the cross entropy with the text.
    decay, loss, answers_only: of the heads, see `medusa.Recipe`; the last is true of the target as well.
  """
  heads_weight: float = 0.2
  backbone: str = "distill"
  decay: float = 0.8
  loss: str = "soft_ce"
  answers_only: bool = True

  def __post_init__(self):
    if self.backbone not in BACKBONE:
      raise ValueError(f"backbone={self.backbone!r}: allowed are {', '.join(BACKBONE)}")
    if not self.heads_weight > 0:
      raise ValueError(f"heads_weight={self.heads_weight}: it must be positive; without heads nothing is asked of the "
                       "target")


@dataclasses.dataclass(frozen=True)
class Schedule(loop.Schedule):
  """As `loop.Schedule`, whose rate is the target's: it learns from step `heads_first` on, heads `heads_rate` times as
  fast and from the first step."""
  heads_first: int = 0
  heads_rate: float = 4.0

  def __post_init__(self):
    if not 0 <= self.heads_first <= self.steps:
      raise ValueError(f"heads_first={self.heads_first}: the heads learn alone for 0 to steps={self.steps} steps")

  def optimizer(self) -> optax.GradientTransformation:
    def scale(updates, state, params=None):
      del params
      joint = jnp.where(state >= self.heads_first, 1.0, 0.0)
      return Joint(target=jax.tree.map(lambda x: joint * x, updates.target),
                   heads=jax.tree.map(lambda x: self.heads_rate * x, updates.heads)), state + 1

    return optax.chain(super().optimizer(), optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), scale))

  def heads_weight(self, step: int, most: float) -> float:
    """lambda_0 of a step: 1 while heads learn alone; then it grows along a quarter of a sine to `most`."""
    if step < self.heads_first:
      return 1.0
    done = (step - self.heads_first + 1) / max(self.steps - self.heads_first, 1)
    return most * math.sin(math.pi / 2 * min(done, 1.0))


@struct.dataclass
class Joint:
  """What learns, and what results."""
  target: Decoder
  heads: models.MedusaHead


@struct.dataclass
class Weighted:
  """A `texts.Text` at a step."""
  tokens: jax.Array  # i32[B, S]
  length: jax.Array  # i32[B]
  start: jax.Array   # i32[B]
  weight: jax.Array  # f32[]; lambda_0
  joint: jax.Array   # f32[]; 0 while the target is frozen, 1 then


def weighted(text: texts.Text, schedule: Schedule, recipe: Recipe, step: int) -> Weighted:
  """A batch with what its step asks of it."""
  return Weighted(tokens=text.tokens, length=text.length, start=text.start,
                  weight=np.float32(schedule.heads_weight(step, recipe.heads_weight)),
                  joint=np.float32(step >= schedule.heads_first))


def loss(params: Joint, original: Decoder, ids: jax.Array, batch: Weighted, recipe: Recipe):
  """The loss of a batch and its metrics.

  Args:
    params: target and heads; the heads' own ids are not looked at. original: the target at the start.
    ids: i32[U], the target's ids of the draft ids.

  Returns:
    The loss, and a dictionary: those of `eagle3.loss` for the heads against the original's law, "backbone" the target's
    own loss, "heads" theirs, "heads_weight", and "kept", how often both targets' most probable tokens agree.
  """
  original = jax.lax.stop_gradient(original)
  new, old = distill.hidden(params.target, batch.tokens), distill.hidden(original, batch.tokens)
  asked = shifts.asked(batch, 1, recipe.answers_only)
  divergence, kept = distill.judge(params.target, original, new, old, "kl", 0.0)
  if recipe.backbone == "data":
    divergence = _of_data(params.target, new, batch.tokens)
  backbone = losses.mean(divergence, asked)
  frozen = lambda x: jax.lax.stop_gradient(x) + batch.joint * (x - jax.lax.stop_gradient(x))
  rows = frozen(shifts.head_rows(params.target, ids))
  made = medusa.head_logits(params.heads, rows, _batch(batch, frozen(new), None))
  labels = _batch(batch, old, _top(original, old))
  heads, metrics = by_depth.loss(made, shifts.head_rows(original, ids), ids, labels, recipe, original.config.num_tokens)
  return batch.joint * backbone + batch.weight * heads, metrics | {
      "backbone": backbone, "heads": heads, "heads_weight": batch.weight, "kept": losses.mean(kept, asked)}


def _batch(batch, hidden, top):
  """As the training of heads reads texts."""
  return batches.Batch(tokens=batch.tokens, length=batch.length, start=batch.start, features=None, hidden=hidden,
                       top=top)


def _of_data(target, hidden, tokens):
  """-log of the target's probability of the token behind every place: f32[B, S]."""
  @jax.checkpoint
  def row(pair):
    log_p = jax.nn.log_softmax(target.logits(pair[0][None])[0])
    return -jnp.take_along_axis(log_p, pair[1][:, None], axis=1)[:, 0]

  return jax.lax.map(row, (hidden, shifts.ahead(tokens, 1)))


def _top(target, hidden):
  """The most probable id behind every place: i32[B, S]."""
  return jax.lax.map(lambda row: jnp.argmax(target.logits(row[None])[0], -1).astype(jnp.int32), hidden)
