"""What a load test goes through: the points of its sweep, how requests come at each, and the limits of goodput."""
import dataclasses
import math

from absl import flags

from specjax.serving import arrivals
from specjax.serving import load_metrics

SWEEP = flags.DEFINE_string("sweep", "concurrency:1,2,4,8", "What is varied: concurrency:1,2,4 (users without a "
                            "pause), rate:0.5,1 (requests a second), burst:4,8 (requests together, every "
                            "--burst_period), or at_once.")
BURSTINESS = flags.DEFINE_float("burstiness", 1.0, "--sweep=rate: 1 is a Poisson process, less is more bursty, more is "
                                "more even.")
BURST_PERIOD = flags.DEFINE_float("burst_period", 10.0, "--sweep=burst: seconds between bursts.")
GOODPUT = flags.DEFINE_list("goodput", None, "Limits in milliseconds that a good request keeps, such as "
                            "ttft:500,tpot:100,e2el:20000.")
UNITS = {"concurrency": "requests in flight", "rate": "requests a second", "burst": "requests a burst",
         "at_once": "requests at once"}
_CLOSED = ("concurrency", "at_once")  # the server sets the pace, so that throughput is what differs
_COUNTED = ("concurrency", "burst")    # values are numbers of requests


@dataclasses.dataclass(frozen=True)
class Sweep:
  """One kind of load and its values, ascending."""
  kind: str
  values: tuple[float, ...]

  @property
  def compares(self) -> str:
    """What a speedup compares: throughput where the server sets the pace, latency where the clients do."""
    return "output_throughput" if self.kind in _CLOSED else "median_e2el_ms"

  def arrivals(self, value: float, seed: int) -> arrivals.Arrivals:
    """How requests come at one point."""
    if self.kind == "concurrency":
      return arrivals.Closed(int(value))
    if self.kind == "rate":
      return arrivals.Gamma(value, BURSTINESS.value, seed)
    return arrivals.Bursts(int(value), BURST_PERIOD.value) if self.kind == "burst" else arrivals.AtOnce()

  @property
  def rows(self) -> int:
    """Rows of an engine that serves every point."""
    return max(map(self.together, self.values)) if self.kind in _COUNTED else 16

  def together(self, value: float) -> int:
    """Requests that one point has in flight; of the other kinds, which do not say, a few."""
    return int(value) if self.kind in _COUNTED else 4

  def requests(self, value: float) -> int:
    """How many requests a point has, unless it is said."""
    return max(16, 4 * self.together(value)) if self.kind in _COUNTED else 32


def parse() -> Sweep:
  """The sweep of the flags.

  Raises:
    ValueError: names the flag, its value and what it takes.
  """
  kind, colon, text = SWEEP.value.partition(":")
  values = (0.0,) if SWEEP.value == "at_once" else _values(text, whole=kind in _COUNTED)
  if kind not in UNITS or not values or (kind == "at_once") == bool(colon):
    raise ValueError(f"--sweep={SWEEP.value}: it takes concurrency:1,2,4 or burst:4,8 (different whole numbers of 1 or "
                     "more), rate:0.5,1 (different numbers greater than 0), or at_once")
  for flag, owner in ((BURSTINESS, "rate"), (BURST_PERIOD, "burst")):
    if owner != kind and not flags.FLAGS[flag.name].using_default_value:
      raise ValueError(f"--{flag.name}={flag.value} belongs to --sweep={owner}, and the sweep is of {kind}; leave it "
                       "out")
  found = Sweep(kind, values)
  for value in found.values:
    found.arrivals(value, 0)  # checks the other flags
  return found


def _values(text, whole):
  """Different numbers greater than 0, ascending; () for anything else."""
  try:
    values = sorted(float(item) for item in text.split(","))
  except ValueError:
    return ()
  fitting = all(0 < value < math.inf and (value == int(value) or not whole) for value in values)
  return tuple(values) if fitting and len(set(values)) == len(values) else ()


def goodput() -> dict[str, float] | None:
  """The limits of --goodput in milliseconds, by name; None without them.

  Raises:
    ValueError: names the flag.
  """
  if GOODPUT.value is None:
    return None
  found = {}
  for item in GOODPUT.value:
    name, _, limit = item.partition(":")
    try:
      if name in found:
        raise ValueError(f"{name} is given twice")
      found[name] = float(limit)
    except ValueError as error:
      raise ValueError(f"--goodput={','.join(GOODPUT.value)}: {item!r} is not name:milliseconds ({error}); names are "
                       f"{', '.join(load_metrics.GOODPUT)}") from error
  if not found:
    raise ValueError("--goodput= is empty; give limits such as ttft:500, or leave it out")
  try:
    load_metrics.check_goodput(found)
  except ValueError as error:
    raise ValueError(f"--goodput={','.join(GOODPUT.value)}: {error}") from error
  return found
