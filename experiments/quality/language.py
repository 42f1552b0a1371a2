"""The language of an answer: is it the one asked for, and what does it cost in tokens.

- `kept`: the answer, code taken out, is in the row's language. Where a request mixes Korean with English the answer
  may, too: at least a fifth of its letters must be Hangul (a syllable is one letter, an English word five). Null below
  20 letters (8 where a script has no spaces), for a language that the detector does not know, and where the request is
  for code, JSON, calls or math.
- `hangul_share`, `latin_share`: of the letters, code taken out; of mixed Korean and English only.
- `tokens`, `characters`; `pool` adds characters per token, all tokens of a language together.

The detector is py3langid (a naive Bayes model over byte n-grams, in its wheel): deterministic and without a network. It
chooses among the languages of `KNOWN` alone, since neighbours that nobody asks for (Egyptian Arabic) take answers away.
"""
import collections
import functools
import re
import unicodedata

from experiments.quality import fences
from experiments.quality import libraries
from experiments.workloads import Request

KNOWN = ("ar", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "he", "hi", "hr", "hu",
         "id", "it", "ja", "ko", "lt", "lv", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "ta", "te", "th", "tr",
         "uk", "ur", "vi", "zh")
MIXED = "mixed_ko_en"
_LEAST = 20
_LEAST_WITHOUT_SPACES = 8
_HANGUL_SHARE = 0.2
_INLINE = re.compile(r"`[^`\n]*`|https?://\S+")


def judge(request: Request, text: str, *, tokens: int, prose: bool = True) -> dict[str, float | bool | None]:
  """See the module.

  Args:
    tokens: of the answer.
    prose: False where the request is for something that has no language, such as JSON.

  Raises:
    ValueError: py3langid is not installed.
  """
  found = {"kept": None, "tokens": tokens, "characters": len(text), "hangul_share": None, "latin_share": None}
  if not prose:
    return found
  plain = _INLINE.sub(" ", fences.split(text)[1])
  scripts = collections.Counter(map(_script, filter(str.isalpha, plain)))
  letters = sum(scripts.values())
  if request.category == MIXED and letters:
    shares = {"hangul_share": scripts["hangul"] / letters, "latin_share": scripts["latin"] / letters}
    return found | shares | {"kept": shares["hangul_share"] >= _HANGUL_SHARE}
  wanted = request.language.split("-")[0].lower()
  least = _LEAST_WITHOUT_SPACES if scripts["dense"] + scripts["hangul"] > letters / 2 else _LEAST
  if wanted in KNOWN and letters >= least:
    found["kept"] = detect(plain) == wanted
  return found


def detect(text: str) -> str:
  """The language of a text, one of `KNOWN`."""
  return _detector().classify(text)[0]


@functools.cache
def _detector():
  langid = libraries.load("py3langid.langid")
  detector = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)
  detector.set_languages(KNOWN)
  return detector


@functools.lru_cache(maxsize=4096)
def _script(letter):
  name = unicodedata.name(letter, "")
  if name.startswith("HANGUL"):
    return "hangul"
  if name.startswith(("LATIN", "FULLWIDTH LATIN")):
    return "latin"
  return "dense" if name.startswith(("CJK", "HIRAGANA", "KATAKANA", "THAI")) else "other"


def pool(answers: list[tuple[Request, dict]]) -> dict[str, dict]:
  """By language of the row: `answers`, tokens and characters of an answer, characters per token, the share `kept`.

  Args:
    answers: requests with what `judge` found of their answers.
  """
  by_language = collections.defaultdict(list)
  for request, found in answers:
    by_language[request.language].append(found)
  return {language: _pooled(found) for language, found in sorted(by_language.items())}


def _pooled(found):
  tokens, characters = (sum(f[name] for f in found) for name in ("tokens", "characters"))
  known = [f["kept"] for f in found if f["kept"] is not None]
  return {"answers": len(found), "tokens": tokens / len(found), "characters": characters / len(found),
          "characters_per_token": characters / tokens if tokens else None,
          "kept": sum(known) / len(known) if known else None}
