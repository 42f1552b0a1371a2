"""EAGLE-3 heads in files: the dialects of SafeAILab, SpecForge and speculators.

The tensors are the same but for the layer's prefix, `midlayer.` or `layers.0.`, and norms that only some have. What
differs in meaning, and has been read wrongly by others:

- Layer ids. The key of speculators, `eagle_aux_hidden_state_layer_ids` at the top, counts hidden states as Transformers
  does: id i is the input of layer i. Inside of `eagle_config`, as SpecForge writes it, ids that begin with 1 name those
  whose output is meant, which is the input of the next; ids that begin otherwise are as those at the top (SGLang's pull
  request 25454). Without ids they are 2, L // 2 and L - 3, inputs of layers of a target of L.
- `norm_output`. To speculators, and to engines, it says that what recurs is behind the final norm (EAGLE-3.1), false by
  default. To SpecForge before September 2026 (its pull request 879) it said, true by default, that there is a final
  norm before the vocabulary, and what recurred was not normed. A file of SpecForge with `norm_output: true` does not
  tell, so our key `recurs_normed` must.
- `d2t` holds offsets, see `tensors.read_ids`.
- Position 0 or 1 of the first entry makes no difference but of rounding, as rotary positions are relative; no dialect
  says it in its configuration.
"""
from typing import Any

import jax

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import eagle3

DIALECTS = ("safeailab", "specforge", "speculators")
FILE = "model.safetensors"

_IDS = "eagle_aux_hidden_state_layer_ids"
# What may be in eagle_config, with what this head does in any case.
_EAGLE_CONFIG = {
  "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
  "use_mtp_layernorm": (False,),
}


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether a configuration and the names of tensors are of such a head."""
  return (settings.get("speculators_model_type") == "eagle3" or "layers.0.hidden_norm.weight" in names or
          any(name.startswith("midlayer.") for name in names) or
          any("Eagle3" in name for name in settings.names("architectures")))


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> eagle3.Eagle3Head:
  """The head; `target`, or None, is asked for its number of layers if the file has no layer ids."""
  speculators = "speculators_model_type" in settings.values
  inner = settings.object("transformer_layer_config") if speculators else settings
  shape = settings_lib.layer_shape(inner)
  inner.require({"num_hidden_layers": (1,), "model_type": ("llama", "qwen3")})
  nested = _eagle_config(settings)
  joined = settings.flag("norm_before_fc") or nested.flag("norm_before_fc")
  single = settings.flag("fc_norm")
  if joined and single:
    raise settings.error("fc_norm", "with norm_before_fc, which is true, it must be false")
  e, vocab = shape.width, inner.count("vocab_size")
  config = eagle3.Eagle3Config(
      shape=shape, target_width=settings.count("target_hidden_size", e), features=_features(settings, nested, target),
      vocab_size=vocab, draft_vocab=settings.count("draft_vocab_size", vocab),
      max_context=inner.count("max_position_embeddings"), recurs_normed=_recurs_normed(settings, speculators),
      residual_normed=settings.flag("norm_before_residual"), first_position=int(speculators))
  d, f = config.target_width, len(config.features) * config.target_width
  prefix = "midlayer." if any(name.startswith("midlayer.") for name in tensors.shapes) else "layers.0."
  own = "embed_tokens.weight" in tensors.shapes
  ids = tensors_lib.read_ids(tensors, config.draft_vocab, vocab)
  return eagle3.Eagle3Head(
      fuse=tensors.take("fc.weight", (e, f)), token_norm=tensors.take(prefix + "input_layernorm.weight", (e,)),
      feature_norm=tensors.take(prefix + "hidden_norm.weight", (e,)),
      layer=tensors_lib.read_layer(tensors, prefix, shape, 2 * e, normed_heads=inner.get("model_type") == "qwen3"),
      norm=tensors.take("norm.weight", (e,)), head=tensors.take("lm_head.weight", (config.draft_vocab, e)),
      ids=ids, config=config,
      embedding=tensors.take("embed_tokens.weight", (vocab, e)) if own else None,
      fuse_norm=tensors.take("input_norm.weight", (f,)) if joined else None,
      fuse_norms=tuple(tensors.take(f"fc_norm.{i}.weight", (d,)) for i in range(len(config.features))) if single else
      None)


def write(head: eagle3.Eagle3Head, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors; CheckpointError for what a dialect cannot say."""
  config = head.config
  _refuse(head, dialect)
  prefix = "layers.0." if dialect == "speculators" else "midlayer."
  tensors = {"fc.weight": head.fuse, prefix + "input_layernorm.weight": head.token_norm,
             prefix + "hidden_norm.weight": head.feature_norm, "norm.weight": head.norm, "lm_head.weight": head.head}
  tensors |= tensors_lib.write_layer(head.layer, prefix, config.shape)
  tensors |= tensors_lib.write_ids(head.ids, config.vocab_size)
  if head.embedding is not None:
    tensors["embed_tokens.weight"] = head.embedding
  if head.fuse_norm is not None:
    tensors["input_norm.weight"] = head.fuse_norm
  tensors |= {f"fc_norm.{i}.weight": norm for i, norm in enumerate(head.fuse_norms or ())}
  layer = settings_lib.describe_layers(config.shape) | {
      "model_type": "llama" if head.layer.query_norm is None else "qwen3", "num_hidden_layers": 1,
      "vocab_size": config.vocab_size, "max_position_embeddings": config.max_context, "tie_word_embeddings": False}
  shared = {"draft_vocab_size": config.draft_vocab, "target_hidden_size": config.target_width}
  if dialect == "safeailab":
    return layer | shared | {"architectures": ["LlamaForCausalLM"], _IDS: list(config.features)}, tensors
  if dialect == "specforge":
    ids = [i - 1 for i in config.features] if config.features[0] == 2 else list(config.features)
    return layer | shared | {
        "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {_IDS: ids, "use_aux_hidden_state": True},
        "fc_norm": head.fuse_norms is not None, "norm_output": config.recurs_normed,
        "recurs_normed": config.recurs_normed}, tensors
  return shared | {
      "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
      _IDS: list(config.features), "norm_before_residual": config.residual_normed,
      "norm_before_fc": head.fuse_norm is not None, "fc_norm": head.fuse_norms is not None,
      "norm_output": config.recurs_normed, "tie_word_embeddings": False,
      "speculators_config": {
          "algorithm": "eagle3", "default_proposal_method": "greedy",
          "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
          "verifier": {"name_or_path": None, "architectures": []}}}, tensors


def _eagle_config(settings):
  nested = settings.object("eagle_config")
  nested.require(_EAGLE_CONFIG)
  unknown = set(nested.values) - set(_EAGLE_CONFIG) - {_IDS, "norm_before_fc"}
  if unknown:
    raise nested.error(min(unknown), "nothing is known of this key, which may change what the head computes")
  return nested


def _features(settings, nested, target):
  named, inside = settings.indices(_IDS), nested.indices(_IDS)
  if inside is not None and inside[0] == 1:
    inside = tuple(i + 1 for i in inside)
  if named is not None and inside is not None and named != inside:
    raise settings.error(_IDS, f"eagle_config says inputs of layers {inside}: remove one of them")
  found = inside if named is None else named
  if found is not None:
    return found
  if target is None:
    raise CheckpointError(f"{settings.path}: has no {_IDS}; by default they follow from the target's number of layers: "
                          "pass target=")
  count = target.config.layers
  if count < 3:
    raise CheckpointError(f"{settings.path}: has no {_IDS}, and the default needs a target of 3 layers or more; this "
                          f"one has {count}")
  return 2, count // 2, count - 3


def _recurs_normed(settings, speculators):
  said = settings.flag("norm_output")
  if speculators:
    return said
  if "recurs_normed" in settings.values:
    return settings.flag("recurs_normed")
  if said:
    raise settings.error("norm_output", "in a file of this kind it means two things: add \"recurs_normed\": true if "
                         "the head takes its normed output back (EAGLE-3.1; SpecForge since September 2026), or "
                         "false if not (SpecForge before)")
  return False


def _refuse(head, dialect):
  config = head.config
  has = {"the norm of fused features (norm_before_fc)": head.fuse_norm is not None,
         "a normed residual (norm_before_residual)": config.residual_normed,
         "norms of queries and keys": head.layer.query_norm is not None}
  if dialect == "safeailab":
    has |= {"norms of features (fc_norm)": head.fuse_norms is not None,
            "a normed output that recurs (norm_output)": config.recurs_normed}
  found = [what for what, present in has.items() if present]
  if dialect != "speculators" and found:
    raise CheckpointError(f"dialect {dialect!r} has no word for {found[0]}, which this head has: use 'speculators'")
  if dialect == "specforge" and config.features[0] == 1:
    raise CheckpointError(f"dialect 'specforge' cannot say that the layers {config.features} are read: ids that begin "
                          "with 1 mean the layers behind in it: use 'safeailab' or 'speculators'")
