"""MTP modules in files: as speculators saves them, and as Qwen3-Next, Qwen3.5 and MiMo hold them.

The tensors are the same under other names; what differs in meaning:

- Columns of the projection: the embedding comes first in speculators' files and in Qwen's (`mtp.fc`), the hidden state
  in MiMo's (`input_proj`).
- Norms of Qwen3-Next and Qwen3.5 are stored less 1, those of queries and keys too, in speculators' files as well. (Kept
  in bfloat16 the sum is rounded; in float32 it is exact.) Their attention has a gate, which stands in `q_proj`, and
  their rotary positions turn a part of each head; sections of positions (mrope) are all one in a text.
- Of MiMo the module of a whole model is read, which is what FastMTP publishes: its biases are those of Qwen2. Hidden
  states are those behind the norms, as in FastMTP's code and in vLLM; exllamav3 reads them before.

Beside a whole model its other tensors are passed over. Not supported, by name: DeepSeek's and GLM's modules
(`eh_proj`: latent attention, experts), experts of any kind, more than one module, an embedding of a module's own, and
an `output_gate_type` other than sigmoid, which engines read in different ways.

Ours: `model_type` "llama" and "qwen2" in speculators' layout, for layers without norms of queries and keys, which
speculators itself does not load; and `draft_vocab_size` with d2t and t2d, as in EAGLE-3, for a module that drafts some
ids only, as FastMTP does in its engine.
"""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import draft_layer
from specjax.models import mtp

DIALECTS = ("speculators", "qwen", "mimo")
FILE = "model.safetensors"

_GATED = ("qwen3_next", "qwen3_5_text")
_FAMILIES = {"speculators": ("llama", "qwen2", "qwen3", *_GATED), "qwen": _GATED, "mimo": ("mimo",)}
_NORMED = ("qwen3", *_GATED)
_BIASED = ("qwen2", "mimo")
_MODULES = ("mtp.", "mtp_layers.", "model.mtp_layers.")
_IN_A_MODEL = "model.mtp_layers.0."
_BASE_MODEL = ("model.", "lm_head.", "visual.")
# What these layers do in any case.
_ONE = {"num_nextn_predict_layers": (1,), "mtp_num_hidden_layers": (1,), "mtp_use_dedicated_embeddings": (False,)}
_GATE = {"attn_output_gate": (True,), "output_gate_type": ("sigmoid", None)}


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether a configuration and the names of tensors are of such a module, alone or in a model."""
  return settings.get("speculators_model_type") == "mtp" or any(
      name.startswith(_MODULES) or name.endswith(".eh_proj.weight") for name in names)


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> mtp.MtpHead:
  """The module."""
  del target
  _refuse(tensors)
  dialect = ("speculators" if settings.get("speculators_model_type") == "mtp" else
             "mimo" if any(name.startswith("model.mtp_layers.") for name in tensors.shapes) else "qwen")
  inner = settings.object("transformer_layer_config") if dialect == "speculators" else settings
  inner = inner.object("text_config") if "text_config" in inner.values else inner
  family = inner.get("model_type")
  if family not in _FAMILIES[dialect]:
    raise inner.error("model_type", f"supported: {' or '.join(map(repr, _FAMILIES[dialect]))}")
  for each in (settings, inner):
    each.require(_ONE)
  shape = _shape(inner, family)
  e, vocab = shape.width, inner.count("vocab_size")
  config = mtp.MtpConfig(shape=shape, vocab_size=vocab, draft_vocab=settings.count("draft_vocab_size", vocab),
                         max_context=inner.count("max_position_embeddings"))
  prefix = _IN_A_MODEL if dialect == "mimo" or _IN_A_MODEL + "input_proj.weight" in tensors.shapes else "mtp_layers.0."
  names = _names(dialect, prefix)
  if dialect != "speculators":
    tensors.ignore(*[name for name in tensors.shapes if name.startswith(_BASE_MODEL)
                     and not name.startswith("model.mtp_layers.")])
  head = mtp.MtpHead(
      fuse=tensors.take(names["fuse"], (e, 2 * e)), token_norm=tensors.take(names["token_norm"], (e,)),
      feature_norm=tensors.take(names["feature_norm"], (e,)), norm=tensors.take(names["norm"], (e,)),
      attention_norm=tensors.take(names["layer"] + "input_layernorm.weight", (e,)),
      layer=tensors_lib.read_layer(tensors, names["layer"], shape, e, normed_heads=family in _NORMED,
                                   biased=family in _BIASED, gated=family in _GATED),
      ids=tensors_lib.read_ids(tensors, config.draft_vocab, vocab), config=config)
  if dialect == "mimo":
    head = head.replace(fuse=_swapped(head.fuse))
  return _moved(head, 1) if family in _GATED else head


def write(head: mtp.MtpHead, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors; CheckpointError for what a dialect cannot say."""
  config, family = head.config, _family(head, dialect)
  if family in _GATED:
    head = _moved(head, -1)
  names = _names(dialect, _IN_A_MODEL if dialect == "mimo" else "mtp_layers.0.")
  tensors = {names["fuse"]: _swapped(head.fuse) if dialect == "mimo" else head.fuse,
             names["token_norm"]: head.token_norm, names["feature_norm"]: head.feature_norm, names["norm"]: head.norm,
             names["layer"] + "input_layernorm.weight": head.attention_norm}
  tensors |= tensors_lib.write_layer(head.layer, names["layer"], config.shape)
  tensors |= tensors_lib.write_ids(head.ids, config.vocab_size)
  layer = settings_lib.describe_layers(config.shape) | {
      "model_type": family, "num_hidden_layers": 1, "vocab_size": config.vocab_size,
      "max_position_embeddings": config.max_context}
  if family in _GATED:
    width = config.shape.head_width
    layer |= {"attn_output_gate": True, "layer_types": ["full_attention"], "mtp_num_hidden_layers": 1,
              "mtp_use_dedicated_embeddings": False, "rope_parameters": {
                  "rope_type": "default", "rope_theta": config.shape.rope_theta,
                  "partial_rotary_factor": (config.shape.rotary_width or width) / width}}
  some = {} if head.ids is None else {"draft_vocab_size": config.draft_vocab}
  if dialect == "qwen":
    return layer | some | {"architectures": ["Qwen3_5MTP"]}, tensors
  if dialect == "mimo":
    layer |= {"architectures": ["MiMoMTPModel"], "attention_bias": True, "num_nextn_predict_layers": 1}
    return layer | some, tensors
  return some | {
      "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
      "transformer_layer_config": layer, "tie_word_embeddings": False,
      "speculators_config": {
          "algorithm": "mtp", "default_proposal_method": "greedy",
          "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
          "verifier": {"name_or_path": None, "architectures": []}}}, tensors


def _names(dialect, prefix):
  """Where a dialect keeps what is not of the layer, and the prefix of the layer."""
  if dialect == "qwen":
    return {"fuse": "mtp.fc.weight", "token_norm": "mtp.pre_fc_norm_embedding.weight",
            "feature_norm": "mtp.pre_fc_norm_hidden.weight", "norm": "mtp.norm.weight", "layer": "mtp.layers.0."}
  return {"fuse": prefix + "input_proj.weight", "token_norm": prefix + "token_layernorm.weight",
          "feature_norm": prefix + "hidden_layernorm.weight", "norm": prefix + "final_layernorm.weight",
          "layer": prefix}


def _shape(inner, family) -> draft_layer.LayerShape:
  """The shape of the layer, which in Qwen's hybrid families is that of a layer of full attention."""
  values = dict(inner.values)
  if family == "mimo":
    inner.require({"attention_bias": (True,)})  # Qwen2's, which has none behind the attention
    values.pop("attention_bias", None)
  if family in _NORMED:
    inner.count("head_dim")  # without it the families mean different things
  if family not in _GATED:
    return settings_lib.layer_shape(settings_lib.Settings(inner.path, values, inner.inside))
  inner.require(_GATE)
  rope = inner.object("rope_parameters")
  nested = "partial_rotary_factor" in rope.values
  part = (rope if nested else inner).real("partial_rotary_factor", 0)
  for key in ("layer_types", "partial_rotary_factor"):
    values.pop(key, None)
  values["rope_parameters"] = {key: value for key, value in rope.values.items()
                               if key not in ("partial_rotary_factor", "mrope_section", "mrope_interleaved")}
  shape = settings_lib.layer_shape(settings_lib.Settings(inner.path, values, inner.inside))
  width = int(shape.head_width * part)
  try:
    return dataclasses.replace(shape, rotary_width=None if width == shape.head_width else width)
  except ValueError as error:
    raise (rope if nested else inner).error("partial_rotary_factor", str(error)) from error


def _refuse(tensors):
  """Raises CheckpointError for a module that these layers cannot compute."""
  for what, parts in (("is of DeepSeek's or GLM's module, whose layer", (".eh_proj.",)),
                      ("is of latent attention (MLA), which", ("_a_proj", "kv_b_proj", "q_b_proj")),
                      ("is of experts (MoE), which", (".mlp.experts.", ".mlp.gate.", ".mlp.shared_expert"))):
    found = [name for name in tensors.shapes if any(part in name for part in parts)
             and (name.startswith(_MODULES) or ".eh_proj." in name)]
    if found:
      raise CheckpointError(f"{tensors.path}: tensor {found[0]!r} {what} is not supported; MTP modules of dense layers "
                            "with full attention are")


def _family(head, dialect):
  """The `model_type` that a head's layer is of in a dialect."""
  layer, shape = head.layer, head.config.shape
  has = layer.query_norm is not None, layer.qkv_bias is not None, layer.gate is not None
  partial = shape.rotary_width is not None
  family = {(False, False, False): "llama", (False, True, False): "qwen2", (True, False, False): "qwen3",
            (True, False, True): "qwen3_5_text"}.get(has)
  family = "mimo" if (family, dialect) == ("qwen2", "mimo") else family
  if family not in _FAMILIES[dialect] or partial and family not in _GATED:
    raise CheckpointError(f"dialect {dialect!r} has no word for this layer (norms of queries and keys: {has[0]}, "
                          f"biases: {has[1]}, gate: {has[2]}, positions in a part of each head: {partial}); it has for "
                          f"those of {', '.join(_FAMILIES[dialect])}")
  return family


def _swapped(fuse):
  """The columns with their halves exchanged."""
  return jnp.roll(jnp.asarray(fuse), fuse.shape[1] // 2, axis=1)


def _moved(head, by):
  """With `by` added to every norm, in float32."""
  move = lambda x: None if x is None else (x.astype(jnp.float32) + by).astype(x.dtype)
  of = lambda part, *names: part.replace(**{name: move(getattr(part, name)) for name in names})
  head = head.replace(layer=of(head.layer, "mlp_norm", "query_norm", "key_norm"))
  return of(head, "token_norm", "feature_norm", "attention_norm", "norm")
