"""Drafting a chain token by token with a model: what draft models and self-speculation share.

The model itself stays outside: `advance` runs it over one more drafted token and returns the logits behind it. How many
tokens are drafted is decided before each is drawn, from what is known by then (see `length`), so sampled drafts keep
the target's law. The loop ends when no row goes on.

Letters: B batch rows, N drafted tokens at most, S tokens of the buffer, V vocabulary.
"""
from typing import Any, Callable

from flax import struct
import jax
import jax.numpy as jnp

from specjax import draft_laws
from specjax import keys as keys_lib
from specjax import processors
from specjax import sampling
from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.proposers import draft_ids


@struct.dataclass
class Drawing:
  """How tokens are taken from a drafter's logits: the greedy one, a point draft, or a draw from q.

  The drafter's law goes through the request's own processors. Its temperature and filters are the request's as well
  unless given here.
  """
  sampled: bool = struct.field(pytree_node=False, default=False)
  temperature: jax.Array | float | None = None
  top_k: jax.Array | int | None = None
  top_p: jax.Array | float | None = None

  def check(self) -> None:
    """Raises ValueError for options out of range, or of sampling where the greedy token is taken."""
    given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
    numbers = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    if numbers and not self.sampled:
      name, value = next(iter(numbers.items()))
      raise ValueError(f"draft {name}={value}: a drafter that takes the greedy token draws nothing; set sampled=True, or "
                       "leave it out")
    allowed = {"temperature": (lambda x: x >= 0, "0 or more"), "top_k": (lambda x: x >= 0, "0 (all) or more"),
               "top_p": (lambda x: 0 < x <= 1, "in (0, 1]")}
    for name, value in numbers.items():
      fits, wanted = allowed[name]
      if not fits(value):
        raise ValueError(f"draft {name}={value}: it must be {wanted}")

  def params(self, params: sampling.SamplingParams) -> sampling.SamplingParams:
    """The request's parameters as the drafter uses them."""
    fill = lambda value, old: old if value is None else jnp.full_like(old, value)
    return params.replace(temperature=fill(self.temperature, params.temperature), top_k=fill(self.top_k, params.top_k),
                          top_p=fill(self.top_p, params.top_p))


class Chained(base.Defaults):
  """A mixin for proposers of chains of up to `num_tokens` tokens, taken as `drawing` says: two fields of theirs."""

  def __post_init__(self):
    """Raises ValueError for a number of tokens below 1, or drawing options that make no sense."""
    if self.num_tokens < 1:
      raise ValueError(f"num_tokens={self.num_tokens}: it must be 1 or more; for no drafts use the plain method")
    if isinstance(self.drawing, Drawing):  # else put together from something else inside a transformation
      self.drawing.check()

  @property
  def max_nodes(self) -> int:
    return self.num_tokens + 1

  @property
  def max_depth(self) -> int:
    return self.num_tokens

  @property
  def samples(self) -> bool:
    return self.drawing.sampled


@struct.dataclass
class Chain:
  """Drafted tokens of a batch, and the model's state behind them."""
  tokens: jax.Array    # i32[B, N]
  count: jax.Array     # i32[B]; how many of them are drafted
  q: jax.Array | None  # f[B, N, V], or f[B, N, U] over `ids`; the law of each, for sampled drafts
  steps: jax.Array     # i32; tokens of the longest row
  extra: Any           # what `advance` carries along
  ids: jax.Array | None = None  # i32[U]; the target's ids that the model drafts from, if not all

  def tree(self, pending: jax.Array) -> tree_lib.TokenTree:
    """As a proposal below `pending` i32[B]."""
    law = None if self.q is None else draft_laws.DenseLaw(self.q)
    if law is not None and self.ids is not None:
      law = draft_laws.SparseLaw(jnp.broadcast_to(self.ids, self.q.shape), self.q)
    return tree_lib.chain(pending, self.tokens, self.count, law)


def room(context: base.Context, num_tokens: int, limit: int | None = None) -> jax.Array:
  """How many tokens each row may draft, i32[B]: none if it has ended, none that the budget cannot use, and within
  `limit`, the drafter's own context."""
  count = jnp.clip(context.budget - 1, 0, num_tokens)
  if limit is not None:
    # The last drafted token is never fed, so it may stand in the place behind the context.
    count = jnp.minimum(count, jnp.clip(limit - context.length + 1, 0, num_tokens))
    count = jnp.where(context.length >= limit, 0, count)
  return jnp.where(context.active, count, 0).astype(jnp.int32)


def possible(has: jax.Array, context: base.Context, drawing: Drawing) -> jax.Array:
  """bool[B]: rows whose request leaves at least one of the ids that a drafter `has`, bool[V]: else there is no law to
  draw from."""
  params, batch = drawing.params(context.params), context.length.shape[0]
  has = jnp.broadcast_to(has, (batch, has.shape[0]))
  if not params.adjusts:
    return has.any(-1)
  prefixes = processors.Prefixes(tokens=context.tokens, length=context.length, start=context.start,
                                 eos=context.rules.eos, begin=context.inputs, path_tokens=context.pending[:, None],
                                 mask=jnp.ones((batch, 1, 1), bool))
  return (processors.adjust(jnp.where(has, 0.0, -jnp.inf)[:, None], params, prefixes)[:, 0] > -jnp.inf).any(-1)


def draft_chain(advance: Callable, extra: Any, logits: jax.Array, context: base.Context, keys: jax.Array,
                drawing: Drawing, num_tokens: int, most: jax.Array, rule, rule_state, *, ids: jax.Array | None = None,
                vocabulary: int | None = None, may: Callable | None = None) -> Chain:
  """Drafts a chain of up to `most` i32[B] <= N = `num_tokens` tokens a row.

  Args:
    advance: (token i32[B], index i32, extra) -> (logits f[B, V], extra); runs the model over drafted token `index`.
    extra: what it starts from. logits: f[B, V], behind the pending token; not read if no row may draft.
    context, keys: of `Proposer.propose`. drawing: how tokens are taken.
    most: i32[B]; 0 for rows that draft nothing.
    rule, rule_state: when to stop; see `length.LengthRule`.
    ids: i32[U], for a model whose logits f[B, U] are those of some of the target's `vocabulary` ids, in this order.
    may: extra -> bool[B], whether a row's next token is worth drafting, from what is known before it is drawn; None for
      always.

  Point drafts end before an end-of-sequence id, which the step would draw at no cost; a sampled one stays, as its own
  token may not decide about it, and is the last.
  """
  batch, size = logits.shape
  params = drawing.params(context.params)
  if ids is not None:
    params = params.replace(top_k=jnp.where(params.top_k >= size, 0, params.top_k))  # all that there are
  mode = params.mode()
  root = context.length - 1
  is_end = lambda token: (token[:, None] == context.rules.eos).any(-1)
  row = jnp.arange(batch)
  reads_laws = rule.reads_laws

  def take(index, logits, carry, extra):
    """Decides whether drafted token `index` follows, and draws it."""
    if params.adjusts:
      whole = logits if ids is None else draft_ids.spread(logits, ids, vocabulary)
      whole = _adjusted(whole, context, params, carry["tokens"], index)
      logits = whole if ids is None else whole[:, ids]
    going = carry["going"] & (index < most)
    law = None
    if drawing.sampled:
      law = sampling.law(logits[:, None], params, mode)[:, 0]
    if reads_laws:
      known = jax.nn.softmax(logits) if law is None else law
      going = going & rule.go_on(rule_state, index, carry["survival"], known.max(-1), _entropy(known))
    if may is not None:
      going = going & may(extra)
    if drawing.sampled:
      place = sampling.invert(law, keys_lib.step_uniform(keys, root, keys_lib.DRAFT, index))
      token = place if ids is None else ids[place]
      carry["q"] = carry["q"].at[:, index].set(law)
      drafted, going = going, going & ~is_end(token)
    else:
      place = sampling.argmax(logits)
      token = place if ids is None else ids[place]
      drafted = going = going & ~is_end(token)
    if reads_laws:
      chance = known[row, place]
      carry["survival"] = carry["survival"] * jnp.where(drafted, chance, 1)
    carry["tokens"] = carry["tokens"].at[:, index].set(token)
    carry["count"] = carry["count"] + drafted
    carry["going"] = going
    return carry

  carry = {"tokens": jnp.zeros((batch, num_tokens), jnp.int32), "count": jnp.zeros((batch,), jnp.int32),
           "going": most > 0, "survival": jnp.ones((batch,), jnp.float32), "q": None}
  if drawing.sampled:
    carry["q"] = jnp.zeros((batch, num_tokens, size), jnp.float32)

  def body(loop):
    index, carry, extra, logits = loop
    carry = take(index, logits, carry, extra)
    more = (carry["going"] & (index + 1 < most)).any()
    # The last token of the longest row is not fed: nothing is drawn behind it.
    logits, extra = jax.lax.cond(more, lambda: advance(carry["tokens"][:, index], index, extra),
                                 lambda: (logits, extra))
    return index + 1, carry, extra, logits

  goes_on = lambda loop: (loop[1]["going"] & (loop[0] < most)).any()
  steps, carry, extra, _ = jax.lax.while_loop(goes_on, body, (jnp.int32(0), carry, extra, logits))
  return Chain(tokens=carry["tokens"], count=carry["count"], q=carry["q"], steps=steps, extra=extra, ids=ids)


def _adjusted(logits, context, params, drafted, index):
  """The drafter's logits f[B, V] as the processors leave them: the text is the known one and `index` drafted tokens."""
  slots = context.tokens.shape[1]
  place = jnp.arange(drafted.shape[1])[None]
  slot = jnp.where(place < index, context.length[:, None] + place, slots)
  tokens = context.tokens.at[jnp.arange(drafted.shape[0])[:, None], slot].set(drafted, mode="drop")
  length = context.length + index
  last = jnp.take_along_axis(tokens, jnp.minimum(length, slots)[:, None] - 1, axis=1)
  prefixes = processors.Prefixes(tokens=tokens, length=length, start=context.start, eos=context.rules.eos,
                                 begin=context.inputs, path_tokens=last, mask=jnp.ones((drafted.shape[0], 1, 1), bool))
  return processors.adjust(logits[:, None], params, prefixes)[:, 0]


def _entropy(law):
  """In nats: f[B] from f[B, V]."""
  return -(law * jnp.log(jnp.maximum(law, 1e-30))).sum(-1)
