"""Span corruption, T5's objective on plain text: some spans of a piece are cut out, and the answer is what they were.

Source: arXiv 1910.10683, section 3.1.4, with its 15% of the tokens in spans of 3 on average; lengths are drawn as its
repository's `random_spans_noise_mask` does: the tokens that go and those that stay are each cut into as many parts, at
places that are all alike, and a part that stays comes first. So a piece never begins with a span that is cut out.
"""
from collections.abc import Sequence

import numpy as np

_DENSITY, _MEAN_SPAN = 0.15, 3.0


def sizes(length: int, sentinels: int) -> tuple[int, int]:
  """Tokens that go and spans that they are in, of a piece of `length` >= 2 tokens, with so many sentinels at most."""
  noise = min(max(round(length * _DENSITY), 1), length - 1)
  return noise, min(max(round(noise / _MEAN_SPAN), 1), length - noise, sentinels)


def corrupt(ids: Sequence[int], sentinels: Sequence[int], rng: np.random.Generator) -> tuple[list[int], list[int]]:
  """Inputs and answer of a piece, without an end of sequence.

  Args:
    ids: of the piece, 2 or more.
    sentinels: ids that stand for the spans, the first for the first: in the inputs in the place of each, in the answer
      before its tokens.
  """
  noise, spans = sizes(len(ids), len(sentinels))
  inputs, answer, at = [], [], 0
  for sentinel, kept, gone in zip(sentinels, _parts(len(ids) - noise, spans, rng), _parts(noise, spans, rng)):
    inputs += [*ids[at:at + kept], sentinel]
    answer += [sentinel, *ids[at + kept:at + kept + gone]]
    at += kept + gone
  return inputs, answer


def _parts(total, count, rng):
  """`count` positive lengths with this sum, every way of cutting alike."""
  cuts = np.sort(rng.choice(total - 1, count - 1, replace=False)) + 1
  return np.diff([0, *cuts, total]).tolist()
