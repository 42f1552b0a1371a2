"""How many tokens to draft: rules that stop a draft where one more token would cost more than it brings.

A drafter asks a rule before it drafts (`limit`) and before every further token (`go_on`), and tells it how each step
ended (`observe`). A rule sees draft-side quantities and past rounds only, and of the token that it decides about nothing
that is known only after that token was drawn, so verification stays lossless. `cut` shortens chains of points, known
beforehand, as lookup's are.

Numbers of a rule are leaves: others compile nothing. State is per row, rows are independent, and a new state is a new
request. Where the chosen tokens are nearly always accepted a rule may still be slow, because it drafts only what is
certain: judge it by drafted tokens a step beside the acceptance rate, or by tokens over cost.

Letters: B batch rows, N most tokens of a draft, W widths.
"""
from typing import Any, Protocol

import chex
from flax import struct
import jax
import jax.numpy as jnp

State = Any
Number = jax.Array | float

# Cost of a verify pass over that many nodes, in plain steps: SmolLM2-135M in f32 on two AVX-512 cores, the reference
# machine. Another model or machine has other numbers.
REFERENCE_WIDTHS = (1, 4, 8, 16, 32, 64)
_MANY = 1 << 20  # more tokens than any draft has
REFERENCE_COSTS = (1.0, 1.28, 1.50, 1.91, 2.9, 5.2)


class LengthRule(Protocol):
  """When to stop drafting; a pytree with pure methods, like a proposer."""

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
  with weight 1 - `rate_memory`; lambda moves towards lambda + `pace` where the average is at most `target`, else towards
  lambda - `pace`, with weight 1 - `memory`. That combination and its numbers are written from descriptions, not from
  the authors' code. As in `Confidence` the first token is asked about as well.
  """
  factor: Number = 0.2
  start: Number = 0.2           # lambda of a new request
  target: Number = 0.9
  pace: Number = 0.01
  memory: Number = 0.9
  rate_memory: Number = 0.5

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


@struct.dataclass
class RenewalState:
  """What a row has seen. Sums are discounted, so that the newest rounds weigh most."""
  tried: jax.Array     # f32[B, N]; rounds that judged token i of a draft: all before it were right
  passed: jax.Array    # f32[B, N]; and it was right as well
  expected: jax.Array  # f32[B]; judged tokens of scored drafts, by their scores
  right: jax.Array     # f32[B]; how many of them were right
  tokens: jax.Array    # f32[B]; emitted tokens
  cost: jax.Array      # f32[B]; what they cost, in plain steps
  idle: jax.Array      # i32[B]; steps since the last draft
  wait: jax.Array      # i32[B]; steps to the next try while nothing is worth drafting


@struct.dataclass
class Renewal:
  """Drafts token k + 1 when its survival is worth its cost at the row's own best use of time.

  A renewal-reward rule: a step of length g brings S(g) = 1 + s_1 + ... + s_g tokens, s_k being the probability that
  the first k are all accepted, and costs C(g) plain steps. With rho tokens to a plain step as the best rate in the long
  run, the best length has the greatest S(g) - rho C(g); where costs grow evenly that is: draft token k + 1 iff
  s_{k+1} >= rho * (draft_cost + marginal verify cost). C(g) is a step function here, draft_cost * g plus the verify
  pass in the smallest of the step's `widths` that holds g + 1 nodes: within a width a token costs its draft only, and
  a wider one must pay for itself. Where no g beats g = 0 nothing is drafted and the step is a plain one.

  rho is the row's own emitted tokens over their cost, never below plain decoding's 1. Too low an estimate makes drafts
  too long and is raised by what they bring (the iteration of Dinkelbach for ratios). Survival is estimated by past
  rounds, per position, with the row's pooled acceptance behind rarely judged positions and `prior` behind that. Where
  a drafter gives a score to every token, the scores are multiplied by the row's record of them: right over expected.

  A row that stopped drafting tries again after `first_wait` steps with `probe_tokens` tokens, then after twice as many,
  up to `last_wait`, until drafting is worth it again: in the limit a share 1 / last_wait of the steps, that is with the
  defaults .28 / 64 = .4% of the time. A drafter that can judge its drafts against the text without verifying them, as
  lookup can, needs no such tries (`probe_tokens` 0): it passes `judged` and `agreed` to `observe`.

  Attributes:
    draft_cost: of one token, in plain steps. A leaf, like all that follow up to `probe_tokens`.
    verify_costs: f[W], of a pass over the nodes of each of REFERENCE_WIDTHS, in plain steps, measured.
    prior: acceptance of a token before any evidence. prior_weight: how many tokens that counts.
    memory: factor on old evidence, a judged round. rate_memory: that of rho, a step; rate_weight: plain steps that
      rho starts with.
    first_wait, last_wait: steps without a draft before the first and before every late try.
    probe_tokens: of such a try; those of the smallest width cost the same.
    widths: nodes that the step can verify, `decode.widths_for(proposer.max_nodes)`; static, within REFERENCE_WIDTHS.

  Raises:
    ValueError: for widths outside the table or not beginning with 1, and for a table of another length.
  """
  draft_cost: Number = 0.0
  verify_costs: Any = REFERENCE_COSTS
  prior: Number = 0.7
  prior_weight: Number = 2.0
  memory: Number = 0.9
  rate_memory: Number = 0.95
  rate_weight: Number = 4.0
  first_wait: Number = 8
  last_wait: Number = 64
  probe_tokens: Number = 3
  widths: tuple[int, ...] = struct.field(pytree_node=False, default=REFERENCE_WIDTHS)

  def __post_init__(self):
    if self.widths[:1] != (1,) or set(self.widths) - set(REFERENCE_WIDTHS) or tuple(sorted(self.widths)) != self.widths:
      raise ValueError(f"widths={self.widths}: they start with 1, ascend and stand in {REFERENCE_WIDTHS}; give "
                       "decode.widths_for(proposer.max_nodes)")
    if isinstance(self.verify_costs, tuple) and len(self.verify_costs) != len(REFERENCE_WIDTHS):
      raise ValueError(f"verify_costs has {len(self.verify_costs)} entries; it needs one for each of the widths "
                       f"{REFERENCE_WIDTHS}")

  def init(self, batch, num_tokens):
    """See `LengthRule.init`.

    Raises:
      ValueError: where no width holds a draft of `num_tokens`.
    """
    if num_tokens + 1 > self.widths[-1]:
      raise ValueError(f"num_tokens={num_tokens}: with the root that is more than the widest of widths={self.widths}")
    zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
    return RenewalState(tried=zeros(batch, num_tokens), passed=zeros(batch, num_tokens), expected=zeros(batch),
                        right=zeros(batch), tokens=zeros(batch) + self.rate_weight, cost=zeros(batch) + self.rate_weight,
                        idle=jnp.zeros(batch, jnp.int32), wait=jnp.zeros(batch, jnp.int32) + self.first_wait)

  def costs(self, num_tokens: int) -> jax.Array:
    """C(0) .. C(num_tokens): f32[num_tokens + 1]."""
    held = [min(w for w in self.widths if w >= tokens + 1) for tokens in range(num_tokens + 1)]
    table = jnp.stack([jnp.asarray(x, jnp.float32) for x in self.verify_costs])
    verify = table[jnp.asarray([REFERENCE_WIDTHS.index(width) for width in held], jnp.int32)]
    return verify + self.draft_cost * jnp.arange(num_tokens + 1, dtype=jnp.float32)

  def rate(self, state: RenewalState) -> jax.Array:
    """rho, f32[B]."""
    return jnp.maximum(state.tokens / state.cost, 1.0)

  def acceptance(self, state: RenewalState) -> jax.Array:
    """Of token i where all before it were accepted, from past rounds: f32[B, N]."""
    weight = self.prior_weight
    pool = (state.passed.sum(-1) + weight * self.prior) / (state.tried.sum(-1) + weight)
    return (state.passed + weight * pool[:, None]) / (state.tried + weight)

  def calibrate(self, state: RenewalState, confidence: jax.Array) -> jax.Array:
    """Scores f[B, ...] corrected by what the row's scores were worth so far."""
    record = (state.right + self.prior_weight) / (state.expected + self.prior_weight)
    record = record.reshape(record.shape + (1,) * (confidence.ndim - 1))
    return jnp.clip(confidence * record, 0.0, 0.99)

  def keep(self, state, count, confidence=None):
    """The best length of chains of `count` i32[B] known tokens, with scores `confidence` f[B, N] or None: i32[B]."""
    beta = self.acceptance(state) if confidence is None else self.calibrate(state, confidence)
    best = best_length(jnp.cumprod(beta, axis=1), self.rate(state), self.costs(beta.shape[1]), count)
    return jnp.where((best == 0) & self._due(state), jnp.minimum(self._probe(), count), best)

  def limit(self, state, num_tokens):
    """See `LengthRule.limit`: 0 where by past rounds no length is worth its cost, unless a try is due."""
    worth = self._worth(state)
    wanted = jnp.where(worth, num_tokens, jnp.where(self._due(state), self._probe(), 0))
    return jnp.minimum(wanted, num_tokens).astype(jnp.int32)

  def go_on(self, state, drafted, survival, confidence, entropy):
    """See `LengthRule.go_on`. Looks ahead: the tokens behind the next one may pay for a wider pass together."""
    del entropy
    batch, num_tokens = state.tried.shape
    drafted = jnp.broadcast_to(drafted, (batch,))
    beta = self.acceptance(state)
    ahead = jnp.arange(num_tokens)[None] >= drafted[:, None]
    if survival is None:
      survival = jnp.prod(jnp.where(ahead, 1.0, beta), axis=1)
    if confidence is not None:
      beta = self.calibrate(state, confidence)[:, None]
    alive = survival[:, None] * jnp.cumprod(jnp.where(ahead, beta, 1.0), axis=1)
    cost = self.costs(num_tokens)
    extra = cost[1:][None] - cost[drafted][:, None]
    gain = jnp.cumsum(jnp.where(ahead, alive, 0.0), axis=1) - self.rate(state)[:, None] * extra
    pays = (ahead & (gain >= 0)).any(-1)
    tries = ~self._worth(state) & self._due(state) & (drafted < self._probe())
    return (drafted < num_tokens) & (pays | tries)

  def observe(self, state, drafted, accepted, *, confidence=None, judged=None, agreed=None):
    """See `LengthRule.observe`. A step without a draft still counts for rho.

    Args:
      state, drafted, accepted: as there; they say what the step cost and brought.
      confidence: f[B, N], the scores of the draft's tokens, if it has them.
      judged, agreed: i32[B], if more is known than verification says: how many tokens of the draft, verified or not,
        the text has decided by now, and how many leading ones of these agree with it. At most one beyond the agreeing
        ones counts.
    """
    judged = drafted if judged is None else judged
    agreed = accepted if agreed is None else agreed
    place = jnp.arange(state.tried.shape[1], dtype=jnp.int32)[None]
    passed = (place < jnp.minimum(agreed, judged)[:, None]).astype(jnp.float32)
    tried = (place < jnp.minimum(agreed + 1, judged)[:, None]).astype(jnp.float32)
    fade = jnp.where(judged > 0, self.memory, 1.0)
    cost = self.costs(state.tried.shape[1])[drafted]
    expected, right = state.expected * fade, state.right * fade
    if confidence is not None:
      expected, right = expected + (tried * confidence).sum(-1), right + passed.sum(-1)
    idle_wait = jnp.where(drafted > 0, 0, state.idle + 1)
    new = state.replace(tried=state.tried * fade[:, None] + tried, passed=state.passed * fade[:, None] + passed,
                        expected=expected, right=right, tokens=self.rate_memory * state.tokens + accepted + 1,
                        cost=self.rate_memory * state.cost + cost, idle=idle_wait)
    longer = jnp.minimum(2 * state.wait, jnp.asarray(self.last_wait, jnp.int32))
    first = jnp.zeros_like(state.wait) + self.first_wait
    tried_in_vain = self._due(state) & ~self._worth(state)
    wait = jnp.where(self._worth(new), first, jnp.where(tried_in_vain, longer, state.wait))
    return new.replace(wait=jnp.where(drafted > 0, wait, state.wait))

  def _worth(self, state):
    """Whether by past rounds some length beats plain decoding: bool[B]."""
    beta = self.acceptance(state)
    count = jnp.full(beta.shape[:1], beta.shape[1], jnp.int32)
    return best_length(jnp.cumprod(beta, axis=1), self.rate(state), self.costs(beta.shape[1]), count) > 0

  def _due(self, state):
    return state.idle >= state.wait

  def _probe(self):
    return jnp.asarray(self.probe_tokens, jnp.int32)


def best_length(survival: jax.Array, rate: jax.Array, costs: jax.Array, count: jax.Array) -> jax.Array:
  """The length g <= count with the greatest 1 + survival[0] + .. + survival[g - 1] - rate * costs[g].

  Args:
    survival: f[B, N], not increasing: the first i + 1 tokens are all accepted.
    rate: f[B], tokens to a plain step that time is worth. costs: f[N + 1], of a step with g drafted tokens.
    count: i32[B], drafted tokens there are.

  Returns:
    i32[B]; the greatest such length where several tie.
  """
  chex.assert_rank([survival, rate, costs, count], [2, 1, 1, 1])
  gain = jnp.cumsum(survival, axis=1) - rate[:, None] * (costs[1:] - costs[0])[None]
  gain = jnp.pad(gain, ((0, 0), (1, 0)))
  length = jnp.arange(costs.shape[0], dtype=jnp.int32)[None]
  gain = jnp.where(length <= count[:, None], gain, -jnp.inf)
  return (costs.shape[0] - 1 - jnp.argmax(gain[:, ::-1], axis=1)).astype(jnp.int32)


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
