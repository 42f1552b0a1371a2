"""The files of a draft head: config.json and its tensors, as safetensors or as PyTorch wrote them."""
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints import torch_file
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads.settings import Settings
from specjax.checkpoints.safetensors import FolderSource

# Heads beside a whole model are in a file of their own, which is looked for first.
_HEADS_ONLY = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.safetensors", "hydra_lm_head.pt")
_TORCH = ("pytorch_model.bin",)


class _Arrays:
  """Tensors that are in memory (`fields.TensorSource`)."""

  def __init__(self, path, arrays):
    self.path, self._arrays = path, arrays
    self.shapes = {name: value.shape for name, value in arrays.items()}

  def rows(self, name: str, start: int, stop: int) -> np.ndarray:
    return self._arrays[name][start:stop]


def open_head(path) -> tuple[Settings, object]:
  """The configuration of a head and the source of its tensors (`fields.TensorSource`).

  Args:
    path: a folder with config.json and one of medusa_lm_head.safetensors, medusa_lm_head.pt, the same of hydra,
      *.safetensors and pytorch_model.bin, or one of these files beside its config.json.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_file():
    folder, file = path.parent, path
  elif path.is_dir():
    names = [*_HEADS_ONLY, *([] if any(path.glob("*.safetensors")) else _TORCH)]
    folder, file = path, next((path / name for name in names if (path / name).is_file()), None)
  else:
    raise CheckpointError(f"{path}: is not there; pass the folder of a draft head (config.json and its tensors), or "
                          "the file of the tensors")
  settings = Settings(folder / "config.json", folder_vocabulary.read_json(folder / "config.json", required=True))
  if file is None and not any(folder.glob("*.safetensors")):
    raise CheckpointError(f"{folder}: has no tensors: one of {', '.join([*_HEADS_ONLY, 'model.safetensors', *_TORCH])} "
                          "is expected (shards of a .bin must be saved as safetensors)")
  if file is None:
    return settings, FolderSource(folder)
  if file.suffix == ".safetensors":
    return settings, _Arrays(file, _read_safetensors(file))
  if file.suffix not in (".pt", ".bin"):
    raise CheckpointError(f"{file}: is not the file of a head's tensors; .safetensors, .pt and .bin are read")
  return settings, _Arrays(file, torch_file.read_torch_file(file))


def write_head(folder, name: str, config: dict, tensors: dict, dtype) -> None:
  """Writes config.json and the tensors as `name`; floats in `dtype`, or as they are when it is None."""
  from safetensors.numpy import save
  folder = pathlib.Path(folder).expanduser()
  arrays = {}
  for key, value in tensors.items():
    value = np.asarray(jax.device_get(value))
    if dtype is not None and jnp.issubdtype(value.dtype, jnp.floating):
      value = value.astype(dtype)
    arrays[key] = np.ascontiguousarray(value)  # others are written in the wrong order
  kinds = {str(value.dtype) for value in arrays.values() if jnp.issubdtype(value.dtype, jnp.floating)}
  if len(kinds) == 1:
    config = config | {"torch_dtype": kinds.pop()}
  try:
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the old ones first: a save that is interrupted leaves a whole head.
    parts = {file: folder / f"{file}.part" for file in (name, "config.json")}
    parts[name].write_bytes(save(arrays, metadata={"format": "pt"}))  # as readable as config.json; its own writer's is not
    parts["config.json"].write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file, part in parts.items():
      os.replace(part, folder / file)
  except OSError as error:
    raise CheckpointError(f"{folder}: cannot be written ({error})") from error


def _read_safetensors(file):
  from safetensors import SafetensorError
  from safetensors.numpy import load_file
  try:
    return load_file(file)
  except (SafetensorError, OSError) as error:
    raise CheckpointError(f"{file}: is not a whole safetensors file ({error}); download it again") from error
