"""Methods by name: which proposer a flag value means, and the flags of its options."""
from absl import flags

from specjax import decode
from specjax import proposers

_DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", 7, "Drafted tokens a step, at most.", lower_bound=1)
_MAX_NGRAM = flags.DEFINE_integer("max_ngram", 3, "Longest n-gram that prompt lookup looks for.", lower_bound=1)
_MIN_NGRAM = flags.DEFINE_integer("min_ngram", 2, "Shortest n-gram that prompt lookup looks for.", lower_bound=1)
_MATCH = flags.DEFINE_enum("ngram_match", "latest", ["latest", "earliest"],
                           "Which occurrence of an n-gram prompt lookup continues.")


def _plain():
  return proposers.Plain()


def _ngram():
  return proposers.NGram(max_ngram=_MAX_NGRAM.value, min_ngram=_MIN_NGRAM.value, num_tokens=_DRAFT_TOKENS.value,
                         match=_MATCH.value)


_METHODS = {"plain": _plain, "ngram": _ngram}
NAMES = tuple(_METHODS)
# Those that draw their drafts from a law q and hand it over; the drafts of all others are points.
SAMPLED = frozenset()


def build(name: str):
  """The proposer of a method, with the options that the flags give.

  Raises:
    ValueError: for a name that is not in `NAMES`.
  """
  if name not in _METHODS:
    raise ValueError(f"unknown method {name!r}; methods are {', '.join(NAMES)}")
  if _DRAFT_TOKENS.value >= decode.WIDTHS[-1]:
    raise ValueError(f"--draft_tokens={_DRAFT_TOKENS.value}: at most {decode.WIDTHS[-1] - 1}, since the widest step "
                     f"verifies {decode.WIDTHS[-1]} tokens, the pending one included")
  return _METHODS[name]()


def build_all(names: list[str]) -> dict:
  """Proposers by name, in the order given; every name once."""
  if not names or len(set(names)) < len(names):
    raise ValueError(f"--methods={','.join(names)}: name each method once, of {', '.join(NAMES)}")
  return {name: build(name) for name in names}
