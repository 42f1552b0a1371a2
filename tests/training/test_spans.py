"""Span corruption: nothing of a piece is lost, as much goes as T5's own, and where spans lie is drawn."""
import numpy as np
import pytest

from specjax.training import spans

SENTINELS = tuple(range(999, 899, -1))


def joined(inputs, answer):
  """The piece: each sentinel of the inputs replaced by what stands behind it in the answer."""
  gone, at = {}, None
  for token in answer:
    if token in SENTINELS:
      at = gone.setdefault(token, [])
    else:
      at.append(token)
  return [x for token in inputs for x in (gone[token] if token in SENTINELS else [token])]


@pytest.mark.parametrize("length", [2, 3, 7, 64, 568])
def test_inputs_and_answer_together_are_the_piece(length):
  piece, rng = list(range(length)), np.random.default_rng(length)
  seen = set()
  for _ in range(20):
    inputs, answer = spans.corrupt(piece, SENTINELS, rng)
    assert joined(inputs, answer) == piece and inputs[0] == 0
    noise, count = spans.sizes(length, len(SENTINELS))
    assert len(inputs) == length - noise + count and len(answer) == noise + count
    assert [token for token in inputs if token in SENTINELS] == list(SENTINELS[:count])
    seen.add(tuple(inputs))
  assert (len(seen) > 2) == (length > 7)  # one span alone is always the end


def test_as_much_goes_as_in_t5s_own_configuration():
  """Pieces of 568 tokens become 512 of inputs and 114 of the answer, each with its end, as `random_spans_helper` of
  T5's repository works out for inputs of 512."""
  noise, count = spans.sizes(568, 100)
  assert (568 - noise + count + 1, noise + count + 1) == (512, 114)


def test_there_are_no_more_spans_than_sentinels():
  inputs, answer = spans.corrupt(list(range(300)), SENTINELS[:2], np.random.default_rng(0))
  assert sum(token in SENTINELS for token in inputs) == 2 and joined(inputs, answer) == list(range(300))


def test_every_way_of_cutting_is_alike():
  rng = np.random.default_rng(0)
  counts = np.zeros(4)
  for _ in range(2000):
    counts[spans._parts(5, 2, rng)[0] - 1] += 1
  assert abs(counts / 2000 - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / 2000)
