"""How a batch starts: what is refused, the state, and the prefill. Both drivers begin here.

Everything is checked before anything is compiled: prompts, budgets, parameters, and whether the verifier can judge what
the proposer drafts, which is known from shapes alone.

Letters: B batch rows, S slots.
"""
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import counters as counters_lib
from specjax import decode
from specjax import keys as keys_lib
from specjax import logprobs as logprobs_lib
from specjax import sampling
from specjax import stopping
from specjax.models import base as models
from specjax.verifiers import point

CHUNKS = (16, 32, 64, 96, 128, 192, 256)  # prompt tokens of one prefill program
_FIRST_BUCKET = 256     # slots; each further bucket is twice as large
_FIRST_INPUTS = 64      # slots of an encoder's inputs, likewise
_NO_ID = -1             # in a row's text, where an encoder has heard sound: no draft is looked up there


@dataclasses.dataclass(frozen=True)
class Asked:
  """Requests of a batch that have been checked: what `begin` makes a state of. Arrays are NumPy."""
  prompts: list[np.ndarray]  # i32[P] each, with what the decoder begins with and what was written already
  inputs: np.ndarray         # i32[B]; tokens that an encoder reads
  limit: np.ndarray          # i32[B]; prompt tokens and budget
  params: sampling.SamplingParams  # batched
  rules: stopping.StopRules
  constraint: Any
  logprobs: int | None
  sound: np.ndarray | None   # f32[B, M, F]; what an encoder hears

  @property
  def lengths(self) -> np.ndarray:
    """i32[B]; prompt tokens."""
    return np.array([len(prompt) for prompt in self.prompts], np.int32)


def start(target, proposer, prompts, params=None, *, max_new_tokens=128, key=None, eos_ids=None, stop_sequences=(),
          verifier=point.Point(), constraint=None, logprobs=None, written=None, spent: dict | None = None,
          kept: decode.DecodeState | None = None) -> decode.DecodeState:
  """The state behind the prefill, ready for the first step. Arguments and errors as in `generate`.

  Args:
    written: token ids that rows have written already, a list of B lists: the output goes on behind them. For a decoder
      that is the same as a longer prompt; a target with an encoder reads prompts only.
    spent: takes the seconds of the encoder, under "encode", if the target has one, and the device is waited for; and
      under "reused" i32[B], the prompt tokens of each row that were not run again.
    kept: the last state of an earlier call, whose texts these prompts go on from: see `_goes_on`. It is consumed.
  """
  given = asked(target, prompts, params, max_new_tokens=max_new_tokens, eos_ids=eos_ids, stop_sequences=stop_sequences,
                constraint=constraint, logprobs=logprobs, written=written)
  state, reused = begin(target, proposer, given, key=key, verifier=verifier, kept=kept)
  left = given.lengths - 1 - reused
  if spent is not None:
    spent["reused"] = reused
  if models.encodes(target):
    if spent is not None:
      jax.block_until_ready(state)
    begun = time.perf_counter()
    state, left = encode(target, state, given.inputs, given.sound), left - given.inputs
    if spent is not None:
      jax.block_until_ready(state)
      spent["encode"] = time.perf_counter() - begun
  for chunk in chunks(int(left.max())):
    state = prefill(target, proposer, state, causal(chunk))
  return state


def asked(target, prompts, params=None, *, max_new_tokens=128, eos_ids=None, stop_sequences=(), constraint=None,
          logprobs=None, written=None) -> Asked:
  """Checks what is asked of a batch; arguments and errors as in `generate` and `start`. Runs nothing."""
  rows = len(prompts)
  if not rows:
    raise ValueError("no prompts were given; at least one is needed")
  budget = np.asarray(max_new_tokens)
  if budget.dtype.kind not in "iu" or budget.shape not in ((), (rows,)):
    raise ValueError(f"max_new_tokens={max_new_tokens!r}: it must be a whole number, or {rows} of them, one a row")
  budget = np.broadcast_to(budget, (rows,)).astype(np.int64)
  prompts = [np.asarray(prompt) for prompt in prompts]
  sound = None
  if models.sound(target) is not None:
    _check_sound(target, prompts)
    sound = np.stack(prompts).astype(np.float32)
    prompts = [np.full(target.max_inputs, _NO_ID)] * rows
  _check(target, prompts, budget, written or [()] * rows)
  inputs = np.array([len(prompt) for prompt in prompts], np.int32)
  prompts = [np.concatenate([prompt, models.opening(target), () if written is None else written[row]]).astype(np.int32)
             for row, prompt in enumerate(prompts)]
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  ids = models.known_ids(target)
  params = (params or sampling.SamplingParams()).batch(rows, ids)
  eos_ids = _end_ids(target, eos_ids)
  params.check_ends(eos_ids, budget, ids)
  if constraint is not None:
    least = np.zeros(rows, np.int32) if params.min_new_tokens is None else np.asarray(params.min_new_tokens)
    constraint.check(ids, eos_ids, least, params)
  if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= ids):
    raise ValueError(f"logprobs={logprobs!r}: it must be between 0 and the vocabulary's size, {ids}, a "
                     "whole number; leave it out for none")
  return Asked(prompts=prompts, inputs=inputs, limit=(lengths + budget).astype(np.int32), params=params,
               rules=stopping.stop_rules(rows, eos_ids, stop_sequences), constraint=constraint, logprobs=logprobs,
               sound=sound)


def begin(target, proposer, given: Asked, *, key=None, verifier=point.Point(), kept: decode.DecodeState | None = None,
          capacity: int | None = None) -> tuple[decode.DecodeState, np.ndarray]:
  """The state before the prefill, and how many prompt tokens of each row it holds already, i32[B].

  Args:
    target, proposer, verifier, kept: as in `start`. given: of `asked`.
    capacity: tokens that the proposer's state is made for; by default the bucket of the longest row's limit.
  """
  rows, lengths = len(given.prompts), given.lengths
  slots = bucket(int(np.max(np.minimum(lengths + proposer.max_depth + 1, given.limit))), target.max_context)
  tokens = np.zeros((rows, slots), np.int32)
  for row, prompt in enumerate(given.prompts):
    tokens[row, :len(prompt)] = prompt
  widths = len(decode.widths_for(proposer.max_nodes))
  # A capacity of its own for every request would be a shape of its own, and a compilation.
  capacity = capacity or bucket(int(given.limit.max()), target.max_context)
  if not _goes_on(target, proposer, kept, given.prompts, capacity):
    kept = None
  if kept is not None and kept.tokens.shape[1] > slots:  # its cache does not become smaller
    slots = kept.tokens.shape[1]
    tokens = np.pad(tokens, ((0, 0), (0, slots - tokens.shape[1])))
  constraint = None if given.constraint is None else _copied(given.constraint)
  state = decode.DecodeState(
      tokens=jnp.asarray(tokens), drafted=jnp.zeros((rows, slots), bool), length=jnp.asarray(lengths),
      start=jnp.asarray(lengths), limit=jnp.asarray(given.limit), reason=jnp.zeros((rows,), jnp.int32),
      cache=None, proposer=None, keys=None, params=given.params, rules=given.rules,
      counters=counters_lib.zero_counters(rows, proposer.max_depth, widths, getattr(target, "routing", None)),
      constraint=constraint, constraint_state=None if constraint is None else _copied(constraint.init(rows)),
      logprobs=None if given.logprobs is None else logprobs_lib.empty(rows, slots, given.logprobs))
  fill = lambda cache, proposer_state, keys: state.replace(cache=cache, proposer=proposer_state, keys=keys)
  key = jax.random.key(0) if key is None else key
  if (layout := getattr(target, "layout", None)) is not None:
    state, key = layout.put((state, key))
  new = (target, proposer, key, state.params.seed)
  sizes = dict(slots=slots, capacity=capacity, encoder=_encoder_sizes(target, given.inputs, slots))
  _check_verifier(proposer, verifier)
  if proposer.max_nodes > 1 and keys_lib.STOP in verifier.purposes:  # others look at no q
    _check_drafts(target, proposer, verifier, fill(*fresh.eval_shape(*new, **sizes)))
  if kept is None:
    return fill(*fresh(*new, **sizes)), np.zeros(rows, np.int32)
  reused = np.asarray(kept.cache.length)
  return fill(*resumed(kept.cache, kept.proposer, *new[2:], slots=slots)), reused


def _copied(tree):
  """New buffers: the state is donated step after step, what the caller gave must outlive it, and no two of its leaves
  may be one."""
  return jax.tree.map(functools.partial(jnp.array, copy=True), tree)


@functools.partial(jax.jit, static_argnames=("slots", "capacity", "encoder"))
def fresh(target, proposer, key, seeds, *, slots, capacity, encoder=()):
  """Cache, proposer state and row keys of a new batch, in one dispatch. `encoder` is empty, or the slots of its inputs
  and those that no row's output can need."""
  rows = seeds.shape[0]
  new = target.init_cache(rows, slots, *encoder), proposer.init(target, rows, capacity)
  if (layout := getattr(target, "layout", None)) is not None:
    new = layout.hold_rows(new[0], rows), decode.layout_of(target, proposer).hold_rows(new[1], rows)
  return *new, keys_lib.row_keys(key, seeds)


@functools.partial(jax.jit, static_argnames="slots")
def resumed(cache, proposer_state, key, seeds, *, slots):
  """As `fresh`, of what was kept."""
  return cache.grow(slots), proposer_state, keys_lib.row_keys(key, seeds)


def _goes_on(target, proposer, kept, prompts, capacity) -> bool:
  """Whether what was kept serves these prompts: every row's text is the beginning of its prompt, and the proposer's
  state has the sizes of one for `capacity` tokens.

  Nothing is taken back, so that windows and recurrent states go on as well: one row whose prompt departs from its text,
  or a proposer whose state would have to grow, and the whole batch is run from its first token.

  Raises:
    ValueError: another number of rows, or a target with an encoder.
  """
  if kept is None:
    return False
  if models.encodes(target):
    raise ValueError(f"{type(target).__name__} reads every prompt anew with its encoder: nothing is kept of an earlier "
                     "one; leave `kept` out")
  if kept.length.shape[0] != len(prompts):
    raise ValueError(f"what was kept has {kept.length.shape[0]} rows, and {len(prompts)} prompts were given; one a row "
                     "is needed")
  texts, known = read(target, (kept.tokens, kept.length))
  if any(len(prompt) < size or not np.array_equal(prompt[:size], text[:size])
         for prompt, text, size in zip(prompts, texts, known)):
    return False
  shape = lambda tree: (jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)])
  return shape(kept.proposer) == shape(_proposer_state.eval_shape(target, proposer, rows=len(prompts),
                                                                  capacity=capacity))


@functools.partial(jax.jit, static_argnames=("rows", "capacity"))
def _proposer_state(target, proposer, *, rows, capacity):
  return proposer.init(target, rows, capacity)


encode = jax.jit(decode.encode, donate_argnames="state")
prefill = jax.jit(decode.prefill_chunk, donate_argnames="state")


def read(target, tree):
  """NumPy arrays of arrays of a state, whole in every process."""
  layout = getattr(target, "layout", None)
  return jax.device_get(tree if layout is None else layout.everywhere(tree))


def on_host(proposer) -> bool:
  """Whether it drafts on the host, between the two halves of a step."""
  return proposer.host


def _check_verifier(proposer, verifier):
  if verifier.chain_only and not proposer.chains:
    raise ValueError(f"{type(verifier).__name__} verifies chains only, and {type(proposer).__name__} drafts trees "
                     f"({proposer.max_nodes} nodes in a depth of {proposer.max_depth}); use Point, Recursive or "
                     "Traversal, or a drafter of chains")


def _check_drafts(target, proposer, verifier, state):
  """Refuses drafts that the verifier cannot judge. Of `state` the shapes are looked at only: nothing is compiled."""
  name, drafter = type(verifier).__name__, type(proposer).__name__
  tree = None if on_host(proposer) else draft.eval_shape(target, proposer, state)[0]  # the host's has no shape yet
  if not verifier.needs_q:
    return
  if not getattr(proposer, "samples", False) if tree is None else tree.q is None:
    raise ValueError(f"{name} needs sampled drafts and the law q that they were drawn from, and {drafter} makes point "
                     "drafts; use Point, or a drafter that samples")
  if tree is None:
    return
  try:
    _law.eval_shape(tree, verifier=verifier, depth=proposer.max_depth, vocabulary=target.vocab_size)
  except ValueError as error:
    raise ValueError(f"{name} cannot verify the drafts of {drafter}: {error}") from error


# Traced to see what a proposer drafts; run when a driver warms up, and only then.
draft = jax.jit(decode.draft)


@functools.partial(jax.jit, static_argnames=("verifier", "depth", "vocabulary"))
def _law(tree, *, verifier, depth, vocabulary):
  return verifier.law(jnp.zeros((*tree.tokens.shape, vocabulary)), tree, depth)


def chunks(tokens: int) -> list[int]:
  """Sizes of the prefill programs that together hold `tokens`: few, and little of them empty."""
  sizes = []
  while tokens > 0:
    above = next((size for size in CHUNKS if size >= tokens), CHUNKS[-1])
    below = max((size for size in CHUNKS if size <= tokens), default=above)
    sizes.append(above if 3 * above <= 4 * tokens else below)
    tokens -= sizes[-1]
  return sizes


def bucket(needed: int, greatest: int) -> int:
  """The smallest bucket of slots that holds `needed`: 256 times a power of two, at most `greatest`."""
  slots = _FIRST_BUCKET
  while slots < needed:
    slots *= 2
  return max(min(slots, greatest), needed)


def _encoder_sizes(target, inputs, slots):
  """Slots of an encoder's inputs, 64 times a power of two, and those that all rows' inputs leave unused."""
  if not models.encodes(target):
    return ()
  size = _FIRST_INPUTS if models.sound(target) is None else int(inputs.max())
  while size < inputs.max():
    size *= 2
  return min(size, slots), int(inputs.min()) // _FIRST_BUCKET * _FIRST_BUCKET


@functools.lru_cache
def causal(size: int) -> np.ndarray:
  """The mask of a chunk of `size` tokens: bool[N, N]."""
  return np.tril(np.ones((size, size), bool))


def _end_ids(target, eos_ids):
  if eos_ids is None:
    return target.eos_ids
  ids = np.atleast_1d(np.asarray(eos_ids, object)).tolist()
  wrong = [token for token in ids if not isinstance(token, (int, np.integer)) or not 0 <= token < models.known_ids(target)]
  if wrong:
    raise ValueError(f"eos_ids holds {wrong[0]!r}: it is a list of ids, 0 to {models.known_ids(target) - 1}, for all rows")
  return tuple(map(int, ids))


def _check_sound(target, prompts):
  wanted = models.sound(target)
  for row, prompt in enumerate(prompts):
    if prompt.shape != wanted or prompt.dtype.kind != "f" or not np.isfinite(prompt).all():
      raise ValueError(f"prompt {row} is {prompt.dtype}{list(prompt.shape)}; this target hears finite floats "
                       f"f{list(wanted)}, which models.mel.log_mel(waveform, 16000, {wanted[0]}) makes of a waveform")


def _check(target, prompts, budget, written):
  if len(written) != len(prompts):
    raise ValueError(f"written holds {len(written)} lists of ids for {len(prompts)} prompts; one a row is needed")
  for row, (prompt, new, more) in enumerate(zip(prompts, budget, written)):
    if not prompt.size:
      raise ValueError(f"prompt {row} is empty; it needs at least one token")
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
      raise ValueError(f"prompt {row} holds {prompt.ravel()[0].item()!r}; a prompt is a list of token ids (whole "
                       "numbers): encode text with the target's tokenizer first")
    if models.sound(target) is None and (prompt.min() < 0 or prompt.max() >= models.known_ids(target)):
      raise ValueError(f"prompt {row} holds id {int(prompt.max() if prompt.min() >= 0 else prompt.min())}; "
                       f"ids of this target are 0 to {models.known_ids(target) - 1}")
    if new < 1:
      raise ValueError(f"max_new_tokens={int(new)} in row {row}: it must be 1 or more")
    if models.encodes(target) and prompt.size > target.max_inputs:
      raise ValueError(f"prompt {row} has {prompt.size} tokens, and the target's encoder reads at most "
                       f"{target.max_inputs}; shorten it")
    begun, room = len(models.opening(target)) + len(more), models.room(target, prompt.size, len(more))
    if models.encodes(target) and begun + new > target.max_outputs:
      raise ValueError(f"max_new_tokens={int(new)} in row {row}: the target's decoder holds at most "
                       f"{target.max_outputs} tokens and begins with {begun}; lower it to {max(room, 0)}")
    if new > room:
      raise ValueError(f"prompt {row} has {prompt.size + begun} tokens and max_new_tokens={int(new)}, together more "
                       f"than the target's context of {target.max_context}; shorten the prompt or lower max_new_tokens "
                       f"to {max(room, 0)}")
