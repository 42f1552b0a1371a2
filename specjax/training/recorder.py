"""Plain decoding that keeps what the target computes on the way: features of its own answers then cost no second pass.

Letters: B batch rows, S entries, D width of the target, F = layers * D.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import own_features
from specjax.training import features as features_lib


@struct.dataclass
class Recorder(base.Stateless):
  """Proposes the root alone, and keeps for every committed token the residual stream that enters `layers` and the final
  hidden state, f16[F + D], as `features.File` has them. The last token of a text is never committed: it has none. Of a
  target with an encoder these are the decoder's tokens."""
  layers: tuple[int, ...] = struct.field(pytree_node=False)
  num_tokens = 0

  @property
  def features(self) -> tuple[int, ...]:
    return self.layers

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return own_features.empty(batch, capacity, (len(self.layers) + 1) * target.config.width, jnp.float16)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    return tree_lib.root_only(context.pending), state

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    del target
    seen = [own_features.joined(committed, self.layers), committed.hidden]
    return state.observe(features_lib.half(jnp.concatenate(seen, axis=-1)), committed)


def recorded(target, state: own_features.OwnFeatures) -> list[features_lib.File]:
  """What a `Recorder` kept of every row: that of its text without the last token."""
  values, known = jax.device_get((state.values, state.known))
  rows = [row[:count] for row, count in zip(values, known)]
  tops = np.split(features_lib.top(target, np.concatenate(rows)[:, -target.config.width:]), np.cumsum(known)[:-1])
  return [features_lib.File(values=row, top=top) for row, top in zip(rows, tops)]
