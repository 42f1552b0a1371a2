"""Which token a draft head is asked for at which place: the shifts that every head's training shares.

Off by one they train well and draft badly (SpecForge's issues 424, 448 and 473), so they stand here once, and tests
compare them with what the step hands to proposers.

Letters: B sequences, S tokens, D width of the target, U draft ids, V vocabulary.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.training import batches
from specjax.training import losses


def ahead(x: jax.Array, by: int) -> jax.Array:
  """x[:, t + by] at t, of [B, S, ...]; zeros behind the end."""
  return jnp.pad(x[:, by:], ((0, 0), (0, by), *[(0, 0)] * (x.ndim - 2)))


def asked(batch: batches.Batch, by: int, answers_only: bool) -> jax.Array:
  """Where the token `by` places ahead is one to learn: in the text, and the target's own if `answers_only`. bool[B, S].

  The mask belongs to the label, not to the place that predicts it (SpecForge's issue 885).
  """
  label = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None] + by
  known = label < batch.length[:, None]
  return known & (label >= batch.start[:, None]) if answers_only else known


@struct.dataclass
class Frozen:
  """What the losses of heads that embed tokens read of the target."""
  embedding: jax.Array  # f[V, D]
  head: jax.Array       # f[U, D]; rows of the draft ids
  bias: jax.Array | None = None  # f32[U]; of their logits, for a target whose logits have one or that bans ids


def frozen(target, ids: np.ndarray) -> Frozen:
  """See `Frozen`; `ids` i32[U]."""
  return Frozen(embedding=target.weights.embedding, head=head_rows(target, ids), bias=_bias(target, ids))


def _bias(target, ids):
  bias, banned = getattr(target.weights, "logits_bias", None), getattr(target.config, "banned_ids", ())
  if bias is None and not banned:
    return None
  bias = jnp.zeros((len(ids),), jnp.float32) if bias is None else jnp.asarray(bias, jnp.float32)[np.asarray(ids)]
  # Finite, so that no loss multiplies 0 by an infinity.
  return jnp.where(np.isin(np.asarray(ids), banned), -1e9, bias)


def head_rows(target, ids: np.ndarray) -> jax.Array:
  """The target's head at `ids` i32[U], with what it scales hidden states by: f[U, D]."""
  rows = jnp.take(target.head, jnp.asarray(ids), axis=0)
  return rows * rows.shape[1] ** -0.5 if getattr(target.config, "scaled_head", False) else rows


def is_drafted(ids: jax.Array, vocab_size: int) -> jax.Array:
  """bool[V]: the ids that a head drafts from."""
  return jnp.zeros((vocab_size,), bool).at[ids].set(True)


class Track:
  """How often drafts are right, depth by depth, as a chain sees it."""

  def __init__(self):
    self._reached = self._right = None

  def add(self, depth: int, asked: jax.Array, hit: jax.Array) -> dict:
    """Metrics of the next depth: "accuracy" where all before it were right, "share" of the chains right up to it."""
    self._reached = asked if self._reached is None else self._reached & asked
    before = jnp.ones_like(self._reached) if self._right is None else self._right
    self._right = before & hit
    right = self._right.astype(jnp.float32)
    return {f"share_{depth}": losses.mean(right, self._reached),
            f"accuracy_{depth}": losses.mean(right, self._reached & before)}
