"""What the step asks of a target: a pytree with pure methods. Parameters are leaves, configuration is static.

Letters: B batch rows, T nodes, S slots, V vocabulary, E model width, F feature width.
"""
from typing import Protocol

from flax import struct
import jax

from specjax import cache as cache_lib


@struct.dataclass
class ForwardOutput:
  """What one forward pass over T nodes returns."""
  hidden: jax.Array               # f[B, T, E]; after the final norm, what `logits` takes
  in_flight: cache_lib.InFlight   # keys and values of the nodes


class Target(Protocol):
  """A language model as the step sees it."""

  @property
  def vocab_size(self) -> int:
    """V: ids 0 .. V-1 can be emitted; padding rows of a head are not among them."""

  @property
  def max_context(self) -> int:
    """Greatest number of tokens of a request, prompt and output together."""

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Ids that end an answer."""

  def init_cache(self, batch: int, slots: int) -> cache_lib.KVCache:
    """An empty cache."""

  def forward(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array,
              cache: cache_lib.KVCache) -> ForwardOutput:
    """Runs T nodes that see the committed cache and, among themselves, what the mask allows.

    Args:
      tokens: i32[B, T]. positions: i32[B, T], of each node in its text.
      mask: bool[B, T, T], ancestor-or-self.
      cache: read only; row b has `cache.length[b]` committed tokens.
    """

  def logits(self, hidden: jax.Array) -> jax.Array:
    """f32[B, T, V] from f[B, T, E]."""


