"""The one pipeline that turns logits into the law that tokens are drawn from, and the draw.

Order: what `processors.adjust` does, then temperature, top-k, top-p, min-p. Plain and speculative decoding call the
same functions, so a filter can never hold for one and not for the other. Temperature 0 is a one-hot law at the greatest
logit, the lowest id on ties. Filters keep every token that ties with the last one kept. Their thresholds are read from
a short sorted list of the greatest weights; where that list does not reach, they are found by bisection over the bit
patterns of floats. Neither sorts the vocabulary.

Everything is computed in float32, or in float64 from logits in float64.

Letters: B batch rows, T nodes, V vocabulary.
"""
import chex
import jax
import jax.numpy as jnp
import numpy as np

from specjax import greatest
from specjax import processors
from specjax import sampling_params
from specjax import vocabulary

# What a row asks for stands in a module of its own; its users find it here as well.
SamplingParams = sampling_params.SamplingParams
GREEDY, TEMPERATURE, FILTERED = sampling_params.GREEDY, sampling_params.TEMPERATURE, sampling_params.FILTERED

_BLOCK = 256      # vocabulary block of the two-level sum and argmax
_LISTED = 128     # greatest weights that are sorted: as many as most requests keep


def process(logits: jax.Array, params: SamplingParams, prefixes: processors.Prefixes | None = None) -> jax.Array:
  """The law of the next token at every node, each row summing to 1.

  Args:
    logits: f[B, T, V], as the target gives them.
    params: batched parameters.
    prefixes: the text before each node. Without it the logits are taken as they are.

  Returns:
    f32[B, T, V], f64 for f64.

  Raises:
    ValueError: for parameters that change logits by their text or their row, when there are no prefixes.
  """
  chex.assert_rank(logits, 3)
  if prefixes is not None:
    logits = processors.adjust(logits, params, prefixes)
  elif params.adjusts:
    raise ValueError("these parameters hold penalties, a bias, banned or allowed ids, or a minimum of new tokens, "
                     "which need the text before each node; give prefixes, a processors.Prefixes")
  return _law(logits, params, filtered=True)


def law(logits: jax.Array, params: SamplingParams, mode: jax.Array) -> jax.Array:
  """The law that `process` returns, with no more work than `mode` i32, of `params.mode()`, asks for: f[B, T, V].

  The logits f[B, T, V] are adjusted already.
  """
  one_hot = lambda: jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=_dtype(logits))
  return jax.lax.switch(mode, [one_hot, lambda: _law(logits, params, False), lambda: _law(logits, params, True)])


def draw(logits: jax.Array, params: SamplingParams, uniforms: jax.Array, mode: jax.Array) -> jax.Array:
  """Draws a token at every node from the law that `process` returns, by inversion of its cumulative sum.

  Args:
    logits: f[B, T, V], adjusted already.
    params: batched parameters.
    uniforms: f32[B, T], strictly inside (0, 1).
    mode: i32, of `params.mode()`: greedy batches compute no softmax, unfiltered ones look for no threshold.

  Returns:
    i32[B, T]; a drawn id always has positive probability.
  """
  chex.assert_shape(uniforms, logits.shape[:2])

  def sampled(filtered):
    # Filled up before anything is computed from them, where that fuses: else `invert` copies its weights to do it.
    whole = logits if vocabulary.division(logits) is not None else _filled(logits, -jnp.inf, _BLOCK)
    drawn = invert(_weights(whole, params, filtered), uniforms)
    return jnp.where((params.temperature == 0)[:, None], _greedy(logits, params), drawn)

  return jax.lax.switch(mode, [lambda: argmax(logits), lambda: sampled(False), lambda: sampled(True)])


def argmax(logits: jax.Array) -> jax.Array:
  """The id of the greatest logit, the lowest on ties: i32[...] from f[..., V].

  Two levels: the greatest of every block, the first block that has the greatest, the first place in it. A maximum is
  vectorized; XLA's argmax, which carries an index along, takes ten times as long on a CPU.
  """
  if (layout := vocabulary.division(logits)) is not None:
    return layout.by_parts(_argmax_of_parts, (logits,), ())
  blocks = _blocks(logits, -jnp.inf, _BLOCK)
  block = jnp.argmax(blocks.max(-1), -1)
  inside = jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
  return (block * _BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)


def invert(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
  """The id at which the cumulative sum of `weights` f32[..., V] passes `uniforms` f32[...] times the total.

  The sum is taken in two levels, blocks and then ids inside the block that is hit, which is several times faster than
  one cumulative sum over the vocabulary and rounds less. An id of weight 0 is never returned.
  """
  if (layout := vocabulary.division(weights)) is not None:
    return layout.by_parts(_invert_parts, (weights,), (uniforms,))
  blocks = _blocks(weights, 0, _BLOCK)
  hit = lambda block: jnp.take_along_axis(blocks, block[..., None, None], -2)[..., 0, :]
  block, token = _invert_blocks(blocks.sum(-1), hit, uniforms)
  return (block * _BLOCK + token).astype(jnp.int32)


def _argmax_of_parts(part, logits):
  own = logits.max(-1)
  place = jnp.where(own == part.greatest(own), part.first + argmax(logits), np.iinfo(np.int32).max)
  return -part.greatest(-place.astype(jnp.int32))


def _invert_parts(part, weights, uniforms):
  """Every device has all sums of blocks, and the block that is hit from whose it is: the arithmetic is that of one
  device, so that one uniform is one id on every mesh whose parts are whole blocks."""
  blocks = _blocks(weights, 0, _BLOCK)
  count = blocks.shape[-2]

  def hit(block):
    place = block - part.index * count
    inside = (place >= 0) & (place < count)
    own = jnp.take_along_axis(blocks, jnp.where(inside, place, 0)[..., None, None], -2)[..., 0, :]
    return part.total(jnp.where(inside[..., None], own, 0))

  block, token = _invert_blocks(part.joined(blocks.sum(-1)), hit, uniforms)
  return (block // count * part.size + block % count * _BLOCK + token).astype(jnp.int32)


def _invert_blocks(sums, hit, uniforms):
  """The block and the place in it, i32[...] each, from all blocks' sums f[..., N] and what gives the one that is hit."""
  below = jnp.cumsum(sums, -1)
  goal = uniforms * below[..., -1]
  block = _first(below > goal[..., None], sums > 0)
  before = jnp.take_along_axis(below - sums, block[..., None], -1)[..., 0]
  inside = hit(block)
  return block, _first(before[..., None] + jnp.cumsum(inside, -1) > goal[..., None], inside > 0)


def _blocks(x, fill, size):
  """f[..., V / size, size], the last block filled up."""
  return _filled(x, fill, size).reshape(*x.shape[:-1], -1, size)


def _filled(x, fill, size):
  """`x` f[..., V] filled up to a multiple of `size`."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)], constant_values=fill)


def _first(passed, possible):
  """The first index that passed and is possible; where rounding lets none pass, the last possible one."""
  hit = passed & possible
  last = possible.shape[-1] - 1 - jnp.argmax(possible[..., ::-1], -1)
  return jnp.where(hit.any(-1), jnp.argmax(hit, -1), last)


def _dtype(logits):
  return jnp.promote_types(logits.dtype, jnp.float32)


def _greedy(logits, params):
  """The argmax i32[B, T], if a row is greedy; zeros, which nobody reads, if none is."""
  none = lambda: jnp.zeros(logits.shape[:2], jnp.int32)
  return jax.lax.cond(jnp.any(params.temperature == 0), lambda: argmax(logits), none)


def _law(logits, params, filtered):
  weights = _weights(logits, params, filtered)
  one_hot = _greedy(logits, params)[..., None] == jnp.arange(logits.shape[-1])
  greedy = (params.temperature == 0)[:, None, None]
  return jnp.where(greedy, one_hot.astype(weights.dtype), weights / weights.sum(-1, keepdims=True))


def _weights(logits, params, filtered):
  """Unnormalised law f[B, T, V] with greatest entry 1. Rows at temperature 0 are computed at 1 and not used."""
  dtype = _dtype(logits)
  logits = logits.astype(dtype)
  per_row = lambda x: x.astype(dtype)[:, None, None]
  temperature = per_row(jnp.where(params.temperature > 0, params.temperature, 1.0))
  # The difference is taken before the division: with a tiny temperature the quotient of a large logit overflows.
  weights = jnp.exp((logits - logits.max(-1, keepdims=True)) / temperature)
  if not filtered:
    return weights
  # Greedy rows ask for nothing: their neighbours must not pay for filters that are not used.
  sampled = params.temperature > 0
  keep = jnp.where(sampled & (params.top_k > 0) & (params.top_k < logits.shape[-1]), params.top_k, 0)
  share = jnp.where(sampled & (params.top_p < 1), params.top_p, 0.0)
  searched = jnp.any((keep > 0) | (share > 0))
  none = lambda: jnp.zeros((*weights.shape[:2], 1), dtype)
  kept = jax.lax.cond(searched, lambda: _last_kept(weights, keep, per_row(share)), none)
  return jnp.where((weights >= kept) & (weights >= per_row(params.min_p)), weights, 0)


def _last_kept(weights, keep, share):
  """The least weight that both top-k and top-p keep: f[B, T, 1].

  Args:
    weights: f[B, T, V].
    keep: i32[B], for top-k; 0 keeps all.
    share: f[B, 1, 1], for top-p, of the mass that top-k leaves; 0 keeps all. (With top_p = 1 rounding of the sum must
      not drop the tail.)
  """
  listed, _ = greatest.greatest(weights, min(_LISTED, weights.shape[-1]))
  last = listed.shape[-1]
  rank = jnp.broadcast_to(jnp.clip(keep - 1, 0, last - 1)[:, None, None], (*weights.shape[:2], 1))
  count = lambda t: (weights >= t).sum(-1, keepdims=True)
  keep = keep[:, None, None]
  kept_k = _threshold(weights, jnp.take_along_axis(listed, rank, -1), keep > last, lambda t: count(t) >= keep)
  kept_k = jnp.where(keep > 0, kept_k, 0)

  mass = lambda t: jnp.where(weights >= jnp.maximum(t, kept_k), weights, 0).sum(-1, keepdims=True)
  goal = share * mass(0)
  reached = jnp.cumsum(listed, -1) >= goal  # inside what top-k keeps, as the goal is no more than its mass
  in_list = jnp.take_along_axis(listed, jnp.argmax(reached, -1)[..., None], -1)
  beyond = (share > 0) & ~reached.any(-1, keepdims=True)
  kept_p = _threshold(weights, in_list, beyond, lambda t: mass(t) >= goal)
  return jnp.maximum(kept_k, jnp.where(share > 0, kept_p, 0))


def _threshold(weights, listed, beyond, enough):
  """`listed` f[B, T, 1], but where the threshold lies `beyond` that list, bool[B, T or 1, 1], the greatest t in [0, 1]
  for which `enough(t)` holds, 0 if none does. Each row's value depends on that row only, whoever needs the search.

  Non-negative floats are ordered as their bit patterns are, so the bisection walks over those: 30 halvings (62 in
  float64) find the exact value of the last weight kept.
  """
  bits = jnp.dtype(f"int{jnp.finfo(weights.dtype).bits}")
  one = np.ones((), weights.dtype).view(bits)

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    holds = enough(jax.lax.bitcast_convert_type(middle, weights.dtype))
    return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

  def search():
    low = jnp.zeros(listed.shape, bits)
    high = jnp.full(listed.shape, one + 1, bits)  # never enough is asked of it
    low, _ = jax.lax.fori_loop(0, jnp.finfo(weights.dtype).bits - 2, halve, (low, high))
    return jnp.where(beyond, jax.lax.bitcast_convert_type(low, weights.dtype), listed)

  return jax.lax.cond(jnp.any(beyond), search, lambda: listed)
