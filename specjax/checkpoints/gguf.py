"""Reads a decoder from a GGUF file (llama.cpp's format), of the `gguf_families` there are.

The file is read a few rows at a time, not mapped (see `byte_ranges`). Blocks are dequantised by the `gguf` package.
"""
import dataclasses
import os

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import assemble
from specjax.checkpoints import byte_ranges
from specjax.checkpoints import gguf_families
from specjax.checkpoints import shards
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import GGUFHeader, read_header
from specjax.models import rope
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights

TENSOR_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_ROPE_HINT = "it holds one rescaling of rotary angles for short and one for long texts (Phi-3), which is not supported"
_HINTS = {"rope_factors_long.weight": _ROPE_HINT, "rope_factors_short.weight": _ROPE_HINT}


def read_gguf(path, dtype=jnp.float32, place: shards.Placement | None = None, *,
              header: GGUFHeader | None = None) -> tuple[DecoderConfig, DecoderWeights]:
  """Reads the configuration and the weights of a GGUF file.

  Query and key rows of llama files are put back from the interleaved order that llama.cpp's converter gives them, so
  the weights equal those of the Hugging Face checkpoint and `rope_layout` is "half".

  Args:
    path: of the file.
    dtype: of the weights kept; quantised values are exact in float32 and rounded otherwise.
    place: the sharding of each field (see `assemble.assemble`); all are on the default device when None.
    header: of the same file, when the caller has parsed it already.

  Returns:
    The configuration (`num_tokens` and `eos_ids` from the file's vocabulary, if it has one) and the weights, each
    matrix [out, in], with `head` None when the file has no output.weight.

  Raises:
    CheckpointError: a file that is not GGUF, truncated, of another architecture, with an unsupported tensor type or
      configuration, or with a missing, extra or misshapen tensor; the message names which.
  """
  header = header or read_header(path)
  config = gguf_families.read_config(header)
  with GGUFSource(header) as source:
    family = gguf_families.FAMILIES[config.family]
    table = assemble.places(config, family.names, interleaved=family.interleaved)
    assemble.check(table, source, ignored={gguf_families.ROPE_FACTORS}, hints=_HINTS)
    return _with_factors(config, source), assemble.assemble(config, table, source, dtype, place)


def _with_factors(config, source):
  """The configuration with the numbers by which the file divides rotary frequencies, if it has them."""
  name = gguf_families.ROPE_FACTORS
  if name not in source.shapes:
    return config
  if config.rope_scaling is not None or source.shapes[name] != (config.head_width // 2,):
    raise CheckpointError(f"{source.path}: tensor {name!r} of shape {source.shapes[name]} does not go with the file's "
                          f"configuration: shape ({config.head_width // 2},) and no rope.scaling.type are expected")
  factors = tuple(source.rows(name, 0, source.shapes[name][0]).reshape(-1).tolist())
  return dataclasses.replace(config, rope_scaling=rope.RopeScaling("factors", factors=factors))


class GGUFSource:
  """The tensors of an open GGUF file, dequantised on the way out (`fields.TensorSource`)."""

  def __init__(self, header: GGUFHeader):
    """Checks the type and the extent of every tensor; raises CheckpointError naming the first that is wrong."""
    import gguf  # 60 ms: paid only by those who read such a file
    self.path = header.path
    self.shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    self._header = header
    self._dequantize = gguf.dequantize
    self._types = {}
    known = {gguf.GGMLQuantizationType[name].value: gguf.GGMLQuantizationType[name] for name in TENSOR_TYPES}
    for name, tensor in header.tensors.items():
      if tensor.kind not in known:
        kinds = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
        raise CheckpointError(f"{self.path}: tensor {name!r} has type {kinds.get(tensor.kind, tensor.kind)}, which "
                              f"is not supported (supported: {', '.join(TENSOR_TYPES)}); use another quantisation")
      block, block_bytes = gguf.GGML_QUANT_SIZES[known[tensor.kind]]
      if tensor.shape[-1] % block:
        raise CheckpointError(f"{self.path}: tensor {name!r} of shape {tensor.shape} has rows that are not whole "
                              f"blocks of {block} values: the file is damaged")
      values = int(np.prod(tensor.shape, dtype=object))
      end = tensor.offset + values // block * block_bytes
      if end > header.size:
        raise CheckpointError(f"{self.path}: tensor {name!r} ends at byte {end} of {header.size}: the file is "
                              "truncated; download it again")
      self._types[name] = known[tensor.kind], block, block_bytes
    self._file = os.open(self.path, os.O_RDONLY)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    os.close(self._file)

  def rows(self, name: str, start: int, stop: int, within: tuple[slice, ...] = ()) -> np.ndarray:
    """Rows start to stop, or what is `within` them: f32[stop - start, ...]. Of a row, whole blocks are read."""
    tensor = self._header.tensors[name]
    kind, block, block_bytes = self._types[name]
    part = byte_ranges.part(tensor.shape, start, stop, within, block, block_bytes)
    try:
      raw = part.read(self._file, tensor.offset)
    except EOFError as error:
      raise CheckpointError(f"{self.path}: tensor {name!r} could not be read whole: the file is truncated") from error
    # One long row: the package converts sixteen rows a step, and the longer its steps the less Python it runs.
    return part.cut(self._dequantize(np.frombuffer(raw, np.uint8).reshape(1, -1), kind))
