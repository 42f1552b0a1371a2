"""The cache of a draft model: committed tokens of its own, fed lazily, and a block of drafted nodes in flight.

`observe` runs no network: it writes what was accepted of the block. What the cache lacks, the prompt at first, the last
accepted token after a draft that was accepted whole, or all that was emitted while another method drafted, is fed when
the row is about to draft, in chunks. Steps in which no row is about to draft cost nothing.

Letters: B batch rows, T nodes of a tree, N nodes of a block, V vocabulary.
"""
from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax.proposers import base

_CHUNK = 64            # tokens of one pass while much is missing
_LAST = (1, 4, 16)     # tokens of the last pass: the smallest that is enough


@struct.dataclass
class OwnCache:
  """A drafter's cache and the nodes of its latest draft that it has run over."""
  cache: cache_lib.Cache   # committed tokens, of each row as many as it was fed
  block: cache_lib.Block     # of N nodes
  slots: jax.Array           # i32[B, T]; where in the block each node of the tree stands, -1 for one that never was fed

  def accept(self, committed: base.Committed) -> "OwnCache":
    """Writes what was accepted of the latest draft behind what is committed, up to the first node that was not fed.

    The root is committed already if the row drafted. Paths of other proposers' trees are 0 there, the root, throughout.
    """
    path = committed.path[:, 1:]
    slot = jnp.take_along_axis(self.slots, jnp.minimum(path, self.slots.shape[1] - 1), axis=1)
    counted = jnp.arange(path.shape[1])[None] + 1 < committed.count[:, None]
    held = (slot >= 0) & (path > 0) & counted
    count = jnp.cumprod(held.astype(jnp.int32), axis=1).sum(1)
    return self.replace(cache=commit(self.cache, self.block.take(jnp.maximum(slot, 0)), count),
                        slots=jnp.full_like(self.slots, -1))


def empty(model, batch: int, capacity: int, slots: int, nodes: int) -> OwnCache:
  """For `batch` rows of at most `capacity` tokens, and trees of `nodes` nodes of which at most `slots` are fed."""
  cache = model.init_cache(batch, min(capacity, model.max_context))
  return OwnCache(cache=cache, block=cache.empty_block(max(slots, 1)), slots=jnp.full((batch, nodes), -1, jnp.int32))


def catch_up(model, cache: cache_lib.Cache, context: base.Context,
             wanted: jax.Array) -> tuple[cache_lib.Cache, jax.Array]:
  """Feeds all known tokens, the pending one included, to the rows that are `wanted` bool[B].

  Returns:
    The cache, and the logits behind the pending token f32[B, V]; without meaning for the other rows. A drafter with an
    encoder first runs that over the inputs of all rows, once.
  """
  cache = _encode(model, cache, context, wanted)

  def run(cache, size):
    out = _forward(model, cache, context, size)
    return out.hidden, out.in_flight

  return feed(run, lambda hidden: model.logits(hidden)[:, 0], cache, context.length, wanted)


def feed(run, read, cache: cache_lib.Cache, known: jax.Array, wanted: jax.Array, *, finish=None):
  """Feeds a drafter whatever its cache lacks of `known` i32[B] entries, in chunks, for the rows that are `wanted`.

  Args:
    run: (cache, size) -> (outputs, block): the next `size` entries of every row, outputs f[B, size, ...] each.
    read: outputs f[B, 1, ...] of the last entry -> what is asked of them, arrays of leading axis B.
    finish: (cache, size, count i32[B]) -> (block of `size` nodes, what is asked): the last pass, of which `count`
      entries are known, for a drafter that runs more in it (see `masked_pass`); None is `run` and then `read`.

  Returns:
    The cache, and what `read` returns; without meaning for rows that are not wanted, or lacked nothing.
  """
  missing = lambda cache: jnp.where(wanted, known - cache.length, 0)

  def chunk(cache):
    count = jnp.clip(missing(cache) - 1, 0, _CHUNK)  # the last entry is left for the pass that is read
    return cache.commit(run(cache, _CHUNK)[1], count)

  def run_and_read(cache, size, count):
    outputs, new = run(cache, size)
    at = jnp.clip(count - 1, 0, size - 1)
    pick = lambda x: jnp.take_along_axis(x, at.reshape(-1, *[1] * (x.ndim - 1)), axis=1)
    return new, read(jax.tree.map(pick, outputs))

  cache = jax.lax.while_loop(lambda cache: (missing(cache) > _LAST[-1]).any(), chunk, cache)
  count = missing(cache)

  def last(size):
    def turn():
      new, asked = (finish or run_and_read)(cache, size, count)
      return cache.empty_block(_LAST[-1]).put(new, jnp.int32(0)), asked
    return turn

  shape = jax.eval_shape(last(1))[1]
  nothing = lambda: (cache.empty_block(_LAST[-1]), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))
  which = jnp.sum(jnp.max(count) > jnp.array((0, *_LAST[:-1]), jnp.int32))
  block, outputs = jax.lax.switch(which, [nothing, *map(last, _LAST)])
  return commit(cache, block, count), outputs


def _encode(model, cache, context, wanted):
  if cache.cross is None:
    return cache
  if context.inputs is None:
    raise ValueError(f"{type(model).__name__} drafts with an encoder, and this text has no inputs for one; use it with "
                     "a target that has an encoder, or a decoder as the drafter")
  encode = lambda carry: (model.encode(carry[0], context.input_tokens, context.inputs), False)
  unread = (wanted & (cache.length == 0)).any()
  return jax.lax.while_loop(lambda carry: carry[1], encode, (cache, unread))[0]


def advance(model, cache: cache_lib.Cache, length: jax.Array, nodes: int, *, ids=lambda token: token,
            head=lambda logits: logits):
  """The `advance` of `autoregressive.draft_chain` for a model behind `length` i32[B] tokens that its cache holds, with a
  block of `nodes`: drafted token i goes into place i.

  `ids` takes drafted tokens to the model's ids, `head` its logits f[B, V] to those that are drawn from.
  """
  def run(token, index, block):
    seen = jnp.append(jnp.arange(nodes) < index, True)
    out = model.forward(ids(token)[:, None], (length + index)[:, None],
                        jnp.broadcast_to(seen, (token.shape[0], 1, nodes + 1)), cache, before=block)
    return head(model.logits(out.hidden)[:, 0]), block.put(out.in_flight, index)
  return run


def commit(cache, block, count):
  """`cache.commit` of `count` i32[B] nodes, or nothing at all where no row writes: a loop of at most one turn works in
  place, a branch would copy the cache."""
  write = lambda carry: (carry[0].commit(block, count), False)
  return jax.lax.while_loop(lambda carry: carry[1], write, (cache, (count > 0).any()))[0]


def _forward(model, cache, context, size):
  """The next `size` known tokens of every row; behind the known ones they are padding that nobody sees."""
  positions = cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  tokens = jnp.take_along_axis(context.tokens, jnp.minimum(positions, context.tokens.shape[1] - 1), axis=1)
  # Behind a barrier: XLA folds a constant mask once for every layer.
  mask = jax.lax.optimization_barrier(jnp.tril(jnp.ones((size, size), bool)))
  return model.forward(tokens, positions, jnp.broadcast_to(mask, (tokens.shape[0], size, size)), cache)
