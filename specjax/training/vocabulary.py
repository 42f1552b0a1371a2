"""Which ids a head drafts: the most frequent ones of what the target writes.

Published EAGLE-3 heads draft 32,000 of 128,000 ids: the head's product with the vocabulary is a good part of a level's
cost, and rare tokens are rarely drafted right.
"""
from collections.abc import Iterable

import numpy as np

from specjax.training import corpus


def frequent(texts: Iterable[np.ndarray], size: int, vocab_size: int, *,
             keep: tuple[int, ...] = ()) -> tuple[np.ndarray, float]:
  """The `size` most frequent ids of some texts, i32[] each (see `batches.Data.answers`).

  Args:
    keep: ids that are taken whatever their count.

  Returns:
    i32[size], ascending, and the share of the tokens that they are.
  """
  counts = np.zeros(vocab_size, np.int64)
  for text in texts:
    counts += np.bincount(text, minlength=vocab_size)
  order = counts.copy()
  order[list(keep)] = counts.max() + 1
  ids = np.sort(np.argsort(-order, kind="stable")[:size]).astype(np.int32)
  return ids, float(counts[ids].sum() / max(counts.sum(), 1))


def unused(folders: Iterable[str], vocab_size: int) -> int:
  """The first id that no sequence of some corpora holds: what stands for a token to be drafted.

  Raises:
    ValueError: for corpora that hold all ids.
  """
  seen = np.zeros(vocab_size, bool)
  for folder in folders:
    for index in corpus.indices(folder):
      seen[corpus.read(folder, index).tokens] = True
  if seen.all():
    raise ValueError(f"{', '.join(map(str, folders))}: every id of the vocabulary occurs here, and none is left to stand "
                     "for a token to be drafted")
  return int(np.argmin(seen))
