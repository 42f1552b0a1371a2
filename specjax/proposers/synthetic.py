"""SYNTHETIC drafts: chains of tokens that nobody chose, for a verifier that does not look at them.

The other half of `verifiers.synthetic`: together they are a speculative step whose acceptance is stated and whose work
is real, for machines on which no drafter is at hand. A token is the pending one plus its depth, so that the drafted
ones differ, as real ones do: each goes through experts of its own. Drafting costs nothing, or the reading of so many
bytes a drafted token, as a drafter's weights would be read.

Letters: N drafted tokens.
"""
from typing import Optional

from flax import struct
import jax
import jax.numpy as jnp

from specjax import tree as tree_lib
from specjax.proposers import base
from specjax.verifiers import synthetic

_UNSEEN = 1e30  # more than anything that is read; the compiler does not know


@struct.dataclass
class Synthetic(base.Stateless):
  """Chains of as many tokens as the law has positions, in every running row that has room for them.

  Under another verifier than `verifier` these are point drafts, and nearly all wrong.

  Attributes:
    acceptance: N probabilities, see `verifiers.synthetic.LossySynthetic`.
    read: f32[bytes / 4], read once a drafted token, see `with_cost`; None: drafts cost nothing.

  Raises:
    ValueError: for a law that is empty, too long, or leaves [0, 1].
  """
  acceptance: tuple[float, ...] = struct.field(pytree_node=False)
  read: Optional[jax.Array] = None

  def __post_init__(self):
    synthetic.check(self.acceptance)

  @property
  def num_tokens(self) -> int:
    return len(self.acceptance)

  @property
  def verifier(self) -> synthetic.LossySynthetic:
    """The verifier that accepts its drafts by its law."""
    return synthetic.LossySynthetic(self.acceptance)

  @property
  def draft_bytes(self) -> int:
    """Bytes that each drafted token reads."""
    return 0 if self.read is None else self.read.nbytes

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del cache, keys
    count = jnp.where(context.active, jnp.clip(context.budget - 1, 0, self.num_tokens), 0).astype(jnp.int32)
    ahead = 1 + jnp.arange(self.num_tokens, dtype=jnp.int32)[None]
    draft = (context.pending[:, None] + ahead + self._spend(jnp.max(count))) % target.vocab_size
    return tree_lib.chain(context.pending, draft, count), state

  def _spend(self, passes):
    """0, behind so many passes over `read` that need each other's results."""
    if self.read is None:
      return 0
    found = jax.lax.fori_loop(0, passes, lambda _, last: jnp.max(jnp.abs(self.read - last)), jnp.float32(0))
    return (found > _UNSEEN).astype(jnp.int32)


def with_cost(acceptance: tuple[float, ...], draft_bytes: int) -> Synthetic:
  """A proposer whose every drafted token reads `draft_bytes` of memory: of a drafter of 0.5B parameters in bfloat16 a
  billion.

  Raises:
    ValueError: for fewer than 4 bytes, one number.
  """
  if draft_bytes < 4:
    raise ValueError(f"draft_bytes={draft_bytes}: at least 4 bytes are read; for drafts that cost nothing use "
                     "Synthetic")
  return Synthetic(acceptance=acceptance, read=jnp.zeros(draft_bytes // 4, jnp.float32))
