"""Training of a draft model on the target's laws, on texts that the drafter writes itself: DistillSpec.

DistillSpec (arXiv 2310.08461): the loss of a text is the mean, over the tokens of its answer, of a divergence between
the target's law and the drafter's, and that of a batch the mean over texts. Texts are fixed, from the target or a data
set, or written by the drafter as it is now, behind the same prompts; no gradient goes through that writing. Which of
both a step takes is drawn with the chance `on_policy`, as in GKD (arXiv 2306.13649). Both laws are those of temperature
1 over the whole vocabulary, computed in the step; nothing of them is stored.

Letters: B sequences, S tokens, N places, C places of a piece, E width of the drafter, D of the target.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax.training import losses
from specjax.training import shifts
from specjax.training import texts

_PLACES = 256  # whose laws are held at a time: those of a whole batch are hundreds of megabytes


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a draft model is trained, and how it is judged.

  Attributes:
    loss: a name of `losses.BY_NAME`.
    on_policy: the chance that a step's answers are the drafter's own, from 0 (fixed texts alone) to 1.
    own_temperature: at which it writes them.
    temperature: of the requests that acceptance is measured for; 0 is greedy.
    drafted: tokens of the chain that is measured.
  """
  loss: str = "kl"
  on_policy: float = 0.5
  own_temperature: float = 1.0
  temperature: float = 0.0
  drafted: int = 3

  def __post_init__(self):
    if not 0 <= self.on_policy <= 1:
      raise ValueError(f"on_policy={self.on_policy}: it is the share of steps whose answers the drafter writes, from 0 "
                       "to 1")
    for name in ("own_temperature", "temperature"):
      if not 0 <= getattr(self, name) < float("inf"):
        raise ValueError(f"{name}={getattr(self, name)}: it must be 0 (greedy) or more")


def loss(params, target, batch: texts.Text, recipe: Recipe):
  """The loss of a batch and its metrics.

  Args:
    params: the drafter, a `models.decoder.Decoder` in float32. target: a decoder with the same ids.

  Returns:
    The loss, and a dictionary: "loss_0" the same, "on_policy" 1 for a text of the drafter's own, "acceptance", the mean
    rate at which a draft is accepted at the recipe's temperature (1 - TV of both laws, or how often the greedy tokens
    agree), "share_i", that all drafts up to the i-th are, with contexts as in the text, "accuracy_i" given those
    before.
  """
  asked, target = shifts.asked(batch, 1, True), jax.lax.stop_gradient(target)
  own, theirs = hidden(params, batch.tokens), hidden(target, batch.tokens)
  value, accepted = judge(params, target, own, theirs, recipe.loss, recipe.temperature)
  of_text = jnp.where(asked, value, 0).sum(1) / jnp.maximum(asked.sum(1), 1)
  total = losses.mean(of_text, asked.any(1))
  metrics = {"loss_0": total, "on_policy": batch.own, "acceptance": losses.mean(accepted, asked)}
  chain, reached = jnp.ones_like(accepted), jnp.ones_like(asked)
  for i in range(recipe.drafted):
    before, reached = chain, reached & shifts.asked(batch, 1 + i, True)
    chain = before * shifts.ahead(accepted, i)
    metrics[f"share_{i}"] = losses.mean(chain, reached)
    metrics[f"accuracy_{i}"] = losses.mean(chain, reached) / jnp.maximum(losses.mean(before, reached), 1e-9)
  return total, metrics


def hidden(model, tokens: jax.Array) -> jax.Array:
  """The hidden state behind the final norm at every token of `tokens` i32[B, S], each text from its first one:
  f[B, S, E]."""
  batch, size = tokens.shape
  place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
  # An argument of the barrier: XLA folds a constant mask once for every layer.
  mask = jax.lax.optimization_barrier(jnp.tril(jnp.ones((size, size), bool)))
  return model.forward(tokens, place, jnp.broadcast_to(mask, (batch, size, size)), model.init_cache(batch, 1)).hidden


def acceptance(own: jax.Array, theirs: jax.Array, temperature: float) -> jax.Array:
  """The chance that a draft is accepted, f32[...], from the drafter's and the target's logits f[..., V]: that of a draw
  under Leviathan's rule, 1 - TV (arXiv 2211.17192), or of the greedy draft at temperature 0."""
  if not temperature:
    return (sampling.argmax(own) == sampling.argmax(theirs)).astype(jnp.float32)
  return 1 - losses.total_variation(jax.nn.log_softmax(own / temperature), jax.nn.softmax(theirs / temperature))


def judge(params, target, own: jax.Array, theirs: jax.Array, loss: str, temperature: float) -> list[jax.Array]:
  """Divergence, of the name `loss`, and acceptance at every place, f32[B, S] each, from hidden states f[B, S, E] of the
  drafter and f[B, S, D] of the target."""
  rows = lambda x: x.reshape(-1, x.shape[-1])
  shape, own, theirs = own.shape[:2], rows(own), rows(theirs)
  count = own.shape[0]
  pieces = lambda x: jnp.pad(x, ((0, -count % _PLACES), (0, 0))).reshape(-1, _PLACES, x.shape[-1])

  @jax.checkpoint  # or the laws of all pieces would be kept for the gradient
  def some(pair):
    q, p = params.logits(pair[0][None])[0], target.logits(pair[1][None])[0]
    return losses.BY_NAME[loss](jax.nn.log_softmax(q), jax.nn.softmax(p)), acceptance(q, p, temperature)

  return [x.reshape(-1)[:count].reshape(shape) for x in jax.lax.map(some, (pieces(own), pieces(theirs)))]


def written(model, batch: texts.Text, temperature: float, key: jax.Array) -> texts.Text:
  """The batch with answers that `model` writes behind its prompts, of plain text behind its first half.

  On the host. Answers end as a request's does, or where the batch's shape ends; empty rows stay empty.

  Args:
    temperature: 0 is greedy. key: of the draws.
  """
  size = batch.tokens.shape[1]
  start = np.where(batch.start > 0, batch.start, batch.length // 2)
  start = np.clip(start, 1, size - 1).astype(np.int32)
  empty = batch.length == 0
  prompts = [row[:count].tolist() for row, count in zip(batch.tokens, np.where(empty, 1, start))]
  result = drivers.generate(model, proposers.Plain(), prompts, sampling.SamplingParams(temperature=temperature),
                            max_new_tokens=np.where(empty, 1, size - start), key=key)
  tokens, length = np.zeros_like(batch.tokens), np.zeros_like(batch.length)
  for row, answer in enumerate(result.token_ids):
    if not empty[row]:
      ids = [*prompts[row], *answer]
      tokens[row, :len(ids)], length[row] = ids, len(ids)
  return texts.Text(tokens=tokens, length=length, start=np.where(empty, 0, start).astype(np.int32), own=np.float32(1))


def prepare(step: int, params, batch: texts.Text, recipe: Recipe, seed: int) -> texts.Text:
  """What a step learns from: the batch, or the drafter's own answers to it. Follows from step, weights and seed."""
  if np.random.default_rng((seed, step)).random() >= recipe.on_policy:
    return batch
  return written(params, batch, recipe.own_temperature, jax.random.fold_in(jax.random.key(seed), step))
