"""What an ablation is, what it gives, and how it is judged against what was published."""
from collections.abc import Callable, Sequence
import dataclasses
import math

AGREES, DIFFERS, CANNOT_SAY = "agrees", "differs", "cannot say"
VERDICTS = (AGREES, DIFFERS, CANNOT_SAY)
KINDS = ("sim", "toy")
STATED, DIGITISED, ENUMERATED = "stated", "digitised", "enumerated"  # how a reference value was got


@dataclasses.dataclass(frozen=True)
class Options:
  """What a run may choose.

  Attributes:
    seed: of random tables; 0 or more.
  """
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Series:
  """One of our curves: its name, and as many x as y. A None in y is a gap."""
  label: str
  x: tuple[float, ...]
  y: tuple[float | None, ...]

  def __post_init__(self):
    if len(self.x) != len(self.y) or not self.x:
      raise ValueError(f"curve {self.label!r} has {len(self.x)} x and {len(self.y)} y; give as many of both, and some")


@dataclasses.dataclass(frozen=True)
class Published:
  """Reference values.

  Attributes:
    label: in the legend. x, y: of the points.
    source: the document and its table or figure.
    how: "stated" in its text or a table, "digitised" from a figure, or "enumerated" by independent NumPy code.
    of: the label of our curve that it belongs to and whose colour it takes; None for none.
    joined: draw a line through the points.
  """
  label: str
  x: tuple[float, ...]
  y: tuple[float, ...]
  source: str
  how: str = STATED
  of: str | None = None
  joined: bool = False

  def __post_init__(self):
    if len(self.x) != len(self.y) or self.how not in (STATED, DIGITISED, ENUMERATED):
      raise ValueError(f"reference {self.label!r}: {len(self.x)} x, {len(self.y)} y, how={self.how!r}; give as many x "
                       f"as y, and how of {STATED}, {DIGITISED}, {ENUMERATED}")


@dataclasses.dataclass(frozen=True)
class Result:
  """What an ablation gives.

  Attributes:
    x_axis, y_axis: names with units.
    curves: ours. published: the reference.
    verdict: of VERDICTS. why: one or two sentences with the numbers that decide.
    columns, rows: a table of text; the first column names the row.
    log_x: draw x to the base 2. ticks: names of x = 0, 1, ..; () for numbers.
    level: a dashed horizontal line, such as 1 for plain decoding.
  """
  x_axis: str
  y_axis: str
  curves: tuple[Series, ...]
  published: tuple[Published, ...]
  verdict: str
  why: str
  columns: tuple[str, ...] = ()
  rows: tuple[tuple[str, ...], ...] = ()
  log_x: bool = False
  ticks: tuple[str, ...] = ()
  level: float | None = None

  def __post_init__(self):
    if self.verdict not in VERDICTS:
      raise ValueError(f"verdict={self.verdict!r}: allowed are {', '.join(VERDICTS)}")
    if any(len(row) != len(self.columns) for row in self.rows):
      raise ValueError(f"a row has another number of cells than the {len(self.columns)} columns {self.columns}")


@dataclasses.dataclass(frozen=True)
class Ablation:
  """One ablation.

  Attributes:
    name: on the command line. title: a sentence.
    paper: arXiv id, or the venue where there is none. answers: its figure, table or claim.
    items: the questions of `registry.QUESTIONS` that it answers; () for one that is not there.
    kind: "sim" or "toy". run: does it.
  """
  name: str
  title: str
  paper: str
  answers: str
  items: tuple[int, ...]
  kind: str
  run: Callable[[Options], Result]


def curve(label: str, x: Sequence[float], function: Callable[[float], float | None]) -> Series:
  """The values of a function at x."""
  return Series(label, tuple(map(float, x)), tuple(None if (y := function(at)) is None else float(y) for at in x))


def holds(claims: dict[str, bool]) -> tuple[str, str]:
  """The verdict where the paper makes claims instead of printing values: "agrees" if all hold; and, in words, which do
  not."""
  broken = [claim for claim, true in claims.items() if not true]
  return (DIFFERS, f"Not so here: {'; '.join(broken)}.") if broken else (AGREES, "")


def within(ours: Sequence[float], theirs: Sequence[float], tolerance: float, *,
           relative: bool = False) -> tuple[str, float]:
  """The verdict where values are printed, and the greatest difference: "agrees" if none is above `tolerance`."""
  gaps = [abs(a - b) / (abs(b) if relative else 1) for a, b in zip(ours, theirs, strict=True)]
  worst = max(gaps)
  return (AGREES if worst <= tolerance and not math.isnan(worst) else DIFFERS), worst


def worse(*verdicts: str) -> str:
  """Of several verdicts the one that counts: any difference, then any doubt."""
  return next((verdict for verdict in (DIFFERS, CANNOT_SAY) if verdict in verdicts), AGREES)
