"""The committed state of a recurrent target, and what its nodes leave in flight.

A state is as large as the keys and values of some hundred tokens, so there is none for a node: a node leaves the inputs
of its recurrence, outputs of a tree come from the committed state and those inputs (`models.ssd`), and `commit` carries
the state along the accepted path. A rejected node never enters it, so that there is nothing to take back.

The recurrence is that of Mamba-2 (arXiv 2405.21060): S <- exp(a) S + x b', with a decay a <= 0 and an input x of each
head, and a key b of each group of heads. In front of it is a causal convolution over W tokens, which needs the last
W - 1 of its own inputs.

Letters: B batch rows, T nodes, D greatest depth, G groups of R heads each, P head width, N state width, W tokens of the
convolution, C its channels.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class Nodes:
  """What the nodes of one pass leave in one layer. The second axis of every array is that of the nodes."""
  taps: jax.Array    # f[B, T, C]; inputs of the convolution
  inputs: jax.Array  # f32[B, T, G, R, P]; what enters the state, times its step
  keys: jax.Array    # f32[B, T, G, N]; the directions of the state that it enters
  decay: jax.Array   # f32[B, T, G, R]; logarithm of what is left of the state, 0 or less
  reach: jax.Array   # f32[B, T, G, R]; the sum of `decay` over a node and its ancestors in flight


@struct.dataclass
class RecurrentInFlight:
  """What the nodes of one forward pass leave, one entry a layer. Implements `cache.Block`."""
  layers: tuple[Nodes, ...]

  @property
  def nodes(self) -> int:
    """T."""
    return self.layers[0].taps.shape[1]

  def take(self, path: jax.Array) -> "RecurrentInFlight":
    """The nodes `path` i32[B, D + 1] of every row, in that order."""
    pick = lambda x: jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1)
    return jax.tree.map(pick, self)

  def put(self, block: "RecurrentInFlight", place: jax.Array) -> "RecurrentInFlight":
    """With the nodes of `block` at `place` i32 and behind it."""
    write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), place, 1)
    return jax.tree.map(write, self, block)

  def narrow(self, width: int) -> "RecurrentInFlight":
    """The first `width` nodes."""
    return jax.tree.map(lambda x: x[:, :width], self)

  def widen(self, width: int) -> "RecurrentInFlight":
    """Padded to `width` nodes, with zeros."""
    return jax.tree.map(lambda x: jnp.pad(x, [(0, width - x.shape[1] if i == 1 else 0) for i in range(x.ndim)]), self)


@struct.dataclass
class LayerState:
  """What one layer keeps of the committed tokens, however many they are."""
  state: jax.Array  # f32[B, G, R, P, N]
  tail: jax.Array   # f[B, W - 1, C]; the last inputs of the convolution, the latest last; 0 in front of the text


@struct.dataclass
class RecurrentCache:
  """Committed state. Implements `cache.Cache`; `slots` bounds the text's length and is no size of any array."""
  layers: tuple[LayerState, ...]
  length: jax.Array  # i32[B]; committed tokens of each row
  slots: int = struct.field(pytree_node=False)

  @property
  def cross(self) -> None:
    """There is no encoder."""
    return None

  def commit(self, block: RecurrentInFlight, count: jax.Array) -> "RecurrentCache":
    """Carries every row along the first `count` i32[B] nodes of a block (already in path order)."""
    chex.assert_equal_shape([self.length, count])
    layers = tuple(carry(*pair, count) for pair in zip(self.layers, block.layers, strict=True))
    return self.replace(layers=layers, length=self.length + count)

  def empty_block(self, nodes: int) -> RecurrentInFlight:
    """Room for `nodes` nodes that are in flight; which of them are seen is up to the mask."""
    return RecurrentInFlight(tuple(_empty_nodes(layer, nodes) for layer in self.layers))

  def of_layers(self, layers: tuple[int, ...]) -> "RecurrentCache":
    """The same committed tokens, of some layers."""
    return self.replace(layers=tuple(self.layers[i] for i in layers))

  def grow(self, slots: int) -> "RecurrentCache":
    """The same content, for texts of `slots` tokens."""
    if slots < self.slots:
      raise ValueError(f"a cache of {self.slots} slots cannot become one of {slots}")
    return self.replace(slots=slots)


def carry(layer: LayerState, nodes: Nodes, count: jax.Array) -> LayerState:
  """One layer's state behind the first `count` i32[B] of T nodes that follow each other.

  In closed form: what node i brings in decays by the nodes behind it. The sums of their logarithms are added up from
  the end, so that none is a difference of two large numbers, and all exponents are 0 or less.
  """
  counted = jnp.arange(nodes.decay.shape[1], dtype=jnp.int32)[None] < count[:, None]
  own = lambda x: jnp.where(counted.reshape(*counted.shape, *[1] * (x.ndim - 2)), x, 0)
  decay, keys = own(nodes.decay), own(nodes.keys)
  onwards = jnp.cumsum(decay[:, ::-1], axis=1)[:, ::-1]  # of a node and those behind it
  behind = jnp.pad(onwards[:, 1:], [(0, 1 if i == 1 else 0) for i in range(onwards.ndim)])
  inputs = own(nodes.inputs * jnp.exp(behind)[..., None])
  new = jnp.einsum("btgrp,btgn->bgrpn", inputs, keys, precision=jax.lax.Precision.HIGHEST)
  state = jnp.exp(onwards[:, 0])[..., None, None] * layer.state + new
  return LayerState(state=state, tail=_shifted(layer.tail, nodes.taps, count))


def empty(batch: int, slots: int, layers: int, *, groups: int, heads: int, head_width: int, state_width: int,
          taps: int, channels: int, dtype) -> RecurrentCache:
  """A cache with nothing committed.

  Args:
    batch: B. slots: greatest length of a text. layers: how many. groups: G. heads: G * R. head_width: P.
    state_width: N. taps: W - 1. channels: C.
    dtype: of the convolution's inputs.
  """
  one = lambda: LayerState(
      state=jnp.zeros((batch, groups, heads // groups, head_width, state_width), jnp.float32),
      tail=jnp.zeros((batch, taps, channels), dtype))
  return RecurrentCache(layers=tuple(one() for _ in range(layers)), length=jnp.zeros((batch,), jnp.int32), slots=slots)


def _shifted(tail, taps, count):
  """The last W - 1 of the tail and the counted nodes behind it."""
  text = jnp.concatenate([tail, taps.astype(tail.dtype)], axis=1)
  place = count[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
  return jnp.take_along_axis(text, place[:, :, None], axis=1)


def _empty_nodes(layer, nodes):
  batch, groups, heads, width, size = layer.state.shape
  zeros = lambda *shape: jnp.zeros((batch, nodes, *shape), jnp.float32)
  return Nodes(taps=jnp.zeros((batch, nodes, layer.tail.shape[2]), layer.tail.dtype), keys=zeros(groups, size),
               inputs=zeros(groups, heads, width), decay=zeros(groups, heads), reach=zeros(groups, heads))
