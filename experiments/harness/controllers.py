"""Who says how much an engine may draft, by the flag --controller."""
from collections.abc import Callable
import re

from absl import flags

from specjax.serving import control

NAME = flags.DEFINE_string(
    "controller", "goodput", "How much to draft in every step: goodput (what brings most tokens a second by measured "
    "costs and acceptance), fixed or fixed:K (as much as the method drafts, or K tokens), gate or gate:RATE (a request whose "
    "rate of acceptance is below RATE drafts only now and then), budget:K (K tokens for all requests together), or "
    "table:4=7,16=3 (7 tokens for up to 4 requests at once, 3 for up to 16, none for more).")
_FORMS = {
    r"goodput": lambda: control.Goodput(), r"fixed": lambda: control.Fixed(),
    r"fixed:(\d+)": lambda limit: control.Fixed(int(limit)), r"gate": lambda: control.Gate(),
    r"gate:([\d.]+)": lambda rate: control.Gate(float(rate)),
    r"budget:(\d+)": lambda tokens: control.Budget(int(tokens)),
    r"table:(\d+=\d+(?:,\d+=\d+)*)": lambda pairs: control.Table(
        {int(rows): int(limit) for rows, limit in (pair.split("=") for pair in pairs.split(","))})}


def maker() -> Callable[[], control.Controller]:
  """What makes a controller, a new one every time: it learns while it is used.

  Raises:
    ValueError: names the flag and what it may be.
  """
  for form, make in _FORMS.items():
    if found := re.fullmatch(form, NAME.value):
      try:
        make(*found.groups())
      except ValueError as error:
        raise ValueError(f"--controller={NAME.value}: {error}") from error
      return lambda: make(*found.groups())
  raise ValueError(f"--controller={NAME.value}: allowed are goodput, fixed, fixed:K, gate, gate:RATE, budget:K and "
                   "table:ROWS=K,ROWS=K")
