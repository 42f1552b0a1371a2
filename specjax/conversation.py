"""A conversation: turn after turn behind one committed cache, so that a turn runs what is new and little else.

A turn's prompt is what stands there already, prompts and answers as they were generated, and what the chat template
writes behind it. Where a template rewrites what it wrote before (some leave earlier thoughts out), that is the prompt,
and the turn begins from the first token. So it does where the conversation enters another bucket of slots under a
proposer whose state has their size. `reused` says which of the two it was. What is in the cache has been verified,
so the next turn is exact whatever drafted this one.
"""
from collections.abc import Iterator

import numpy as np

from specjax import drivers
from specjax.models import base as models


class Conversation:
  """One conversation with a target, a turn at a time.

  Attributes:
    messages: what was said, "role" and "content" each, the system message first if there is one.
    ids: tokens of the conversation so far, prompts and answers.
    prompt_tokens, reused: of all turns, tokens of the prompts, and how many of them were kept and not run again; the
      last token of a text waits for the next step, so one a turn is always run.
  """

  def __init__(self, target, proposer, tokenizer, *, system: str | None = None, **options):
    """Begins one.

    Args:
      target, proposer: as in `drivers.generate`. tokenizer: the target's, with a chat template.
      system: the system message; the template's own default without it.
      options: of `drivers.generate`, for every turn: params, max_new_tokens, key, eos_ids, stop_sequences, verifier,
        constraint and logprobs.

    Raises:
      ValueError: a model without a chat template, or with an encoder.
    """
    models.decoder_only(target, "a conversation")
    self.messages = [] if system is None else [{"role": "system", "content": system}]
    if not tokenizer.has_chat_template:
      tokenizer.chat_text(self.messages)  # says what to do instead
    self.ids, self.prompt_tokens, self.reused = [], 0, 0
    self._target, self._proposer, self._tokenizer, self._options = target, proposer, tokenizer, options
    self._kept = None

  def say(self, message: str) -> Iterator[drivers.Delta]:
    """The answer to the user's `message`, as `drivers.stream` yields it.

    A turn that is not read to its end has not happened: the conversation stands where it stood, and the next turn is
    run from the first token.

    Raises:
      ValueError: as `drivers.generate`, such as for a conversation that outgrows the context.
    """
    messages = [*self.messages, {"role": "user", "content": message}]
    prompt = self._tokenizer.chat_behind(self.ids, messages)
    kept, self._kept, spent, answer = self._kept, None, {}, []
    deltas = drivers.stream(self._target, self._proposer, prompt, tokenizer=self._tokenizer, kept=kept, spent=spent,
                            **self._options)
    while True:
      try:
        delta = next(deltas)
      except StopIteration as end:
        self._kept = end.value
        break
      answer += delta.token_ids
      yield delta
    self.ids = prompt + answer
    self.messages = [*messages, {"role": "assistant", "content": self._tokenizer.decode(answer)}]
    self.prompt_tokens += len(prompt)
    self.reused += int(np.sum(spent["reused"]))
