"""Medusa's heads: residual blocks on the target's last hidden state, each head for one place ahead.

Medusa (arXiv 2401.10774, FasterDecoding/Medusa): behind token t the target's head predicts token t + 1 and head i, from
0, token t + 2 + i, all from the same hidden state. A head is `blocks` times x + SiLU(W x + b), one module used again, and
a vocabulary matrix: its own as published, or the target's, of which it may take some rows only.

Letters: B batch rows, N heads, E width of the target, U draft ids, V vocabulary.
"""
import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from specjax.models import layers


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """Static facts: heads N, blocks of each, width E, vocab_size V, draft_vocab U.

  `accuracy`, if it was measured, says by head and rank how often that head's choice of that rank was the target's token.
  """
  heads: int
  blocks: int
  width: int
  vocab_size: int
  draft_vocab: int
  accuracy: tuple[tuple[float, ...], ...] | None = None


@struct.dataclass
class MedusaHead:
  """Weights, each matrix [out, in]."""
  linear: tuple[jax.Array, ...]       # N x f[E, E]
  bias: tuple[jax.Array, ...]         # N x f[E]
  vocabulary: tuple[jax.Array, ...] | None  # N x f[U, E]; None: the target's head, its rows `ids`
  ids: jax.Array | None               # i32[U]; the target's id of each draft id, ascending; None if U = V
  config: MedusaConfig = struct.field(pytree_node=False)

  def check(self, target) -> None:
    """Raises ValueError for a target that these heads were not made for."""
    check_sizes(self.config, target)

  def states(self, hidden: jax.Array, count: int | None = None) -> jax.Array:
    """What each of the first `count` heads, or all, makes of `hidden` f[B, E], behind the target's final norm:
    f[B, count, E]."""
    made = []
    for linear, bias in zip(self.linear[:count], self.bias[:count], strict=True):
      x = hidden.T
      for _ in range(self.config.blocks):
        x = block(linear, bias, x)
      made.append(x.T)
    return jnp.stack(made, axis=1)

  def logits(self, states: jax.Array, shared: jax.Array | None) -> jax.Array:
    """f32[B, count, U] from `states`; `shared` f[U, E], the target's head at `ids`, is for heads without a matrix of
    their own."""
    batch, count, width = states.shape
    if self.vocabulary is None:
      out = layers.linear(shared, states.reshape(-1, width).T).T.reshape(batch, count, -1)
    else:
      out = jnp.stack([layers.linear(matrix, states[:, i].T).T for i, matrix in enumerate(self.vocabulary[:count])], 1)
    return jax.lax.optimization_barrier(out.astype(jnp.float32))


def check_sizes(config, target) -> None:
  """Raises ValueError for a target of another width, or with ids that heads of `config` know nothing of."""
  # A published head may count rows of the vocabulary that only fill it up.
  if target.config.width != config.width or target.config.num_tokens > config.vocab_size:
    raise ValueError(f"the heads are for a target of {config.vocab_size} token ids and width {config.width}, and this "
                     f"one has {target.config.num_tokens} and {target.config.width}")


def block(linear: jax.Array, bias: jax.Array, columns: jax.Array) -> jax.Array:
  """A residual block, x + SiLU(W x + b), of f[E, N]; `linear` f[E, E], `bias` f[E]."""
  return columns + jax.nn.silu(layers.linear(linear, columns, bias))
