"""What is asked of the engine, and what it hands back: requests, updates while they run, and what became of them.

Times are seconds of `time.perf_counter`, so that differences mean something and a clock that is set back does not.

Letters: N tokens of an update, A alternatives kept a token, D greatest depth of a draft.
"""
import dataclasses

import numpy as np

from specjax import logprobs as logprobs_lib
from specjax import sampling
from specjax.serving import grammars

STOP, LENGTH, CANCELLED, DEADLINE = "stop", "length", "cancelled", "deadline"
FINISH_REASONS = (STOP, LENGTH, CANCELLED, DEADLINE)


class QueueFull(RuntimeError):
  """The engine holds as many waiting requests as it may; try again later."""


@dataclasses.dataclass(frozen=True)
class Request:
  """One request. What is wrong with it is said when it is submitted, before anything runs.

  Attributes:
    prompt: token ids.
    params: sampling parameters of this one row, as scalars; without a seed the engine takes the request's number.
    max_new_tokens: budget.
    stop: strings that end the text; they are no part of it.
    stop_sequences: token-id sequences that end it; they are part of it.
    eos_ids: ids that end it; None: the target's own; () to ignore the end of sequence.
    logprobs: None for none, or how many alternatives to report beside every token's own.
    grammar: what the text must be; None: anything.
    deadline: seconds from its submission after which it is ended where it stands.
    category: kind of request, for statistics.
    speculate: False to decode it plainly, whatever its neighbours do.
  """
  prompt: tuple[int, ...] | list[int] | np.ndarray
  params: sampling.SamplingParams = sampling.SamplingParams()
  max_new_tokens: int = 128
  stop: tuple[str, ...] = ()
  stop_sequences: tuple[tuple[int, ...], ...] = ()
  eos_ids: tuple[int, ...] | None = None
  logprobs: int | None = None
  grammar: grammars.Grammar | None = None
  deadline: float | None = None
  category: str = "all"
  speculate: bool = True


@dataclasses.dataclass(frozen=True)
class Update:
  """What one request gained in one turn. The last update of a request has its `outcome`, and may have no tokens.

  Text that may yet turn out to begin a stop string, and the tokens that it comes from, wait for a later update.
  """
  id: int                # what `Engine.submit` returned
  token_ids: list[int]
  pieces: list[str]      # the text that each token completes; no half characters
  drafted: list[bool]    # which of them were accepted drafts
  logprobs: logprobs_lib.Logprobs | None  # NumPy arrays, of these tokens: f32[N] and [N, A]; if asked for
  outcome: "Outcome | None" = None

  @property
  def text(self) -> str:
    """The new text."""
    return "".join(self.pieces)


@dataclasses.dataclass(frozen=True)
class Speculation:
  """What drafting brought one request. Tokens behind a stop are accepted by nobody, drafted as they may have been."""
  steps: int             # verify passes
  drafts: int            # of them with a draft
  drafted_tokens: int
  accepted_tokens: int   # drafts that are part of the output
  accepted_per_position: tuple[int, ...]  # D of them
  forced_tokens: int = 0  # tokens of the output that its grammar left no choice about, and were drafted for free


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A request that has ended.

  Attributes:
    finish_reason: one of FINISH_REASONS. "stop" is an end id, a stop sequence or string, or a grammar that is complete.
    prompt_tokens, cached_tokens: of the prompt, and those of them that were not run again, as another request had them.
    submitted, admitted, finished: when it came, when its prefill began and when it ended; `admitted` is None if it
      never began.
    arrivals: of every update with tokens (time, tokens), in order.
    problem: why a text that ended under a grammar is not whole and could not become so; None if it may be whole, as far
      as its end is not its length.
  """
  id: int
  category: str
  token_ids: list[int]
  text: str
  finish_reason: str
  prompt_tokens: int
  cached_tokens: int
  speculation: Speculation
  submitted: float
  admitted: float | None
  finished: float
  arrivals: tuple[tuple[float, int], ...]
  problem: str | None = None

  @property
  def queue_seconds(self) -> float | None:
    """From submission to the beginning of its prefill."""
    return None if self.admitted is None else self.admitted - self.submitted

  @property
  def first_token_seconds(self) -> float | None:
    """Time to the first token, waiting in the queue included; None if there was none."""
    return self.arrivals[0][0] - self.submitted if self.arrivals else None

  @property
  def token_seconds(self) -> float | None:
    """Time per output token behind the first (vLLM's TPOT: from the first update to the last, over all tokens but one)."""
    count = sum(count for _, count in self.arrivals)
    return (self.arrivals[-1][0] - self.arrivals[0][0]) / (count - 1) if count > 1 else None

  @property
  def gaps(self) -> list[float]:
    """Seconds between consecutive updates (inter-token latency, which with drafts is of chunks)."""
    times = [time for time, _ in self.arrivals]
    return [after - before for before, after in zip(times, times[1:])]
