"""Where training keeps things on a mesh: weights and what the optimizer holds of them by their names, rows over devices.

The loss is the same function as on one device: the compiler divides it, sums gradients over rows, and brings together
what `fsdp` has divided when a layer needs it (fully sharded data parallel, arXiv 2304.11277).
"""
import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from specjax.parallel import layout as layout_lib
from specjax.parallel import rules as rules_lib


@dataclasses.dataclass(frozen=True)
class Places:
  """For `training.loop.run`.

  Attributes:
    mesh: all devices. rules: which axes are divided.
  """
  mesh: jax.sharding.Mesh
  rules: rules_lib.Rules = rules_lib.TRAINING

  def weights(self, tree: Any):
    """The shardings of weights, of an optimizer's moments of them, and of other arrays, which every device has."""
    return layout_lib.Layout(mesh=self.mesh, rules=self.rules).weights(tree)

  def put(self, tree: Any):
    """`tree` where `weights` says; what lies on this mesh already, such as a target with a layout, stays."""
    there = lambda x: isinstance(x, jax.Array) and getattr(x.sharding, "mesh", None) == self.mesh
    return jax.tree.map(lambda x, place: x if there(x) else jax.device_put(x, place), tree, self.weights(tree))

  def batch(self, tree: Any):
    """A batch with its rows divided, filled up with rows of zeros, which have length 0 and count for nothing."""
    rows = max((x.shape[0] for x in jax.tree.leaves(tree) if np.ndim(x)), default=1)
    more = -rows % self.rules.size("batch", self.mesh)

    def put(x):
      if not np.ndim(x) or x.shape[0] != rows:
        return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec()))
      filled = np.pad(x, [(0, more), *[(0, 0)] * (np.ndim(x) - 1)])
      return jax.device_put(filled, NamedSharding(self.mesh, PartitionSpec(self.rules.axis("batch"))))

    return jax.tree.map(put, tree)
