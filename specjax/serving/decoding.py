"""The batch of running rows: who is in it, in which bucket, and one step of all of them.

Letters: B rows of the batch, S slots, T nodes of a tree, N most drafted nodes, W widths, V vocabulary.
"""
import contextlib
import dataclasses
import functools
import time

import jax
import numpy as np

from specjax import counters as counters_lib
from specjax import decode
from specjax import drivers
from specjax import logprobs as logprobs_lib
from specjax import sampling
from specjax import starting
from specjax import stopping
from specjax.proposers import fallback
from specjax.proposers import given
from specjax.serving import control as control_lib
from specjax.serving import costs as costs_lib
from specjax.serving import jobs as jobs_lib
from specjax.serving import params as params_lib
from specjax.serving import prefill
from specjax.serving import rows as rows_lib

@functools.lru_cache(maxsize=64)
def _zeros(depth, widths, rows, routing):
  return jax.device_get(counters_lib.zero_counters(rows, depth, widths, routing))


def _zero_counters(target, proposer, rows):
  """Counters of a batch before a step, NumPy."""
  return _zeros(proposer.max_depth, len(decode.widths_for(proposer.max_nodes)), rows, getattr(target, "routing", None))


_TIMED_TOKENS = 64  # known tokens of a row whose steps are timed
_TIMED = 3          # steps that are timed with every limit
_PATIENCE = 16  # steps in which a smaller bucket would have done before the batch moves there


@dataclasses.dataclass(frozen=True)
class Gained:
  """What one row gained in a step."""
  ids: list[int]
  drafted: list[bool]  # accepted drafts
  logprobs: logprobs_lib.Logprobs | None
  forced: int          # tokens that its grammar had drafted
  reason: int          # of `stopping`
  ended: bool = False  # its grammar says that nothing may follow


@dataclasses.dataclass(frozen=True)
class Step:
  """One step of the batch."""
  rows: list[tuple[jobs_lib.Job, Gained]]
  batch: int
  slots: int
  used: int
  draft_limit: int
  width: int
  drafted: int
  accepted: int

  def figures(self) -> dict[str, int]:
    """Those that a record of a turn has."""
    own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "rows"}
    return own | {"emitted": sum(len(gained.ids) for _, gained in self.rows)}


NO_FIGURES = dict(batch=0, slots=0, used=0, draft_limit=0, width=0, drafted=0, accepted=0, emitted=0)


class Batch:
  """Rows that run, in a state of a power of two of them."""

  def __init__(self, target, proposer, verifier, capacity: int, config, costs: costs_lib.Costs | None = None):
    self._target, self._proposer, self._verifier, self._config = target, proposer, verifier, config
    self._axes = rows_lib.axes_of(target, proposer, capacity)
    self._widths = decode.widths_for(proposer.max_nodes)
    self._most = proposer.max_nodes - 1
    self.costs = costs_lib.Costs(self._widths) if costs is None else costs.copy()
    self.everyone = control_lib.Acceptance(fade=0.995)
    self._state: decode.DecodeState | None = None
    self._rows: list[jobs_lib.Job | None] = []
    self._small = 0       # steps in which a smaller bucket would have done
    self._joined = None   # parameters and rules of the rows as they are, until one comes or goes
    self._was_off = True
    self._idle = 0         # steps since a draft was last verified
    self._logprobs = None  # buffers of the latest step
    self._forces = isinstance(proposer, fallback.Fallback) and isinstance(proposer.proposers[0], given.Given)

  @property
  def jobs(self) -> list[jobs_lib.Job]:
    """Those that run."""
    return [job for job in self._rows if job is not None]

  def find(self, id: int) -> jobs_lib.Job | None:
    """The running job of that number."""
    return next((job for job in self.jobs if job.id == id), None)

  def insert(self, job: jobs_lib.Job) -> None:
    """Puts a job whose prompt has been read into a free row, in a larger batch if there is none."""
    state, job.state = job.state, None
    running = len(self.jobs)
    slots = max(state.tokens.shape[1], self._needed([job]))
    if self._state is None:
      self._state, self._rows = rows_lib.take(self._target, state, np.array([-1], np.int32), slots=slots,
                                              axes=self._axes), [None]
    while running >= len(self._rows):
      self._move(2 * len(self._rows), self._slots)
    while slots > self._slots:
      self._move(len(self._rows), self._bucket(self._slots + 1))
    row = self._rows.index(None)
    self._state = rows_lib.insert(self._target, self._state, state, np.int32(row), axes=self._axes)
    self._rows[row], self._joined = job, None
    jax.block_until_ready(self._state.length)

  def release(self, id: int) -> None:
    """Frees the row of a job, if it has one."""
    for row, job in enumerate(self._rows):
      if job is not None and job.id == id:
        self._rows[row], self._joined = None, None
    if not self.jobs:  # the next one begins in a batch of its own size
      self._state, self._rows, self._logprobs, self._small = None, [], None, 0

  def step(self, controller: control_lib.Controller, device) -> Step:
    """One step of all rows, timed by `device`."""
    with device:
      self._arrange()
    limits = self._limits(controller)
    programs, begin = drivers.compiled_programs(), time.perf_counter()
    # What a tree of so many nodes brings is not known: only chains are cut to the width that pays.
    state = self._prepared(limits, weighs=controller.weighs and self._proposer.chains)
    masked = any(job.matcher is not None for job in self.jobs)
    state, limits, forced = self._run(state, limits, device, masked)
    with device:
      seen = jax.device_get((state.length, state.reason, state.tokens, state.drafted, state.logprobs,
                             state.counters.drafted_tokens, state.counters.steps_per_width, state.control.offered))
    seconds = time.perf_counter() - begin
    self._state, self._logprobs = jobs_lib.neutral(state), state.logprobs
    if masked or programs != drivers.compiled_programs():
      seconds = None  # masks of every kind cost something else, and compiling comes once
    return self._collect(seen, limits, forced, seconds)

  def warm_up(self, blank: dict[int, decode.DecodeState], max_tokens: int, *, full: bool, logprobs: bool,
              masks: bool) -> None:
    """Compiles every step, insertion and move, and times steps; `blank` holds states of one row by their slots."""
    batches = [1]
    while batches[-1] < self._config.rows:
      batches.append(2 * batches[-1])
    sizes = prefill.buckets(max_tokens, self._target.max_context)
    for batch in batches:
      for slots in sizes:
        self._rows = [None] * batch
        nobody = np.full(batch, -1, np.int32)
        make = lambda: rows_lib.take(self._target, blank[slots], nobody, slots=slots, axes=self._axes)
        for form in self._forms(full, logprobs):
          for masked in ((False, True) if masks else (False,)):
            self._state = make()
            limits = np.zeros(batch, np.int32)
            self._run(self._prepared(limits, form), limits, contextlib.nullcontext(), masked)
        if not self._proposer.host:
          self._time_steps(make())
        for had in sizes:
          if had <= slots:
            rows_lib.insert(self._target, make(), blank[had], np.int32(0), axes=self._axes)
        state = make()
        index = np.zeros(2 * batch, np.int32)
        if 2 * batch <= batches[-1]:
          rows_lib.take(self._target, state, index, slots=slots, axes=self._axes)
        if batch > 1:
          rows_lib.take(self._target, state, index[:batch // 2], slots=slots, axes=self._axes)
        for other in sizes:
          if other != slots:
            rows_lib.take(self._target, state, index[:batch], slots=other, axes=self._axes)
    self._state, self._rows, self._joined = None, [], None

  def _time_steps(self, state):
    """Steps of rows whose text comes again and again, so that lookup drafts as well, under every limit."""
    batch, slots = state.tokens.shape
    self._rows = [None] * batch
    length = np.full(batch, min(_TIMED_TOKENS, slots // 2), np.int32)
    form = self._forms(False, False)[0]
    text = np.broadcast_to(np.arange(slots, dtype=np.int32) % min(16, self._target.vocab_size), (batch, slots))
    state = state.replace(length=length, start=length, limit=np.full(batch, slots, np.int32),
                          cache=state.cache.replace(length=length - 1))
    for limit in self._fills():
      for turn in range(1 + _TIMED):
        self._state = state.replace(tokens=text)
        asked = self._prepared(np.full(batch, limit, np.int32), form).replace(
            reason=np.full(batch, stopping.RUNNING, np.int32))
        begin = time.perf_counter()
        state = jax.block_until_ready(drivers.advance(self._target, self._proposer, asked, np.int32(1),
                                                      verifier=self._verifier))
        seconds, width = time.perf_counter() - begin, self._widths[int(np.argmax(state.counters.steps_per_width[0]))]
        state = jobs_lib.neutral(state)
        if turn:  # the first one feeds a drafter what it has not seen
          self.costs.add(batch, slots, limit, width, seconds)

  def _fills(self):
    """Limits that fill a width of the step: 0, of chains one for each width, and N."""
    between = [width - 1 for width in self._widths[1:-1]] if self._proposer.chains else []
    return (0, *between, self._most) if self._most else (0,)

  # Where rows stand.

  @property
  def _slots(self):
    return self._state.tokens.shape[1]

  def _bucket(self, needed):
    return starting.bucket(needed, self._target.max_context)

  def _needed(self, jobs):
    """Slots that the next step of these jobs may fill, as a bucket."""
    return self._bucket(max(min(job.length + self._proposer.max_depth + 1, job.limit) for job in jobs))

  def _arrange(self):
    """Moves the batch where its rows need more slots, or have long needed fewer rows or slots."""
    needed = self._needed(self.jobs)
    while needed > self._slots:
      self._move(len(self._rows), self._bucket(self._slots + 1))
    roomy = len(self._rows) > 1 and 2 * len(self.jobs) <= len(self._rows)
    self._small = self._small + 1 if roomy or needed < self._slots else 0
    if self._small >= _PATIENCE:
      self._small = 0
      if roomy:
        self._move(len(self._rows) // 2, self._slots)
      else:
        self._move(len(self._rows), needed)

  def _move(self, batch, slots):
    index = [row for row, job in enumerate(self._rows) if job is not None]
    index += [-1] * (batch - len(index))
    self._state = rows_lib.take(self._target, self._state, np.array(index, np.int32), slots=slots, axes=self._axes)
    self._rows = [None if row < 0 else self._rows[row] for row in index]
    self._joined = None

  # One step.

  def _limits(self, controller):
    """i32[B]: the most nodes that each row may draft."""
    limits = np.zeros(len(self._rows), np.int32)
    places = [row for row, job in enumerate(self._rows) if job is not None and job.request.speculate]
    if self._most and places:
      view = control_lib.View(rows=[self._rows[row].acceptance for row in places], everyone=self.everyone,
                              batch=len(self._rows), slots=self._slots, most=self._most,
                              limits=self._fills(), costs=self.costs, idle=self._idle,
                              others=len(self.jobs) - len(places))
      limits[places] = np.clip(controller.limits(view), 0, self._most)
    return limits

  def _prepared(self, limits, form=None, weighs=False):
    """The state with what the host sets: parameters, rules, who runs, logprobs and control."""
    if form is None:
      form = self._joined or self._join()
    params, rules, wants = form
    state = self._state
    batch, slots = len(self._rows), self._slots
    logprobs = self._logprobs if wants else None
    if wants and (logprobs is None or logprobs.raw.shape != (batch, slots)):
      logprobs = logprobs_lib.empty(batch, slots, self._config.logprobs)
    reason = np.array([stopping.STOP if job is None else stopping.RUNNING for job in self._rows], np.int32)
    rates = np.array([0.0 if job is None else job.acceptance.rate(self.everyone) for job in self._rows])
    gain = np.cumsum(rates[:, None] ** np.arange(1, self._most + 1), axis=1)
    gain = np.concatenate([np.zeros((batch, 1)), gain], axis=1).astype(np.float32)
    if weighs:
      cost = self.costs.of_widths(batch, slots)
    else:  # the widest step is the best one, whatever is expected of it
      cost = 1 / np.arange(1, len(self._widths) + 1, dtype=np.float32)
    held = decode.Control(limit=limits, gain=gain, cost=cost, offered=np.zeros(batch, np.int32))
    return state.replace(params=params, rules=rules, reason=reason, logprobs=logprobs, control=held,
                         counters=_zero_counters(self._target, self._proposer, batch))

  def _forms(self, full, logprobs):
    """What `_join` may return for a batch of this size, up to values."""
    lean = [None] * len(self._rows)
    some = [sampling.SamplingParams(presence_penalty=1.0).batch(1), *lean[1:]]
    return [(params_lib.join(rows), params_lib.join_rules(lean), wants)
            for rows in (lean, some)[:1 + full] for wants in (False, True)[:1 + logprobs]]

  def _join(self):
    asked = [None if job is None else job.asked for job in self._rows]
    wants = any(job.request.logprobs is not None for job in self.jobs)
    self._joined = (params_lib.join([a and a.params for a in asked]),
                    params_lib.join_rules([a and a.rules for a in asked]), wants)
    return self._joined

  def _run(self, state, limits, device, masked):
    """The state behind a step, the limits of its rows, and how many forced tokens were drafted in each. In two halves
    where drafts or masks are made on the host."""
    forced = [0] * len(self._rows)
    if not masked and not self._proposer.host:
      with device:
        return jax.block_until_ready(drivers.advance(self._target, self._proposer, state, np.int32(1),
                                                     verifier=self._verifier)), limits, forced
    if masked and self._forces:
      state, limits, forced = self._with_forced(state, limits)
    with device:
      tree, state = self._drafted(state)
    masks = None
    if masked:
      tree, masks = self._masks(tree)
    with device:
      state = drivers.conclude(self._target, self._proposer, state, tree, masks, verifier=self._verifier)
      return jax.block_until_ready(state), limits, forced

  def _drafted(self, state):
    draft = decode.draft if self._proposer.host else starting.draft
    tree, proposer_state = jax.block_until_ready(draft(self._target, self._proposer, state))
    return tree, state.replace(proposer=proposer_state)

  def _with_forced(self, state, limits):
    """What the rows' grammars leave no choice about, up to an end, handed to the proposer."""
    first = state.proposer.states[0]
    tokens, count = np.zeros(first.tokens.shape, np.int32), np.zeros(first.count.shape, np.int32)
    limits = limits.copy()
    for row, job in enumerate(self._rows):
      if job is not None and job.matcher is not None and job.request.speculate:
        known = job.matcher.forced(tokens.shape[1])
        ends = set(np.asarray(job.asked.rules.eos)[0].tolist())
        known = known[:next((place for place, token in enumerate(known) if token in ends), len(known))]
        tokens[row, :len(known)], count[row] = known, len(known)
        limits[row] = max(limits[row], len(known))
    states = (first.replace(tokens=tokens, count=count), *state.proposer.states[1:])
    return state.replace(proposer=state.proposer.replace(states=states),
                         control=state.control.replace(limit=limits)), limits, count.tolist()

  def _masks(self, tree):
    """The tree, its chains of points cut before their first illegal token, and masks u32[B, T, words] of its nodes."""
    tokens, parents, size = jax.device_get((tree.tokens, tree.parents, tree.size))
    words = -(-self._target.vocab_size // 32)
    masks = np.full((*tokens.shape, words), np.uint32(0xFFFFFFFF))
    size = np.array(size)
    for row, job in enumerate(self._rows):
      if job is None or job.matcher is None:
        continue
      if self._proposer.chains and tree.sampled is None:
        size[row] = 1 + job.matcher.legal(tokens[row, 1:size[row]].tolist())
      masks[row] = job.matcher.masks(tokens[row], parents[row], int(size[row]), words)
    return tree.replace(size=size), masks

  def _collect(self, seen, limits, forced, seconds):
    length, reason, tokens, drafted, logprobs, drafts, widths, offered = seen
    rows, total, accepted_all = [], 0, 0
    width = self._widths[int(np.argmax(widths.max(0)))]
    for row, job in enumerate(self._rows):
      if job is None:
        continue
      new = slice(job.length, int(length[row]))
      flags = drafted[row, new].tolist()
      ids = tokens[row, new].tolist()
      job.count_step(int(drafts[row]))
      if limits[row] > 0 and not forced[row]:
        for seen_by in (job.acceptance, self.everyone):
          seen_by.add(min(int(drafts[row]), self._proposer.max_depth), sum(flags), int(offered[row]), cut=offered[row] >= limits[row] < self._most)
      ended = False
      if job.matcher is not None:
        # Behind a text that is whole, and that no id ends, masks allow everything: what was drawn there is not said.
        ids = ids[:job.matcher.commit(ids)]
        ended = len(ids) < len(flags) or job.matcher.complete
        flags = flags[:len(ids)]
      total, accepted_all = total + int(drafts[row]), accepted_all + sum(flags)
      own = None
      if job.request.logprobs is not None:
        own = jax.tree.map(lambda x: x[row, new], logprobs)
      rows.append((job, Gained(ids=ids, drafted=flags, logprobs=own, forced=forced[row], reason=int(reason[row]),
                               ended=ended)))
    limit = int(limits.max())
    # The first step with drafts behind plain ones also feeds the drafter what it missed.
    if seconds is not None and not (limit and self._was_off):
      self.costs.add(len(self._rows), tokens.shape[1], limit, width, seconds)
    self._was_off = limit == 0
    self._idle = 0 if total else self._idle + 1
    used = sum(job.length + len(gained.ids) for job, gained in rows)
    return Step(rows=rows, batch=len(self._rows), slots=tokens.shape[1], used=used, draft_limit=limit, width=width,
                drafted=total, accepted=accepted_all)


def compiled_programs() -> int:
  """How many programs this module holds compiled, beside the drivers'."""
  return sum(function._cache_size() for function in (rows_lib.insert, rows_lib.take, starting.draft))
