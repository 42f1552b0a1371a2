"""Logical names of the axes of every array that may be divided: weights, caches, and what drafters keep.

A name says what an axis is, not where it lies: `rules` maps names to axes of a mesh. Arrays of a row each, which is most
of a state, have "batch" first and need no entry of their own. An axis without a name is never divided.

Letters as in `models.weights` and `cache`.
"""
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

Names = tuple[str | None, ...]

# Weights, by class and field. "heads": query heads and with them key/value heads, whole; "mlp", "experts", "vocab": rows
# of feed-forwards, whole experts, rows of the vocabulary. What reads the residual stream has "embed" there.
_LAYER = {
    "attention_norm": ("embed",), "qkv": ("heads", "embed"), "qkv_bias": ("heads",), "attention_out": ("embed", "heads"),
    "mlp_norm": ("embed",), "gate_up": ("mlp", "embed"), "down": ("embed", "mlp"), "attention_norm_bias": ("embed",),
    "query_norm": (None,), "key_norm": (None,), "attention_out_bias": ("embed",), "attention_post_norm": ("embed",),
    "mlp_norm_bias": ("embed",), "gate_up_bias": ("mlp",), "down_bias": ("embed",), "mlp_post_norm": ("embed",),
    "router": (None, "embed"), "experts_gate_up": ("experts", "expert_mlp", "embed"),
    "experts_down": ("experts", "embed", "expert_mlp"), "shared_gate_up": ("shared_mlp", "embed"),
    "shared_down": ("embed", "shared_mlp"), "shared_share": (None, "embed"),
}
_VOCABULARY = {"embedding": ("vocab", "embed"), "head": ("vocab", "embed"), "final_norm": ("embed",),
               "final_norm_bias": ("embed",), "positions": (None, "embed")}
_OF_ENCODERS = {
    "logits_bias": ("vocab",), "encoder_bias": (None, None), "bias": (None, None), "conv1": (None,) * 3,
    "conv1_bias": (None,), "conv2": (None,) * 3, "conv2_bias": (None,), "encoder_positions": (None, "embed"),
    **{f"{name}{end}": ("embed",) for name in ("encoder_embedding_norm", "embedding_norm", "encoder_norm", "final_norm")
       for end in ("", "_bias")}}
_CROSS = {"norm": ("embed",), "query": ("heads", "embed"), "key_value": ("heads", "embed"), "out": ("embed", "heads"),
          "norm_bias": ("embed",), "query_bias": ("heads",), "key_value_bias": ("heads",), "out_bias": ("embed",)}
_MAMBA = {"norm": ("embed",), "project_in": ("mlp", "embed"), "project_in_bias": ("mlp",), "conv": (None, None),
          "conv_bias": (None,), "step_bias": (None,), "decay_log": (None,), "skip": (None,), "gated_norm": (None,),
          "project_out": ("embed", "mlp"), "project_out_bias": ("embed",)}
_DRAFT_LAYER = {name: _LAYER[name] for name in ("qkv", "attention_out", "mlp_norm", "gate_up", "down", "query_norm",
                                                "key_norm", "qkv_bias")} | {"gate": ("heads", "embed")}
# Heads. "ids" are looked up by every device.
_READ = {"fuse": ("embed", None), "ids": (None,), "norm": ("embed",), "embedding": ("vocab", "embed"),
         "head": ("vocab", "embed"), "token_norm": ("embed",), "feature_norm": ("embed",), "input_norms": ("embed",)}
_DEEP = {"linear": ("embed", None), "bias": ("embed",), "residual": ("embed", None), "residual_bias": ("embed",),
         "vocabulary": ("vocab", "embed"), "vocabulary_bias": ("vocab",), "ids": (None,)}
_HEADS = {
    "Eagle3Head": _READ | {"fuse_norm": (None,)}, "EagleHead": _READ | {"fuse_bias": ("embed",)},
    "MtpHead": _READ | {"attention_norm": ("embed",)}, "PEagleHead": _READ | {"hidden": (None,)},
    "MedusaHead": _DEEP, "HydraHead": _DEEP, "Joining": _DEEP, "Prefix": _READ | {"attention_norm": ("embed",)},
    "DFlashHead": _READ | {"fused_norm": ("embed",)},
    "DSparkHead": {"first": ("vocab", None), "second": ("vocab", None), "confidence": (None,), "confidence_bias": (),
                   "ids": (None,)},
}
WEIGHTS = _HEADS | {
    "LayerWeights": _LAYER, "DecoderWeights": _VOCABULARY, "EncoderDecoderWeights": _VOCABULARY | _OF_ENCODERS,
    "CrossWeights": _CROSS, "Mamba2Layer": _MAMBA, "Mamba2Weights": _VOCABULARY, "DraftLayer": _DRAFT_LAYER,
}

# Keys and values of rows, by class and field; lists of them have an array a layer. Lengths are for all to read.
_KEYS_AND_VALUES = {"keys": ("batch", "kv_heads", None, None), "values": ("batch", "kv_heads", None, None)}
ROWS = {"KVCache": _KEYS_AND_VALUES | {"length": (None,)}, "InFlight": _KEYS_AND_VALUES, "Cross": _KEYS_AND_VALUES}


# By the names that files are read by: what is of no layer, and what is of one.
_STORED = (_VOCABULARY | _OF_ENCODERS,
           _MAMBA | _LAYER | {f"cross_{field}": names for field, names in _CROSS.items()})


def of_file(layer: Any, field: str) -> Names | None:
  """Logical names of a field of the weights as checkpoints are read, see `checkpoints.shards.Placement`; None without."""
  return _STORED[layer is not None].get(field)


def leaves(tree: Any, owner: Any = None, field: str | None = None) -> Iterator[tuple[str, str, jax.Array]]:
  """Every array of a pytree of dataclasses, tuples and dictionaries, in the order of `jax.tree.leaves`, with the name of
  the class that holds it and of the field; "" where no dataclass does."""
  if dataclasses.is_dataclass(tree):
    for part in dataclasses.fields(tree):
      if part.metadata.get("pytree_node", True):
        yield from leaves(getattr(tree, part.name), tree, part.name)
  elif isinstance(tree, dict):
    for key in sorted(tree):
      yield from leaves(tree[key], owner, field)
  elif isinstance(tree, (tuple, list)):
    for part in tree:
      yield from leaves(part, owner, field)
  elif tree is not None:
    yield type(owner).__name__ if owner is not None else "", field or "", tree


def names(kind: str, field: str, rank: int, first: int, batch: int | None = None) -> Names | None:
  """Logical names of the axes of one array; None for a weight that none has been given to.

  Args:
    kind, field: of `leaves`. rank: of the array. first: its first axis, if it has one.
    batch: rows of the state that holds it; None for weights. What is known of a class goes first; another array of a
      state whose first axis is as long has rows there. Were that wrong, the array would be divided for nothing, and
      no value would change.
  """
  if batch is None:
    given = WEIGHTS.get(kind, {}).get(field)
    return given if given is not None and len(given) == rank else None
  given = ROWS.get(kind, {}).get(field)
  if given is not None and len(given) == rank:
    return given
  return ("batch", *(None,) * (rank - 1)) if rank and first == batch else (None,) * rank
