"""The committed key/value cache and the in-flight block beside it.

The cache holds committed tokens only: slots `0 .. length - 1` of a row are the keys and values of its first `length`
tokens. A forward pass reads it and returns the keys and values of its T nodes as an in-flight block; `commit` writes
the accepted path behind `length`. Nothing is ever rolled back, because rejected tokens were never written. That is
what keeps ragged batches, sliding windows and recurrent state safe.

Letters: B batch rows, K key/value heads, S slots, C head width, T nodes, D greatest depth, L layers.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class InFlight:
  """Keys and values of the nodes of one forward pass, one entry a layer."""
  keys: tuple[jax.Array, ...]    # L x [B, K, T, C]
  values: tuple[jax.Array, ...]  # L x [B, K, T, C]

  def take(self, path: jax.Array) -> "InFlight":
    """The nodes `path` i32[B, D + 1] of every row, in that order."""
    index = path[:, None, :, None]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2), self)


@struct.dataclass
class KVCache:
  """Committed keys and values. Layers are separate arrays, and so are keys and values: stacking copies them."""
  keys: tuple[jax.Array, ...]    # L x [B, K, S, C]
  values: tuple[jax.Array, ...]  # L x [B, K, S, C]
  length: jax.Array              # i32[B]; committed tokens of each row

  @property
  def slots(self) -> int:
    return self.keys[0].shape[2]

  def commit(self, block: InFlight, count: jax.Array) -> "KVCache":
    """Writes the first `count` i32[B] nodes of a block (already in path order) behind `length`.

    Slots at or beyond S are dropped, never clamped to the last one. A node that is not counted writes nothing.
    """
    chex.assert_equal_shape([self.length, count])
    nodes = block.keys[0].shape[2]
    if self.length.shape[0] == 1 and nodes < self.slots:
      write = _window_write(self.length, count, nodes, self.slots)
    else:
      write = _scatter_write(self.length, count, nodes, self.slots)
    return KVCache(keys=tuple(map(write, self.keys, block.keys)), values=tuple(map(write, self.values, block.values)),
                   length=self.length + count)

  def grow(self, slots: int) -> "KVCache":
    """The same content in `slots` >= S slots."""
    if slots < self.slots:
      raise ValueError(f"a cache of {self.slots} slots cannot become one of {slots}")
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))
    return KVCache(keys=tuple(map(pad, self.keys)), values=tuple(map(pad, self.values)), length=self.length)


def _scatter_write(length, count, nodes, slots):
  index = jnp.arange(nodes, dtype=jnp.int32)[None]
  slot = jnp.where(index < count[:, None], length[:, None] + index, slots)
  row = jnp.arange(length.shape[0])[:, None]
  # Advanced indices around a slice put the indexed axes first: the written value is [B, T, K, C].
  return lambda buffer, new: buffer.at[row, :, slot].set(new.transpose(0, 2, 1, 3).astype(buffer.dtype), mode="drop")


def _window_write(length, count, nodes, slots):
  """One row: read the window, blend, write it back in place. A scatter of 60 arrays costs several times as much."""
  start = jnp.minimum(length[0], slots - nodes)
  node = jnp.arange(nodes, dtype=jnp.int32) - (length[0] - start)  # which node each slot of the window takes
  taken = ((node >= 0) & (node < count[0]))[None, None, :, None]

  def write(buffer, new):
    old = jax.lax.dynamic_slice_in_dim(buffer, start, nodes, axis=2)
    shifted = jnp.take(new, jnp.maximum(node, 0), axis=2)
    return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(taken, shifted.astype(buffer.dtype), old), start, axis=2)

  return write


def empty_cache(batch: int, layers: int, kv_heads: int, slots: int, head_width: int, dtype) -> KVCache:
  """A cache with nothing committed."""
  zeros = lambda: tuple(jnp.zeros((batch, kv_heads, slots, head_width), dtype) for _ in range(layers))
  return KVCache(keys=zeros(), values=zeros(), length=jnp.zeros((batch,), jnp.int32))
