"""From the tensors of a checkpoint to a decoder's fused matrices, whatever the file format.

A format says how its tensors are named and how their rows are read (`fields.TensorSource`). This module knows where
each one goes, refuses a missing, extra or misshapen tensor by name, and fills each destination a few rows at a time
straight into the memory that the weights keep: loading needs one copy of the weights, or of those of their shards that
this process's devices hold, and two small blocks of rows.
"""
import concurrent.futures
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import fields
from specjax.checkpoints import parts
from specjax.checkpoints import shards
from specjax.checkpoints.errors import CheckpointError
from specjax.models.config import DecoderConfig
from specjax.models.weights import DecoderWeights, LayerWeights

_THREADS = 2


def places(config: DecoderConfig, names: Mapping[str, str], *, interleaved: bool = False, by_head: bool = False,
           transposed: bool = False, norm_offset: float = 0.0) -> dict[str, fields.Place]:
  """The table of a decoder: tensor name -> place, in the order in which the rows of a destination follow each other.

  Args:
    config: of the decoder; it says which parts there are (see `parts`).
    names: part -> name of the tensor, `{}` for the layer's number, and a second one for the expert's. A name for "qkv",
      "qkv_bias", "gate_up", "experts_gate_up" or "experts_down" says that its parts are stored as one; one for
      "experts_gate" that they are for all experts, gates and ups apart.
    interleaved: query and key rows are stored for even-odd rotary pairs and go to the half layout.
    by_head, transposed: of fused query, key and value rows, and of the matrices of layers; see `fields.Place`.
    norm_offset: `fields.Place.added` of norms.

  Returns:
    Every tensor that the checkpoint must hold.
  """
  table = {}
  for layer in (None, *range(config.layers)):
    mixed = layer is not None and config.mixed(layer)
    for part, field, start, shape in parts.parts(config, names, outside=layer is None, mixed=mixed):
      part, _, expert = part.partition(".")
      heads = {"query": config.heads, "key": config.kv_heads}.get(part.removesuffix("_bias"), 0) if interleaved else 0
      table[names[part].format(layer, expert)] = fields.Place(
          field, layer, start, shape[::-1] if transposed and layer is not None else shape, interleaved_heads=heads,
          by_head=config.heads if by_head and field in ("qkv", "qkv_bias") else 0,
          transposed=transposed and layer is not None and len(shape) == 2,
          added=norm_offset if field.endswith("norm") else 0.0,
          stacked=config.moe.experts if expert else 0, half={"experts_gate": 0, "experts_up": 1}.get(part))
  return table


def check(table: Mapping[str, fields.Place], source: fields.TensorSource, *, ignored=frozenset(),
          hints: Mapping[str, str] = {}):
  """Raises CheckpointError naming the first tensor that is missing, extra or misshapen.

  Args:
    table: what must be there.
    source: what is there.
    ignored: names that may be there and are not read.
    hints: name -> what an extra tensor of that name means, for the message.
  """
  for name, place in table.items():
    if name not in source.shapes:
      raise CheckpointError(f"{source.path}: tensor {name!r} is missing (shape {place.shape} expected): the checkpoint "
                            "is incomplete or of another family than its configuration says")
    if tuple(source.shapes[name]) != place.shape:
      raise CheckpointError(f"{source.path}: tensor {name!r} has shape {tuple(source.shapes[name])}; the configuration "
                            f"asks for {place.shape}")
  for name in source.shapes:
    if name not in table and name not in ignored:
      why = hints.get(name, "nothing of this family uses it, so the model would not be the one that was saved")
      raise CheckpointError(f"{source.path}: extra tensor {name!r} of shape {tuple(source.shapes[name])}: {why}")


def check_equal(source: fields.TensorSource, name: str, other: str) -> None:
  """Raises CheckpointError unless two tensors of one checkpoint are equal, shapes included."""
  shape = tuple(source.shapes[name])
  if shape != tuple(source.shapes[other]):
    raise CheckpointError(f"{source.path}: tensor {name!r} has shape {shape}; it is declared to be {other!r}, which "
                          f"has {tuple(source.shapes[other])}")
  for start, stop in fields.chunks(0, shape[0], math.prod(shape[1:])):
    if not np.array_equal(source.rows(name, start, stop), source.rows(other, start, stop)):
      raise CheckpointError(f"{source.path}: tensor {name!r} differs from {other!r} (rows {start} to {stop}) although "
                            "the configuration ties them: set tie_word_embeddings to false, or drop the tensor")


def assemble(config: DecoderConfig, table: Mapping[str, fields.Place], source: fields.TensorSource,
             dtype=jnp.float32, place: shards.Placement | shards.ByConfig | None = None) -> DecoderWeights:
  """Reads every tensor of a checked table into its place.

  Args:
    config: of the decoder.
    table: from `places`; `check` has passed.
    source: the open checkpoint.
    dtype: of the weights kept.
    place: the sharding of each field; the default device when None. This process reads what its own devices hold, each
      shard once however many of them share it, and no other bytes (GGUF: whole blocks of a quantised row).

  Returns:
    The weights. On CPU they share memory with numpy buffers that nobody else holds.

  Raises:
    CheckpointError: a tensor cannot be read, or a field cannot have the sharding that `place` gives it.
  """
  if hasattr(place, "of"):
    place = place.of(config)
  built = read(table, source, dtype, place)
  layers = tuple(
    LayerWeights(**{field.name: built.get((layer, field.name)) for field in dataclasses.fields(LayerWeights)})
    for layer in range(config.layers))
  outside = {field.name: built.get((None, field.name)) for field in dataclasses.fields(DecoderWeights)}
  return DecoderWeights(**(outside | {"layers": layers}))


def read(table: Mapping[str, fields.Place], source: fields.TensorSource, dtype,
         place: shards.Placement | None = None) -> dict[tuple[Any, str], jax.Array]:
  """The fields of a checked table by (layer, field); arguments and errors as in `assemble`."""
  # One block of memory for a layer: large enough for the system's huge pages, which halve the cost of touching it.
  blocks = {}
  for name, to in table.items():
    key = to.field if to.layer is None else to.layer
    blocks.setdefault(key, {}).setdefault((to.layer, to.field), []).append((name, to))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    # The largest (the embedding, the head) come first, so that no thread is left alone with one at the end.
    built = {}
    for block in pool.map(lambda block: _build_block(block, source, dtype, place), blocks.values()):
      built.update(block)
  return built


def _build_block(tensors, source, dtype, place):
  """Fills the fields of one block: {key: [(tensor name, its place), ...]} -> {key: array on the device}."""
  shapes = {key: fields.shape(those) for key, those in tensors.items()}
  placed = {key: shards.sharding(place, *key, shape) for key, shape in shapes.items()}
  shardings, orders = ({key: each[i] for key, each in placed.items()} for i in range(2))
  shapes |= {key: order.shape(shapes[key]) for key, order in orders.items() if order is not None}
  wanted = [(key, box) for key, shape in shapes.items() for box in shards.boxes(shardings[key], shape)]
  filled = {key: {} for key in tensors}
  for (key, box), buffer in zip(wanted, shards.buffers([box for _, box in wanted], dtype)):
    fields.fill(buffer, box, source, tensors[key], orders[key])
    filled[key][box] = buffer
  built = {key: shards.array(shardings[key], shape, filled[key], dtype) for key, shape in shapes.items()}
  # What is still on its way to an accelerator holds its block in the host's memory.
  return built if place is None else jax.block_until_ready(built)
