"""A conversation at the terminal: a message a line, each turn behind the caches of the ones before.

  python -m experiments.chat --method=eagle3
  printf 'Name three rivers.\nWhich is the longest?\n' | python -m experiments.chat --method=ngram

Drafted and accepted tokens are coloured. Ends with the input, or with Ctrl-D.
"""
import sys

from absl import flags

from experiments.harness import cli
from experiments.harness import methods
from experiments.harness import one_method
from experiments.harness import rules
from experiments.harness import settings
from experiments.harness import terminal
from experiments import pairs
import specjax

_SYSTEM = flags.DEFINE_string("system", None, "A system message; the target's own default without it.")
_METHOD = flags.DEFINE_string("method", "ngram", f"One of {', '.join(methods.NAMES)}.")


def main():
  pairs.apply()
  target, tokenizer, proposer, params, verifier = one_method.build(_METHOD.value, "a conversation")
  talk = specjax.Conversation(target, proposer, tokenizer, system=_SYSTEM.value, params=params,
                              max_new_tokens=settings.MAX_NEW_TOKENS.value, key=settings.random_key(),
                              verifier=verifier)
  while (message := _read()) is not None:
    if not message.strip():
      continue
    prompt, reused = talk.prompt_tokens, talk.reused
    answer = terminal.write(talk.say(message))
    print(flush=True)
    print(f"{answer.line()}; {talk.reused - reused} of {talk.prompt_tokens - prompt} prompt tokens were kept from "
          "before\n", file=sys.stderr, flush=True)
  if not rules.keeps_the_law(verifier, proposer):
    print(f"LOSSY: {rules.name_of(verifier)}; the text is not the target's", file=sys.stderr)


def _read():
  """The next message; None at the end of the input."""
  if sys.stdin.isatty():
    print("> ", end="", flush=True)
  line = sys.stdin.readline()
  return line.rstrip("\n") if line else None


if __name__ == "__main__":
  cli.run(main)
