"""The configuration of a model or a draft head: keys of a config.json that are checked as they are read."""
import pathlib
from typing import Any

from specjax.checkpoints.errors import CheckpointError


class Settings:
  """The keys of one JSON object. `Error` is what its methods raise."""
  Error = CheckpointError

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

  def required(self, key: str) -> float:
    """A positive number that must be there."""
    if self.get(key) is None:
      raise self.error(key, "a positive number is required")
    return self.real(key, 1.0)

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
