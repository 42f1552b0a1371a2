"""What the step asks of a verifier: a law, and a draw that has that law.

Letters: B batch rows, T nodes, D greatest depth, V vocabulary.
"""
from typing import Protocol

from flax import struct
import jax

from specjax import sampling
from specjax import tree as tree_lib


@struct.dataclass
class Verdict:
  """What one step decided: the accepted path and the new token behind it."""
  path: jax.Array      # i32[B, D + 1]; node ids from the root on, the last accepted one repeated
  accepted: jax.Array  # i32[B]; drafted nodes on the path
  token: jax.Array     # i32[B]; the new token


class Verifier(Protocol):
  """A verification rule. Hashable: it is a static argument of the step."""

  def law(self, p: jax.Array, tree: tree_lib.TokenTree, depth: int) -> tuple[jax.Array, jax.Array]:
    """The rule as a law: stop f32[B, T], the probability that the path ends at each node, and next f32[B, T, V], the
    law of the new token given that. `p` f32[B, T, V] is the target's processed law at every node."""

  def draw(self, logits: jax.Array, tree: tree_lib.TokenTree, params: sampling.SamplingParams, mode: jax.Array,
           uniforms: jax.Array, depth: int) -> Verdict:
    """One draw from that law.

    Args:
      logits: f32[B, T, V], unprocessed.
      tree: the proposal. depth: static bound of its depth, D.
      params, mode: see `sampling.draw`.
      uniforms: f32[B, T], of the token stream, each at the position of the token that follows the node.
    """
