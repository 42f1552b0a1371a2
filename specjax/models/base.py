"""What the step asks of a target: a pytree with pure methods. Parameters are leaves, configuration is static.

Letters: B batch rows, T nodes, F nodes of earlier passes, S slots, V vocabulary, E model width, k experts of a token.
"""
import dataclasses
from typing import Protocol

from flax import struct
import jax

from specjax import cache as cache_lib


@dataclasses.dataclass(frozen=True)
class Routing:
  """What those who count must know of a target's mixtures of experts. A target that has them says it as `routing`, and
  its `forward` takes `experts=True` for the experts that nodes went through.

  Attributes:
    layers: that are mixtures. experts: X of each. chosen: k, experts of a token.
    expert_bytes: of one expert's weights.
  """
  layers: int
  experts: int
  chosen: int
  expert_bytes: int


@struct.dataclass
class ForwardOutput:
  """What one forward pass over T nodes returns."""
  hidden: jax.Array               # f[B, T, E]; after the final norm, what `logits` takes
  in_flight: cache_lib.InFlight   # keys and values of the nodes
  features: tuple[jax.Array, ...] = ()  # f[B, T, E] each; the residual stream entering the layers asked for
  experts: tuple[jax.Array, ...] = ()   # i32[B, T, k] of each layer with a mixture that was run here, if asked for


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

  def forward(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: cache_lib.KVCache, *,
              before: cache_lib.InFlight | None = None, resume: cache_lib.Resume | None = None,
              features: tuple[int, ...] = ()) -> ForwardOutput:
    """Runs T nodes that see the committed cache and, among themselves, what the mask allows.

    Args:
      tokens: i32[B, T]. positions: i32[B, T], of each node in its text.
      mask: bool[B, T, T], ancestor-or-self; with `before` bool[B, T, F + T], its F nodes first.
      cache: read only; row b has `cache.length[b]` committed tokens.
      before: F nodes of earlier passes that are in flight as well.
      resume: what a drafter has computed of these T nodes: the pass starts above its layers. The in-flight block that
        is returned holds them too.
      features: layers whose input is returned; the number of layers stands for the output of the last one.
    """

  def logits(self, hidden: jax.Array) -> jax.Array:
    """f32[B, T, V] from f[B, T, E]."""


