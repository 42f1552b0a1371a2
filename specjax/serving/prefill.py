"""Reading prompts, each alone, in chunks, with beginnings that other prompts had taken over.

Letters: P prompt tokens, S slots.
"""

import jax
import numpy as np

from specjax import decode
from specjax import starting
from specjax.serving import jobs
from specjax.serving import prefix_cache

CHUNKS = (16, 32, 64, 128, 256)  # prompt tokens of one program
_BLOCK = 32  # tokens of a block of the prefix cache
LEAST = _BLOCK  # prompt tokens that a turn must be able to read


class Reader:
  """Reads the prompts of jobs into states of one row."""

  def __init__(self, target, proposer, prefix_tokens: int, capacity: int, key, verifier):
    self.capacity = capacity
    self._target, self._proposer, self._key, self._verifier = target, proposer, key, verifier
    self._prefixes = prefix_cache.PrefixCache(_BLOCK, prefix_tokens) if prefix_tokens else None

  def begin(self, job: jobs.Job) -> int:
    """Gives a job its state, and `read`, how many of its prompt's tokens are in it: those known from other requests."""
    job.state, _ = starting.begin(self._target, self._proposer, job.asked, key=self._key, verifier=self._verifier,
                                  capacity=self.capacity)
    job.state = jobs.neutral(job.state)
    known = [] if self._prefixes is None else self._prefixes.find(job.prompt)
    for chunk in known:
      job.state = _take(self._target, self._proposer, job.state, chunk)
    job.read = len(known) * _BLOCK
    return job.read

  def check(self) -> None:
    """Refuses a verifier that cannot judge the proposer's drafts, and drafts that cannot be traced, before any request.

    Raises:
      ValueError: says why.
    """
    asked = starting.asked(self._target, [np.zeros(1, np.int32)], max_new_tokens=1, eos_ids=())
    state, _ = starting.begin(self._target, self._proposer, asked, key=self._key, verifier=self._verifier,
                              capacity=self.capacity)
    if not self._proposer.host:
      starting.draft.eval_shape(self._target, self._proposer, state)

  def left(self, job: jobs.Job) -> int:
    """Tokens of its prompt that are still to be read; the last one is the first root."""
    return job.prompt_tokens - 1 - job.read

  def read(self, job: jobs.Job, size: int) -> int:
    """Reads the next `size` tokens, one of CHUNKS; how many of them were there."""
    mask = starting.causal(size)
    if self._prefixes is None:
      job.state = _prefill(self._target, self._proposer, job.state, mask)
    else:
      chunk = _read(self._target, self._proposer, job.state, mask)
      job.state = _take(self._target, self._proposer, job.state, chunk)
      if job.read % _BLOCK == 0 and size >= _BLOCK:
        self._prefixes.add(job.prompt, job.read, chunk)
    count = min(size, self.left(job))
    job.read += count
    jax.block_until_ready(job.state.cache.length)
    return count

  def warm_up(self, max_tokens: int) -> dict[int, decode.DecodeState]:
    """Compiles all chunks in all buckets of slots; blank states of one row that has ended, by their slots."""
    blank = {}
    for slots in buckets(max_tokens, self._target.max_context):
      asked = starting.asked(self._target, [np.zeros(min(slots, max_tokens) - 1, np.int32)], max_new_tokens=1,
                             eos_ids=())
      fresh = lambda: jobs.neutral(starting.begin(self._target, self._proposer, asked, key=self._key,
                                                  verifier=self._verifier, capacity=self.capacity)[0])
      for size in CHUNKS:
        if self._prefixes is None:
          _prefill(self._target, self._proposer, fresh(), starting.causal(size))
        else:
          state = fresh()
          chunk = _read(self._target, self._proposer, state, starting.causal(size))
          _take(self._target, self._proposer, state, chunk)
          prefix_cache.split(chunk, _BLOCK)
      state = fresh()
      blank[state.tokens.shape[1]] = state
    return blank


def chunk_size(left: int, budget: int) -> int:
  """The program for the next of `left` tokens that reads at most `budget`; 0 if none is that small. Only the last chunk
  of a prompt has fewer tokens than a block, so that all chunks begin where a block does."""
  fitting = [size for size in CHUNKS if size <= budget]
  whole = next((size for size in fitting if size >= left), 0)
  return whole or max((size for size in fitting if size >= _BLOCK), default=0)


def buckets(max_tokens: int, context: int) -> list[int]:
  """All sizes of slots that requests of `max_tokens` tokens go through."""
  sizes = [starting.bucket(1, context)]
  while sizes[-1] < starting.bucket(max_tokens, context):
    sizes.append(starting.bucket(sizes[-1] + 1, context))
  return sizes


_prefill = jax.jit(decode.prefill_chunk, donate_argnames="state")
_read = jax.jit(decode.read_chunk)
_take = jax.jit(decode.take_chunk, donate_argnames="state")


def compiled_programs() -> int:
  """How many programs this module holds compiled."""
  return sum(function._cache_size() for function in (_prefill, _read, _take, prefix_cache.split))
