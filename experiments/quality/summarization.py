"""Summaries, and answers from documents: like the reference, from the source, true to it.

- `rouge1`, `rouge2`, `rougeL`: F-measures against the reference (Lin, 2004; the library rouge-score without stemming,
  over the words of `words.split`). Null without a reference.
- `coverage`: share of the answer's words that the source has, too: the extractive coverage of Grusky et al.
  ("Newsroom", 2018, section 4), whose copied fragments may be single words. Null for an answer without words.
- `numbers_supported`: share of the answer's different numbers that the source has, 1,200 being 1200. Numbers that
  number the items of a list are left out. Null where the answer has none.
- `names_supported`: share of the answer's different names that the source has, whatever the case. A name is a span of
  words that begin with a capital, "of", "de" and their like between them; function words in front are dropped, and so
  is a single word at the start of a sentence or line. Null where there is none, as in scripts without capitals.
"""
import re

from experiments.quality import libraries
from experiments.quality import rows
from experiments.quality import words
from experiments.workloads import Request

_KINDS = ("rouge1", "rouge2", "rougeL")
_ITEM = re.compile(r"^\s*(?:[-*•#]+|\(?\d+[.)])\s+", re.M)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SENTENCE = re.compile(r"[.!?。！？:]\s+|\n+")
_TOKEN = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*|[^\w\s]")
_BETWEEN = {"of", "de", "da", "di", "del", "la", "le", "van", "von", "der", "den", "bin", "al", "the", "and", "&"}
_IN_FRONT = set("the a an this that these those in on at by for from to with as after before when while if but and or "
                "so it he she they we i his her its their our my however also both".split())


def judge(request: Request, text: str) -> dict[str, float | bool | None]:
  """See the module.

  Raises:
    ValueError: rouge-score is not installed, and the row has a reference.
  """
  source = rows.document(request)
  return _rouge(rows.reference(request), text) | {
      "coverage": coverage(words.split(text), words.split(source)),
      "numbers_supported": _share(numbers(text), set(_numbers_of(source))),
      "names_supported": _names_supported(text, source)}


def _rouge(reference, text):
  if reference is None:
    return dict.fromkeys(_KINDS)
  scorer = libraries.load("rouge_score.rouge_scorer").RougeScorer(_KINDS, tokenizer=words.Tokenizer())
  return {name: float(score.fmeasure) for name, score in scorer.score(reference, text).items()}


def coverage(answer: list[str], source: list[str]) -> float | None:
  """Share of the words of `answer` that `source` has; None for no words."""
  known = set(source)
  return sum(word in known for word in answer) / len(answer) if answer else None


def numbers(text: str) -> set[str]:
  """The numbers of a text, without signs between thousands and zeros behind a point."""
  return set(_numbers_of(_ITEM.sub("", text)))


def _numbers_of(text):
  for match in _NUMBER.findall(text):
    plain = re.sub(r",(?=\d{3}(?:\D|$))", "", match)
    yield re.sub(r"(\.\d*?)0+$", r"\1", plain).rstrip(".") if plain.count(".") == 1 else plain


def names(text: str) -> set[str]:
  """The names of a text, in lower case; see the module."""
  found = set()
  for sentence in _SENTENCE.split(_ITEM.sub("", text)):
    span, first = [], True
    for token in [*_TOKEN.findall(sentence), "."]:
      if token[0].isupper():
        span.append((token, first))
      elif not (span and token.lower() in _BETWEEN):
        found |= _name(span)
        span = []
      else:
        span.append((token, False))
      first = False
  return found


def _name(span):
  while span and span[-1][0] in _BETWEEN:
    span = span[:-1]
  starts = bool(span) and span[0][1]
  while span and span[0][0].lower() in _IN_FRONT:
    span, starts = span[1:], False
  return set() if not span or len(span) == 1 and (starts or len(span[0][0]) < 2) else {
      " ".join(token for token, _ in span).lower()}


def _names_supported(text, source):
  joined = f" {' '.join(_TOKEN.findall(source.lower()))} "
  found = names(text)
  return sum(f" {name} " in joined for name in found) / len(found) if found else None


def _share(found, allowed):
  return len(found & allowed) / len(found) if found else None
