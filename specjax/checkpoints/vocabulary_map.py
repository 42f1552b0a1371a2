"""Two vocabularies side by side: whether they are the same, token by token, and how one spells what the other says.

Tokens are compared by what they stand for: their bytes, and whether they are special. So a space that one vocabulary
writes "Ġ" and another "▁" is the same space, the byte token <0x0A> is the newline, and the size of a model's head,
padded as it may be, plays no part.

Letters: V ids of the target's tokenizer, M ids of all spellings together.
"""
import codecs
import dataclasses
import itertools
import re

import numpy as np

from specjax.checkpoints.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first id at which two vocabularies differ."""
  index: int
  target: str | None   # how each of them spells it; None: it has no such id
  drafter: str | None

  def __str__(self):
    spell = lambda token: "nothing" if token is None else repr(token)
    return f"id {self.index} is {spell(self.target)} to the target and {spell(self.drafter)} to the drafter"


def first_difference(target: Tokenizer, drafter: Tokenizer) -> Difference | None:
  """The first id that does not mean the same to both; None for vocabularies that are equal."""
  ours, theirs = meanings(target), meanings(drafter)
  for index in range(max(len(ours), len(theirs))):
    pair = [tokens[index] if index < len(tokens) else None for tokens in (ours, theirs)]
    if pair[0] != pair[1]:
      spelt = [_spelling(tokenizer, index) for tokenizer in (target, drafter)]
      return Difference(index, *spelt)
  return None


def require_same(target: Tokenizer, drafter: Tokenizer, *, override: bool = False) -> Difference | None:
  """What a drafter needs that hands its own ids to the target; returns the first difference, if any.

  Args:
    target, drafter: the tokenizers. What their models' heads are padded to does not matter.
    override: return the difference instead of raising: for vocabularies that differ in tokens that never occur. Text
      stays exact in any case, since the target judges every draft; what suffers is acceptance.

  Raises:
    ValueError: names the first id that differs, with both spellings.
  """
  found = first_difference(target, drafter)
  if found is not None and not override:
    raise ValueError(f"the vocabularies differ: {found} ({target.vocab_size} and {drafter.vocab_size} ids). Use a "
                     "drafter of the same family, one of the ways of drafting with another tokenizer (SharedTokens, "
                     "Retokenised), or override the check if you know that such tokens never occur")
  return found


def meanings(tokenizer: Tokenizer) -> list[tuple[bool, bytes] | None]:
  """Of every id whether it is special and the bytes it stands for; None for an id that is not used."""
  listed = []
  for index in range(tokenizer.vocab_size):
    whole = tokenizer.token_bytes(index, skip_special_tokens=False)
    listed.append((not tokenizer.token_bytes(index), whole) if whole else None)
  return listed


def counterparts(target: Tokenizer, drafter: Tokenizer) -> np.ndarray:
  """The drafter's id that means what the target's id means, -1 where there is none: i32[V], no id twice.

  Where one vocabulary has several ids of one meaning, as a letter and its byte token, the one that text is normally
  encoded to stands for all: the letter, else the lowest id.
  """
  theirs = _by_meaning(drafter)
  found = np.full(target.vocab_size, -1, np.int32)
  for meaning, index in _by_meaning(target).items():
    found[index] = theirs.get(meaning, -1)
  return found


class Speller:
  """Bytes to ids of one tokenizer, such that the ids stand for exactly these bytes."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._ids = {whole: index for (special, whole), index in _by_meaning(tokenizer).items() if not special}
    self._longest = max(map(len, self._ids), default=0)

  def bytes_of(self, ids) -> bytes:
    """What some ids stand for, special ones included."""
    return b"".join(self._tokenizer.token_bytes(int(index), skip_special_tokens=False) for index in ids)

  def spell(self, data: bytes, *, opens: bool = False) -> list[int] | None:
    """Ids of `data`, by the tokenizer's own encoding where it has one; None if the vocabulary cannot spell it.

    Half characters at either end, and characters that the tokenizer would normalise to others, are spelt with as few
    tokens as possible.

    Args:
      data: any bytes.
      opens: these are the first of a text: a space that the tokenizer puts before a text may stand in front.
    """
    head, text, tail = _characters(data)
    if text is None:
      return self._cover(data)
    parts = [self._cover(head), self._encode(text, opens and not head), self._cover(tail)]
    return None if any(part is None for part in parts) else sum(parts, [])

  def _encode(self, text, opens):
    if not text:
      return []
    wanted = text.encode()
    ids = self._tokenizer.encode(text)
    if self.bytes_of(ids) == wanted or opens and self.bytes_of(ids) == b" " + wanted:
      return ids
    if text[0] == " ":  # the tokenizer puts a space before any text: this one
      ids = self._tokenizer.encode(text[1:])
      if self.bytes_of(ids) == wanted:
        return ids
    ids = self._tokenizer.encode("\n" + text)  # the space goes before another letter, which is taken away again
    for cut in range(1, min(len(ids), 3)):
      if self.bytes_of(ids[:cut]).lstrip(b" ") == b"\n" and self.bytes_of(ids[cut:]) == wanted:
        return ids[cut:]
    if len(text) == 1:
      return self._cover(wanted)
    middle = len(text) // 2  # one letter that is normalised must not cost all others their encoding
    middle = max(text.rfind(" ", 1, middle + 1), 0) or middle
    halves = self._encode(text[:middle], opens), self._encode(text[middle:], False)
    return None if None in halves else halves[0] + halves[1]

  def _cover(self, data):
    """The fewest tokens that together are `data`."""
    fewest, last = [0] + [len(data) + 1] * len(data), [None] * (len(data) + 1)
    for end in range(1, len(data) + 1):
      for begin in range(max(end - self._longest, 0), end):
        token = self._ids.get(data[begin:end])
        if token is not None and fewest[begin] + 1 < fewest[end]:
          fewest[end], last[end] = fewest[begin] + 1, (begin, token)
    ids, end = [], len(data)
    while end:
      if last[end] is None:
        return None
      end, token = last[end]
      ids.append(token)
    return ids[::-1]


@dataclasses.dataclass(frozen=True)
class Translation:
  """How a text of the target's ids reads in the drafter's."""
  counterpart: np.ndarray  # i32[V]; see `counterparts`
  begin: np.ndarray        # i32[V + 1]; where in `spelt` the spelling of each id begins, none is empty
  spelt: np.ndarray        # i32[M]; the drafter's ids; of an id with a counterpart the counterpart alone
  opening: np.ndarray      # i32[0 or 1]; the id that the drafter wants before any text
  bos: int                 # the target's id that `opening` stands for, -1 if it has none


def translation(target: Tokenizer, drafter: Tokenizer, *, longest: int = 32) -> Translation:
  """The translation of every id of the target, by its bytes.

  Special tokens without a counterpart: what ends an answer becomes what ends one to the drafter, the first token of a
  document the drafter's; others are spelt as text. A token of more than `longest` ids keeps the last of them, and one
  that the drafter cannot spell becomes its unknown token. None of this can make the target's text wrong.
  """
  speller, counterpart = Speller(drafter), counterparts(target, drafter)
  unknown = drafter.encode("\ufffd")[-1:] or [0]
  roles = {index: list(drafter.eos_ids[:1]) for index in target.eos_ids}
  if target.bos_id is not None and drafter.bos_id is not None:
    roles[target.bos_id] = [drafter.bos_id]
  spellings = []
  for index, whole in enumerate(counterpart.tolist()):
    ids = [whole] if whole >= 0 else roles.get(index)
    if not ids:
      ids = speller.spell(target.token_bytes(index, skip_special_tokens=False))
    spellings.append(ids[-longest:] if ids else unknown)
  opening = opening_ids(drafter)
  return Translation(counterpart=counterpart, spelt=np.array([*itertools.chain(*spellings)], np.int32),
                     begin=np.cumsum([0, *map(len, spellings)]).astype(np.int32),
                     opening=np.array(opening, np.int32),
                     bos=-1 if target.bos_id is None or not opening else target.bos_id)


def opening_ids(tokenizer: Tokenizer) -> list[int]:
  """The id that the tokenizer puts before a document, in a list; an empty one if it puts none."""
  first = tokenizer.encode("a", add_special_tokens=True)[:1]
  return first if first == [tokenizer.bos_id] else []


def whole_characters(data: bytes) -> bytes:
  """The bytes without the half character that they may end in."""
  return data[:len(data) - len(_characters(data)[2])]


def _by_meaning(tokenizer):
  """Of every meaning the id that text is normally encoded to."""
  spelt, found = tokenizer.tokens(), {}
  for index, meaning in enumerate(meanings(tokenizer)):
    if meaning is not None:
      kept = found.setdefault(meaning, index)
      if _is_byte(spelt[kept], meaning) and not _is_byte(spelt[index], meaning):
        found[meaning] = index
  return found


def _is_byte(token, meaning):
  return token is not None and len(meaning[1]) == 1 and _BYTE_TOKEN.fullmatch(token) is not None


def _spelling(tokenizer, index):
  return tokenizer.tokens()[index] if index < tokenizer.vocab_size else None


def _characters(data):
  """Bytes at the start that end a character, whole characters, and bytes that begin one; None for no such text."""
  head = next((i for i, byte in enumerate(data) if byte & 0xC0 != 0x80), len(data))
  decoder = codecs.getincrementaldecoder("utf-8")("strict")
  try:
    text = decoder.decode(data[head:])
  except UnicodeDecodeError:
    return b"", None, b""
  return data[:head], text, decoder.getstate()[0]
