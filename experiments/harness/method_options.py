"""The flags of the methods' options, and what they build. A flag left out means the method's own default."""
from absl import flags

import specjax
from specjax import proposers
from specjax.checkpoints import vocabulary_map
from specjax.proposers import length
from specjax.proposers import renewal

DRAFT_TOKENS = flags.DEFINE_integer("draft_tokens", None, "Drafted tokens a step, at most; each method has its own "
                                    "default.", lower_bound=1)
MAX_NGRAM = flags.DEFINE_integer("max_ngram", 3, "Longest n-gram that prompt lookup looks for.", lower_bound=1)
MIN_NGRAM = flags.DEFINE_integer("min_ngram", 2, "Shortest n-gram that prompt lookup looks for.", lower_bound=1)
MATCH = flags.DEFINE_enum("ngram_match", "latest", ["latest", "earliest"],
                          "Which occurrence of an n-gram prompt lookup continues.")
DRAFT = flags.DEFINE_string("draft", None, "The draft model: a known name, a path or a Hub id, as --target.")
EXIT_LAYER = flags.DEFINE_integer("exit_layer", None, "Layers of the target that draft in early_exit; a third of them "
                                  "by default.", lower_bound=1)
SAMPLED = flags.DEFINE_bool("draft_sampled", False, "Model drafters draw their tokens instead of taking the greedy one; "
                            "use it with --verifier=rejection, block, recursive or traversal.")
TEMPERATURE = flags.DEFINE_float("draft_temperature", None, "Temperature of drawn drafts; the request's by default.",
                                 lower_bound=0)
TOP_K = flags.DEFINE_integer("draft_top_k", None, "top-k of drawn drafts; the request's by default.", lower_bound=0)
TOP_P = flags.DEFINE_float("draft_top_p", None, "top-p of drawn drafts; the request's by default.", lower_bound=0,
                           upper_bound=1)
LENGTH = flags.DEFINE_enum("draft_length", "fixed", ["fixed", "heuristic", "confidence", "entropy", "renewal"],
                           "When model drafters stop before --draft_tokens.")
THRESHOLD = flags.DEFINE_float("confidence_threshold", length.Confidence.threshold, "--draft_length=confidence: least "
                               "probability of the drafter's best token.", lower_bound=0, upper_bound=1)
_loaded = {}


def tokens(default: int) -> int:
  """How many tokens a method drafts."""
  return DRAFT_TOKENS.value or default


def drawing() -> proposers.Drawing:
  """How model drafters take tokens."""
  return proposers.Drawing(sampled=SAMPLED.value, temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value)


def length_rule():
  """The rule of --draft_length."""
  if LENGTH.value == "confidence":
    return length.Confidence(threshold=THRESHOLD.value)
  rules = {"fixed": length.Fixed, "heuristic": length.Heuristic, "entropy": length.Entropy,
           "renewal": renewal.Renewal}
  return rules[LENGTH.value]()


def load(name: str):
  """A second model and its tokenizer, loaded once a process."""
  if name not in _loaded:
    _loaded[name] = specjax.load(name)
  return _loaded[name]


def drafter(given):
  """The model of --draft, whose ids must be the target's, token by token."""
  model, tokenizer = load(DRAFT.value)
  vocabulary_map.require_same(given.tokenizer, tokenizer)
  return model


def check(widest: int) -> None:
  """Refuses options that no method can honour.

  Raises:
    ValueError: names the flag.
  """
  if DRAFT_TOKENS.value and DRAFT_TOKENS.value >= widest:
    raise ValueError(f"--draft_tokens={DRAFT_TOKENS.value}: at most {widest - 1}, since the widest step verifies "
                     f"{widest} tokens, the pending one included")
  if THRESHOLD.value != length.Confidence.threshold and LENGTH.value != "confidence":
    raise ValueError(f"--confidence_threshold={THRESHOLD.value} belongs to --draft_length=confidence; leave it out or "
                     "set that")
  drawing().check()
