"""Reads JSON objects field by field: each has one type and one range, and a field that nobody read is refused.

`null` is a field that is not there, as OpenAI's clients send it.
"""
import json
import math
from typing import Any


class Refused(ValueError):
  """What is wrong with a request, as OpenAI's error objects have it.

  Attributes:
    status: of HTTP. param: the field, or None. code: one of OpenAI's, or None.
  """

  def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
    super().__init__(message)
    self.param, self.status, self.code = param, status, code


def parse(body: bytes) -> dict:
  """The JSON object that a body is.

  Raises:
    Refused: no UTF-8, no JSON, NaN or an infinity, which JSON has not, half a surrogate pair, or anything but an
      object.
  """
  try:
    found = json.loads(body.decode(), parse_constant=_no_constant)
    json.dumps(found, ensure_ascii=False).encode()  # a string may escape half a pair, which no tokenizer takes
  except (ValueError, RecursionError) as error:
    raise Refused(f"the body is not JSON: {error or type(error).__name__}", code="invalid_json") from error
  if not isinstance(found, dict):
    raise Refused(f"the body is {_shown(found)}; it must be a JSON object", code="invalid_json")
  return found


def _no_constant(name):
  raise ValueError(f"{name} is no JSON")


class Fields:
  """One JSON object while it is read. Every method raises Refused, which names the field and what is allowed."""

  def __init__(self, values: Any, name: str = ""):
    """Args: values: the object. name: of the field that it is the value of; "" for the body."""
    if not isinstance(values, dict):
      raise Refused(f"{name} is {_shown(values)}; it must be an object", name)
    self._values = {key: value for key, value in values.items() if value is not None}
    self._name, self._read = name, set()

  def __contains__(self, field: str) -> bool:
    return field in self._values

  def path(self, field: str) -> str:
    """The field's name from the body on."""
    return f"{self._name}.{field}" if self._name else field

  def refuse(self, field: str, allowed: str):
    """Raises: the field's value is not what is allowed."""
    value = f" is {_shown(self._values[field])}" if field in self._values else " is missing"
    raise Refused(f"{self.path(field)}{value}; {allowed}", self.path(field))

  def value(self, field: str, default=None):
    """Whatever it is."""
    self._read.add(field)
    return self._values.get(field, default)

  def required(self, field: str):
    """Whatever it is; it must be there."""
    if field not in self._values:
      self.refuse(field, "it must be given")
    return self.value(field)

  def whole(self, field: str, default, low: int, high: int | None = None):
    """A whole number from `low` to `high`, both included."""
    found = self.value(field, default)
    if field in self._values and not (is_whole(found) and low <= found and (high is None or found <= high)):
      self.refuse(field, f"it must be a whole number of {low} " + ("or more" if high is None else f"to {high}"))
    return found

  def real(self, field: str, default, low: float, high: float, *, above: bool = False):
    """A number from `low` to `high`, both included; `above`: greater than `low`."""
    found = self.value(field, default)
    number = isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    if field in self._values and not (number and (low < found if above else low <= found) and found <= high):
      bound = f"greater than {low}" if above else f"{low} or more"
      self.refuse(field, f"it must be a number, {bound}" + ("" if high == math.inf else f", {high} at most"))
    return found

  def flag(self, field: str, default: bool = False) -> bool:
    """True or false."""
    found = self.value(field, default)
    if not isinstance(found, bool):
      self.refuse(field, "it must be true or false")
    return found

  def text(self, field: str, default=None):
    """A string."""
    found = self.value(field, default)
    if field in self._values and not isinstance(found, str):
      self.refuse(field, "it must be a string")
    return found

  def items(self, field: str, accepts, kind: str, most: int | None = None) -> list:
    """A list of values that `accepts` holds for, [] if it is not there; `kind` says what they are."""
    found = self.value(field, [])
    if not isinstance(found, list) or not all(map(accepts, found)) or most is not None and len(found) > most:
      self.refuse(field, f"it must be a list of {kind}" + ("" if most is None else f", {most} at most"))
    return found

  def one_of(self, field: str, allowed: tuple[str, ...], default=None):
    """One of some strings."""
    found = self.value(field, default)
    if found not in allowed:
      self.refuse(field, f"it must be one of {', '.join(allowed)}")
    return found

  def only(self, field: str, *allowed, why: str) -> None:
    """Nothing, or a value that changes nothing."""
    if field in self._values and not any(type(x) is type(self._values[field]) and x == self._values[field]
                                         for x in allowed):
      self.refuse(field, why)
    self._read.add(field)

  def done(self) -> None:
    """Raises for a field that was not read."""
    for field in self._values:
      if field not in self._read:
        raise Refused(f"{self.path(field)} is not supported here; leave it out", self.path(field),
                         code="unsupported_parameter")


def is_whole(value) -> bool:
  """Whether a JSON value is a whole number; true and false are none."""
  return isinstance(value, int) and not isinstance(value, bool)


def _shown(value) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 60 else text[:57] + "..."
