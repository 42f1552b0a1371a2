"""What the step asks of a target: a pytree with pure methods. Parameters are leaves, configuration is static.

Letters: B batch rows, T nodes, F nodes of earlier passes, S slots, V vocabulary, E model width, X experts,
k experts of a token.
"""
import dataclasses
from typing import Protocol

from flax import struct
import jax

from specjax import cache as cache_lib


@dataclasses.dataclass(frozen=True)
class Routing:
  """What those who count must know of a target's mixtures of experts. A target that has them says it as `routing`, and
  its `forward` takes `experts=True` for the experts that nodes went through, and `routers=True` for their routers'
  logits.

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
  in_flight: cache_lib.Block      # what the nodes leave behind: keys and values, or a recurrence's inputs
  features: tuple[jax.Array, ...] = ()  # f[B, T, E] each; the residual stream entering the layers asked for
  experts: tuple[jax.Array, ...] = ()   # i32[B, T, k] of each layer with a mixture that was run here, if asked for
  routers: tuple[jax.Array, ...] = ()   # f[B, T, X] each; logits of their routers, if asked for


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

  def init_cache(self, batch: int, slots: int) -> cache_lib.Cache:
    """An empty cache."""

  def forward(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: cache_lib.Cache, *,
              before: cache_lib.Block | None = None, resume: cache_lib.Resume | None = None,
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
    """f32[B, T, V] from f[B, T, E]; an id that is never emitted has -inf."""


class EncodingTarget(Target, Protocol):
  """A target with an encoder. Its text is the encoder's inputs, the `opening` and the output; positions and
  `cache.length` count all of them."""

  @property
  def max_inputs(self) -> int:
    """Greatest number of the encoder's inputs."""

  @property
  def sound(self) -> tuple[int, int] | None:
    """(M, F) of an encoder that reads sound, f[M, F] in place of ids; None for one that reads ids."""

  @property
  def max_outputs(self) -> int:
    """Greatest number of the decoder's tokens, opening and output together."""

  @property
  def opening(self) -> tuple[int, ...]:
    """Ids that the decoder begins with, behind the inputs."""

  @property
  def banned_first(self) -> tuple[int, ...]:
    """Ids that are not emitted right behind the opening; `decode.verify_at` sees to it: `logits` knows no place."""

  def init_cache(self, batch: int, slots: int, inputs: int | None = None, skipped: int = 0) -> cache_lib.KVCache:
    """An empty cache for texts of `slots` tokens, at most `inputs` of them the encoder's (any by default) and in every
    row at least `skipped`."""

  def encode(self, cache: cache_lib.KVCache, tokens: jax.Array, inputs: jax.Array) -> cache_lib.KVCache:
    """Runs the encoder and lays down what the decoder reads of it, once a request.

    Args:
      cache: nothing has been committed in it.
      tokens: i32[B, P], or sound f[B, M, F]. inputs: i32[B], how many of them are real; those behind change nothing.
    """


def known_ids(target) -> int:
  """Ids 0 .. N - 1 that a text may hold. On a mesh `vocab_size` may be more: logits of what only fills the vocabulary up,
  so that it divides, are minus infinity."""
  return getattr(target, "known_ids", target.vocab_size)


def encodes(target) -> bool:
  """Whether a target has an encoder, which reads its prompts."""
  return hasattr(target, "encode")


def residual_dtype(target):
  """Type of the residual stream: that of the weights, unless the target keeps a wider one and says so."""
  return getattr(target, "residual_dtype", target.weights.embedding.dtype)


def sound(target) -> tuple[int, int] | None:
  """(M, F) of a target whose prompts are sound, f[M, F] each; None where they are ids."""
  return target.sound if encodes(target) else None


def opening(target) -> tuple[int, ...]:
  """The ids between prompt and output: none, or what a decoder behind an encoder begins with."""
  return target.opening if encodes(target) else ()


def banned_first(target) -> tuple[int, ...]:
  """Ids that are not the first of an output, by the target itself; see `EncodingTarget.banned_first`."""
  return target.banned_first if encodes(target) else ()


def room(target, prompt: int, written: int = 0) -> int:
  """The greatest number of new tokens behind a prompt of so many tokens, of whose output so many have been written;
  below 1 if there is none."""
  begun = len(opening(target)) + written
  left = target.max_context - prompt - begun
  if not encodes(target):
    return left
  return min(left, target.max_outputs - begun) if prompt <= target.max_inputs else 0


def decoder_only(target, method: str) -> None:
  """Raises ValueError for a target with an encoder, where `method` takes prompts to be the decoder's own text."""
  if encodes(target):
    raise ValueError(f"{method} is for decoders, and {type(target).__name__} reads prompts with an encoder; use a "
                     "decoder as the target, or draft by lookup, a draft model or some of the target's layers")


def attends(model, method: str) -> None:
  """Raises ValueError for a model without attention, where `method` counts on keys and values of every token."""
  if not isinstance(jax.eval_shape(lambda: model.init_cache(1, 1)), cache_lib.KVCache):
    raise ValueError(f"{method} is for models with attention, whose cache holds every token, and "
                     f"{type(model).__name__} carries a state on; use such a decoder")


def takes_back(model, slots: int, method: str) -> None:
  """Raises ValueError for a model whose cache of so many slots cannot be cut, where `method` takes tokens back: a state,
  or a ring in which later tokens have taken the place of earlier ones."""
  attends(model, method)
  windows = [window for window in getattr(getattr(model, "config", None), "windows", ()) if window is not None and window < slots]
  if windows:
    raise ValueError(f"{method} takes tokens of its text back, and layers of {type(model).__name__} keep the last "
                     f"{min(windows)} tokens only, in texts of up to {slots}; use a model without windows")
