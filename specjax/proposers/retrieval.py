"""Retrieval: drafts what followed the text's end in a datastore of other texts (REST, arXiv 2311.08252).

The datastore is a corpus of token ids and its suffix array, built by `python -m experiments.build_datastore`. The
places of an n-gram are a range of the suffix array, found by bisection: all lengths at once, on the device. What
followed at the places of the longest n-gram that occurs is counted into a trie (`continuations`), whose most probable
nodes are drafted. The reference implementation walks such an array on the host.

Letters: B batch rows, G tokens of the corpus, I lengths of n-grams, M occurrences, T nodes.
"""
import hashlib
import json
import pathlib

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.proposers import base
from specjax.proposers import continuations

MOST_TOKENS = 2 ** 24  # an evenly spread place is a product of a range and a number of occurrences, in 32 bits
_FORMAT = 1


@struct.dataclass
class Retrieval(base.Stateless):
  """Lookup in a datastore, with n-grams of `max_ngram` down to `min_ngram` tokens.

  Up to `occurrences` places are read, spread evenly over the range of the longest n-gram that occurs. Drafts end before
  an end-of-sequence id and one token short of the row's budget. Make it with `load` or `of_texts`.

  Attributes:
    tokens: the corpus, -1 behind each text: i32[G].
    suffix_array: the places of the corpus in the order of what stands there: i32[G].
    num_tokens: drafted tokens, at most. tree: a tree of them, or a chain.
    min_probability, escape: see `continuations.best_draft`. A match in other texts says less than one in the text
      itself: 8 is what fits SmolLM2's answers and a million tokens of training prompts.

  Raises:
    ValueError: for an option out of range.
  """
  tokens: jax.Array
  suffix_array: jax.Array
  num_tokens: int = struct.field(pytree_node=False, default=7)
  tree: bool = struct.field(pytree_node=False, default=False)
  min_ngram: int = struct.field(pytree_node=False, default=2)
  max_ngram: int = struct.field(pytree_node=False, default=16)
  min_probability: float = struct.field(pytree_node=False, default=0.1)
  escape: float = struct.field(pytree_node=False, default=8.0)
  occurrences: int = struct.field(pytree_node=False, default=32)

  def __post_init__(self):
    continuations.check_options(self)
    if not 1 <= self.min_ngram <= self.max_ngram:
      raise ValueError(f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: needed is 1 <= min_ngram <= max_ngram")

  @classmethod
  def of_texts(cls, texts, **options) -> "Retrieval":
    """Over `texts`, lists of token ids; `options` as the attributes."""
    tokens = join(texts)
    return cls(tokens=jnp.asarray(tokens), suffix_array=jnp.asarray(suffix_array(tokens)), **options)

  @classmethod
  def load(cls, path, tokenizer, **options) -> "Retrieval":
    """Over a datastore written by `save`; `options` as the attributes.

    Raises:
      ValueError: for a file that is no datastore, and for one whose ids are those of another vocabulary than the
        tokenizer's, compared token by token.
    """
    try:
      with np.load(path, allow_pickle=False) as file:
        kept = {name: file[name] for name in ("format", "tokens", "suffix_array", "vocabulary")}
    except (KeyError, ValueError, EOFError) as error:
      raise ValueError(f"{path} is not a datastore ({error}); build one with python -m experiments.build_datastore"
                       ) from error
    if int(kept["format"]) != _FORMAT:
      raise ValueError(f"{path} has format {int(kept['format'])}, and {_FORMAT} is read here; build it again")
    if str(kept["vocabulary"]) != fingerprint(tokenizer):
      raise ValueError(f"{path} was built with another vocabulary than the target's: its ids mean other tokens; build "
                       "it again with this --target")
    return cls(tokens=jnp.asarray(kept["tokens"]), suffix_array=jnp.asarray(kept["suffix_array"]), **options)

  @property
  def max_depth(self) -> int:
    """See `base.Proposer`. The last node of a tree is kept for a second branch, else it would be a chain."""
    return self.num_tokens - 1 if self.tree else self.num_tokens

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache, keys
    return self.draft(context).tree(), state

  def draft(self, context: base.Context) -> continuations.Draft:
    """What `propose` drafts, with the estimated probability of every node."""
    place, matched = self.find(context.tokens, context.length)
    size = jnp.full(context.length.shape, self.tokens.shape[0], jnp.int32)
    found = continuations.follow(self.tokens[None], size, place, matched, self.max_depth, context)
    return continuations.best_draft(
        found, context.pending, matched[:, :1], jnp.full((1,), self.num_tokens), max_nodes=self.max_nodes,
        min_probability=self.min_probability, escape=self.escape, chain=not self.tree)

  def find(self, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Occurrences of the longest n-gram at each text's end: the last place of each, and its length; i32[B, M] twice.

    Args:
      tokens: i32[B, S], of which the first `length` i32[B] are known.
    """
    sizes = np.arange(self.max_ngram, self.min_ngram - 1, -1, dtype=np.int32)
    low, high = self._ranges(tokens, length, sizes)
    occurs = (high > low) & (length[:, None] >= sizes)
    longest = jnp.argmax(occurs, axis=1)[:, None]  # the first: they descend
    pick = lambda x: jnp.take_along_axis(x, longest, axis=1)
    low, many = pick(low), jnp.where(occurs.any(1, keepdims=True), pick(high - low), 0)
    which = jnp.arange(self.occurrences, dtype=jnp.int32)[None]
    evenly = which * (many // self.occurrences) + which * (many % self.occurrences) // self.occurrences
    spread = jnp.where(many > self.occurrences, evenly, which)
    matched = jnp.where(which < many, jnp.asarray(sizes)[longest], 0)
    at = self.suffix_array[jnp.clip(low + spread, 0, self.suffix_array.shape[0] - 1)]
    return at + jnp.maximum(matched, 1) - 1, matched

  def _ranges(self, tokens, length, sizes):
    """The range [low, high) of the suffix array's entries that begin with the last tokens: i32[B, I] twice."""
    corpus, ahead = self.tokens.shape[0], np.arange(self.max_ngram, dtype=np.int32)
    place = length[:, None, None] - sizes[:, None] + ahead  # [B, I, max_ngram]
    flat = jnp.clip(place, 0, tokens.shape[1] - 1).reshape(place.shape[0], -1)
    wanted = jnp.take_along_axis(tokens, flat, axis=1).reshape(place.shape)

    def order(at):
      """Whether an entry stands before (-1), at (0) or behind (1) the n-gram: of i32[2, B, I]."""
      there = self.suffix_array[jnp.minimum(at, corpus - 1)][..., None] + ahead
      token = jnp.where(there < corpus, self.tokens[jnp.minimum(there, corpus - 1)], -1)
      sign = jnp.where(ahead < sizes[:, None], jnp.sign(token - wanted), 0)
      return jnp.take_along_axis(sign, jnp.argmax(sign != 0, axis=-1)[..., None], axis=-1)[..., 0]

    first_beyond = jnp.array([0, 1], jnp.int32)[:, None, None]  # the first entry not before it, and the first behind it

    def halve(_, bounds):
      low, high = bounds
      middle = (low + high) // 2
      before = (order(middle) < first_beyond) & (low < high)
      return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

    shape = (2, *place.shape[:2])
    bounds = (jnp.zeros(shape, jnp.int32), jnp.full(shape, corpus, jnp.int32))
    low, high = jax.lax.fori_loop(0, corpus.bit_length(), halve, bounds)[0]
    return low, high


def join(texts) -> np.ndarray:
  """Texts, lists of token ids, one behind the other with -1 behind each: i32[G].

  Raises:
    ValueError: for nothing at all, a negative id or too many tokens.
  """
  parts = [np.asarray([*text, -1], np.int32) for text in texts if len(text)]
  if not parts:
    raise ValueError("the datastore has no token: give texts that are not empty")
  tokens = np.concatenate(parts)
  if (tokens < 0).sum() > len(parts):
    raise ValueError("a text holds a negative id; ids are 0 or greater: leave padding out")
  if len(tokens) > MOST_TOKENS:
    raise ValueError(f"the datastore would have {len(tokens)} tokens; at most {MOST_TOKENS}: give fewer texts")
  return tokens


def suffix_array(tokens: np.ndarray, *, progress=lambda turns: turns) -> np.ndarray:
  """Places in the order of the text that begins there, the shorter first where one begins the other: i32[G].

  By prefix doubling (Manber and Myers): a turn sorts by twice as many tokens as the one before.

  Args:
    tokens: i32[G]. progress: wraps the iterable of turns, as `tqdm` does.
  """
  size = len(tokens)
  rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
  order = np.argsort(rank, kind="stable")
  for turn in progress(range(size.bit_length())):
    reach = 1 << turn
    behind = np.zeros(size, np.int64)
    behind[:max(size - reach, 0)] = rank[reach:]
    key = rank * (size + 1) + behind
    order = np.argsort(key, kind="stable")
    key = key[order]
    rank[order] = np.concatenate([[1], 1 + np.cumsum(key[1:] != key[:-1])])
    if rank[order[-1]] == size:
      break
  return order.astype(np.int32)


def save(path, tokens: np.ndarray, array: np.ndarray, tokenizer) -> None:
  """Writes a datastore for `Retrieval.load`."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("wb") as file:  # NumPy would append .npz to a name
    np.savez(file, format=_FORMAT, tokens=tokens, suffix_array=array, vocabulary=fingerprint(tokenizer))


def fingerprint(tokenizer) -> str:
  """Of the tokenizer's tokens in the order of their ids: equal where every id means the same token."""
  return hashlib.sha256(json.dumps(tokenizer.tokens()).encode()).hexdigest()
