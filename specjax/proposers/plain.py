"""Plain decoding: a proposer that never drafts, so that both arms of a comparison run the same step."""
from flax import struct

from specjax import tree as tree_lib


@struct.dataclass
class Plain:
  """Proposes the root alone."""
  max_nodes = 1
  max_depth = 0

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`: there is no state."""
    del target, batch, capacity
    return ()

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    return tree_lib.root_only(context.pending), state

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    del target, committed
    return state
