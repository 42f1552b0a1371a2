"""What the step asks of a proposer: a pytree with pure methods, written in one file and swapped in one line.

Letters: B batch rows, T nodes, S tokens of the buffer, D greatest depth.
"""
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import sampling
from specjax import stopping
from specjax import tree as tree_lib
from specjax.models import base as models

State = Any


@struct.dataclass
class Context:
  """What is known of each row before a step; the cache holds `length - 1` of these tokens."""
  tokens: jax.Array               # i32[B, S]; prompt and output
  length: jax.Array               # i32[B]
  start: jax.Array                # i32[B]; prompt tokens
  active: jax.Array               # bool[B]; rows that still run
  budget: jax.Array               # i32[B]; output tokens that the row may still emit
  params: sampling.SamplingParams
  rules: stopping.StopRules
  inputs: jax.Array | None = None        # i32[B]; tokens that the target's encoder reads; None without one
  input_tokens: jax.Array | None = None  # i32[B, P]; those tokens, and any behind them

  @property
  def pending(self) -> jax.Array:
    """The last known token of each row, the root of the next tree: i32[B]."""
    return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]

  def behind_inputs(self) -> "Context":
    """The decoder's text alone, which the encoder's inputs are not part of; itself without an encoder."""
    if self.inputs is None:
      return self
    place = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None] + self.inputs[:, None]
    tokens = jnp.take_along_axis(self.tokens, jnp.minimum(place, self.tokens.shape[1] - 1), axis=1)
    return self.replace(tokens=tokens, length=self.length - self.inputs, start=self.start - self.inputs, inputs=None,
                        input_tokens=None)


@struct.dataclass
class Committed:
  """Tokens that entered the cache in a prefill chunk or a step, the one door through which a proposer learns."""
  tokens: jax.Array     # i32[B, N]; committed tokens in text order
  following: jax.Array  # i32[B, N]; the token after each of them
  positions: jax.Array  # i32[B, N]
  hidden: jax.Array     # f[B, N, E]; the target's final hidden state at each of them
  count: jax.Array      # i32[B]; how many of the N are real
  path: jax.Array | None  # i32[B, N]; their nodes in the tree; None in prefill
  drafted: jax.Array | None = None   # i32[B]; drafted nodes that were verified; None in prefill
  node_ids: jax.Array | None = None  # i32[B, W, K]; the target's K most probable ids at every node of the tree, if the
                                     # proposer's `node_ids` is K > 0; behind the verified width -1; None in prefill
  features: dict[int, jax.Array] = struct.field(default_factory=dict)  # f[B, N, E] by layer; the target's residual
                                     # stream that enters each layer of the proposer's `features`


class Proposer(Protocol):
  """A way of drafting. Its parameters are leaves; `max_nodes` and `max_depth` are static.

  `max_nodes` counts the root; a proposer that never drafts has 1 and 0. Verifiers of chains go by `chains`.
  """

  @property
  def max_nodes(self) -> int: ...

  @property
  def max_depth(self) -> int: ...

  @property
  def node_ids(self) -> int:
    """How many of the target's most probable ids it reads at every node of a tree; 0: none, which costs nothing."""

  @property
  def features(self) -> tuple[int, ...]:
    """Layers of the target whose input it reads at every committed token, see `Committed.features`; L stands for the
    output of the last one."""

  @property
  def chains(self) -> bool:
    """Whether no node ever has two children: some verifiers judge chains only, and would be wrong about a tree."""

  @property
  def host(self) -> bool:
    """Whether `propose` runs in Python, between the compiled halves of a step; see `drivers`."""

  @property
  def samples(self) -> bool:
    """Whether drafts are drawn from a law q, which the tree then carries; all others are points."""

  @property
  def draft_context(self) -> int | None:
    """Longest text that it can draft behind; steps of rows beyond it are counted. None: no limit of its own."""

  @property
  def behind_inputs(self) -> bool:
    """Whether its text is the decoder's alone, behind what an encoder reads: `draft_context` then counts that."""

  def init(self, target: models.Target, batch: int, capacity: int) -> State:
    """The state of `batch` rows that will hold at most `capacity` tokens.

    New arrays, never the proposer's own parameters: the state is donated to the decode loop, step after step.
    """

  def propose(self, target: models.Target, cache: cache_lib.Cache, state: State, context: Context,
              keys: jax.Array) -> tuple[tree_lib.TokenTree, State]:
    """Drafts a tree of at most `max_nodes` nodes below `context.pending`; a row with nothing to draft has size 1.

    `keys` are the rows' keys, key[B]. Rows are independent: nothing that a row drafts may depend on its neighbours.

    A drafted token is a point, chosen, or sampled, with the law q that it was drawn from, after every processor (see
    `TokenTree`; draw with `keys.step_noise`, or with `keys.position_noise` for the coupled verifier). Whether a sampled
    node is drafted at all, and how many siblings it has, may depend on its ancestors and on q at its parent, never on
    its own token, on its siblings' or on what was drawn after it: dropping what does not look good afterwards changes
    the law of the text. An illegal or duplicate sampled token stays in the tree and is rejected. `tree.check` says of a
    drafted tree whether its q can be the law that it was drawn from.
    """

  def observe(self, target: models.Target, state: State, committed: Committed) -> State:
    """Learns what was committed."""

  def remember(self, state: State, outputs: list[list[int]]) -> "Proposer":
    """The proposer for the next requests, with what it keeps of these: their last state and their output tokens.

    Shapes and configuration stay, so that nothing is compiled again. On the host.
    """

  def forget(self) -> "Proposer":
    """The proposer without anything of past requests."""


def accepted_of_chain(committed: Committed) -> jax.Array:
  """How many tokens of a drafter's own chain, whose node i is the i-th, entered the cache: i32[B]."""
  place = jnp.arange(committed.path.shape[1])[None]
  own = (committed.path == place) & (place < committed.count[:, None])
  return jnp.maximum(jnp.cumprod(own.astype(jnp.int32), axis=1).sum(1) - 1, 0)


def same_vocabulary(target: models.Target, drafter: models.Target) -> None:
  """Raises ValueError for a drafter with another number of ids, whose tokens are not the target's, or with an encoder
  that the target's texts give nothing to read."""
  no_sound(target, drafter)
  if models.encodes(drafter) and models.opening(drafter) != models.opening(target):
    raise ValueError(f"the drafter's decoder begins with {models.opening(drafter)} behind its encoder's inputs, and "
                     f"texts of the target have {models.opening(target)} there; use a drafter of the same family, or "
                     "one without an encoder")
  if models.encodes(drafter) and models.encodes(target):
    limits = [(model.max_inputs, model.max_outputs) for model in (drafter, target)]
    if limits[0][0] < limits[1][0] or limits[0][1] < limits[1][1]:
      raise ValueError(f"the drafter reads {limits[0][0]} inputs and writes {limits[0][1]} tokens at most, and the target "
                       f"{limits[1][0]} and {limits[1][1]}; use a drafter with as many positions")
  ids = models.known_ids(drafter), models.known_ids(target)
  if ids[0] != ids[1]:
    raise ValueError(f"the drafter has {ids[0]} token ids and the target {ids[1]}: they do not share a vocabulary; use "
                     "a drafter of the same family")
  if drafter.vocab_size != target.vocab_size:
    raise ValueError(f"the drafter's logits have {drafter.vocab_size} entries and the target's {target.vocab_size}: one "
                     "of the two lies on a mesh; put the drafter there with parallel.placing.drafter")


def no_sound(*models_: models.Target) -> None:
  """Raises ValueError for a target or a drafter that hears sound: a draft model reads the ids of a text."""
  if any(models.sound(model) is not None for model in models_):
    raise ValueError("a draft model reads the ids of a text, and this target or drafter hears sound; draft by lookup, "
                     "or with some of the target's layers (early exit, layer skipping)")


def no_encoder(drafter: models.Target, method: str) -> None:
  """Raises ValueError for a drafter with an encoder, where `method` gives it a text of its own."""
  if models.encodes(drafter):
    raise ValueError(f"{method} writes the text anew in the drafter's ids, and {type(drafter).__name__} reads inputs "
                     "with an encoder; use a decoder as the drafter, or draft_model with one of the target's family")


def layers_of(target: models.Target, method: str) -> int:
  """How many layers a target has. Raises ValueError for one without: it cannot be run in part."""
  if not hasattr(target, "keep"):
    raise ValueError(f"{method} runs or reads some layers of the target, and {type(target).__name__} has none to choose "
                     "from; use a decoder")
  return target.config.layers


class Defaults:
  """A mixin: chains if there are no more nodes than levels and a root, point drafts,
  reads no ids and no features, has no context limit, keeps nothing between requests."""

  @property
  def chains(self) -> bool:
    return self.max_nodes == self.max_depth + 1

  @property
  def host(self) -> bool:
    return False

  @property
  def samples(self) -> bool:
    return False

  @property
  def node_ids(self) -> int:
    return 0

  @property
  def features(self) -> tuple[int, ...]:
    return ()

  @property
  def draft_context(self) -> int | None:
    return None

  @property
  def behind_inputs(self) -> bool:
    return False

  def remember(self, state, outputs):
    """See `Proposer.remember`: nothing is kept."""
    del state, outputs
    return self

  def forget(self):
    """See `Proposer.forget`: there is nothing."""
    return self


class Stateless(Defaults):
  """What proposers without a state share: a mixin for those that draft `num_tokens` tokens from the text alone."""

  @property
  def max_nodes(self) -> int:
    return self.num_tokens + 1

  @property
  def max_depth(self) -> int:
    return self.num_tokens

  def init(self, target, batch, capacity):
    """See `Proposer.init`: there is no state."""
    del target, batch, capacity
    return ()

  def observe(self, target, state, committed):
    """See `Proposer.observe`: nothing to learn."""
    del target, committed
    return state
