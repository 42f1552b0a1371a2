"""Times passes of a target with mixtures of experts, and fits what a token and what an expert costs in them.

Passes of 1 to 64 tokens behind one text, each width over tokens of a text and over copies of one token: as many tokens,
other numbers of experts. All are timed in turn, so that drift of the machine hits them alike.
"""
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax.theory import expert_cost

_REPEATS, _TURNS = 5, 4


def measure(target, prompt: list[int]) -> dict:
  """What `summary.json` holds as `cost` of a group's `experts`: the fitted terms and the passes they were fitted to.

  Args:
    target: has a `routing`, see `models.base.Routing`.
    prompt: ids of a text; passes run behind it, over its own tokens.

  Returns:
    The fields of `expert_cost.ExpertCost`, and points: kind ("text" or "one token"), tokens, distinct (experts of a
    layer, the mean over layers), milliseconds (the median) and fitted.
  """
  state = drivers.start(target, proposers.Plain(), [prompt], max_new_tokens=1)
  points, runs = [], []
  for width in decode.WIDTHS:
    text = (prompt * (width // len(prompt) + 1))[:width]
    for kind, tokens in (("text", text), ("one token", text[:1] * width))[:1 if width == 1 else 2]:
      given = jnp.asarray([tokens], jnp.int32)
      chosen = np.asarray(_experts(target, state, given))
      distinct = float(np.mean([len(np.unique(layer)) for layer in chosen]))
      points.append({"kind": kind, "tokens": width, "distinct": distinct})
      runs.append(functools.partial(_seconds, target, state, given))
      runs[-1]()  # compiles
  times = [[] for _ in runs]
  for _ in range(_REPEATS):
    for spent, run in zip(times, runs):
      spent.append(run() * 1e3)
  for point, spent in zip(points, times):
    point["milliseconds"] = statistics.median(spent)
  column = lambda name: [point[name] for point in points]
  fitted = expert_cost.fit(column("tokens"), column("distinct"), column("milliseconds"), target.routing.chosen)
  for point, value in zip(points, fitted.milliseconds(column("tokens"), column("distinct"))):
    point["fitted"] = float(value)
  return dataclasses.asdict(fitted) | {"points": points}


def _pass(target, state, tokens, **asked):
  width = tokens.shape[1]
  positions = state.length[:, None] - 1 + jnp.arange(width, dtype=jnp.int32)[None]
  return target.forward(tokens, positions, jnp.tril(jnp.ones((1, width, width), bool)), state.cache, **asked)


@jax.jit
def _experts(target, state, tokens):
  """i32[L, T, k]; the experts of every layer with a mixture."""
  return jnp.stack([chosen[0] for chosen in _pass(target, state, tokens, experts=True).experts])


def _seconds(target, state, tokens):
  begin = time.perf_counter()
  jax.block_until_ready(_loop(target, state, tokens))
  return (time.perf_counter() - begin) / _TURNS


@jax.jit
def _loop(target, state, tokens):
  def turn(i, _):
    # Another length in every other turn: the pass cannot be hoisted out of the loop.
    return target.logits(_pass(target, state.replace(length=state.length - i % 2), tokens).hidden)
  shape = jax.eval_shape(turn, 0, None)
  return jax.lax.fori_loop(0, _TURNS, turn, jnp.zeros(shape.shape, shape.dtype))
