"""Continuous batching over the one step: requests come and go while others run.

A turn admits what there is room for, reads a bit of the prompts that are waiting to begin, and makes one decode step of
all running rows. The step is `decode.step`, as `generate` and `stream` run it; the engine only puts rows in, takes them
out, and sets how much may be drafted. Every prompt is read alone, as a batch of one row, so that its keys and values
depend on its neighbours by rounding at most; then it is inserted into the batch. Batch and slots are buckets (1, 2, 4 ... rows, 256,
512 ... slots), so that a fixed set of programs serves any traffic; `warm_up` compiles it. What a proposer keeps of past
requests (`Proposer.remember`) is not asked for: rows end one by one, and each would be another proposer's.

The committed cache is slotted: a row has all of its slots in one piece (BUILD.md, Serving, has the measurement).

Letters: B rows of the batch, S slots, T nodes of a tree, N most drafted nodes, V vocabulary.
"""
import collections
import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from specjax import drivers
from specjax import starting
from specjax import stopping
from specjax.models import base as models
from specjax.proposers import fallback
from specjax.proposers import given
from specjax.serving import control as control_lib
from specjax.serving import costs as costs_lib
from specjax.serving import decoding
from specjax.serving import grammars
from specjax.serving import jobs
from specjax.serving import metrics
from specjax.serving import prefill
from specjax.serving import requests
from specjax.serving import scheduler
from specjax.serving import text as text_lib
from specjax.verifiers import point


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and rules of an engine.

  Attributes:
    rows: requests that run at once, at most.
    max_tokens: prompt and output of one request, at most; None: the target's context.
    step_tokens: prompt tokens that a turn reads beside its decode step, so that running rows do not wait for whole
      prompts. Beginnings that are taken over from other requests are not counted.
    total_tokens: prompt and budget of all admitted requests together; None: no bound but rows.
    waiting: requests in the queue, at most. order: of the queue, see `scheduler.Queue`.
    prefix_tokens: tokens of prompts that are kept for others that begin alike, with what `decode.Chunk` holds of each;
      0: none.
    logprobs: alternatives that a request may ask for, at most.
    forced: tokens that are drafted where a grammar leaves no choice, at most; 0: none.
    turns: records of turns that are kept, see `Engine.trace`.
  """
  rows: int = 16
  max_tokens: int | None = None
  step_tokens: int = 128
  total_tokens: int | None = None
  waiting: int = 1024
  order: str = "fcfs"
  prefix_tokens: int = 8192
  logprobs: int = 20
  forced: int = 0
  turns: int = 100_000

  def __post_init__(self):
    least = dict(rows=1, step_tokens=prefill.LEAST, waiting=1, prefix_tokens=0, logprobs=0, forced=0, turns=1,
                 max_tokens=2, total_tokens=2)
    for name, bound in least.items():
      value = getattr(self, name)
      if value is None and name in ("max_tokens", "total_tokens"):
        continue
      if type(value) is not int or value < bound:
        raise ValueError(f"{name}={value!r}: it must be a whole number, {bound} or more")


@dataclasses.dataclass(frozen=True)
class Turn:
  """What one turn did. Times in seconds."""
  time: float            # when it ended
  running: int           # rows that ran a decode step
  waiting: int
  batch: int             # rows that the step computed
  slots: int             # of every one of them
  used: int              # slots that held a token
  draft_limit: int       # greatest limit of a row
  width: int             # nodes a row at which it was verified; 0: no step
  emitted: int           # tokens, before stop strings
  drafted: int
  accepted: int
  prefilled: int         # prompt tokens that were read
  seconds: float
  device_seconds: float  # of it, spent in compiled programs
  programs: int          # compiled in this turn


class Engine:
  """Serves requests with one target and one proposer. Not safe to share between threads: see `service`."""

  def __init__(self, target, proposer, tokenizer=None, *, config: Config = Config(), verifier=point.Point(),
               key: jax.Array | None = None, controller: control_lib.Controller | None = None,
               costs: costs_lib.Costs | None = None, clock: Callable[[], float] = time.perf_counter):
    """An engine without requests.

    Args:
      target, proposer, verifier: as in `drivers.generate`; a target without an encoder.
      tokenizer: the target's; needed for text, stop strings and grammars.
      key: of all randomness; a request draws from it by its seed, see `keys`.
      controller: how much to draft; by default `control.Goodput`, which turns drafting down where it does not pay.
      costs: what steps cost, of another engine of the same target and proposer, see `costs`. clock: seconds.

    Raises:
      ValueError: a target with an encoder, sizes beyond its context, a tokenizer of another model, a verifier that cannot
        judge the proposer's drafts, or `forced` with a proposer that cannot be one of several.
    """
    models.decoder_only(target, "serving")
    proposer = _with_forced(proposer, config.forced)
    if tokenizer is not None and tokenizer.vocab_size < models.known_ids(target):
      raise ValueError(f"the target has {models.known_ids(target)} ids and the tokenizer text for {tokenizer.vocab_size}: "
                       "others could be said and not be read; load both with specjax.load, which leaves such ids out")
    longest = target.max_context if config.max_tokens is None else config.max_tokens
    if not 2 <= longest <= target.max_context:
      raise ValueError(f"max_tokens={longest}: the target's context is {target.max_context}; allowed are 2 to that")
    self.config = dataclasses.replace(config, max_tokens=longest, logprobs=min(config.logprobs, target.vocab_size))
    self.target, self.proposer, self.tokenizer = target, proposer, tokenizer
    self.controller = control_lib.Goodput() if controller is None else controller
    self.stats = metrics.Stats()
    self.trace: collections.deque[Turn] = collections.deque(maxlen=config.turns)
    self._clock, self._key = clock, jax.random.key(0) if key is None else key
    self._verifier, self._next, self._turns = verifier, 0, 0
    self._queue = scheduler.Queue(config.order, config.waiting)
    self._reading: dict[int, jobs.Job] = {}
    self._leaving: dict[int, tuple[jobs.Job, str]] = {}  # those that end in the next turn, and why
    self._reader = prefill.Reader(target, proposer, config.prefix_tokens,
                                  starting.bucket(longest, target.max_context), self._key, verifier)
    self._batch = decoding.Batch(target, proposer, verifier, self._reader.capacity, self.config, costs)
    self._reader.check()
    self._compiler = None

  # What callers do.

  @property
  def busy(self) -> bool:
    """Whether anything waits, is read or runs."""
    return bool(len(self._queue) or self._reading or self._batch.jobs or self._leaving)

  @property
  def running(self) -> int:
    """Requests that have been admitted."""
    return len(self._reading) + len(self._batch.jobs)

  @property
  def waiting(self) -> int:
    """Requests in the queue."""
    return len(self._queue)

  @property
  def costs(self) -> costs_lib.Costs:
    """What steps have cost here, measured by `warm_up` and ever since; a copy."""
    return self._batch.costs.copy()

  def submit(self, request: requests.Request) -> int:
    """Puts a request in the queue and returns its number.

    Raises:
      ValueError: what is wrong with it. requests.QueueFull: too many wait.
    """
    if self._queue.full:
      raise requests.QueueFull(f"{len(self._queue)} requests wait already, as many as may; try again later")
    job = self._checked(request)
    self._next += 1
    self._queue.add(job.id, job)
    self.stats.on_submit()
    return job.id

  def cancel(self, id: int) -> bool:
    """Ends a request where it stands, in the next turn; False if there is none of that number."""
    job = self._queue.remove(id) or self._reading.get(id) or self._batch.find(id)
    if job is not None:
      self._leaving.setdefault(id, (job, requests.CANCELLED))
    return id in self._leaving

  def step(self) -> list[requests.Update]:
    """One turn; what requests gained in it, those that ended included."""
    if not self.busy:
      return []
    begin, programs, device = self._clock(), compiled_programs(), _Stopwatch()
    updates = self._leave(begin)
    self._admit(begin, device)
    read = self._read(device)
    step = None
    if self._batch.jobs:
      step = self._batch.step(self.controller, device)
      updates += self._hand_over(step)
    self._record(begin, programs, device, read, step)
    return updates

  def warm_up(self, *, full: bool = False, logprobs: bool = False, masks: bool = False) -> int:
    """Compiles what plain requests need in every bucket, and times a few steps in each; how many programs that were.

    Args:
      full: also for penalties, biases, banned and allowed ids and a minimum of tokens. logprobs: also for those that
        ask for them. masks: also for grammars.
    """
    if self.busy:
      raise ValueError("warm_up() with requests in the engine: it compiles before the first; submit them afterwards")
    before = compiled_programs()
    if masks:
      self._grammars()
    blank = self._reader.warm_up(self.config.max_tokens)
    self._batch.warm_up(blank, self.config.max_tokens, full=full, logprobs=logprobs, masks=masks)
    return compiled_programs() - before

  # What a turn is made of.

  def _checked(self, request):
    _check_types(request)
    if request.logprobs is not None and not 0 <= request.logprobs <= self.config.logprobs:
      raise ValueError(f"logprobs={request.logprobs}: this engine reports 0 to {self.config.logprobs} alternatives")
    params = request.params
    if params.seed is None:
      params = params.replace(seed=self._next % 2 ** 31)
    asked = starting.asked(self.target, [request.prompt], params, max_new_tokens=request.max_new_tokens,
                           eos_ids=request.eos_ids, stop_sequences=[list(s) for s in request.stop_sequences],
                           logprobs=request.logprobs)
    if asked.limit[0] > self.config.max_tokens:
      raise ValueError(f"a prompt of {len(asked.prompts[0])} tokens and max_new_tokens={request.max_new_tokens} are "
                       f"more than the {self.config.max_tokens} tokens of a request; shorten the one or lower the other")
    if self.config.total_tokens is not None and asked.limit[0] > self.config.total_tokens:
      raise ValueError(f"the request may have {int(asked.limit[0])} tokens, more than total_tokens="
                       f"{self.config.total_tokens} of the engine; lower max_new_tokens")
    writer = text_lib.Writer(self.tokenizer, tuple(request.stop))
    job = jobs.Job(self._next, request, asked, writer, self.proposer.max_depth, self._clock())
    if request.grammar is not None:
      _check_with_grammar(asked.params)
      job.matcher = self._grammars().matcher(request.grammar, request.eos_ids)
    return job

  def _grammars(self):
    if self.tokenizer is None:
      raise ValueError("a grammar needs the engine to have a tokenizer; give it one")
    if self._compiler is None:
      self._compiler = grammars.Compiler(self.tokenizer, self.target.vocab_size, self.target.eos_ids)
    return self._compiler

  def _leave(self, now):
    """Ends what was cancelled and what ran out of time."""
    for id in self._queue.expired(now):
      self._leaving.setdefault(id, (self._queue.remove(id), requests.DEADLINE))
    for job in [*self._reading.values(), *self._batch.jobs]:
      if job.expires is not None and job.expires <= now:
        self._leaving.setdefault(job.id, (job, requests.DEADLINE))
    updates = []
    for id, (job, reason) in list(self._leaving.items()):
      self._reading.pop(id, None)
      self._batch.release(id)
      updates.append(self._finish(job, job.flush(), now, reason))
    self._leaving.clear()
    return updates

  def _admit(self, now, device):
    while self.running < self.config.rows:
      held = sum(job.total_tokens for job in [*self._reading.values(), *self._batch.jobs])
      bound = self.config.total_tokens
      taken = self._queue.take(2 ** 62 if bound is None else bound - held)
      if taken is None:
        return
      id, job = taken
      job.admitted = now
      with device:
        job.cached = self._reader.begin(job)
      self._reading[id] = job
      self.stats.on_admit(job.prompt_tokens, job.cached)

  def _read(self, device):
    """Reads prompts, up to `step_tokens` of them, and inserts those that are whole; how many tokens were read."""
    left, read = self.config.step_tokens, 0
    while self._reading and left > 0:
      missing = {id: self._reader.left(job) for id, job in self._reading.items()}
      job = self._reading[scheduler.next_chunk(missing, self._turns)]
      if missing[job.id]:
        size = prefill.chunk_size(missing[job.id], left)
        if not size:
          return read
        with device:
          count = self._reader.read(job, size)
        left, read = left - size, read + count
      if not self._reader.left(job):
        del self._reading[job.id]
        with device:
          self._batch.insert(job)
    return read

  def _hand_over(self, step):
    """What the running rows gained, and the end of those that are done."""
    now, updates = self._clock(), []
    for job, gained in step.rows:
      tokens, ended = job.push(gained.ids, gained.drafted, gained.logprobs, gained.forced)
      reason = requests.STOP if ended or gained.ended else stopping.REASONS[gained.reason]
      if reason is None:
        if tokens:
          self.stats.on_update(len(tokens))
          updates.append(job.update(tokens, now, None))
        continue
      self._batch.release(job.id)
      updates.append(self._finish(job, tokens if ended else tokens + job.flush(), now, reason))
    return updates

  def _finish(self, job, tokens, now, reason):
    if tokens:
      self.stats.on_update(len(tokens))
    update = job.update(tokens, now, reason)
    self.stats.on_finish(update.outcome)
    return update

  def _record(self, begin, programs, device, read, step):
    end = self._clock()
    self._turns += 1
    turn = Turn(time=end, running=len(step.rows) if step else 0, waiting=len(self._queue), prefilled=read,
                seconds=end - begin, device_seconds=device.seconds, programs=compiled_programs() - programs,
                **(step.figures() if step else decoding.NO_FIGURES))
    self.trace.append(turn)
    self.stats.on_step(running=self.running, waiting=len(self._queue), seconds=turn.seconds,
                       device_seconds=turn.device_seconds, slots_used=sum(job.length for job in self._batch.jobs),
                       slots_allocated=turn.batch * turn.slots)


def _with_forced(proposer, forced):
  if not forced:
    return proposer
  try:
    return fallback.Fallback((given.Given(forced), proposer))
  except ValueError as error:
    raise ValueError(f"forced={forced}: {error}; or leave forced at 0") from error


def _check_types(request):
  """Refuses what is no value of its kind at all; what is out of range is said by whoever knows the range."""
  new, deadline = request.max_new_tokens, request.deadline
  if isinstance(new, bool) or not isinstance(new, (int, np.integer)):
    raise ValueError(f"max_new_tokens={new!r}: it must be a whole number of 1 or more")
  if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0):
    raise ValueError(f"deadline={deadline!r}: seconds from now, more than 0, or None for none")
  if not isinstance(request.stop, (list, tuple)):
    raise ValueError(f"stop={request.stop!r}: it is a list of texts; for one text give [text]")
  if not all(isinstance(ids, (list, tuple, np.ndarray)) for ids in request.stop_sequences):
    raise ValueError(f"stop_sequences={request.stop_sequences!r}: each is a list of token ids")


def _check_with_grammar(params):
  """Refuses what could leave nothing to draw where a grammar allows little."""
  biased = params.logit_bias is not None and np.isneginf(np.asarray(params.logit_bias.values)).any()
  given = [name for name in ("banned_ids", "allowed_ids", "min_new_tokens") if getattr(params, name) is not None]
  if given or biased:
    raise ValueError(f"{given[0] if given else 'a logit_bias of -inf'} and a grammar: the one may forbid all that the "
                     "other allows; use one of the two")


class _Stopwatch:
  """Seconds within its `with` blocks."""

  def __init__(self):
    self.seconds = 0.0

  def __enter__(self):
    self._begin = time.perf_counter()

  def __exit__(self, *_):
    self.seconds += time.perf_counter() - self._begin


def compiled_programs() -> int:
  """How many programs serving holds compiled; unchanged over a turn that compiled nothing."""
  return drivers.compiled_programs() + prefill.compiled_programs() + decoding.compiled_programs()
