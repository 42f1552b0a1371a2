"""Meshes: devices in a grid whose axes have names, from what a flag says of it.

- `data`: rows of a batch are divided over it.
- `model`: heads, feed-forwards and the vocabulary are (tensor parallel).
- `expert`: the experts of a mixture are.
- `fsdp`: in training, the parameters and what the optimizer keeps of them are; rows as well.

An axis that is not named has one device.
"""
from collections.abc import Mapping, Sequence
import math

import jax

AXES = ("data", "fsdp", "expert", "model")  # the last one varies fastest: its devices are nearest to each other


def parse(text: str) -> dict[str, int]:
  """The sizes of axes from "data:2,model:4".

  Raises:
    ValueError: names the entry that is no axis:size, that is unknown or that stands twice.
  """
  sizes = {}
  for entry in filter(None, text.replace(" ", "").split(",")):
    name, _, size = entry.partition(":")
    if name not in AXES:
      raise ValueError(f"mesh={text}: {name!r} is no axis of a mesh; allowed are {', '.join(AXES)}, as in "
                       "data:2,model:4")
    if not (size.isascii() and size.isdecimal() and int(size)):
      raise ValueError(f"mesh={text}: {entry!r} must be axis:size with a size of 1 or more, as in data:2,model:4")
    if name in sizes:
      raise ValueError(f"mesh={text}: the axis {name!r} stands twice; give it one size")
    sizes[name] = int(size)
  if not sizes:
    raise ValueError("mesh= is empty; give axes and sizes, as in data:2,model:4, or leave it out for one device")
  return sizes


def make(sizes: Mapping[str, int] | str, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
  """A mesh of all devices, of every process.

  Args:
    sizes: of axes, or the text of `parse`.
    devices: those to use; all by default.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  sizes = parse(sizes) if isinstance(sizes, str) else dict(sizes)
  devices = jax.devices() if devices is None else list(devices)
  wanted = math.prod(sizes.values())
  text = ",".join(f"{name}:{size}" for name, size in sizes.items())
  if wanted != len(devices):
    more = ""
    if devices[0].platform == "cpu" and wanted > len(devices) and jax.process_count() == 1:
      more = f"; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes as many"
    raise ValueError(f"mesh={text} has {wanted} devices, and there are {len(devices)}: the sizes must multiply to that "
                     f"number{more}")
  shape = tuple(sizes.get(name, 1) for name in AXES)
  # The compiler places what lies between arguments and results; their places are ours.
  return jax.make_mesh(shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES), devices=devices)
