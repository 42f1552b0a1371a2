"""Translations against a reference, by sacrebleu.

- `chrf`: chrF (Popović, 2015; characters up to 6, beta 2), 0 to 100.
- `bleu`: BLEU of the one text with the orders that it has ("effective order"), 0 to 100.
Null without a reference. `pool` gives both of a whole group, whose n-grams are counted together as papers do: a mean of
single BLEUs is another, noisier number. BLEU's words are those of sacrebleu's "13a", "zh" for Chinese, and characters
for Japanese, Korean and Thai, whose tokenizers would need programs outside Python.
"""
import functools

from experiments.quality import libraries
from experiments.quality import rows
from experiments.workloads import Request

_WORDS = {"zh": "zh", "ja": "char", "ko": "char", "th": "char"}


def judge(request: Request, text: str) -> dict[str, float | bool | None]:
  """See the module.

  Raises:
    ValueError: sacrebleu is not installed, and the row has a reference.
  """
  reference = rows.reference(request)
  if reference is None:
    return {"chrf": None, "bleu": None}
  return {"chrf": _chrf().sentence_score(text, [reference]).score,
          "bleu": _bleu(_words(request), True).sentence_score(text, [reference]).score}


def pool(answers: list[tuple[Request, str]]) -> dict[str, float]:
  """`corpus_chrf`, and `corpus_bleu` where all have one tokenizer, of the answers with a reference; {} without any."""
  pairs = [(request, text, rows.reference(request)) for request, text in answers]
  pairs = [pair for pair in pairs if pair[2] is not None]
  if not pairs:
    return {}
  requests, texts, references = zip(*pairs)
  found = {"corpus_chrf": _chrf().corpus_score(list(texts), [list(references)]).score}
  if len({_words(request) for request in requests}) == 1:
    found["corpus_bleu"] = _bleu(_words(requests[0]), False).corpus_score(list(texts), [list(references)]).score
  return found


def _words(request):
  return _WORDS.get(request.language.split("-")[0].lower(), "13a")


@functools.cache
def _bleu(words, effective_order):
  return libraries.load("sacrebleu").BLEU(tokenize=words, effective_order=effective_order)


@functools.cache
def _chrf():
  return libraries.load("sacrebleu").CHRF()
