"""Features on disk are those that the target computes of each sequence alone, whatever stood beside it or behind it."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing import tiny
from specjax.training import corpus
from specjax.training import features

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = tiny.decoder(layers=2, max_context=512)
LAYERS = (1, 0, 2)  # in the order asked for
SIZE = 192
LENGTHS = [[5, 64, 65, 30], [1, 150, 128, 190, 64]]
RNG = np.random.default_rng(0)
TEXTS = [[(RNG.integers(0, 24, length).tolist(), min(length - 1, 3)) for length in lengths] for lengths in LENGTHS]


class Progress:
  """Counts tokens."""

  def __init__(self):
    self.tokens = 0

  def update(self, tokens):
    self.tokens += tokens


def compute(folder, max_tokens=384, layers=LAYERS):
  """Number of tokens that were computed."""
  progress = Progress()
  assert features.compute(TARGET, folder, layers, max_tokens, progress=progress) == len(LENGTHS)
  return progress.tokens


@jax.jit
def direct(tokens):
  mask = jnp.tril(jnp.ones((1, SIZE, SIZE), bool))
  out = TARGET.forward(tokens, jnp.arange(SIZE)[None], mask, TARGET.init_cache(1, 1), features=LAYERS)
  return jnp.concatenate([*out.features, out.hidden], -1)[0], TARGET.logits(out.hidden)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  for index, texts in enumerate(TEXTS):
    corpus.write(folder, index, corpus.pack(texts))
  assert compute(folder) == sum(map(sum, LENGTHS))
  return folder


def read_all(folder):
  return [(np.array(file.values), file.top) for file in (features.read(folder, i, LAYERS) for i in range(len(LENGTHS)))]


@pytest.mark.parametrize("filler", [0, 23])
def test_a_file_holds_what_the_target_computes_of_each_sequence_alone(folder, filler):
  for (values, top), texts in zip(read_all(folder), TEXTS, strict=True):
    assert values.dtype == np.float16 and top.dtype == np.int32
    begin = 0
    for tokens, _ in texts:
      count = len(tokens)
      wanted, logits = direct(np.array([tokens + [filler] * (SIZE - count)], np.int32))
      # To half a step of float16, and what batches of other shapes round otherwise.
      np.testing.assert_allclose(values[begin:begin + count], wanted[:count], rtol=6e-4, atol=2e-6)
      best = np.take_along_axis(np.asarray(logits)[:count], top[begin:begin + count, None], 1)[:, 0]
      np.testing.assert_allclose(best, logits[:count].max(-1), atol=1e-5)
      begin += count
    assert begin == len(values) == len(top)


def test_what_is_there_is_not_computed_again_and_what_is_missing_is(folder):
  before = read_all(folder)
  assert compute(folder) == 0
  features.path(folder, 1, LAYERS).unlink()
  assert compute(folder) == sum(LENGTHS[1])
  top = next(folder.glob("*00000.top.npy"))
  top.unlink()
  assert compute(folder) == sum(LENGTHS[0])
  (folder / f".{top.name}.123").write_bytes(b"half")  # of a killed process
  assert compute(folder) == 0
  jax.tree.map(np.testing.assert_array_equal, read_all(folder), before)


def test_sequences_are_cut_and_a_longer_cut_is_computed_anew(folder, tmp_path):
  """Behind the cut a file holds zeros: trained on, they would be a law that the target never had."""
  for index, texts in enumerate(TEXTS):
    corpus.write(tmp_path, index, corpus.pack(texts))
  assert compute(tmp_path, max_tokens=64) == sum(min(length, 64) for lengths in LENGTHS for length in lengths)
  values, top = read_all(tmp_path)[1]
  assert values[1:65].any(-1).all() and not values[65:151].any() and not top[65:151].any()
  assert compute(tmp_path, max_tokens=64) == compute(tmp_path, max_tokens=20) == 0
  assert compute(tmp_path, max_tokens=384) == sum(map(sum, LENGTHS))
  jax.tree.map(np.testing.assert_array_equal, read_all(tmp_path), read_all(folder))


def test_features_of_other_layers_are_other_files(folder):
  assert features.path(folder, 0, (1, 2)) != features.path(folder, 0, (2, 1)) != features.path(folder, 0, (12,))
  with pytest.raises(FileNotFoundError):
    features.read(folder, 0, (1, 2))


def test_residual_streams_beyond_float16_stay_finite(tmp_path):
  """Some models hold values there that no float16 does."""
  weights = TARGET.weights.replace(embedding=TARGET.weights.embedding * 1e6)
  corpus.write(tmp_path, 0, corpus.pack(TEXTS[0]))
  features.compute(TARGET.replace(weights=weights), tmp_path, LAYERS, 384)
  values = features.read(tmp_path, 0, LAYERS).values
  assert np.isfinite(values).all() and np.abs(values).max() == np.finfo(np.float16).max


def test_sequences_of_about_one_length_go_together_in_one_shape_a_length():
  lengths = [10, 70, 64, 1, 65, 64, 3, 128, 129]
  found = features.batches(lengths, 192)
  for rows, size in found:
    assert len(rows) == max(192 // size, 1)
    assert all(size - 64 < lengths[i] <= size for i in rows)
  assert sorted({i for rows, _ in found for i in rows}) == list(range(9))
  assert ([6, 6, 6], 64) not in found and ([5, 6, 6], 64) in found  # filled up with its last
