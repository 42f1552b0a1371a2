"""Any box of a field equals that box of the whole field, and is read without a byte beside it."""
import itertools

import numpy as np
import pytest

from specjax.checkpoints import fields

Place = fields.Place
# name -> the places of one field's tensors; shapes are small and uneven, so that boxes cut through heads and pairs.
KINDS = {
    "rows behind each other": [Place("f", 0, 0, (6, 5)), Place("f", 0, 6, (2, 5)), Place("f", 0, 8, (4, 5))],
    "vector": [Place("f", 0, 0, (7,), added=1.0)],
    "interleaved heads": [Place("f", 0, 0, (12, 5), interleaved_heads=2),
                          Place("f", 0, 12, (6, 5), interleaved_heads=1), Place("f", 0, 18, (6, 5))],
    "by head": [Place("f", 0, 0, (18, 5), by_head=3)],
    "vector by head": [Place("f", 0, 0, (18,), by_head=3)],
    "transposed": [Place("f", 0, 0, (5, 9), transposed=True)],
    "experts apart": [Place("f", 0, i * 3, (3, 4), stacked=4) for i in range(8)],  # two tensors an expert
    "halves of experts": [Place("f", 0, 0, (3, 2, 5), half=0), Place("f", 0, 0, (3, 2, 5), half=1)],
    "experts as one": [Place("f", 0, 0, (3, 4, 5))],
    "rows in front that are skipped": [Place("f", 0, 0, (9, 4), skipped=2)],
    "an axis of one": [Place("f", 0, 0, (6, 1, 4), squeezed=1)],
    "a first axis of one": [Place("f", 0, 0, (1, 6), squeezed=0)],
    "a gap": [Place("f", 0, 0, (4, 3)), Place("f", 0, 6, (2, 3))]}


class Source:
  """Tensors in memory, and the values that were read of them."""
  path = "here"

  def __init__(self, places):
    self.shapes = {f"t{i}": place.shape for i, place in enumerate(places)}
    draw = np.random.default_rng(0)
    self.values = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in self.shapes.items()}
    self.read = 0

  def rows(self, name, start, stop, within=()):
    found = self.values[name][slice(start, stop), *within]
    self.read += found.size
    return found


def plain(kind, places, values):
  """The field by other means than those of the library."""
  stored = [value + place.added for place, value in zip(places, values)]
  if kind == "interleaved heads":
    heads = [*stored[0].reshape(2, 6, 5), stored[1]]
    return np.concatenate([half for head in heads for half in (head[0::2], head[1::2])] + [stored[2]])
  if kind.endswith("by head"):
    heads = stored[0].reshape(3, 3, 2, *stored[0].shape[1:])
    return np.concatenate([heads[:, part].reshape(6, *stored[0].shape[1:]) for part in range(3)])
  return {
      "transposed": lambda: stored[0].T, "experts apart": lambda: np.concatenate(stored).reshape(4, 6, 4),
      "halves of experts": lambda: np.concatenate(stored, axis=1), "an axis of one": lambda: stored[0][:, 0],
      "rows in front that are skipped": lambda: stored[0][2:], "a first axis of one": lambda: stored[0][0],
      "a gap": lambda: np.concatenate([stored[0], np.zeros((2, 3)), stored[1]]),
  }.get(kind, lambda: np.concatenate(stored))()


@pytest.mark.parametrize("chunk", [1, 12, 1 << 17])
@pytest.mark.parametrize("kind", KINDS)
def test_every_box(monkeypatch, kind, chunk):
  monkeypatch.setattr(fields, "_CHUNK_VALUES", chunk)
  places = KINDS[kind]
  source = Source(places)
  tensors = list(zip(source.shapes, places))
  wanted = plain(kind, places, source.values.values()).astype(np.float32)
  assert fields.shape(tensors) == wanted.shape
  cuts = [[(0, size), (0, size // 2), (size // 2, size), (size // 3, size // 3 + 1)] for size in wanted.shape]
  for box in itertools.product(*cuts):
    expected = wanted[tuple(slice(*along) for along in box)]
    target, source.read = np.full(expected.shape, np.nan, np.float32), 0
    fields.fill(target, box, source, tensors)
    np.testing.assert_array_equal(target, expected, err_msg=str(box))
    assert source.read == expected.size - (kind == "a gap") * np.count_nonzero(expected == 0), box


def test_no_value_has_two_places():
  """What `origins` says is one to one: every stored value that is kept, once."""
  for kind, places in KINDS.items():
    tensors = [(f"t{i}", place) for i, place in enumerate(places)]
    seen = np.zeros(fields.shape(tensors), int)
    for _, place in tensors:
      origins = place.origins(seen.shape)
      for origin in origins:
        kept = np.sort(origin.index[origin.index >= 0])
        assert origin.axis is None or kept[-1] == place.shape[origin.axis] - 1, kind
        assert (np.diff(kept) == 1).all(), kind
      seen[np.ix_(*(origin.index >= 0 for origin in origins))] += 1
    assert seen.max() == 1 and (kind == "a gap") == (seen.min() == 0), kind
