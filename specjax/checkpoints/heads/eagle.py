"""EAGLE-1 heads in files, as SafeAILab publishes them for EAGLE and EAGLE-2, and as HASS does.

`bias` of the configuration says whether `fc` has one; without the key it has. Layers have the names of a Llama model's,
without `input_layernorm` in the first and without a last norm; `qkv_bias` (EAGLE-Qwen2) says that queries, keys and
values have biases. The head of the vocabulary is the target's and not in the file. `embed_tokens` is a copy of the
target's, which SafeAILab's own loader asks for; a file without it means the target's itself. `model_type` names the
target's family and changes nothing: the layers are Llama's in any case.

Ours: `draft_vocab_size` with d2t and t2d, as in EAGLE-3, for a head that drafts some ids only (FR-Spec, arXiv
2502.14856), and `head_dim` where it is not hidden_size / num_attention_heads.
"""
from typing import Any

import jax

from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import eagle

DIALECTS = ("safeailab",)
FILE = "model.safetensors"


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether the names of tensors are of such a head; kinds of head that have more have been asked before."""
  del settings
  return "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names and not any(
      name.endswith("hidden_norm.weight") for name in names)


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> eagle.EagleHead:
  """The head."""
  del target
  shape = settings_lib.layer_shape(settings)
  settings.require({"model_type": ("llama", "qwen2", "mixtral")})
  e, vocab, count = shape.width, settings.count("vocab_size"), settings.count("num_hidden_layers")
  biased = settings.flag("qkv_bias")
  config = eagle.EagleConfig(shape=shape, vocab_size=vocab, draft_vocab=settings.count("draft_vocab_size", vocab),
                             max_context=settings.count("max_position_embeddings"))
  prefixes = [f"layers.{i}." for i in range(count)]
  return eagle.EagleHead(
      fuse=tensors.take("fc.weight", (e, 2 * e)),
      fuse_bias=tensors.take("fc.bias", (e,)) if settings.flag("bias", True) else None,
      layers=tuple(tensors_lib.read_layer(tensors, prefix, shape, e, normed_heads=False, biased=biased)
                   for prefix in prefixes),
      input_norms=tuple(tensors.take(prefix + "input_layernorm.weight", (e,)) for prefix in prefixes[1:]),
      ids=tensors_lib.read_ids(tensors, config.draft_vocab, vocab), config=config,
      embedding=tensors.take("embed_tokens.weight", (vocab, e)) if "embed_tokens.weight" in tensors.shapes else None)


def write(head: eagle.EagleHead, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors."""
  del dialect
  config = head.config
  tensors = {"fc.weight": head.fuse}
  if head.fuse_bias is not None:
    tensors["fc.bias"] = head.fuse_bias
  for i, layer in enumerate(head.layers):
    tensors |= tensors_lib.write_layer(layer, f"layers.{i}.", config.shape)
  tensors |= {f"layers.{i + 1}.input_layernorm.weight": norm for i, norm in enumerate(head.input_norms)}
  tensors |= tensors_lib.write_ids(head.ids, config.vocab_size)
  if head.embedding is not None:
    tensors["embed_tokens.weight"] = head.embedding
  described = settings_lib.describe_layers(config.shape) | {
      "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": len(head.layers),
      "vocab_size": config.vocab_size, "max_position_embeddings": config.max_context, "tie_word_embeddings": False,
      "bias": head.fuse_bias is not None, "qkv_bias": head.layers[0].qkv_bias is not None}
  return described | ({} if head.ids is None else {"draft_vocab_size": config.draft_vocab}), tensors
