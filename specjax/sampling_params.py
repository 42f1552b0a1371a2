"""What a row asks of its tokens: the sampling parameters, one value or one a row, and what is refused of them.

`SamplingParams` is written by hand with scalars, lists and mappings, and turned into arrays by `batch`, so that
changing a value never recompiles. What no row of a batch uses becomes None there: it is then absent from the pytree,
and the pipeline does no work for it.

Letters: B batch rows, V vocabulary, K ids of a row, X end ids of a row.
"""
import collections.abc
import dataclasses
import numbers
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

GREEDY, TEMPERATURE, FILTERED = range(3)
_NONE = -1  # fills unused places; no token has this id
_LEAST_PLACES = 8
_LEAST = float(np.finfo(np.float32).tiny)  # below it a float32 loses its digits, and then is 0: "keep all"


@struct.dataclass
class RowIds:
  """Some ids of each row, and a value for each where there are values. Unused places hold -1."""
  ids: jax.Array                   # i32[B, K]; K a power of two, so that few shapes are compiled
  values: jax.Array | None = None  # f32[B, K]


@struct.dataclass
class SamplingParams:
  """Sampling parameters, one value a row. Arrays, so that changing them never recompiles.

  Scalars are broadcast to the batch by `batch`. Penalties count prompt and output, and in a tree the drafted tokens
  before the one that is drawn.
  """
  temperature: jax.Array | float = 0.0  # f32[B]; 0 is greedy
  top_k: jax.Array | int = 0            # i32[B]; 0 keeps all
  top_p: jax.Array | float = 1.0        # f32[B]; 1 keeps all
  min_p: jax.Array | float = 0.0        # f32[B]; 0 keeps all; relative to the most probable token
  seed: jax.Array | int | None = None   # i32[B]; None: the index of the request
  repetition_penalty: jax.Array | float | None = 1.0  # f32[B]; of tokens seen: logit divided, multiplied if negative
  presence_penalty: jax.Array | float | None = 0.0    # f32[B]; taken from the logits of tokens seen
  frequency_penalty: jax.Array | float | None = 0.0   # f32[B]; taken once for each time that a token was seen
  logit_bias: Any = None                # {id: bias}, or one or None a row -> RowIds; added; -inf bans
  banned_ids: Any = None                # ids, or a list or None a row -> RowIds
  allowed_ids: Any = None               # ids, or a list or None a row -> RowIds; a row without any is not restricted
  min_new_tokens: jax.Array | int | None = 0  # i32[B]; no end id is drawn before so many output tokens

  def batch(self, rows: int, vocabulary: int | None = None) -> "SamplingParams":
    """The same parameters as arrays of `rows` values, checked; None for what no row uses. Batched ones may be given.

    Args:
      rows: B.
      vocabulary: V; with it ids beyond are refused, and rows in which every id is banned.

    Raises:
      ValueError: names the parameter, the row and the allowed range.
    """
    spread = lambda name, *args: _rows(name, getattr(self, name), rows, *args)
    used = lambda name, neutral, *args: _used(name, getattr(self, name), rows, neutral, *args)
    penalty = np.float32, lambda x: (x >= -2) & (x <= 2), "in [-2, 2]"
    params = SamplingParams(
        temperature=spread("temperature", np.float32, lambda x: x >= 0, "0 (greedy) or more"),
        top_k=spread("top_k", np.int32, lambda x: x >= 0, "0 (keep all) or more"),
        top_p=spread("top_p", np.float32, lambda x: (x >= _LEAST) & (x <= 1), f"in (0, 1], {_LEAST:.3g} at least"),
        min_p=spread("min_p", np.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
        seed=_rows("seed", np.arange(rows) if self.seed is None else self.seed, rows, np.int32, lambda x: x >= 0,
                   "0 or more"),
        repetition_penalty=used("repetition_penalty", 1, np.float32, lambda x: x >= _LEAST,
                                "greater than 0 (1 does nothing)"),
        presence_penalty=used("presence_penalty", 0, *penalty),
        frequency_penalty=used("frequency_penalty", 0, *penalty),
        logit_bias=_bias(self.logit_bias, rows, vocabulary),
        banned_ids=_ids("banned_ids", self.banned_ids, rows, vocabulary),
        allowed_ids=_ids("allowed_ids", self.allowed_ids, rows, vocabulary),
        min_new_tokens=used("min_new_tokens", 0, np.int32, lambda x: x >= 0, "0 or more"))
    for row, (allowed, banned) in enumerate(zip(*params._sets(rows))):
      if allowed and allowed <= banned or vocabulary is not None and len(banned) >= vocabulary:
        raise ValueError(f"the {'allowed_ids' if allowed else 'ids'} of row {row} are all banned, by banned_ids or a "
                         "logit_bias of -inf, which leaves nothing to draw; ban fewer or allow more")
    return params

  @property
  def adjusts(self) -> bool:
    """Whether batched parameters change logits before the temperature does; static."""
    return any(x is not None for x in (self.repetition_penalty, self.presence_penalty, self.frequency_penalty,
                                       self.logit_bias, self.banned_ids, self.allowed_ids, self.min_new_tokens))

  def mode(self) -> jax.Array:
    """i32: GREEDY, TEMPERATURE or FILTERED, the least work that honours every row; for `draw`."""
    sampled = jnp.any(self.temperature > 0)
    filtered = jnp.any((self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)))
    return jnp.where(filtered, FILTERED, jnp.where(sampled, TEMPERATURE, GREEDY)).astype(jnp.int32)

  def check_ends(self, eos_ids, max_new_tokens, vocabulary: int | None = None) -> None:
    """Refuses a minimum of new tokens that cannot be had; for batched parameters, on the host.

    Args:
      eos_ids: ids that end a row; for all rows, or one list a row, which may be padded with -1 as in `StopRules`.
      max_new_tokens: budget, one number or one a row.
      vocabulary: V; with it, rows that may draw any id but banned ones are checked as well.

    Raises:
      ValueError: names the row and what to change.
    """
    if self.min_new_tokens is None:
      return
    least = np.asarray(self.min_new_tokens)
    rows = len(least)
    budget = np.broadcast_to(np.asarray(max_new_tokens), (rows,))
    ends = end_ids(eos_ids, rows)
    for row, usable in enumerate(self.usable_ids(rows, vocabulary)):
      if least[row] > budget[row]:
        raise ValueError(f"min_new_tokens={least[row]} in row {row} is more than max_new_tokens={budget[row]}; lower "
                         "the one or raise the other")
      whole = vocabulary is not None and len(ends[row]) >= vocabulary
      all_end = whole if usable is None else usable <= ends[row]
      if least[row] > 0 and all_end:
        raise ValueError(f"min_new_tokens={least[row]} in row {row}: all that may be drawn are end ids "
                         f"{sorted(usable or ends[row])[:8]}, which leaves nothing to draw before the minimum; set "
                         "min_new_tokens=0, or allow an id that does not end the row")

  def usable_ids(self, rows: int, vocabulary: int | None = None) -> list[set[int] | None]:
    """The ids that each row may draw by `allowed_ids`, `banned_ids` and biases of -inf, of batched parameters, on the
    host. None for all that are not banned, where neither a list nor `vocabulary` bounds them."""
    every = frozenset() if vocabulary is None else frozenset(range(vocabulary))
    usable = []
    for allowed, banned in zip(*self._sets(rows)):
      whole = allowed or (every if banned else None)
      usable.append(set(whole - banned) if whole else None)
    return usable

  def _sets(self, rows):
    """The allowed and the banned ids of each row, as two lists of sets; no allowed ids: not restricted."""
    banned = _sets(self.banned_ids, rows)
    if self.logit_bias is not None:
      ids, values = np.asarray(self.logit_bias.ids), np.asarray(self.logit_bias.values)
      banned = [some | set(ids[row][values[row] == -np.inf].tolist()) for row, some in enumerate(banned)]
    return _sets(self.allowed_ids, rows), banned

  def __repr__(self):
    """Only what was asked for: the neutral values say nothing."""
    neutral = lambda value, default: value is None or np.isscalar(value) and value == default
    given = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)
             if not neutral(getattr(self, field.name), field.default)]
    return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in given)})"


def end_ids(eos_ids, rows: int) -> list[set[int]]:
  """The ids that end each row; from ids for all rows, or one list a row, without the padding of -1."""
  ids = list(np.asarray(eos_ids) if hasattr(eos_ids, "shape") else eos_ids) if _is_list(eos_ids) else [eos_ids]
  per_row = ids if any(map(_is_list, ids)) else [ids] * rows
  if len(per_row) != rows:
    raise ValueError(f"end ids for {len(per_row)} rows, but the batch has {rows}")
  return [{int(token) for token in some if token >= 0} for some in per_row]


def _rows(name, value, rows, dtype, allowed, wanted):
  # The shape first, then what each value may be, named with the row that breaks it.
  given = np.asarray(value)
  if given.shape not in ((), (rows,)):
    raise ValueError(f"{name} has shape {given.shape}; allowed are one value or one a row, ({rows},)")
  if given.dtype.kind not in "iuf":
    raise ValueError(f"{name}={value!r}: it must be a number, {wanted}")
  given = np.broadcast_to(given, (rows,))
  limits = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else np.finfo(dtype)
  # Compared before the cast: beyond these limits it would wrap around or become infinite.
  fits = np.isfinite(given.astype(np.float64)) & (given <= limits.max) & allowed(given)
  if np.issubdtype(dtype, np.integer):
    fits &= given == np.floor(given)
    wanted = f"{wanted}, a whole number of at most {limits.max}"
  if not fits.all():
    row = int(np.argmin(fits))
    raise ValueError(f"{name}={given[row].item()} in row {row}: it must be {wanted}")
  return jnp.asarray(given.astype(dtype))


def _used(name, value, rows, neutral, *args):
  """As `_rows`, None where every row has the neutral value."""
  if value is None:
    return None
  values = _rows(name, value, rows, *args)
  return None if (np.asarray(values) == neutral).all() else values


def _is_list(x):
  return isinstance(x, collections.abc.Iterable) and not isinstance(x, (str, bytes, collections.abc.Mapping)) and (
      getattr(x, "ndim", 1) > 0)


def _ids(name, value, rows, vocabulary):
  """RowIds of a list of ids for all rows, or of one list or None a row; None where no row has any."""
  if value is None:
    return None
  if isinstance(value, RowIds):
    return _again(name, value, rows, vocabulary)
  if not _is_list(value):
    raise ValueError(f"{name}={value!r}: it must be a list of ids, or one such list or None a row")
  entries = list(value)
  per_row = entries if any(x is None or _is_list(x) for x in entries) else [entries] * rows
  if len(per_row) != rows:
    raise ValueError(f"{name} for {len(per_row)} rows; allowed are ids for all rows or one list a row, {rows}")
  lists = []
  for row, some in enumerate(per_row):
    if some is not None and not _is_list(some):
      raise ValueError(f"{name} holds {some!r} for row {row}; with a list for one row, each row needs a list or None")
    some = None if some is None else list(some)
    if some == [] and name == "allowed_ids":
      raise ValueError(f"allowed_ids=[] in row {row} leaves nothing to draw; give at least one id, or None to allow "
                       "all")
    lists.append(sorted({_id(name, token, row, vocabulary) for token in some or ()}))
  return RowIds(ids=_table(lists, _NONE, np.int32)) if any(lists) else None


def _bias(value, rows, vocabulary):
  """RowIds with values of a mapping for all rows, or of one mapping or None a row; None where no row has any."""
  if value is None:
    return None
  if isinstance(value, RowIds):
    return _again("logit_bias", value, rows, vocabulary)
  is_mapping = lambda x: isinstance(x, collections.abc.Mapping)
  if not is_mapping(value) and not (_is_list(value) and all(x is None or is_mapping(x) for x in value)):
    raise ValueError(f"logit_bias={value!r}: it must be a mapping from id to bias, or one such or None a row")
  per_row = [value] * rows if is_mapping(value) else list(value)
  if len(per_row) != rows:
    raise ValueError(f"logit_bias for {len(per_row)} rows; allowed are one mapping for all rows or one a row, {rows}")
  ids, values = [], []
  for row, some in enumerate(per_row):
    pairs = sorted((_id("logit_bias", token, row, vocabulary), bias) for token, bias in (some or {}).items())
    greatest = float(np.finfo(np.float32).max)
    for token, bias in pairs:
      if not isinstance(bias, numbers.Real) or not (bias == -np.inf or -greatest <= bias <= greatest):
        raise ValueError(f"logit_bias of id {token} is {bias!r} in row {row}: it must be a finite number, at most "
                         f"{greatest:.3g} in size, or -inf to ban the id")
    ids.append([token for token, _ in pairs])
    values.append([bias for _, bias in pairs])
  return RowIds(ids=_table(ids, _NONE, np.int32), values=_table(values, 0, np.float32)) if any(ids) else None


def _id(name, token, row, vocabulary):
  if isinstance(token, (bool, np.bool_)) or not isinstance(token, numbers.Integral) and not (
      hasattr(token, "dtype") and token.dtype.kind in "iu"):
    raise ValueError(f"{name} holds {token!r} in row {row}: ids are whole numbers, 0 or more")
  greatest = np.iinfo(np.int32).max if vocabulary is None else vocabulary - 1
  if not 0 <= int(token) <= greatest:
    raise ValueError(f"{name} holds id {int(token)} in row {row}: it must be in 0 to {greatest}"
                     + ("" if vocabulary is None else ", the target's ids"))
  return int(token)


def _again(name, table, rows, vocabulary):
  """A copy of a table that was made before, checked against this batch and vocabulary. The state that holds it is
  donated step after step; the caller's own must outlive it."""
  ids = np.asarray(table.ids)
  if len(ids) != rows:
    raise ValueError(f"{name} was batched for {len(ids)} rows; this batch has {rows}")
  if vocabulary is not None and ids.max() >= vocabulary:
    row = int(np.argmax(ids.max(-1) >= vocabulary))
    raise ValueError(f"{name} holds id {ids[row].max()} in row {row}: it must be in 0 to {vocabulary - 1}, the "
                     "target's ids")
  return jax.tree.map(lambda x: jnp.array(x, copy=True), table)


def _table(lists, fill, dtype):
  places = _LEAST_PLACES
  while places < max(map(len, lists)):
    places *= 2
  table = np.full((len(lists), places), fill, dtype)
  for row, some in enumerate(lists):
    table[row, :len(some)] = some
  return jnp.asarray(table)


def _sets(table, rows):
  if table is None:
    return [set()] * rows
  return [set(ids[ids >= 0].tolist()) for ids in np.asarray(table.ids)]
