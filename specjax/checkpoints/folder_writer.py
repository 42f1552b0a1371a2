"""Writes a decoder as a Hugging Face folder, as `safetensors.read_folder` reads it: config.json, tensors, tokenizer.

What goes into any such folder (`put`) is here, too; `t5_writer` has the models with an encoder.
"""
import json
import pathlib

import jax.numpy as jnp

from specjax.checkpoints import assemble
from specjax.checkpoints import families
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import files
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights

FILE = "model.safetensors"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mixtral": "MixtralForCausalLM"}


def write_folder(folder, config: DecoderConfig, weights: DecoderWeights, tokenizer: Tokenizer | None = None, *,
                 dtype=None) -> None:
  """Writes config.json, model.safetensors and the tokenizer's files; what was there under these names is replaced.

  Args:
    folder: made if need be.
    config, weights: of the decoder; rows that fill the vocabulary up are written, too.
    tokenizer: None writes none of its files, and the folder is then no model that `load` takes.
    dtype: of the floats written; None leaves them as they are, and reading them in that type gives the same bits.

  Raises:
    CheckpointError: the folder holds shards, which a reader would take first, or cannot be written; a family, windows
      or rotary positions that are not written; a tokenizer with more ids than the embedding has rows.
  """
  require_written(config)
  moe = config.moe
  if moe is not None and (moe.dense or not moe.renormalised or moe.width != config.mlp_width):
    raise CheckpointError(f"moe={moe}: {config.family} has mixtures of mlp_width={config.mlp_width} in all layers, and "
                          "divides the weights of the chosen experts by their sum")
  put(folder, describe(config), tensors(config, weights), tokenizer, config.vocab_size, dtype)


def put(folder, described: dict, arrays: dict, tokenizer: Tokenizer | None, rows: int, dtype, *,
        generation: dict | None = None) -> None:
  """Writes a folder's files; arguments and errors as of `write_folder`.

  Args:
    described: config.json. arrays: tensors by name. rows: of the embedding.
    generation: keys of generation_config.json besides the tokenizer's.
  """
  folder = pathlib.Path(folder).expanduser()
  if (folder / "model.safetensors.index.json").exists():
    raise CheckpointError(f"{folder}: holds a model in shards, which would be read in place of the one written; choose "
                          "another folder")
  if tokenizer is not None and tokenizer.vocab_size > rows:
    raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size} tokens and the embedding {rows} rows: they are "
                          "not of the same model")
  texts = {} if tokenizer is None else tokenizer.files()
  if texts and generation:
    name = "generation_config.json"
    texts[name] = json.dumps(json.loads(texts[name]) | generation, indent=2) + "\n"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
      (folder / name).write_text(text, encoding="utf-8")
  except OSError as error:
    raise CheckpointError(f"{folder}: cannot be written ({error})") from error
  files.write_head(folder, FILE, described, arrays, dtype)


def require_written(config) -> None:
  """Raises CheckpointError for a model that `write_folder` does not write: before hours are spent on its weights."""
  if config.family not in _ARCHITECTURES:
    raise CheckpointError(f"a model of the family {config.family!r} is not written (written: "
                          f"{', '.join(_ARCHITECTURES)})")
  if config.rope_layout != "half":
    raise CheckpointError(f"rope_layout={config.rope_layout!r}: such folders hold rotary pairs as halves; turn the "
                          "rows of queries and keys first")
  for name in ("rope_scaling", "windows", "rope_width"):
    if getattr(config, name):
      raise CheckpointError(f"{name}={getattr(config, name)!r}: models with it are read and not written yet")


def tensors(config: DecoderConfig, weights: DecoderWeights) -> dict:
  """By name, each as it is stored: matrices [out, in], queries, keys, values, gate and up apart."""
  found = {}
  for name, place in assemble.places(config, families.FAMILIES[config.family].names).items():
    whole = jnp.asarray(getattr(weights if place.layer is None else weights.layers[place.layer], place.field))
    if place.stacked:  # the rows of all experts, one behind the other
      whole = whole.reshape(-1, whole.shape[-1])
    found[name] = whole[place.start:place.start + place.shape[0]]
  return found


def describe(config: DecoderConfig) -> dict:
  """config.json; the base of the rotary angles under both of its names (Transformers 4 and 5)."""
  ids = list(config.eos_ids)
  return {
      "architectures": [_ARCHITECTURES[config.family]], "model_type": config.family, "vocab_size": config.vocab_size,
      "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
      "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "intermediate_size": config.mlp_width,
      "hidden_act": "silu", "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
      "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
      "max_position_embeddings": config.max_context, "tie_word_embeddings": config.tied,
      "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
      **_of_family(config)}


def _of_family(config) -> dict:
  if config.family == "mixtral":
    return {"num_local_experts": config.moe.experts, "num_experts_per_tok": config.moe.chosen, "sliding_window": None}
  return {"attention_bias": False, "mlp_bias": False} if config.family == "llama" else {"use_sliding_window": False}
