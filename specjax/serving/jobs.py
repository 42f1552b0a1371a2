"""One request inside the engine: its checked form, its text so far, and what is counted of it."""
import dataclasses
from typing import Any

import jax
import numpy as np

from specjax import decode
from specjax import starting
from specjax.serving import control
from specjax.serving import requests
from specjax.serving import text as text_lib


@dataclasses.dataclass(frozen=True)
class _Origin:
  """Where a token of the output comes from."""
  position: int | None  # its place in the draft, from 0; None: it was not drafted
  forced: bool          # its grammar left no choice
  logprobs: Any


class Job:
  """A request that was accepted.

  Attributes:
    id, request, asked: its number, as it was submitted, and checked.
    prompt_tokens, total_tokens, expires: for the queue, see `scheduler.Waiting`.
    matcher: of its grammar; None without one.
    state: of one row, while its prompt is read. read: tokens of the prompt that are in it.
    cached: prompt tokens that were taken over from other requests.
    acceptance: of its drafts.
    length: known tokens, prompt included.
  """

  def __init__(self, id: int, request: requests.Request, asked: starting.Asked, writer: text_lib.Writer, depth: int,
               now: float):
    self.id, self.request, self.asked = id, request, asked
    self.prompt_tokens = len(asked.prompts[0])
    self.total_tokens = int(asked.limit[0])
    self.submitted, self.admitted = now, None
    self.expires = None if request.deadline is None else now + request.deadline
    self.matcher, self.state, self.read, self.cached = None, None, 0, 0
    self.acceptance = control.Acceptance()
    self.length = self.prompt_tokens
    self._writer, self._ids, self._pieces, self._arrivals = writer, [], [], []
    self._steps = self._drafts = self._drafted = self._accepted = self._forced = 0
    self._per_position = [0] * depth

  @property
  def prompt(self) -> np.ndarray:
    """i32[P]."""
    return self.asked.prompts[0]

  @property
  def limit(self) -> int:
    """Tokens that it may have, prompt included."""
    return self.total_tokens

  def push(self, ids: list[int], drafted: list[bool], logprobs, forced: int) -> tuple[list[text_lib.Token], bool]:
    """Tokens of one step: what of them and those before is let out, and whether the text ended at a stop string.

    Args:
      ids, drafted: of the step, N each. logprobs: `Logprobs` of them, arrays without a batch axis, or None.
      forced: how many tokens its grammar had drafted in this step.
    """
    out, self.length = [], self.length + len(ids)
    for place, token in enumerate(ids):
      at = None if logprobs is None else jax.tree.map(lambda x: x[place], logprobs)
      free, ended = self._writer.push(token, _Origin(place if drafted[place] else None,
                                                     drafted[place] and place < forced, at))
      out += free
      if ended:
        return out, True
    return out, False

  def flush(self) -> list[text_lib.Token]:
    """What was held back."""
    return self._writer.flush()

  def count_step(self, drafted: int) -> None:
    """A verify pass with so many drafted tokens."""
    self._steps += 1
    self._drafts += drafted > 0
    self._drafted += drafted

  def update(self, tokens: list[text_lib.Token], now: float, finish_reason: str | None) -> requests.Update:
    """Hands tokens over, and with a reason to finish what became of the request."""
    for token in tokens:
      self._ids.append(token.id)
      self._pieces.append(token.piece)
      self._forced += token.belongs.forced
      if token.belongs.position is not None:
        self._accepted += 1
        self._per_position[token.belongs.position] += 1
    if tokens:
      self._arrivals.append((now, len(tokens)))
    known = None
    if tokens and self.request.logprobs is not None:
      top = self.request.logprobs
      known = jax.tree.map(lambda *rows: np.stack(rows), *[token.belongs.logprobs for token in tokens])
      known = known.replace(top_ids=known.top_ids[:, :top], top_raw=known.top_raw[:, :top])
    return requests.Update(id=self.id, token_ids=[token.id for token in tokens],
                           pieces=[token.piece for token in tokens],
                           drafted=[token.belongs.position is not None for token in tokens], logprobs=known,
                           outcome=None if finish_reason is None else self._outcome(now, finish_reason))

  def _outcome(self, now, finish_reason):
    return requests.Outcome(
        id=self.id, category=self.request.category, token_ids=self._ids, text="".join(self._pieces),
        finish_reason=finish_reason, prompt_tokens=self.prompt_tokens, cached_tokens=self.cached,
        speculation=requests.Speculation(
            steps=self._steps, drafts=self._drafts, drafted_tokens=self._drafted, accepted_tokens=self._accepted,
            accepted_per_position=tuple(self._per_position), forced_tokens=self._forced),
        submitted=self.submitted, admitted=self.admitted, finished=now, arrivals=tuple(self._arrivals),
        problem=self.matcher and self.matcher.problem)


def neutral(state: decode.DecodeState) -> decode.DecodeState:
  """A state without what the host sets before every step: parameters, rules, control, counters and logprobs, of which
  only those of the step's own tokens are ever read."""
  return state.replace(params=None, rules=None, control=None, counters=None, logprobs=None)
