"""Problems with one final answer: is it there, and is it the right one.

- `answered`: a final answer of the reference's kind was found; without a reference, a number.
- `right`: it equals the reference. Null without one.

The final answer stands, by what is found first: in the last \\boxed{}, behind the last "####", behind the last "answer
is", "answer:" or "final answer" (and the same in other languages). Else it is the last number, or for a choice the last
letter in brackets; a reference in words must then be the last words of the text. Numbers are compared as numbers (1,200
is 1200 and 1.50 is 1.5; digits of any script), a choice as its letter, words without case and signs.
"""
import fractions
import re
import unicodedata

from experiments.quality import rows
from experiments.workloads import Request

_NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_LONGEST = 60  # digits: more is no answer
_BEHIND = re.compile(r"(?:final answer|answer is|answer:|正解は|答えは|答案是|答案：|答案为|답은|정답은|답:|정답:|la respuesta es|"
                     r"respuesta:|la réponse est|réponse :|die antwort ist|antwort lautet|antwort:|ответ:|คำตอบคือ|"
                     r"الجواب هو)"
                     r"(?:\s+is)?[\s:*：]*", re.I)
_BOXED = re.compile(r"\\boxed\s*\{([^\n]*)\}")


def judge(request: Request, text: str) -> dict[str, float | bool | None]:
  """See the module."""
  reference = rows.reference(request)
  if reference is None:
    return {"answered": number(_last_number(text) or "") is not None, "right": None}
  wanted = _normal(reference.rsplit("####", 1)[-1])
  letter = re.fullmatch(r"\(?([A-Z])\)?", wanted)
  if letter:
    found = _choice(text)
    return {"answered": found is not None, "right": found == letter[1]}
  value = number(wanted)
  if value is not None:
    found = number(_last_number(text, marked=True) or "")
    return {"answered": found is not None, "right": found == value}
  wanted, found = _plain(wanted), _plain(_marked(text) or "")
  last = _plain(text)
  right = bool(wanted) and (found == wanted or found.startswith(wanted + " ") or last == wanted
                            or last.endswith(" " + wanted))
  return {"answered": bool(found or last), "right": right}


def number(text: str) -> fractions.Fraction | None:
  """The number that a text is; None where it is none."""
  match = re.fullmatch(r"\s*[^\w\s\-−.]*\s*(" + _NUMBER.pattern + r")\s*[^\w\s]*\s*", _normal(text))
  if not match or len(match[1]) > _LONGEST:
    return None
  plain = match[1].replace("−", "-")
  if re.fullmatch(r"-?\d+,\d{1,2}", plain):  # a comma as the decimal point
    plain = plain.replace(",", ".")
  try:
    return fractions.Fraction(re.sub(r"[,\s]", "", plain))
  except (ValueError, ZeroDivisionError):
    return None


def _normal(text):
  """One way to write each sign, digits as 0-9."""
  text = unicodedata.normalize("NFKC", text).replace("\u066b", ".").replace("\u066c", ",")
  return "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text).strip()


def _marked(text):
  """What stands behind the last sign of a final answer, to the end of its line; None without one."""
  text = _normal(text)
  boxed = _BOXED.findall(text)
  if boxed:
    return boxed[-1]
  if "####" in text:
    return text.rsplit("####", 1)[1].strip().split("\n")[0]
  marks = list(_BEHIND.finditer(text))
  return text[marks[-1].end():].split("\n")[0] if marks else None


def _last_number(text, *, marked=False):
  """The first number behind a sign of the final answer, if asked for, else the last number of the text."""
  behind = _NUMBER.findall(_marked(text) or "") if marked else []
  everything = behind or _NUMBER.findall(_normal(text))[-1:]
  return everything[0].strip().rstrip(",") if everything else None


def _choice(text):
  marked = _marked(text)
  found = re.search(r"\b([A-Z])\b", marked) if marked else None
  if found:
    return found[1]
  letters = re.findall(r"\(([A-Z])\)|^\s*\**([A-Z])\**[).:]?\s*$", _normal(text), re.M)
  return (letters[-1][0] or letters[-1][1]) if letters else None


def _plain(text):
  return " ".join(re.findall(r"[^\W_]+|[()\[\]{}<>]", _normal(text).lower()))
