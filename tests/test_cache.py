"""The cache against NumPy: what commit writes, and above all what it leaves alone. Every slot is poisoned first."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as cache_lib

SLOTS, NODES, HEADS, WIDTH, LAYERS = 12, 4, 2, 3, 2
commit = jax.jit(lambda cache, block, count: cache.commit(block, count))


def flip(arrays):
  """Keys are kept [B, K, C, S]; here all is compared as [B, K, S, C]."""
  return tuple(jnp.swapaxes(x, 2, 3) for x in arrays)


def layers(block):
  """Keys and values of a cache or a block, each [B, K, S, C]."""
  return flip(block.keys) + block.values


def make(rows, length, *, nodes=NODES, dtype=jnp.float32, seed=0):
  """A cache full of poison and a block full of news, all numbers different."""
  rng = np.random.default_rng(seed)
  fill = lambda size: tuple(jnp.asarray(rng.standard_normal((rows, HEADS, size, WIDTH)), dtype) for _ in range(LAYERS))
  cache = cache_lib.KVCache(keys=flip(fill(SLOTS)), values=fill(SLOTS), length=jnp.asarray(length, jnp.int32))
  return cache, cache_lib.InFlight(keys=flip(fill(nodes)), values=fill(nodes))


def reference(buffer, block, length, count):
  buffer = np.array(buffer)
  for row in range(len(length)):
    for i in range(count[row]):
      if length[row] + i < buffer.shape[2]:
        buffer[row, :, length[row] + i] = np.asarray(block)[row, :, i]
  return buffer


def check(cache, block, count):
  """Nothing that was not accepted is ever written, so nothing is cropped: where others go wrong (Transformers 30312 and
  32946, their pull requests 45745 and 48280)."""
  count = np.asarray(count, np.int32)
  out = commit(cache, block, count)
  length = np.asarray(cache.length)
  for got, old, new in zip(layers(out), layers(cache), layers(block), strict=True):
    np.testing.assert_array_equal(got, reference(old, new, length, count))
    assert got.dtype == old.dtype
  np.testing.assert_array_equal(out.length, length + count)
  return out


@pytest.mark.parametrize("length", range(SLOTS + 1))
def test_commit_of_one_row(length):
  """The window path, at every offset, and at the end, where the window must slide back without touching what is old."""
  for count in range(NODES + 1):
    check(*make(1, [length], seed=count), [count])


@pytest.mark.parametrize("shift", range(5))
def test_commit_of_several_rows(shift):
  lengths = [(shift + 3 * row) % (SLOTS + 1) for row in range(7)]
  for spin in range(NODES + 1):
    check(*make(7, lengths, seed=spin), [(spin + row) % (NODES + 1) for row in range(7)])


@pytest.mark.parametrize("nodes", [1, SLOTS, SLOTS + 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_commit_of_blocks_of_other_widths(rows, nodes):
  for count in {0, 1, nodes - 1, nodes}:
    for length in (0, 5, SLOTS - 1):
      check(*make(rows, [length] * rows, nodes=nodes), [count] * rows)


@pytest.mark.parametrize("length,count", [(0, 4), (7, 0), (8, 4), (9, 4), (10, 1), (11, 3), (12, 2)])
def test_one_row_and_several_agree(length, count):
  """Window and scatter write the same: the row alone, and as a neighbour of others."""
  cache, block = make(3, [4, length, 9])
  together = check(cache, block, [2, count, 1])
  cut = lambda x: x[1:2]
  alone = check(jax.tree.map(cut, cache), jax.tree.map(cut, block), [count])
  jax.tree.map(np.testing.assert_array_equal, alone, jax.tree.map(cut, together))


@pytest.mark.parametrize("rows", [1, 3])
def test_commit_keeps_the_cache_dtype(rows):
  cache, _ = make(rows, [5] * rows, dtype=jnp.bfloat16)
  _, block = make(rows, [5] * rows, seed=1)
  out = commit(cache, block, np.full(rows, 3, np.int32))
  assert all(x.dtype == jnp.bfloat16 for x in out.keys + out.values) and out.length.dtype == jnp.int32
  np.testing.assert_array_equal(layers(out)[0][:, :, 5:8], layers(block)[0][:, :, :3].astype(jnp.bfloat16))


@pytest.mark.parametrize("rows", [1, 3])
def test_commits_in_a_row_write_the_text_in_order(rows):
  """Bursts of every size until the buffer is exactly full."""
  cache, _ = make(rows, [0] * rows)
  text = np.random.default_rng(5).standard_normal((rows, HEADS, SLOTS, WIDTH)).astype(np.float32)
  at = 0
  for count in (1, 4, 0, 3, 2, 2):
    block = np.full((rows, HEADS, NODES, WIDTH), 1e9, np.float32)  # what is not counted is rejected garbage
    block[:, :, :count] = text[:, :, at:at + count]
    block = cache_lib.InFlight(keys=flip([jnp.asarray(block)] * LAYERS), values=(jnp.asarray(-block),) * LAYERS)
    cache = commit(cache, block, np.full(rows, count, np.int32))
    at += count
  assert at == SLOTS and cache.length.tolist() == [SLOTS] * rows
  np.testing.assert_array_equal(layers(cache)[1], text)
  np.testing.assert_array_equal(cache.values[0], -text)


def test_take_puts_the_path_in_order():
  _, block = make(2, [0, 0])
  path = jnp.asarray([[0, 2, 3], [0, 1, 1]], jnp.int32)
  taken = block.take(path)
  for got, old in zip(layers(taken), layers(block), strict=True):
    np.testing.assert_array_equal(got[0], np.asarray(old)[0][:, [0, 2, 3]])
    np.testing.assert_array_equal(got[1], np.asarray(old)[1][:, [0, 1, 1]])


def test_grow_keeps_the_content():
  cache, _ = make(2, [3, 12])
  grown = cache.grow(20)
  assert grown.slots == 20 and grown.length.tolist() == [3, 12]
  for new, old in zip(layers(grown), layers(cache), strict=True):
    assert new.dtype == old.dtype
    np.testing.assert_array_equal(new[:, :, :SLOTS], old)
    assert not np.asarray(new[:, :, SLOTS:]).any()
  jax.tree.map(np.testing.assert_array_equal, cache.grow(SLOTS), cache)


def test_grow_refuses_to_shrink():
  cache, _ = make(1, [3])
  with pytest.raises(ValueError, match="12 slots.*11"):
    cache.grow(11)


def test_empty_cache():
  cache = cache_lib.empty_cache(3, LAYERS, HEADS, SLOTS, WIDTH, jnp.bfloat16)
  assert cache.slots == SLOTS and cache.length.tolist() == [0, 0, 0]
  assert [x.shape for x in layers(cache)] == [(3, HEADS, SLOTS, WIDTH)] * (2 * LAYERS)
  assert all(x.dtype == jnp.bfloat16 for x in cache.keys + cache.values)


def test_counts_of_another_batch_are_refused():
  cache, block = make(2, [0, 0])
  with pytest.raises(AssertionError):
    cache.commit(block, jnp.zeros(3, jnp.int32))


@pytest.mark.parametrize("count", [0, 3, 8, 13, 20])
def test_a_ring_takes_the_last_of_a_long_chunk_and_writes_no_slot_twice(count, monkeypatch):
  """Two writes of one scatter to a slot have no order on an accelerator, where the CPU's happen to have one."""
  window, nodes, length = 8, 20, 5
  places = []  # what is written where: the slots that rows are written by
  monkeypatch.setattr(cache_lib.jax, "vmap", lambda write: lambda buffer, new, slot: places.append(slot) or buffer)
  write = cache_lib._writer(jnp.array([length, 0]), jnp.array([count, 1]), nodes, window, window)
  write(jnp.zeros((2, 1, window, 4)), jnp.zeros((2, 1, nodes, 4)), 2)
  kept = [int(slot) for slot in places[0][0] if slot < window]
  assert len(kept) == len(set(kept)) == min(count, window)
  assert sorted(kept) == sorted({(length + i) % window for i in range(max(count - window, 0), count)})
