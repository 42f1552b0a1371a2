"""Draft length by renewal reward: one more token where its survival is worth its cost at the row's best use of time.

A step of length g brings S(g) = 1 + s_1 + ... + s_g tokens, s_k being the probability that the first k drafted tokens
are all accepted, and costs C(g) plain steps. With rho tokens to a plain step as the best rate in the long run, the best
length has the greatest S(g) - rho C(g). Where costs grow evenly that is: draft token k + 1 iff
s_{k+1} >= rho * (draft cost + marginal verify cost).

Letters: B batch rows, N most tokens of a draft, W widths.
"""
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

Number = jax.Array | float

# Cost of a verify pass over that many nodes, in plain steps: SmolLM2-135M in f32 on two AVX-512 cores, the reference
# machine; those of 32 and 64 are extrapolated. Another model or machine has other numbers.
REFERENCE_WIDTHS = (1, 4, 8, 16, 32, 64)
REFERENCE_COSTS = (1.0, 1.28, 1.50, 1.91, 2.9, 5.2)


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
  """Drafts as long as a draft pays by what is known before it, and nothing where none does.

  C(g) is `draft_cost` * g and the verify pass in the smallest of the step's `widths` that holds g + 1 nodes: within a
  width a token costs its draft only, and a wider one must pay for itself. In a batch the widest draft sets the width of
  all; a row decides as if it were alone, by the costs of passes over the whole batch.

  rho is the row's own emitted tokens over their cost, and `least_rate` at least. Too low an estimate makes drafts too
  long and is raised by what they bring (the iteration of Dinkelbach for ratios). The best of several estimated gains is
  overestimated, so a `least_rate` somewhat above plain decoding's 1 is safer where drafts are cheap.

  Survival is estimated by past rounds, per place in the draft, with the row's pooled acceptance behind rarely judged
  places and `prior` behind that. Where a drafter gives a score to every token, an estimate of its acceptance, scores
  are multiplied by the row's record of them: right over expected.

  A row that stopped drafting tries again after `first_wait` steps with `probe_tokens` tokens, then after twice as many,
  up to `last_wait`, until drafting is worth it again: in the limit a share 1 / last_wait of the steps, that is with the
  defaults .28 / 64 = .4% of the time. A drafter that can judge its drafts against the text without verifying them, as
  lookup can, needs no such tries (`probe_tokens` 0): it passes what `judge` says to `observe`.

  Attributes:
    draft_cost: of one token, in plain steps. A leaf, like all that follow up to `probe_tokens`.
    verify_costs: f[W], of a pass over the nodes of each of REFERENCE_WIDTHS, in plain steps, measured.
    prior: acceptance of a token before any evidence. prior_weight: how many tokens that counts.
    memory: factor on old evidence, a judged round.
    score_memory, score_weight: the same for the record of scores, whose prior is that they are right.
    least_rate: of rho. rate_memory: factor on old steps; rate_weight: plain steps that rho starts with.
    first_wait, last_wait: steps without a draft before the first and before every late try.
    probe_tokens: of such a try; those of the smallest width cost the same.
    widths: nodes that the step can verify, `decode.widths_for(proposer.max_nodes)`; static, within REFERENCE_WIDTHS.
    reads_laws: static; whether the draft law is asked token by token; if not, `limit` is the best length by past
      rounds.

  Raises:
    ValueError: for widths outside the table or not beginning with 1, and for a table of another length.
  """
  draft_cost: Number = 0.0
  verify_costs: Any = REFERENCE_COSTS
  prior: Number = 0.7
  prior_weight: Number = 2.0
  memory: Number = 0.9
  score_memory: Number = 0.98
  score_weight: Number = 8.0
  least_rate: Number = 1.0
  rate_memory: Number = 0.99
  rate_weight: Number = 16.0
  first_wait: Number = 8
  last_wait: Number = 64
  probe_tokens: Number = 3
  widths: tuple[int, ...] = struct.field(pytree_node=False, default=REFERENCE_WIDTHS)
  reads_laws: bool = struct.field(pytree_node=False, default=True)

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
    zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.float32)
    none = jnp.zeros(batch, jnp.int32)
    return RenewalState(tried=zeros(num_tokens), passed=zeros(num_tokens), expected=zeros(), right=zeros(),
                        tokens=zeros() + self.rate_weight, cost=zeros() + self.rate_weight, idle=none,
                        wait=none + jnp.asarray(self.first_wait, jnp.int32))

  def costs(self, num_tokens: int) -> jax.Array:
    """C(0) .. C(num_tokens): f32[num_tokens + 1]."""
    held = [min(w for w in self.widths if w >= tokens + 1) for tokens in range(num_tokens + 1)]
    table = jnp.stack([jnp.asarray(x, jnp.float32) for x in self.verify_costs])
    verify = table[jnp.asarray([REFERENCE_WIDTHS.index(width) for width in held], jnp.int32)]
    return verify + self.draft_cost * jnp.arange(num_tokens + 1, dtype=jnp.float32)

  def rate(self, state: RenewalState) -> jax.Array:
    """rho, f32[B]."""
    return jnp.maximum(state.tokens / state.cost, self.least_rate)

  def acceptance(self, state: RenewalState) -> jax.Array:
    """Of token i where all before it were accepted, from past rounds: f32[B, N]."""
    weight = self.prior_weight
    pool = (state.passed.sum(-1) + weight * self.prior) / (state.tried.sum(-1) + weight)
    return (state.passed + weight * pool[:, None]) / (state.tried + weight)

  def calibrate(self, state: RenewalState, confidence: jax.Array) -> jax.Array:
    """Scores f[B, ...] corrected by what the row's scores were worth so far."""
    record = (state.right + self.score_weight) / (state.expected + self.score_weight)
    record = record.reshape(record.shape + (1,) * (confidence.ndim - 1))
    return jnp.clip(confidence * record, 0.0, 0.99)

  def keep(self, state, count, confidence=None):
    """The best length of chains of `count` i32[B] known tokens, with scores `confidence` f[B, N] or None: i32[B]."""
    beta = self.acceptance(state) if confidence is None else self.calibrate(state, confidence)
    best = best_length(jnp.cumprod(beta, axis=1), self.rate(state), self.costs(beta.shape[1]), count)
    return jnp.where((best == 0) & self._due(state), jnp.minimum(self._probe(), count), best)

  def limit(self, state, num_tokens):
    """See `LengthRule.limit`.

    By past rounds the best length, unless `reads_laws`: then all `num_tokens` where any length is worth its cost, for
    `go_on` to decide. A few tokens where none is and a try is due.
    """
    best = self._by_past(state)
    wanted = jnp.where(best > 0, num_tokens, 0) if self.reads_laws else best
    wanted = jnp.where((best == 0) & self._due(state), self._probe(), wanted)
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
    tries = (self._by_past(state) == 0) & self._due(state) & (drafted < self._probe())
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
    score_fade = jnp.where(judged > 0, self.score_memory, 1.0)
    expected, right = state.expected * score_fade, state.right * score_fade
    if confidence is not None:
      expected, right = expected + (tried * confidence).sum(-1), right + passed.sum(-1)
    new = state.replace(tried=state.tried * fade[:, None] + tried, passed=state.passed * fade[:, None] + passed,
                        expected=expected, right=right, tokens=self.rate_memory * state.tokens + accepted + 1,
                        cost=self.rate_memory * state.cost + cost, idle=jnp.where(drafted > 0, 0, state.idle + 1))
    longer = jnp.minimum(2 * state.wait, jnp.asarray(self.last_wait, jnp.int32))
    first = jnp.zeros_like(state.wait) + self.first_wait
    tried_in_vain = self._due(state) & (self._by_past(state) == 0)
    wait = jnp.where(self._by_past(new) > 0, first, jnp.where(tried_in_vain, longer, state.wait))
    return new.replace(wait=jnp.where(drafted > 0, wait, state.wait))

  def _by_past(self, state):
    """The best length by past rounds alone: i32[B]."""
    beta = self.acceptance(state)
    count = jnp.full(beta.shape[:1], beta.shape[1], jnp.int32)
    return best_length(jnp.cumprod(beta, axis=1), self.rate(state), self.costs(beta.shape[1]), count)

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


def judge(draft: jax.Array, count: jax.Array, emitted: jax.Array, emitted_count: jax.Array) -> tuple[
    jax.Array, jax.Array]:
  """What the text says of a draft, verified or not: `judged` and `agreed` of `Renewal.observe`.

  Args:
    draft: i32[B, N], of which `count` i32[B] tokens are drafted, before any cut.
    emitted: i32[B, M], the tokens of the step that followed, `emitted_count` i32[B] of them.

  Returns:
    i32[B], tokens of the draft that the text has decided; i32[B], how many leading ones of these agree with it.
  """
  places = min(draft.shape[1], emitted.shape[1])
  judged = jnp.minimum(jnp.minimum(count, emitted_count), places).astype(jnp.int32)
  same = (draft[:, :places] == emitted[:, :places]) & (jnp.arange(places, dtype=jnp.int32)[None] < judged[:, None])
  return judged, jnp.cumprod(same.astype(jnp.int32), axis=1).sum(-1)


def copy_confidence(match: jax.Array, seen: jax.Array, same: jax.Array, novelty: Number = 3.0,
                    power: Number = 1.5) -> jax.Array:
  """Acceptance of a token copied from earlier occurrences of the text's end: same / (seen + novelty * match^-power).

  The text so far, drafted tokens included, ends in `match` tokens that occurred `seen` times before, and `same` of
  these went on with the drafted token. `novelty` counts occurrences that would go on with something new; the longer the
  match, the fewer. The form is that of escape probabilities in text compression (prediction by partial matching). The
  numbers are fitted to greedy texts of SmolLM2-135M, where one pair served every category and every place in a draft: a
  single earlier occurrence of 1, 2, 3, 5 or 10 tokens goes on the same with .25, .49, .63, .79 and .91.

  Args:
    match, seen, same: i32 or f32[...]; match 0 where nothing matches.

  Returns:
    f32[...]; 0 without a match.
  """
  new = novelty * jnp.power(jnp.maximum(match, 1).astype(jnp.float32), -1.0 * jnp.asarray(power))
  return jnp.where(match > 0, same / (seen + new), 0.0)
