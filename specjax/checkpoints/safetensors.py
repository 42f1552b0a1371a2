"""Reads a decoder from a Hugging Face folder: config.json and *.safetensors, of the `families` there are."""
import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.checkpoints import assemble
from specjax.checkpoints import byte_ranges
from specjax.checkpoints import families
from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints import shards
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.settings import Settings
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights

TENSOR_TYPES = ("F32", "F16", "BF16")
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "I64": "<i8", "I32": "<i4",
           "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}


def read_folder(folder, dtype=jnp.float32,
                place: shards.Placement | None = None) -> tuple[DecoderConfig, DecoderWeights]:
  """Reads the configuration and the weights of a Hugging Face folder.

  Args:
    folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
    dtype: of the weights kept.
    place: the sharding of each field (see `assemble.assemble`); all are on the default device when None. A tied head
      that is stored although it is the embedding is compared with it by every process, and so read whole.

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
  return config, assemble.assemble(config, table, source, dtype, place)


def read_config(folder) -> DecoderConfig:
  """The decoder that a folder's config.json describes; raises CheckpointError naming an absent or unsupported key."""
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  settings = Settings(path, folder_vocabulary.read_json(path, required=True))
  return families.read_config(settings, folder_vocabulary.eos_ids(folder))


class FolderSource:
  """The tensors of a folder's safetensors files (`fields.TensorSource`)."""

  def __init__(self, folder: pathlib.Path):
    """Reads the headers of all shards; raises CheckpointError for a file that is absent or damaged."""
    self.path = folder
    self.shapes = {}
    self._files, self._kinds, self._offsets = {}, {}, {}
    for file in _shards(folder):
      with _open(file) as shard:
        for name in shard.keys():
          if name in self.shapes:
            raise CheckpointError(f"{folder}: tensor {name!r} is in both {self._files[name].name} and {file.name}")
          view = shard.get_slice(name)
          self.shapes[name], self._kinds[name] = tuple(view.get_shape()), view.get_dtype()
          self._files[name] = file
      self._offsets |= _data_offsets(file)

  def check_types(self, names) -> None:
    """Raises CheckpointError naming a tensor whose storage type is not supported."""
    for name in names:
      if self._kinds[name] not in TENSOR_TYPES:
        raise CheckpointError(f"{self._files[name]}: tensor {name!r} has type {self._kinds[name]}, which is not "
                              f"supported (supported: {', '.join(TENSOR_TYPES)}): use an unquantised copy of the model")

  def rows(self, name: str, start: int, stop: int, within: tuple[slice, ...] = ()) -> np.ndarray:
    """Rows start to stop, or what is `within` them, in the type they are stored in."""
    file, kind = self._files[name], self._kinds[name]
    if kind not in _DTYPES:
      raise CheckpointError(f"{file}: tensor {name!r} has type {kind}, which is not read")
    dtype = np.dtype(_DTYPES[kind])
    part = byte_ranges.part(self.shapes[name], start, stop, within, 1, dtype.itemsize)
    try:
      with open(file, "rb", buffering=0) as opened:
        return part.cut(np.frombuffer(part.read(opened.fileno(), self._offsets[name]), dtype))
    except (EOFError, OSError) as error:
      raise CheckpointError(f"{file}: tensor {name!r} could not be read whole ({error}): the file has changed since it "
                            "was opened") from error


def _open(file):
  from safetensors import SafetensorError, safe_open
  try:
    return safe_open(file, framework="numpy")
  except (SafetensorError, OSError) as error:
    raise CheckpointError(f"{file}: is not a whole safetensors file ({error}); download it again") from error


def _data_offsets(file) -> dict[str, int]:
  """Byte at which each tensor of a whole file begins: its header has a length, u64, and then a JSON object."""
  with open(file, "rb") as opened:
    size = int.from_bytes(opened.read(8), "little")
    header = json.loads(opened.read(size))
  return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


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
