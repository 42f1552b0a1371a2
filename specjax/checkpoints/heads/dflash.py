"""DFlash's drafters in files, as z-lab and SpecForge write them, JetSpec's causal ones among them.

`target_layer_ids` name layers whose output is read, which is the input of the next; without the key they are spread
from layer 1 to L - 3 of a target of L. Embedding and head are the target's and not in the file. Keys of `dflash_config`
may stand at the top of the configuration instead.

Ours: `draft_vocab_size` with d2t and t2d, as in EAGLE-3, for a drafter of some ids only.
"""
from typing import Any

import jax

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import dflash

DIALECTS = ("z-lab",)
FILE = "model.safetensors"

_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "causal_head")
# Keys of relatives of DFlash, with the values that leave it as it is.
_NEUTRAL = {
  "shift_label": (False, None), "pure_draft_prefix_len": (0, None), "projector_type": (None,),
  "input_embedding_scale": (1.0, None), "output_multiplier": (1.0, None), "final_logit_softcapping": (0.0, None),
}


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether a configuration and the names of tensors are of such a drafter."""
  return ("dflash_config" in settings.values or "block_size" in settings.values and "hidden_norm.weight" in names or
          any("DFlash" in name for name in settings.names("architectures")))


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> dflash.DFlashHead:
  """The drafter; `target`, or None, is asked for its number of layers if the file has neither this nor layer ids."""
  nested = settings.object("dflash_config")
  unknown = set(nested.values) - set(_KEYS) - set(_NEUTRAL)
  if unknown:
    raise nested.error(min(unknown), "nothing is known of this key, which may change what the drafter computes")
  settings.require(_NEUTRAL | {"model_type": ("qwen3",)})
  nested.require(_NEUTRAL)
  # What z-lab's code does with keys in both places: those inside count.
  found = {key: nested if key in nested.values else settings for key in _KEYS}
  shape = settings_lib.layer_shape(settings)
  vocab, count = settings.count("vocab_size"), settings.count("num_hidden_layers")
  mask_id = found["mask_token_id"].get("mask_token_id")
  if type(mask_id) is not int or not 0 <= mask_id < vocab:
    raise found["mask_token_id"].error("mask_token_id", f"an id below vocab_size {vocab} is required")
  config = dflash.DFlashConfig(
      shape=shape, layers=count, features=_features(settings, found["target_layer_ids"], count, target),
      block=found["block_size"].count("block_size"), mask_id=mask_id, vocab_size=vocab,
      draft_vocab=settings.count("draft_vocab_size", vocab), max_context=settings.count("max_position_embeddings"),
      causal=found["causal_head"].flag("causal_head") or settings.flag("is_causal"))
  if config.block < 2:
    raise found["block_size"].error("block_size", "2 or more is required")
  return take(tensors, config)


def take(tensors: tensors_lib.Tensors, config: dflash.DFlashConfig) -> dflash.DFlashHead:
  """The tensors that a block of this configuration has."""
  shape = config.shape
  e, prefixes = shape.width, [f"layers.{i}." for i in range(config.layers)]
  return dflash.DFlashHead(
      fuse=tensors.take("fc.weight", (e, len(config.features) * e)),
      fused_norm=tensors.take("hidden_norm.weight", (e,)),
      layers=tuple(tensors_lib.read_layer(tensors, prefix, shape, e, normed_heads=True) for prefix in prefixes),
      input_norms=tuple(tensors.take(prefix + "input_layernorm.weight", (e,)) for prefix in prefixes),
      norm=tensors.take("norm.weight", (e,)), ids=tensors_lib.read_ids(tensors, config.draft_vocab, config.vocab_size),
      config=config)


def write(head: dflash.DFlashHead, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors; CheckpointError for what the format cannot say."""
  config = head.config
  if min(config.features) < 1:
    raise CheckpointError(f"dialect {dialect!r} cannot say that the layers {config.features} are read: it names layers "
                          "by their output, and the input of layer 0 is none")
  return settings_lib.describe_layers(config.shape) | {
      "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": config.layers,
      "layer_types": ["full_attention"] * config.layers, "vocab_size": config.vocab_size,
      "draft_vocab_size": config.draft_vocab, "max_position_embeddings": config.max_context,
      "tie_word_embeddings": False, "block_size": config.block, "dflash_config": {
          "mask_token_id": config.mask_id, "target_layer_ids": [i - 1 for i in config.features],
          "causal_head": config.causal}}, tensors_of(head, dialect)


def tensors_of(head: dflash.DFlashHead, dialect: str) -> dict[str, jax.Array]:
  """What `take` takes; CheckpointError for a drafter without norms of queries and keys, which `dialect` has."""
  if any(layer.query_norm is None or layer.key_norm is None for layer in head.layers):
    raise CheckpointError(f"dialect {dialect!r} has norms of queries and keys in every layer; this drafter has none")
  tensors = {"fc.weight": head.fuse, "hidden_norm.weight": head.fused_norm, "norm.weight": head.norm}
  for i, (layer, norm) in enumerate(zip(head.layers, head.input_norms, strict=True)):
    tensors |= tensors_lib.write_layer(layer, f"layers.{i}.", head.config.shape)
    tensors[f"layers.{i}.input_layernorm.weight"] = norm
  return tensors | tensors_lib.write_ids(head.ids, head.config.vocab_size)


def _features(settings, named, count, target):
  ids = named.indices("target_layer_ids")
  if ids is None:
    if target is None and settings.get("num_target_layers") is None:
      raise named.error("target_layer_ids", "without them they follow from the target's number of layers: set "
                        "num_target_layers, or pass target=")
    layers = settings.count("num_target_layers", None if target is None else target.config.layers)
    ids = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    if layers < 4:
      raise settings.error("num_target_layers", "the default of target_layer_ids needs 4 layers or more")
  return tuple(i + 1 for i in ids)
