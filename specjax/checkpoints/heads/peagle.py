"""P-EAGLE heads in files, as speculators writes them: its EAGLE-3 files (see `eagle3`), of the type `peagle`.

More than there: `mask_token_id`, the number of layers in `transformer_layer_config`, of which those behind the first
are ordinary ones, and the tensor `mask_hidden` [1, 1, F], the features of a mask, before they are fused. The tokens
that the head was trained to draft are `speculative_tokens` of its proposal method. `norm_output` says nothing here, as
nothing recurs.

The files that came before, with `ptd_token_id` at the top of an EAGLE-3 configuration (amazon's P-EAGLE heads), do not
say how `mask_hidden` and further layers are called and are refused.
"""
from typing import Any

import jax

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import eagle3
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib
from specjax.models import peagle

DIALECTS = ("speculators",)
FILE = "model.safetensors"


def is_one(settings: settings_lib.Settings, names) -> bool:
  """Whether a configuration and the names of tensors are of such a head."""
  if settings.get("speculators_model_type") == "peagle":
    return True
  if "ptd_token_id" in settings.values or "mask_hidden" in names:
    raise settings.error("speculators_model_type", "a P-EAGLE head (ptd_token_id or mask_hidden) is read in the layout "
                         "of speculators only, where this is 'peagle'")
  return False


def read(settings: settings_lib.Settings, tensors: tensors_lib.Tensors, target) -> peagle.PEagleHead:
  """The head; `target` as of `eagle3.read`."""
  inner = settings.object("transformer_layer_config")
  count = inner.count("num_hidden_layers")
  # All but the layers behind the first is EAGLE-3's.
  as_one = settings.values | {"norm_output": False, "transformer_layer_config": inner.values | {"num_hidden_layers": 1}}
  first = eagle3.read(settings_lib.Settings(settings.path, as_one, settings.inside), tensors, target)
  mask_id = settings.get("mask_token_id")
  if type(mask_id) is not int or not 0 <= mask_id < first.config.vocab_size:
    raise settings.error("mask_token_id", f"an id below vocab_size {first.config.vocab_size} is required")
  e, prefixes = first.config.shape.width, [f"layers.{i}." for i in range(1, count)]
  normed = first.layer.query_norm is not None
  width = len(first.config.features) * first.config.target_width
  return peagle.PEagleHead(
      first=first.replace(ids=None), ids=first.ids, mask_id=mask_id, depths=_depths(settings),
      layers=tuple(tensors_lib.read_layer(tensors, prefix, first.config.shape, e, normed_heads=normed)
                   for prefix in prefixes),
      input_norms=tuple(tensors.take(prefix + "input_layernorm.weight", (e,)) for prefix in prefixes),
      hidden=tensors.take("mask_hidden", (1, 1, width)).reshape(width))


def write(head: peagle.PEagleHead, dialect: str) -> tuple[dict[str, Any], dict[str, jax.Array]]:
  """config.json and tensors; CheckpointError for layers of which only some have norms of queries and keys."""
  normed = {layer.query_norm is not None for layer in (head.first.layer, *head.layers)}
  if len(normed) > 1:
    raise CheckpointError(f"dialect {dialect!r} has norms of queries and keys in every layer or in none; this head has "
                          "them in some")
  config, tensors = eagle3.write(head.first.replace(ids=head.ids), dialect)
  for i, (layer, norm) in enumerate(zip(head.layers, head.input_norms, strict=True), 1):
    tensors |= tensors_lib.write_layer(layer, f"layers.{i}.", head.config.shape)
    tensors[f"layers.{i}.input_layernorm.weight"] = norm
  tensors["mask_hidden"] = head.hidden.reshape(1, 1, -1)
  described = config["speculators_config"]
  return config | {
      "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": head.mask_id,
      "transformer_layer_config": config["transformer_layer_config"] | {"num_hidden_layers": head.depth},
      "speculators_config": described | {"algorithm": "peagle", "proposal_methods": [
          described["proposal_methods"][0] | {"speculative_tokens": head.depths}]}}, tensors


def _depths(settings):
  described = settings.object("speculators_config")
  methods = described.get("proposal_methods")
  if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
    raise described.error("proposal_methods", "a list is required whose first entry names speculative_tokens, the "
                          "tokens that the head was trained to draft")
  return settings_lib.Settings(settings.path, methods[0], f"{described.inside}proposal_methods[0].").count(
      "speculative_tokens")
