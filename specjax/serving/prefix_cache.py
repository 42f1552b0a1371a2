"""Beginnings of prompts that were read before: read once, and taken over by every prompt that begins so.

What is kept is not a cache but what the target said of a block of tokens (`decode.Chunk`): keys and values, or a
recurrence's inputs, hidden states and the features that the proposer reads. Committing it and showing it to the
proposer is what prefill does behind the target's pass, so that windows, recurrent states and drafters of every kind
take over a beginning without knowing of it, and nothing is ever cut back.

A block is known by its tokens and all that stand before it (as in vLLM's automatic prefix caching). The least recently
used ones go first, leaves before what they stand on.
"""
import collections
import functools
import hashlib

import jax
import numpy as np

from specjax import decode


class PrefixCache:
  """Blocks of `block` tokens, `capacity` tokens at most in all."""

  def __init__(self, block: int, capacity: int):
    self.block, self.capacity = block, capacity
    self._blocks: collections.OrderedDict[bytes, decode.Chunk] = collections.OrderedDict()

  @property
  def tokens(self) -> int:
    """Tokens that are kept."""
    return len(self._blocks) * self.block

  def find(self, prompt: np.ndarray) -> list[decode.Chunk]:
    """The blocks that a prompt begins with, as far as they are known and lie before its last token."""
    found = []
    for name in self._names(prompt):
      if name not in self._blocks:
        break
      found.append(name)
    for name in reversed(found):
      self._blocks.move_to_end(name)
    return [self._blocks[name] for name in found]

  def add(self, prompt: np.ndarray, begin: int, chunk: decode.Chunk) -> None:
    """Keeps the whole blocks of a chunk of one row that was read from token `begin` on, a multiple of the block."""
    names, first = self._names(prompt), begin // self.block
    last = min(len(names), first + chunk.hidden.shape[1] // self.block)
    if any(name not in self._blocks for name in names[first:last]):
      for name, part in zip(names[first:last], split(chunk, self.block)):
        self._blocks.setdefault(name, part)
    for name in reversed(names[:last]):  # what the others stand on becomes the last to go
      if name in self._blocks:
        self._blocks.move_to_end(name)
    while self.tokens > self.capacity:
      self._blocks.popitem(last=False)

  def _names(self, prompt):
    """A name for every whole block before the prompt's last token, of all tokens up to its end."""
    digest, names = hashlib.blake2b(digest_size=16), []
    for end in range(self.block, len(prompt), self.block):
      digest.update(np.ascontiguousarray(prompt[end - self.block:end], np.int32).tobytes())
      names.append(digest.copy().digest())
    return names


@functools.partial(jax.jit, static_argnames="size")
def split(chunk: decode.Chunk, size: int) -> list[decode.Chunk]:
  """The whole parts of `size` tokens of a chunk, in order."""
  return [chunk.take(first, size) for first in range(0, chunk.hidden.shape[1] - size + 1, size)]
