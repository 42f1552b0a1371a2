"""Reads a decoder from a Hugging Face folder: config.json and *.safetensors, of the `families` there are."""
import pathlib

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safe_open needs
import numpy as np

from specjax.checkpoints import assemble
from specjax.checkpoints import families
from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.settings import Settings
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights

TENSOR_TYPES = ("F32", "F16", "BF16")


def read_folder(folder, dtype=jnp.float32) -> tuple[DecoderConfig, DecoderWeights]:
  """Reads the configuration and the weights of a Hugging Face folder.

  Args:
    folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
    dtype: of the weights kept.

  Returns:
    The configuration (`eos_ids` from generation_config.json or config.json; `num_tokens` is `vocab_size`, since only
    the tokenizer knows better) and the weights, each matrix [out, in], with `head` None when tied.

  Raises:
    CheckpointError: a file that is absent, damaged or truncated, an unsupported model type, configuration key or tensor
      type, or a missing, extra or misshapen tensor; the message names which.
  """
  folder = pathlib.Path(folder)
  config = read_config(folder)
  family, source = families.FAMILIES[config.family], FolderSource(folder)
  prefix = next((prefix for prefix in family.prefixes if prefix + family.names["embedding"] in source.shapes),
                family.prefixes[0])
  names = dict(family.names)
  if any(name.format(layer) in source.shapes for name in family.stacked.values() for layer in range(config.layers)
         if name not in names.values()):
    names |= family.stacked
  names = {part: prefix + name for part, name in names.items()}
  names["head"] = family.names["head"]
  table = assemble.places(config, names, by_head=family.by_head, transposed=family.transposed,
                          norm_offset=family.norm_offset)
  ignored = {name for name in source.shapes if name.endswith(family.ignored)}
  if config.tied:
    ignored.add(names["head"])
  assemble.check(table, source, ignored=ignored)
  if config.tied and names["head"] in source.shapes:
    assemble.check_equal(source, names["head"], names["embedding"])
  source.check_types(table)
  return config, assemble.assemble(config, table, source, dtype)


def read_config(folder) -> DecoderConfig:
  """The decoder that a folder's config.json describes; raises CheckpointError naming an absent or unsupported key."""
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  settings = Settings(path, folder_vocabulary.read_json(path, required=True))
  return families.read_config(settings, folder_vocabulary.eos_ids(folder))


class FolderSource:
  """The tensors of a folder's safetensors files (`assemble.TensorSource`)."""

  def __init__(self, folder: pathlib.Path):
    """Reads the headers of all shards; raises CheckpointError for a file that is absent or damaged."""
    self.path = folder
    self.shapes = {}
    self._files, self._kinds = {}, {}
    for file in _shards(folder):
      with _open(file) as shard:
        for name in shard.keys():
          if name in self.shapes:
            raise CheckpointError(f"{folder}: tensor {name!r} is in both {self._files[name].name} and {file.name}")
          view = shard.get_slice(name)
          self.shapes[name], self._kinds[name] = tuple(view.get_shape()), view.get_dtype()
          self._files[name] = file

  def check_types(self, names) -> None:
    """Raises CheckpointError naming a tensor whose storage type is not supported."""
    for name in names:
      if self._kinds[name] not in TENSOR_TYPES:
        raise CheckpointError(f"{self._files[name]}: tensor {name!r} has type {self._kinds[name]}, which is not "
                              f"supported (supported: {', '.join(TENSOR_TYPES)}): use an unquantised copy of the model")

  def rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Rows start to stop, in the type they are stored in."""
    # Opened anew each time (25 us): pages of a mapping count as the process's memory until it is closed, and a reader
    # that kept it open would hold the whole file beside the weights.
    with _open(self._files[name]) as shard:
      return shard.get_slice(name)[start:stop]


def _open(file):
  from safetensors import SafetensorError, safe_open
  try:
    return safe_open(file, framework="numpy")
  except (SafetensorError, OSError) as error:
    raise CheckpointError(f"{file}: is not a whole safetensors file ({error}); download it again") from error


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
  index = folder / "model.safetensors.index.json"
  single = folder / "model.safetensors"
  if index.exists():
    table = folder_vocabulary.read_json(index, required=True).get("weight_map")
    if not isinstance(table, dict) or not table:
      raise CheckpointError(f"{index}: has no 'weight_map' (tensor name -> file name)")
    names = sorted(set(map(str, table.values())))
    for name in names:
      if pathlib.PurePath(name).name != name or not (folder / name).is_file():
        raise CheckpointError(f"{index}: names the file {name!r}, which is not in {folder}: fetch the missing shard")
    return [folder / name for name in names]
  if single.exists():
    return [single]
  found = sorted(folder.glob("*.safetensors"))
  if len(found) != 1:
    raise CheckpointError(f"{folder}: has {len(found)} *.safetensors files and neither model.safetensors nor its "
                          "index; one file, or shards with model.safetensors.index.json, are read")
  return found
