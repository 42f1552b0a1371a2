"""Sampling parameters and stop rules of a batch, put together from those of its rows, on the host.

A batch has one of two forms, so that few programs are compiled: lean, where no row asks for more than temperature,
top-k, top-p, min-p and a seed, and full, with every field there is, neutral where a row did not ask.

Letters: B batch rows, K ids of a row, X end ids, Q stop sequences of a row, W their greatest length.
"""
import numpy as np

from specjax import sampling
from specjax import sampling_params
from specjax import stopping

_NONE = -1  # fills unused places; no token has this id
_PLAIN = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
_ADJUSTING = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_new_tokens": 0}
_WHOLE = ("top_k", "seed", "min_new_tokens")
_PLACES = 16


def join(rows: list[sampling.SamplingParams | None]) -> sampling.SamplingParams:
  """Batched parameters of B rows from theirs, each batched for one row; None for a row that is empty."""
  full = any(row is not None and row.adjusts for row in rows)
  fields = _PLAIN | _ADJUSTING if full else _PLAIN
  values = {name: np.array([_value(row, name, neutral) for row in rows],
                           np.int32 if name in _WHOLE else np.float32) for name, neutral in fields.items()}
  tables = {}
  if full:
    tables = {name: _table([row and getattr(row, name) for row in rows], name == "logit_bias")
              for name in ("logit_bias", "banned_ids", "allowed_ids")}
  absent = {name: None for name in (*_ADJUSTING, "logit_bias", "banned_ids", "allowed_ids")}
  return sampling.SamplingParams(**absent | values | tables)


def _value(row, name, neutral):
  value = None if row is None else getattr(row, name)
  return neutral if value is None else np.asarray(value)[0]


def _table(tables, with_values):
  widest = max((table.ids.shape[1] for table in tables if table is not None), default=0)
  ids = np.full((len(tables), max(_PLACES, widest)), _NONE, np.int32)
  values = np.zeros(ids.shape, np.float32)
  for row, table in enumerate(tables):
    if table is not None:
      ids[row, :table.ids.shape[1]] = np.asarray(table.ids)[0]
      if with_values:
        values[row, :table.ids.shape[1]] = np.asarray(table.values)[0]
  return sampling_params.RowIds(ids=ids, values=values if with_values else None)


def join_rules(rows: list[stopping.StopRules | None]) -> stopping.StopRules:
  """Stop rules of B rows from theirs, each of one row; None for a row that is empty."""
  given = [row for row in rows if row is not None]
  ends = _places([row.eos.shape[1] for row in given], 8)
  count, width = (_places([row.sequences.shape[axis] for row in given], least) for axis, least in ((1, 4), (2, 8)))
  eos = np.full((len(rows), ends), _NONE, np.int32)
  sequences = np.full((len(rows), count, width), _NONE, np.int32)
  for row, rules in enumerate(rows):
    if rules is not None:
      own = np.asarray(rules.sequences)[0]
      eos[row, :rules.eos.shape[1]] = np.asarray(rules.eos)[0]
      sequences[row, :own.shape[0], width - own.shape[1]:] = own
  return stopping.StopRules(eos=eos, sequences=sequences)


def _places(sizes, least):
  """The least power of two that holds all sizes: few shapes are compiled."""
  places = least
  while places < max(sizes, default=0):
    places *= 2
  return places
