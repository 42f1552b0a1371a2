"""The committed key/value cache and the in-flight block beside it.

The cache holds committed tokens only: slots `0 .. length - 1` of a row are the keys and values of its first `length`
tokens. A forward pass reads it and returns the keys and values of its T nodes as an in-flight block; `commit` writes
the accepted path behind `length`. Nothing is ever rolled back, because rejected tokens were never written. That is
what keeps ragged batches, sliding windows and recurrent state safe. A layer with a window of W tokens keeps a ring: the
token at position q lies in slot q mod W, of at most W slots (`models.windows` says what is seen of it).

A model with an encoder has a text that begins with the encoder's inputs: `length` counts them, and what the decoder
reads of them, computed once a request, stands beside its own keys and values, in `cross`. The token at position q of
the text lies in slot q - inputs.

Letters: B batch rows, K key/value heads, S slots, C head width, T nodes, D greatest depth, L layers, W window, P slots
of the encoder's inputs.
"""
from typing import Protocol

import chex
from flax import struct
import jax
import jax.numpy as jnp


class Block(Protocol):
  """What a forward pass leaves of its T nodes: enough to see them later in the step, and to commit some of them."""

  @property
  def nodes(self) -> int:
    """T."""

  def take(self, path: jax.Array) -> "Block":
    """The nodes `path` i32[B, D + 1] of every row, in that order."""

  def put(self, block: "Block", place: jax.Array) -> "Block":
    """With the nodes of `block` at `place` i32 and behind it: how a drafter of several passes collects its nodes."""

  def narrow(self, width: int) -> "Block":
    """The first `width` nodes."""

  def widen(self, width: int) -> "Block":
    """Padded to `width` nodes, with zeros."""


class Cache(Protocol):
  """What a target keeps of the committed tokens, as the step and the proposers see it: `KVCache`, or the
  `recurrent_cache.RecurrentCache` of a target that carries a state forward.

  Attributes:
    length: i32[B]; committed tokens of each row.
    cross: what a decoder reads of its encoder, None where there is none.
  """
  length: jax.Array
  cross: "Cross | None"

  @property
  def slots(self) -> int:
    """Tokens of a text that there is room for."""

  def commit(self, block: Block, count: jax.Array) -> "Cache":
    """With the first `count` i32[B] nodes of a block (already in path order); a node that is not counted changes
    nothing."""

  def empty_block(self, nodes: int) -> Block:
    """Room for `nodes` nodes that are in flight; which of them are seen is up to the mask."""

  def of_layers(self, layers: tuple[int, ...]) -> "Cache":
    """The same committed tokens, of some layers."""

  def grow(self, slots: int) -> "Cache":
    """The same content, with room for `slots` tokens, no fewer than before."""


@struct.dataclass
class InFlight:
  """Keys and values of the nodes of one forward pass, one entry a layer. Implements `Block`."""
  keys: tuple[jax.Array, ...]    # L x [B, K, C, T]
  values: tuple[jax.Array, ...]  # L x [B, K, T, C]

  @property
  def nodes(self) -> int:
    """T."""
    return self.keys[0].shape[3]

  def take(self, path: jax.Array) -> "InFlight":
    """The nodes `path` i32[B, D + 1] of every row, in that order."""
    keys = lambda x: jnp.take_along_axis(x, path[:, None, None, :], axis=3)
    values = lambda x: jnp.take_along_axis(x, path[:, None, :, None], axis=2)
    return InFlight(keys=tuple(map(keys, self.keys)), values=tuple(map(values, self.values)))

  def put(self, block: "InFlight", place: jax.Array) -> "InFlight":
    """With the nodes of `block` at `place` i32 and behind it: how a drafter of several passes collects its nodes."""
    write = lambda axis: lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), place, axis)
    return InFlight(keys=tuple(map(write(3), self.keys, block.keys)),
                    values=tuple(map(write(2), self.values, block.values)))

  def narrow(self, width: int) -> "InFlight":
    """The first `width` nodes."""
    return InFlight(keys=tuple(x[..., :width] for x in self.keys),
                    values=tuple(x[..., :width, :] for x in self.values))

  def widen(self, width: int) -> "InFlight":
    """Padded to `width` nodes, with zeros."""
    pad = lambda axis: lambda x: _padded(x, axis, width)
    return InFlight(keys=tuple(map(pad(3), self.keys)), values=tuple(map(pad(2), self.values)))


@struct.dataclass
class Resume:
  """A forward pass whose lower layers have been run already, by a drafter that shares them with the target."""
  hidden: jax.Array  # f[B, T, E]; the residual stream that enters the first layer that is left
  in_flight: Block   # of the layers below it

  def narrow(self, width: int) -> "Resume":
    """Of the first `width` nodes."""
    return Resume(hidden=self.hidden[:, :width], in_flight=self.in_flight.narrow(width))

  def widen(self, width: int) -> "Resume":
    """Padded to `width` nodes, with zeros."""
    return Resume(hidden=_padded(self.hidden, 1, width), in_flight=self.in_flight.widen(width))


@struct.dataclass
class Cross:
  """Keys and values that a decoder reads of an encoder's outputs. Nothing of them changes once they are there."""
  keys: tuple[jax.Array, ...]    # L x [B, K, C, P]
  values: tuple[jax.Array, ...]  # L x [B, K, P, C]
  inputs: jax.Array              # i32[B]; the encoder's tokens of each row, 0 until they have been read
  skipped: int = struct.field(pytree_node=False, default=0)  # slots less than the text has: no row has fewer inputs

  @property
  def slots(self) -> int:
    """P."""
    return self.keys[0].shape[3]

  def fill(self, keys, values, inputs: jax.Array) -> "Cross":
    """Computed of N <= P inputs: L x f[B, K, C, N] and f[B, K, N, C]; `inputs` i32[B] of them are real."""
    put = lambda old, new: jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0,) * 4)
    return self.replace(keys=tuple(map(put, self.keys, keys)), values=tuple(map(put, self.values, values)),
                        inputs=inputs)


@struct.dataclass
class KVCache:
  """Committed keys and values. Implements `Cache`. Layers are separate arrays, and so are keys and values: stacking copies them.

  Keys are kept transposed, so that scores are a product over rows of both factors: XLA would otherwise transpose all
  of the cache in every step (BUILD.md, Speed).
  """
  keys: tuple[jax.Array, ...]    # L x [B, K, C, S]; of a layer with a window [B, K, C, min(W, S)]
  values: tuple[jax.Array, ...]  # L x [B, K, S, C]
  length: jax.Array              # i32[B]; committed tokens of each row
  windows: tuple[int | None, ...] = struct.field(pytree_node=False, default=())  # one a layer; () is None everywhere
  cross: Cross | None = None     # of a model with an encoder

  @property
  def slots(self) -> int:
    """Tokens of a text that there is room for: slots of the layer that has most of them."""
    return max(x.shape[3] for x in self.keys) + (0 if self.cross is None else self.cross.skipped)

  @property
  def written(self) -> jax.Array:
    """i32[B]; slots that hold a token: `length` without the encoder's inputs."""
    return self.length if self.cross is None else self.length - self.cross.inputs

  def commit(self, block: InFlight, count: jax.Array) -> "KVCache":
    """Writes the first `count` i32[B] nodes of a block (already in path order) behind `length`.

    Slots at or beyond S are dropped, never clamped to the last one. A node that is not counted writes nothing.
    """
    chex.assert_equal_shape([self.length, count])
    nodes, place, writers = block.nodes, self.written, {}

    def write(old, new, axis, window):
      slots = old.shape[axis]
      if (slots, window) not in writers:
        writers[slots, window] = _writer(place, count, nodes, slots, window)
      return writers[slots, window](old, new, axis)

    windows = self.windows or (None,) * len(self.keys)
    written = lambda axis, old, new: tuple(write(*layer, axis, window) for *layer, window in zip(
        old, new, windows, strict=True))
    return self.replace(keys=written(3, self.keys, block.keys), values=written(2, self.values, block.values),
                        length=self.length + count)

  def empty_block(self, nodes: int) -> InFlight:
    """Room for `nodes` nodes that are in flight; which of them are seen is up to the mask."""
    return InFlight(keys=tuple(jnp.zeros((*x.shape[:3], nodes), x.dtype) for x in self.keys),
                    values=tuple(jnp.zeros((*x.shape[:2], nodes, x.shape[3]), x.dtype) for x in self.values))

  def of_layers(self, layers: tuple[int, ...]) -> "KVCache":
    """The same committed tokens, of some layers."""
    pick = lambda values: tuple(values[i] for i in layers)
    cross = self.cross and self.cross.replace(keys=pick(self.cross.keys), values=pick(self.cross.values))
    return self.replace(keys=pick(self.keys), values=pick(self.values), cross=cross,
                        windows=tuple(self.windows[i] for i in layers) if self.windows else ())

  def grow(self, slots: int) -> "KVCache":
    """The same content in `slots` >= S slots."""
    if slots < self.slots:
      raise ValueError(f"a cache of {self.slots} slots cannot become one of {slots}")
    slots -= 0 if self.cross is None else self.cross.skipped

    def padded(x, axis, window):
      # A ring that has fewer than W slots has never begun anew, so its tokens stay where they are.
      more = (slots if window is None else min(slots, window)) - x.shape[axis]
      return jnp.pad(x, [(0, more if i == axis else 0) for i in range(4)])

    windows = self.windows or (None,) * len(self.keys)
    return self.replace(keys=tuple(padded(x, 3, w) for x, w in zip(self.keys, windows, strict=True)),
                        values=tuple(padded(x, 2, w) for x, w in zip(self.values, windows, strict=True)))


def _padded(x, axis, size):
  """`x` with zeros behind it, `size` long along an axis."""
  return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


def _writer(length, count, nodes, slots, window):
  """What writes the counted nodes into a layer of so many slots: (buffer, new, axis) -> buffer."""
  if window is not None and slots == window:
    # The last W only: two writes of one scatter to a slot have no order.
    wanted = lambda index: (index < count[:, None]) & (index >= count[:, None] - window)
    return _scatter_write(length, wanted, lambda place: place % window, nodes, slots)
  if length.shape[0] == 1 and nodes < slots:
    return _window_write(length, count, nodes, slots)
  return _scatter_write(length, lambda index: index < count[:, None], lambda place: place, nodes, slots)


def _scatter_write(length, wanted, slot_of, nodes, slots):
  index = jnp.arange(nodes, dtype=jnp.int32)[None]
  slot = jnp.where(wanted(index), slot_of(length[:, None] + index), slots)

  def write(buffer, new, axis):
    # Row by row for XLA too: with rows among the indices, a batch that is divided among devices would be gathered.
    place = (slice(None), slice(None)) if axis == 3 else (slice(None),)
    of_row = lambda buffer, new, slot: buffer.at[(*place, slot)].set(new, mode="drop")
    return jax.vmap(of_row)(buffer, new.astype(buffer.dtype), slot)

  return write


def _window_write(length, count, nodes, slots):
  """One row: read the window, blend, write it back in place. A scatter of 60 arrays costs several times as much."""
  start = jnp.minimum(length[0], slots - nodes)
  node = jnp.arange(nodes, dtype=jnp.int32) - (length[0] - start)  # which node each slot of the window takes
  taken = (node >= 0) & (node < count[0])

  def write(buffer, new, axis):
    old = jax.lax.dynamic_slice_in_dim(buffer, start, nodes, axis)
    shifted = jnp.take(new, jnp.maximum(node, 0), axis).astype(buffer.dtype)
    mask = jnp.expand_dims(taken, tuple(i for i in range(4) if i != axis))
    return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(mask, shifted, old), start, axis)

  return write


def empty_cache(batch: int, layers: int, kv_heads: int, slots: int, head_width: int, dtype,
                windows: tuple[int | None, ...] = ()) -> KVCache:
  """A cache with nothing committed; `windows` has one entry a layer, or none at all."""
  sizes = [slots if window is None else min(slots, window) for window in windows or (None,) * layers]
  return KVCache(keys=tuple(jnp.zeros((batch, kv_heads, head_width, size), dtype) for size in sizes),
                 values=tuple(jnp.zeros((batch, kv_heads, size, head_width), dtype) for size in sizes),
                 length=jnp.zeros((batch,), jnp.int32), windows=windows)
