"""Words of any language for measures that count shared words: Latin, Greek, Cyrillic, Arabic ... by words, scripts
without spaces between words, and Hangul, whose words carry their particles, by characters."""
import re

# Thai, Lao, Myanmar, Khmer; kana; Han; Hangul; Han beyond the basic plane.
_BY_CHARACTER = ("\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
                 "\U00020000-\U0003ffff")
_WORD = re.compile(f"[{_BY_CHARACTER}]|[^\\W_{_BY_CHARACTER}]+")


def split(text: str) -> list[str]:
  """The words of a text, in lower case; signs are left out."""
  return _WORD.findall(text.lower())


class Tokenizer:
  """The same as an object, as rouge-score wants it: its own one knows only a-z and 0-9."""

  def tokenize(self, text: str) -> list[str]:
    """See `split`."""
    return split(text)
