"""The heads that come with specjax: small, documented, and of the shape of their target."""
import json

import jax
import numpy as np
import pytest
import safetensors

from specjax import checkpoints
from specjax.checkpoints import heads
from specjax.checkpoints.heads.shipped import FOLDER

FOLDERS = sorted(path for path in FOLDER.glob("*/*") if path.is_dir())
NAMES = [f"{path.parent.name}/{path.name}" for path in FOLDERS]


def test_what_comes_with_the_default_model():
  assert set(NAMES) >= {"smollm2-135m/eagle3", "smollm2-135m/medusa", "smollm2-135m/dspark"}
  for path, name in zip(FOLDERS, NAMES):
    target, kind = name.split("/")
    assert heads.shipped(target, kind) == path
  assert heads.shipped("smollm2-135m", "no such kind") is None
  assert heads.shipped("path/to/smollm2-135m", "eagle3") is None  # a file may be another model of that name


def test_they_are_loaded_by_name(tmp_path, monkeypatch):
  by_name, by_path = (heads.load_head(path) for path in (NAMES[0], FOLDERS[0]))
  jax.tree.map(np.testing.assert_array_equal, by_name, by_path)
  with pytest.raises(checkpoints.CheckpointError, match="smollm2-135m/nothing: is not there"):
    heads.load_head("smollm2-135m/nothing")
  monkeypatch.chdir(tmp_path)
  (tmp_path / NAMES[0]).mkdir(parents=True)
  with pytest.raises(checkpoints.CheckpointError):  # a path that is there is meant, whatever it holds
    heads.load_head(NAMES[0])


def test_they_are_small():
  """A wheel that carries them stays small: 40 MiB together."""
  assert sum(file.stat().st_size for path in FOLDERS for file in path.iterdir()) <= 40 * 2**20


@pytest.mark.parametrize("path", FOLDERS, ids=NAMES)
def test_a_head_is_bfloat16_and_has_its_card(path):
  with safetensors.safe_open(next(path.glob("*.safetensors")), "np") as file:
    types = {file.get_slice(name).get_dtype() for name in file.keys() if name not in ("d2t", "t2d")}
  assert types == {"BF16"}
  card = (path / "README.md").read_text()
  for word in ("## Data", "## Training", "## Held out", "## On requests", "python -m experiments.train", "seed"):
    assert word in card, word
  json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("path", FOLDERS, ids=NAMES)
def test_a_head_loads_and_its_weights_are_numbers(path):
  for leaf in jax.tree.leaves(heads.load_head(path)):
    assert np.isfinite(np.asarray(leaf, np.float32)).all()
