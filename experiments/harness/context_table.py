"""A target that answers from a table of another target's logits, for laws of the first few tokens of one prompt.

Under top-k sampling few texts are possible: k + k^2 of them behind the first token and the second. Their logits are
computed once, by the real model in one forward pass; every draw then runs through the real step, at the real
vocabulary, with the table in place of the network. That makes tens of thousands of seeds affordable.

Letters: B batch rows, T nodes, V vocabulary, K ids kept by top-k, I contexts.
"""
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax.models import base


@struct.dataclass
class ContextTable:
  """A target for one prompt: hidden states are places in the table. Implements `models.base.Target`."""
  table: jax.Array     # f32[I, V]; logits behind context i, the prompt being context 0
  children: jax.Array  # i32[I, K]; tokens that may follow context i
  following: jax.Array  # i32[I, K]; the context behind each of them
  prompt_tokens: int = struct.field(pytree_node=False, default=1)
  max_context: int = struct.field(pytree_node=False, default=256)
  eos_ids: tuple[int, ...] = struct.field(pytree_node=False, default=())

  @property
  def vocab_size(self):
    return self.table.shape[1]

  def init_cache(self, batch, slots):
    """See `models.base.Target`: a slot's "value" is the context behind its token."""
    zeros = lambda *shape: (jnp.zeros((batch, 1, *shape), jnp.int32),)
    return cache_lib.KVCache(keys=zeros(1, slots), values=zeros(slots, 1), length=jnp.zeros((batch,), jnp.int32))

  def forward(self, tokens, positions, mask, cache):
    """See `models.base.Target`. Behind what the table does not hold stands context 0, where no text of interest is."""
    committed = cache.values[0][:, 0, :, 0]
    before = jnp.take_along_axis(committed, jnp.maximum(cache.length - 1, 0)[:, None], axis=1)[:, 0]
    context = jnp.zeros(tokens.shape, jnp.int32)
    for node in range(tokens.shape[1]):
      above = mask[:, node].at[:, node].set(False)
      parent = jnp.argmax(jnp.where(above, positions, -1), axis=1)
      here = jnp.where(above.any(-1), jnp.take_along_axis(context, parent[:, None], axis=1)[:, 0], before)
      found = self.children[here] == tokens[:, node:node + 1]
      place = jnp.where(found, self.following[here], 0).max(-1)
      context = context.at[:, node].set(jnp.where(positions[:, node] < self.prompt_tokens, 0, place))
    block = cache_lib.InFlight(keys=(context[:, None, None],), values=(context[:, None, :, None],))
    return base.ForwardOutput(hidden=context[..., None], in_flight=block)

  def logits(self, hidden):
    """See `models.base.Target`."""
    return self.table[hidden[..., 0]]


def tabulate(target, prompt: list[int], top_k: int, tokens: int) -> ContextTable:
  """The table of `target` for the first `tokens` output tokens behind `prompt`, each among the `top_k` likeliest."""
  texts, rows, children, following = [()], [], [], []
  for depth in range(tokens):
    level = [text for text in texts if len(text) == depth]
    logits = _logits(target, prompt, level)
    rows.append(logits)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    if depth + 1 < tokens:
      for text, ids in zip(level, best):
        children.append(ids)
        following.append(np.arange(len(texts), len(texts) + top_k))
        texts += [(*text, int(token)) for token in ids]
  leaves = sum(map(len, rows)) - len(children)
  children += [np.full(top_k, -1)] * leaves
  following += [np.zeros(top_k, int)] * leaves
  return ContextTable(table=jnp.asarray(np.concatenate(rows)), children=jnp.asarray(np.array(children), jnp.int32),
                      following=jnp.asarray(np.array(following), jnp.int32), prompt_tokens=len(prompt))


def _logits(target, prompt, texts):
  """f32[N, V] behind `prompt` and each of N texts of equal length, in one forward pass without a cache."""
  ids = jnp.asarray([[*prompt, *text] for text in texts], jnp.int32)
  width = ids.shape[1]
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (len(texts), width, width))
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), ids.shape)
  return np.asarray(_last(target, ids, positions, mask))


@jax.jit
def _last(target, ids, positions, mask):
  out = target.forward(ids, positions, mask, target.init_cache(ids.shape[0], 1))
  return target.logits(out.hidden[:, -1:])[:, 0].astype(jnp.float32)
