"""Training of EAGLE-1's head: it learns the target's next feature, and through the target's head its next law.

EAGLE (arXiv 2401.15077, `eagle/train/main.py` of SafeAILab/EAGLE): smooth L1 to the feature at token t + 1, and a tenth
of the cross entropy to the target's law there; noise on the features that it reads makes up for its own errors, which
it reads while it drafts. HASS (arXiv 2408.15766) lets it read its own outputs instead, in `passes` of equal weight of
which none gets gradients of the next; it trains with three. HASS's loss on the ten most probable ids is not here.

The published code counts a label by the mask of the place before it (EAGLE's issue 325). Here the mask is the label's.

Letters: B sequences, S entries, D width of target and head, U draft ids, V target vocabulary.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import draft_layer
from specjax.models import eagle
from specjax.training import batches
from specjax.training import losses
from specjax.training import own_passes
from specjax.training import shifts
from specjax.training import starting_layers


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a head is trained; see `eagle3.Recipe` for what is not here.

  Attributes:
    passes: 1 in EAGLE, 3 in HASS.
    feature_weight, law_weight: of smooth L1, and of the loss between laws.
    noise: features are read with uniform noise of up to it in each component, as in the paper. The published code has
      0.1 * 512 / length of the sequence.
    measured: drafts of the chains that held-out text is measured with, if there are no more passes than that.
  """
  passes: int = 1
  feature_weight: float = 1.0
  law_weight: float = 0.1
  noise: float = 0.1
  loss: str = "soft_ce"
  answers_only: bool = True
  measured: int = 3


def init(target, ids: np.ndarray, key: jax.Array) -> eagle.EagleHead:
  """A head of one layer that starts from the target: its last layer, behind a matrix that lets the feature pass.

  Args:
    target: a `models.decoder.Decoder`. ids: i32[U], ascending, or all of them.
  """
  c, w = target.config, target.weights
  shape = starting_layers.shape(target)
  config = eagle.EagleConfig(shape=shape, vocab_size=c.num_tokens, draft_vocab=len(ids), max_context=c.max_context)
  last, = starting_layers.last(target)
  fuse = 0.02 * jax.random.normal(key, (c.width, 2 * c.width), last.qkv.dtype)
  fuse = fuse.at[:, c.width:].add(jnp.eye(c.width, dtype=fuse.dtype))
  # The first layer has no norm before its attention: its weight goes into the matrix, and the size that the final norm
  # gave the feature comes off. What the layer adds is measured for the residual stream, far larger than a feature.
  size = jnp.sqrt(jnp.mean(jnp.square(w.final_norm.astype(jnp.float32))))
  qkv = (last.qkv * last.attention_norm / size).astype(last.qkv.dtype)
  layer = draft_layer.DraftLayer(qkv=qkv, attention_out=last.attention_out / 10, mlp_norm=last.mlp_norm,
                                 gate_up=last.gate_up, down=last.down / 10, qkv_bias=last.qkv_bias)
  return eagle.EagleHead(fuse=fuse, fuse_bias=jnp.zeros((c.width,), fuse.dtype), layers=(layer,), input_norms=(),
                         ids=None if len(ids) == c.num_tokens else jnp.asarray(ids, jnp.int32), config=config)


def read(batch: batches.Batch, noise: float = 0.0, rng: np.random.Generator | None = None) -> batches.Batch:
  """The batch with the features that the head reads: the hidden states f16[B, S, D], with `noise` drawn by `rng`."""
  features = np.asarray(batch.hidden)
  if noise:
    drawn = rng.random(features.shape, np.float32) * 2 - 1
    features = (features + noise * drawn).astype(features.dtype)
  return dataclasses.replace(batch, features=features)


def loss(params: eagle.EagleHead, frozen: shifts.Frozen, ids: jax.Array, batch: batches.Batch, recipe: Recipe):
  """The loss of a batch of `read` and its metrics.

  Args:
    params: the head; its own ids are not looked at. ids: i32[U], the target's ids of the draft ids.

  Returns:
    The loss, the mean over passes; and a dictionary: "feature_loss_i", and "loss_i", that between laws, which is
    comparable with other heads', "accuracy_i" and "share_i", see `eagle3.loss`.
  """
  if params.embedding is not None:  # a copy of the target's, which is frozen
    params = params.replace(embedding=jax.lax.stop_gradient(params.embedding))
  hidden = batch.hidden.astype(jnp.float32)
  law = jax.nn.softmax(jnp.einsum("bsd,ud->bsu", hidden, frozen.head))
  drafted = shifts.is_drafted(ids, frozen.embedding.shape[0])
  total, metrics, track = 0.0, {}, shifts.Track()
  for i, (feature, logits) in enumerate(passes(params, frozen, batch, recipe.passes)):
    p, top, wanted = shifts.ahead(law, 1 + i), shifts.ahead(batch.top, 1 + i), shifts.ahead(hidden, 1 + i)
    log_q = jax.nn.log_softmax(logits)
    asked = shifts.asked(batch, 2 + i, recipe.answers_only)
    distance = losses.mean(losses.smooth_l1(feature, wanted), asked)
    value = losses.mean(losses.BY_NAME[recipe.loss](log_q, p), asked & drafted[top])
    total = total + recipe.feature_weight * distance + recipe.law_weight * value
    metrics |= {f"feature_loss_{i}": distance, f"loss_{i}": value,
                **track.add(i, asked, ids[jnp.argmax(log_q, -1)] == top)}
  return total / recipe.passes, metrics


def passes(params: eagle.EagleHead, frozen: shifts.Frozen, batch: batches.Batch,
           count: int) -> list[tuple[jax.Array, jax.Array]]:
  """The features f[B, S, D] that `count` passes make, and their logits f[B, S, U], see `own_passes`."""
  made = own_passes.run(params, frozen.embedding, batch, count, through=False)
  return [(feature, params.logits(feature, frozen.head)) for feature in made]
