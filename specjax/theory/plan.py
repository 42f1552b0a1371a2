"""Whether a model fits on a slice of accelerators, what a step costs there at best, and how good drafts must be to pay.

A step is bound by what it reads or by what it computes, whichever takes longer, and its collectives come on top:

  T(B, w) = max(bytes / bandwidth, operations / peak) + collectives

(roofline; `theory.collectives` for the last term). All are least times, from published peaks: no launch costs, no fixed
costs, and no collective hidden behind anything. A speculative step of w nodes takes T(B, w) and the draft's passes, so
that it must give (T(B, w) + T_draft) / T(B, 1) tokens to be worth its time.

Letters: B batch rows, T nodes of a step, N = T - 1 drafted ones, D depth of a draft, S committed tokens of a row.
"""
import dataclasses
import math
from collections.abc import Callable

from specjax.models import eagle3
from specjax.models.config import DecoderConfig
from specjax.theory import closed_forms
from specjax.theory import collectives as collectives_lib
from specjax.theory import hardware as hardware_lib
from specjax.theory import sizes


@dataclasses.dataclass(frozen=True)
class Draft:
  """What drafts.

  Attributes:
    config: an EAGLE-3 head, a draft model, or None for a lookup, which costs nothing.
    depth: D, tokens of the longest path, and passes of the drafter.
    nodes: N; D for a chain, more for a tree. A pass then goes over N / D of them.
    divided: whether its weights are divided over `model`; otherwise every device has all of it, and sends nothing but
      what it takes of its target's embedding.
  """
  config: eagle3.Eagle3Config | DecoderConfig | None
  depth: int
  nodes: int
  divided: bool = False

  def __post_init__(self):
    if self.depth < 1 or self.nodes < self.depth:
      raise ValueError(f"depth={self.depth}, nodes={self.nodes}: a draft has at least one token, and a tree at "
                       "least as many nodes as it is deep (--tree_nodes, --draft_tokens)")


@dataclasses.dataclass(frozen=True)
class Time:
  """Seconds of a step or of a draft; `total` is of its passes, each bound by the greater of memory and arithmetic."""
  memory: float
  arithmetic: float
  collectives: float
  total: float

  def __add__(self, other: "Time") -> "Time":
    return Time(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

  def times(self, count: int) -> "Time":
    """Of so many such passes."""
    return Time(*(count * value for value in dataclasses.astuple(self)))

  @property
  def bound(self) -> str:
    """What takes longest: "memory", "arithmetic" or "collectives"."""
    return max(("memory", "arithmetic", "collectives"), key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Speculation:
  """A speculative step beside a plain one; seconds.

  Attributes:
    plain, verify, draft: T(B, 1), T(B, w) and the draft's passes.
    depth: D.
  """
  plain: Time
  verify: Time
  draft: Time
  depth: int

  @property
  def tokens_needed(self) -> float:
    """Tokens of a step, the new one included, from which it is worth a plain step for each."""
    return (self.verify.total + self.draft.total) / self.plain.total

  @property
  def acceptance_needed(self) -> float | None:
    """Acceptance of each position, all alike, that gives so many; None if no acceptance does."""
    return acceptance_for(self.tokens_needed, self.depth)

  def speedup(self, acceptance: float) -> float:
    """Over plain decoding, if each position is accepted with this probability behind the ones before."""
    return (1 + closed_forms.expected_accepted(acceptance, self.depth)) / self.tokens_needed


@dataclasses.dataclass(frozen=True)
class Deployment:
  """A model on a slice.

  Attributes:
    model: its configuration. chips: the slice. layout: of its parts on a mesh.
    itemsize: bytes of a weight and of a cached element.
    memory_efficiency, flops_efficiency: shares of the published peaks that are reached.

  Raises:
    ValueError: for a mesh of another number of devices, a share outside (0, 1], or axes that cannot be laid over the
      network.
  """
  model: DecoderConfig
  chips: hardware_lib.Slice
  layout: collectives_lib.Layout
  itemsize: int = 2
  memory_efficiency: float = 1.0
  flops_efficiency: float = 1.0

  def __post_init__(self):
    mesh = self.layout.mesh
    if mesh.devices != self.chips.devices:
      raise ValueError(f"mesh {mesh.text} has {mesh.devices} devices, and {self.chips.name} has {self.chips.devices}; "
                       f"give sizes whose product is {self.chips.devices}")
    for name in ("memory_efficiency", "flops_efficiency"):
      if not 0 < getattr(self, name) <= 1:
        raise ValueError(f"{name}={getattr(self, name)}: a share of the peak is above 0 and at most 1")
    self.chips.place([mesh.model, mesh.expert, mesh.data])

  def device_bytes(self, batch: int, length: int, width: int, draft: Draft | None = None) -> dict[str, int]:
    """Bytes that one device holds while it decodes, by what they are for, with their total.

    Args:
      batch: B of all devices together. length: S, slots of a row. width: T.
      draft: what drafts; None for plain decoding.

    Returns:
      weights, cache, in_flight (keys and values of the nodes), activations (an estimate: residual stream, the widest
      layer, logits and their law in f32), draft_weights, draft_cache and total. Prefill is not in it: chunks bound it.

    Raises:
      ValueError: for a dimension that does not divide.
    """
    self.layout.check(self.model, batch)
    c, mesh, rows = self.model, self.layout.mesh, batch // self.layout.mesh.data
    keep = self.layout.key_ways(c.kv_heads)
    share = _weights(sizes.parameters(c), self.layout, c.kv_heads, experts=1.0)
    inner = 2 * (c.moe.chosen * c.moe.width if c.moe else c.mlp_width) // mesh.model
    heads = (c.heads // self.layout.query_ways + 2 * c.kv_heads // keep) * c.head_width
    found = {
        "weights": share * self.itemsize,
        "cache": rows * sizes.cache_bytes(c, length, itemsize=self.itemsize) // keep,
        "in_flight": rows * width * sizes.kv_bytes(c, itemsize=self.itemsize) // keep,
        "activations": rows * width * ((2 * c.width + heads + inner) * self.itemsize + 8 * c.vocab_size // mesh.model),
        "draft_weights": 0, "draft_cache": 0}
    if draft is not None and draft.config is not None:
      layout, kv, weights, per_token = self._draft_parts(draft)
      found["draft_weights"] = _weights(weights, layout, kv, experts=1.0, embedding=True) * self.itemsize
      found["draft_cache"] = rows * (length + draft.nodes) * per_token // layout.key_ways(kv)
      if isinstance(draft.config, eagle3.Eagle3Config):
        features = draft.config.target_width * len(draft.config.features)
        found["activations"] += rows * width * features * self.itemsize
    found = {name: int(size) for name, size in found.items()}
    return found | {"total": sum(found.values())}

  def fits(self, total: int, reserve: float = 0.1) -> bool:
    """Whether so many bytes leave a share of a device's memory to the runtime and to fragmentation."""
    return total <= (1 - reserve) * self.chips.hardware.memory_bytes

  def step(self, batch: int, length: int, width: int, *, draw: str = "greedy") -> Time:
    """T(B, w): a pass of the target over [B, T] nodes with S committed tokens a row; arguments as of `collectives`."""
    sent = collectives_lib.collectives(self.model, self.layout, batch, width, itemsize=self.itemsize,
                                       draw=draw)
    return self._decoder_pass(self.model, self.layout, batch, length, width, sent)

  def draft(self, draft: Draft, batch: int, length: int) -> Time:
    """The passes of a draft: the first over what the last step may have accepted, D + 1 tokens, the others over the
    nodes of a level."""
    if draft.config is None:
      return Time(0.0, 0.0, 0.0, 0.0)
    first = self._draft_pass(draft, batch, length, draft.depth + 1, first=True)
    return first + self._draft_pass(draft, batch, length, math.ceil(draft.nodes / draft.depth)).times(draft.depth - 1)

  def speculation(self, draft: Draft, batch: int, length: int, width: int | None = None, **options) -> Speculation:
    """A step of `width` nodes, the draft's own by default, beside a plain one; options as of `step`."""
    return Speculation(self.step(batch, length, 1, **options),
                       self.step(batch, length, draft.nodes + 1 if width is None else width, **options),
                       self.draft(draft, batch, length), draft.depth)

  def break_even_batch(self, draft: Draft, length: int, acceptance: float, *, limit: int = 4096,
                       width: int | None = None) -> int | None:
    """Batch from which on drafting no longer pays at an acceptance of each position; None if it pays up to `limit`.

    Whether the batch fits in memory is another question. Mixtures of experts may lose at small batches, win at larger
    ones and lose again: this is the last crossing.
    """
    wins = lambda rows: self.speculation(draft, rows * data, length, width).speedup(acceptance) > 1
    data = self.layout.mesh.data
    grid = [2 ** i for i in range(max(1, (limit // data).bit_length()))]
    won = [rows for rows in grid if wins(rows)]
    if not won:
      return data
    if won[-1] == grid[-1]:
      return None
    return data * _bisect(wins, won[-1], 2 * won[-1])

  def _decoder_pass(self, config, layout, batch, length, width, sent):
    rows, mesh = batch // layout.mesh.data, layout.mesh
    nodes, each, keep = rows * width, sizes.parameters(config), layout.key_ways(config.kv_heads)
    read = _weights(each, layout, config.kv_heads, experts=sizes.expert_share(config, nodes), embedding=each.tied)
    read = read * self.itemsize + rows * sizes.cache_bytes(config, length, itemsize=self.itemsize) / keep
    used = _weights(dataclasses.replace(each, rest=0, experts=each.chosen), layout, config.kv_heads, experts=1.0,
                    embedding=each.tied)
    seen = 4 * config.heads * config.head_width * sizes.cached_tokens(config, length) / layout.query_ways
    return self._time(read, nodes * (2 * used + seen), collectives_lib.seconds(sent, mesh, self.chips))

  def _draft_pass(self, draft, batch, length, width, *, first=False):
    layout, kv, each, per_token = self._draft_parts(draft)
    c, rows = draft.config, batch // layout.mesh.data
    if isinstance(c, DecoderConfig):
      sent = collectives_lib.collectives(c, layout, batch, width, itemsize=self.itemsize)
      return self._decoder_pass(c, layout, batch, length, width, sent)
    weights = _weights(each if first else dataclasses.replace(each, fuse=0), layout, kv, experts=1.0)
    sent = collectives_lib.head_collectives(c.shape.width, c.draft_vocab, self.layout.mesh, batch, width,
                                            divided=draft.divided, fused=first, itemsize=self.itemsize)
    seen = 4 * c.shape.heads * c.shape.head_width * length / layout.query_ways
    return self._time(weights * self.itemsize + rows * length * per_token / layout.key_ways(kv),
                      rows * width * (2 * weights + seen),
                      collectives_lib.seconds(sent, self.layout.mesh, self.chips))

  def _draft_parts(self, draft):
    """Its layout, key/value heads, parameters, and bytes of a cached token."""
    mesh = self.layout.mesh
    whole = collectives_lib.Layout(collectives_lib.Mesh(data=mesh.data, model=1))
    layout = collectives_lib.Layout(dataclasses.replace(mesh, expert=1)) if draft.divided else whole
    if isinstance(draft.config, DecoderConfig):
      return (layout, draft.config.kv_heads, sizes.parameters(draft.config),
              sizes.kv_bytes(draft.config, itemsize=self.itemsize))
    shape = draft.config.shape
    return (layout, shape.kv_heads, sizes.eagle3_parameters(draft.config),
            2 * shape.kv_heads * shape.head_width * self.itemsize)

  def _time(self, read, computed, sent):
    hardware = self.chips.hardware
    memory = read / (hardware.memory_bandwidth * self.memory_efficiency)
    arithmetic = computed / (hardware.flops * self.flops_efficiency)
    return Time(memory, arithmetic, sent, max(memory, arithmetic) + sent)


def acceptance_for(tokens: float, depth: int) -> float | None:
  """The acceptance a of each position at which a draft of `depth` gives `tokens` a step, the new one included:
  1 + a + ... + a^depth = tokens; 0 for at most one token, None beyond depth + 1."""
  if tokens <= 1:
    return 0.0
  if tokens > depth + 1:
    return None
  low, high = 0.0, 1.0
  for _ in range(60):
    middle = (low + high) / 2
    if 1 + closed_forms.expected_accepted(middle, depth) < tokens:
      low = middle
    else:
      high = middle
  return high


def _weights(each: sizes.Parameters, layout, kv_heads, *, experts, embedding=True) -> float:
  """Weights of one device: each part by the devices that share it, experts by their `experts` share."""
  mesh = layout.mesh
  divided = each.mlp + each.head + each.fuse + (each.embedding if embedding else 0)
  return (each.queries / layout.query_ways + each.keys / layout.key_ways(kv_heads) + divided / mesh.model +
          each.experts * experts / (mesh.model * mesh.expert) + each.router + each.rest)


def _bisect(wins: Callable[[int], bool], low: int, high: int) -> int:
  """The least number above `low`, which wins, that does not; `high` does not."""
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if wins(middle) else (low, middle)
  return high
