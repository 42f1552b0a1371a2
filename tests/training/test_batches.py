"""Batches: what is in them, that their order follows from the seed alone, and that nothing held out is trained on."""
import collections
import hashlib
import subprocess
import sys
import zlib

import numpy as np
import pytest

from specjax.training import batches
from specjax.training import corpus
from specjax.training import features

LAYERS, WIDTH = (1, 3), 4
FILES = {"a": (30, 21), "b": (17,)}  # sequences of each file of a folder

# What another process makes of the same command.
OTHER = """
import sys
from specjax.training import batches
import test_batches
print(test_batches.digest(test_batches.make(sys.argv[1:]), seed=5))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  root, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
  for name, files in FILES.items():
    (root / name).mkdir()
    for index, count in enumerate(files):
      lengths = rng.integers(5, 200, count)
      sequences = corpus.pack([(rng.integers(0, 99, n).tolist(), int(rng.integers(0, 5))) for n in lengths])
      corpus.write(root / name, index, sequences)
      total = len(sequences.tokens)
      place = features.path(root / name, index, LAYERS)
      np.save(place, rng.standard_normal((total, 3 * WIDTH)).astype(np.float16))
      np.save(place.with_suffix(".top.npy"), rng.integers(0, 99, total).astype(np.int32))
  return [str(root / name) for name in FILES]


def make(folders, **changes):
  given = dict(layers=LAYERS, width=WIDTH, tokens=512, max_tokens=160, held_out=10)
  return batches.Data(folders=tuple(folders), **(given | changes))


def digest(data, seed, steps=25):
  """Of everything that the first batches hold."""
  found = hashlib.sha256()
  for step in range(steps):
    batch = data.batch(step, seed)
    for array in (batch.tokens, batch.length, batch.start, batch.features, batch.hidden, batch.top):
      found.update(repr((array.dtype, array.shape)).encode() + np.ascontiguousarray(array).tobytes())
  return found.hexdigest()


def texts(batch):
  """The rows that are no filler, as (tokens, start)."""
  return [(tuple(batch.tokens[row, :length].tolist()), int(batch.start[row])) for row, length in enumerate(batch.length)
          if length]


def all_texts(folders, most=160):
  """Of every file: what was written, cut."""
  found = []
  for folder in folders:
    for index in corpus.indices(folder):
      sequences = corpus.read(folder, index)
      found.append([(tuple(sequences[i][:most].tolist()), int(sequences.starts[i])) for i in range(len(sequences))])
  return found


def test_a_step_is_the_same_batch_in_every_process(folders):
  """A recipe that another machine cannot follow is none (Medusa 85)."""
  wanted = digest(make(folders), seed=5)
  assert digest(make(folders), seed=5) == wanted
  data = make(folders)
  late = [data.batch(step, 5) for step in (24, 3, 11)]  # a run that goes on asks for a late one first
  assert texts(late[1]) == texts(make(folders).batch(3, 5)) and digest(data, seed=5) == wanted
  assert digest(data, seed=6) != wanted
  done = subprocess.run([sys.executable, "-c", OTHER, *folders], capture_output=True, text=True, check=True, env={
      "PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77", "JAX_PLATFORMS": "cpu"})
  assert done.stdout.strip() == wanted


def is_held(tokens, start):
  """Whether a sequence is held out, of those that are not cut."""
  return zlib.crc32(np.asarray(tokens[:start or 64], np.int32).tobytes()) % 10 == 0


def test_every_sequence_occurs_once_an_epoch_and_epochs_differ(folders):
  data = make(folders)
  count = data.epoch_steps()
  epochs = [[texts(data.batch(epoch * count + step, 1)) for step in range(count)] for epoch in range(3)]
  wanted = sorted(text for texts in all_texts(folders) for text in texts if not is_held(*text))
  for epoch in epochs:
    assert sorted(text for batch in epoch for text in batch) == wanted
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  groups = [{frozenset(batch) for batch in epoch} for epoch in epochs]
  assert len(groups[0] & groups[1]) < count / 2  # not the same batches in another order


def test_held_out_sequences_are_never_trained_on(folders):
  data = make(folders)
  held = sorted(text for batch in data.evaluation() for text in texts(batch))
  assert held == sorted(text for texts in all_texts(folders) for text in texts if is_held(*text))
  seen = {text for step in range(3 * data.epoch_steps()) for text in texts(data.batch(step, 0))}
  assert held and not seen & set(held)
  assert sum(len(tokens) for tokens, _ in seen) == data.training_tokens
  assert not make(folders, held_out=0).evaluation()


def test_a_prompt_that_was_answered_twice_is_on_one_side(tmp_path):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 99, 6).tolist() for _ in range(60)]
  for name in "ab":
    (tmp_path / name).mkdir()
    corpus.write(tmp_path / name, 0, corpus.pack([(prompt + rng.integers(0, 99, 9).tolist(), 6) for prompt in prompts]))
  data = make([str(tmp_path / name) for name in "ab"])
  beginnings = lambda places: {tuple(corpus.read(folder, index)[which][:6].tolist()) for folder, index, which, _ in places}
  assert data.held and not beginnings(data.held) & beginnings(data.places)


def test_a_limit_holds_takes_of_every_file_and_changes_nothing_of_what_is_held_out(folders):
  whole, few, fewer = make(folders), make(folders, limit=2500), make(folders, limit=1000)
  for data, limit in ((few, 2500), (fewer, 1000)):
    seen = {text for step in range(data.epoch_steps()) for text in texts(data.batch(step, 0))}
    assert limit - 160 < data.training_tokens <= limit and data.training_tokens == sum(len(tokens) for tokens, _ in seen)
    assert data.held == whole.held
  assert set(fewer.places) < set(few.places) < set(whole.places)  # a curve only ever adds
  assert {place[:2] for place in few.places} == {place[:2] for place in whole.places}
  assert make(folders, limit=10**9).training_tokens == whole.training_tokens
  with pytest.raises(ValueError, match="no sequences to train on"):
    make(folders, limit=4)


def test_a_row_holds_its_own_features(folders):
  data, known = make(folders), {}
  for folder in folders:
    for index in corpus.indices(folder):
      sequences, file = corpus.read(folder, index), features.read(folder, index, LAYERS)
      for i in range(len(sequences)):
        begin = sequences.offsets[i]
        known[tuple(sequences[i][:160].tolist())] = (file.values[begin:begin + 160], file.top[begin:begin + 160])
  for step in range(data.epoch_steps()):
    batch = data.batch(step, 0)
    for row, length in enumerate(batch.length):
      if not length:
        continue
      values, top = known[tuple(batch.tokens[row, :length].tolist())]
      np.testing.assert_array_equal(batch.features[row, :length], values[:length, :2 * WIDTH])
      np.testing.assert_array_equal(batch.hidden[row, :length], values[:length, 2 * WIDTH:])
      np.testing.assert_array_equal(batch.top[row, :length], top[:length])
      assert not batch.features[row, length:].any() and not batch.tokens[row, length:].any()


def test_batches_have_few_shapes(folders):
  data = make(folders)
  shapes = collections.Counter(data.batch(step, 0).tokens.shape for step in range(data.epoch_steps()))
  assert set(shapes) == {(8, 64), (4, 128), (2, 192)} and sum(shapes.values()) == data.epoch_steps()
