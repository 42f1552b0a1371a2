"""Training of a module of multi-token prediction: passes over its own outputs, whose losses have weights by depth.

DeepSeek-V3 (arXiv 2412.19437, equations 24 and 25): the mean over D depths of the cross entropies of the text's tokens,
times lambda beside the loss of the model. FastMTP (arXiv 2509.18362, equation 2; Tencent-BAC/FastMTP, and speculators'
`models/mtp`): one module that is used again in each pass, on the text's tokens and with gradients through all passes;
the weights fall by 0.6 from pass to pass and their sum is 1. Both are the same sum, of a `decay` of 1 and of 0.6. Their
loss is `losses.TEXT`; against the target's law the target says more of each place.

Here the target is frozen, and a pass attends as the step does that drafts (see `own_passes`): to the entries of true
features and, at its own place, to those of the passes before it. FastMTP's and speculators' passes attend to the
entries of the same pass at earlier places, which a chain that is drafted does not have.

Letters: B sequences, S entries, U draft ids.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import draft_layer
from specjax.models import mtp
from specjax.training import batches
from specjax.training import by_depth
from specjax.training import own_passes
from specjax.training import shifts
from specjax.training import starting_layers


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a module is trained.

  Attributes:
    passes: depths D; 3 in FastMTP.
    decay: pass i weighs decay ** i, less what makes the weights' sum 1: 0.6 in FastMTP, 1 for DeepSeek's mean.
    weight: lambda, of the whole; 0.3 and 0.1 in DeepSeek-V3, beside a loss that a frozen target has not.
    loss, answers_only: as of `eagle3.Recipe`.
  """
  passes: int = 3
  decay: float = 0.6
  weight: float = 1.0
  loss: str = "soft_ce"
  answers_only: bool = True


def init(target, ids: np.ndarray, key: jax.Array) -> mtp.MtpHead:
  """A module that starts from the target: its last layer and final norm.

  The hidden state that is read has gone through that norm. Its weights are taken out again on the way in, so the layer
  meets the target's residual stream but for its size; what the layer adds is measured for that size, which is far
  greater. The embedding comes in as noise.

  Args:
    target: a `models.decoder.Decoder`. ids: i32[U], ascending, or all of them.
  """
  c, w = target.config, target.weights
  shape = starting_layers.shape(target)
  (last,), final = starting_layers.last(target), w.final_norm.astype(jnp.float32)
  size = jnp.sqrt(jnp.mean(jnp.square(final)))
  out_again = size * final / jnp.maximum(jnp.square(final), jnp.square(size / 10))  # some weights are next to nothing
  fuse = 0.02 * jax.random.normal(key, (c.width, 2 * c.width), last.qkv.dtype)
  layer = draft_layer.DraftLayer(qkv=last.qkv, attention_out=last.attention_out / 10, mlp_norm=last.mlp_norm,
                                 gate_up=last.gate_up, down=last.down / 10, qkv_bias=last.qkv_bias)
  return mtp.MtpHead(
      fuse=fuse.at[:, c.width:].add(jnp.eye(c.width, dtype=fuse.dtype)), token_norm=jnp.ones_like(w.final_norm),
      feature_norm=out_again.astype(w.final_norm.dtype), attention_norm=last.attention_norm, layer=layer,
      norm=w.final_norm, ids=None if len(ids) == c.num_tokens else jnp.asarray(ids, jnp.int32),
      config=mtp.MtpConfig(shape=shape, vocab_size=c.num_tokens, draft_vocab=len(ids), max_context=c.max_context))


def loss(params: mtp.MtpHead, frozen: shifts.Frozen, ids: jax.Array, batch: batches.Batch, recipe: Recipe):
  """The loss of a batch and its metrics, those of `eagle3.loss`.

  Args:
    params: the module; its own ids are not looked at. ids: i32[U], the target's ids of the draft ids.
  """
  made = passes(params, frozen, batch, recipe.passes)
  total, metrics = by_depth.loss(made, frozen.head, ids, batch, recipe, frozen.embedding.shape[0])
  return recipe.weight * total / sum(recipe.decay ** i for i in range(recipe.passes)), metrics


def passes(params: mtp.MtpHead, frozen: shifts.Frozen, batch: batches.Batch, count: int) -> list[jax.Array]:
  """The logits f[B, S, U] of `count` passes, see `own_passes`."""
  batch = batch.replace(features=batch.hidden)
  return [params.logits(hidden, frozen.head) for hidden in own_passes.run(params, frozen.embedding, batch, count)]
