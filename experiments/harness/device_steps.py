"""SYNTHETIC step times of a device check: what a step costs by width, and plain against speculative decoding.

Weights are random and acceptance is a given law, see `proposers.synthetic`: only the times are measured. Samples are
taken in turn, so that drift hits all of them, and until time is up: what has not been compiled by then is left out and
said so.

Letters: B batch rows.
"""
import functools
import statistics
import time

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import device_model
from specjax import decode
from specjax import drivers
from specjax import proposers
from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import synthetic
from specjax.verifiers import point

LABEL = "synthetic: random weights, tokens accepted by a given law and not by the target; times only"
WIDTHS = decode.WIDTHS
_DEPTH = 7  # of the trees behind the width curve: wide ones are not deep


@struct.dataclass
class Bush(base.Defaults):
  """A tree that always fills its width: a chain, and from a depth of `_DEPTH` on further children of the root. Its
  tokens count up from the pending one: they differ, as real ones do."""
  width: int = struct.field(pytree_node=False)

  @property
  def max_nodes(self) -> int:
    return self.width

  @property
  def max_depth(self) -> int:
    return min(self.width - 1, _DEPTH)

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`: there is no state."""
    del target, batch, capacity
    return ()

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache, keys
    node = np.arange(self.width, dtype=np.int32)
    parents = np.where(node <= self.max_depth, np.maximum(node - 1, 0), 0).astype(np.int32)
    shape = (context.length.shape[0], self.width)
    tokens = (context.pending[:, None] + node) % target.vocab_size
    return tree_lib.TokenTree(tokens=tokens, parents=jnp.broadcast_to(parents, shape),
                              size=jnp.full_like(context.length, self.width)), state

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: nothing to learn."""
    del target, committed
    return state


def widths(target, *, rows: int, context: int, steps: int, repeats: int, passed) -> dict:
  """Milliseconds of a whole step (draft of a fixed rule, forward, head, verdict, commit) at each of `WIDTHS`.

  Args:
    target: the decoder. rows: B. context: tokens of each row's text. steps: of one sample, in one dispatch.
    repeats: samples, fewer when time is up. passed: () -> whether it is.

  Returns:
    {"synthetic": what that means, "curve": by width "median_ms", "least_ms", "greatest_ms", "samples" and "ratio" to
    width 1, "left_out": widths that time did not allow for}.
  """
  timers = {width: functools.partial(_width_sample, target, width, rows, context, steps) for width in WIDTHS}
  samples = interleave(timers, repeats, passed)
  curve = [{"width": width} | summary([sample["ms"] for sample in found]) for width, found in samples.items()]
  for line in curve:
    line["ratio"] = line["median_ms"] / curve[0]["median_ms"]
  return {"synthetic": LABEL, "rows": rows, "context": context, "steps_of_a_sample": steps, "curve": curve,
          "left_out": [width for width in WIDTHS if width not in samples]}


def _width_sample(target, width, rows, context, steps):
  proposer = Bush(width)
  state = jax.block_until_ready(device_model.ready(
      target, proposer, point.Point(), rows=rows, context=context, room=steps * (proposer.max_depth + 1)))
  begin = time.perf_counter()
  jax.block_until_ready(_fixed(target, proposer, state, np.int32(steps)))
  return {"ms": (time.perf_counter() - begin) * 1e3 / steps}


@functools.partial(jax.jit, donate_argnames="state")
def _fixed(target, proposer, state, steps):
  """So many whole steps of the proposer's width, without a switch between widths."""
  def step(_, state):
    tree, own = proposer.propose(target, state.cache, state.proposer, state.context(), state.keys)
    found = decode.verify_at(target, point.Point(), proposer.max_depth, proposer.width, 0, (), state, tree,
                             state.params.mode())
    verdict, tokens, hidden, in_flight, reach, logprobs, node_ids, features, loads = found
    outcome = decode.Outcome(verdict=verdict, tokens=tokens, hidden=hidden, in_flight=in_flight, reach=reach,
                             drafted=tree.size - 1, width_index=jnp.int32(0), logprobs=logprobs, node_ids=node_ids,
                             features=features, loads=loads)
    return decode.commit(target, proposer, state.replace(proposer=own), outcome)
  return jax.lax.fori_loop(0, steps, step, state)


def arms(target, proposer: synthetic.Synthetic, *, rows: int, context: int, steps: int, repeats: int, passed,
         bandwidth: dict, curve: list) -> dict:
  """Tokens a second of plain decoding and of synthetic speculation, the real decode loop, beside the bounds.

  Args:
    target, rows, context, steps, repeats, passed: as in `widths`. proposer: of the speculative arm.
    bandwidth: of `device_bounds.bandwidth`. curve: of `widths`; either may be empty, and its figures are then missing.

  Returns:
    By arm "tokens_per_second" and step times, median with the least and greatest sample, "tokens_per_step", and
    "bounds": by source of the bandwidth, the tokens a second that reading weights and cache once a step allows, and the
    share of it that was reached; "speedup" and what the width curve predicts for it.
  """
  kinds = {"plain": (proposers.Plain(), point.Point()), "synthetic": (proposer, proposer.verifier)}
  timers = {name: functools.partial(_arm_sample, target, *kind, rows, context, steps) for name, kind in kinds.items()}
  samples = interleave(timers, repeats, passed)
  state = device_model.ready(target, *kinds["plain"], rows=rows, context=context, room=steps)
  read = {"weights": device_model.read_bytes(target), "cache": device_model.cache_bytes(state)}
  del state
  found = {"synthetic": LABEL, "acceptance": list(proposer.acceptance), "draft_bytes": proposer.draft_bytes,
           "expected_tokens_per_step": proposer.verifier.tokens_per_step, "rows": rows, "context": context,
           "bytes_of_a_step": read, "arms": {}, "left_out": [name for name in kinds if name not in samples]}
  for name, runs in samples.items():
    rates = [run["tokens"] * 1e3 / run["ms"] for run in runs]
    per_step = sum(run["tokens"] for run in runs) / sum(run["steps"] for run in runs) / rows
    extra = proposer.draft_bytes * proposer.num_tokens if name == "synthetic" else 0
    found["arms"][name] = {
        "tokens_per_second": statistics.median(rates), "least": min(rates), "greatest": max(rates),
        "tokens_per_step": per_step, "step": summary([run["ms"] / run["steps"] for run in runs]),
        "bounds": _bounds(statistics.median(rates), per_step * rows, sum(read.values()) + extra, bandwidth)}
  if len(found["arms"]) == len(kinds):
    plain, ours = (found["arms"][name]["tokens_per_second"] for name in kinds)
    found["speedup"] = ours / plain
  ratios = {line["width"]: line["ratio"] for line in curve}
  width = decode.widths_for(proposer.max_nodes)[-1]
  if width in ratios:  # drafts at a cost are not in the curve
    found["predicted_speedup_of_free_drafts"] = proposer.verifier.tokens_per_step / ratios[width]
  return found


def _arm_sample(target, proposer, verifier, rows, context, steps):
  room = steps * (proposer.max_depth + 1) + proposer.max_depth
  state = jax.block_until_ready(device_model.ready(target, proposer, verifier, rows=rows, context=context, room=room))
  begin = time.perf_counter()
  state = jax.block_until_ready(drivers.advance(target, proposer, state, np.int32(steps), verifier=verifier))
  ms = (time.perf_counter() - begin) * 1e3
  return {"ms": ms, "steps": int(state.counters.steps[0]), "tokens": int((state.length - state.start).sum())}


def _bounds(rate, tokens, read, bandwidth):
  bounds = {}
  for source in ("measured", "published"):
    if bandwidth.get(source):
      bound = tokens * bandwidth[source] / read
      bounds[source] = {"tokens_per_second": bound, "share": rate / bound}
  return bounds


def interleave(timers: dict, repeats: int, passed) -> dict:
  """Samples of every timer, in turn, behind one run of each that compiles. When `passed()`, timers that have not been
  compiled are left out, and rounds end; every timer that is there has a sample."""
  compiled = {}
  for name, run in timers.items():
    if compiled and passed():
      break
    run()
    compiled[name] = run
  samples = {name: [] for name in compiled}
  for turn in range(repeats):
    if turn and passed():
      break
    for name, run in compiled.items():
      samples[name].append(run())
  return samples


def summary(ms: list[float]) -> dict:
  """Median and spread of samples in milliseconds."""
  return {"median_ms": statistics.median(ms), "least_ms": min(ms), "greatest_ms": max(ms), "samples": len(ms)}
