"""A part of a row-major array in a file: the bytes that hold it, read and no others.

Files are read with `pread`, not mapped: pages of a mapping count as the process's memory, a mapping of a file that
shrinks kills the process, and the system reads much beside a page that is touched (measured: all of a matrix of rows of
57 kB for an eighth of its columns).
"""
import itertools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
  """Some rows of an array, whole or in part, as stretches of equal length.

  Attributes:
    shape: of the part.
    starts: of the stretches, in bytes from the first of the array.
    length: of each, in bytes.
    values: that each holds.
    spare: how many values in front of each are not of the part, since whole blocks are read.
  """
  shape: tuple[int, ...]
  starts: list[int]
  length: int
  values: int
  spare: int

  def read(self, file: int, offset: int) -> bytes:
    """The stretches one behind the other, of an array that begins at a byte of an open file. Raises EOFError."""
    found = []
    for start in self.starts:
      at, end = offset + start, offset + start + self.length
      while at < end:
        found.append(os.pread(file, end - at, at))
        if not found[-1]:
          raise EOFError
        at += len(found[-1])
    return b"".join(found)

  def cut(self, values: np.ndarray) -> np.ndarray:
    """The part, of the values of all stretches."""
    stretches = values.reshape(len(self.starts), self.values)
    return stretches[:, self.spare:self.spare + math.prod(self.shape) // len(self.starts)].reshape(self.shape)


def part(shape: tuple[int, ...], start: int, stop: int, within: Sequence[slice], block: int, block_bytes: int) -> Part:
  """Rows start to stop of an array, and of each what is `within`.

  Args:
    shape: of the array; its last axis is a multiple of `block` if it has several.
    start, stop: rows.
    within: a slice for each of the axes behind the first, or for the foremost of them.
    block: values that are stored as one, along the last axis.
    block_bytes: of a block.
  """
  wanted = [range(start, stop), *(range(size)[along] for along, size in zip(within, shape[1:]))]
  # What follows each other in the file is of the last axis that is not whole, with all behind it.
  last = max((axis for axis in range(1, len(wanted)) if len(wanted[axis]) < shape[axis]), default=0)
  sizes = [math.prod(shape[axis + 1:]) for axis in range(last + 1)]
  first = wanted[last].start * sizes[last]
  spare = first % block
  values = -(-(len(wanted[last]) * sizes[last] + spare) // block) * block
  starts = [(sum(index * size for index, size in zip(indices, sizes)) + first) // block * block_bytes
            for indices in itertools.product(*wanted[:last])]
  return Part((*map(len, wanted), *shape[len(wanted):]), starts, values // block * block_bytes, values, spare)
