"""Fenced blocks of a Markdown text: what models put code and JSON in."""
import dataclasses
import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")


@dataclasses.dataclass(frozen=True)
class Block:
  """A block: the word behind its opening fence in lower case, its lines, and whether a closing fence ends it."""
  language: str
  body: str
  closed: bool


def split(text: str) -> tuple[list[Block], str]:
  """The fenced blocks of a text in order, and the text around them."""
  blocks, around, fence, language, inside = [], [], None, "", []
  for line in text.split("\n"):
    match = _FENCE.fullmatch(line.rstrip("\r"))
    if fence is None and match:
      fence, language, inside = match[1], match[2].lower(), []
    elif fence is None:
      around.append(line)
    elif match and match[1][0] == fence[0] and len(match[1]) >= len(fence) and not match[2]:
      blocks.append(Block(language, "\n".join(inside), True))
      fence = None
    else:
      inside.append(line)
  if fence is not None:  # the text ends inside
    blocks.append(Block(language, "\n".join(inside), False))
  return blocks, "\n".join(around)
