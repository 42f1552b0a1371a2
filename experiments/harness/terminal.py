"""An answer at a terminal: written as it comes, accepted drafts coloured, and a line of what it took."""
from collections.abc import Iterable
import dataclasses
import sys
import time

from absl import flags

from specjax import drivers

_COLOR = flags.DEFINE_enum("color", "auto", ["auto", "always", "never"], "Colour accepted drafts; auto: on a terminal.")

_GREEN, _END = "\x1b[32m", "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Answer:
  """What was written. Seconds count from the call of `write`."""
  deltas: list[drivers.Delta]
  first: float
  total: float

  def line(self) -> str:
    """Tokens, steps, accepted drafts, times and the end, in words."""
    tokens = sum(len(delta.token_ids) for delta in self.deltas)
    drafted = sum(sum(delta.drafted) for delta in self.deltas)
    later = tokens - len(self.deltas[0].token_ids)
    rate = f", {later / (self.total - self.first):.1f} tokens/s after the first step" if later else ""
    return (f"{tokens} tokens in {len(self.deltas)} steps, {drafted} of them accepted drafts; first step after "
            f"{self.first:.2f} s (compilation included){rate}; finished by {self.deltas[-1].finish_reason}")


def write(deltas: Iterable[drivers.Delta]) -> Answer:
  """Writes the text of one row's deltas to the standard output."""
  color = _COLOR.value == "always" or (_COLOR.value == "auto" and sys.stdout.isatty())
  begin, first, found = time.perf_counter(), None, []
  for delta in deltas:
    first = first or time.perf_counter()
    found.append(delta)
    for piece, drafted in zip(delta.pieces, delta.drafted):
      sys.stdout.write(f"{_GREEN}{piece}{_END}" if color and drafted and piece else piece)
    sys.stdout.flush()
  return Answer(found, first - begin, time.perf_counter() - begin)
