"""Streams one answer to the terminal; drafted and accepted tokens are coloured.

  python -m experiments.generate --prompt="Name three rivers." --method=ngram
"""
import sys

from absl import flags

from experiments.harness import cli
from experiments.harness import logprob_table
from experiments.harness import methods
from experiments.harness import one_method
from experiments.harness import rules
from experiments.harness import settings
from experiments.harness import terminal
from experiments import pairs
import specjax
from specjax.models import base as models

_PROMPT = flags.DEFINE_string("prompt", None, "The user's message.")
_SYSTEM = flags.DEFINE_string("system", None, "A system message; the target's own default without it.")
_METHOD = flags.DEFINE_string("method", "ngram", f"One of {', '.join(methods.NAMES)}.")
_RAW = flags.DEFINE_bool("raw", False, "Give the prompt to the target as it is, without its chat template.")
_LOGPROBS = flags.DEFINE_integer("logprobs", None, "Show each token's logprobs behind the text, and so many "
                                 "alternatives; off by default.", lower_bound=0)


def main():
  pairs.apply()
  if not _PROMPT.value:
    raise ValueError("--prompt is empty; give the message that the model is to answer")
  if _RAW.value and _SYSTEM.value:
    raise ValueError("--system belongs to a chat template, which --raw leaves out; give one of the two")
  target, tokenizer, proposer, params, verifier = one_method.build(_METHOD.value, "generate")
  if models.encodes(target) and _SYSTEM.value:
    raise ValueError(f"--system belongs to a chat template, and {settings.TARGET.value} reads the prompt alone with an "
                     "encoder; leave it out")
  if _RAW.value or models.encodes(target):
    prompt = tokenizer.encode(_PROMPT.value, add_special_tokens=True)
  else:
    system = [{"role": "system", "content": _SYSTEM.value}] if _SYSTEM.value else []
    prompt = tokenizer.chat(system + [{"role": "user", "content": _PROMPT.value}])
  answer = terminal.write(specjax.stream(
      target, proposer, prompt, params, tokenizer=tokenizer, max_new_tokens=settings.MAX_NEW_TOKENS.value,
      key=settings.random_key(), verifier=verifier, logprobs=_LOGPROBS.value))
  if _LOGPROBS.value is not None:
    print("\n\n" + logprob_table.render(answer.deltas, tokenizer), end="", file=sys.stderr)
  print(f"\n\n{answer.line()}", file=sys.stderr)
  if not rules.keeps_the_law(verifier, proposer):
    print(f"LOSSY: {rules.name_of(verifier)}; the text is not the target's", file=sys.stderr)


if __name__ == "__main__":
  cli.run(main)
