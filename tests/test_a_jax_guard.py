"""The guard against jax#39103: on a CPU jaxlib 0.10.2 silently returns wrong products. Runs before everything else.

The reproducer of the public issue in integers that float32 holds: identity times row, squared and summed. Right is
32768**2 = 1073741824 in the last place; the broken release returned 1065369600 there on the reference machine.
"""
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np


def test_vmapped_product_and_sum_of_squares_is_right_under_jit():
  count = 32769
  x = np.zeros((count, 3), np.float32)
  x[:, 0] = np.arange(count)
  matrix = jnp.eye(3, dtype=jnp.float32)
  squares = jax.jit(lambda x: jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(x))(x)
  wrong = np.flatnonzero(np.asarray(squares) != x[:, 0] ** 2)
  assert not wrong.size, (
      f"jaxlib {jaxlib.__version__} multiplies wrongly on this machine ({wrong.size} of {count} entries, the last is "
      f"{float(squares[-1]):.0f} instead of 1073741824; jax#39103). Install jax>=0.10.1,!=0.10.2; nothing that this "
      "version computes can be trusted.")
