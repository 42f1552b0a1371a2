"""Timers behind `experiments.speed`: steps of a fixed width, forward and head alone, requests, and an older loop.

A timer is a function that runs once and returns milliseconds; `interleave` runs several in turn, so that drift of the
machine hits all of them, and returns their samples.
"""
import functools
import importlib.util
import pathlib
import time

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import verifier_speed
from specjax import drivers
from specjax import proposers
from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.verifiers import point

METHODS = {"plain": proposers.Plain(), "ngram": proposers.NGram()}
NEW_TOKENS = 96  # of a request
_WIDTHS = (4, 8, 16)


@struct.dataclass
class Filler(base.Stateless):
  """A proposer that always fills its width with one id, so that every step has the same width and emits one token."""
  num_tokens: int = struct.field(pytree_node=False)
  token: int = struct.field(pytree_node=False, default=0)

  def propose(self, target, cache, state, context, keys):
    del target, cache, keys
    draft = jnp.full((context.length.shape[0], self.num_tokens), self.token, jnp.int32)
    return tree_lib.chain(context.pending, draft, jnp.full_like(context.length, self.num_tokens)), state


def interleave(timers: dict, repeats: int, report=lambda: None) -> dict[str, list[float]]:
  """Samples of every timer, taken in turn after one run of each that compiles."""
  for run in timers.values():
    run()
    report()
  samples = {name: [] for name in timers}
  for _ in range(repeats):
    for name, run in timers.items():
      samples[name].append(run())
      report()
  return samples


def model_timers(target, prompts: dict, results: dict, *, steps: int) -> dict:
  """Timers of steps by width and of the model alone, on the prompt "chat", and of whole requests on every prompt."""
  plain, chat = METHODS["plain"], prompts["chat"]
  timers = {"step, width 1": step_timer(target, plain, chat, steps)}
  timers |= {f"step, width {w}": step_timer(target, Filler(w - 1), chat, steps) for w in _WIDTHS}
  timers["forward and head, width 1"] = forward_timer(target, plain, chat, steps)
  for name, ids in prompts.items():
    for method, proposer in METHODS.items():
      timers[f"{method}, {name}"] = request_timer(target, proposer, ids, NEW_TOKENS, results, f"{method}, {name}")
  return timers


def verify_memory() -> dict[str, float]:
  """What the draw of every verifier holds beside its arguments, in arrays f32[B, T, V]."""
  array = verifier_speed.logits().nbytes
  return {f"verify, {name}": verifier_speed.memory(name) / array for name in verifier_speed.CASES}


def step_timer(target, proposer, prompt, steps: int):
  """Milliseconds a step, over `steps` steps in one dispatch from behind the prefill."""
  def run():
    state = jax.block_until_ready(drivers.start(target, proposer, [prompt], max_new_tokens=10 * steps, eos_ids=()))
    begin = time.perf_counter()
    state = jax.block_until_ready(drivers.advance(target, proposer, state, np.int32(steps), verifier=point.Point()))
    return (time.perf_counter() - begin) * 1e3 / int(state.counters.steps[0])
  return run


def forward_timer(target, proposer, prompt, steps: int):
  """Milliseconds of the target's forward pass and head for one token, in a loop of `steps`."""
  state = drivers.start(target, proposer, [prompt], max_new_tokens=10 * steps, eos_ids=())
  loop = functools.partial(_forward_loop, target, state, np.int32(steps))
  def run():
    begin = time.perf_counter()
    jax.block_until_ready(loop())
    return (time.perf_counter() - begin) * 1e3 / steps
  return run


@jax.jit
def _forward_loop(target, state, steps):
  token = state.context().pending[:, None]
  mask = jnp.ones((1, 1, 1), bool)

  def once(i, carry):
    del carry  # replaced: keys and values of the pass are its result too
    # The token, the position and the visible slots change, as they do while decoding.
    cache = state.cache.replace(length=state.cache.length - i % 2)
    out = target.forward((token + i) % target.vocab_size, state.length[:, None] - 1 - i % 2, mask, cache)
    return target.logits(out.hidden), out.in_flight

  shapes = jax.eval_shape(once, jnp.int32(0), None)
  return jax.lax.fori_loop(0, steps, once, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))


def request_timer(target, proposer, prompt, max_new_tokens, results: dict, name: str):
  """Milliseconds of one whole request, per output token; leaves its result in `results[name]`, one a run."""
  def run():
    result = drivers.generate(target, proposer, [prompt], max_new_tokens=max_new_tokens)
    results.setdefault(name, []).append(result)
    return result.timings.total * 1e3 / int(result.lengths[0])
  return run


def check_prototype(path: str | None) -> None:
  """Refuses what is no Python file; without a path there is nothing to refuse.

  Raises:
    ValueError: names the path.
  """
  if path and not (path.endswith(".py") and pathlib.Path(path).is_file()):
    raise ValueError(f"--prototype={path}: it must be the path of a .py file, the prototype's decode_loop.py")


class Prototype:
  """The single-file loop that is the floor for speed, loaded from its path: `decode_loop.py MODEL.gguf`."""

  def __init__(self, path: str, model: str):
    spec = importlib.util.spec_from_file_location("prototype_loop", path)
    self._module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(self._module)
    self._weights = self._module.load(model)

  def timer(self, ids, widths: tuple, new: int, *, whole: bool, slots: int = 256):
    """Milliseconds of a whole request, prefill included, per output token, or of one decode step."""
    m = self._module

    def run():
      tokens = np.zeros((1, -(-len(ids) // 64) * 64), np.int32)
      tokens[0, :len(ids)] = ids
      length = jnp.array([len(ids)], jnp.int32)
      begin = time.perf_counter()
      cache = [(jnp.zeros((1, m.KV, slots, m.C)), jnp.zeros((1, m.KV, slots, m.C))) for _ in range(m.L)]
      first, cache = m.prefill(self._weights, jnp.asarray(tokens), length, cache, jnp.zeros(1, jnp.int32))
      text = jnp.zeros((1, slots), jnp.int32).at[0, :len(ids)].set(jnp.asarray(ids)).at[0, len(ids)].set(first[0])
      jax.block_until_ready((text, cache))
      middle = time.perf_counter()
      out = jax.block_until_ready(m.generate(self._weights, text, length + 1, cache, widths, new - 1, 2))
      end = time.perf_counter()
      if whole:
        return (end - begin) * 1e3 / (int(out[1][0]) - len(ids))
      return (end - middle) * 1e3 / int(out[4][0])
    return run


def prototype_timers(prototype: Prototype, prompts: dict) -> dict:
  """Timers of the prototype's plain step, on the prompt "chat", and of whole requests."""
  timers = {"prototype step, width 1": prototype.timer(prompts["chat"], (1,), NEW_TOKENS, whole=False)}
  return timers | {f"prototype plain, {name}": prototype.timer(ids, (1,), NEW_TOKENS, whole=True)
                   for name, ids in prompts.items()}


def compile_cost(target, proposer, prompt, max_new_tokens) -> tuple[float, int]:
  """Seconds to trace and compile the decode loop from nothing, and the size of its compiled text in bytes."""
  state = drivers.start(target, proposer, [prompt], max_new_tokens=max_new_tokens)
  previous = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    # A fresh function object: neither the trace nor the program of an earlier call can be reused.
    fresh = jax.jit(lambda *args: drivers.advance.__wrapped__(*args, verifier=point.Point()))
    begin = time.perf_counter()
    compiled = fresh.lower(target, proposer, state, np.int32(1)).compile()
    return time.perf_counter() - begin, len(compiled.as_text())
  finally:
    jax.config.update("jax_enable_compilation_cache", previous)
