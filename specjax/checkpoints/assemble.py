"""From the tensors of a checkpoint to a decoder's fused matrices, whatever the file format.

A format says how its tensors are named and how their rows are read (`TensorSource`). This module knows where
each one goes, refuses a missing, extra or misshapen tensor by name, and fills each destination a few rows at a time
straight into the memory that the weights keep: loading needs one copy of the weights and two small blocks of rows.
"""
import concurrent.futures
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import parts
from specjax.checkpoints.errors import CheckpointError
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights, LayerWeights

# Values converted at a time: half a megabyte in float32 stays in a core's cache, and makes each numpy call long enough
# that two threads do not wait for the interpreter lock (measured: 64k values lose a third, 1M half).
_CHUNK_VALUES = 1 << 17
_THREADS = 2
# XLA on CPU adopts a numpy buffer without a copy when it starts on this boundary.
_ALIGNMENT = 64


class TensorSource(Protocol):
  """An open checkpoint. `rows` is called from several threads at once.

  Attributes:
    path: for messages.
    shapes: name -> row-major shape of every tensor of the checkpoint.
  """
  path: object
  shapes: Mapping[str, tuple[int, ...]]

  def rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Rows start to stop of a tensor: f[stop - start, ...] in any floating dtype; raises CheckpointError."""


@dataclasses.dataclass(frozen=True)
class Place:
  """Where one tensor goes: rows `start` onwards of `field` (of `layer`, a number or another name, or of the model as a
  whole when None).

  Attributes:
    shape: as it is stored.
    interleaved_heads: above 0: the two halves of each head's rotary pairs are stored interleaved.
    by_head: above 0: query, key and value of a head are stored one behind the other, head after head (GPT-NeoX).
    transposed: stored [in, out] (GPT-2).
    added: to every value (Gemma stores the weights of norms less 1).
    stacked: above 0: the rows of the field are those of so many experts, one expert behind the other.
    half: 0 or 1: it is that half of the second axis, over all of the first (GGUF: gates of all experts, and ups).
  """
  field: str
  layer: Any
  start: int
  shape: tuple[int, ...]
  interleaved_heads: int = 0
  by_head: int = 0
  transposed: bool = False
  added: float = 0.0
  stacked: int = 0
  half: int | None = None

  @property
  def kept(self) -> tuple[int, ...]:
    """The shape that it has in its place."""
    return self.shape[::-1] if self.transposed else self.shape


def places(config: DecoderConfig, names: Mapping[str, str], *, interleaved: bool = False, by_head: bool = False,
           transposed: bool = False, norm_offset: float = 0.0) -> dict[str, Place]:
  """The table of a decoder: tensor name -> place, in the order in which the rows of a destination follow each other.

  Args:
    config: of the decoder; it says which parts there are (see `parts`).
    names: part -> name of the tensor, `{}` for the layer's number, and a second one for the expert's. A name for "qkv",
      "qkv_bias", "gate_up", "experts_gate_up" or "experts_down" says that its parts are stored as one; one for
      "experts_gate" that they are for all experts, gates and ups apart.
    interleaved: query and key rows are stored for even-odd rotary pairs and go to the half layout.
    by_head, transposed: of fused query, key and value rows, and of the matrices of layers; see `Place`.
    norm_offset: `Place.added` of norms.

  Returns:
    Every tensor that the checkpoint must hold.
  """
  table = {}
  for layer in (None, *range(config.layers)):
    mixed = layer is not None and config.mixed(layer)
    for part, field, start, shape in parts.parts(config, names, outside=layer is None, mixed=mixed):
      part, _, expert = part.partition(".")
      heads = {"query": config.heads, "key": config.kv_heads}.get(part.removesuffix("_bias"), 0) if interleaved else 0
      table[names[part].format(layer, expert)] = Place(
          field, layer, start, shape[::-1] if transposed and layer is not None else shape, interleaved_heads=heads,
          by_head=config.heads if by_head and field in ("qkv", "qkv_bias") else 0,
          transposed=transposed and layer is not None and len(shape) == 2,
          added=norm_offset if field.endswith("norm") else 0.0,
          stacked=config.moe.experts if expert else 0, half={"experts_gate": 0, "experts_up": 1}.get(part))
  return table


def half_layout_rows(heads: int, rows: int) -> np.ndarray:
  """Destination row of each stored row when rotary pairs are stored interleaved: i64[rows].

  Stored row (head, pair, part) belongs at (head, part, pair): part 0 is a head's first half, part 1 its second.
  """
  return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def grouped_rows(heads: int, rows: int) -> np.ndarray:
  """Destination row of each stored row when every head stores its query, key and value together: i64[rows]."""
  return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)


def check(table: Mapping[str, Place], source: TensorSource, *, ignored=frozenset(), hints: Mapping[str, str] = {}):
  """Raises CheckpointError naming the first tensor that is missing, extra or misshapen.

  Args:
    table: what must be there.
    source: what is there.
    ignored: names that may be there and are not read.
    hints: name -> what an extra tensor of that name means, for the message.
  """
  for name, place in table.items():
    if name not in source.shapes:
      raise CheckpointError(f"{source.path}: tensor {name!r} is missing (shape {place.shape} expected): the checkpoint "
                            "is incomplete or of another family than its configuration says")
    if tuple(source.shapes[name]) != place.shape:
      raise CheckpointError(f"{source.path}: tensor {name!r} has shape {tuple(source.shapes[name])}; the configuration "
                            f"asks for {place.shape}")
  for name in source.shapes:
    if name not in table and name not in ignored:
      why = hints.get(name, "nothing of this family uses it, so the model would not be the one that was saved")
      raise CheckpointError(f"{source.path}: extra tensor {name!r} of shape {tuple(source.shapes[name])}: {why}")


def check_equal(source: TensorSource, name: str, other: str) -> None:
  """Raises CheckpointError unless two tensors of one checkpoint are equal, shapes included."""
  shape = tuple(source.shapes[name])
  if shape != tuple(source.shapes[other]):
    raise CheckpointError(f"{source.path}: tensor {name!r} has shape {shape}; it is declared to be {other!r}, which "
                          f"has {tuple(source.shapes[other])}")
  for start, stop in _chunks(shape):
    if not np.array_equal(source.rows(name, start, stop), source.rows(other, start, stop)):
      raise CheckpointError(f"{source.path}: tensor {name!r} differs from {other!r} (rows {start} to {stop}) although "
                            "the configuration ties them: set tie_word_embeddings to false, or drop the tensor")


def assemble(config: DecoderConfig, table: Mapping[str, Place], source: TensorSource,
             dtype=jnp.float32) -> DecoderWeights:
  """Reads every tensor of a checked table into its place.

  Args:
    config: of the decoder.
    table: from `places`; `check` has passed.
    source: the open checkpoint.
    dtype: of the weights kept.

  Returns:
    The weights, on the default device. On CPU they share memory with numpy buffers that nobody else holds.

  Raises:
    CheckpointError: a tensor cannot be read.
  """
  built = read(table, source, dtype)
  layers = tuple(
    LayerWeights(**{field.name: built.get((layer, field.name)) for field in dataclasses.fields(LayerWeights)})
    for layer in range(config.layers))
  outside = {field.name: built.get((None, field.name)) for field in dataclasses.fields(DecoderWeights)}
  return DecoderWeights(**(outside | {"layers": layers}))


def read(table: Mapping[str, Place], source: TensorSource, dtype) -> dict[tuple[Any, str], jax.Array]:
  """The fields of a checked table by (layer, field); arguments and errors as in `assemble`."""
  # One block of memory for a layer: large enough for the system's huge pages, which halve the cost of touching it.
  blocks = {}
  for name, place in table.items():
    key = place.field if place.layer is None else place.layer
    blocks.setdefault(key, {}).setdefault((place.layer, place.field), []).append((name, place))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    # The largest (the embedding, the head) come first, so that no thread is left alone with one at the end.
    built = {}
    for block in pool.map(lambda fields: _build_block(fields, source, dtype), blocks.values()):
      built.update(block)
  return built


def _build_block(fields, source, dtype):
  """Fills the destinations of one block: {key: [(tensor name, place), ...]} -> {key: array on the device}."""
  shapes = {}
  for key, tensors in fields.items():
    last = tensors[-1][1]
    shapes[key] = last.start + last.kept[0], *last.kept[1:]
    if last.half is not None:
      shapes[key] = last.kept[0], 2 * last.kept[1], *last.kept[2:]
  buffers = dict(zip(shapes, _aligned_empty(shapes.values(), dtype)))
  for key, tensors in fields.items():
    for name, place in tensors:
      _fill(buffers[key][place.start:place.start + place.kept[0]], source, name, place)
  for key, tensors in fields.items():
    if experts := tensors[0][1].stacked:
      buffers[key] = buffers[key].reshape(experts, -1, buffers[key].shape[1])
  return {key: jax.device_put(buffer, may_alias=True) for key, buffer in buffers.items()}


def _fill(target: np.ndarray, source: TensorSource, name: str, place: Place) -> None:
  order = None
  if place.half is not None:
    target = np.split(target, 2, axis=1)[place.half]
  if place.interleaved_heads:
    order = half_layout_rows(place.interleaved_heads, place.shape[0])
  elif place.by_head:
    order = grouped_rows(place.by_head, place.shape[0])
  for start, stop in _chunks(place.shape):
    rows = source.rows(name, start, stop)
    if place.added:
      rows = rows.astype(np.float32) + place.added
    if place.transposed:
      target[:, start:stop] = rows.T
    else:
      target[slice(start, stop) if order is None else order[start:stop]] = rows


def _chunks(shape):
  step = max(1, _CHUNK_VALUES // math.prod(shape[1:]))
  return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _aligned_empty(shapes, dtype) -> list[np.ndarray]:
  """Uninitialised arrays in one block of memory, each starting on the alignment."""
  dtype, shapes = np.dtype(dtype), list(shapes)
  sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
  raw = np.empty(sum(sizes) + _ALIGNMENT, np.uint8)
  at = -raw.ctypes.data % _ALIGNMENT
  found = []
  for shape, size in zip(shapes, sizes):
    found.append(raw[at:at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape))
    at += size
  return found
