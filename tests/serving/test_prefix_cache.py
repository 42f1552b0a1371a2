"""Beginnings of prompts: found by all that stands before, and the least recently used go first."""
import jax.numpy as jnp
import numpy as np

from specjax import cache
from specjax import decode
from specjax.serving import prefix_cache

BLOCK = 4


def chunk(size, mark):
  keys = jnp.full((1, 1, 1, size), mark, jnp.float32)
  return decode.Chunk(in_flight=cache.InFlight(keys=(keys,), values=(jnp.swapaxes(keys, 2, 3),)),
                      hidden=jnp.broadcast_to(jnp.arange(size, dtype=jnp.float32)[None, :, None], (1, size, 2)),
                      features={3: jnp.zeros((1, size, 2))})


def marks(found):
  return [float(block.in_flight.keys[0][0, 0, 0, 0]) for block in found]


def test_a_block_is_known_by_all_that_stands_before_it():
  kept = prefix_cache.PrefixCache(BLOCK, 100)
  prompt = np.arange(11)
  kept.add(prompt, 0, chunk(16, 1))  # a chunk is longer than the prompt: what is no whole block is not kept
  assert kept.tokens == 8 and marks(kept.find(prompt)) == [1, 1]
  assert float(kept.find(prompt)[1].hidden[0, 0, 0]) == 4, "each block its own part"
  assert kept.find(np.arange(8)) and len(kept.find(np.arange(8))) == 1, "the last token is never taken over"
  other = prompt.copy()
  other[0] = 9
  assert not kept.find(other), "the second block is equal, but not what stands before it"
  assert len(kept.find(np.concatenate([prompt[:5], [99] * 6]))) == 1


def test_the_least_recently_used_go_first_and_leaves_before_what_they_stand_on():
  kept = prefix_cache.PrefixCache(BLOCK, 16)
  first, second = np.arange(9), np.arange(100, 109)
  kept.add(first, 0, chunk(8, 1))
  kept.add(second, 0, chunk(8, 2))
  kept.find(first)
  kept.add(np.arange(200, 205), 0, chunk(4, 3))
  assert kept.tokens == 16 and len(kept.find(first)) == 2 and len(kept.find(second)) == 1


def test_chunks_of_one_prompt_go_from_its_end():
  """What was read first is what all the rest stands on, however many chunks there were."""
  kept, prompt = prefix_cache.PrefixCache(BLOCK, 16), np.arange(40)
  for begin in (0, 8):
    kept.add(prompt[:17], begin, chunk(8, begin))
  kept.add(np.arange(100, 105), 0, chunk(4, 9))
  assert len(kept.find(prompt[:17])) == 3 and kept.tokens == 16
  for begin in (0, 8, 16, 24):
    kept.add(prompt, begin, chunk(8, begin))
  assert len(kept.find(prompt)) == 4, "a prompt beyond the capacity keeps its beginning"
