"""The randomness of a row: which key a draw uses.

A row's key is `fold_in(key, seed)`, with the request's index as the default seed, so that rows may be permuted,
batched or run alone and keep their text. There are two kinds of draws:

- A draw of *the token at a position* (TOKEN: one uniform; NOISE: an exponential a vocabulary entry) is keyed by that
  position. Plain decoding and point verification, or coupled drafters and verifiers, then make the same draw whatever
  was drafted.
- Every other draw lives in one step: it is keyed by the position of the step's root, the purpose, and an index. Two
  steps never share one. Draft noise keyed by the drafted position alone returns in the next step after it has shaped
  this verdict, and biases block and traversal verification.
"""
import chex
from flax import struct
import jax
import jax.numpy as jnp

TOKEN, NOISE, DRAFT, STOP, RESIDUAL = range(5)


@struct.dataclass
class Uniforms:
  """What a verifier draws from; a purpose that it does not name is None. Entries lie strictly inside (0, 1)."""
  token: jax.Array | None = None     # f32[B, T]; for the token that follows each node
  stop: jax.Array | None = None      # f32[B]; where the accepted path ends
  residual: jax.Array | None = None  # f32[B]; the new token
  noise: jax.Array | None = None     # f32[B, T, V]; standard exponentials, not uniforms, for the token after each node


def row_keys(key: jax.Array, seeds: jax.Array) -> jax.Array:
  """key[B] from one typed key and `seeds` i32[B]."""
  chex.assert_rank(seeds, 1)
  return jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds)


def uniforms(purposes: tuple[int, ...], keys: jax.Array, root: jax.Array, positions: jax.Array, vocabulary: int,
             noisy: jax.Array | bool = True) -> Uniforms:
  """Everything a verifier of these `purposes` draws from in one step.

  Args:
    purposes: of TOKEN, NOISE, STOP and RESIDUAL.
    keys: key[B], of the rows. root: i32[B], position of the pending token.
    positions: i32[B, T], of the token that follows each node. vocabulary: V.
    noisy: bool, whether noise will be read; where not, as in greedy batches, it is not drawn.
  """
  step = lambda purpose: step_uniform(keys, root, purpose) if purpose in purposes else None
  noise = lambda: jax.lax.cond(noisy, lambda: position_noise(keys, positions, vocabulary),
                               lambda: jnp.ones((*positions.shape, vocabulary), jnp.float32))
  return Uniforms(token=token_uniforms(keys, positions) if TOKEN in purposes else None,
                  noise=noise() if NOISE in purposes else None,
                  stop=step(STOP), residual=step(RESIDUAL))


def token_uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """One uniform in (0, 1) for the token at every position: f32[B, T] from key[B] and `positions` i32[B, T]."""
  draw = lambda key, position: _uniform(position_key(key, position, TOKEN))
  return jax.vmap(jax.vmap(draw, (None, 0)))(keys, positions)


def position_noise(keys: jax.Array, positions: jax.Array, vocabulary: int) -> jax.Array:
  """Standard exponentials for the token at every position: f32[B, T, V] from key[B] and `positions` i32[B, T].

  The token drawn from a law w is the argmax of w / noise (an exponential race, the Gumbel trick after a logarithm).
  32 random bits each: the smallest noise, which decides for improbable tokens, must not be coarse.
  """
  draw = lambda key, position: _exponentials(position_key(key, position, NOISE), vocabulary)
  # Position by position: the generator's own arrays would otherwise be of the size of all noise, several times.
  noise = jax.lax.map(lambda place: jax.vmap(draw)(keys, place), positions.T)
  return jnp.swapaxes(noise, 0, 1)


def step_uniform(keys: jax.Array, root: jax.Array, purpose: int, index: jax.Array | int = 0) -> jax.Array:
  """One uniform in (0, 1) of one step, keyed by (root, purpose, index): f32[B] from key[B], the root's position
  i32[B] and a scalar `index`, which node or inner round of the step it is for."""
  return jax.vmap(lambda key, place: _uniform(step_key(key, place, purpose, index)))(keys, root)


def step_noise(keys: jax.Array, root: jax.Array, index: jax.Array, vocabulary: int) -> jax.Array:
  """Exponentials for draft draws of one step, keyed by (root, DRAFT, index): f32[B, N, V] from `index` i32[B, N]."""
  draw = lambda key, place, i: _exponentials(step_key(key, place, DRAFT, i), vocabulary)
  return jax.vmap(jax.vmap(draw, (None, None, 0)))(keys, root, index)


def position_key(key: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
  """The key of one row for the token at a position."""
  return jax.random.fold_in(jax.random.fold_in(key, position), purpose)


def step_key(key: jax.Array, root: jax.Array, purpose: int, index: jax.Array) -> jax.Array:
  """The key of one row for a draw that lives in the step at `root` only; index: node or inner round."""
  return jax.random.fold_in(position_key(key, root, purpose), index)


def _uniform(key):
  """A uniform strictly inside (0, 1): 23 random bits and a half, so from 2^-24 to 1 - 2^-24, exact in float32."""
  bits = jax.random.bits(key, dtype=jnp.uint32) >> 9
  return (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0 ** -23)


def _exponentials(key, count):
  """`count` standard exponentials, positive and finite."""
  bits = jax.random.bits(key, (count,), dtype=jnp.uint32)
  uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0 ** -32)
  return -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2.0 ** -24)))
