"""Overlays of flags and the four words that combine them; what they expand to, and what each of them is called.

  list     [overlay, ...]                  these
  chain    [part, ...]                     those of one part after those of another
  product  [part, ...] or {flag: [...]}    each of a part with each of the others
  zip      [part, ...] or {flag: [...]}    the first of each part together, then the second, and so on

A part is an overlay, an object of flags, or an object of one of these words. The idea is that of
google-deepmind/simply (utils/sweep.py), where the words are functions.
"""
import dataclasses
import functools
import hashlib
import itertools
import json
import re

Value = str | bool | int | float | list
WORDS = ("product", "zip", "chain", "list")
_LONGEST = 100  # characters of a name: folders of it must fit everywhere


@dataclasses.dataclass(frozen=True)
class Overlay:
  """Flags on their way to a point; of those in `named` a name that was given tells."""
  flags: dict[str, Value]
  names: tuple[str, ...] = ()
  named: frozenset[str] = frozenset()

  @property
  def name(self) -> str:
    """Made of the given names and of all other flags by their own names: it does not depend on other overlays."""
    told = [f"{flag}={text(value, '+')}" for flag, value in sorted(self.flags.items()) if flag not in self.named]
    whole = ",".join([*self.names, *told]) or "default"
    name = _safe(whole)
    if len(name) <= _LONGEST:
      return name
    return f"{name[:_LONGEST - 11]}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"


def expand(part, where: str) -> list[Overlay]:
  """All overlays of a part, in order.

  Args:
    part: as read from JSON. where: its place in the file, for errors.

  Raises:
    ValueError: it is none; flags are set twice; lists that are zipped differ in length.
  """
  if not isinstance(part, dict):
    raise ValueError(f"{where}: {_shown(part)} is no object; give an overlay of flags, or one of {', '.join(WORDS)}")
  words = [word for word in WORDS if word in part]
  if not words:
    return [overlay(part, where)]
  if len(part) > 1:
    others = ", ".join(name for name in part if name != words[0])
    raise ValueError(f"{where}: {words[0]!r} must stand alone in its object, and {others} stands beside it")
  (word, inside), = part.items()
  where = f"{where}.{word}"
  by_flag = word in ("product", "zip")
  if isinstance(inside, dict) and by_flag:
    parts = [_values(flag, values, where) for flag, values in inside.items()]
  elif isinstance(inside, list):
    one = _alone if word == "list" else expand
    parts = [one(inner, f"{where}[{index}]") for index, inner in enumerate(inside)]
  else:
    raise ValueError(f"{where}: {_shown(inside)} is no list{', nor an object of flags with lists' if by_flag else ''}")
  if word in ("list", "chain"):
    return list(itertools.chain.from_iterable(parts))
  if word == "zip" and len({len(one) for one in parts}) > 1:
    names = list(inside) if isinstance(inside, dict) else [f"part {index}" for index in range(len(parts))]
    raise ValueError(f"{where}: lengths differ: {', '.join(f'{n} has {len(p)}' for n, p in zip(names, parts))}")
  rows = zip(*parts) if word == "zip" else itertools.product(*parts) if parts else ()
  return [functools.reduce(lambda a, b: _joined(a, b, where), row) for row in rows]


def overlay(given, where: str) -> Overlay:
  """One overlay.

  Raises:
    ValueError: a value is none that a flag takes, or a given name is none that a folder should have.
  """
  if not isinstance(given, dict):
    raise ValueError(f"{where}: {_shown(given)} is no object of flags")
  flags = {name: value for name, value in given.items() if name != "name"}
  for name, value in flags.items():
    if not all(isinstance(one, str | bool | int | float) for one in (value if isinstance(value, list) else [value])):
      raise ValueError(f"{where}: {name} is {_shown(value)}; a flag is text, true or false, a number, or a list of "
                       "these. Leave it out to have its default")
    if isinstance(value, list) and any("," in text(one) for one in value):
      raise ValueError(f"{where}: {name} is {_shown(value)}; no item of a list can hold a comma, which parts them")
  if "name" not in given:
    return Overlay(flags)
  name = given["name"]
  if not isinstance(name, str) or not name or _safe(name) != name or len(name) > _LONGEST:
    raise ValueError(f"{where}: name {name!r} must be 1 to {_LONGEST} of A-Z, a-z, 0-9 and ._=+,- and begin with a "
                     "letter or a digit")
  return Overlay(flags, (name,), frozenset(flags))


def text(value: Value, comma: str = ",") -> str:
  """A value as a flag takes it."""
  if isinstance(value, list):
    return comma.join(text(one) for one in value)
  return str(value).lower() if isinstance(value, bool) else str(value)


def _values(flag, values, where):
  if not isinstance(values, list):
    raise ValueError(f"{where}: {flag} must have a list of values, not {_shown(values)}")
  return [overlay({flag: value}, f"{where}.{flag}") for value in values]


def _alone(given, where):
  if isinstance(given, dict) and set(given) & set(WORDS):
    raise ValueError(f"{where}: a list holds overlays of flags only; a chain holds other parts, too")
  return [overlay(given, where)]


def _joined(one, other, where):
  both = set(one.flags) & set(other.flags)
  if both:
    raise ValueError(f"{where}: two parts set {', '.join(sorted(both))}; set each flag in one of them")
  return Overlay(one.flags | other.flags, one.names + other.names, one.named | other.named)


def _safe(name):
  return re.sub(r"[^A-Za-z0-9._=+,-]+", "-", name).lstrip("-._=+,")


def _shown(value):
  return json.dumps(value)[:60]
