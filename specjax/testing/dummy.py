"""A target whose logits are a hash of the path, so that all of decoding is tested without weights.

The idea is that of `google-deepmind/mctx`'s tree tests: the model's state is a hash of its history. Here every token
contributes a mix of itself and its place, a node sees the sum over what attention would let it see, and the logits
are pseudo-random numbers keyed by that sum. Exact conditionals for any prefix, and one wrong mask bit, position, slot
or committed token changes the answer. Slots behind `length` are poisoned: reading one changes it as well.

Letters: B batch rows, T nodes, S slots, V vocabulary.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax.models import base

_POISON = 0x5EED5EED


@struct.dataclass
class DummyTarget:
  """A hash-of-path model. Implements `models.base.Target`.

  Attributes:
    salt: u32, stands for the weights: another salt is another model, without a recompile.
    vocab: V.
    order: how many latest tokens the logits depend on; 0 for all. With a small order texts repeat, and prompt lookup
      has something to find.
    sharpness: greatest absolute logit.
  """
  salt: jax.Array | int = np.uint32(1)
  vocab: int = struct.field(pytree_node=False, default=16)
  order: int = struct.field(pytree_node=False, default=0)
  sharpness: float = struct.field(pytree_node=False, default=3.0)
  max_context: int = struct.field(pytree_node=False, default=4096)
  eos_ids: tuple[int, ...] = struct.field(pytree_node=False, default=())

  @property
  def vocab_size(self) -> int:
    return self.vocab

  def init_cache(self, batch, slots):
    """See `models.base.Target.init_cache`: "keys" are the mixes, "values" the positions."""
    poison = lambda *shape: (jnp.full((batch, 1, *shape), _POISON, jnp.uint32),)
    return cache_lib.KVCache(keys=poison(1, slots), values=poison(slots, 1), length=jnp.zeros((batch,), jnp.int32))

  def forward(self, tokens, positions, mask, cache, *, before=None):
    """See `models.base.Target.forward`; it has no layers, so nothing to resume at and no features."""
    mixed = _mix(tokens.astype(jnp.uint32) * np.uint32(0x9E3779B1) + self.salt)
    place = positions.astype(jnp.uint32)
    slot = jnp.arange(cache.slots)[None]
    committed = jnp.broadcast_to((slot < cache.length[:, None])[:, None], (*tokens.shape, cache.slots))
    seen = self._seen(committed, cache.keys[0][:, 0, 0], cache.values[0][:, 0, :, 0], place)
    if before is not None:
      earlier = before.keys[0].shape[3]
      seen = seen + self._seen(mask[:, :, :earlier], before.keys[0][:, 0, 0], before.values[0][:, 0, :, 0], place)
      mask = mask[:, :, earlier:]
    seen = seen + self._seen(mask, mixed, place, place)
    block = cache_lib.InFlight(keys=(mixed[:, None, None],), values=(place[:, None, :, None],))
    return base.ForwardOutput(hidden=_mix(seen)[..., None], in_flight=block)

  def _seen(self, visible, mixes, places, place):
    """What each node gathers: the sum over the visible tokens of a mix of token and place, u32[B, T].

    Absolute places when all tokens count; with an order, distances, so that equal contexts give equal logits.
    """
    distance = place[:, :, None] - places[:, None]  # unsigned: a later place is far away
    where = distance if self.order else jnp.broadcast_to(places[:, None], distance.shape)
    if self.order:
      visible = visible & (distance < np.uint32(self.order))
    return jnp.where(visible, _mix(mixes[:, None] + where * np.uint32(0xC2B2AE3D)), 0).sum(-1, dtype=jnp.uint32)

  def logits(self, hidden):
    """See `models.base.Target.logits`."""
    ids = jnp.arange(self.vocab, dtype=jnp.uint32)
    bits = _mix(hidden + ids * np.uint32(0x85EBCA77)) >> 8
    return (bits.astype(jnp.float32) * np.float32(2.0 ** -23) - 1.0) * self.sharpness


def _mix(x):
  """A bijective mixing of u32 (the finalizer constants of MurmurHash3)."""
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
