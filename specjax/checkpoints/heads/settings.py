"""The configuration of a draft head: the keys of its layers."""
from typing import Any

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.settings import Settings
from specjax.models import draft_layer

# Keys that change the arithmetic, with the values that leave it as it is. Absent is always allowed.
_NEUTRAL = {
  "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None), "quantization_config": (None,),
  "partial_rotary_factor": (1.0, None), "rope_interleaved": (False, None), "logit_scale": (1.0, None),
}


def layer_shape(settings: Settings) -> draft_layer.LayerShape:
  """The layers that a Llama or Qwen3 style configuration describes; CheckpointError for what they cannot compute."""
  settings.require(_NEUTRAL)
  _refuse_windows(settings)
  width, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
  try:
    return draft_layer.LayerShape(
        width=width, heads=heads, kv_heads=settings.count("num_key_value_heads", heads),
        head_width=settings.count("head_dim", width // heads), mlp_width=settings.count("intermediate_size"),
        norm_eps=settings.real("rms_norm_eps", 1e-6), rope_theta=_rope_theta(settings))
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{settings.path}: {error}") from error


def describe_layers(shape: draft_layer.LayerShape) -> dict[str, Any]:
  """The keys that `layer_shape` reads."""
  return {"hidden_size": shape.width, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
          "head_dim": shape.head_width, "intermediate_size": shape.mlp_width, "rms_norm_eps": shape.norm_eps,
          "rope_theta": shape.rope_theta, "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
          "mlp_bias": False}


def _rope_theta(settings):
  # Two spellings of one thing: rope_scaling up to Transformers 4, rope_parameters since 5.
  for key in ("rope_scaling", "rope_parameters"):
    rope = settings.object(key)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rest = set(rope.values) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind != "default" or rest or rope.get("partial_rotary_factor", 1.0) != 1.0:
      raise settings.error(key, "only unscaled rotary positions are supported: null, or rope_type 'default' with "
                           "rope_theta alone")
  parameters = settings.object("rope_parameters")
  return parameters.real("rope_theta", settings.real("rope_theta", 10000.0))


def _refuse_windows(settings):
  if set(settings.names("layer_types")) - {"full_attention"}:
    raise settings.error("layer_types", "only 'full_attention' is supported")
  if settings.get("sliding_window") is not None and settings.flag("use_sliding_window", True):
    raise settings.error("sliding_window", "only full attention is supported: null, or use_sliding_window false")
