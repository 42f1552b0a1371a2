"""What a target computes of a corpus, kept in float16 beside it: features are the dear part of training a head.

For every token: the residual stream that enters some layers, the hidden state behind the final norm, and the target's
most probable next id. Files appear whole or not at all; those that are there are not computed again, unless sequences
were cut shorter in them.

Letters: B sequences of a batch, S tokens of each, L tokens of a file, D width of the target, F = layers * D.
"""
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.models import base as models
from specjax.training import corpus

_TOKENS = 2048   # of one forward pass, about
_MULTIPLE = 64   # lengths of passes are multiples of it


@dataclasses.dataclass(frozen=True)
class File:
  """Of one file of the corpus, token by token; memory-mapped."""
  values: np.ndarray  # f16[L, F + D]; the layers in the order asked for, then the hidden state
  top: np.ndarray     # i32[L]


def path(folder, index: int, layers: tuple[int, ...]) -> pathlib.Path:
  """Of the values of file `index`; that of `top` ends in .top.npy."""
  return pathlib.Path(folder) / f"features-{'-'.join(map(str, layers))}-{index:05d}.npy"


def compute(target, folder, layers: tuple[int, ...], max_tokens: int, *, progress=None) -> int:
  """Computes what is missing; sequences are cut at `max_tokens`. The number of files.

  Args:
    target: with features to be computed, a decoder; a target with an encoder has kept them while it answered.
    layers: see `models.base.Target.forward`.
    progress: has `update(tokens)`.

  Raises:
    ValueError: for a target with an encoder.
  """
  for index in corpus.indices(folder):
    place, sequences = path(folder, index, layers), corpus.read(folder, index)
    if place.exists() and _top(place).exists() and _reaches(place, sequences, max_tokens):
      continue
    models.decoder_only(target, "computing features that were not kept (--keep_features)")
    values = np.zeros((len(sequences.tokens), (len(layers) + 1) * target.config.width), np.float16)
    top = np.zeros(len(sequences.tokens), np.int32)
    for rows, size in batches([min(len(sequences[i]), max_tokens) for i in range(len(sequences))], _TOKENS):
      tokens = np.zeros((len(rows), size), np.int32)
      for row, which in enumerate(rows):
        ids = sequences[which][:size]
        tokens[row, :len(ids)] = ids
      got, best = jax.device_get(_forward(target, tokens, np.tril(np.ones((size, size), bool)), layers=layers))
      for row, which in enumerate(dict.fromkeys(rows)):  # what fills the batch up stands at its end, again
        begin, count = sequences.offsets[which], min(len(sequences[which]), size)
        values[begin:begin + count], top[begin:begin + count] = got[row, :count], best[row, :count]
        if progress is not None:
          progress.update(count)
    write(folder, index, layers, File(values=values, top=top))
  return len(corpus.indices(folder))


def write(folder, index: int, layers: tuple[int, ...], file: File) -> None:
  """Of file `index`, whole or not at all."""
  place = path(folder, index, layers)
  corpus.write_whole(_top(place), functools.partial(np.save, arr=file.top))
  corpus.write_whole(place, functools.partial(np.save, arr=file.values))


def read(folder, index: int, layers: tuple[int, ...]) -> File:
  """Of file `index`; `compute` comes first."""
  place = path(folder, index, layers)
  return File(values=np.load(place, mmap_mode="r"), top=np.load(_top(place)))


def batches(lengths: list[int], tokens: int) -> list[tuple[list[int], int]]:
  """Sequences of about one length together: their indices and the length that holds them, `tokens` or so in each.

  The last batch of a length is filled up with its last sequence, so that a length has one shape.
  """
  found, waiting = [], {}
  for which, length in enumerate(lengths):
    size = -(-length // _MULTIPLE) * _MULTIPLE
    waiting.setdefault(size, []).append(which)
    if len(waiting[size]) == max(tokens // size, 1):
      found.append((waiting.pop(size), size))
  for size, rows in waiting.items():
    found.append((rows + [rows[-1]] * (max(tokens // size, 1) - len(rows)), size))
  return found


def _reaches(place, sequences, max_tokens):
  """Whether a file was not cut before `max_tokens`: behind the cut stand zeros, which no hidden state is."""
  lengths = np.diff(sequences.offsets)
  longest = int(lengths.argmax())
  last = int(sequences.offsets[longest]) + min(int(lengths[longest]), max_tokens) - 1
  return bool(np.load(place, mmap_mode="r")[last].any())


@functools.partial(jax.jit, static_argnames="layers")
def _forward(target, tokens, mask, *, layers):
  batch, size = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
  out = target.forward(tokens, positions, jnp.broadcast_to(mask, (batch, size, size)), target.init_cache(batch, 1),
                       features=layers)
  best = _argmax(target, out.hidden.reshape(-1, out.hidden.shape[-1]))
  values = jnp.concatenate([*out.features, out.hidden], -1)
  return half(values), best.reshape(batch, size)


def half(values: jax.Array) -> jax.Array:
  """In float16; residual streams of some models hold values beyond it."""
  return jnp.clip(values, -65504, 65504).astype(jnp.float16)


def top(target, hidden: np.ndarray) -> np.ndarray:
  """The most probable next id, i32[L], behind final hidden states f16[L, D], of which a few have one shape."""
  found = []
  for begin in range(0, len(hidden), _TOKENS):
    some = hidden[begin:begin + _TOKENS]
    found.append(np.asarray(_top_ids(target, np.pad(some, ((0, _TOKENS - len(some)), (0, 0)))))[:len(some)])
  return np.concatenate(found) if found else np.zeros(0, np.int32)


@jax.jit
def _top_ids(target, hidden):
  return _argmax(target, hidden.astype(target.weights.embedding.dtype))


def _argmax(target, hidden):
  """i32[L] of f[L, D], a few at a time: the logits of a whole pass are hundreds of megabytes."""
  some = hidden.reshape(-1, _MULTIPLE, hidden.shape[-1])
  return jax.lax.map(lambda hidden: sampling.argmax(target.logits(hidden)), some).reshape(-1)


def _top(place):
  return place.with_name(place.stem + ".top.npy")
