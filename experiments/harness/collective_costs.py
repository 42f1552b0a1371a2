"""What a step sends between devices: bytes as compiled beside the closed form, milliseconds beside those of the step."""
import dataclasses
import functools
import time

import jax
from jax.sharding import PartitionSpec
import jax.numpy as jnp
import numpy as np

from experiments.harness import text_table
from specjax import drivers
from specjax import proposers
from specjax import sampling
from specjax import vocabulary
from specjax.parallel import compiled
from specjax.theory import collectives as theory
from specjax.verifiers import point

# By the names that operations have in a program: see `models.decoder`. The first that fits counts.
_PARTS = (("/attention/", "attention"), ("/experts/", "experts"), ("/mlp/", "feed-forward"), ("jit(_take)", "embedding"),
          ("", "greatest logit and its id"))


@dataclasses.dataclass(frozen=True)
class Sent:
  """Of one part of a step: operations and bytes of their results on a device, as compiled and in closed form."""
  what: str
  kind: str
  count: int
  bytes: int
  expected_count: int
  expected_bytes: int


def sent(target, batch: int, width: int) -> list[Sent]:
  """The collectives of a greedy pass over [B, T] nodes, part by part.

  Args:
    target: a decoder on a mesh.
  """
  program = _pass.lower(target, *_nodes(target, batch, width)).compile().as_text()
  found = {}
  for one in compiled.collectives(program):
    what = next(what for part, what in _PARTS if part in one.name)
    found.setdefault((what, one.kind), []).append(one.size)
  mesh = target.layout.mesh.shape
  stored = dataclasses.replace(target.config, kv_heads=target.config.kv_heads // target.layout.repeated)
  wanted = {(each.what, each.kind): each for each in theory.collectives(
      stored, theory.Mesh(mesh["data"], mesh["model"], mesh["expert"]), batch, width,
      itemsize=target.weights.embedding.dtype.itemsize)}
  rows = []
  for what, kind in dict.fromkeys((*wanted, *found)):
    sizes, each = found.get((what, kind), []), wanted.get((what, kind))
    rows.append(Sent(what, kind, len(sizes), sum(sizes), each.count if each else 0, each.bytes if each else 0))
  return rows


@dataclasses.dataclass(frozen=True)
class Times:
  """Medians of interleaved runs, ms: a plain step, and its collectives alone, one behind the other."""
  batch: int
  step: float
  collectives: float

  @property
  def share(self) -> float:
    """Of the collectives in the step, if none is hidden behind arithmetic."""
    return self.collectives / self.step


def times(target, batch: int, repeats: int, length: int) -> Times:
  """Times plain steps of `batch` rows at about `length` tokens, and the sums that they hold."""
  proposer = proposers.Plain()
  prompts = [[(row + place) % 16 for place in range(length)] for row in range(batch)]
  state = drivers.start(target, proposer, prompts, max_new_tokens=2 * repeats + 16, eos_ids=())
  only = _only(target, batch)
  x = jnp.ones((target.config.width, batch), target.weights.embedding.dtype)
  found = [], []
  for turn in range(repeats + 1):  # the first one compiles
    before = state.tokens.shape
    state = jax.block_until_ready(drivers.make_room(target, proposer, state))
    if state.tokens.shape != before:  # in a bucket of its own, which compiles as well
      state = jax.block_until_ready(drivers.advance(target, proposer, state, np.int32(1), verifier=point.Point()))
    begin = time.perf_counter()
    state = jax.block_until_ready(drivers.advance(target, proposer, state, np.int32(1), verifier=point.Point()))
    middle = time.perf_counter()
    jax.block_until_ready(only(x))
    if turn:
      found[0].append(middle - begin)
      found[1].append(time.perf_counter() - middle)
  return Times(batch, *(float(np.median(each)) * 1e3 for each in found))


def table_of_bytes(sent: list[Sent], batch: int, nodes: int) -> text_table.Table:
  """Part by part, and the sum."""
  rows = [(each.what, each.kind, f"{each.count}", f"{each.bytes:,}", f"{each.expected_count}",
           f"{each.expected_bytes:,}") for each in sent]
  total = lambda name: sum(getattr(each, name) for each in sent)
  rows.append(("all", "", f"{total('count')}", f"{total('bytes'):,}", f"{total('expected_count')}",
               f"{total('expected_bytes'):,}"))
  return text_table.Table(f"Sent in a greedy pass of {batch} rows of {nodes} nodes, bytes of results on a device",
                          ("part", "kind", "operations", "bytes", "closed form", "bytes there"), rows)


def table_of_times(times: list[Times]) -> text_table.Table:
  """A line a batch."""
  return text_table.Table("A plain step, medians of interleaved runs",
                          ("batch", "step ms", "its collectives alone ms", "share"),
                          [(f"{each.batch}", f"{each.step:.2f}", f"{each.collectives:.2f}", f"{each.share:.0%}")
                           for each in times])


@jax.jit
def _pass(target, tokens, positions, mask, cache):
  with vocabulary.divided(target.layout):
    return sampling.argmax(target.logits(target.forward(tokens, positions, mask, cache).hidden))


def _nodes(target, batch, width):
  tokens = jnp.zeros((batch, width), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
  cache = jax.jit(lambda: target.layout.hold_rows(target.init_cache(batch, 256), batch))()
  return tokens, positions, mask, cache


def _only(target, batch):
  """A program of the sums of a plain step alone, each of what the one before gave."""
  layout, splits, config = target.layout, target.layout.splits, target.config
  rows = layout.rules.axis("batch") if batch % layout.rules.size("batch", layout.mesh) == 0 else None
  axes = []
  for layer in range(config.layers):
    experts = (splits.experts, splits.mlp) if config.mixed(layer) else (splits.mlp,)
    axes += [(splits.attention,), experts]
  axes = [tuple(axis for axis in names if axis is not None) for names in axes]

  def run(x):
    for names in filter(None, axes):
      x = jax.lax.psum(x, names) * 0.5
    return x

  place = PartitionSpec(None, rows)
  return jax.jit(functools.partial(jax.shard_map, mesh=layout.mesh, in_specs=place, out_specs=place, check_vma=False)(run))
