"""How much to draft when many requests share a step: a controller sets each row's limit before every step, 0 included.

In a batch every row pays for the width of the step, so what pays for one request may not pay for sixteen. A limit is
set from past steps only, before anything is drawn, so that it never changes the law of a text (see `proposers.base`).

- `Fixed`: the same limit always. `Table`: a limit by the number of running rows, vLLM's dynamic speculation.
- `Goodput`: the limit that brings most tokens a second, by measured costs and acceptance (SmartSpec, arXiv 2406.14066).
- `Gate`: each row by its own acceptance, off below a threshold and tried again now and then (TensorRT-LLM, exllamav3).
- `Budget`: so many drafted tokens for all rows together, those most likely to survive (the scheduling of DSpark).

Letters: R running rows, N most drafted tokens.
"""
import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from specjax.serving import costs as costs_lib

_FADE = 0.9       # weight of what was known, step by step
_FEW = 3          # times that a plain step is measured before it is believed
_PRIOR = 4.0      # trials that what is known of all requests counts for in a new one


class Acceptance:
  """What became of the drafts of some steps, the latest counting most."""

  def __init__(self, fade: float = _FADE):
    self._fade = fade
    self.trials = self.accepted = self.steps = self.drafts = self.lengths = self.whole = 0.0

  def add(self, drafted: int, accepted: int, offered: int, cut: bool = False) -> None:
    """One step in which drafting was allowed.

    Args:
      drafted, accepted: tokens that were verified, and of them accepted.
      offered: tokens of the draft, before it was cut to a width.
      cut: the draft ended at a limit and may have gone on.
    """
    tried, whole = min(accepted + 1, drafted), offered > 0 and not cut
    for name, value in dict(trials=tried, accepted=accepted, steps=1, drafts=drafted > 0, lengths=offered * whole,
                            whole=whole).items():
      setattr(self, name, self._fade * getattr(self, name) + value)

  def rate(self, prior: "Acceptance | None" = None) -> float:
    """Probability that a drafted token is accepted behind accepted ones; `prior` counts where little is known."""
    base = 0.6 if prior is None else prior.rate()
    return (self.accepted + _PRIOR * base) / (self.trials + _PRIOR)

  def share(self, prior: "Acceptance | None" = None) -> float:
    """Share of the steps in which a draft was verified."""
    base = 1.0 if prior is None else prior.share()
    return (self.drafts + _PRIOR * base) / (self.steps + _PRIOR)

  def length(self, most: int, prior: "Acceptance | None" = None) -> float:
    """Mean tokens of a draft, where there was one and no limit cut it."""
    base = float(most) if prior is None else prior.length(most)
    return min((self.lengths + _PRIOR * base) / (self.whole + _PRIOR), float(most))


@dataclasses.dataclass(frozen=True)
class View:
  """What a controller sees before a step."""
  rows: list[Acceptance]  # of each running row that may draft
  everyone: Acceptance    # of all rows that ever ran
  batch: int              # rows that the step computes
  slots: int
  most: int               # N
  limits: tuple[int, ...]  # those that fill a width: 0, then one for each width, N the last
  costs: costs_lib.Costs
  idle: int = 0           # steps since a draft was last verified
  others: int = 0         # running rows that asked for no drafts

  def rates(self) -> np.ndarray:
    """f[R]; how likely each row's next drafted token is accepted."""
    return np.array([row.rate(self.everyone) for row in self.rows])

  def expected(self, limit: int) -> np.ndarray:
    """f[R]; accepted tokens that are expected of each row under a limit, were all rows to draft."""
    rates = np.minimum(self.rates(), 0.999)
    share = np.array([row.share(self.everyone) for row in self.rows])
    length = np.minimum([row.length(self.most, self.everyone) for row in self.rows], limit)
    return share * rates * (1 - rates ** length) / (1 - rates)


class Controller(Protocol):
  """Sets limits; may keep what it saw, which the engine shows it step by step through `View`.

  Attributes:
    weighs: whether point drafts are also cut, behind drafting, to the width that brings most tokens for its cost.
  """
  weighs: bool

  def limits(self, view: View) -> np.ndarray:
    """i32[R]: the most tokens that each row of `view.rows` may draft in the next step."""


@dataclasses.dataclass
class Fixed:
  """The same limit for every row and step; None: as much as the proposer drafts."""
  limit: int | None = None
  weighs = False

  def __post_init__(self):
    if self.limit is not None and self.limit < 0:
      raise ValueError(f"limit={self.limit}: it must be 0 (plain decoding) or more, or None for all that is drafted")

  def limits(self, view):
    """See `Controller`."""
    return np.full(len(view.rows), view.most if self.limit is None else min(self.limit, view.most), np.int32)


@dataclasses.dataclass
class Table:
  """A limit by the number of running rows: that of the smallest key that is as large; 0 beyond all keys.

  `Table({4: 7, 16: 3})` drafts 7 tokens for up to 4 rows, 3 for up to 16 and nothing for more.
  """
  by_rows: Mapping[int, int]
  weighs = False

  def __post_init__(self):
    if not self.by_rows or any(rows < 1 or limit < 0 for rows, limit in self.by_rows.items()):
      raise ValueError(f"by_rows={self.by_rows!r}: it maps numbers of rows, 1 or more, to limits of 0 or more")

  def limits(self, view):
    """See `Controller`."""
    fitting = [rows for rows in sorted(self.by_rows) if rows >= len(view.rows) + view.others]
    limit = self.by_rows[fitting[0]] if fitting else 0
    return np.full(len(view.rows), min(limit, view.most), np.int32)


@dataclasses.dataclass
class Goodput:
  """The limit with most expected tokens a second, of those that fill a width: sum of tokens over the time of a step.

  While no draft is verified, since nothing is drafted or the step's width is cut to 1, the least limit is tried for one
  step in `probe`, in half as many whenever that did not bring drafting back, down to one in `longest`; and more seldom
  where it would take more than `price` of the time. So traffic that changes is noticed. `margin` is what drafting
  must gain to be taken up; it is left where it gains nothing. A few plain steps are timed first in every shape, and one
  after `probe` steps with drafts: all else is judged by them.
  """
  probe: int = 32
  longest: int = 512
  price: float = 0.02
  margin: float = 0.02

  def __post_init__(self):
    if not 1 <= self.probe <= self.longest or self.price <= 0 or self.margin < 0:
      raise ValueError(f"probe={self.probe}, longest={self.longest}, price={self.price}, margin={self.margin}: needed "
                       "are 1 <= probe <= longest, a price of more than 0 and a margin of 0 or more")
    self._last, self._wait, self._drafting, self.weighs = 0, self.probe, 0, True

  def limits(self, view):
    """See `Controller`."""
    self._last = self._choose(view)
    return np.full(len(view.rows), self._last, np.int32)

  def _choose(self, view):
    least, seconds = view.limits[1], lambda limit: view.costs.under(view.batch, view.slots, limit)
    probed, self.weighs = not self.weighs, True
    self._drafting = self._drafting + 1 if self._last else 0
    if self._drafting >= self.probe or view.costs.measured(view.batch, view.slots, 0) < _FEW:
      return 0
    if view.idle >= max(self._wait, (seconds(least) / seconds(0) - 1) / self.price):
      self._wait, self.weighs = min(2 * self._wait, self.longest), False  # a step that is cut says nothing new
      return least
    best = self._best(view)
    if best and not view.idle and not probed:
      self._wait = self.probe
    return best

  def _best(self, view):
    def goodput(limit):
      tokens = len(view.rows) + view.others + (view.expected(limit).sum() if limit else 0)
      needed = 1 + self.margin if limit and not self._last else 1.0
      return tokens / (needed * view.costs.under(view.batch, view.slots, limit))
    return max(view.limits, key=goodput)


@dataclasses.dataclass
class Gate:
  """All that the proposer drafts for rows whose rate of acceptance is `threshold` or more; others draft nothing, but
  for one step in `probe`, by which they may come back."""
  threshold: float = 0.3
  probe: int = 16
  weighs = False

  def __post_init__(self):
    if not 0 <= self.threshold <= 1 or self.probe < 1:
      raise ValueError(f"threshold={self.threshold}, probe={self.probe}: needed are a threshold in [0, 1] and 1 step "
                       "or more")
    self._step = 0

  def limits(self, view):
    """See `Controller`."""
    self._step += 1
    open_ = (view.rates() >= self.threshold) | (self._step % self.probe == 0)
    return np.where(open_, view.most, 0).astype(np.int32)


@dataclasses.dataclass
class Budget:
  """`tokens` drafted tokens for all rows together: those with the greatest estimated probability of being accepted,
  which falls with every place of a draft, none below `least`."""
  tokens: int = 32
  least: float = 0.05
  weighs = False

  def __post_init__(self):
    if self.tokens < 0 or not 0 <= self.least <= 1:
      raise ValueError(f"tokens={self.tokens}, least={self.least}: needed are 0 tokens or more and a least probability "
                       "in [0, 1]")

  def limits(self, view):
    """See `Controller`."""
    survival = view.rates()[:, None] ** np.arange(1, view.most + 1)
    order = np.argsort(-survival, axis=None, kind="stable")[:self.tokens]
    taken = np.zeros(survival.size, bool)
    taken[order] = survival.ravel()[order] >= self.least
    return taken.reshape(survival.shape).sum(1).astype(np.int32)
