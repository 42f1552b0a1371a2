"""The two drivers of the step: `generate`, a `while_loop` on the device, and `stream`, a loop on the host.

Both run the same compiled program, a loop of steps with a bound on their number: `generate` gives it no bound, after
a first call of one step that times the first token; `stream` gives it one. Length is a static shape: a program ends
when a running row would leave its bucket of slots, and the host copies the state into the next.

Letters: B batch rows, S slots, N output tokens.
"""
import collections.abc
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checkpoints
from specjax import counters as counters_lib
from specjax import decode
from specjax import keys as keys_lib
from specjax import sampling
from specjax import stopping
from specjax.verifiers import point

CHUNKS = (16, 32, 64, 96, 128, 192, 256)  # prompt tokens of one prefill program
_FIRST_BUCKET = 256     # slots; each further bucket is twice as large
_NO_BOUND = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Timings:
  """Wall-clock seconds of one call, each ended by waiting for the device."""
  first_token: float        # from the call to the end of the first step: prefill and one verify pass
  total: float              # from the call to the last token
  first_tokens: np.ndarray  # i32[B]; output tokens of the first step, so decoding made the others


@dataclasses.dataclass(frozen=True)
class GenerateResult:
  """What `generate` returns; arrays are NumPy."""
  tokens: np.ndarray               # i32[B, N]; output tokens, -1 behind the end
  lengths: np.ndarray              # i32[B]; output tokens of each row
  drafted: np.ndarray              # bool[B, N]; tokens that were accepted drafts
  finish_reasons: tuple[str, ...]  # "stop" or "length"
  counters: counters_lib.Counters  # NumPy arrays, a row each
  timings: Timings

  @property
  def token_ids(self) -> list[list[int]]:
    """The output of each row as a list, without padding; what a tokenizer's `decode` takes."""
    return [row[:length].tolist() for row, length in zip(self.tokens, self.lengths)]


@dataclasses.dataclass(frozen=True)
class Delta:
  """What one row gained in one step of `stream`."""
  row: int
  token_ids: list[int]
  drafted: list[bool]  # which of them were accepted drafts
  pieces: list[str]    # the text that each of them completes; together new text without half characters
  finish_reason: str | None  # set in the last delta of the row

  @property
  def text(self) -> str:
    """The new text."""
    return "".join(self.pieces)


def generate(target, proposer, prompts, params: sampling.SamplingParams | None = None, *, max_new_tokens=128,
             key: jax.Array | None = None, eos_ids=None, stop_sequences=(), verifier=point.Point()) -> GenerateResult:
  """Generates for a batch of prompts.

  Args:
    target: the model. proposer: the way of drafting.
    prompts: B lists of token ids, of any lengths.
    params: sampling parameters, one value or one a row; greedy by default.
    max_new_tokens: budget, one number or one a row.
    key: typed random key; `jax.random.key(0)` by default.
    eos_ids: ids that end a row; the target's own by default; () to ignore the end of sequence.
    stop_sequences: token-id sequences, for all rows or a list of them a row; see `stopping.stop_rules`.
    verifier: the verification rule.

  Returns:
    Tokens, counters and times. The token or sequence that ended a row is part of its output.

  Raises:
    ValueError: for an empty prompt, an id outside the vocabulary, a budget below 1, or a prompt and budget beyond the
      target's context; each names the row.
  """
  begin = time.perf_counter()
  state = start(target, proposer, prompts, params, max_new_tokens=max_new_tokens, key=key, eos_ids=eos_ids,
                stop_sequences=stop_sequences)
  state = jax.block_until_ready(advance(target, proposer, state, np.int32(1), verifier=verifier))
  first = time.perf_counter()
  first_tokens = np.asarray(state.length - state.start)
  while (roomy := make_room(target, proposer, state)) is not None:
    state = advance(target, proposer, roomy, _NO_BOUND, verifier=verifier)
  end = time.perf_counter()
  return _result(state, Timings(first_token=first - begin, total=end - begin, first_tokens=first_tokens))


def stream(target, proposer, prompts, params: sampling.SamplingParams | None = None, *, tokenizer=None,
           max_new_tokens=128, key: jax.Array | None = None, eos_ids=None, stop_sequences=(),
           verifier=point.Point()) -> collections.abc.Iterator[Delta]:
  """Generates as `generate` does, and yields what each row gained, step by step.

  Args:
    tokenizer: gives each delta its text; without one the text is empty.
    target, proposer, prompts, params, max_new_tokens, key, eos_ids, stop_sequences, verifier: see `generate`; one
      prompt may be given as a plain list of ids.
  """
  if len(prompts) and np.ndim(prompts[0]) == 0 and not isinstance(prompts, str):
    prompts = [prompts]
  state = start(target, proposer, prompts, params, max_new_tokens=max_new_tokens, key=key, eos_ids=eos_ids,
                stop_sequences=stop_sequences)
  texts = [checkpoints.TextStream(tokenizer) if tokenizer is not None else None for _ in prompts]
  before = np.asarray(state.length)
  while (roomy := make_room(target, proposer, state)) is not None:
    state = advance(target, proposer, roomy, np.int32(1), verifier=verifier)
    length, reason, tokens, drafted = jax.device_get((state.length, state.reason, state.tokens, state.drafted))
    for row in np.flatnonzero(length > before):
      gained = slice(int(before[row]), int(length[row]))
      ids = tokens[row, gained].tolist()
      finish = stopping.REASONS[int(reason[row])]
      pieces = [""] * len(ids)
      if texts[row] is not None:
        pieces = [texts[row].push([token]) for token in ids]
        if finish:
          pieces[-1] += texts[row].flush()
      yield Delta(row=int(row), token_ids=ids, drafted=drafted[row, gained].tolist(), pieces=pieces,
                  finish_reason=finish)
    before = length


def start(target, proposer, prompts, params=None, *, max_new_tokens=128, key=None, eos_ids=None,
          stop_sequences=()) -> decode.DecodeState:
  """The state behind the prefill, ready for the first step. Arguments and errors as in `generate`."""
  rows = len(prompts)
  if not rows:
    raise ValueError("no prompts were given; at least one is needed")
  budget = np.asarray(max_new_tokens)
  if budget.dtype.kind not in "iu" or budget.shape not in ((), (rows,)):
    raise ValueError(f"max_new_tokens={max_new_tokens!r}: it must be a whole number, or {rows} of them, one a row")
  budget = np.broadcast_to(budget, (rows,)).astype(np.int64)
  prompts = [np.asarray(prompt) for prompt in prompts]
  _check(target, prompts, budget)
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  limit = (lengths + budget).astype(np.int32)
  slots = bucket(int(np.max(np.minimum(lengths + proposer.max_depth + 1, limit))), target.max_context)
  tokens = np.zeros((rows, slots), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, :len(prompt)] = prompt
  params = (params or sampling.SamplingParams()).batch(rows)
  widths = len(decode.widths_for(proposer.max_nodes))
  # A capacity of its own for every request would be a shape of its own, and a compilation.
  capacity = bucket(int(limit.max()), target.max_context)
  cache, proposer_state, keys = _fresh(target, proposer, jax.random.key(0) if key is None else key, params.seed,
                                       slots=slots, capacity=capacity)
  state = decode.DecodeState(
      tokens=jnp.asarray(tokens), drafted=jnp.zeros((rows, slots), bool), length=jnp.asarray(lengths),
      start=jnp.asarray(lengths), limit=jnp.asarray(limit), reason=jnp.zeros((rows,), jnp.int32),
      cache=cache, proposer=proposer_state, keys=keys, params=params,
      rules=stopping.stop_rules(rows, target.eos_ids if eos_ids is None else eos_ids, stop_sequences),
      counters=counters_lib.zero_counters(rows, proposer.max_depth, widths))
  for chunk in chunks(int(lengths.max()) - 1):
    state = prefill(target, proposer, state, _causal(chunk))
  return state


@functools.partial(jax.jit, static_argnames=("slots", "capacity"))
def _fresh(target, proposer, key, seeds, *, slots, capacity):
  """Cache, proposer state and row keys of a new batch, in one dispatch."""
  rows = seeds.shape[0]
  return target.init_cache(rows, slots), proposer.init(target, rows, capacity), keys_lib.row_keys(key, seeds)


def chunks(tokens: int) -> list[int]:
  """Sizes of the prefill programs that together hold `tokens`: few, and little of them empty."""
  sizes = []
  while tokens > 0:
    above = next((size for size in CHUNKS if size >= tokens), CHUNKS[-1])
    below = max((size for size in CHUNKS if size <= tokens), default=above)
    sizes.append(above if 3 * above <= 4 * tokens else below)
    tokens -= sizes[-1]
  return sizes


def warm_up(target, proposer, prompts, params=None, *, max_new_tokens=128, verifier=point.Point(), **kwargs) -> None:
  """Compiles all that `generate` runs for such a batch: its prefill, and a step in every bucket that it can reach."""
  state = start(target, proposer, prompts, params, max_new_tokens=max_new_tokens, **kwargs)
  last = bucket(int(np.max(state.limit)), target.max_context)
  while True:
    state = advance(target, proposer, state, np.int32(1), verifier=verifier)
    slots = state.tokens.shape[1]
    if slots >= last:
      break
    state = _grow(state, bucket(slots + 1, last))
  jax.block_until_ready(state)


@functools.partial(jax.jit, static_argnames="verifier", donate_argnames="state")
def advance(target, proposer, state: decode.DecodeState, max_steps, *, verifier) -> decode.DecodeState:
  """At most `max_steps` i32 steps in one dispatch; ends early when no row runs or one would leave its bucket."""

  def go_on(carry):
    state, steps = carry
    return jnp.any(state.active) & (steps < max_steps) & _fits(proposer, state)

  body = lambda carry: (decode.step(target, proposer, verifier, carry[0]), carry[1] + 1)
  return jax.lax.while_loop(go_on, body, (state, jnp.int32(0)))[0]


prefill = jax.jit(decode.prefill_chunk, donate_argnames="state")


def compiled_programs() -> int:
  """How many programs the drivers hold compiled; unchanged over a call that compiled nothing."""
  return sum(function._cache_size() for function in (advance, prefill, _fresh, _grow))


def bucket(needed: int, greatest: int) -> int:
  """The smallest bucket of slots that holds `needed`: 256 times a power of two, at most `greatest`."""
  slots = _FIRST_BUCKET
  while slots < needed:
    slots *= 2
  return max(min(slots, greatest), needed)


def make_room(target, proposer, state: decode.DecodeState) -> decode.DecodeState | None:
  """The state, in the next bucket if a running row would leave this one in its next step; None when no row runs."""
  length, limit, reason = jax.device_get((state.length, state.limit, state.reason))
  running = reason == stopping.RUNNING
  if not running.any():
    return None
  wanted = int(np.minimum(length + proposer.max_depth + 1, limit)[running].max())
  if wanted <= state.tokens.shape[1]:
    return state
  return _grow(state, bucket(wanted, target.max_context))


@functools.partial(jax.jit, static_argnames="slots")
def _grow(state, slots):
  pad = lambda x: jnp.pad(x, ((0, 0), (0, slots - x.shape[1])))
  return state.replace(tokens=pad(state.tokens), drafted=pad(state.drafted), cache=state.cache.grow(slots))


def _fits(proposer, state):
  wanted = jnp.minimum(state.length + proposer.max_depth + 1, state.limit)
  return jnp.max(jnp.where(state.active, wanted, 0)) <= state.tokens.shape[1]


@functools.lru_cache
def _causal(size: int):
  return np.tril(np.ones((size, size), bool))


def _check(target, prompts, budget):
  for row, (prompt, new) in enumerate(zip(prompts, budget)):
    if not prompt.size:
      raise ValueError(f"prompt {row} is empty; it needs at least one token")
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
      raise ValueError(f"prompt {row} holds {prompt.ravel()[0].item()!r}; a prompt is a list of token ids (whole "
                       "numbers): encode text with the target's tokenizer first")
    if prompt.min() < 0 or prompt.max() >= target.vocab_size:
      raise ValueError(f"prompt {row} holds id {int(prompt.max() if prompt.min() >= 0 else prompt.min())}; "
                       f"ids of this target are 0 to {target.vocab_size - 1}")
    if new < 1:
      raise ValueError(f"max_new_tokens={int(new)} in row {row}: it must be 1 or more")
    if prompt.size + new > target.max_context:
      raise ValueError(f"prompt {row} has {prompt.size} tokens and max_new_tokens={int(new)}, together more than the "
                       f"target's context of {target.max_context}; shorten the prompt or lower max_new_tokens to "
                       f"{max(target.max_context - prompt.size, 0)}")


def _result(state, timings):
  state = jax.device_get(state.replace(cache=(), proposer=(), keys=()))
  lengths = (state.length - state.start).astype(np.int32)
  width = int((state.limit - state.start).max())
  tokens = np.full((len(lengths), width), -1, np.int32)
  drafted = np.zeros((len(lengths), width), bool)
  for row, (begin, end) in enumerate(zip(state.start, state.length)):
    tokens[row, :end - begin] = state.tokens[row, begin:end]
    drafted[row, :end - begin] = state.drafted[row, begin:end]
  return GenerateResult(tokens=tokens, lengths=lengths, drafted=drafted,
                        finish_reasons=tuple(stopping.REASONS[r] for r in state.reason), counters=state.counters,
                        timings=timings)
