"""What verify passes of a target with mixtures of experts count: which experts they go through, and how evenly.

A pass reads the weights of the experts that any of its nodes goes through, so it is distinct experts that a wider draft
costs (arXiv 2505.19645). They belong to the pass and not to a row: every running row takes an equal share of them, so
that a sum over rows is a sum over passes. Nodes of a pass are valid nodes of all rows, the root of ended rows among
them, since those are computed as well.

Letters: B batch rows, W widths, T nodes, L layers with a mixture, X experts of each, k experts of a token.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np


@struct.dataclass
class ExpertCounters:
  """Per row, so that pooling is a sum over rows."""
  loads: jax.Array    # i32[B, L, X]; how often the row's own nodes went through each expert
  touched: jax.Array  # f32[B, W, L]; distinct experts of the passes at each width, the row's share
  nodes: jax.Array    # f32[B, W]; nodes of these passes, the row's share
  passes: jax.Array   # f32[B, W]; the passes, the row's share


def zero(rows: int, widths: int, routing) -> ExpertCounters:
  """Counters of a batch at its start; `routing` as in `models.base.Routing`."""
  return ExpertCounters(loads=jnp.zeros((rows, routing.layers, routing.experts), jnp.int32),
                        touched=jnp.zeros((rows, widths, routing.layers), jnp.float32),
                        nodes=jnp.zeros((rows, widths), jnp.float32), passes=jnp.zeros((rows, widths), jnp.float32))


def loads(chosen: tuple[jax.Array, ...], valid: jax.Array, *, like: jax.Array) -> jax.Array:
  """How often the valid nodes of a pass went through each expert: i32[B, L, X].

  Args:
    chosen: i32[B, T, k] of each layer that the pass ran; the layers below, which a drafter has run already, count 0.
    valid: bool[B, T].
    like: i32[B, L, X], the counters, for their shape.
  """
  rows, depth, experts = like.shape
  if not chosen:
    return jnp.zeros_like(like)
  run = jnp.stack([jnp.zeros((rows, experts), jnp.int32).at[jnp.arange(rows)[:, None, None], index].add(
      valid[:, :, None].astype(jnp.int32)) for index in chosen], axis=1)
  return jnp.pad(run, ((0, 0), (depth - len(chosen), 0), (0, 0)))


def count(counters: ExpertCounters, *, active: jax.Array, nodes: jax.Array, loads: jax.Array,
          width_index: jax.Array) -> ExpertCounters:
  """Adds one pass.

  Args:
    counters: so far.
    active: bool[B], rows that take part.
    nodes: i32[B], valid nodes of each row. loads: i32[B, L, X], of the pass.
    width_index: i32, which width it ran at.
  """
  share = active / jnp.maximum(jnp.sum(active), 1)                                         # f32[B]
  here = share[:, None] * (jnp.arange(counters.passes.shape[1]) == width_index)[None]      # f32[B, W]
  distinct = jnp.sum(jnp.any(loads > 0, axis=0), axis=-1)                                  # i32[L]
  return ExpertCounters(loads=counters.loads + jnp.where(active[:, None, None], loads, 0),
                        touched=counters.touched + here[:, :, None] * distinct,
                        nodes=counters.nodes + here * nodes.sum(), passes=counters.passes + here)


def summarize(totals: dict, routing, widths, output_tokens: int) -> dict:
  """What pooled counts say, for `summary.json`.

  Args:
    totals: the fields of `ExpertCounters` summed over rows and requests, as nested lists.
    routing: see `models.base.Routing`. widths: nodes of each of the W widths.
    output_tokens: of the same rows.

  Returns:
    layers, experts, chosen, expert_bytes of `routing`; by_width, of widths that were used: width, passes, nodes (the
    mean), distinct_per_layer (experts of a pass, the mean), distinct (the mean over layers); load_per_expert (shares of
    a layer's choices, [L][X]); imbalance_per_layer (the greatest load over the mean load, 1 is even) and imbalance (the
    mean over layers); bytes_per_step and bytes_per_token, of experts' weights that passes had to read. What has no
    denominator is None.
  """
  load, touched = np.asarray(totals["loads"], np.float64), np.asarray(totals["touched"], np.float64)
  nodes, passes = np.asarray(totals["nodes"], np.float64), np.asarray(totals["passes"], np.float64)
  used = passes > 0.5
  by_width = [{"width": int(widths[i]), "passes": float(passes[i]), "nodes": float(nodes[i] / passes[i]),
               "distinct_per_layer": (touched[i] / passes[i]).tolist(),
               "distinct": float(np.mean(touched[i] / passes[i]))} for i in np.flatnonzero(used)]
  total = load.sum(axis=1, keepdims=True)
  shares = np.divide(load, total, out=np.zeros_like(load), where=total > 0)
  uneven = [float(row.max() * routing.experts) if row.any() else None for row in shares]
  known = [value for value in uneven if value is not None]
  size = float(touched.sum()) * routing.expert_bytes
  return {
      "layers": routing.layers, "experts": routing.experts, "chosen": routing.chosen,
      "expert_bytes": routing.expert_bytes, "by_width": by_width, "load_per_expert": shares.tolist(),
      "imbalance_per_layer": uneven, "imbalance": float(np.mean(known)) if known else None,
      "bytes_per_step": size / float(passes.sum()) if used.any() else None,
      "bytes_per_token": size / output_tokens if output_tokens else None,
  }
