"""DSpark's drafters in files, as DeepSpec writes them, and its DFlash, which has no Markov and no confidence head.

`target_layer_ids` name layers whose output is read, which is the input of the next; -1 is the embedding. Files hold
copies of the target's embedding and head, frozen in training: they are compared with the target's and not kept.
DeepSpec's own code takes them from the file, so `embed_tokens.weight` and `lm_head.weight` have to be put beside what is
written here for it. Of the Markov heads only "vanilla" is supported.

Ours: `draft_vocab_size` with d2t and t2d, as in EAGLE-3, for a drafter of some ids only; `markov_w2` has as many rows.
"""
from typing import Any

import jax
import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import dflash as dflash_files
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import dflash
from specjax.models import dspark

DIALECTS = ("deepspec",)
FILE = "model.safetensors"

_CHECKED_ROWS = 64  # of the target's matrices
_ANCHORS = 512  # of a training sequence; DeepSpec's code asks for it in drafting too, and does not read it


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether a configuration is of such a drafter; the names of tensors are not asked."""
  del names
  return "markov_rank" in settings.values or any("DSpark" in name for name in settings.names("architectures"))


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> dspark.DSparkHead:
  """The drafter; the copies in the file are compared with `target`, if it is not None."""
  settings.require({"model_type": ("qwen3",)})
  shape = settings_lib.layer_shape(settings)
  vocab, rank = settings.count("vocab_size"), settings.get("markov_rank", 0)
  if type(rank) is not int or rank < 0:
    raise settings.error("markov_rank", "a whole number from 0 is required")
  if rank:
    settings.require({"markov_head_type": ("vanilla",)})
  mask_id, named = settings.get("mask_token_id"), settings.get("target_layer_ids")
  if type(mask_id) is not int or not 0 <= mask_id < vocab:
    raise settings.error("mask_token_id", f"an id below vocab_size {vocab} is required")
  if not isinstance(named, list) or not named or not all(type(layer) is int and layer >= -1 for layer in named):
    raise settings.error("target_layer_ids", "a list of layers is required, -1 for the embedding")
  config = dflash.DFlashConfig(
      shape=shape, layers=settings.count("num_hidden_layers"), features=tuple(layer + 1 for layer in named),
      block=settings.count("block_size"), mask_id=mask_id, vocab_size=vocab,
      draft_vocab=settings.count("draft_vocab_size", vocab), max_context=settings.count("max_position_embeddings"))
  for name, own in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
    if name in tensors.shapes:
      _check_copy(tensors, name, (vocab, shape.width), None if target is None else
                  target.head if own == "head" else target.weights.embedding)
  drafter = dflash_files.take(tensors, config)
  first = second = confidence = bias = None
  if rank:
    first = tensors.take("markov_head.markov_w1.weight", (vocab, rank))
    second = tensors.take("markov_head.markov_w2.weight", (config.draft_vocab, rank))
  if settings.flag("enable_confidence_head", "confidence_head.proj.weight" in tensors.shapes):
    width = shape.width + (rank if settings.flag("confidence_head_with_markov") else 0)
    confidence = tensors.take("confidence_head.proj.weight", (1, width))[0]
    bias = tensors.take("confidence_head.proj.bias", (1,))[0]
  return dspark.DSparkHead(drafter=drafter.replace(ids=None), first=first, second=second, confidence=confidence,
                           confidence_bias=bias, ids=drafter.ids)


def write(head: dspark.DSparkHead, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors; CheckpointError for what the format cannot say."""
  config, drafter = head.config, head.drafter
  tensors = dflash_files.tensors_of(drafter.replace(ids=head.ids), dialect)
  if head.first is not None:
    tensors |= {"markov_head.markov_w1.weight": head.first, "markov_head.markov_w2.weight": head.second}
  with_markov = False
  if head.confidence is not None:
    with_markov = head.confidence.shape[0] > config.shape.width
    tensors |= {"confidence_head.proj.weight": head.confidence[None],
                "confidence_head.proj.bias": head.confidence_bias[None]}
  return settings_lib.describe_layers(config.shape) | {
      "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": config.layers,
      "layer_types": ["full_attention"] * config.layers, "vocab_size": config.vocab_size,
      "draft_vocab_size": config.draft_vocab, "max_position_embeddings": config.max_context,
      "tie_word_embeddings": False, "block_size": config.block, "mask_token_id": config.mask_id,
      "target_layer_ids": [layer - 1 for layer in config.features], "num_anchors": _ANCHORS, "markov_rank": head.rank,
      "markov_head_type": "vanilla", "enable_confidence_head": head.confidence is not None,
      "confidence_head_with_markov": with_markov}, tensors


def _check_copy(tensors, name, shape, own):
  """Takes a copy of a matrix of the target, and raises CheckpointError where it is none."""
  if own is None:
    tensors.ignore(name)
    return
  copy = tensors.floats(name, shape)
  rows = np.linspace(0, min(shape[0], own.shape[0]) - 1, _CHECKED_ROWS).astype(int)
  known, found = np.asarray(own)[rows].astype(np.float32), copy[rows].astype(np.float32)
  if found.shape != known.shape or np.abs(found - known).max() > 0.02 * np.abs(known).max():
    raise CheckpointError(f"{tensors.path}: {name} is not the target's: the drafter was trained with another target, or "
                          "with a matrix of its own, which is not supported")
