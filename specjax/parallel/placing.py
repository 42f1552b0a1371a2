"""Puts targets and drafters on a mesh, and takes them back."""
import dataclasses

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from specjax import loading
from specjax.checkpoints import fields
from specjax.checkpoints import shards
from specjax.models import configured
from specjax.models.decoder import Decoder
from specjax.parallel import axes
from specjax.parallel import layout as layout_lib
from specjax.parallel import processes
from specjax.parallel import rules as rules_lib


def shard(target, mesh: jax.sharding.Mesh, rules: rules_lib.Rules = rules_lib.TENSOR, vocab: int | None = None):
  """The same target with its weights on a mesh. What is kept whole is said by `target.layout.notes`.

  Args:
    target: a decoder, or another target with `weights`, `config` and `layout`.
    rules: see `rules`; `rules.REPLICATED` for a small drafter.
    vocab: entries of its logits, `vocab_size` of the target that judges the drafts of a drafter; its own by default.

  Raises:
    ValueError: it lies on a mesh already, or the rules require what does not divide.
  """
  if target.layout is not None:
    raise ValueError("this target lies on a mesh already; take it from there with placing.gathered, or load it anew")
  if not isinstance(target, Decoder):
    layout = layout_lib.of_any(target.config, mesh, rules, vocab)
    return target.replace(weights=processes.place(target.weights, layout.weights(target.weights)), layout=layout)
  layout, config = layout_lib.of_decoder(target.config, mesh, rules, vocab)
  weights = _reordered(target.weights, layout_lib.row_orders(target.config, layout))
  return target.replace(weights=processes.place(weights, layout.weights(weights)), config=config, layout=layout)


def load(name: str, mesh: jax.sharding.Mesh, rules: rules_lib.Rules = rules_lib.TENSOR, *, dtype=None):
  """A target on a mesh, and its tokenizer, as `specjax.load` and `shard` make them. Every process reads the bytes that
  its own devices hold and no others.

  Args:
    name, dtype: as in `specjax.load`. mesh, rules: as in `shard`.
  """
  target, tokenizer = loading.load(name, dtype=dtype, place=_FromFile(mesh, rules))
  if not isinstance(target, Decoder):
    return target.replace(layout=layout_lib.of_any(target.config, mesh, rules)), tokenizer
  layout, config = layout_lib.of_decoder(target.config, mesh, rules)
  return target.replace(config=config, layout=layout), tokenizer


@dataclasses.dataclass(frozen=True)
class _FromFile:
  """Where fields go while a checkpoint is read (`checkpoints.shards.ByConfig`); of decoders that follows from `of`."""
  mesh: jax.sharding.Mesh
  rules: rules_lib.Rules
  orders: dict = dataclasses.field(default_factory=dict)

  def of(self, config):
    layout, _ = layout_lib.of_decoder(config, self.mesh, self.rules)
    return _FromFile(self.mesh, layout.rules, layout_lib.row_orders(config, layout))

  def __call__(self, layer, field, shape):
    index = self.orders.get(field)
    order = None if index is None else fields.Order(axis=len(shape) - 2 if len(shape) > 1 else 0, index=index)
    shape = shape if order is None else order.shape(shape)
    names = axes.of_file(layer, field)
    names = names if names is not None and len(names) == len(shape) else (None,) * len(shape)
    place = NamedSharding(self.mesh, self.rules.spec(names, shape, self.mesh, field))
    return place if order is None else shards.Reordered(place, order)


def in_stored_order(target):
  """The same target, still on its mesh, with the rows of its matrices as they were loaded: what heads are begun from.
  The compiler divides what is done with it as well as it can."""
  layout = target.layout
  if layout is None or not isinstance(target, Decoder):
    return target.replace(layout=None)
  config = dataclasses.replace(target.config, kv_heads=target.config.kv_heads // layout.repeated)
  back = {}
  for field, order in layout_lib.row_orders(config, layout).items():
    back[field] = np.unique(order, return_index=True)[1]  # the first place of every stored row
  return target.replace(weights=_reordered(target.weights, back), config=config, layout=None)


def gathered(target):
  """The same target on one device, in the form that it was loaded in."""
  if target.layout is None:
    return target
  plain = in_stored_order(target)
  return plain.replace(weights=jax.device_put(processes.fetch(plain.weights), jax.local_devices()[0]))


def drafter(proposer, target, rules: rules_lib.Rules = rules_lib.REPLICATED):
  """A proposer on the mesh of its target: models of its own under their own rules, and all else on every device, so that
  what it drafts is the same everywhere. Parts that lie there already, such as layers of the target, stay.

  Args:
    proposer: a pytree. target: on a mesh. rules: of the proposer's own models.
  """
  layout = target.layout
  place = NamedSharding(layout.mesh, PartitionSpec())

  def placed(part):
    if isinstance(part, configured.Configured):
      # A model with other ids, whose drafts are translated, keeps its own vocabulary.
      same = part.known_ids == target.known_ids
      return part if part.layout is not None else shard(part, layout.mesh, rules, layout.vocab if same else None)
    there = isinstance(part, jax.Array) and getattr(part.sharding, "mesh", None) == layout.mesh
    return part if there else processes.place(part, place)

  return jax.tree.map(placed, proposer, is_leaf=lambda part: isinstance(part, configured.Configured))


def _reordered(weights, orders):
  """A decoder's weights with the rows of some fields in another order; the last axis but one of three, else the first."""
  if not orders:
    return weights
  pick = lambda x, order: x if x is None else x[:, order] if x.ndim == 3 else x[order]
  layers = tuple(layer.replace(**{field: pick(getattr(layer, field), order) for field, order in orders.items()})
                 for layer in weights.layers)
  return weights.replace(layers=layers)
