"""Training of an EAGLE-3 head by the training-time test: it meets its own outputs in training as it does in drafting.

EAGLE-3 (arXiv 2503.01840, traineagle3 of SafeAILab/EAGLE). Pass i drafts the i-th token behind token t + 1 at entry t,
see `own_passes`; its label is the target's law behind the token x[t + 1 + i] that it reads (see `shifts`).

Letters: B sequences, S entries, D width of the target, U draft ids, P passes.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import draft_layer
from specjax.models import eagle3
from specjax.training import batches
from specjax.training import by_depth
from specjax.training import own_passes
from specjax.training import shifts
from specjax.training import starting_layers


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a head is trained.

  Attributes:
    passes: P. decay: pass i weighs decay ** i.
    loss: a name of `losses.BY_NAME`, or `losses.TEXT`.
    answers_only: prompts are read and not learnt from; else every token of the text is a label.
  """
  passes: int = 4
  decay: float = 0.8
  loss: str = "soft_ce"
  answers_only: bool = True


def init(target, ids: np.ndarray, features: tuple[int, ...], key: jax.Array) -> eagle3.Eagle3Head:
  """A head that starts from the target: its last layer, final norm and head rows; the last feature passes as it is.

  Args:
    target: a `models.decoder.Decoder` or `models.encoder_decoder.EncoderDecoder`.
    ids: i32[U], ascending, or all of them. features: layers, the deepest last.
  """
  c, w = target.config, target.weights
  config = eagle3.Eagle3Config(shape=starting_layers.shape(target), target_width=c.width, features=features,
                               vocab_size=c.num_tokens, draft_vocab=len(ids), max_context=c.max_context)
  last, = starting_layers.last(target)
  noise = lambda key, rows, columns: 0.02 * jax.random.normal(key, (rows, columns), last.qkv.dtype)
  first, second = jax.random.split(key)
  fuse = noise(first, c.width, len(features) * c.width) / 4
  fuse = fuse.at[:, -c.width:].add(jnp.eye(c.width, dtype=fuse.dtype))
  layer = draft_layer.DraftLayer(
      qkv=jnp.concatenate([noise(second, *last.qkv.shape), last.qkv], axis=1), attention_out=last.attention_out,
      mlp_norm=last.mlp_norm, gate_up=last.gate_up, down=last.down)
  # The embedding's own size differs from model to model; behind the norm it is 1 a component.
  ones = jnp.ones_like(last.attention_norm)
  return eagle3.Eagle3Head(fuse=fuse, token_norm=ones, feature_norm=last.attention_norm, layer=layer,
                           norm=ones if w.final_norm is None else w.final_norm,
                           head=shifts.head_rows(target, ids),
                           ids=None if len(ids) == c.num_tokens else jnp.asarray(ids, jnp.int32), config=config)


def loss(params: eagle3.Eagle3Head, frozen: shifts.Frozen, ids: jax.Array, batch: batches.Batch, recipe: Recipe):
  """The loss of a batch and its metrics.

  Args:
    params: the head; its own ids are not looked at. ids: i32[U], the target's ids of the draft ids.

  Returns:
    The loss, and a dictionary: "loss_i", and of drafts as a step would see them (argmax of every pass, whether or not
    the draft vocabulary holds the label) "accuracy_i" given that all before were right, "share_i" that all up to i are.
  """
  made = passes(params, frozen.embedding, batch, recipe.passes)
  return by_depth.loss(made, frozen.head, ids, batch, recipe, frozen.embedding.shape[0], frozen.bias)


def passes(params: eagle3.Eagle3Head, embedding: jax.Array, batch: batches.Batch, count: int) -> list[jax.Array]:
  """The logits f[B, S, U] of `count` passes, see `own_passes`."""
  return [params.logits(hidden) for hidden in own_passes.run(params, embedding, batch, count)]
