"""Fixtures of draft heads, and copies of them with something changed."""
import json
import pathlib
import shutil

import jax
import numpy as np
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from specjax.checkpoints import torch_file

HEADS = pathlib.Path(__file__).parents[1] / "fixtures" / "heads"


def golden(name) -> dict[str, np.ndarray]:
  """The arrays of golden.npz that belong to a fixture, without its name."""
  with np.load(HEADS / "golden.npz") as file:
    return {key.removeprefix(name + "_"): file[key] for key in file.files if key.startswith(name + "_")}


def config_of(name) -> dict:
  return json.loads((HEADS / name / "config.json").read_text())


def tensors_of(folder) -> dict[str, np.ndarray]:
  """All tensors in a folder, whatever the format."""
  found = {}
  for file in sorted(pathlib.Path(folder).iterdir()):
    if file.suffix == ".safetensors":
      found |= load_file(file)
    if file.suffix in (".pt", ".bin"):
      found |= torch_file.read_torch_file(file)
  return found


def changed(tmp_path, name, *, tensors=None, drop=(), config=None, without=(), nested=()):
  """A copy of a fixture in `tmp_path`, as safetensors; `tensors` and `config` update it, the others say what to remove.

  `nested` are the keys that lead to the object in config.json that is changed.
  """
  folder = tmp_path / name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  kept = {key: np.ascontiguousarray(value) for key, value in (tensors_of(HEADS / name) | (tensors or {})).items()
          if key not in drop}
  save_file(kept, folder / "model.safetensors")
  values = config_of(name)
  inner = values
  for key in nested:
    inner = inner[key]
  inner.update(config or {})
  for key in without:
    del inner[key]
  (folder / "config.json").write_text(json.dumps(values))
  return folder


def assert_same(head, other):
  """Same weights, bit for bit and of the same type, and same configuration."""
  assert head.config == other.config
  leaves, others = jax.tree.flatten_with_path(head)[0], jax.tree.flatten_with_path(other)[0]
  assert [path for path, _ in leaves] == [path for path, _ in others]
  for (path, x), (_, y) in zip(leaves, others):
    assert x.dtype == y.dtype and np.array_equal(x, y), path


def assert_written(folder, tensors):
  """That a folder holds these tensors and no others, bit for bit."""
  found = tensors_of(folder)
  assert found.keys() == tensors.keys()
  for name, value in tensors.items():
    assert found[name].dtype == value.dtype and np.array_equal(found[name], value), name
