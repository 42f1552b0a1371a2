"""Which ids a head drafts: the most frequent ones of what the target writes.

Published EAGLE-3 heads draft 32,000 of 128,000 ids: the head's product with the vocabulary is a good part of a level's
cost, and rare tokens are rarely drafted right.
"""
import numpy as np

from specjax.training import corpus


def frequent(folders, size: int, vocab_size: int, *, keep: tuple[int, ...] = ()) -> tuple[np.ndarray, float]:
  """The `size` most frequent ids among answers and plain text of some corpora.

  Args:
    keep: ids that are taken whatever their count.

  Returns:
    i32[size], ascending, and the share of those tokens that they are.
  """
  counts = np.zeros(vocab_size, np.int64)
  for sequences in (corpus.read(folder, index) for folder in folders for index in corpus.indices(folder)):
    for which in range(len(sequences)):
      counts += np.bincount(sequences[which][sequences.starts[which]:], minlength=vocab_size)
  order = counts.copy()
  order[list(keep)] = counts.max() + 1
  ids = np.sort(np.argsort(-order, kind="stable")[:size]).astype(np.int32)
  return ids, float(counts[ids].sum() / max(counts.sum(), 1))


def unused(folders, vocab_size: int) -> int:
  """The first id that no sequence of some corpora holds: what stands for a token to be drafted. Raises ValueError if all occur."""
  seen = np.zeros(vocab_size, bool)
  for folder in folders:
    for index in corpus.indices(folder):
      seen[corpus.read(folder, index).tokens] = True
  if seen.all():
    raise ValueError(f"{', '.join(map(str, folders))}: here is every id of the vocabulary: none is left to stand for a token to be drafted")
  return int(np.argmin(seen))
