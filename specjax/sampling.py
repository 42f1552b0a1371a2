"""What a row asks of its tokens, and the one pipeline that turns logits into the law they are drawn from.

Order: temperature, top-k, top-p, min-p. Plain and speculative decoding call the same functions, so a filter can never
hold for one and not for the other. Temperature 0 is a one-hot law at the greatest logit, the lowest id on ties.
Filters keep every token that ties with the last one kept. Thresholds are found by bisection over the bit patterns of
float32, which needs no sort of the vocabulary.

Letters: B batch rows, T nodes, V vocabulary.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

GREEDY, TEMPERATURE, FILTERED = range(3)
_BLOCK = 256  # vocabulary block of the two-level sum


@struct.dataclass
class SamplingParams:
  """Sampling parameters, one value a row. Arrays, so that changing them never recompiles.

  Scalars are broadcast to the batch by `batch`.
  """
  temperature: jax.Array | float = 0.0  # f32[B]; 0 is greedy
  top_k: jax.Array | int = 0            # i32[B]; 0 keeps all
  top_p: jax.Array | float = 1.0        # f32[B]; 1 keeps all
  min_p: jax.Array | float = 0.0        # f32[B]; 0 keeps all; relative to the most probable token
  seed: jax.Array | int | None = None   # i32[B]; None: the index of the request

  def batch(self, rows: int) -> "SamplingParams":
    """The same parameters as arrays of `rows` values, checked.

    Raises:
      ValueError: names the parameter, the row and the allowed range.
    """
    return SamplingParams(
        temperature=_rows("temperature", self.temperature, rows, np.float32, lambda x: x >= 0, "0 (greedy) or more"),
        top_k=_rows("top_k", self.top_k, rows, np.int32, lambda x: x >= 0, "0 (keep all) or more"),
        top_p=_rows("top_p", self.top_p, rows, np.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
        min_p=_rows("min_p", self.min_p, rows, np.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
        seed=_rows("seed", np.arange(rows) if self.seed is None else self.seed, rows, np.int32, lambda x: x >= 0,
                   "0 or more"))

  def mode(self) -> jax.Array:
    """i32: GREEDY, TEMPERATURE or FILTERED, the least work that honours every row; for `draw`."""
    sampled = jnp.any(self.temperature > 0)
    filtered = jnp.any((self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)))
    return jnp.where(filtered, FILTERED, jnp.where(sampled, TEMPERATURE, GREEDY)).astype(jnp.int32)


def _rows(name, value, rows, dtype, allowed, wanted):
  # The shape first, then what each value may be, named with the row that breaks it.
  given = np.asarray(value)
  if given.shape not in ((), (rows,)):
    raise ValueError(f"{name} has shape {given.shape}; allowed are one value or one a row, ({rows},)")
  if given.dtype.kind not in "iuf":
    raise ValueError(f"{name}={value!r}: it must be a number, {wanted}")
  given = np.broadcast_to(given, (rows,))
  limits = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else np.finfo(dtype)
  # Compared before the cast: beyond these limits it would wrap around or become infinite.
  fits = np.isfinite(given.astype(np.float64)) & (given <= limits.max) & allowed(given)
  if np.issubdtype(dtype, np.integer):
    fits &= given == np.floor(given)
    wanted = f"{wanted}, a whole number of at most {limits.max}"
  if not fits.all():
    row = int(np.argmin(fits))
    raise ValueError(f"{name}={given[row].item()} in row {row}: it must be {wanted}")
  return jnp.asarray(given.astype(dtype))


def process(logits: jax.Array, params: SamplingParams) -> jax.Array:
  """The law of the next token: f32[B, T, V], each row summing to 1, from `logits` f[B, T, V] and batched params."""
  chex.assert_rank(logits, 3)
  logits = logits.astype(jnp.float32)
  weights = _weights(logits, params, filtered=True)
  law = weights / weights.sum(-1, keepdims=True)
  one_hot = jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=jnp.float32)
  return jnp.where((params.temperature == 0)[:, None, None], one_hot, law)


def draw(logits: jax.Array, params: SamplingParams, uniforms: jax.Array, mode: jax.Array) -> jax.Array:
  """Draws a token at every node from the law that `process` returns, by inversion of its cumulative sum.

  Args:
    logits: f[B, T, V].
    params: batched parameters.
    uniforms: f32[B, T], strictly inside (0, 1).
    mode: i32, of `params.mode()`: greedy batches compute no softmax, unfiltered ones look for no threshold.

  Returns:
    i32[B, T]; a drawn id always has positive probability.
  """
  chex.assert_shape(uniforms, logits.shape[:2])
  greedy = argmax(logits)

  def sampled(filtered):
    weights = _weights(logits.astype(jnp.float32), params, filtered)
    return jnp.where((params.temperature == 0)[:, None], greedy, invert(weights, uniforms))

  return jax.lax.switch(mode, [lambda: greedy, lambda: sampled(False), lambda: sampled(True)])


def argmax(logits: jax.Array) -> jax.Array:
  """The id of the greatest logit, the lowest on ties: i32[...] from f[..., V].

  Two levels: the greatest of every block, the first block that has the greatest, the first place in it. A maximum is
  vectorized; XLA's argmax, which carries an index along, takes ten times as long on a CPU.
  """
  blocks = _blocks(logits, -jnp.inf)
  block = jnp.argmax(blocks.max(-1), -1)
  inside = jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
  return (block * _BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)


def invert(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
  """The id at which the cumulative sum of `weights` f32[..., V] passes `uniforms` f32[...] times the total.

  The sum is taken in two levels, blocks and then ids inside the block that is hit, which is several times faster than
  one cumulative sum over the vocabulary and rounds less. An id of weight 0 is never returned.
  """
  blocks = _blocks(weights, 0)
  sums = blocks.sum(-1)
  below = jnp.cumsum(sums, -1)
  goal = uniforms * below[..., -1]
  block = _first(below > goal[..., None], sums > 0)
  before = jnp.take_along_axis(below - sums, block[..., None], -1)[..., 0]
  inside = jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
  token = _first(before[..., None] + jnp.cumsum(inside, -1) > goal[..., None], inside > 0)
  return (block * _BLOCK + token).astype(jnp.int32)


def _blocks(x, fill):
  """f[..., V / block, block], the last block filled up."""
  missing = -x.shape[-1] % _BLOCK
  padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)
  return padded.reshape(*x.shape[:-1], -1, _BLOCK)


def _first(passed, possible):
  """The first index that passed and is possible; where rounding lets none pass, the last possible one."""
  hit = passed & possible
  last = possible.shape[-1] - 1 - jnp.argmax(possible[..., ::-1], -1)
  return jnp.where(hit.any(-1), jnp.argmax(hit, -1), last)


def _weights(logits, params, filtered):
  """Unnormalised law f32[B, T, V] with greatest entry 1. Rows at temperature 0 are computed at 1 and not used."""
  per_row = lambda x: x[:, None, None]
  temperature = per_row(jnp.where(params.temperature > 0, params.temperature, 1.0))
  # The difference is taken before the division: with a tiny temperature the quotient of a large logit overflows.
  weights = jnp.exp((logits - logits.max(-1, keepdims=True)) / temperature)
  if not filtered:
    return weights
  vocabulary = logits.shape[-1]
  keep = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocabulary), vocabulary)
  count = lambda t: (weights >= t).sum(-1, keepdims=True)
  kept_k = _greatest_threshold(weights, jnp.any(keep < vocabulary), lambda t: count(t) >= per_row(keep))
  weights = jnp.where(weights >= kept_k, weights, 0.0)
  # With top_p = 1 rounding of the sum must not drop the tail, so such rows ask for nothing.
  share = jnp.where(params.top_p < 1, params.top_p, 2.0)
  goal = per_row(share) * weights.sum(-1, keepdims=True)
  mass = lambda t: jnp.where(weights >= t, weights, 0.0).sum(-1, keepdims=True)
  kept_p = _greatest_threshold(weights, jnp.any(params.top_p < 1), lambda t: mass(t) >= goal)
  return jnp.where((weights >= kept_p) & (weights >= per_row(params.min_p)), weights, 0.0)


def _greatest_threshold(weights, wanted, enough):
  """The greatest t in [0, 1] for which `enough(t)` holds, 0 if none does or it is not wanted: f32[B, T, 1].

  Non-negative floats are ordered as their bit patterns are, so the bisection walks over those: 30 halvings find the
  exact value of the last weight kept.
  """
  shape = (*weights.shape[:2], 1)
  low = jnp.zeros(shape, jnp.int32)
  high = jnp.full(shape, np.float32(1.0).view(np.int32) + 1, jnp.int32)  # never enough is asked of it

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    holds = enough(jax.lax.bitcast_convert_type(middle, jnp.float32))
    return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

  low = jax.lax.cond(wanted, lambda: jax.lax.fori_loop(0, 31, halve, (low, high))[0], lambda: low)
  return jax.lax.bitcast_convert_type(low, jnp.float32)
