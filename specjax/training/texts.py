"""Batches of token sequences alone: for losses that run the target themselves and need none of its features.

Letters: B sequences of a batch, S tokens of each.
"""
import dataclasses

from flax import struct
import jax
import numpy as np

from specjax.training import batches


@struct.dataclass
class Text:
  """Sequences of about one length, filled up with rows of length 0. NumPy arrays until a jitted function takes them."""
  tokens: jax.Array  # i32[B, S]
  length: jax.Array  # i32[B]
  start: jax.Array   # i32[B]; tokens of the prompt
  own: jax.Array     # f32[]; 1 if the model that learns wrote the answers, 0 for those of the corpus


@dataclasses.dataclass(frozen=True)
class Texts(batches.Data):
  """As `batches.Data`, with `Text` for batches; the same sequences are held out."""
  layers: tuple[int, ...] = ()
  width: int = 0

  def _load(self, rows, size):
    tokens = np.zeros((len(rows), size), np.int32)
    starts, lengths = np.zeros((2, len(rows)), np.int32)
    for row, (folder, index, which, length) in enumerate(rows):
      if row and rows[row] == rows[row - 1]:
        continue  # fills the batch up: empty, so that no sequence counts twice
      sequences = self._sequences(folder, index)
      tokens[row, :length] = sequences[which][:length]
      starts[row], lengths[row] = sequences.starts[which], length
    return Text(tokens=tokens, length=lengths, start=starts, own=np.float32(0))
