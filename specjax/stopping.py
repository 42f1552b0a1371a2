"""When a row ends: end-of-sequence ids, stop sequences of token ids, and its budget, inside an accepted burst.

A step may emit several tokens at once. The burst is cut right behind the first token that ends the row, so that ids,
text and counters end together; a stop inside the budget beats the length cap, and one beyond it never happened.

Letters: B batch rows, D greatest depth, Q stop sequences of a row, W their greatest length.
"""
import collections.abc

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

RUNNING, STOP, LENGTH = range(3)
REASONS = (None, "stop", "length")
_NONE = -1  # fills unused places; no token has this id


@struct.dataclass
class StopRules:
  """What ends each row. Padded with -1, which no token equals."""
  eos: jax.Array        # i32[B, X]
  sequences: jax.Array  # i32[B, Q, W], aligned to the right


def stop_rules(rows: int, eos_ids=(), sequences=(), *, width: int = 8, count: int = 4) -> StopRules:
  """Rules for a batch.

  Args:
    rows: B.
    eos_ids: ids that end a row; empty to ignore the end of sequence.
    sequences: stop sequences as lists of token ids, the same for every row, or one such list a row (then the outer
      length is B and its entries are lists of lists).
    width, count: places kept for sequences (W and Q). Static shapes: within them, changing the rules does not
      recompile; more are taken when needed.

  Raises:
    ValueError: for an empty sequence or a negative id.
  """
  sequences, eos_ids = list(sequences), np.atleast_1d(np.asarray(eos_ids, np.int64)).tolist()
  is_list = lambda x: isinstance(x, (collections.abc.Sequence, np.ndarray)) and not isinstance(x, str)
  if not all(map(is_list, sequences)):
    raise ValueError(f"stop sequences {sequences!r}: each is a list of token ids; encode text first")
  nested = any(is_list(token) for sequence in sequences for token in sequence)
  per_row = sequences if nested else [sequences] * rows
  if len(per_row) != rows:
    raise ValueError(f"stop sequences for {len(per_row)} rows, but the batch has {rows}")
  flat = [list(s) for row in (per_row if nested else per_row[:1]) for s in row]
  if any(not s or min(s) < 0 for s in flat) or any(e < 0 for e in eos_ids):
    raise ValueError(f"stop sequences {flat} and end ids {tuple(eos_ids)}: each needs at least one id, 0 or greater")
  width = max([width, *map(len, flat)])
  count = max([count, *map(len, per_row)])
  table = np.full((rows, count, width), _NONE, np.int32)
  for row, wanted in enumerate(per_row):
    for i, sequence in enumerate(wanted):
      table[row, i, width - len(sequence):] = sequence
  eos = np.full((rows, max(8, len(eos_ids))), _NONE, np.int32)
  eos[:, :len(eos_ids)] = sorted(eos_ids)
  return StopRules(eos=jnp.asarray(eos), sequences=jnp.asarray(table))


def cut(emitted: jax.Array, count: jax.Array, history: jax.Array, budget: jax.Array,
        rules: StopRules) -> tuple[jax.Array, jax.Array]:
  """Cuts a burst at the first end in it.

  Args:
    emitted: i32[B, D + 1], the tokens that the verifier lets out.
    count: i32[B], how many of them are real; 0 for a row that takes no part.
    history: i32[B, W - 1], the output tokens before the burst, the latest last, -1 where there are fewer.
    budget: i32[B], output tokens that the row may still emit.
    rules: what ends a row.

  Returns:
    count i32[B] after the cut and reason i32[B]: RUNNING, STOP or LENGTH.
  """
  chex.assert_rank([emitted, history], 2)
  chex.assert_equal_shape([count, budget])
  burst = emitted.shape[1]
  width = rules.sequences.shape[-1]
  stream = jnp.concatenate([history, emitted], axis=1)
  windows = jnp.stack([stream[:, i:i + width] for i in range(burst)], axis=1)  # ends at burst token i
  wanted = rules.sequences[:, None]
  matches = ((windows[:, :, None] == wanted) | (wanted == _NONE)).all(-1) & (wanted != _NONE).any(-1)
  ends = (emitted[:, :, None] == rules.eos[:, None]).any(-1) | matches.any(-1)
  ends &= jnp.arange(burst)[None] < jnp.minimum(count, budget)[:, None]
  stopped = ends.any(-1)
  kept = jnp.where(stopped, jnp.argmax(ends, -1).astype(jnp.int32) + 1, jnp.minimum(count, budget))
  full = (kept >= budget) & (count > 0)
  return kept, jnp.where(stopped, STOP, jnp.where(full, LENGTH, RUNNING)).astype(jnp.int32)
