"""Drafting with another tokenizer, through text: what the drafter says is encoded again by the target's tokenizer.

String-level exact match of Timor et al. (arXiv 2502.05202, ICML 2025), universal assisted generation in Transformers:
the known text is encoded for the drafter, which continues it in its own ids; the text of that draft is encoded for the
target behind the last tokens of the known text. No law over the target's ids exists for such drafts, so they are
points, and exact whatever the tokenizers do. Vocabularies need nothing in common but text.

Tokenizers are not injective: one text has many encodings, and a text may encode otherwise once more of it is there. So
the target's tail is encoded together with the draft and must come out as it stands; a tail that does not is shortened
until it does, at last to nothing. On the drafter's side the last ids are encoded anew with what has been added, and its
cache is kept as far as the ids are what they were.

Tokenizers live on the host, and so does `propose`; the drafter itself runs in one compiled program a draft.

Letters: B batch rows, N drafted tokens, S tokens of the drafter's buffer.
"""
import functools
import math
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax import sampling
from specjax import stopping
from specjax import tree as tree_lib
from specjax.checkpoints import tokenizer as tokenizer_lib
from specjax.checkpoints import vocabulary_map
from specjax.models import base as models
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import length as length_lib
from specjax.proposers import own_cache


@struct.dataclass
class State:
  """Of a batch. Of `ids`, as many as the cache is long stand in it: the known text, then what was drafted last."""
  cache: cache_lib.Cache  # the drafter's
  ids: jax.Array            # i32[B, S]; in the drafter's ids
  known: jax.Array          # i32[B]; of them the known text's
  read: jax.Array           # i32[B]; tokens of the target that those stand for
  length: Any               # of the length rule


@struct.dataclass
class Retokenised(base.Defaults):
  """Drafts with a model of any vocabulary, up to `num_tokens` of its tokens, of which as many of the target's are kept.

  Drafts are greedy: the request's processors are about the target's ids, which the drafter does not have.

  Attributes:
    model: the drafter, an instance of `models.base.Target`; its weights are leaves.
    target_tokenizer, drafter_tokenizer: of both models.
    num_tokens: N.
    look_behind: how many tokens of known text are encoded again together with a draft, by either tokenizer.
    length: when to draft less; it counts the drafter's tokens while it drafts and the target's when it learns.
    expansion: room for the text in drafter ids, in multiples of the room in the target's. A row whose text needs more,
      or more than the drafter's context, drafts nothing from there on.

  Raises:
    ValueError: for a number of tokens below 1, a negative look_behind, or an expansion that is not positive; by `init`
      for a tokenizer that is not the model's.
  """
  model: Any
  target_tokenizer: tokenizer_lib.Tokenizer = struct.field(pytree_node=False)
  drafter_tokenizer: tokenizer_lib.Tokenizer = struct.field(pytree_node=False)
  num_tokens: int = struct.field(pytree_node=False, default=5)
  look_behind: int = struct.field(pytree_node=False, default=10)
  length: Any = length_lib.Fixed()
  expansion: float = struct.field(pytree_node=False, default=1.5)

  def __post_init__(self):
    if self.num_tokens < 1:
      raise ValueError(f"num_tokens={self.num_tokens}: it must be 1 or more; for no drafts use the plain method")
    if self.look_behind < 0:
      raise ValueError(f"look_behind={self.look_behind}: it must be 0 or more")
    if not self.expansion > 0:
      raise ValueError(f"expansion={self.expansion}: it must be positive; 1.5 holds most texts")

  @property
  def host(self) -> bool:
    return True

  @property
  def max_nodes(self) -> int:
    return self.num_tokens + 1

  @property
  def max_depth(self) -> int:
    return self.num_tokens

  @property
  def draft_context(self) -> int:
    """See `base.Proposer`; compared with the text in the target's ids, as counters do."""
    return self.model.max_context

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.no_sound(target)
    base.no_encoder(self.model, "a drafter of another tokenizer")
    for name, tokenizer, model in (("target", self.target_tokenizer, target),
                                   ("drafter", self.drafter_tokenizer, self.model)):
      if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(f"the {name} has {model.vocab_size} ids and its tokenizer {tokenizer.vocab_size}: they do not "
                         "belong together")
    slots = min(math.ceil(self.expansion * capacity), self.model.max_context)
    models.takes_back(self.model, slots, "a drafter of another tokenizer")
    opening = vocabulary_map.opening_ids(self.drafter_tokenizer)
    ids = jnp.zeros((batch, slots), jnp.int32).at[:, :len(opening)].set(jnp.array(opening, jnp.int32))
    return State(cache=self.model.init_cache(batch, slots), ids=ids,
                 known=jnp.full((batch,), len(opening), jnp.int32), read=jnp.zeros((batch,), jnp.int32),
                 length=self.length.init(batch, self.num_tokens))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`; on the host."""
    del cache
    limit = np.asarray(self.length.limit(state.length, self.num_tokens))
    wanted = np.asarray(context.active) & (np.asarray(context.budget) > 1) & (limit > 0)
    tokens, lengths = np.asarray(context.tokens), np.asarray(context.length)
    ids, known, read, cached = map(np.array, (state.ids, state.known, state.read, state.cache.length))
    for row in np.flatnonzero(wanted):
      wanted[row] = self._read(tokens[row, :lengths[row]], row, ids, known, read, cached)
    if not wanted.any():
      return tree_lib.root_only(context.pending).widen(self.max_nodes), state.replace(known=jnp.array(known))
    most = np.where(wanted, limit, 0).astype(np.int32)
    own = context.replace(tokens=jnp.array(ids), length=jnp.array(known), **_neutral(
        len(lengths), self.model.vocab_size, self.drafter_tokenizer.eos_ids))
    cache = state.cache.replace(length=jnp.array(cached))
    drafted = _draft(self, cache, state.length, own, jnp.array(most), keys)
    own_text, own_count, fed = map(np.asarray, (drafted.tokens, drafted.count, drafted.fed))
    for row in np.flatnonzero(fed):
      ids[row, known[row]:known[row] + fed[row]] = own_text[row, :fed[row]]
    draft, count = np.zeros((len(lengths), self.num_tokens), np.int32), np.zeros(len(lengths), np.int32)
    for row in np.flatnonzero(own_count):
      found = self._found(target, tokens[row, :lengths[row]], own_text[row, :own_count[row]], context, row)
      draft[row, :len(found)], count[row] = found, len(found)
    state = state.replace(cache=drafted.cache, ids=jnp.array(ids), known=jnp.array(known), read=jnp.array(read))
    return tree_lib.chain(context.pending, jnp.array(draft), jnp.array(count)), state

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: the rule learns. What was accepted is read from the text."""
    del target
    if committed.path is None:
      return state
    return state.replace(length=self.length.observe(state.length, committed.drafted,
                                                    base.accepted_of_chain(committed)))

  def _read(self, text, row, ids, known, read, cached):
    """Encodes the text of a row for the drafter, in place. Says whether the drafter can read it.

    A row that it cannot read at all is treated as one that has outgrown its buffer.
    """
    pair = _pair(self.target_tokenizer, self.drafter_tokenizer)
    first, slots = len(pair.opening), ids.shape[1]
    if known[row] >= slots:
      return False
    cut = max(known[row] - self.look_behind, first)
    tail = pair.drafter.bytes_of(ids[row, cut:known[row]]) + pair.says(text[read[row]:])
    while cut > first and tail[:1] and tail[0] & 0xC0 == 0x80:  # not inside a character
      cut -= 1
      tail = pair.drafter.bytes_of(ids[row, cut:cut + 1]) + tail
    spelt = pair.drafter.spell(tail, opens=bool(known[row] == first))
    if spelt is None and pair.drafter.spell(vocabulary_map.whole_characters(tail)) is None:
      known[row] = slots  # it never will, and must not be asked again in every step
    if spelt is None or not first and not spelt:
      return False
    known[row] = cut + len(spelt)
    new = np.array(spelt[:slots - cut], np.int32)
    old = ids[row, cut:cut + len(new)]
    same = cut + int(np.cumprod(old == new).sum())
    ids[row, cut:cut + len(new)], read[row] = new, len(text)
    cached[row] = min(cached[row], same, known[row] - 1)  # the last one is fed in any case: what follows is drafted
    return known[row] < slots

  def _found(self, target, text, drafted, context, row):
    """The draft of a row in the target's ids."""
    pair = _pair(self.target_tokenizer, self.drafter_tokenizer)
    tail = text[max(len(text) - self.look_behind, 0):].tolist() if self.look_behind else []
    found = []
    for end in range(len(drafted), 0, -1):  # less of it, where the target cannot spell all
      if found := retokenise(pair.target, tail, pair.drafter.bytes_of(drafted[:end])):
        break
    ends = set(np.asarray(context.rules.eos)[row].tolist())
    stop = next((i for i, token in enumerate(found) if token in ends or token >= target.vocab_size), len(found))
    return found[:min(stop, self.num_tokens, int(context.budget[row]) - 1)]


def retokenise(speller: vocabulary_map.Speller, tail: list[int], data: bytes) -> list[int]:
  """Ids of `data`, bytes of a draft, behind the ids `tail`: as the tokenizer encodes both together if that leaves the
  tail as it is, else together with less of it. Half a character at the end is left out."""
  for begin in range(len(tail) + 1):
    kept = tail[begin:]
    before = speller.bytes_of(kept)
    if kept and before[:1] and before[0] & 0xC0 == 0x80:
      continue  # it begins inside a character
    ids = speller.spell(vocabulary_map.whole_characters(before + data))
    if ids is not None and ids[:len(kept)] == kept:
      return ids[len(kept):]
  return []


class _Pair(NamedTuple):
  """What two tokenizers are to each other, made once."""
  target: vocabulary_map.Speller
  drafter: vocabulary_map.Speller
  opening: list[int]
  silent: frozenset[int]  # the target's ids that the drafter reads nothing of

  def says(self, ids) -> bytes:
    """What the drafter reads of some of the target's ids."""
    return self.target.bytes_of(index for index in ids.tolist() if index not in self.silent)


@functools.lru_cache(maxsize=16)
def _pair(target, drafter):
  opening, bos = vocabulary_map.opening_ids(drafter), target.bos_id
  silent = frozenset()
  if bos is not None:
    spelt = drafter.encode(target.token_bytes(bos, skip_special_tokens=False).decode(errors="replace"))
    # The drafter's own first token stands for it, or it would be read as a word in angle brackets.
    silent = frozenset([bos]) if opening or len(spelt) != 1 else silent
  return _Pair(vocabulary_map.Speller(target), vocabulary_map.Speller(drafter), opening, silent)


@functools.lru_cache(maxsize=16)
def _neutral(rows, vocabulary, eos_ids):
  """Parameters and rules of a request that asks for nothing, in the drafter's ids."""
  return {"params": sampling.SamplingParams().batch(rows, vocabulary), "rules": stopping.stop_rules(rows, eos_ids)}


@struct.dataclass
class _Drafted:
  tokens: jax.Array  # i32[B, N]; the drafter's
  count: jax.Array   # i32[B]
  fed: jax.Array     # i32[B]; how many of them stand in the cache
  cache: cache_lib.Cache


@jax.jit
def _draft(proposer, cache, rule_state, own, most, keys):
  """A greedy chain behind the texts `own`, a context in the drafter's ids, of at most `most` i32[B] tokens.

  What was fed of it enters the cache at once: the next text is compared with it, whatever of it was accepted.
  """
  model, nodes = proposer.model, proposer.num_tokens
  most = jnp.minimum(most, autoregressive.room(own, nodes, own.tokens.shape[1]))
  cache, logits = own_cache.catch_up(model, cache, own, most > 0)

  advance = own_cache.advance(model, cache, own.length, nodes)
  chain = autoregressive.draft_chain(advance, cache.empty_block(nodes), logits, own, keys, autoregressive.Drawing(),
                                     nodes, most, proposer.length, rule_state)
  room = jnp.maximum(own.tokens.shape[1] - own.length, 0)
  fed = jnp.minimum(jnp.minimum(chain.count, jnp.maximum(chain.steps - 1, 0)), room)
  place = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (fed.shape[0], nodes))
  return _Drafted(tokens=chain.tokens, count=chain.count, fed=fed, cache=cache.commit(chain.extra.take(place), fed))
