"""What EAGLE's draft heads share: entries of a feature and the token behind it, and recursion on their own output.

Entry t of a text joins the target's feature at token t with the embedding of token t + 1; the head predicts token t + 2
from it. What it computes of a drafted token takes the feature's place in the next entry.

Letters: B batch rows, T entries, E width of the head, U draft ids, V target vocabulary.
"""
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import layers


class RecurrentHead:
  """A mixin for heads with an `apply` over entries, whose attention is up to the caller.

  They have `config` with `shape`, `max_context` and `draft_vocab`, `ids` i32[U] or None, `embedding` f[V, E] or None
  for the target's, `depth`, how many layers they are, and `features`, the layers of the target that are read: none for
  what stands behind its final norm.
  """
  shares_head = False  # whether `logits` takes rows of the target's head

  def embed(self, target_embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    """f[B, T, E] of `tokens` i32[B, T]."""
    table = target_embedding if self.embedding is None else self.embedding
    return jnp.take(table, tokens, axis=0, mode="clip")

  def init_cache(self, batch: int, slots: int) -> cache_lib.KVCache:
    """An empty cache of its layers."""
    s = self.config.shape
    return cache_lib.empty_cache(batch, self.depth, s.kv_heads, slots, s.head_width, self.fuse.dtype)

  def forward(self, embedded, feature, positions, mask, cache, *, before=None):
    """`apply` while decoding: entries see the committed cache and in flight what `mask` allows, as in
    `models.base.Target.forward`.

    Returns:
      hidden, the feature that recurs, and the entries' in-flight block.
    """
    visible = jnp.arange(cache.slots)[None] < cache.length[:, None]

    def attends(layer):
      def attend(query, keys, values):
        if before is not None:
          keys = jnp.concatenate([before.keys[layer].astype(keys.dtype), keys], axis=3)
          values = jnp.concatenate([before.values[layer].astype(values.dtype), values], axis=2)
        return layers.attend(query, cache.keys[layer], cache.values[layer], keys, values, visible, mask)
      return attend

    return self.apply(embedded, feature, positions, attends)


def project(head: jax.Array, hidden: jax.Array) -> jax.Array:
  """f32[B, T, U] of `hidden` f[B, T, E] with a head f[U, E]."""
  out = as_rows(layers.linear(head, as_columns(hidden)), hidden.shape[:2]).astype(jnp.float32)
  return jax.lax.optimization_barrier(out)  # turned from columns once, not once for every reader


def as_columns(rows: jax.Array) -> jax.Array:
  """f[B, T, E] -> f[E, B * T]."""
  return rows.reshape(-1, rows.shape[-1]).T


def as_rows(columns: jax.Array, lead: tuple[int, ...]) -> jax.Array:
  """f[E, B * T] -> f[B, T, E]; `lead` is (B, T)."""
  return columns.T.reshape(*lead, columns.shape[0])
