"""What changes logits before the temperature does: penalties, bias, allowed and banned ids, grammars, least length.

In a tree every node has a text of its own: prompt, output, and the drafted tokens on its path. `adjust` gives each node
the logits that plain decoding would have behind that text, so that what is verified is the law of the text and not of
its first node. Plain decoding is the tree of one node.

Counts are made from the tokens in every step. Kept from step to step they would be a state to roll back.

Letters: B batch rows, T nodes, S slots, V vocabulary, X end ids, K ids of a row.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import sampling_params


@struct.dataclass
class Prefixes:
  """The text before the token that is drawn behind each node.

  The root, node 0, is the pending token: it stands inside `tokens[:length]` already.
  """
  tokens: jax.Array       # i32[B, S]; prompt and output
  length: jax.Array       # i32[B]; known tokens, the pending one included
  start: jax.Array        # i32[B]; prompt tokens
  eos: jax.Array          # i32[B, X]; ids that end a row, padded with -1
  path_tokens: jax.Array  # i32[B, T]; the tree's tokens
  mask: jax.Array         # bool[B, T, T]; ancestor or self
  allowed: jax.Array | None = None  # bool[B, T, V]; what a constraint allows behind each node
  begin: jax.Array | None = None    # i32[B]; tokens that an encoder reads, which no penalty counts; None without one


def adjust(logits: jax.Array, params: sampling_params.SamplingParams, prefixes: Prefixes) -> jax.Array:
  """The logits from which each node's token is drawn.

  Order: penalties, bias, banned and allowed ids, constraint, minimum of new tokens.

  Args:
    logits: f[B, T, V], at the nodes of a tree.
    params: batched parameters.
    prefixes: the text before each node.

  Returns:
    f32[B, T, V], f64 for f64; the logits themselves where nothing is asked for. No row is left without a possible id
    by a constraint or a minimum: where one would (behind a token that the constraint itself forbids, whose probability
    is 0), the node keeps what it had.
  """
  if not params.adjusts and prefixes.allowed is None:
    return logits
  chex.assert_rank(logits, 3)
  chex.assert_equal_shape_prefix([logits, prefixes.path_tokens, prefixes.mask], 2)
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  logits = _penalise(logits, params, prefixes)
  logits = _static(logits, params)
  if prefixes.allowed is not None:
    chex.assert_equal_shape([logits, prefixes.allowed])
    logits = _keep(logits, prefixes.allowed)
  if params.min_new_tokens is not None:
    output = (prefixes.length - prefixes.start)[:, None] + prefixes.mask.sum(-1) - 1  # index of the drawn token
    ends = member(prefixes.eos, logits.shape[-1])
    early = output < params.min_new_tokens[:, None]
    logits = _keep(logits, ~(ends[:, None] & early[:, :, None]))
  return logits


def member(ids: jax.Array, vocabulary: int) -> jax.Array:
  """Which of the `vocabulary` ids are among `ids` i32[B, K], whose unused places are negative: bool[B, V]."""
  empty = jnp.zeros((ids.shape[0], vocabulary), bool)
  return empty.at[_row(ids), _place(ids, vocabulary)].set(True, mode="drop")


def _static(logits, params):
  """Bias, and banned and allowed ids: the same at every node of a row."""
  vocabulary = logits.shape[-1]
  if params.logit_bias is not None:
    ids, values = params.logit_bias.ids, params.logit_bias.values.astype(logits.dtype)
    bias = jnp.zeros((ids.shape[0], vocabulary), logits.dtype)
    bias = bias.at[_row(ids), _place(ids, vocabulary)].add(values, mode="drop")[:, None]
    logits = _bounded(logits + bias, (logits == -jnp.inf) | (bias == -jnp.inf))
  if params.banned_ids is not None:
    logits = jnp.where(member(params.banned_ids.ids, vocabulary)[:, None], -jnp.inf, logits)
  if params.allowed_ids is not None:
    ids = params.allowed_ids.ids
    free = (ids < 0).all(-1, keepdims=True)  # an empty list is refused, so a row without ids is not restricted
    logits = jnp.where((member(ids, vocabulary) | free)[:, None], logits, -jnp.inf)
  return logits


def _penalise(logits, params, prefixes):
  """Penalties for what was seen: in one pass for the counts that all nodes share, then again, with their own counts,
  at the few tokens on each node's path. Counts for every node apart would be one more array [B, T, V]."""
  if params.repetition_penalty is None and params.presence_penalty is None and params.frequency_penalty is None:
    return logits
  vocabulary, width = logits.shape[-1], logits.shape[1]
  tokens, mask, path_tokens = prefixes.tokens, prefixes.mask, prefixes.path_tokens
  known = jnp.arange(tokens.shape[1])[None] < prefixes.length[:, None]
  if prefixes.begin is not None:
    known = known & (jnp.arange(tokens.shape[1])[None] >= prefixes.begin[:, None])
  counts = jnp.zeros((tokens.shape[0], vocabulary), logits.dtype)
  counts = counts.at[_row(tokens), _place(jnp.where(known, tokens, -1), vocabulary)].add(1, mode="drop")
  penalised = _penalty(logits, counts[:, None], params)
  if width == 1:
    return penalised
  drafted = mask & (jnp.arange(width) > 0)  # the root is among the known tokens
  equal = path_tokens[:, :, None] == path_tokens[:, None, :]
  on_path = jnp.einsum("bti,bij->btj", drafted.astype(logits.dtype), equal.astype(logits.dtype),
                       precision=jax.lax.Precision.HIGHEST)  # how often node t's path holds the token of node j
  inside = jnp.clip(path_tokens, 0, vocabulary - 1)
  total = jnp.take_along_axis(counts, inside, axis=1)[:, None] + on_path
  spread = jnp.broadcast_to(inside[:, None], mask.shape)
  own = _penalty(jnp.take_along_axis(logits, spread, axis=2), total, params)
  place = jnp.where(drafted, _place(path_tokens, vocabulary)[:, None], vocabulary)
  batch, node = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(width)[None, :, None]
  return penalised.at[batch, node, place].set(own, mode="drop")


def _penalty(logits, counts, params):
  """Logits f[B, T, *] of tokens seen `counts` times: repetition as in CTRL (arXiv 1909.05858) and Transformers, then
  frequency and presence as in OpenAI's interface."""
  per_row = lambda x: x.astype(logits.dtype)[:, None, None]
  seen, out = counts > 0, logits
  if params.repetition_penalty is not None:
    factor = per_row(params.repetition_penalty)
    out = jnp.where(seen, jnp.where(out > 0, out / factor, out * factor), out)
  if params.frequency_penalty is not None:
    out = out - per_row(params.frequency_penalty) * counts
  if params.presence_penalty is not None:
    out = out - jnp.where(seen, per_row(params.presence_penalty), 0)
  return _bounded(out, logits == -jnp.inf)


def _bounded(logits, banned):
  """Finite, but for banned ids: a factor of 1e-38 or a bias of 1e38 must not make an infinity, whose law is NaN."""
  greatest = jnp.finfo(logits.dtype).max / 4
  return jnp.where(banned, -jnp.inf, jnp.clip(logits, -greatest, greatest))


def _keep(logits, kept):
  """Only what is `kept` bool[B, T, V]; all of a node's ids where that would leave none."""
  masked = jnp.where(kept, logits, -jnp.inf)
  return jnp.where(masked.max(-1, keepdims=True) > -jnp.inf, masked, logits)


def _row(ids):
  return jnp.arange(ids.shape[0])[:, None]


def _place(ids, vocabulary):
  """Where a scatter writes; a negative id, which would count from the end, is out of range and dropped."""
  return jnp.where((ids >= 0) & (ids < vocabulary), ids, vocabulary)
