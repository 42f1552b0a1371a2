"""What a step of a model that is divided among devices must send, in closed form.

Heads and feed-forwards are divided over `model`, so each layer ends two sums over its devices, of the residual stream
f[B, T, E] (Megatron-LM, arXiv 1909.08053); experts over `expert`, and their outputs are summed over both axes at once;
rows over `data`, which a step never crosses. The vocabulary is divided over `model`: an embedding is a sum of which one
device has the term. Of logits f[B, T, V] no more is sent than a draw needs: the greatest and its id; sums of blocks and
the block that is hit; for filters a few candidates of every device.

Bytes are those of a collective's result on one device, which is the shape that stands in the compiled program (HLO).
"""
from collections.abc import Iterable
import dataclasses

from specjax.models.config import DecoderConfig
from specjax.theory import hardware as hardware_lib

_AXES = ("data", "model", "expert")
_SCALAR = 4        # bytes of an f32 logit and of an i32 id
_BLOCK = 256       # ids of a block, and
_CANDIDATES = 128  # candidates of a device: see `sampling`
DRAWS = ("greedy", "sampled", "filtered")


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Sizes of the axes: data (rows), model (heads, feed-forward, vocabulary) and expert."""
  data: int = 1
  model: int = 1
  expert: int = 1

  @property
  def devices(self) -> int:
    return self.data * self.model * self.expert

  @property
  def text(self) -> str:
    """As `parallel.mesh.parse` reads it."""
    return ",".join(f"{axis}:{getattr(self, axis)}" for axis in _AXES if getattr(self, axis) > 1 or axis == "data")


@dataclasses.dataclass(frozen=True)
class Layout:
  """How parts lie on a mesh.

  Attributes:
    mesh: its sizes.
    attention: "heads" divides heads over `model`, and where there are more devices than key/value heads each of these
      is kept by several; "whole" has all heads on every device.
  """
  mesh: Mesh
  attention: str = "heads"

  def __post_init__(self):
    if self.attention not in ("heads", "whole"):
      raise ValueError(f"attention={self.attention!r}: allowed are 'heads' and 'whole'")

  @property
  def query_ways(self) -> int:
    """Devices that share the query heads."""
    return self.mesh.model if self.attention == "heads" else 1

  def key_ways(self, kv_heads: int) -> int:
    """Devices that share the key/value heads without keeping one twice."""
    return min(self.query_ways, kv_heads)

  def check(self, config: DecoderConfig, batch: int) -> None:
    """Raises ValueError for a dimension that does not divide, with the sizes that would."""
    mesh = self.mesh
    dims = [("data", "batch_size", batch), ("model", "vocab_size", config.vocab_size)]
    if not all(map(config.mixed, range(config.layers))):
      dims.append(("model", "mlp_width", config.mlp_width))
    if config.moe is not None:
      dims += [("model", "experts' width", config.moe.width), ("expert", "experts", config.moe.experts)]
      dims += [("model", "shared expert's width", config.moe.shared)] if config.moe.shared else []
    elif mesh.expert > 1:
      raise ValueError(f"mesh {mesh.text}: the model has no experts; leave the axis expert out")
    if self.attention == "heads":
      dims.append(("model", "heads", config.heads))
      if config.kv_heads % mesh.model and mesh.model % config.kv_heads:
        raise ValueError(f"mesh {mesh.text}: {config.kv_heads} key/value heads do not divide over model:{mesh.model}, "
                         f"nor the other way round; give a divisor or a multiple of {config.kv_heads}, or attention "
                         "'whole', which has all heads on every device")
    for axis, name, size in dims:
      if size % getattr(mesh, axis):
        way = f"a multiple of {mesh.data} rows" if axis == "data" else f"a divisor of {size} on this axis"
        raise ValueError(f"mesh {mesh.text}: {name}={size} does not divide over {axis}:{getattr(mesh, axis)}; "
                         f"give {way}")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind of operation that a step runs `count` times.

  Attributes:
    kind: as HLO names it, "all-reduce" or "all-gather".
    what: that is sent, in words.
    axes: of the mesh, over which.
    count: operations of a step.
    payload: bytes of the result of one operation on one device.
  """
  kind: str
  what: str
  axes: tuple[str, ...]
  count: int
  payload: int

  @property
  def bytes(self) -> int:
    """Of all its operations."""
    return self.count * self.payload


def collectives(config: DecoderConfig, layout: Layout | Mesh, batch: int, width: int, *, itemsize: int = 2,
                draw: str = "greedy") -> tuple[Collective, ...]:
  """What a step of [B, T] nodes sends.

  Args:
    config: of the target or of a draft model.
    layout: of its parts; a mesh alone divides heads.
    itemsize: bytes of an element of the residual stream.
    draw: "greedy", "sampled" from the whole law, or "filtered" by top-k or top-p. The search for a threshold beyond the
      candidates, two sums of [B, T] a halving, is not counted: few rows need it.

  Raises:
    ValueError: for a dimension that does not divide.
  """
  layout = Layout(layout) if isinstance(layout, Mesh) else layout
  layout.check(config, batch)
  mesh, mixed = layout.mesh, sum(map(config.mixed, range(config.layers)))
  nodes = batch // mesh.data * width
  residual = nodes * config.width * itemsize
  shared = mixed if config.moe is not None and config.moe.shared else 0
  found = [
      Collective("all-reduce", "embedding", ("model",), 1, residual),
      Collective("all-reduce", "attention", ("model",), config.layers if layout.query_ways > 1 else 0, residual),
      Collective("all-reduce", "feed-forward", ("model",), config.layers - mixed + shared, residual),
      Collective("all-reduce", "experts", ("model", "expert"), mixed, residual),
      *_head(mesh.model, nodes, config.vocab_size, draw)]
  return tuple(each for each in found if each.count and any(getattr(mesh, axis) > 1 for axis in each.axes))


def head_collectives(width: int, draft_vocab: int, mesh: Mesh, batch: int, nodes: int, *, divided: bool, fused: bool,
                     itemsize: int = 2, draw: str = "greedy") -> tuple[Collective, ...]:
  """What one pass of an EAGLE-3 head of `width` E sends.

  Args:
    mesh: of the target, whose divided embedding the head reads in any case.
    nodes: of each row.
    divided: whether the head's layer and draft ids are divided over `model` as well, as the target's are.
    fused: whether the pass fuses features of the target, as the first one does.
    itemsize, draw: as in `collectives`.

  Raises:
    ValueError: if draft ids that are to be divided do not.
  """
  if divided and draft_vocab % mesh.model:
    raise ValueError(f"mesh {mesh.text}: draft_vocab={draft_vocab} does not divide over model:{mesh.model}; give a "
                     f"divisor of {draft_vocab}, or a head that every device has whole")
  rows = batch // mesh.data * nodes
  parts = ["embedding"] + (["attention", "feed-forward"] if divided else []) + (
      ["fused features"] if divided and fused else [])
  found = [Collective("all-reduce", f"head: {part}", ("model",), 1, rows * width * itemsize) for part in parts]
  found += _head(mesh.model, rows, draft_vocab, draw, "head: ") if divided else ()
  return tuple(each for each in found if each.count and mesh.model > 1)


def collective_bytes(config: DecoderConfig, mesh: Layout | Mesh, batch: int, width: int, **options) -> dict[str, int]:
  """Bytes of a step's collectives by kind, summed over operations: what a compiled program's result shapes add up to.

  Args: as `collectives`.
  """
  return _by_kind(collectives(config, mesh, batch, width, **options))


def seconds(found: Iterable[Collective], mesh: Mesh, chips: hardware_lib.Slice) -> float:
  """Least time of collectives, one after the other, none hidden behind arithmetic (`Slice.all_reduce_seconds`)."""
  axes = ("model", "expert", "data")
  placed = dict(zip(axes, chips.place([getattr(mesh, axis) for axis in axes])))
  total = 0.0
  for each in found:
    group = tuple(1 for _ in chips.shape)
    for axis in each.axes:
      group = tuple(a * b for a, b in zip(group, placed[axis]))
    time = chips.all_reduce_seconds if each.kind == "all-reduce" else chips.all_gather_seconds
    total += each.count * time(group, each.payload)
  return total


def _head(model, nodes, vocab, draw, prefix=""):
  """Of logits that are divided over `model`."""
  if draw not in DRAWS:
    raise ValueError(f"draw={draw!r}: allowed are {', '.join(DRAWS)}")
  over, part = ("model",), vocab // model
  found = [("all-reduce", "greatest logit and its id", 2, 1)]
  if draw != "greedy":
    found = [("all-reduce", "greatest logit", 1, 1), ("all-gather", "sums of blocks", 1, model * -(-part // _BLOCK)),
             ("all-reduce", "the block that is hit", 1, _BLOCK)]
  if draw == "filtered":
    found += [("all-gather", "candidates", 1, model * min(_CANDIDATES, part)), ("all-reduce", "mass", 1, 1)]
  return tuple(Collective(kind, prefix + what, over, count, nodes * each * _SCALAR) for kind, what, count, each in found)


def _by_kind(found):
  total = {}
  for each in found:
    total[each.kind] = total.get(each.kind, 0) + each.bytes
  return total
