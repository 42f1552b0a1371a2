"""What a compiled program sends between devices, read from its text.

A program's text has every operation once, whatever loop it stands in: what is listed for the body of `generate`'s loop
is what one step sends, with the branches of all widths.
"""
import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all-to-all",
          "collective-broadcast")
_LINE = re.compile(rf"= (?P<result>[^=]*?) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"(?P<type>[a-z]+\d*)\[(?P<shape>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation between devices.

  Attributes:
    kind: as XLA names it, such as "all-reduce". shapes: of the arrays that it results in on one device.
    size: bytes of these together. name: of the JAX operation that it came from.
  """
  kind: str
  shapes: tuple[tuple[int, ...], ...]
  size: int
  name: str


def collectives(text: str) -> list[Collective]:
  """Those of a program's text, `jitted.lower(...).compile().as_text()`.

  Raises:
    ValueError: it holds a collective whose array types are not known here.
  """
  return list(_found(text))


def _found(text: str) -> Iterator[Collective]:
  for line in text.splitlines():
    match = _LINE.search(line)
    if not match:
      continue
    shapes, size = [], 0
    for array in _ARRAY.finditer(match["result"]):
      if array["type"] not in _BYTES:
        raise ValueError(f"a collective results in {array[0]}; known types are {', '.join(_BYTES)}")
      shapes.append(tuple(int(n) for n in array["shape"].split(",") if n))
      size += _BYTES[array["type"]] * math.prod(shapes[-1])
    name = re.search(r'op_name="([^"]*)"', line)
    yield Collective(match["kind"], tuple(shapes), size, name[1] if name else "")
