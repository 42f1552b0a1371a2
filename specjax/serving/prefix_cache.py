"""Beginnings of prompts that were read before: read once, and taken over by every prompt that begins so.

What is kept is not a cache but what the target said of a block of tokens (`decode.Chunk`): keys and values, or a
recurrence's inputs, hidden states and the features that the proposer reads. Committing it and showing it to the
proposer is what prefill does behind the target's pass, so that windows, recurrent states and drafters of every kind
take over a beginning without knowing of it, and nothing is ever cut back.

A block is known by its tokens and all that stand before it (as in vLLM's automatic prefix caching). The least recently
used ones go first, leaves before what they stand on.
"""
import collections
import hashlib

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
    for name in reversed(found):  # the first block, on which the others stand, becomes the last to go
      self._blocks.move_to_end(name)
    return [self._blocks[name] for name in found]

  def add(self, prompt: np.ndarray, begin: int, chunk: decode.Chunk) -> None:
    """Keeps the whole blocks of a chunk of one row that was read from token `begin` on, a multiple of the block."""
    names = self._names(prompt)
    size = chunk.hidden.shape[1]
    fresh = [i for i in range(begin // self.block, min(len(names), (begin + size) // self.block))
             if names[i] not in self._blocks]
    for i in reversed(fresh):
      self._blocks[names[i]] = chunk.take(i * self.block - begin, self.block)
    while self.tokens > self.capacity:
      self._blocks.popitem(last=False)

  def clear(self) -> None:
    """Forgets all."""
    self._blocks.clear()

  def _names(self, prompt):
    """A name for every whole block before the prompt's last token, of all tokens up to its end."""
    digest, names = hashlib.blake2b(digest_size=16), []
    for end in range(self.block, len(prompt), self.block):
      digest.update(np.ascontiguousarray(prompt[end - self.block:end], np.int32).tobytes())
      names.append(digest.copy().digest())
    return names
