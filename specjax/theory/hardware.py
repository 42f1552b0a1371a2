"""Accelerators and slices of them, in public figures: memory, bandwidth, arithmetic and the links between chips.

All figures are peaks that vendors publish, of one chip: one JAX device, on a TPU v4 or v5p two cores. The network of a
slice is a torus of links between neighbours (TPU) or one switch that joins all (NVLink). How fast a group of chips can
add or gather follows from two numbers, the links of its worst-placed chip and the hops across it: "How to Scale Your
Model" (jax-ml/scaling-book), parts 2 and 3, and its part on GPUs.
"""
from collections.abc import Sequence
import dataclasses
import itertools
import math
import re

_V3D = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8),
        512: (8, 8, 8), 1024: (8, 8, 16)}
_V2D = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
# Half of what NCCL's cost model (src/graph/tuning.cc) gives a small all-reduce in a ring of 8: 3.6 + 14 x 0.47 us.
_NVLINK_LATENCY = 5e-6
_ICI_LATENCY = 1e-6  # of a hop: scaling-book, part 3


@dataclasses.dataclass(frozen=True)
class Hardware:
  """One kind of accelerator; every figure is of one chip.

  Attributes:
    name: as `find` takes it.
    memory_bytes: of its device memory. memory_bandwidth: bytes/s.
    flops: operations/s in bfloat16, dense; a multiply-add is two.
    link_bandwidth: bytes/s one way, all links of a chip together. links: how many they are; 1 into a switch.
    link_latency: seconds of a hop in a torus; of one exchange of a group through a switch.
    source: the public documents that the figures come from.
    cores: what the number in a slice's name counts for each chip (TPU v4 and v5p: TensorCores).
    shapes: chips of a slice -> its torus; {} where a switch joins the chips.
    ring: an axis of a torus is closed if its length is a multiple of this; `whole` says that all axes must be.
    switched: chips that one switch joins.
  """
  name: str
  memory_bytes: int
  memory_bandwidth: float
  flops: float
  link_bandwidth: float
  link_latency: float
  source: str
  links: int = 1
  cores: int = 1
  shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict, hash=False)
  ring: int = 0
  whole: bool = False
  switched: int = 8


def _gpu(name, memory, bandwidth, flops, link, source):
  return Hardware(name, int(memory), bandwidth, flops, link, _NVLINK_LATENCY, source)


def _tpu(name, memory, bandwidth, flops, link, source, cube):
  return Hardware(name, int(memory), bandwidth, flops, link, _ICI_LATENCY, source, links=6 if cube else 4,
                  cores=2 if cube else 1, shapes=_V3D if cube else _V2D, ring=4 if cube else 16, whole=cube, switched=0)


TABLE = {hardware.name: hardware for hardware in (
    _gpu("a100-80gb", 80e9, 2.039e12, 312e12, 300e9, "NVIDIA A100 80GB SXM datasheet: 2,039 GB/s, 312 TFLOPS, NVLink "
         "600 GB/s both ways"),
    _gpu("h100", 80e9, 3.35e12, 989.4e12, 450e9, "NVIDIA H100 SXM datasheet: 3.35 TB/s, 1,979 TFLOPS with sparsity, "
         "NVLink 900 GB/s both ways"),
    _gpu("h200", 141e9, 4.8e12, 989.4e12, 450e9, "NVIDIA H200 SXM datasheet: 4.8 TB/s, 1,979 TFLOPS with sparsity, "
         "NVLink 900 GB/s both ways"),
    _gpu("b200", 180e9, 8e12, 2.25e15, 900e9, "NVIDIA DGX and HGX B200 datasheets, an eighth: 1,440 GB, 64 TB/s, "
         "36 PFLOPS with sparsity, NVLink 14.4 TB/s both ways"),
    _tpu("v4", 32 * 2**30, 1.2e12, 275e12, 6 * 45e9, "Cloud TPU documentation, TPU v4: 32 GiB, 1200 GBps, 275 TFLOPS; "
         "links of 4.5e10 bytes/s one way: scaling-book, part 2", cube=True),
    _tpu("v5e", 16e9, 819e9, 197e12, 200e9, "Cloud TPU documentation, TPU v5e: 16 GB, 819 GBps, 197 TFLOPS, ICI "
         "400 GBps both ways", cube=False),
    _tpu("v5p", 95e9, 2.765e12, 459e12, 600e9, "Cloud TPU documentation, TPU v5p: 95 GB, 2765 GBps, 459 TFLOPS, ICI "
         "1200 GBps both ways", cube=True),
    _tpu("v6e", 32e9, 1.638e12, 918e12, 400e9, "Cloud TPU documentation, TPU v6e: 32 GB, 1638 GBps, 918 TFLOPS, ICI "
         "800 GBps both ways", cube=False))}
_ALIASES = {"v5litepod": "v5e", "trillium": "v6e"}


@dataclasses.dataclass(frozen=True)
class Slice:
  """Chips of one kind under one network.

  Attributes:
    name: as given. hardware: of every chip.
    shape: lengths of the torus' axes; (chips,) under a switch.
  """
  name: str
  hardware: Hardware
  shape: tuple[int, ...]

  @property
  def devices(self) -> int:
    """Chips."""
    return math.prod(self.shape)

  def place(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Lays axes of a mesh over the network, the first one best: for each its lengths along the axes of `shape`.

    Each takes what gives it most links and then fewest hops. Where two share an axis of the torus, the later one is
    taken to have its chips side by side as well, which flatters it.

    Raises:
      ValueError: a size that no lengths have as their product.
    """
    free, found = self.shape, []
    for size in sizes:
      lengths = [[n for n in range(1, axis + 1) if axis % n == 0] for axis in free]
      fitting = [each for each in itertools.product(*lengths) if math.prod(each) == size]
      if not fitting:
        raise ValueError(f"{self.name}: a mesh axis of {size} cannot be laid over chips in "
                         f"{'x'.join(map(str, self.shape))}, of which {'x'.join(map(str, free))} are free; give sizes "
                         "that divide these")
      best = max(fitting, key=lambda each: (self.links(each), -self.hops(each)))
      found.append(best)
      free = tuple(axis // n for axis, n in zip(free, best))
    return tuple(found)

  def links(self, group: Sequence[int]) -> int:
    """Links into a group that its worst-placed chip has: 2 along a closed axis, 1 along an open one."""
    if not self.hardware.shapes:
      return 1
    return sum(0 if n == 1 else 2 if self._closed(i, n) else 1 for i, n in enumerate(group))

  def hops(self, group: Sequence[int]) -> int:
    """Hops between the two chips of a group that are farthest apart; 1 through a switch."""
    if not self.hardware.shapes:
      return int(math.prod(group) > 1)
    return sum(n // 2 if self._closed(i, n) else n - 1 for i, n in enumerate(group))

  def all_gather_seconds(self, group: Sequence[int], result_bytes: float) -> float:
    """Least time in which every chip of a group has all `result_bytes`, of which it had its share.

    What it lacks comes in over its links: bytes * (n - 1) / n / (links * bandwidth of one) + hops * latency. A
    reduce-scatter takes the same.
    """
    count = math.prod(group)
    if count == 1:
      return 0.0
    bandwidth = self.hardware.link_bandwidth * self.links(group) / self.hardware.links
    return result_bytes * (count - 1) / count / bandwidth + self.hops(group) * self.hardware.link_latency

  def all_reduce_seconds(self, group: Sequence[int], result_bytes: float) -> float:
    """The same of a sum: a reduce-scatter and an all-gather."""
    return 2 * self.all_gather_seconds(group, result_bytes)

  def _closed(self, axis, length):
    hardware = self.hardware
    closed = all(n % hardware.ring == 0 for n in (self.shape if hardware.whole else (self.shape[axis],)))
    return closed and length == self.shape[axis]


def find(name: str) -> Slice:
  """A slice by its name: `h100` (one chip), `8xh100` (under one switch), `v5p-32` (32 cores: 16 chips) or `v6e-8`.

  Raises:
    ValueError: names what is known, for an accelerator or a size that is not.
  """
  text = name.strip().lower()
  several = re.fullmatch(r"([1-9]\d*)x(.+)", text)
  tpu = re.fullmatch(r"(v\w+|trillium)-([1-9]\d*)", text)
  kind = several[2] if several else tpu[1] if tpu else text
  hardware = TABLE.get(_ALIASES.get(kind, kind))
  if hardware is None:
    raise ValueError(f"hardware {name!r} is not known; known are {', '.join(TABLE)}, several GPUs as 8xh100, slices of "
                     "TPUs as v5p-32 or v6e-8")
  if several:
    if hardware.shapes:
      raise ValueError(f"hardware {name!r}: slices of TPUs are named by their type, such as {_slice_names(hardware)}")
    if int(several[1]) > hardware.switched:
      raise ValueError(f"hardware {name!r}: one switch joins at most {hardware.switched}; the network between hosts "
                       "is not in the table")
    return Slice(text, hardware, (int(several[1]),))
  if tpu is None:
    return Slice(text, hardware, (1,) * max(1, hardware.links // 2))
  chips = int(tpu[2]) / hardware.cores
  if chips not in hardware.shapes:
    raise ValueError(f"hardware {name!r} is no slice of {hardware.name}; there are {_slice_names(hardware)}"
                     f"{' (the number counts cores, two a chip)' if hardware.cores == 2 else ''}")
  return Slice(text, hardware, hardware.shapes[int(chips)])


def _slice_names(hardware):
  return ", ".join(f"{hardware.name}-{chips * hardware.cores}" for chips in hardware.shapes)
