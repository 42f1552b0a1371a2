"""Rules: which axis of a mesh a logical axis is divided over, and what is done where it does not divide.

One object a regime, in the manner of jax-llm-examples and of MaxText's logical axis rules: tensor parallel for latency,
rows alone for throughput, parameters as well for training. A dimension that its mesh axis does not divide is kept whole
on every device, and noted; a rule may forbid that.
"""
import dataclasses

import jax
from jax.sharding import PartitionSpec

from specjax.parallel import axes


@dataclasses.dataclass(frozen=True)
class Rules:
  """Pairs of a logical axis (see `axes`) and a mesh axis; a name without a pair is not divided.

  Attributes:
    pairs: name -> mesh axis, as a tuple, so that rules are hashable.
    required: names that must be divided: one that does not divide is an error.
  """
  pairs: tuple[tuple[str, str | tuple[str, ...]], ...]
  required: tuple[str, ...] = ()

  def axis(self, name: str | None) -> str | tuple[str, ...] | None:
    """The mesh axis of a logical name."""
    return dict(self.pairs).get(name)

  def size(self, name: str | None, mesh: jax.sharding.Mesh) -> int:
    """Devices that an axis of this name is divided among."""
    axis = self.axis(name)
    return 1 if axis is None else _size(axis, mesh)

  def spec(self, names: axes.Names, shape: tuple[int, ...], mesh: jax.sharding.Mesh, what: str = "an array",
           notes: list[str] | None = None) -> PartitionSpec:
    """Where an array of that shape lies.

    Args:
      names: of its axes. what: it is, for messages. notes: takes a line for every axis that is kept whole.

    Raises:
      ValueError: an axis of `required` does not divide.
    """
    spec, taken = [], set()
    for name, length in zip(names, shape, strict=True):
      axis = self.axis(name)
      count = 1 if axis is None else _size(axis, mesh)
      parts = axis if isinstance(axis, tuple) else (axis,)
      if count == 1 or taken & set(parts):
        spec.append(None)
      elif length % count:
        spec.append(None)
        self._whole(f"{what}: {name} of {length}", axis, count, name, notes)
      else:
        taken |= set(parts)
        spec.append(axis)
    return PartitionSpec(*spec)

  def divides(self, name: str, length: int, mesh: jax.sharding.Mesh, what: str, notes: list[str]) -> bool:
    """Whether `length` of a logical axis divides; arguments, notes and errors as in `spec`."""
    count = self.size(name, mesh)
    if length % count:
      self._whole(f"{what}: {length}", self.axis(name), count, name, notes)
    return count > 1 and length % count == 0

  def _whole(self, what, axis, count, name, notes):
    problem = f"{what} cannot be divided among {count} devices of the mesh axis {axis}"
    if name in self.required:
      raise ValueError(f"{problem}, and the rules require it; choose a size of {axis} that divides it, or rules "
                       f"without {name!r} in `required`")
    line = f"{problem}, so every device keeps all of it"
    if notes is not None and line not in notes:
      notes.append(line)


_ROWS = ("batch", ("data", "fsdp"))
TENSOR = Rules((_ROWS, ("heads", "model"), ("kv_heads", "model"), ("mlp", "model"), ("vocab", "model"),
                ("experts", "expert"), ("expert_mlp", "model"), ("shared_mlp", "model")))
REPLICATED = Rules((_ROWS,))  # a small drafter: every device along `model` drafts the same
TRAINING = Rules((*TENSOR.pairs, ("embed", "fsdp")))  # weights are divided along the residual stream, too


def without(rules: Rules, *names: str) -> Rules:
  """The same rules, with some logical axes not divided."""
  return dataclasses.replace(rules, pairs=tuple(pair for pair in rules.pairs if pair[0] not in names))


def _size(axis, mesh):
  total = 1
  for name in axis if isinstance(axis, tuple) else (axis,):
    total *= mesh.shape[name]
  return total
