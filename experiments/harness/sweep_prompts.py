"""Prompts of a length that is asked for: longer ones lose their middle, shorter ones get text in front.

Instructions stand at the beginning or at the end of a prompt, so the middle is what is left out. What is put in front
are the longest texts of the workload, as documents stand before a question: the prompt is longer, and asks the same.
"""
import dataclasses

from absl import flags

from experiments.workloads import Request

TOKENS = flags.DEFINE_integer("prompt_tokens", None, "Tokens of every prompt, chat template included; as they are by "
                              "default.", lower_bound=1)


def first_turns(requests: list[Request]) -> list[Request]:
  """Requests that end with their first turn."""
  return [dataclasses.replace(request, turns=request.turns[:1]) for request in requests]


def fit(requests: list[Request], documents: list[Request], tokens: int, tokenizer, *, raw: bool) -> list[Request]:
  """Requests whose prompts have `tokens` tokens, or a few less where text does not encode to the number exactly.

  Args:
    requests: of one turn each. documents: where the text in front comes from, the longest first. raw: without the chat
      template.

  Raises:
    ValueError: the template alone has as many tokens.
  """
  encode = lambda text: (tokenizer.encode(text, add_special_tokens=True) if raw else
                         tokenizer.chat([{"role": "user", "content": text}]))
  room = tokens - len(encode("x")) + 1
  if room < 1:
    raise ValueError(f"--prompt_tokens={tokens}: the target's template alone has {len(encode('x')) - 1} tokens; give "
                     "more")
  longest = sorted({turn for request in documents for turn in request.turns}, key=len, reverse=True)
  return [dataclasses.replace(request, turns=(_fitted(request.turns[0], longest, tokens, room, tokenizer, encode),))
          for request in requests]


def _fitted(text, longest, tokens, room, tokenizer, encode):
  ids, others = tokenizer.encode(text), [other for other in longest if other != text] or [text]
  if len(ids) < room:
    filling = []
    while len(filling) < room:
      for other in others:
        filling += tokenizer.encode(other + "\n\n")
        if len(filling) >= room:
          break
    made = lambda count: tokenizer.decode(filling[:max(0, count - len(ids))]) + text
  else:
    made = lambda count: tokenizer.decode(ids[:count // 2]) + tokenizer.decode(ids[len(ids) - count + count // 2:])
  # Text that is cut may encode to another number of tokens than it was cut to.
  for count in range(room, 0, -1):
    if made(count).strip() and len(encode(made(count))) <= tokens:
      return made(count)
  return text[:1]
