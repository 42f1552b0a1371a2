"""The dummy target against its definition in NumPy, and that it notices everything it is there to notice."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drivers
from specjax import proposers
from specjax import testing
from specjax.cache import InFlight

pytestmark = pytest.mark.usefixtures("quick_compile")
M = 0xFFFFFFFF
forward = jax.jit(lambda target, *args: target.forward(*args))


def mix(x):
  x &= M
  x = ((x ^ (x >> 16)) * 0x85EBCA6B) & M
  x = ((x ^ (x >> 13)) * 0xC2B2AE35) & M
  return x ^ (x >> 16)


def hidden(text, positions, salt):
  """The hash of a path, with Python's integers."""
  return mix(sum(mix(mix(t * 0x9E3779B1 + salt) + p * 0xC2B2AE3D) for t, p in zip(text, positions)))


def logits(state, vocab, sharpness=3.0):
  bits = np.array([mix(state + i * 0x85EBCA77) >> 8 for i in range(vocab)], np.float32)
  return (bits * np.float32(2.0 ** -23) - np.float32(1)) * np.float32(sharpness)


def run(target, prefix, tokens, parents, slots=16):
  """Hidden states of tree nodes behind a prefix that is committed in two blocks."""
  cache = target.init_cache(1, slots)
  for block in (prefix[:2], prefix[2:]):
    at = int(cache.length[0])
    positions = jnp.arange(at, at + 4, dtype=jnp.int32)[None]
    padded = jnp.asarray([block + [9] * (4 - len(block))], jnp.int32)
    out = forward(target, padded, positions, jnp.tril(jnp.ones((1, 4, 4), bool)), cache)
    cache = cache.commit(out.in_flight, jnp.asarray([len(block)], jnp.int32))
  paths = []
  for node in range(len(tokens)):
    path = [node]
    while path[0]:
      path.insert(0, parents[path[0]])
    paths.append(path)
  mask = np.zeros((1, len(tokens), len(tokens)), bool)
  for node, path in enumerate(paths):
    mask[0, node, path] = True
  positions = jnp.asarray([[len(prefix) + len(path) - 1 for path in paths]], jnp.int32)
  out = forward(target, jnp.asarray([tokens], jnp.int32), positions, jnp.asarray(mask), cache)
  return out, paths


def test_a_tree_behind_a_prefix_is_the_hash_of_its_paths():
  target = testing.DummyTarget(salt=np.uint32(77), vocab=10)
  prefix, tokens, parents = [3, 1, 4, 1, 5], [9, 2, 6, 5], [0, 0, 0, 2]
  out, paths = run(target, prefix, tokens, parents)
  for node, path in enumerate(paths):
    text = prefix + [tokens[i] for i in path]
    wanted = hidden(text, range(len(text)), 77)
    assert int(out.hidden[0, node, 0]) == wanted
    np.testing.assert_array_equal(np.asarray(target.logits(out.hidden))[0, node], logits(wanted, 10))
  assert isinstance(out.in_flight, InFlight) and out.in_flight.values[0].shape == (1, 1, 4, 1)


def test_every_fault_changes_the_answer():
  target = testing.DummyTarget(vocab=10)
  prefix, tokens, parents = [3, 1, 4, 1, 5], [9, 2, 6, 5], [0, 0, 1, 2]
  right = np.asarray(run(target, prefix, tokens, parents)[0].hidden)[0, :, 0]
  wrong_parent = np.asarray(run(target, prefix, tokens, [0, 0, 0, 2])[0].hidden)[0, :, 0]
  assert (right[:2] == wrong_parent[:2]).all() and (right[2:] != wrong_parent[2:]).all()
  other_prefix = np.asarray(run(target, [3, 1, 1, 4, 5], tokens, parents)[0].hidden)[0, :, 0]
  assert (right != other_prefix).all()  # the same tokens in another order
  other_salt = np.asarray(run(target.replace(salt=np.uint32(2)), prefix, tokens, parents)[0].hidden)[0, :, 0]
  assert (right != other_salt).all()
  cache = target.init_cache(1, 8)
  base = forward(target, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool), cache)
  longer = forward(target, jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool),
                   cache.replace(length=jnp.ones(1, jnp.int32)))  # a slot that nobody wrote
  assert int(base.hidden[0, 0, 0]) != int(longer.hidden[0, 0, 0])


@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 40, 65, 66, 81, 82, 200])
def test_plain_greedy_text_is_the_slow_one_for_every_prompt_length(length):
  """One chunk, several, exactly full ones, and the prompt of one token, which needs no prefill."""
  target = testing.DummyTarget(vocab=16)
  prompt = np.random.default_rng(length).integers(0, 16, length).tolist()
  result = drivers.generate(target, proposers.Plain(), [prompt], max_new_tokens=12)
  text = list(prompt)
  for _ in range(12):
    text.append(int(np.argmax(logits(hidden(text, range(len(text)), 1), 16))))
  assert result.tokens[0].tolist() == text[length:]


def test_a_small_order_makes_texts_that_repeat():
  """What the order is for: prompt lookup must find something, and be right about it."""
  target = testing.DummyTarget(vocab=16, order=2)
  result = drivers.generate(target, proposers.NGram(num_tokens=3), [[1, 2, 3]], max_new_tokens=120)
  assert result.counters.drafted_tokens[0] > 0
  assert result.counters.accepted_tokens[0] / result.counters.drafted_tokens[0] > 0.5
