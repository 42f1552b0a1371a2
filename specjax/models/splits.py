"""How a layer is divided among devices: its heads, its feed-forward and its experts, each over an axis of a mesh.

Every device runs the same layer over its own part. What leaves the attention and the feed-forward is then a sum over
devices (Megatron-LM, arXiv 1909.08053). `parallel.layout` runs the layer so; this says where the sums stand.
"""
import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Splits:
  """Mesh axes by part; None where every device has all of it.

  Attributes:
    attention: over which heads are divided. mlp: over which the feed-forward's width is, an expert's likewise.
    shared: over which the width of the expert that all tokens go through is. experts: over which experts are.
  """
  attention: str | None = None
  mlp: str | None = None
  shared: str | None = None
  experts: str | None = None


WHOLE = Splits()  # one device has all of a layer


def total(x: jax.Array, *axes: str | None) -> jax.Array:
  """The sum of what the devices along the axes have; `x` itself for those that are None."""
  divided = tuple(axis for axis in axes if axis is not None)
  return jax.lax.psum(x, divided) if divided else x


def first(count: int, axis: str | None) -> jax.Array | int:
  """Index of the first of this device's `count` entries of an axis that is divided."""
  return 0 if axis is None else jax.lax.axis_index(axis) * count
