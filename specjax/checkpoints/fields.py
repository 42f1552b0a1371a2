"""One field of the weights: which tensors of a checkpoint it is made of, and how any box of it is filled from them.

`Place.origins` alone says which stored value each value of a field is. All else follows from it: a box of a field is
looked up there, and what is stored of it is read in runs, a few rows at a time, and nothing beside it.
"""
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

# Values converted at a time: half a megabyte in float32 stays in a core's cache, and makes each numpy call long enough
# that two threads do not wait for the interpreter lock (measured: 64k values lose a third, 1M half).
_CHUNK_VALUES = 1 << 17

Box = tuple[tuple[int, int], ...]  # of an array: start and stop along each axis


class TensorSource(Protocol):
  """An open checkpoint. `rows` is called from several threads at once.

  Attributes:
    path: for messages.
    shapes: name -> row-major shape of every tensor of the checkpoint.
  """
  path: object
  shapes: Mapping[str, tuple[int, ...]]

  def rows(self, name: str, start: int, stop: int, within: tuple[slice, ...] = ()) -> np.ndarray:
    """Rows start to stop of a tensor, and of each no more than `within` says, a slice with start and stop for every
    further axis: f[stop - start, ...] in any floating dtype; raises CheckpointError. `within` is given only where a
    field is filled in part, and then no other bytes should be read."""


class Origin(NamedTuple):
  """Where the values along one axis of a field come from in one tensor.

  Attributes:
    axis: of the tensor as it is stored; None where the tensor has no such axis and lies at one index of it.
    index: i64[size of the field's axis]; the index along `axis` that is stored, -1 for what is not of this tensor.
  """
  axis: int | None
  index: np.ndarray


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
    skipped: so many rows in front are not kept (BART's positions).
    squeezed: an axis of one index that is not kept.
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
  skipped: int = 0
  squeezed: int | None = None

  @property
  def axes(self) -> tuple[int, ...]:
    """The stored axes that are kept, in the order that they have in the field."""
    kept = tuple(axis for axis in range(len(self.shape)) if axis != self.squeezed)
    return kept[::-1] if self.transposed else kept

  @property
  def kept(self) -> tuple[int, ...]:
    """The shape that it has in its place."""
    rows, *rest = (self.shape[axis] for axis in self.axes)
    return rows - self.skipped, *rest

  def origins(self, shape: tuple[int, ...]) -> tuple[Origin, ...]:
    """What is stored of each axis of a field of that shape."""
    index = [np.arange(size) for size in self.kept]
    if self.interleaved_heads:
      index[0] = interleaved_rows(self.interleaved_heads, len(index[0]))
    elif self.by_head:
      index[0] = rows_by_head(self.by_head, len(index[0]))
    index[0] = index[0] + self.skipped
    axes, first = self.axes, [0] * len(index)
    if self.stacked:
      expert, start = divmod(self.start, shape[1])
      axes, index, first = (None, *axes), [np.zeros(1, np.int64), *index], [expert, start, *first[1:]]
    elif self.half is not None:
      first[1] = self.half * len(index[1])
    else:
      first[0] = self.start
    found = []
    for axis, stored, start, size in zip(axes, index, first, shape, strict=True):
      whole = np.full(size, -1)
      whole[start:start + len(stored)] = stored
      found.append(Origin(axis, whole))
    return tuple(found)


Tensors = Sequence[tuple[str, Place]]  # of one field, by name, in the order in which their rows follow each other


def interleaved_rows(heads: int, rows: int) -> np.ndarray:
  """Stored row of each row when rotary pairs are stored interleaved: i64[rows].

  Row (head, part, pair) is stored at (head, pair, part): part 0 is a head's first half, part 1 its second.
  """
  return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def rows_by_head(heads: int, rows: int) -> np.ndarray:
  """Stored row of each row when every head stores its query, key and value together: i64[rows]."""
  return np.arange(rows).reshape(heads, 3, -1).swapaxes(0, 1).reshape(-1)


def shape(tensors: Tensors) -> tuple[int, ...]:
  """The shape of the field that tensors make."""
  last = tensors[-1][1]
  rows, *rest = last.kept
  if last.stacked:
    return last.stacked, (last.start + rows) // last.stacked, *rest
  if last.half is not None:
    return rows, 2 * rest[0], *rest[1:]
  return last.start + rows, *rest


class Order(NamedTuple):
  """Another order of a field along one axis, in which indices may stand more than once.

  Attributes:
    axis: of the field.
    index: i64[size]; which index of the field as the tensors make it stands there.
  """
  axis: int
  index: np.ndarray

  def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Of a field of shape `whole` in this order."""
    return *whole[:self.axis], len(self.index), *whole[self.axis + 1:]


def fill(target: np.ndarray, box: Box, source: TensorSource, tensors: Tensors, order: Order | None = None) -> None:
  """Fills an array with a box of the field that tensors make, rounded to its dtype.

  Args:
    target: f[...]; its shape is that of the box. Values that no tensor holds become zeros.
    box: of the field.
    source: of the tensors.
    tensors: of the field, all of them.
    order: of the field, if it is another than that of the tensors.

  Raises:
    CheckpointError: a tensor cannot be read.
  """
  whole = shape(tensors)
  if sum(math.prod(place.kept) for _, place in tensors) < math.prod(whole):
    target[...] = 0
  for name, place in tensors:
    origins = list(place.origins(whole))
    if order is not None:
      origins[order.axis] = origins[order.axis]._replace(index=origins[order.axis].index[order.index])
    _copy(target, box, source, name, place, origins)


def chunks(start: int, stop: int, row_values: int) -> list[tuple[int, int]]:
  """Start and stop of pieces of some rows that have so many values each, of a size that is good to convert."""
  step = max(1, _CHUNK_VALUES // row_values)
  return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def _copy(target, box, source, name, place, origins):
  """What one tensor holds of a box."""
  runs = {} if place.squeezed is None else {place.squeezed: [_Run(0, 1, None)]}  # by stored axis
  for origin, (start, stop) in zip(origins, box, strict=True):
    inside = origin.index[start:stop]
    to = np.flatnonzero(inside >= 0)
    if not to.size:
      return
    if origin.axis is None:
      target = target[to[0]]
    else:
      to = to[np.argsort(inside[to], kind="stable")]
      runs[origin.axis] = _runs(inside[to], to)
  along = place.axes.index(0) if 0 in place.axes else None  # the axis of the field that stored rows become
  rows, *further = (runs[axis] for axis in range(len(place.shape)))
  for run, *within in itertools.product(rows, *further):
    values = math.prod(other.stop - other.start for other in within)
    whole = values == math.prod(place.shape[1:])
    slices = () if whole else (tuple(slice(other.start, other.stop) for other in within),)
    at = [(run, *within)[axis].to for axis in place.axes]
    for start, stop in chunks(run.start, run.stop, values):
      part = source.rows(name, start, stop, *slices)
      if place.added:
        part = part.astype(np.float32) + place.added
      if place.squeezed is not None:
        part = part.squeeze(place.squeezed)
      if along is not None:
        at[along] = run.part(start, stop)
      target[tuple(at)] = part.T if place.transposed else part


class _Run(NamedTuple):
  """Stored indices that follow each other, start to stop, and where they go: a slice where that is one, too."""
  start: int
  stop: int
  to: slice | np.ndarray | None

  def part(self, start, stop) -> slice | np.ndarray:
    """Where some of them go."""
    if isinstance(self.to, slice):
      move = self.to.start - self.start
      return slice(start + move, stop + move)
    return self.to[start - self.start:stop - self.start]


def _runs(stored, to) -> list[_Run]:
  """The runs of ascending indices, each of which goes `to` an index."""
  found, follows = [], np.diff(to) == 1
  starts = [0, *(np.flatnonzero(np.diff(stored) != 1) + 1).tolist()]
  for first, last in itertools.pairwise([*starts, len(stored)]):
    straight = follows[first:last - 1].all()
    found.append(_Run(int(stored[first]), int(stored[last - 1]) + 1,
                      slice(int(to[first]), int(to[first]) + last - first) if straight else to[first:last]))
  return found
