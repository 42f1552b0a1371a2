"""Writes T5, T5 v1.1 or mT5 as a Hugging Face folder, as `t5.read_folder` and Transformers read it."""
import jax.numpy as jnp

from specjax.checkpoints import folder_writer
from specjax.checkpoints import t5
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.models.encoder_decoder_weights import EncoderDecoderWeights

_ARCHITECTURES = {"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}


def write_folder(folder, config: EncoderDecoderConfig, weights: EncoderDecoderWeights,
                 tokenizer: Tokenizer | None = None, *, dtype=None) -> None:
  """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files.

  Arguments and errors as of `folder_writer.write_folder`. What fills inputs up is the token that decoding begins with,
  as in every published T5.

  Raises:
    CheckpointError: another family; a head whose scale `tie_word_embeddings` does not tell; more than one token that
      decoding begins with.
  """
  if config.family not in _ARCHITECTURES:
    raise CheckpointError(f"a model of the family {config.family!r} is not written (written: "
                          f"{', '.join(_ARCHITECTURES)})")
  if config.scaled_head != (config.tied and config.family == "t5") or config.tied and config.family == "mt5":
    raise CheckpointError(f"scaled_head={config.scaled_head}, tied={config.tied}: a folder of {config.family} says by "
                          "one key that the head is the embedding and scaled, or neither")
  if len(config.opening) > 1:
    raise CheckpointError(f"opening={config.opening}: a folder of {config.family} names the one token that decoding "
                          "begins with")
  generation = {"decoder_start_token_id": config.opening[0], "pad_token_id": config.opening[0]}
  folder_writer.put(folder, describe(config), tensors(config, weights), tokenizer, config.vocab_size, dtype,
                    generation=generation)


def tensors(config: EncoderDecoderConfig, weights: EncoderDecoderWeights) -> dict:
  """By name, each as it is stored: matrices [out, in], queries, keys, values and gates apart."""
  found = {}
  for name, place in t5.places(config).items():
    holder, field = weights, place.field
    if place.layer is not None:
      stack, index = place.layer
      cross = field.startswith("cross_")
      holder = (weights.encoder if stack == "encoder" else weights.cross if cross else weights.layers)[index]
      field = field.removeprefix("cross_")
    found[name] = jnp.asarray(getattr(holder, field))[place.start:place.start + place.shape[0]]
  return found


def describe(config: EncoderDecoderConfig) -> dict:
  """config.json."""
  ids, kind = list(config.eos_ids), t5.feed_forward_name(config)
  return {
      "architectures": [_ARCHITECTURES[config.family]], "model_type": config.family, "is_encoder_decoder": True,
      "vocab_size": config.vocab_size, "d_model": config.width, "d_kv": config.head_width, "d_ff": config.mlp_width,
      "num_layers": config.encoder_layers, "num_decoder_layers": config.layers, "num_heads": config.heads,
      "feed_forward_proj": kind, "layer_norm_epsilon": config.norm_eps, "dropout_rate": 0.0,
      "relative_attention_num_buckets": config.buckets, "relative_attention_max_distance": config.max_distance,
      "tie_word_embeddings": config.tied, "decoder_start_token_id": config.opening[0],
      "pad_token_id": config.opening[0],
      "eos_token_id": ids[0] if len(ids) == 1 else ids or None}
