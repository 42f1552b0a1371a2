"""Which parts a decoder has, by its configuration: what a file must hold, and which rows of which weight each part is.

Letters: V vocabulary, E model width, Q = H * C query rows, K key rows, C head width, M feed-forward width, P positions,
X experts.
"""
from collections.abc import Collection

from specjax.models.config import DecoderConfig

Part = tuple[str, str, int, tuple[int, ...]]


def parts(config: DecoderConfig, fused: Collection[str], *, outside: bool, mixed: bool = False) -> list[Part]:
  """The parts of a layer, or with `outside` those of no layer.

  Args:
    config: of the decoder.
    mixed: the layer's feed-forward is a mixture of experts.
    fused: of "qkv", "qkv_bias", "gate_up", "gate_up_bias", "experts_gate_up" and "experts_down", those that are one
      part, and "experts_gate" where "experts_gate" and "experts_up" are a part each for all experts; other names are
      passed over.

  Returns:
    (part, field of the weights, first row, shape): parts of one field follow each other. Where every expert has parts
    of its own, a part is named such as "expert_gate.3", and its rows lie among those of all experts, f[X * 2M, E] or
    f[X * E, M].
  """
  return _outside(config) if outside else _layer(config, fused, mixed)


def _outside(c):
  found = [("embedding", "embedding", 0, (c.vocab_size, c.width))]
  if c.positions == "learned":
    found.append(("positions", "positions", 0, (c.max_context, c.width)))
  found += _norm(c, "final_norm", True)
  if not c.tied:
    found.append(("head", "head", 0, (c.vocab_size, c.width)))
  return found


def _layer(c, fused, mixed):
  e, q, k = c.width, c.heads * c.head_width, c.kv_heads * c.head_width
  projections = (("query", q), ("key", k), ("value", k))
  found = _norm(c, "attention_norm", c.pre_norm)
  found += _rows("qkv", "qkv", projections, e, fused)
  if c.qkv_bias:
    found += _rows("qkv_bias", "qkv_bias", [(f"{name}_bias", rows) for name, rows in projections], None, fused)
  if c.qk_norm:
    whole = c.qk_norm == "whole"
    found += [("query_norm", "query_norm", 0, (q if whole else c.head_width,)),
              ("key_norm", "key_norm", 0, (k if whole else c.head_width,))]
  found += [("attention_out", "attention_out", 0, (e, q))]
  if c.out_bias:
    found += [("attention_out_bias", "attention_out_bias", 0, (e,))]
  found += _norm(c, "attention_post_norm", c.post_norm)
  found += _norm(c, "mlp_norm", c.pre_norm)
  if mixed:
    return found + _experts(c, fused) + _norm(c, "mlp_post_norm", c.post_norm)
  matrices = [("gate", c.mlp_width), ("up", c.mlp_width)][0 if c.gated else 1:]
  found += _rows("gate_up", "gate_up", matrices, e, fused)
  if c.mlp_bias:
    found += _rows("gate_up_bias", "gate_up_bias", [(f"{name}_bias", rows) for name, rows in matrices], None, fused)
  found += [("down", "down", 0, (e, c.mlp_width))]
  if c.mlp_bias:
    found += [("down_bias", "down_bias", 0, (e,))]
  return found + _norm(c, "mlp_post_norm", c.post_norm)


def _norm(c, name, wanted):
  if not wanted:
    return []
  bias = c.norm == "layer" and not name.endswith("post_norm")
  return [(field, field, 0, (c.width,)) for field in [name] + [f"{name}_bias"] * bias]


def _experts(c, fused):
  x, m, e, shared = c.moe.experts, c.moe.width, c.width, c.moe.shared
  found = [("router", "router", 0, (x, e))]
  if shared:
    found += [("shared_gate", "shared_gate_up", 0, (shared, e)), ("shared_up", "shared_gate_up", shared, (shared, e)),
              ("shared_down", "shared_down", 0, (e, shared)), ("shared_share", "shared_share", 0, (1, e))]
  if "experts_gate_up" in fused:
    found.append(("experts_gate_up", "experts_gate_up", 0, (x, 2 * m, e)))
  elif "experts_gate" in fused:
    found += [("experts_gate", "experts_gate_up", 0, (x, m, e)), ("experts_up", "experts_gate_up", 0, (x, m, e))]
  else:
    for i in range(x):
      found += [(f"expert_gate.{i}", "experts_gate_up", 2 * i * m, (m, e)),
                (f"expert_up.{i}", "experts_gate_up", (2 * i + 1) * m, (m, e))]
  if "experts_down" in fused:
    return found + [("experts_down", "experts_down", 0, (x, e, m))]
  return found + [(f"expert_down.{i}", "experts_down", i * e, (e, m)) for i in range(x)]


def _rows(whole, field, each, columns, fused):
  """Parts that are rows of one field, or that field as one part."""
  shape = lambda rows: (rows,) if columns is None else (rows, columns)
  if whole in fused:
    return [(whole, field, 0, shape(sum(rows for _, rows in each)))]
  found, start = [], 0
  for name, rows in each:
    found.append((name, field, start, shape(rows)))
    start += rows
  return found
