"""Hydra's heads in files, as zankner/Hydra writes them: `hydra_lm_head.pt` beside a config.json that says little.

Architecture "mlp": head i is `hydra_mlp.{i}.{b}`, first block and blocks behind it, which are one module and stored once
a block, and `hydra_lm_head.{i}`, its matrix over the vocabulary with a bias. Architecture "prefix-mlp", Hydra++: a
dropout stands before every module, so the blocks are `hydra_mlp.{i}.{2 b + 1}` and the matrix `hydra_lm_head.{i}.1`;
beside them is a Llama model of one layer, `prefix_embeding_layer` (sic), whose embedding is never used and not kept.
Files are written as safetensors here.

The published configuration holds nothing of that layer's heads and constants: they are the target's, so `load_head`
needs `target=`. Its rotary base alone is 10000 whatever the target's, as Hydra's copy of Llama does not read it. Not
supported, and refused by name: the architectures "cross-attn" and "eagle-attn", heads that are not grounded, which see
no drafted token (so the published loader takes a file that does not say), and hidden states of earlier layers.

Ours, in the configuration: the layer's constants, under the names of Llama's configuration; `shares_target_head`,
`draft_vocab_size` and `rank_accuracy` as in Medusa's (see `medusa`).
"""
import re
from typing import Any

import jax

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import residual
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import draft_layer
from specjax.models import hydra

DIALECTS = ("hydra",)
FILE = "hydra_lm_head.safetensors"

_PREFIX = "prefix_embeding_layer."
_PLAIN, _PREFIXED = "mlp", "prefix-mlp"
_THETA = 10000.0  # of Hydra's copy of Llama


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether a configuration and the names of tensors are of such heads."""
  return "hydra_num_heads" in settings.values or any(name.startswith("hydra_mlp.") for name in names)


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> hydra.HydraHead:
  """The heads; `target`, or None, is asked for the constants of prefix attention if the file has none."""
  if settings.get("hydra_head_arch", _PLAIN) not in (_PLAIN, _PREFIXED):
    raise settings.error("hydra_head_arch", f"supported: {_PLAIN!r} and {_PREFIXED!r}")
  if not settings.flag("grounded_heads"):
    raise settings.error("grounded_heads", "true is required: heads that see no drafted token are not supported")
  if settings.get("hidden_state_offset", 0) != 0:
    raise settings.error("hidden_state_offset", "0 is required: only the target's final hidden state is read")
  prefixed = settings.get("hydra_head_arch", _PLAIN) == _PREFIXED
  count, blocks = settings.count("hydra_num_heads", _count(tensors)), settings.count("hydra_num_layers", 1)
  names = _Names(prefixed, blocks)
  width = settings.count("hidden_size", residual.rows(tensors, f"{names.blocks(0)[0]}linear.weight"))
  shared = settings.flag("shares_target_head")
  vocab = settings.count("vocab_size", None if shared else residual.rows(tensors, f"{names.vocabulary(0)}weight"))
  draft = settings.count("draft_vocab_size", vocab)
  shape, context = _layer(settings, tensors, width, target) if prefixed else (None, None)
  config = hydra.HydraConfig(heads=count, blocks=blocks, width=width, vocab_size=vocab, draft_vocab=draft, prefix=shape,
                             max_context=context, accuracy=residual.read_accuracy(settings, count))
  behind = [residual.read_tied(tensors, names.blocks(i)[1:], width) for i in range(count)] if blocks > 1 else []
  own = lambda kind, *size: None if shared else tuple(
      tensors.take(f"{names.vocabulary(i)}{kind}", (draft, *size)) for i in range(count))
  return hydra.HydraHead(
      joining=tuple(_read_joining(tensors, names.blocks(i)[0], i, width) for i in range(count)),
      linear=tuple(linear for linear, _ in behind), bias=tuple(bias for _, bias in behind),
      vocabulary=own("weight", width), vocabulary_bias=own("bias"),
      ids=tensors_lib.read_ids(tensors, draft, vocab), prefix=_read_prefix(tensors, config) if prefixed else None,
      config=config)


def write(head: hydra.HydraHead, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors."""
  del dialect
  config, tensors = head.config, tensors_lib.write_ids(head.ids, head.config.vocab_size)
  names = _Names(config.prefix is not None, config.blocks)
  for i, joining in enumerate(head.joining):
    first, *behind = names.blocks(i)
    tensors |= {f"{first}linear.weight": joining.linear, f"{first}linear.bias": joining.bias,
                f"{first}res_connection.weight": joining.residual, f"{first}res_connection.bias": joining.residual_bias}
    if behind:
      tensors |= residual.write_tied(behind, head.linear[i], head.bias[i])
    if head.vocabulary is not None:
      matrix = names.vocabulary(i)
      tensors |= {f"{matrix}weight": head.vocabulary[i], f"{matrix}bias": head.vocabulary_bias[i]}
  layer = {}
  if config.prefix is not None:
    layer = settings_lib.describe_layers(config.prefix) | {"max_position_embeddings": config.max_context}
    tensors |= tensors_lib.write_layer(head.prefix.layer, f"{_PREFIX}layers.0.", config.prefix) | {
        f"{_PREFIX}layers.0.input_layernorm.weight": head.prefix.attention_norm,
        f"{_PREFIX}norm.weight": head.prefix.norm}
  return layer | {
      "hydra_num_heads": config.heads, "hydra_num_layers": config.blocks, "grounded_heads": True,
      "hydra_head_arch": _PLAIN if config.prefix is None else _PREFIXED, "hidden_state_offset": 0,
      **residual.describe(config, head.vocabulary is None)}, tensors


class _Names:
  """How the modules of a head are called, in an architecture with dropout before each of them, or without."""

  def __init__(self, prefixed: bool, blocks: int):
    self._prefixed, self._blocks = prefixed, blocks

  def blocks(self, head: int) -> list[str]:
    return [f"hydra_mlp.{head}.{2 * block + 1 if self._prefixed else block}." for block in range(self._blocks)]

  def vocabulary(self, head: int) -> str:
    return f"hydra_lm_head.{head}.{'1.' if self._prefixed else ''}"


def _count(tensors):
  """Heads in the file, for a configuration that does not say."""
  numbers = [re.match(r"hydra_mlp\.(\d+)\.", name) for name in tensors.shapes]
  return 1 + max((int(found[1]) for found in numbers if found), default=0)


def _layer(settings, tensors, width, target):
  """Shape and context of prefix attention."""
  if "num_attention_heads" in settings.values:
    return settings_lib.layer_shape(settings), settings.count("max_position_embeddings")
  if target is None:
    raise CheckpointError(f"{settings.path}: says nothing of the heads of prefix attention, which are the target's: pass "
                          "target=")
  c = target.config
  if c.heads * c.head_width != width:
    raise CheckpointError(f"{settings.path}: heads of Hydra's prefix attention share its width evenly, and the target's "
                          f"{c.heads} heads of {c.head_width} are not {width} together: the heads are for another one")
  rows = residual.rows(tensors, f"{_PREFIX}layers.0.mlp.up_proj.weight")
  return draft_layer.LayerShape(width=width, heads=c.heads, kv_heads=c.kv_heads, head_width=c.head_width, mlp_width=rows,
                                norm_eps=c.norm_eps, rope_theta=_THETA), c.max_context


def _read_joining(tensors, prefix, head, width):
  wide = (width, (head + 2) * width)
  return hydra.Joining(
      linear=tensors.take(f"{prefix}linear.weight", wide), bias=tensors.take(f"{prefix}linear.bias", (width,)),
      residual=tensors.take(f"{prefix}res_connection.weight", wide),
      residual_bias=tensors.take(f"{prefix}res_connection.bias", (width,)))


def _read_prefix(tensors, config):
  width, unused = config.width, f"{_PREFIX}embed_tokens.weight"
  if unused in tensors.shapes and tensors.shapes[unused][1:] != (width,):
    raise CheckpointError(f"{tensors.path}: tensor {unused!r} has shape {tuple(tensors.shapes[unused])}; {width} columns "
                          "are expected")
  tensors.ignore(unused)
  return hydra.Prefix(
      attention_norm=tensors.take(f"{_PREFIX}layers.0.input_layernorm.weight", (width,)),
      layer=tensors_lib.read_layer(tensors, f"{_PREFIX}layers.0.", config.prefix, width, normed_heads=False),
      norm=tensors.take(f"{_PREFIX}norm.weight", (width,)))
