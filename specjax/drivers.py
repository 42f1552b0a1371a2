"""The two drivers of the step: `generate`, a `while_loop` on the device, and `stream`, a loop on the host.

Both run the same compiled program, a loop of steps with a bound on their number: `generate` gives it no bound, after
a first call of one step that times the first token; `stream` gives it one. Length is a static shape: a program ends
when a running row would leave its bucket of slots, and the host copies the state into the next.

A proposer that says `host = True` drafts in Python, between the two halves of a step: both drivers then run one step a
turn, its second half compiled. `GenerateResult.driver` says which it was.

Letters: B batch rows, S slots, N output tokens.
"""
import collections.abc
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checkpoints
from specjax import counters as counters_lib
from specjax import decode
from specjax import logprobs as logprobs_lib
from specjax import sampling
from specjax import starting
from specjax import stopping
from specjax import tree as tree_lib
from specjax.verifiers import point

# How a batch starts stands in a module of its own; its users find it here as well.
start, prefill, bucket, chunks, CHUNKS = (starting.start, starting.prefill, starting.bucket, starting.chunks,
                                          starting.CHUNKS)
_NO_BOUND = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Timings:
  """Wall-clock seconds of one call, each ended by waiting for the device."""
  first_token: float        # from the call to the end of the first step: prefill and one verify pass
  total: float              # from the call to the last token
  first_tokens: np.ndarray  # i32[B]; output tokens of the first step, so decoding made the others
  draft_seconds: float = 0.0  # spent in drafting on the host; drafts made on the device are not told apart
  encode_seconds: float = 0.0  # of the first token's, spent in the target's encoder; 0 without one


@dataclasses.dataclass(frozen=True)
class GenerateResult:
  """What `generate` returns; arrays are NumPy unless it says otherwise."""
  tokens: np.ndarray               # i32[B, N]; output tokens, -1 behind the end
  lengths: np.ndarray              # i32[B]; output tokens of each row
  drafted: np.ndarray              # bool[B, N]; tokens that were accepted drafts
  finish_reasons: tuple[str, ...]  # "stop" or "length"
  counters: counters_lib.Counters  # NumPy arrays, a row each
  timings: Timings
  logprobs: logprobs_lib.Logprobs | None = None  # of the output tokens, NumPy arrays, 0 behind the end; if asked for
  driver: str = "device"           # or "host": the proposer drafted in Python
  proposer_state: Any = None       # the proposer's last state, on the device; what `Proposer.remember` takes
  reused: np.ndarray | None = None  # i32[B]; prompt tokens that were kept and not run again
  kept: decode.DecodeState | None = None  # the last state, on the device, if it was to be kept

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
  logprobs: logprobs_lib.Logprobs | None = None  # of these tokens, arrays without a batch axis; if asked for

  @property
  def text(self) -> str:
    """The new text."""
    return "".join(self.pieces)


def generate(target, proposer, prompts, params: sampling.SamplingParams | None = None, *, max_new_tokens=128,
             key: jax.Array | None = None, eos_ids=None, stop_sequences=(), verifier=point.Point(), constraint=None,
             logprobs: int | None = None, keep: bool = False,
             kept: decode.DecodeState | None = None) -> GenerateResult:
  """Generates for a batch of prompts.

  Args:
    target: the model. proposer: the way of drafting.
    prompts: B lists of token ids, of any lengths; of a target with an encoder, what that reads, and of one that hears,
      such as Whisper, sounds f[M, F] of `models.mel.log_mel`.
    params: sampling parameters, one value or one a row; greedy by default.
    max_new_tokens: budget, one number or one a row.
    key: typed random key; `jax.random.key(0)` by default.
    eos_ids: ids that end a row; the target's own by default; () to ignore the end of sequence.
    stop_sequences: token-id sequences, for all rows or a list of them a row; see `stopping.stop_rules`.
    verifier: the verification rule.
    constraint: a mask hook, see `constraints.Constraint`.
    logprobs: None for none, or how many alternatives to report beside every output token's own; see `logprobs`.
    keep: whether the result holds the last state, caches and all, for a next call's `kept`.
    kept: the last state of an earlier call with the same target, proposer and number of rows, the next turn of a
      conversation. Where every prompt begins with that call's prompt and output, their tokens are not run again;
      otherwise all are, and likewise if the proposer's state has the size of another bucket of slots.
      `GenerateResult.reused` says how many were kept. A state serves once: its buffers are taken
      over.

  Returns:
    Tokens, counters and times. The token or sequence that ended a row is part of its output.

  Raises:
    ValueError: for an empty prompt, an id outside the vocabulary, a budget below 1, a prompt and budget beyond the
      target's context, parameters out of range or in conflict: each names the row; and for a verifier that cannot judge
      the proposer's drafts. Nothing has been compiled or generated by then.
  """
  begin, spent = time.perf_counter(), {}
  state = start(target, proposer, prompts, params, max_new_tokens=max_new_tokens, key=key, eos_ids=eos_ids,
                stop_sequences=stop_sequences, verifier=verifier, constraint=constraint, logprobs=logprobs, spent=spent,
                kept=kept)
  state, drafting = jax.block_until_ready(_run(target, proposer, state, np.int32(1), verifier))
  first = time.perf_counter()
  first_tokens = np.asarray(state.length - state.start)
  while (roomy := make_room(target, proposer, state)) is not None:
    state, seconds = _run(target, proposer, roomy, _NO_BOUND, verifier)
    drafting += seconds
  end = time.perf_counter()
  return _result(target, state, Timings(first_token=first - begin, total=end - begin, first_tokens=first_tokens,
                                draft_seconds=drafting, encode_seconds=spent.get("encode", 0.0)),
                 "host" if starting.on_host(proposer) else "device", spent["reused"], state if keep else None)


def stream(target, proposer, prompts, params: sampling.SamplingParams | None = None, *, tokenizer=None,
           max_new_tokens=128, key: jax.Array | None = None, eos_ids=None, stop_sequences=(), verifier=point.Point(),
           constraint=None, logprobs: int | None = None, kept: decode.DecodeState | None = None,
           spent: dict | None = None) -> collections.abc.Generator[Delta, None, decode.DecodeState]:
  """Generates as `generate` does, and yields what each row gained, step by step.

  What the generator returns behind the last delta (the value of `yield from`) is the last state, for a next call's
  `kept`.

  Args:
    tokenizer: gives each delta its text; without one the text is empty.
    target, proposer, prompts, params, max_new_tokens, key, eos_ids, stop_sequences, verifier, constraint, logprobs,
      kept: see `generate`; one prompt may be given as a plain list of ids.
    spent: takes what `starting.start` says of the prefill, before the first delta.
  """
  if len(prompts) and np.ndim(prompts[0]) == 0 and not isinstance(prompts, str):
    prompts = [prompts]
  state = start(target, proposer, prompts, params, max_new_tokens=max_new_tokens, key=key, eos_ids=eos_ids,
                stop_sequences=stop_sequences, verifier=verifier, constraint=constraint, logprobs=logprobs, spent=spent,
                kept=kept)
  texts = [checkpoints.TextStream(tokenizer) if tokenizer is not None else None for _ in prompts]
  before = np.asarray(state.length)
  while (roomy := make_room(target, proposer, state)) is not None:
    state, _ = _run(target, proposer, roomy, np.int32(1), verifier)
    length, reason, tokens, drafted, known = starting.read(
        target, (state.length, state.reason, state.tokens, state.drafted, state.logprobs))
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
                  finish_reason=finish, logprobs=jax.tree.map(lambda x: x[row, gained], known))
    before = length
  return state


def warm_up(target, proposer, prompts, params=None, *, max_new_tokens=128, verifier=point.Point(), **kwargs) -> None:
  """Compiles all that `generate` runs for such a batch: its prefill, and a step in every bucket that it can reach.

  Sampled drafts are judged on the way, see `tree.check`: a drafter whose q is not the law that it drew from would
  change the law of the text without any other sign.
  """
  state = start(target, proposer, prompts, params, max_new_tokens=max_new_tokens, verifier=verifier, **kwargs)
  last = bucket(int(np.max(state.limit)), target.max_context)
  if proposer.max_nodes > 1:
    if starting.on_host(proposer):
      tree, _ = decode.draft(target, proposer, state)
    elif (tree := starting.draft.eval_shape(target, proposer, state)[0]).q is not None:
      tree, _ = starting.draft(target, proposer, state)
    if tree.q is not None:
      tree_lib.check(tree, target.vocab_size)
  while True:
    state, _ = _run(target, proposer, state, np.int32(1), verifier)
    slots = state.tokens.shape[1]
    if slots >= last:
      break
    state = _grow(state, bucket(slots + 1, last))
  jax.block_until_ready(state)


def _run(target, proposer, state, max_steps, verifier):
  """Steps up to `max_steps`, one if the proposer drafts on the host; and the seconds that such drafting took."""
  if not starting.on_host(proposer):
    return advance(target, proposer, state, max_steps, verifier=verifier), 0.0
  jax.block_until_ready(state)
  begin = time.perf_counter()
  tree, proposer_state = jax.block_until_ready(decode.draft(target, proposer, state))
  seconds = time.perf_counter() - begin
  return conclude(target, proposer, state.replace(proposer=proposer_state), tree, verifier=verifier), seconds


@functools.partial(jax.jit, static_argnames="verifier", donate_argnames="state")
def advance(target, proposer, state: decode.DecodeState, max_steps, *, verifier) -> decode.DecodeState:
  """At most `max_steps` i32 steps in one dispatch; ends early when no row runs or one would leave its bucket."""

  def go_on(carry):
    state, steps = carry
    return jnp.any(state.active) & (steps < max_steps) & _fits(proposer, state)

  body = lambda carry: (decode.step(target, proposer, verifier, carry[0]), carry[1] + 1)
  return decode.held(target, proposer, jax.lax.while_loop(go_on, body, (state, jnp.int32(0)))[0])


@functools.partial(jax.jit, static_argnames="verifier", donate_argnames="state")
def conclude(target, proposer, state: decode.DecodeState, tree, masks=None, *, verifier) -> decode.DecodeState:
  """What follows in a step whose `tree` or `masks` were made on the host: its verification and the commit."""
  return decode.commit(target, proposer, state, decode.verify(target, proposer, verifier, state, tree, masks))


def compiled_programs() -> int:
  """How many programs the drivers hold compiled; unchanged over a call that compiled nothing."""
  programs = (advance, conclude, prefill, starting.encode, starting.fresh, starting.resumed, _grow)
  return sum(function._cache_size() for function in programs)


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
  pad = lambda x: jnp.pad(x, ((0, 0), (0, slots - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
  return state.replace(tokens=pad(state.tokens), drafted=pad(state.drafted), cache=state.cache.grow(slots),
                       logprobs=jax.tree.map(pad, state.logprobs))


def _fits(proposer, state):
  wanted = jnp.minimum(state.length + proposer.max_depth + 1, state.limit)
  return jnp.max(jnp.where(state.active, wanted, 0)) <= state.tokens.shape[1]


def _result(target, state, timings, driver, reused, kept):
  proposer_state = state.proposer
  state = starting.read(target, state.replace(cache=(), proposer=(), keys=(), constraint=None, constraint_state=None))
  lengths = (state.length - state.start).astype(np.int32)
  width = int((state.limit - state.start).max())

  def output(buffer, fill=0):
    """What stands behind each prompt, cut at the row's end and aligned: [B, N, ...]."""
    cut = np.full((len(lengths), width, *buffer.shape[2:]), fill, buffer.dtype)
    for row, (begin, end) in enumerate(zip(state.start, state.length)):
      cut[row, :end - begin] = buffer[row, begin:end]
    return cut

  return GenerateResult(tokens=output(state.tokens, fill=-1), lengths=lengths, drafted=output(state.drafted),
                        finish_reasons=tuple(stopping.REASONS[r] for r in state.reason), counters=state.counters,
                        timings=timings, logprobs=jax.tree.map(output, state.logprobs), driver=driver,
                        proposer_state=proposer_state, reused=reused, kept=kept)
