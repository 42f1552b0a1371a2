"""Training of a DFlash drafter: blocks of masks behind random anchors, all of a sequence in one pass.

DFlash (arXiv 2602.06036; SpecForge). An anchor is a token of the text that is known, as the pending one is: its block sees
the features of the tokens *before* it, itself, and the other places of its own block. Place j is asked for the token j
behind the anchor, whose law the target gives at the place before. The labels' offset and what a block sees are where the
published trainer went wrong (SpecForge's issues 427, 455 and 473: accuracy in training, none in drafting).

Letters: B sequences, S tokens, A anchors of each, J places of a block, F feature width, D width of the target, U draft
ids, K key/value heads, G query heads of each, C head width.
"""
import dataclasses

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import dflash
from specjax.models import draft_layer
from specjax.training import batches
from specjax.training import losses
from specjax.training import shifts
from specjax.training import starting_layers

_HIDDEN = -1e30


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a drafter is trained: place j weighs exp(-(j - 1) / gamma); see `eagle3.Recipe` for the others."""
  gamma: float = 4.0
  loss: str = "soft_ce"
  answers_only: bool = True


@struct.dataclass
class Anchored:
  """A batch and its anchors i32[B, A]."""
  batch: batches.Batch
  anchors: jax.Array


def anchored(batch: batches.Batch, count: int, rng: np.random.Generator, answers_only: bool) -> Anchored:
  """With `count` anchors a sequence, drawn where the token behind is one to learn; the first token is none."""
  low = np.maximum(batch.start - 1 if answers_only else np.zeros_like(batch.start), 1)
  high = np.maximum(batch.length - 1, low + 1)  # the last token has nothing behind it
  return Anchored(batch, rng.integers(low[:, None], high[:, None], (len(low), count)).astype(np.int32))


def init(target, ids: np.ndarray, features: tuple[int, ...], *, layers: int, block: int, mask_id: int, key: jax.Array,
         causal: bool = False) -> dflash.DFlashHead:
  """A drafter that starts from the target's last layers; the deepest feature passes as it is.

  Args:
    target: a `models.decoder.Decoder`. ids: i32[U], ascending. features: layers, the deepest last.
    mask_id: an id that texts do not hold.

  Raises:
    ValueError: the target has fewer layers.
  """
  c, w = target.config, target.weights
  if layers > c.layers:
    raise ValueError(f"a drafter of {layers} layers begins as the target's last ones, and it has {c.layers}: take "
                     "fewer (--head_layers)")
  last = starting_layers.last(target, layers)
  shape = starting_layers.shape(target)
  config = dflash.DFlashConfig(shape=shape, layers=layers, features=features, block=block, mask_id=mask_id,
                               vocab_size=c.num_tokens, draft_vocab=len(ids), max_context=c.max_context, causal=causal)
  fuse = 0.005 * jax.random.normal(key, (c.width, len(features) * c.width), w.embedding.dtype)
  fuse = fuse.at[:, -c.width:].add(jnp.eye(c.width, dtype=fuse.dtype))
  ones = jnp.ones((c.head_width,), w.embedding.dtype)
  # The target's queries and keys have sizes of their own; behind the norm by head a middling one, 1.5, is the start.
  made = [draft_layer.DraftLayer(qkv=layer.qkv, attention_out=layer.attention_out, mlp_norm=layer.mlp_norm,
                                 gate_up=layer.gate_up, down=layer.down, query_norm=ones * 1.5, key_norm=ones * 1.5)
          for layer in last]
  return dflash.DFlashHead(fuse=fuse, fused_norm=last[-1].attention_norm, layers=tuple(made),
                           input_norms=tuple(layer.attention_norm for layer in last), norm=w.final_norm,
                           ids=None if len(ids) == c.num_tokens else jnp.asarray(ids, jnp.int32), config=config)


def loss(params: dflash.DFlashHead, embedding: jax.Array, rows: jax.Array, ids: jax.Array, given: Anchored,
         recipe: Recipe):
  """The loss of a batch and its metrics, as of `eagle3.loss`.

  Args:
    embedding: f[V, D], the target's. rows: f[U, D], its head at `ids` i32[U].
  """
  hidden = blocks(params, embedding, given)
  logits = lambda i: jnp.einsum("bad,ud->bau", hidden[:, :, i + 1], rows)
  return over_depths(given, params.config.block - 1, logits, embedding.shape[0], rows, ids, recipe)


def over_depths(given: Anchored, count: int, logits, vocab_size: int, rows: jax.Array, ids: jax.Array, recipe,
                more=None):
  """The loss of the `count` tokens behind every anchor, and its metrics.

  Args:
    logits: i -> f[B, A, U], of the i-th of them, from 0 on. vocab_size: V. rows, ids: as of `loss`.
    more: (i, log_q f[B, A, U], p f[B, A, U]) -> f[B, A], what is added to the loss of each place; None for nothing.
  """
  batch = given.batch
  at = given.anchors[:, :, None] + jnp.arange(count, dtype=jnp.int32)  # [B, A, J]
  drafted = shifts.is_drafted(ids, vocab_size)
  total, weights, metrics, track = 0.0, 0.0, {}, shifts.Track()
  truth = pick(batch.hidden, at).astype(jnp.float32)  # gives the law of the token behind
  tops = pick(batch.top, at)
  for i in range(count):
    log_q = jax.nn.log_softmax(logits(i))
    p = jax.nn.softmax(jnp.einsum("bad,ud->bau", truth[:, :, i], rows))
    top, label = tops[:, :, i], at[:, :, i] + 1
    asked = label < batch.length[:, None]
    if recipe.answers_only:
      asked &= label >= batch.start[:, None]
    values = losses.BY_NAME[recipe.loss](log_q, p)
    values = values if more is None else values + more(i, log_q, p)
    value = losses.mean(values, asked & drafted[top])
    weight = float(np.exp(-i / recipe.gamma))
    total, weights = total + weight * value, weights + weight
    metrics |= {f"loss_{i}": value, **track.add(i, asked, ids[jnp.argmax(log_q, -1)] == top)}
  return total / weights, metrics


def blocks(params: dflash.DFlashHead, embedding: jax.Array, given: Anchored) -> jax.Array:
  """What the head makes logits of, at every place of every block: f[B, A, J, D]."""
  batch, anchors, size = given.batch, given.anchors, params.config.block
  place = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
  text = params.text(batch.features.astype(jnp.float32), place)
  at = anchors[:, :, None] + jnp.arange(size, dtype=jnp.int32)
  tokens = jnp.where(jnp.arange(size) == 0, pick(batch.tokens, at), params.config.mask_id)
  flat = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
  hidden = params.block(jnp.take(embedding, flat(tokens), axis=0), flat(at), lambda i: lambda query, keys, values: attend(
      query, keys, values, text.keys[i], text.values[i], anchors, params.config.causal))
  return hidden.reshape(*at.shape, -1)


def attend(query, keys, values, text_keys, text_values, anchors, causal):
  """A block sees the text before its anchor and its own places.

  Args:
    query: f[B, K, G, A * J, C], scaled. keys: f[B, K, C, A * J]. values: f[B, K, A * J, C].
    text_keys: f[B, K, C, S]. text_values: f[B, K, S, C]. anchors: i32[B, A].
  """
  count, kv, group, total, width = query.shape
  blocks = anchors.shape[1]
  size = total // blocks
  query = query.reshape(count, kv, group, blocks, size, width)
  text = jnp.einsum("bkgajc,bkcs->bkgajs", query, text_keys)
  before = jnp.arange(text_keys.shape[-1]) < anchors[:, :, None]                       # [B, A, S]
  text = jnp.where(before[:, None, None, :, None], text, _HIDDEN)
  own = jnp.einsum("bkgajc,bkcaf->bkgajf", query, keys.reshape(count, kv, width, blocks, size))
  if causal:
    own = jnp.where(jnp.tril(jnp.ones((size, size), bool)), own, _HIDDEN)
  weights = jax.nn.softmax(jnp.concatenate([text, own], -1), -1)
  out = jnp.einsum("bkgajs,bksc->bkgajc", weights[..., :text.shape[-1]], text_values)
  out += jnp.einsum("bkgajf,bkafc->bkgajc", weights[..., text.shape[-1]:], values.reshape(count, kv, blocks, size, width))
  return out.reshape(count, kv, group, total, width)


def pick(x: jax.Array, at: jax.Array) -> jax.Array:
  """x[B, S, ...] at places i32[B, A, J]; behind the end, the last one."""
  row = jnp.arange(x.shape[0])[:, None, None]
  return x[row, jnp.minimum(at, x.shape[1] - 1)]
