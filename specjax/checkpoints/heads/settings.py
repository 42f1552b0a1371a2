"""The configuration of a draft head: keys of a config.json that are checked as they are read."""
import pathlib
from typing import Any

from specjax.checkpoints.errors import CheckpointError
from specjax.models import draft_layer

# Keys that change the arithmetic, with the values that leave it as it is. Absent is always allowed.
_NEUTRAL = {
  "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None), "quantization_config": (None,),
  "partial_rotary_factor": (1.0, None), "rope_interleaved": (False, None), "logit_scale": (1.0, None),
}


class Settings:
  """The keys of one JSON object."""

  def __init__(self, path: pathlib.Path, values: dict[str, Any], inside: str = ""):
    """`path` is the file's, `inside` the keys that lead to this object, for messages."""
    self.path, self.values, self.inside = path, values, inside

  def error(self, key: str, wanted: str) -> CheckpointError:
    """An error that names a key, its value and what is wanted."""
    return CheckpointError(f"{self.path}: {self.inside}{key} is {self.values.get(key)!r}; {wanted}")

  def get(self, key: str, default=None):
    """The value of a key; `default` if it is absent or null."""
    value = self.values.get(key)
    return default if value is None else value

  def count(self, key: str, default: int | None = None) -> int:
    """A positive whole number."""
    value = self.get(key, default)
    if type(value) is not int or value < 1:
      raise self.error(key, "a positive whole number is required")
    return value

  def real(self, key: str, default: float) -> float:
    """A positive number."""
    value = self.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
      raise self.error(key, "a positive number is required")
    return float(value)

  def flag(self, key: str, default: bool = False) -> bool:
    """True or false."""
    value = self.get(key, default)
    if type(value) is not bool:
      raise self.error(key, "true or false is required")
    return value

  def indices(self, key: str) -> tuple[int, ...] | None:
    """A list of numbers from 0; None if it is absent or empty."""
    value = self.get(key)
    if value is None or value == []:
      return None
    if not isinstance(value, list) or not all(type(index) is int and index >= 0 for index in value):
      raise self.error(key, "a list of whole numbers from 0 is required")
    return tuple(value)

  def names(self, key: str) -> list[str]:
    """A list of strings; [] if it is absent."""
    value = self.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
      raise self.error(key, "a list of names is required")
    return value

  def object(self, key: str) -> "Settings":
    """The object under a key; an empty one if it is absent."""
    value = self.get(key, {})
    if not isinstance(value, dict):
      raise self.error(key, "an object is required")
    return Settings(self.path, value, f"{self.inside}{key}.")

  def require(self, allowed: dict[str, tuple]) -> None:
    """Raises CheckpointError for a key that is present with a value that is not allowed."""
    for key, values in allowed.items():
      if key in self.values and self.values[key] not in values:
        raise self.error(key, f"supported: {' or '.join(map(repr, values))}, or no such key")


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
