"""How a target lies on a mesh: what the step asks for while it is traced.

A decoder's layers run under `jax.shard_map`: query, key and value are one matrix, gate and up as well, and only with
their rows in the order of `row_orders` does a device's part hold whole heads with their keys and values. A layer then
costs two sums of [E, B * T], one behind the attention and one behind the feed-forward, and nothing else travels.
Everything around the layers is left to the compiler, which follows the places of weights and caches.

Rows of a batch are divided over `data` in caches and in all that is computed of them. What a step decides (tokens,
lengths, ends, counters) is on every device alike: of logits that are divided, the draw is one sum over devices, of which
all have the result; where logits are whole, devices compute the same from the same. No device takes an argmax of logits
that others do not have.

Letters as in `models.decoder`.
"""
import dataclasses
import functools

import jax
from jax.sharding import NamedSharding, PartitionSpec
import jax.numpy as jnp
import numpy as np

from specjax import vocabulary
from specjax.models import splits as splits_lib
from specjax.models.config import DecoderConfig
from specjax.parallel import axes
from specjax.parallel import processes
from specjax.parallel.rules import Rules


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where a target and the states of its rows lie. Static: another layout is another program.

  Attributes:
    mesh: all devices. rules: of this target: names that do not divide have no pair.
    splits: what layers of a decoder are divided over; `splits.WHOLE` for other targets, which the compiler divides.
    repeated: times that every key/value head stands in the weights, so that each device has one of its own.
    vocab: entries of logits, padding included: those of the head that is divided, or of that whose drafts are judged.
    notes: what is kept whole on every device although its rule would divide it.
  """
  mesh: jax.sharding.Mesh
  rules: Rules
  splits: splits_lib.Splits = splits_lib.WHOLE
  repeated: int = 1
  vocab: int = 0
  notes: tuple[str, ...] = ()

  def sharding(self, names: axes.Names, shape: tuple[int, ...]) -> NamedSharding:
    """Of an array with these logical names."""
    return NamedSharding(self.mesh, self.rules.spec(names, shape, self.mesh))

  def weights(self, tree):
    """The shardings of a pytree of weights, arrays or their shapes; what has no name is on every device."""
    found = []
    for kind, field, x in axes.leaves(tree):
      names = axes.names(kind, field, len(x.shape), x.shape[0] if x.shape else 0)
      found.append(self.sharding(names or (None,) * len(x.shape), x.shape))
    return jax.tree.unflatten(jax.tree.structure(tree), found)

  def rows(self, tree, batch: int):
    """The shardings of caches and of drafters' states of `batch` rows: see `axes.names`."""
    found = []
    for kind, field, x in axes.leaves(tree):
      names = axes.names(kind, field, len(x.shape), x.shape[0] if x.shape else 0, batch)
      found.append(self.sharding(names, x.shape))
    return jax.tree.unflatten(jax.tree.structure(tree), found)

  def hold_rows(self, tree, batch: int):
    """Caches and drafters' states, kept where they belong; inside jit."""
    return jax.lax.with_sharding_constraint(tree, self.rows(tree, batch))

  def hold_everywhere(self, tree):
    """What every device has; inside jit."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec()))

  def everywhere(self, tree):
    """Arrays that every device, and so every process, has whole."""
    return _everywhere(tree, self)

  def put(self, tree):
    """Arrays of this process, the same in every one, on every device."""
    return processes.place(tree, NamedSharding(self.mesh, PartitionSpec()))

  def fit_logits(self, logits: jax.Array, known: int) -> jax.Array:
    """Logits f[..., R] of all rows of a head as f[..., V], V of `vocab`, those of ids from `known` on minus infinity.
    Cut to the ids that there are, a vocabulary would no longer divide."""
    rows = logits.shape[-1]
    if rows != self.vocab:
      fill = [(0, 0)] * (logits.ndim - 1) + [(0, max(self.vocab - rows, 0))]
      logits = jnp.pad(logits[..., :self.vocab], fill, constant_values=-jnp.inf)
    logits = jnp.where(jnp.arange(self.vocab) < known, logits, -jnp.inf) if known < self.vocab else logits
    if logits.ndim != 3:
      return logits
    return jax.lax.with_sharding_constraint(logits, self.sharding(("batch", None, "vocab"), logits.shape))

  def by_parts(self, function, divided, whole):
    """See `vocabulary.Layout`."""
    rows, axis = self._batch(divided[0].shape[0]), self.rules.axis("vocab")
    size = self.vocab // self.rules.size("vocab", self.mesh)

    def run(divided, whole):
      first = 0 if axis is None else jax.lax.axis_index(axis) * size
      part = vocabulary.Part(first=first, size=size, axis=axis)
      with vocabulary.divided(None):  # a part is whole to whoever looks at it
        return function(part, *divided, *whole)

    places = tuple(PartitionSpec(rows, *(None,) * (x.ndim - 2), axis) for x in divided)
    # Results are equal on all parts by sums, maxima and what all have joined, which the check of that does not follow.
    return jax.shard_map(run, mesh=self.mesh, in_specs=(places, tuple(PartitionSpec(rows) for _ in whole)),
                         out_specs=PartitionSpec(rows), check_vma=False)(divided, whole)

  def divided(self, block):
    """A decoder's `block(c, layer, x, cos, sin, visible, mask, cached_keys, cached_values, before)` as one that runs over
    the mesh: arguments and results are those of the whole layer."""

    def run(c, layer, x, cos, sin, visible, mask, cached_keys, cached_values, before=None):
      rows, heads = self._batch(mask.shape[0]), self.splits.attention
      of_rows = lambda x: PartitionSpec(rows, *(None,) * (x.ndim - 1))
      kept, columns = PartitionSpec(rows, heads), PartitionSpec(None, rows)
      given = (layer, x, cos, sin, visible, mask, cached_keys, cached_values, before)
      places = (jax.tree.map(lambda s: s.spec, self.weights(layer)), columns, cos if cos is None else columns,
                sin if sin is None else columns, of_rows(visible), of_rows(mask), kept, kept,
                None if before is None else (kept, kept))
      mixed = layer.router is not None
      # Loops over experts differ between devices until they are summed, which the check of that does not follow.
      call = jax.shard_map(functools.partial(block, self.part(c), splits=self.splits), mesh=self.mesh, in_specs=places,
                           out_specs=(columns, kept, kept, (PartitionSpec(rows), columns) if mixed else None),
                           check_vma=not mixed)
      return call(*given)

    return run

  def _batch(self, rows):
    """The mesh axis over which so many rows are divided."""
    return self.rules.axis("batch") if rows % self.rules.size("batch", self.mesh) == 0 else None

  def part(self, c: DecoderConfig) -> DecoderConfig:
    """The configuration of a device's part of a layer."""
    if self.splits.attention is None:
      return c
    count = self.mesh.shape[self.splits.attention]
    return dataclasses.replace(c, heads=c.heads // count, kv_heads=c.kv_heads // count)


@functools.partial(jax.jit, static_argnames="layout")
def _everywhere(tree, layout):
  return layout.hold_everywhere(tree)


def of_decoder(config: DecoderConfig, mesh: jax.sharding.Mesh, rules: Rules,
               vocab: int | None = None) -> tuple[Layout, DecoderConfig]:
  """The layout of a decoder, and its configuration there: key/value heads are repeated where there are fewer of them
  than devices.

  Args:
    vocab: entries of its logits; by default the rows of its head if they are divided, the known ids otherwise.

  Raises:
    ValueError: what the rules require does not divide.
  """
  notes = []
  whole = lambda name, length, what: not rules.divides(name, length, mesh, f"{config.family}: {what}", notes)
  dropped, repeated = [], 1
  count = rules.size("heads", mesh)
  if count > config.kv_heads and count % config.kv_heads == 0 and config.heads % count == 0:
    repeated = count // config.kv_heads
  if config.qk_norm == "whole" and count > 1:
    why = f"{config.family}: queries and keys are normed over all heads, so every device keeps all heads"
    if "heads" in rules.required:
      raise ValueError(f"{why}, and the rules require heads to be divided; leave them out of what must be")
    notes.append(why)
    attention = False
  else:
    attention = not (whole("heads", config.heads, "heads") or whole("heads", config.kv_heads * repeated, "key/value heads"))
  if not attention:
    repeated, dropped = 1, ["heads", "kv_heads"]
  moe = config.moe
  if moe is None and "experts" in rules.required:
    raise ValueError(f"{config.family}: the rules require experts to be divided, and there are none")
  sizes = {"mlp": (config.mlp_width, "feed-forward width"), "vocab": (config.vocab_size, "vocabulary"),
           "experts": (moe.experts if moe else 0, "experts"), "expert_mlp": (moe.width if moe else 0, "an expert's width"),
           "shared_mlp": (moe.shared if moe else 0, "the shared expert's width")}
  dropped += [name for name, (length, what) in sizes.items() if not length or whole(name, length, what)]
  reduced = dataclasses.replace(rules, pairs=tuple(pair for pair in rules.pairs if pair[0] not in dropped))
  mlp = reduced.axis("expert_mlp" if moe else "mlp")
  if moe and moe.dense and reduced.axis("mlp") != mlp:
    raise ValueError(f"{config.family}: of layers with and without experts the widths must both divide, or neither; got "
                     f"{moe.width} and {config.mlp_width} for the mesh {dict(mesh.shape)}")
  splits = splits_lib.Splits(attention=reduced.axis("heads"), mlp=mlp, shared=reduced.axis("shared_mlp"),
                             experts=reduced.axis("experts"))
  if vocab is not None and rules.axis("vocab") is not None and vocab % rules.size("vocab", mesh):
    dropped.append("vocab")  # the logits that judge its drafts are whole
  reduced = dataclasses.replace(reduced, pairs=tuple(pair for pair in reduced.pairs if pair[0] not in dropped))
  wanted = vocab or (config.vocab_size if reduced.size("vocab", mesh) > 1 else config.num_tokens)
  layout = Layout(mesh=mesh, rules=reduced, splits=splits, repeated=repeated, vocab=wanted, notes=tuple(notes))
  return layout, dataclasses.replace(config, kv_heads=config.kv_heads * repeated)


def of_any(config, mesh: jax.sharding.Mesh, rules: Rules, vocab: int | None = None) -> Layout:
  """The layout of another target: its weights lie by their names, and the compiler divides the work. `config` has
  `vocab_size` and `num_tokens`; `vocab` as in `of_decoder`."""
  notes = []
  divided = rules.divides("vocab", config.vocab_size, mesh, f"{config.family}: vocabulary", notes)
  pairs = tuple(pair for pair in rules.pairs if divided or pair[0] != "vocab")
  return Layout(mesh=mesh, rules=dataclasses.replace(rules, pairs=pairs), notes=tuple(notes),
                vocab=vocab or (config.vocab_size if divided else config.num_tokens))


def row_orders(config: DecoderConfig, layout: Layout) -> dict[str, np.ndarray]:
  """Which stored row each row of a fused matrix is, by field, for those whose order is another on a mesh.

  A device's rows of "qkv" are its queries, then its keys, then its values; of "gate_up" its gates, then its ups. The
  configuration is that of the checkpoint, whose key/value heads are not repeated.
  """
  c, shape = config, layout.mesh.shape
  orders = {}
  if (axis := layout.splits.attention) is not None and shape[axis] > 1:
    head = lambda first, index: first + index[:, None] * c.head_width + np.arange(c.head_width)
    repeated = np.repeat(np.arange(c.kv_heads), layout.repeated)
    parts = [head(0, np.arange(c.heads)), head(c.heads * c.head_width, repeated),
             head((c.heads + c.kv_heads) * c.head_width, repeated)]
    order = _by_device(parts, shape[axis])
    orders |= {"qkv": order, "qkv_bias": order}
  if (axis := layout.splits.mlp) is not None and shape[axis] > 1 and c.gated:
    if c.moe is not None:
      orders["experts_gate_up"] = _halves(c.moe.width, shape[axis])
    orders |= {"gate_up": _halves(c.mlp_width, shape[axis]), "gate_up_bias": _halves(c.mlp_width, shape[axis])}
  if (axis := layout.splits.shared) is not None and shape[axis] > 1:
    orders["shared_gate_up"] = _halves(c.moe.shared, shape[axis])
  return orders


def _halves(width, count):
  return _by_device([np.arange(width), np.arange(width, 2 * width)], count)


def _by_device(parts, count):
  """Rows of several parts, i64[n, ...] each, device by device."""
  return np.concatenate([np.concatenate([part.reshape(count, -1)[i] for part in parts]) for i in range(count)])
