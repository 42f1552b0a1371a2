"""DSpark's drafter: DFlash's block, a Markov head that tells each place which token was drafted before it, and a guess
of how likely the next one is accepted.

DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec). Place j of the block drafts the token *behind* it, j + 1 behind the
pending one, so all J places draft (DFlash's place j drafts its own token, and the first none). Its logits are those of
the block plus `second @ first[previous token]`. The confidence of a place is the logit of the chance that its draft is
accepted, 1 - TV(p, q), read from its hidden state and the previous token. DeepSpec also has gated and recurrent Markov
heads; these are not here.

Letters: B batch rows, J places, E width, R rank of the Markov head, U draft ids, V vocabulary.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.models import dflash


@struct.dataclass
class DSparkHead:
  """Weights, each matrix [out, in]."""
  drafter: dflash.DFlashHead       # its block, without ids of its own
  first: jax.Array | None          # f[V, R]; of the previous token; None without a Markov head
  second: jax.Array | None         # f[U, R]
  confidence: jax.Array | None     # f[E + R], or f[E] if it does not read the previous token; None without one
  confidence_bias: jax.Array | None  # f[]
  ids: jax.Array | None            # i32[U]; the target's id of each draft id, ascending; None if U = V

  @property
  def config(self) -> dflash.DFlashConfig:
    """Of the block; `block` counts places that all draft."""
    return self.drafter.config

  @property
  def features(self) -> tuple[int, ...]:
    """The target's layers that are read."""
    return self.drafter.features

  @property
  def rank(self) -> int:
    """R; 0 without a Markov head."""
    return 0 if self.first is None else self.first.shape[1]

  def check(self, target) -> None:
    """Raises ValueError for a target that this drafter was not made for."""
    self.drafter.check(target)

  def init_cache(self, batch: int, slots: int) -> cache_lib.KVCache:
    """As of `dflash.DFlashHead`."""
    return self.drafter.init_cache(batch, slots)

  def follow(self, logits: jax.Array, previous: jax.Array) -> jax.Array:
    """Logits f[..., U] of a place whose previous token is known, `previous` i32[...]."""
    if self.first is None:
      return logits
    # Ids in front, as in every product with a few columns: see `models.layers`.
    latent = jnp.take(self.first, previous.reshape(-1), axis=0, mode="clip")
    added = jnp.einsum("ur,nr->nu", self.second[:logits.shape[-1]], latent)
    return logits + added.reshape(logits.shape).astype(logits.dtype)

  def acceptance(self, hidden: jax.Array, previous: jax.Array) -> jax.Array:
    """The logit of the chance that the draft of a place is accepted, f32[...], from its hidden state f[..., E] and the
    previous token i32[...]; `confidence` is there."""
    given = hidden
    if self.confidence.shape[0] > hidden.shape[-1]:
      given = jnp.concatenate([hidden, jnp.take(self.first, previous, axis=0, mode="clip").astype(hidden.dtype)], -1)
    return ((given * self.confidence).sum(-1) + self.confidence_bias).astype(jnp.float32)
