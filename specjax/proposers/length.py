"""How many tokens to draft: rules that stop a draft where one more token would cost more than it brings.

A drafter asks a rule before it drafts (`limit`) and before every further token (`go_on`), and tells it how each step
ended (`observe`). A rule sees draft-side quantities and past rounds only, and of the token that it decides about
nothing that is known only after that token was drawn, so verification stays lossless. `cut` shortens chains of points,
known beforehand, as lookup's are.

Numbers of a rule are leaves: others compile nothing. State is per row, rows are independent, and a new state is a new
request. Where the chosen tokens are nearly always accepted a rule may still be slow, because it drafts only what is
certain: judge it by drafted tokens a step beside the acceptance rate, or by tokens over cost.

Letters: B batch rows, N most tokens of a draft.
"""
from typing import Any, Protocol

from flax import struct
import jax
import jax.numpy as jnp

from specjax.proposers.renewal import copy_confidence  # part of this module's interface
from specjax.proposers.renewal import judge
from specjax.proposers.renewal import Renewal

__all__ = ["Confidence", "Entropy", "Fixed", "Heuristic", "LengthRule", "Renewal", "copy_confidence", "cut",
           "judge"]

State = Any
Number = jax.Array | float

_MANY = 1 << 20  # more tokens than any draft has


class LengthRule(Protocol):
  """When to stop drafting; a pytree with pure methods, like a proposer."""

  @property
  def reads_laws(self) -> bool:
    """Whether `go_on` looks at the draft law; if not, `limit` says all and a drafter need not ask token by token."""

  def init(self, batch: int, num_tokens: int) -> State:
    """The state of `batch` new requests whose drafts have at most `num_tokens` tokens. New arrays, to be donated."""

  def limit(self, state: State, num_tokens: int) -> jax.Array:
    """How many tokens to draft at most, 0 to `num_tokens`, from past rounds only: i32[B]. Asked before drafting."""

  def go_on(self, state: State, drafted: jax.Array, survival: jax.Array | None, confidence: jax.Array | None,
            entropy: jax.Array | None) -> jax.Array:
    """Whether to draft one more token; holds together with `limit`, which it does not repeat.

    Args:
      state: of the rule.
      drafted: i32[] or i32[B], tokens drafted so far.
      survival: f[B], estimated probability that all of these are accepted; None: estimate it from past rounds.
      confidence: f[B], greatest probability of the draft law at the place of the next token, or any other estimate of
        its acceptance that is known before it is drawn; None where there is none.
      entropy: f[B], of that law, in nats; None where there is none.

    Returns:
      bool[B].
    """

  def observe(self, state: State, drafted: jax.Array, accepted: jax.Array) -> State:
    """Learns from the step that ended: `drafted` i32[B] tokens were verified and `accepted` i32[B] accepted.

    Of acceptance a row with `drafted` 0 learns nothing.
    """


@struct.dataclass
class MostState:
  """The state of rules that learn nothing about lengths."""
  most: jax.Array  # i32[B]; tokens of the longest draft


@struct.dataclass
class Fixed:
  """Always `num_tokens`: the drafter's full length."""
  reads_laws = False

  def init(self, batch, num_tokens):
    """See `LengthRule.init`."""
    return MostState(most=jnp.full(batch, num_tokens, jnp.int32))

  def limit(self, state, num_tokens):
    """See `LengthRule.limit`."""
    return jnp.minimum(state.most, num_tokens)

  def go_on(self, state, drafted, survival, confidence, entropy):
    """See `LengthRule.go_on`."""
    del survival, confidence, entropy
    return drafted < state.most

  def observe(self, state, drafted, accepted):
    """See `LengthRule.observe`."""
    del drafted, accepted
    return state


@struct.dataclass
class HeuristicState:
  current: jax.Array  # f32[B]; the length of the next draft
  most: jax.Array     # i32[B]; tokens of the longest draft


@struct.dataclass
class Heuristic:
  """Two tokens more after a draft that was accepted whole, one less otherwise, within 1 and `num_tokens`.

  The schedule "heuristic" of Hugging Face Transformers, which starts at the drafter's length as this does. There a
  draft counts as whole when it reaches the current length; here when all that was drafted was accepted, so that a
  draft shortened by a budget teaches the same.
  """
  up: Number = 2.0
  down: Number = 1.0
  reads_laws = False

  def init(self, batch, num_tokens):
    """See `LengthRule.init`."""
    return HeuristicState(current=jnp.full(batch, num_tokens, jnp.float32),
                          most=jnp.full(batch, num_tokens, jnp.int32))

  def limit(self, state, num_tokens):
    """See `LengthRule.limit`."""
    return jnp.minimum(state.current.astype(jnp.int32), num_tokens)

  def go_on(self, state, drafted, survival, confidence, entropy):
    """See `LengthRule.go_on`."""
    del survival, confidence, entropy
    return drafted < state.current.astype(jnp.int32)

  def observe(self, state, drafted, accepted):
    """See `LengthRule.observe`."""
    moved = state.current + jnp.where(accepted >= drafted, self.up, -1.0 * jnp.asarray(self.down))
    moved = jnp.clip(moved, 1.0, state.most.astype(jnp.float32))
    return state.replace(current=jnp.where(drafted > 0, moved, state.current))


@struct.dataclass
class Confidence:
  """Drafts on while the draft law's greatest probability is at least `threshold`.

  The rule of Kangaroo (arXiv 2404.18911) and Transformers' `assistant_confidence_threshold`, whose default this is.
  They compare the token just drawn and keep it; here the law at the place of the next token decides, the first one
  included, so that a row that is unsure of everything drafts nothing.
  """
  threshold: Number = 0.4
  reads_laws = True

  def init(self, batch, num_tokens):
    """See `LengthRule.init`."""
    return MostState(most=jnp.full(batch, num_tokens, jnp.int32))

  def limit(self, state, num_tokens):
    """See `LengthRule.limit`."""
    return jnp.minimum(state.most, num_tokens)

  def go_on(self, state, drafted, survival, confidence, entropy):
    """See `LengthRule.go_on`; needs the confidence."""
    del survival, entropy
    _need(confidence, "Confidence", "confidence")
    return (drafted < state.most) & (confidence >= self.threshold)

  def observe(self, state, drafted, accepted):
    """See `LengthRule.observe`."""
    del drafted, accepted
    return state


@struct.dataclass
class EntropyState:
  threshold: jax.Array   # f32[B]; lambda
  acceptance: jax.Array  # f32[B]; running acceptance rate
  most: jax.Array        # i32[B]; tokens of the longest draft


@struct.dataclass
class Entropy:
  """AdaEDL (arXiv 2410.18351): stops when 1 - sqrt(factor * H) < lambda, H the entropy of the draft law in nats.

  The left side estimates a lower bound of the acceptance probability. `factor` .2 is the paper's. Lambda follows a
  target acceptance by the running averages of Draft & Verify (arXiv 2309.08168): the acceptance rate of a round enters
  with weight 1 - `rate_memory`; lambda moves towards lambda + `pace` where the average is at most `target`, else
  towards lambda - `pace`, with weight 1 - `memory`. That combination and its numbers are written from descriptions, not
  from the authors' code. As in `Confidence` the first token is asked about as well.
  """
  factor: Number = 0.2
  start: Number = 0.2           # lambda of a new request
  target: Number = 0.9
  pace: Number = 0.01
  memory: Number = 0.9
  rate_memory: Number = 0.5
  reads_laws = True

  def init(self, batch, num_tokens):
    """See `LengthRule.init`."""
    full = lambda x: jnp.zeros(batch, jnp.float32) + x
    return EntropyState(threshold=full(self.start), acceptance=full(self.target),
                        most=jnp.full(batch, num_tokens, jnp.int32))

  def limit(self, state, num_tokens):
    """See `LengthRule.limit`."""
    return jnp.minimum(state.most, num_tokens)

  def go_on(self, state, drafted, survival, confidence, entropy):
    """See `LengthRule.go_on`; needs the entropy."""
    del survival, confidence
    _need(entropy, "Entropy", "entropy")
    bound = 1 - jnp.sqrt(self.factor * jnp.maximum(entropy, 0))
    return (drafted < state.most) & (bound >= state.threshold)

  def observe(self, state, drafted, accepted):
    """See `LengthRule.observe`."""
    rate = accepted / jnp.maximum(drafted, 1)
    acceptance = self.rate_memory * state.acceptance + (1 - self.rate_memory) * rate
    wanted = state.threshold + jnp.where(acceptance <= self.target, self.pace, -1.0 * jnp.asarray(self.pace))
    threshold = self.memory * state.threshold + (1 - self.memory) * wanted
    learns = drafted > 0
    return state.replace(threshold=jnp.where(learns, threshold, state.threshold),
                         acceptance=jnp.where(learns, acceptance, state.acceptance))


def cut(rule: LengthRule, state: State, count: jax.Array, confidence: jax.Array | None) -> jax.Array:
  """Shortens chains that are known already: lookup's, or any whose tokens were chosen and not drawn.

  Lossless for point drafts: the new token is drawn from the target's law at every node, whatever was drafted, so a
  chain may be cut by anything but the target's draws of this step, its own tokens and scores included. Not so for
  sampled drafts: there a token counts as drawn from q, and one dropped because of its own score, or of what was drawn
  behind it, was not (with p = q = (.6, .4), dropping a drafted b gives the text law (.84, .16)). Their drafter asks
  `go_on` before it draws.

  Args:
    rule, state: the rule and its state.
    count: i32[B], tokens of each chain.
    confidence: f[B, N], estimated acceptance of every token where those before it are accepted; None: unknown.

  Returns:
    i32[B], at most `count`.
  """
  keep = getattr(rule, "keep", None)
  if keep is not None:
    return jnp.minimum(keep(state, count, confidence), count)
  places = 1 if confidence is None else confidence.shape[1]  # without scores the rule's limit says all
  alive = None if confidence is None else jnp.cumprod(jnp.pad(confidence, ((0, 0), (1, 0)), constant_values=1), axis=1)
  going = [rule.go_on(state, i, None if alive is None else alive[:, i],
                      None if confidence is None else confidence[:, i], None) for i in range(places)]
  limit = rule.limit(state, _MANY)
  length = jnp.cumprod(jnp.stack(going, axis=1).astype(jnp.int32), axis=1).sum(-1)
  if confidence is None:
    length = length * _MANY
  return jnp.minimum(jnp.minimum(length, limit), count).astype(jnp.int32)


def _need(value, rule, name):
  if value is None:
    raise ValueError(f"{rule} stops by the draft law's {name}, and this drafter has none; use a rule that learns from "
                     "past rounds, renewal or heuristic")
