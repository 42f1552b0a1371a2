"""The randomness of a row: which key a draw at a position for a purpose uses.

A row's key is `fold_in(key, seed)`, with the request's index as the default seed, so that rows may be permuted,
batched or run alone and keep their text. A `token` draw, the one that plain decoding and point verification make, is
keyed by the drawn token's own position: plain and speculative decoding then draw the same token from the same law
whatever was drafted. The purpose in the key keeps other kinds of draws apart from it.
"""
import chex
import jax
import jax.numpy as jnp

TOKEN = 0  # purpose of a draw: the next token of the text


def row_keys(key: jax.Array, seeds: jax.Array) -> jax.Array:
  """key[B] from one typed key and `seeds` i32[B]."""
  chex.assert_rank(seeds, 1)
  return jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds)


def token_uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
  """One uniform in (0, 1) for the token at every position: f32[B, T] from key[B] and `positions` i32[B, T]."""
  draw = lambda key, position: _uniform(jax.random.fold_in(jax.random.fold_in(key, position), TOKEN))
  return jax.vmap(jax.vmap(draw, (None, 0)))(keys, positions)


def _uniform(key: jax.Array) -> jax.Array:
  """A uniform strictly inside (0, 1): 23 random bits and a half, so from 2^-24 to 1 - 2^-24, exact in float32."""
  bits = jax.random.bits(key, dtype=jnp.uint32) >> 9
  return (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0 ** -23)
