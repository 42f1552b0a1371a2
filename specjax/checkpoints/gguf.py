"""Reads a decoder from a GGUF file (llama.cpp's format): architectures llama and qwen2.

The file is read with `pread`, a few rows at a time, not mapped: pages of a mapping count as the process's memory, and a
mapping of a file that shrinks kills the process. Blocks are dequantised by the `gguf` package.
"""
import os

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import assemble
from specjax.checkpoints import gguf_vocabulary
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import GGUFHeader, read_header
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights

NAMES = assemble.Names(
  embedding="token_embd.weight", final_norm="output_norm.weight", head="output.weight",
  attention_norm="blk.{}.attn_norm.weight", query="blk.{}.attn_q.weight", key="blk.{}.attn_k.weight",
  value="blk.{}.attn_v.weight", query_bias="blk.{}.attn_q.bias", key_bias="blk.{}.attn_k.bias",
  value_bias="blk.{}.attn_v.bias", attention_out="blk.{}.attn_output.weight", mlp_norm="blk.{}.ffn_norm.weight",
  gate="blk.{}.ffn_gate.weight", up="blk.{}.ffn_up.weight", down="blk.{}.ffn_down.weight")

ARCHITECTURES = ("llama", "qwen2")
TENSOR_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

# Keys below "<architecture>." that the configuration is made from.
_READ = frozenset([
  "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
  "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
  "rope.freq_base", "rope.dimension_count", "vocab_size"])
# Keys that change the arithmetic, with the one value that leaves it as it is.
_NEUTRAL = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.finetuned": False,
            "rope.scale_linear": 1.0, "expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0,
            "attention.causal": True}
_ROPE_HINT = "it rescales the rotary angles (rope_scaling, as in Llama 3.1 and later), which is not supported"
_HINTS = {"rope_freqs.weight": _ROPE_HINT, "rope_factors_long.weight": _ROPE_HINT,
          "rope_factors_short.weight": _ROPE_HINT}


def read_gguf(path, dtype=jnp.float32, *, header: GGUFHeader | None = None) -> tuple[DecoderConfig, DecoderWeights]:
  """Reads the configuration and the weights of a GGUF file.

  Query and key rows of llama files are put back from the interleaved order that llama.cpp's converter gives them, so
  the weights equal those of the Hugging Face checkpoint and `rope_layout` is "half".

  Args:
    path: of the file.
    dtype: of the weights kept; quantised values are exact in float32 and rounded otherwise.
    header: of the same file, when the caller has parsed it already.

  Returns:
    The configuration (`num_tokens` and `eos_ids` from the file's vocabulary, if it has one) and the weights, each
    matrix [out, in], with `head` None when the file has no output.weight.

  Raises:
    CheckpointError: a file that is not GGUF, truncated, of another architecture, with an unsupported tensor type or
      configuration, or with a missing, extra or misshapen tensor; the message names which.
  """
  header = header or read_header(path)
  config = read_config(header)
  with GGUFSource(header) as source:
    table = assemble.places(config, NAMES, interleaved=config.family == "llama")
    assemble.check(table, source, hints=_HINTS)
    return config, assemble.assemble(config, table, source, dtype)


def read_config(header: GGUFHeader) -> DecoderConfig:
  """The decoder that a GGUF header describes; raises CheckpointError naming a key that is absent or unsupported."""
  path, metadata = header.path, header.metadata
  family = metadata.get("general.architecture")
  if family not in ARCHITECTURES:
    raise CheckpointError(f"{path}: architecture {family!r} is not supported (supported: {', '.join(ARCHITECTURES)})")
  prefix = family + "."
  values = {key[len(prefix):]: value for key, value in metadata.items() if key.startswith(prefix)}
  for key, value in values.items():
    if key in _NEUTRAL and value != _NEUTRAL[key]:
      raise CheckpointError(f"{path}: {prefix}{key} = {value!r} is not supported (only {_NEUTRAL[key]!r} is)")
    if key not in _READ and key not in _NEUTRAL:
      raise CheckpointError(f"{path}: configuration key {prefix + key!r} (= {str(value)[:60]}) is not known, so it "
                            "cannot be honoured; convert the model without it")

  def count(key, default=None):
    value = values.get(key, default)
    if type(value) is not int or value < 1:
      raise CheckpointError(f"{path}: {prefix}{key} is {str(value)[:60]}; a positive whole number is required")
    return value

  def real(key, default=None):
    value = values.get(key, default)
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
      raise CheckpointError(f"{path}: {prefix}{key} is {str(value)[:60]}; a positive number is required")
    # The shortest decimal of the stored float32 is what the model's author wrote: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value)))

  layers, width, heads = count("block_count"), count("embedding_length"), count("attention.head_count")
  head_width = count("attention.key_length", width // heads)
  for key in ("attention.value_length", "rope.dimension_count"):
    if count(key, head_width) != head_width:
      raise CheckpointError(f"{path}: {prefix}{key} = {values[key]} is not supported: it must equal the head width "
                            f"{head_width}")
  if layers > len(header.tensors):
    raise CheckpointError(f"{path}: {prefix}block_count = {layers}, but the file holds {len(header.tensors)} tensors")
  embedding = header.tensors.get(NAMES.embedding)
  vocab_size = count("vocab_size", embedding.shape[0] if embedding else None)
  num_tokens, eos_ids = gguf_vocabulary.token_count(metadata), gguf_vocabulary.eos_ids(metadata)
  if num_tokens > vocab_size:
    raise CheckpointError(f"{path}: the tokenizer has {num_tokens} tokens and the embedding only {vocab_size} rows")
  try:
    return DecoderConfig(
      vocab_size=vocab_size, num_tokens=num_tokens or vocab_size, width=width, layers=layers, heads=heads,
      kv_heads=count("attention.head_count_kv", heads), head_width=head_width, mlp_width=count("feed_forward_length"),
      norm_eps=real("attention.layer_norm_rms_epsilon"), rope_theta=real("rope.freq_base", 10000.0),
      max_context=count("context_length"), eos_ids=eos_ids, qkv_bias=family == "qwen2",
      tied=NAMES.head not in header.tensors, family=family)
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{path}: {error}") from error


class GGUFSource:
  """The tensors of an open GGUF file, dequantised on the way out (`assemble.TensorSource`)."""

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

  def rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Rows start to stop: f32[stop - start, ...]."""
    tensor = self._header.tensors[name]
    kind, block, block_bytes = self._types[name]
    row = int(np.prod(tensor.shape[1:], dtype=object))
    first, count = start * row // block * block_bytes, (stop - start) * row // block * block_bytes
    raw = os.pread(self._file, count, tensor.offset + first)
    if len(raw) != count:
      raise CheckpointError(f"{self.path}: tensor {name!r} could not be read whole: the file is truncated")
    # One long row: the package converts sixteen rows a step, and the longer its steps the less Python it runs.
    return self._dequantize(np.frombuffer(raw, np.uint8).reshape(1, -1), kind).reshape(stop - start, *tensor.shape[1:])
