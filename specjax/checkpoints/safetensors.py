"""Reads a decoder from a Hugging Face folder: config.json and *.safetensors, model types llama and qwen2."""
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safe_open needs
import numpy as np

from specjax.checkpoints import assemble
from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints.errors import CheckpointError
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights

_LAYER = "model.layers.{}."
NAMES = assemble.Names(
  embedding="model.embed_tokens.weight", final_norm="model.norm.weight", head="lm_head.weight",
  attention_norm=_LAYER + "input_layernorm.weight", query=_LAYER + "self_attn.q_proj.weight",
  key=_LAYER + "self_attn.k_proj.weight", value=_LAYER + "self_attn.v_proj.weight",
  query_bias=_LAYER + "self_attn.q_proj.bias", key_bias=_LAYER + "self_attn.k_proj.bias",
  value_bias=_LAYER + "self_attn.v_proj.bias", attention_out=_LAYER + "self_attn.o_proj.weight",
  mlp_norm=_LAYER + "post_attention_layernorm.weight", gate=_LAYER + "mlp.gate_proj.weight",
  up=_LAYER + "mlp.up_proj.weight", down=_LAYER + "mlp.down_proj.weight")

MODEL_TYPES = ("llama", "qwen2")
TENSOR_TYPES = ("F32", "F16", "BF16")
# Keys that change the arithmetic, with the values that leave it as it is. Absent is always allowed.
_NEUTRAL = {
  "hidden_act": ("silu",), "mlp_bias": (False,), "quantization_config": (None,), "rope_interleaved": (False, None),
  "partial_rotary_factor": (1.0, None), "num_experts": (0, None), "num_local_experts": (0, None),
}


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
  source = FolderSource(folder)
  table = assemble.places(config, NAMES)
  # Old checkpoints carry the rotary frequencies, which follow from rope_theta.
  ignored = {name for name in source.shapes if name.endswith(".rotary_emb.inv_freq")}
  if config.tied:
    ignored.add(NAMES.head)
  assemble.check(table, source, ignored=ignored)
  if config.tied and NAMES.head in source.shapes:
    assemble.check_equal(source, NAMES.head, NAMES.embedding)
  source.check_types(table)
  return config, assemble.assemble(config, table, source, dtype)


def read_config(folder) -> DecoderConfig:
  """The decoder that a folder's config.json describes; raises CheckpointError naming an absent or unsupported key."""
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  values = folder_vocabulary.read_json(path, required=True)
  family = values.get("model_type")
  if family not in MODEL_TYPES:
    raise CheckpointError(f"{path}: model_type {family!r} is not supported (supported: {', '.join(MODEL_TYPES)})")

  def count(key, default=None):
    value = values.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
      raise CheckpointError(f"{path}: {key!r} is {value!r}; a positive whole number is required")
    return value

  def real(key, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
      raise CheckpointError(f"{path}: {key!r} is {value!r}; a positive number is required")
    return float(value)

  _refuse_unsupported(path, values, family)
  width, heads = count("hidden_size"), count("num_attention_heads")
  rope_theta = (values.get("rope_parameters") or {}).get("rope_theta", values.get("rope_theta", 10000.0))
  try:
    return DecoderConfig(
      vocab_size=count("vocab_size"), num_tokens=count("vocab_size"), width=width, layers=count("num_hidden_layers"),
      heads=heads, kv_heads=count("num_key_value_heads", heads), head_width=count("head_dim", width // heads),
      mlp_width=count("intermediate_size"), norm_eps=real("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
      rope_theta=real("rope_theta", rope_theta), max_context=count("max_position_embeddings"),
      eos_ids=folder_vocabulary.eos_ids(folder), qkv_bias=family == "qwen2",
      tied=bool(values.get("tie_word_embeddings", False)), family=family)
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{path}: {error}") from error


def _refuse_unsupported(path, values: Mapping[str, Any], family: str) -> None:
  def refuse(key, value, allowed):
    raise CheckpointError(f"{path}: {key} = {value!r} is not supported for {family} (allowed: {allowed})")

  for key, allowed in _NEUTRAL.items():
    if key in values and values[key] not in allowed:
      refuse(key, values[key], " or ".join(map(repr, allowed)))
  if family == "llama" and values.get("attention_bias"):
    refuse("attention_bias", values["attention_bias"], "False")
  # Two spellings of the same thing: rope_scaling up to Transformers 4, rope_parameters since 5.
  for key in ("rope_scaling", "rope_parameters"):
    rope = values.get(key)
    if rope is None:
      continue
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    rest = set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"} if isinstance(rope, dict) else ()
    if kind != "default" or rest or rope.get("partial_rotary_factor", 1.0) != 1.0:
      refuse(key, rope, "absent, null, or rope_type 'default' with rope_theta alone")
  windowed = [kind for kind in values.get("layer_types") or () if kind != "full_attention"]
  if windowed:
    refuse("layer_types", windowed[0], "'full_attention'")
  if values.get("sliding_window") is not None and values.get("use_sliding_window", family != "qwen2"):
    if family != "qwen2" or values.get("max_window_layers", 0) < values.get("num_hidden_layers", 0):
      refuse("use_sliding_window", True, f"False; the window of {values['sliding_window']} tokens would apply")


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
