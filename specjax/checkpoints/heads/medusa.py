"""Medusa's heads in files: heads alone (v0.1), and beside a whole model (v1.0, Medusa-2).

Head i is a list of modules, `{i}.{b}` under `medusa_head.` in a whole model and under nothing in a file of heads:
residual blocks, which are one module used again and so hold the same tensors if all of them are stored, and behind them
a matrix over the vocabulary. Published configurations say 2 heads where the file holds 5, so heads are counted in it.

Ours, in the configuration: with `shares_target_head` the heads have no such matrix and use the target's; with
`draft_vocab_size`, beside d2t and t2d as in EAGLE-3, they draft only some ids; `rank_accuracy` says how often the choice
of each rank of each head was right.
"""
import re
from typing import Any

import jax

from specjax.checkpoints.heads import residual
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import medusa

DIALECTS = ("medusa",)
FILE = "medusa_lm_head.safetensors"

_IN_A_MODEL = "medusa_head."
_BASE_MODEL = ("model.", "lm_head.")


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether a configuration and the names of tensors are of such heads."""
  return "medusa_num_heads" in settings.values or any(
      name == "0.0.linear.weight" or name.startswith(_IN_A_MODEL) for name in names)


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> medusa.MedusaHead:
  """The heads."""
  del target
  names = tensors.shapes
  prefix = _IN_A_MODEL if any(name.startswith(_IN_A_MODEL) for name in names) else ""
  if prefix:
    tensors.ignore(*[name for name in names if name.startswith(_BASE_MODEL)])
  numbers = [re.match(rf"{re.escape(prefix)}(\d+)\.", name) for name in names]
  count = 1 + max((int(found[1]) for found in numbers if found), default=0)
  blocks, shared = settings.count("medusa_num_layers", 1), settings.flag("shares_target_head")
  width = settings.count("hidden_size", residual.rows(tensors, f"{prefix}0.0.linear.weight"))
  if shared:
    vocab = settings.count("vocab_size")
  else:
    vocab = settings.count("vocab_size", residual.rows(
        tensors, f"{prefix}0.{blocks}.weight", f"; with medusa_num_layers {blocks} it is head 0's matrix over the "
        "vocabulary. If the heads were trained to use the target's, write \"shares_target_head\": true into "
        "config.json"))
  draft = settings.count("draft_vocab_size", vocab)
  config = medusa.MedusaConfig(heads=count, blocks=blocks, width=width, vocab_size=vocab, draft_vocab=draft,
                               accuracy=residual.read_accuracy(settings, count))
  modules = [residual.read_tied(tensors, [f"{prefix}{i}.{block}." for block in range(blocks)], width)
             for i in range(count)]
  return medusa.MedusaHead(
      linear=tuple(linear for linear, _ in modules), bias=tuple(bias for _, bias in modules),
      vocabulary=None if shared else tuple(
          tensors.take(f"{prefix}{i}.{blocks}.weight", (draft, width)) for i in range(count)),
      ids=tensors_lib.read_ids(tensors, draft, vocab), config=config)


def write(head: medusa.MedusaHead, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors, of heads alone."""
  del dialect
  config, tensors = head.config, tensors_lib.write_ids(head.ids, head.config.vocab_size)
  for i, (linear, bias) in enumerate(zip(head.linear, head.bias, strict=True)):
    tensors |= residual.write_tied([f"{i}.{block}." for block in range(config.blocks)], linear, bias)
    if head.vocabulary is not None:
      tensors[f"{i}.{config.blocks}.weight"] = head.vocabulary[i]
  return {"medusa_num_heads": config.heads, "medusa_num_layers": config.blocks,
          **residual.describe(config, head.vocabulary is None)}, tensors
