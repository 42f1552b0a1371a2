"""What the parts of a step cost, each timed alone on the device: draft, verify at every width, commit.

Each part runs many times inside one compiled loop whose input changes from turn to turn, so that neither dispatch nor
hoisting falsifies the time. Their sum is a prediction; what a real step takes beyond it is reported as "other".
"""
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax import drivers
from specjax.verifiers import point

_TURNS = 16
_COMMIT_TURNS = 512  # its state cannot be donated run after run: one copy of the cache is spread over the turns
_REPEATS = 5


def step_costs(target, proposer, prompt: list[int], *, rows: int = 1, peaks: dict | None = None, params=None,
               verifier=point.Point()) -> dict:
  """Median milliseconds of the parts of a step.

  Args:
    target, proposer: what is measured.
    prompt: token ids; the costs hold for its bucket of slots. rows: batch size; all rows hold that prompt.
    peaks: of `device_peaks`; adds the share of them that a width-1 step uses.
    params, verifier: as in `drivers.generate`: a sampled step costs more than a greedy one.

  Returns:
    {"draft_ms", "commit_ms", "verify_ms": one a width, "widths", "utilization"}.
  """
  timers = {(0, part): run for part, run in part_timers(target, proposer, prompt, rows, params, verifier).items()}
  times = {part: ms for (_, part), ms in interleaved(timers, (0, "verify 1")).items()}
  return described(times, target, proposer, rows, peaks)


def interleaved(timers: dict, reference, repeats: int = _REPEATS) -> dict:
  """Median milliseconds of each of `timers`, which take turns: what slows the machine down slows all of them.

  It is the ratios to `reference` in the same turn whose median is taken, so that drift between turns cancels too.
  """
  times = {name: [] for name in timers}
  names = list(timers)
  for repeat in range(repeats):
    shift = repeat * len(names) // repeats
    for name in names[shift:] + names[:shift]:
      times[name].append(timers[name]())
  typical = statistics.median(times[reference])
  return {name: typical * statistics.median(t / base for t, base in zip(values, times[reference]))
          for name, values in times.items()}


def described(times: dict, target, proposer, rows: int, peaks: dict | None) -> dict:
  """What `step_costs` returns, of milliseconds by part."""
  widths = decode.widths_for(proposer.max_nodes)
  step = times["draft"] + times["commit"] + times[f"verify {widths[0]}"]
  return {"draft_ms": times["draft"], "commit_ms": times["commit"],
          "verify_ms": [times[f"verify {width}"] for width in widths], "widths": list(widths),
          "utilization": _utilization(target, rows, step, peaks) if peaks else None}


def part_timers(target, proposer, prompt, rows: int = 1, params=None, verifier=point.Point()) -> dict:
  """By part ("draft", "commit", "verify W"), a function that runs it once compiled and returns milliseconds a turn."""
  state = _state(target, proposer, prompt, rows, params, verifier)
  widths = decode.widths_for(proposer.max_nodes)
  draft = decode.draft if proposer.host else jax.jit(decode.draft)
  tree = draft(target, proposer, state)[0].widen(widths[-1])
  outcome = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(
      functools.partial(decode.verify, verifier=verifier), target, proposer, state=state, tree=tree))
  timers = {"draft": _draft_timer(target, proposer, state),
            "commit": functools.partial(_timed, _COMMIT_TURNS, _commit_loop, target, proposer, state, outcome)}
  for width in widths:
    loop = functools.partial(_verify_loop, verifier=verifier, width=width, depth=proposer.max_depth,
                             node_ids=proposer.node_ids, features=proposer.features)
    timers[f"verify {width}"] = functools.partial(_timed, _TURNS, loop, target, state, tree)
  for run in timers.values():
    run()
  return timers


def draft_timer(target, proposer, prompt, rows: int = 1, params=None, verifier=point.Point()):
  """The timer of drafts behind another text: those of a lookup, and of what falls back on it, depend on it."""
  run = _draft_timer(target, proposer, _state(target, proposer, prompt, rows, params, verifier))
  run()
  return run


def _state(target, proposer, prompt, rows, params, verifier):
  room = 2 * proposer.max_depth + 2
  if params is not None and params.min_new_tokens:
    params = params.replace(min_new_tokens=min(params.min_new_tokens, room))
  # All timing is at most two tokens back; a decoder behind an encoder has written these, and no others.
  split = max(1, len(prompt) - 2)
  return drivers.start(target, proposer, [prompt[:split]] * rows, params, max_new_tokens=room, verifier=verifier,
                       written=[prompt[split:]] * rows)


def _draft_timer(target, proposer, state):
  draft = decode.draft if proposer.host else jax.jit(decode.draft)
  # A drafter with a cache has been fed all tokens but two: feeding the prompt belongs to the first step of a request.
  fed = state.replace(proposer=draft(target, proposer, state.replace(length=state.length - 2))[1])
  drafts = _host_drafts if proposer.host else _draft_loop
  return functools.partial(_timed, _TURNS, drafts, target, proposer, jax.block_until_ready(fed))


def _timed(turns, loop, *args):
  begin = time.perf_counter()
  jax.block_until_ready(loop(*args))
  return (time.perf_counter() - begin) * 1e3 / turns


def _shifted(state, turn):
  """The same state one token shorter in every other turn: work on it cannot be hoisted out of the loop."""
  return state.replace(length=state.length - turn % 2)


@jax.jit
def _draft_loop(target, proposer, state):
  """Drafts in turn behind all known tokens and behind all but the last: a drafter with a cache then feeds two tokens, as
  after a draft that was accepted whole, or one. A fallback costs what its first proposer finds in this very text."""
  shape = jax.eval_shape(decode.draft, target, proposer, state)[0]
  empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
  return jax.lax.fori_loop(0, _TURNS, lambda i, _: decode.draft(target, proposer, _shifted(state, i))[0], empty)


def _host_drafts(target, proposer, state):
  """The same for a proposer that drafts on the host."""
  return [decode.draft(target, proposer, _shifted(state, i))[0] for i in range(_TURNS)]


@functools.partial(jax.jit, static_argnames=("verifier", "width", "depth", "node_ids", "features"))
def _verify_loop(target, state, tree, *, verifier, width, depth, node_ids, features):
  def turn(i, _):
    return decode.verify_at(target, verifier, depth, width, node_ids, features, _shifted(state, i), tree,
                            state.params.mode())
  shape = jax.eval_shape(turn, 0, None)
  return jax.lax.fori_loop(0, _TURNS, turn, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape))


@jax.jit
def _commit_loop(target, proposer, state, outcome):
  def turn(i, carry):
    after = decode.commit(target, proposer, carry, outcome)
    return after.replace(length=state.length - i % 2, cache=after.cache.replace(length=state.cache.length))
  return jax.lax.fori_loop(0, _COMMIT_TURNS, turn, state)


def device_peaks() -> dict:
  """Peaks of this device, measured: bytes read a second by sums over 512 MiB, float operations a second by products
  of two 2048 x 2048 matrices in the type that weights have here; several in one dispatch, each depending on the one
  before."""
  dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  vector = jnp.ones((2**29 // 4,), jnp.float32)
  matrix = jnp.full((2048, 2048), 2.0 ** -11, dtype)
  turns = 4 if jax.default_backend() == "cpu" else 64
  read = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda i, s: jnp.sum(x * (1 + s * 0)), jnp.float32(0)))
  multiply = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda i, y: y @ x, x))
  best = lambda f, x: min(_seconds(f, x) for _ in range(4)) / turns
  return {"memory_bandwidth": vector.nbytes / best(read, vector),
          "arithmetic": 2 * 2048**3 / best(multiply, matrix)}


def _seconds(function, x):
  begin = time.perf_counter()
  jax.block_until_ready(function(x))
  return time.perf_counter() - begin


def _utilization(target, rows, step_ms, peaks):
  """Shares of both peaks in a width-1 step: weights are read once, each is multiplied and added once a row. Arrays of
  the size of the embedding that are only gathered from are counted as if read, and so are experts that no token goes
  through, so a share is an upper bound."""
  leaves = jax.tree.leaves(target)
  size = sum(x.nbytes for x in leaves)
  values = sum(int(np.prod(x.shape)) for x in leaves)
  seconds = step_ms / 1e3
  return {"memory_bandwidth": size / seconds / peaks["memory_bandwidth"],
          "memory_bandwidth_peak_bytes_per_second": peaks["memory_bandwidth"],
          "arithmetic": 2 * values * rows / seconds / peaks["arithmetic"],
          "arithmetic_peak_operations_per_second": peaks["arithmetic"]}
