"""The draft length that measured times ask for: what a chain would bring, and cost, were it cut shorter or longer.

A run's counters say how many steps drafted at least so many tokens, and how many of these accepted at least so many. Cut
at n, a step emits what it accepted up to n and one more, at the price of the pass that holds n drafted tokens: exact
from the counts for chains that are cut, as what follows a position has no part in whether it is accepted. Steps of a
cut chain begin at other places of the text than those that were counted, so that it is a prediction, and what it finds
is measured before it is advised. Longer chains than those that were drafted take their acceptance from a fitted law.
"""
from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from specjax.theory import acceptance
from specjax.theory import speedup


@dataclasses.dataclass(frozen=True)
class Counted:
  """Counts of the steps of a chain drafter, pooled over requests.

  Attributes:
    steps: in all. drafted, trials, accepted: f[D], steps that drafted, judged and accepted each position.
  """
  steps: int
  drafted: np.ndarray
  trials: np.ndarray
  accepted: np.ndarray

  @classmethod
  def of(cls, records: Sequence[dict]) -> "Counted":
    """Those of records of a run."""
    each = lambda name: np.sum([r["counters"][name] for r in records], axis=0)
    return cls(int(each("steps")), each("drafted_per_position"), each("trials_per_position"),
               each("accepted_per_position"))

  def longer(self, depth: int) -> "Counted":
    """As many positions as `depth`: steps that drafted all there were would have gone on, and are accepted by law."""
    more = depth - len(self.drafted)
    if more <= 0:
      return self
    conditional = acceptance.best(self.trials, self.accepted).conditional(depth)[-more:]
    accepted = self.accepted[-1] * np.cumprod(conditional)
    trials = np.concatenate([self.accepted[-1:], accepted[:-1]])
    return Counted(self.steps, np.concatenate([self.drafted, np.full(more, self.drafted[-1])]),
                   np.concatenate([self.trials, trials]), np.concatenate([self.accepted, accepted]))

  def tokens(self, length: int) -> float:
    """Tokens of a step cut at `length`."""
    return 1 + float(self.accepted[:length].sum()) / self.steps

  def nodes(self, length: int) -> np.ndarray:
    """Steps that draft 0, 1 .. `length` tokens, f[length + 1]."""
    least = np.concatenate([[self.steps], self.drafted[:length], [0]]).astype(float)
    return least[:-1] - least[1:]


def speedups(counted: Counted, lengths: Sequence[int], pass_ms: Callable[[int], float],
             draft: speedup.DraftCost) -> dict[int, float]:
  """Speedup of decoding over plain decoding by draft length.

  Args:
    counted: at least as long as `lengths`. pass_ms: milliseconds of a pass over so many nodes. draft: of a step that
      may draft; a lookup that finds nothing has looked as well.
  """
  plain, found = pass_ms(1), {}
  for length in lengths:
    steps = counted.nodes(length)
    passes = sum(count * pass_ms(1 + drafted) for drafted, count in enumerate(steps)) / counted.steps
    found[length] = counted.tokens(length) * plain / (passes + draft.ms(length))
  return found


def best(records: Sequence[dict], depth: int, pass_ms: Callable[[int], float], draft: speedup.DraftCost,
         most: int) -> tuple[int, float] | None:
  """The draft length of greatest speedup, and by how much it exceeds that of `depth`, the one that was run.

  Args:
    records: of a run with chains of up to `depth` tokens. most: length that is thought of, at most.

  Returns:
    (length, gain), the shorter of equal ones; None where nothing was drafted.
  """
  counted = Counted.of(records)
  if not counted.trials.sum() or not counted.steps:
    return None
  found = speedups(counted.longer(most), sorted({*range(1, most + 1), depth}), pass_ms, draft)
  length = max(found, key=lambda n: (found[n], -n))
  return length, found[length] / found[depth]
