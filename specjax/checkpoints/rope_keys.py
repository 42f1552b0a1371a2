"""Rotary positions as config.json files spell them: rope_theta and rope_scaling up to Transformers 4, rope_parameters
since 5, with one entry a kind of layer where kinds differ (Gemma 3)."""
from specjax.checkpoints.settings import Settings
from specjax.models import rope

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Rule -> the keys that it takes beside its name.
_KEYS = {
  "default": (), "linear": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
  "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


def read(settings: Settings, head_width: int, *, part: str = "partial_rotary_factor", default_part: float = 1.0,
         theta_key: str = "rope_theta", default_theta: float = 10000.0) -> dict:
  """What `DecoderConfig` takes of rotary positions.

  Args:
    settings: of the model.
    head_width: elements of a head.
    part, theta_key: older names of the share of a head that is turned, and of the base.
    default_part, default_theta: what holds where none is given.

  Raises:
    CheckpointError: names the key of a rule that is not supported, or of a wrong value.
  """
  parameters = settings.object("rope_parameters")
  nested = _GLOBAL in parameters.values
  rules = parameters.object(_GLOBAL) if nested else parameters
  if not rules.values:
    rules = settings.object("rope_scaling")
  theta = rules.real("rope_theta", settings.real(theta_key, default_theta))
  found = {"rope_theta": theta, "rope_scaling": _scaling(settings, rules)}
  share = rules.real("partial_rotary_factor", settings.real(part, default_part))
  if share > 1:
    raise settings.error(part, "a share of at most 1 is required")
  turned = int(head_width * share)
  if turned != head_width:
    found["rope_width"] = turned
  if nested and _LOCAL in parameters.values:
    local = parameters.object(_LOCAL)
    if _scaling(settings, local) is not None:
      raise parameters.error(_LOCAL, "only unscaled rotary positions are supported in layers with a window")
    found["local_rope_theta"] = local.real("rope_theta", theta)
  elif settings.get("rope_local_base_freq") is not None:
    found["local_rope_theta"] = settings.real("rope_local_base_freq", 10000.0)
  return found


def _scaling(settings, rules) -> rope.RopeScaling | None:
  kind = rules.get("rope_type", rules.get("type", "default"))
  if kind not in _KEYS:
    raise rules.error("rope_type" if "rope_type" in rules.values else "type", f"supported are {', '.join(_KEYS)}")
  allowed = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_KEYS[kind]}
  unknown = [key for key in rules.values if key not in allowed and rules.values[key] is not None]
  if unknown:
    raise rules.error(unknown[0], f"rotary positions of the kind {kind!r} have no such key here; leave it out")
  if kind == "default":
    return None
  factor = rules.required("factor")
  if kind == "linear":
    return rope.RopeScaling(kind, factor)
  context = rules.count("original_max_position_embeddings",
                        settings.count("max_position_embeddings") if kind == "yarn" else None)
  if kind == "llama3":
    return rope.RopeScaling(kind, factor, context, low=rules.required("low_freq_factor"),
                            high=rules.required("high_freq_factor"))
  attention = None if rules.get("attention_factor") is None else rules.real("attention_factor", 1.0)
  return rope.RopeScaling(kind, factor, context, low=rules.real("beta_slow", 1.0), high=rules.real("beta_fast", 32.0),
                          attention_factor=attention, truncate=rules.flag("truncate", True))
