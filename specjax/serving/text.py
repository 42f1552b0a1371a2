"""Text of one request as its tokens come, held back where it may be the beginning of a stop string.

Tokens, their text and whatever belongs to them are let out together and cut together: at a stop string the text ends
right before it, and with it the tokens that have no text left. A token whose text goes beyond the cut is kept with the
part that stands before it, so that the text of the tokens begins with the text that was let out.
"""
import dataclasses
from typing import Any

from specjax.checkpoints import tokenizer as tokenizers


@dataclasses.dataclass(frozen=True)
class Token:
  """One token of the output."""
  id: int
  piece: str         # the text that it completes
  belongs: Any = None  # whatever goes with it


class Writer:
  """The text of one request."""

  def __init__(self, tokenizer: tokenizers.Tokenizer | None, stop: tuple[str, ...] = ()):
    """An empty text.

    Args:
      tokenizer: gives tokens their text; without one it is empty.
      stop: strings that end it.

    Raises:
      ValueError: an empty stop string, or stop strings without a tokenizer.
    """
    if any(not isinstance(text, str) or not text for text in stop):
      raise ValueError(f"stop={tuple(stop)!r}: each is a text of one character or more")
    if stop and tokenizer is None:
      raise ValueError(f"stop={tuple(stop)!r}: stop strings need the engine to have a tokenizer; give it one, or "
                       "stop_sequences of token ids")
    self._stream = None if tokenizer is None else tokenizers.TextStream(tokenizer)
    self._stop, self._held = tuple(stop), []

  def push(self, token: int, belongs=None) -> tuple[list[Token], bool]:
    """With one more token: what is let out now, and whether the text has ended at a stop string."""
    self._held.append(Token(token, "" if self._stream is None else self._stream.push([token]), belongs))
    text = "".join(held.piece for held in self._held)
    found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
    if found:
      return self._let_out(min(found), cut=True), True
    return self._let_out(len(text) - self._doubtful(text)), False

  def flush(self) -> list[Token]:
    """What was held back: the text ends here."""
    rest, self._held = self._held, []
    if rest and self._stream is not None:
      rest[-1] = dataclasses.replace(rest[-1], piece=rest[-1].piece + self._stream.flush())
    return rest

  def _doubtful(self, text):
    """Characters at the end of the text with which a stop string may begin."""
    longest = max(map(len, self._stop), default=0) - 1
    return next((size for size in range(min(longest, len(text)), 0, -1)
                 if any(len(stop) > size and stop.startswith(text[-size:]) for stop in self._stop)), 0)

  def _let_out(self, characters, cut=False):
    """Held tokens whose text lies within the first `characters`; with `cut` the last of them in part, and no others
    remain. Otherwise tokens at the end that have no text yet wait for the character that they begin."""
    out, begin, held = [], 0, []
    for index, token in enumerate(self._held):
      end = begin + len(token.piece)
      if end > characters or cut and begin >= characters:
        if cut and begin < characters:
          out.append(dataclasses.replace(token, piece=token.piece[:characters - begin]))
        held = [] if cut else self._held[index:]
        break
      out.append(token)
      begin = end
    if not cut and self._stream is not None:
      if out and not held and self._stream.unfinished:  # its last token begins a character, whatever it completed
        held.insert(0, out.pop())
      while out and not out[-1].piece:
        held.insert(0, out.pop())
    self._held = held
    return out
