"""The front matter of a GGUF file: metadata and where each tensor lies. No tensor is read here.

Own parser because `gguf.GGUFReader` makes several numpy views for every element of every array: 4.4 s for the token
list of SmolLM2, against 0.05 s here. Layout: the GGUF specification, versions 2 and 3, little endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""
import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from specjax.checkpoints.errors import CheckpointError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Value type number of the specification -> little-endian numpy type.
_SCALARS = {
  0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
  5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
  12: np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
  """One entry of the tensor table.

  Attributes:
    name: as written in the file.
    shape: row-major, so `[out, in]` for a matrix (the file stores the reverse order).
    kind: number of its storage type (`gguf.GGMLQuantizationType`); it may be one that nobody knows.
    offset: of its first byte from the start of the file.
  """
  name: str
  shape: tuple[int, ...]
  kind: int
  offset: int


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
  """Attributes: path, size (bytes of the file), metadata (key -> scalar, str, list[str] or array), tensors by name."""
  path: pathlib.Path
  size: int
  metadata: dict[str, Any]
  tensors: dict[str, GGUFTensor]


class _Cursor:
  """Reads forward in a buffer; running off its end means the file was cut."""

  def __init__(self, data, path):
    self.data, self.path, self.at = data, path, 0

  def take(self, count: int) -> bytes:
    end = self.at + count
    if end > len(self.data):
      raise CheckpointError(f"{self.path}: the file ends inside its header (at byte {len(self.data)}): it is "
                            "truncated; download it again")
    piece = self.data[self.at:end]
    self.at = end
    return piece

  def number(self, form: str):
    return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

  def text(self) -> str:
    return _decode(self.take(self.number("Q")))

  def texts(self, count: int) -> list[str]:
    # The hot loop of a start: two strings for each entry of the vocabulary. Plain slices beat take() four times.
    data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
    found = []
    try:
      for _ in range(count):
        begin = at + 8
        at = begin + unpack(data, at)[0]
        found.append(data[begin:at])
    except (struct.error, IndexError, OverflowError):
      at = len(data) + 1
    self.at = min(at, len(data))
    self.take(at - self.at)  # raises when the last string ran past the end
    return [_decode(piece) for piece in found]

  def value(self, kind: int, key: str):
    if kind in _SCALARS:
      return np.frombuffer(self.take(_SCALARS[kind].itemsize), _SCALARS[kind])[0].item()
    if kind == _STRING:
      return self.text()
    if kind == _ARRAY:
      inner, count = self.number("I"), self.number("Q")
      if inner == _STRING:
        return self.texts(count)
      if inner in _SCALARS:
        return np.frombuffer(self.take(_SCALARS[inner].itemsize * count), _SCALARS[inner])
      kind = inner
    raise CheckpointError(f"{self.path}: metadata key {key!r} has value type {kind}, which is not supported "
                          "(numbers, strings and flat arrays of them are): the file is damaged or too new")


def _decode(raw: bytes) -> str:
  return raw.decode("utf-8", errors="replace")


def read_header(path) -> GGUFHeader:
  """Parses the metadata and the tensor table of a GGUF file.

  Args:
    path: of the file.

  Returns:
    The header; every tensor is known to start on its alignment and inside the file. How long a tensor is depends on
    its storage type, which the reader of tensors checks.

  Raises:
    CheckpointError: no such file, not a GGUF file, a version that is not 2 or 3, one part of several, truncated,
      a key or tensor named twice, or an offset outside of the file.
  """
  path = pathlib.Path(path)
  try:
    size = path.stat().st_size
    with open(path, "rb") as file:
      magic = file.read(4)
      if magic != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}; pass a .gguf "
                              "file or a folder with config.json and *.safetensors")
      with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(_Cursor(data, path), size)
  except OSError as error:
    raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(cursor: _Cursor, size: int) -> GGUFHeader:
  path = cursor.path
  cursor.take(len(_MAGIC))
  version = cursor.number("I")
  if version not in (2, 3):
    raise CheckpointError(f"{path}: GGUF version {version} is not supported (2 and 3 are, little endian); "
                          "convert the model again with a current llama.cpp")
  tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
  metadata = {}
  for _ in range(key_count):
    key = cursor.text()
    if key in metadata:
      raise CheckpointError(f"{path}: metadata key {key!r} appears twice: the file is damaged")
    metadata[key] = cursor.value(cursor.number("I"), key)
  if metadata.get("split.count", 1) > 1:
    raise CheckpointError(f"{path}: is one of {metadata['split.count']} parts (key 'split.count'), which is not "
                          "supported: join them with llama-gguf-split --merge")
  table = [_tensor_entry(cursor) for _ in range(tensor_count)]

  alignment = metadata.get("general.alignment", 32)
  if not isinstance(alignment, int) or alignment < 1:
    raise CheckpointError(f"{path}: 'general.alignment' is {alignment!r}; it must be a positive whole number")
  start = -(-cursor.at // alignment) * alignment
  tensors = {}
  for name, shape, kind, offset in table:
    if name in tensors:
      raise CheckpointError(f"{path}: tensor {name!r} appears twice: the file is damaged")
    if offset % alignment:
      raise CheckpointError(f"{path}: tensor {name!r} starts at {offset}, which is not a multiple of the alignment "
                            f"{alignment}: the file is damaged")
    if start + offset > size:
      raise CheckpointError(f"{path}: tensor {name!r} starts at byte {start + offset} of {size}: the file is "
                            "truncated; download it again")
    tensors[name] = GGUFTensor(name, shape, kind, start + offset)
  return GGUFHeader(path, size, metadata, tensors)


def _tensor_entry(cursor: _Cursor):
  name, rank = cursor.text(), cursor.number("I")
  if not 1 <= rank <= 4:
    raise CheckpointError(f"{cursor.path}: tensor {name!r} has {rank} axes (1 to 4 are allowed): the file is damaged")
  shape = tuple(cursor.number("Q") for _ in range(rank))[::-1]
  if math.prod(shape) > 1 << 48:
    raise CheckpointError(f"{cursor.path}: tensor {name!r} claims shape {shape}: the file is damaged")
  return name, shape, cursor.number("I"), cursor.number("Q")
