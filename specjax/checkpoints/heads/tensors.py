"""The tensors of a draft head, each of which must be there, have its shape, and be used.

Letters: E width of the head, I width of what enters the attention, H query heads, K key/value heads, C head width,
M feed-forward width, U draft ids, V vocabulary.
"""
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.models import draft_layer

_QUERY = "self_attn.q_proj.weight"
_FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))


class Tensors:
  """An open checkpoint (`fields.TensorSource`) of which tensors are taken, until none is left."""

  def __init__(self, source, dtype):
    """`dtype` is that of the weights kept."""
    self.path, self.shapes = source.path, source.shapes
    self._source, self._dtype, self._taken = source, dtype, set()

  def raw(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor as it is stored; CheckpointError if it is missing or misshapen."""
    if name not in self.shapes:
      raise CheckpointError(f"{self.path}: tensor {name!r} is missing (shape {shape} expected): the checkpoint is "
                            "incomplete or of another kind than its configuration says")
    if tuple(self.shapes[name]) != shape:
      raise CheckpointError(f"{self.path}: tensor {name!r} has shape {tuple(self.shapes[name])}; the configuration "
                            f"asks for {shape}")
    self._taken.add(name)
    return self._source.rows(name, 0, shape[0])

  def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of numbers, in the type of the weights kept."""
    value = self.raw(name, shape)
    if value.dtype not in _FLOATS:
      raise CheckpointError(f"{self.path}: tensor {name!r} has type {value.dtype}, which is not supported (supported: "
                            f"{', '.join(map(str, _FLOATS))}): use an unquantised copy of the head")
    return value.astype(self._dtype)

  def take(self, name: str, shape: tuple[int, ...]) -> jax.Array:
    """As `floats`, on the device."""
    return jnp.asarray(self.floats(name, shape))

  def ignore(self, *names: str) -> None:
    """Tensors that may be there and are not read."""
    self._taken.update(names)

  def finish(self) -> None:
    """Raises CheckpointError for a tensor that was not taken."""
    # Old checkpoints carry the rotary frequencies, which follow from rope_theta.
    left = [name for name in self.shapes if name not in self._taken and not name.endswith(".rotary_emb.inv_freq")]
    if left:
      raise CheckpointError(f"{self.path}: extra tensor {left[0]!r} of shape {tuple(self.shapes[left[0]])}: nothing in "
                            "this kind of head uses it, so the head would not be the one that was saved")


def _parts(shape: draft_layer.LayerShape, into: int, normed_heads: bool, biased: bool):
  """The tensors of a layer: field -> [(name, rows, other axes), ...], in the order of the field's rows."""
  e, m, c = shape.width, shape.mlp_width, shape.head_width
  q, k = shape.heads * c, shape.kv_heads * c
  found = {
      "qkv": [(_QUERY, q, (into,)), ("self_attn.k_proj.weight", k, (into,)),
              ("self_attn.v_proj.weight", k, (into,))],
      "attention_out": [("self_attn.o_proj.weight", e, (q,))], "mlp_norm": [("post_attention_layernorm.weight", e, ())],
      "gate_up": [("mlp.gate_proj.weight", m, (e,)), ("mlp.up_proj.weight", m, (e,))],
      "down": [("mlp.down_proj.weight", e, (m,))]}
  if normed_heads:
    found |= {"query_norm": [("self_attn.q_norm.weight", c, ())], "key_norm": [("self_attn.k_norm.weight", c, ())]}
  if biased:
    found["qkv_bias"] = [(f"self_attn.{name}_proj.bias", rows, ()) for name, rows in (("q", q), ("k", k), ("v", k))]
  return found


def read_layer(tensors: Tensors, prefix: str, shape: draft_layer.LayerShape, into: int, *,
               normed_heads: bool, biased: bool = False, gated: bool = False) -> draft_layer.DraftLayer:
  """A decoder layer; `into` is the width I of what its attention takes, `normed_heads` asks for query and key norms,
  `biased` for biases of queries, keys and values, `gated` for a gate of the attention, whose rows stand in `q_proj`
  behind those of each query head."""
  found, gate = {}, None
  for field, parts in _parts(shape, into, normed_heads, biased).items():
    pieces = []
    for name, rows, rest in parts:
      if gated and name == _QUERY:
        both = tensors.floats(prefix + name, (2 * rows, *rest)).reshape(shape.heads, 2, -1, into)
        gate = jnp.asarray(both[:, 1].reshape(rows, into))
        pieces.append(both[:, 0].reshape(rows, into))
      else:
        pieces.append(tensors.floats(prefix + name, (rows, *rest)))
    found[field] = jnp.asarray(np.concatenate(pieces))
  return draft_layer.DraftLayer(**found, gate=gate)


def write_layer(layer: draft_layer.DraftLayer, prefix: str, shape: draft_layer.LayerShape) -> dict[str, Any]:
  """The tensors that `read_layer` reads."""
  found = {}
  has = layer.query_norm is not None, layer.qkv_bias is not None
  for field, parts in _parts(shape, layer.qkv.shape[1], *has).items():
    start = 0
    for name, rows, _ in parts:
      found[prefix + name] = getattr(layer, field)[start:start + rows]
      start += rows
  if layer.gate is not None:
    heads = lambda x: jnp.asarray(x).reshape(shape.heads, 1, shape.head_width, -1)
    both = jnp.concatenate([heads(found[prefix + _QUERY]), heads(layer.gate)], axis=1)
    found[prefix + _QUERY] = both.reshape(-1, both.shape[-1])
  return found


def read_ids(tensors: Tensors, draft_vocab: int, vocab: int) -> jax.Array | None:
  """The target's ids of the draft ids, i32[U] ascending, from `d2t` and `t2d`; None if there are as many as ids.

  `d2t` i64[U] holds offsets: draft id i is the target's i + d2t[i]. `t2d` bool[V] marks the same ids. With U = V both
  may be left out.
  """
  if draft_vocab > vocab:
    raise CheckpointError(f"{tensors.path}: draft_vocab_size {draft_vocab} is greater than vocab_size {vocab}")
  if draft_vocab == vocab and "d2t" not in tensors.shapes and "t2d" not in tensors.shapes:
    return None
  offsets, mask = tensors.raw("d2t", (draft_vocab,)), tensors.raw("t2d", (vocab,))
  if offsets.dtype not in (np.int64, np.int32) or mask.dtype != np.bool_:
    raise CheckpointError(f"{tensors.path}: d2t and t2d have types {offsets.dtype} and {mask.dtype}; int64 and bool "
                          "are expected")
  marked = np.flatnonzero(mask)
  ids = np.arange(draft_vocab) + offsets
  if not np.array_equal(ids, marked):
    if np.array_equal(offsets, marked):
      raise CheckpointError(f"{tensors.path}: d2t holds the target's ids; offsets are expected (id minus draft id): "
                            "subtract 0, 1, 2, ... from it")
    which = int(np.argmax(ids[:len(marked)] != marked[:draft_vocab])) if len(marked) == draft_vocab else None
    what = (f"t2d marks {len(marked)} ids and there are {draft_vocab} draft ids" if which is None else
            f"draft id {which} is the target's {ids[which]} by d2t and {marked[which]} by t2d")
    raise CheckpointError(f"{tensors.path}: d2t and t2d disagree: {what}; the head would draft other tokens than it "
                          "was trained for. Download it again")
  return None if draft_vocab == vocab else jnp.asarray(ids, jnp.int32)


def write_ids(ids: jax.Array | None, vocab: int) -> dict[str, np.ndarray]:
  """`d2t` and `t2d`; nothing if all ids are drafted."""
  if ids is None:
    return {}
  ids, mask = np.asarray(ids, np.int64), np.zeros(vocab, np.bool_)
  mask[ids] = True
  return {"d2t": ids - np.arange(len(ids)), "t2d": mask}
