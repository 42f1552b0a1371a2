"""Plain decoding: a proposer that never drafts, so that both arms of a comparison run the same step."""
from flax import struct

from specjax import tree as tree_lib
from specjax.proposers import base


@struct.dataclass
class Plain(base.Stateless):
  """Proposes the root alone."""
  num_tokens = 0

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    return tree_lib.root_only(context.pending), state
