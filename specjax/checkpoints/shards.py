"""Weights that are made in their shardings: every process fills what its own devices hold, and reads nothing else."""
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.fields import Box
from specjax.checkpoints.fields import Order


class Reordered(NamedTuple):
  """A field that is kept in another order than that of its checkpoint, and its sharding then."""
  sharding: jax.sharding.Sharding
  order: Order


# (layer, field, shape) -> the sharding of that field of the weights, None for the default device. `layer` is a number,
# ("encoder", number) or ("decoder", number) where there is an encoder, and None for what is of no layer; `field` is the
# name that the weights have for it, with "cross_" in front for those of attention to the encoder.
Placement = Callable[[Any, str, tuple[int, ...]], jax.sharding.Sharding | Reordered | None]

class ByConfig(Protocol):
  """A placement of decoders that depends on how many heads and experts there are."""

  def of(self, config) -> Placement:
    """Of a `models.config.DecoderConfig`, as its checkpoint has it."""


# XLA on CPU adopts a numpy buffer without a copy when it starts on this boundary.
_ALIGNMENT = 64


def sharding(place: Placement | None, layer: Any, field: str,
             shape: tuple[int, ...]) -> tuple[jax.sharding.Sharding | None, Order | None]:
  """What `place` says of a field; raises CheckpointError where the field cannot have it."""
  found, order = None if place is None else place(layer, field, shape), None
  if isinstance(found, Reordered):
    found, order = found
    shape = order.shape(shape)
  where = f"field {field!r} of " + ("the model" if layer is None else f"layer {layer!r}")
  if not isinstance(found, jax.sharding.Sharding | None):
    raise CheckpointError(f"{where}: place() gave {found!r}; a jax.sharding.Sharding or None is expected")
  try:
    if found is not None:
      found.shard_shape(shape)
  except ValueError as error:
    raise CheckpointError(f"{where}, of shape {shape}, cannot be divided as place() says ({error}): give it a sharding "
                          "that divides the shape, or a replicated one") from error
  return found, order


def boxes(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...]) -> dict[Box, list[jax.Device | None]]:
  """The boxes of an array that this process's devices hold, each once, and the devices; None is the default device."""
  if sharding is None:
    return {tuple((0, size) for size in shape): [None]}
  found = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    box = tuple(along.indices(size)[:2] for along, size in zip(index, shape, strict=True))
    found.setdefault(box, []).append(device)
  return found


def buffers(wanted: list[Box], dtype) -> list[np.ndarray]:
  """Arrays for boxes, with nothing in them, in one block of memory, each starting where XLA adopts it."""
  dtype, shapes = np.dtype(dtype), [tuple(stop - start for start, stop in box) for box in wanted]
  sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
  raw = np.empty(sum(sizes) + _ALIGNMENT, np.uint8)
  at = -raw.ctypes.data % _ALIGNMENT
  found = []
  for shape, size in zip(shapes, sizes):
    found.append(raw[at:at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape))
    at += size
  return found


def array(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...], filled: Mapping[Box, np.ndarray],
          dtype) -> jax.Array:
  """The array of which this process's `boxes` are filled. On CPU it shares their memory, so nobody may write there."""
  parts = [jax.device_put(filled[box], device=device, may_alias=True)
           for box, devices in boxes(sharding, shape).items() for device in devices]
  return parts[0] if sharding is None else jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)


def put(place: Placement | None, layer: Any, field: str, value: np.ndarray) -> jax.Array:
  """A field that every process has at hand, where `place` says."""
  found, order = sharding(place, layer, field, value.shape)
  value = value if order is None else value.take(order.index, order.axis)
  return jax.make_array_from_callback(value.shape, found, value.__getitem__) if found else jax.device_put(value)
