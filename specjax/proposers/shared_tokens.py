"""Drafting with another tokenizer, token by token: the drafter's law on the tokens that both vocabularies have.

Token-level intersection of Timor et al. (arXiv 2502.05202, ICML 2025): the drafter's logits are restricted to tokens
that mean the same to the target, renormalised and read as a law over the target's ids. That law is q, so sampled drafts
keep the target's law under every verifier, and one is accepted with probability sum_v min(p(v), q(v)). Drafter and
target must share many tokens: other vocabularies draft through text (see `retokenised`).

The drafter reads the known text in its own ids. A committed token without a counterpart is spelt in several of them, by
a table made once from both tokenizers (`vocabulary_map.translation`); the row's text in drafter ids stands in a buffer
beside the drafter's cache, and is extended when the row is about to draft. Positions and lengths of the cache count
drafter ids. Reading token by token is not the drafter's own tokenisation of the text everywhere, which costs it some
acceptance, never exactness; in exchange what was fed stays as it is, and everything runs on the device.

Letters: B batch rows, N drafted tokens, S tokens of the buffer, V and U ids of target and drafter, M spelt ids.
"""
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax.checkpoints import tokenizer as tokenizer_lib
from specjax.checkpoints import vocabulary_map
from specjax.models import base as models
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import length as length_lib
from specjax.proposers import own_cache

_CHUNK = 64   # tokens that are read in one turn, and ids that are written
_LONGEST = 32  # ids of one token's spelling


@struct.dataclass
class Table:
  """`vocabulary_map.Translation` on the device."""
  counterpart: jax.Array  # i32[V]; -1: none
  begin: jax.Array        # i32[V + 1]
  spelt: jax.Array        # i32[M]
  opening: jax.Array      # i32[0 or 1]
  bos: jax.Array          # i32


@struct.dataclass
class Text:
  """The rows' text in the drafter's ids, as far as it was read."""
  ids: jax.Array     # i32[B, S]
  length: jax.Array  # i32[B]; ids
  read: jax.Array    # i32[B]; tokens of the target that they stand for


@struct.dataclass
class State:
  """Of a batch."""
  own: own_cache.OwnCache
  text: Text
  length: Any  # of the length rule


@struct.dataclass
class SharedTokens(autoregressive.Chained):
  """Drafts up to `num_tokens` tokens with a model of another vocabulary. Make it with `shared_tokens`.

  Attributes:
    model: the drafter, an instance of `models.base.Target` with ids of its own; its weights are leaves.
    table: how the target's ids read in the drafter's; leaves.
    num_tokens, drawing, length: as of `DraftModel`; ids, laws and processors are the target's.
    expansion: room for the text in drafter ids, in multiples of the room in the target's. A row whose text needs more,
      or more than the drafter's context, drafts nothing from there on.

  Raises:
    ValueError: for a number of tokens below 1, drawing options that make no sense, an expansion that is not positive;
      by `init` for a table of another target.
  """
  model: Any
  table: Table
  num_tokens: int = struct.field(pytree_node=False, default=5)
  drawing: autoregressive.Drawing = autoregressive.Drawing()
  length: Any = length_lib.Fixed()
  expansion: float = struct.field(pytree_node=False, default=1.5)

  def __post_init__(self):
    if not self.expansion > 0:
      raise ValueError(f"expansion={self.expansion}: it must be positive; 1.5 holds most texts")
    super().__post_init__()

  @property
  def draft_context(self) -> int:
    """See `base.Proposer`; compared with the text in the target's ids, as counters do."""
    return self.model.max_context

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.no_sound(target)
    base.no_encoder(self.model, "a drafter of other ids")
    known = self.table.counterpart.shape[0]
    if known != models.known_ids(target):
      raise ValueError(f"the table translates {known} ids and the target has {models.known_ids(target)}: make it from the "
                       "target's own tokenizer")
    slots = min(math.ceil(self.expansion * capacity), self.model.max_context)
    opening = self.table.opening
    ids = jnp.zeros((batch, slots), jnp.int32).at[:, :opening.shape[0]].set(opening)
    zeros = jnp.zeros((batch,), jnp.int32)
    return State(own=own_cache.empty(self.model, batch, slots, self.num_tokens, self.max_nodes),
                 text=Text(ids=ids, length=zeros + opening.shape[0], read=zeros),
                 length=self.length.init(batch, self.num_tokens))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache
    limit = self.length.limit(state.length, self.num_tokens)
    possible = autoregressive.possible(self.table.counterpart >= 0, context, self.drawing)
    text = read(self.table, state.text, context, possible & (autoregressive.room(context, self.num_tokens) > 0)
                & (limit > 0))
    own = context.replace(tokens=text.ids, length=text.length)
    most = jnp.minimum(autoregressive.room(own, self.num_tokens, text.ids.shape[1]), jnp.where(possible, limit, 0))
    committed, logits = own_cache.catch_up(self.model, state.own.cache, own, most > 0)
    has, place = self.table.counterpart >= 0, jnp.maximum(self.table.counterpart, 0)

    def shared(logits):
      """f[B, U] as logits of the target's ids f[B, V]; rows that draft nothing have no law to be read."""
      return jnp.where(possible[:, None], jnp.where(has, logits[:, place], -jnp.inf), 0)

    advance = own_cache.advance(self.model, committed, text.length, self.num_tokens, ids=lambda token: place[token],
                                head=shared)
    chain = autoregressive.draft_chain(advance, state.own.block, shared(logits), context, keys, self.drawing,
                                       self.num_tokens, most, self.length, state.length)
    fed = jnp.minimum(chain.count, jnp.maximum(chain.steps - 1, 0))  # the last token of the longest row never is
    slot = jnp.arange(self.max_nodes, dtype=jnp.int32)[None] - 1
    held = own_cache.OwnCache(committed, chain.extra, jnp.where(slot < fed[:, None], slot, -1))
    return chain.tree(context.pending), state.replace(own=held, text=text)

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: accepted tokens have a counterpart each, which stands in the block."""
    del target
    if committed.path is None:
      return state
    return state.replace(own=state.own.accept(committed), length=self.length.observe(
        state.length, committed.drafted, base.accepted_of_chain(committed)))


def shared_tokens(model: Any, target_tokenizer: tokenizer_lib.Tokenizer, drafter_tokenizer: tokenizer_lib.Tokenizer,
                  **options: Any) -> SharedTokens:
  """A `SharedTokens` from the drafter and both tokenizers.

  Args:
    model: the drafter. options: fields of `SharedTokens`.

  Raises:
    ValueError: when the vocabularies share no token, or the drafter's tokenizer knows ids that its model has not.
  """
  made = vocabulary_map.translation(target_tokenizer, drafter_tokenizer, longest=_LONGEST)
  if made.counterpart.max(initial=-1) < 0:
    raise ValueError("the two vocabularies share no token: nothing could be drafted; use Retokenised, which drafts "
                     "through text")
  if drafter_tokenizer.vocab_size > model.vocab_size:
    raise ValueError(f"the drafter has {model.vocab_size} ids and its tokenizer {drafter_tokenizer.vocab_size}: they "
                     "do not belong together")
  return SharedTokens(model=model, table=Table(
      counterpart=jnp.asarray(made.counterpart), begin=jnp.asarray(made.begin), spelt=jnp.asarray(made.spelt),
      opening=jnp.asarray(made.opening), bos=jnp.int32(made.bos)), **options)


def read(table: Table, text: Text, context: base.Context, wanted: jax.Array) -> Text:
  """The text with all known tokens of the rows that are `wanted` bool[B], as long as the buffer has room."""
  slots = text.ids.shape[1]
  row = jnp.arange(text.ids.shape[0])[:, None]
  place = jnp.arange(_CHUNK, dtype=jnp.int32)[None]
  behind = lambda text: wanted & (text.read < context.length) & (text.length < slots)

  def chunk(text):
    at = text.read[:, None] + place
    token = jnp.take_along_axis(context.tokens, jnp.minimum(at, context.tokens.shape[1] - 1), axis=1)
    known = behind(text)[:, None] & (at < context.length[:, None])
    opens = (at == 0) & (token == table.bos)  # the drafter's own first id stands there already
    count = jnp.where(known & ~opens, table.begin[token + 1] - table.begin[token], 0)
    end = jnp.cumsum(count, axis=1)
    whole = known & (end <= _CHUNK)
    written = jnp.where(whole, end, 0).max(1)
    # Each id that is written looks for its token: the first one that ends behind it.
    which = jnp.minimum((end[:, None] <= place[..., None]).sum(-1), _CHUNK - 1)
    pick = lambda x: jnp.take_along_axis(x, which, axis=1)
    ids = table.spelt[table.begin[pick(token)] + place - pick(end - count)]
    slot = jnp.where(place < written[:, None], text.length[:, None] + place, slots)
    return Text(ids=text.ids.at[row, slot].set(ids, mode="drop"), length=text.length + written,
                read=text.read + whole.sum(1, dtype=jnp.int32))

  return jax.lax.while_loop(lambda text: behind(text).any(), chunk, text)
