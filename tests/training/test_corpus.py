"""Files of a corpus: whole or not at all, one corpus a folder; and which ids a head drafts."""
import json
import pathlib

import numpy as np
import pytest

from specjax.training import batches
from specjax.training import corpus
from specjax.training import vocabulary

SEQUENCES = [([5, 6, 7, 7], 2), ([1], 0), ([9, 8, 7, 6, 5, 5], 5)]


def test_sequences_are_read_as_they_were_written(tmp_path):
  corpus.write(tmp_path, 3, corpus.pack(SEQUENCES))
  found = corpus.read(tmp_path, 3)
  assert len(found) == 3 and [(found[i].tolist(), int(found.starts[i])) for i in range(3)] == SEQUENCES
  assert found.tokens.dtype == found.starts.dtype == np.int32 and found.offsets.tolist() == [0, 4, 5, 11]


def test_files_are_found_in_their_order_and_nothing_else_is(tmp_path):
  for index in (2, 10, 0):
    corpus.write(tmp_path, index, corpus.pack(SEQUENCES))
  (tmp_path / ".sequences-00005.npz.77").write_bytes(b"half a fi")  # of a killed process
  (tmp_path / "features-1-2-00007.npy").write_bytes(b"")
  assert corpus.indices(tmp_path) == [0, 2, 10]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
  target = tmp_path / "a.json"
  corpus.write_whole(target, lambda file: file.write(b"old"))

  def fails(file):
    file.write(b"half")
    raise OSError("no space left")

  with pytest.raises(OSError):
    corpus.write_whole(target, fails)
  assert target.read_bytes() == b"old"
  with pytest.raises(OSError):
    corpus.write_whole(tmp_path / "sequences-00000.npz", fails)
  assert corpus.indices(tmp_path) == []


def test_a_folder_holds_one_corpus(tmp_path):
  facts = {"target": "a", "temperatures": [0.0, 0.7], "max_prompts": None}
  folder = corpus.open_folder(tmp_path / "new" / "corpus", facts)
  assert corpus.facts(folder) == facts == json.loads((folder / "corpus.json").read_text())
  assert corpus.open_folder(folder, dict(facts)) == folder
  for wrong in (facts | {"target": "b"}, facts | {"more": 1}, {"target": "a", "temperatures": [0.0, 0.7], "seed": 1}):
    with pytest.raises(ValueError, match="corpus that was begun with"):
      corpus.open_folder(folder, wrong)
  assert corpus.facts(folder) == facts


def test_a_folder_without_a_corpus_is_named(tmp_path):
  with pytest.raises(ValueError, match="holds no corpus.*write_training_data"):
    corpus.facts(tmp_path)


# --- draft vocabulary -------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
  for name, files in (("a", [SEQUENCES[:1], SEQUENCES[1:]]), ("b", [[([3, 3, 3, 3, 2, 2], 4)]])):
    (tmp_path / name).mkdir()
    for index, sequences in enumerate(files):
      corpus.write(tmp_path / name, index, corpus.pack(sequences))
  return tmp_path / "a", tmp_path / "b"


TEXTS = [np.array(text) for text in ([7, 7, 1], [5], [2, 2])]


def test_a_head_drafts_the_most_frequent_ids():
  ids, covered = vocabulary.frequent(TEXTS, 2, 12)
  assert ids.tolist() == [2, 7] and ids.dtype == np.int32 and covered == pytest.approx(4 / 6)
  ids, covered = vocabulary.frequent(TEXTS[:2], 3, 12)
  assert ids.tolist() == [1, 5, 7] and covered == 1
  assert vocabulary.frequent(TEXTS, 12, 12)[0].tolist() == list(range(12))


def test_ids_to_keep_are_kept():
  ids, covered = vocabulary.frequent(TEXTS, 2, 12, keep=(11, 3))
  assert ids.tolist() == [3, 11] and covered == 0
  assert vocabulary.frequent(TEXTS, 3, 12, keep=(11, 3))[0].tolist() == [2, 3, 11]


def test_prompts_do_not_count(folders):
  data = batches.Data(folders=tuple(map(str, folders)), layers=(), width=4, held_out=0)
  assert sorted(np.concatenate(list(data.answers())).tolist()) == [1, 2, 2, 5, 7, 7]


def test_a_mask_is_an_id_that_no_text_holds(folders):
  assert vocabulary.unused(folders, 12) == 0
  (whole := folders[0].parent / "whole").mkdir()
  corpus.write(whole, 0, corpus.pack([([0, 4], 0)]))
  assert vocabulary.unused((*folders, whole), 12) == 10
  with pytest.raises(ValueError, match="every id"):
    vocabulary.unused((*folders, whole), 10)


def test_the_corpus_that_comes_along_is_whole():
  folder = pathlib.Path(__file__).parents[2] / "experiments" / "corpora" / "smollm2-135m-own"
  facts = corpus.facts(folder)
  found = [corpus.read(folder, index) for index in corpus.indices(folder)]
  assert facts["target"] == "smollm2-135m" and not facts["prompts"] and sum(map(len, found)) == facts["own_prompts"]
  for sequences in found:
    lengths = np.diff(sequences.offsets)
    assert sequences.offsets[-1] == len(sequences.tokens) and (lengths > sequences.starts).all()
    assert sequences.tokens.min() >= 0 and sequences.tokens.max() < 49152
