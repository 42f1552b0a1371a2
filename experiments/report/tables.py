"""The tables of the page: which columns there are, what they mean, and how a cell of the summary becomes text."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from experiments.harness import cost_model
from experiments.report.run_folder import ALL, PLAIN

Group = dict[str, Any]
DASH = "–"  # a value the run does not have


@dataclasses.dataclass(frozen=True)
class Cell:
  """A cell: its text, a smaller note behind it, and "good", "bad" or "" for how it should be read."""
  text: str
  note: str = ""
  tone: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
  """A column: its title, its meaning, its cell for a group, and whether it says something with random weights."""
  title: str
  meaning: str
  cell: Callable[[Group], Cell]
  rate: bool = True


@dataclasses.dataclass(frozen=True)
class Section:
  """The rows of one category: `(method, cells)` pairs under a title."""
  title: str
  rows: list[tuple[str, list[Cell]]]


@dataclasses.dataclass(frozen=True)
class Table:
  """Columns and sections, ready for the template."""
  columns: list[Column]
  sections: list[Section]


def decimal(value: float | None, places: int) -> str:
  """A number with a fixed number of decimal places and separated thousands."""
  return DASH if value is None else f"{value:,.{places}f}"


def short(value: float | None) -> str:
  """A number of any size with about three digits."""
  if value is None:
    return DASH
  return decimal(value, 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0)


def percent(value: float | None) -> str:
  return DASH if value is None else f"{100 * value:.1f}%"


def times(value: float | None) -> str:
  """A ratio to plain decoding."""
  return DASH if value is None else f"{value:.2f}×"


def gap(value: float | None) -> str:
  """A difference of logits, which may be tiny."""
  return DASH if value is None else f"{value:.2g}"


def size(value: float | None) -> str:
  """Bytes in binary units."""
  if value is None:
    return DASH
  for unit in ("B", "KiB", "MiB"):
    if value < 1024:
      return f"{short(value)} {unit}"
    value /= 1024
  return f"{short(value)} GiB"


def lossy(groups: Sequence[Group]) -> dict[str, list[str]]:
  """The lossy verifiers of each method whose text is not the target's, by name; empty for a lossless run."""
  found = {}
  for group in groups:
    if not group.get("lossless", True):
      names = found.setdefault(group["method"], [])
      if group["verifier"] not in names:
        names.append(group["verifier"])
  return found


def label(method: str, lossy_verifiers: dict[str, list[str]]) -> str:
  """A method as tables and legends name it: with its verifier where that is lossy."""
  return ", ".join([method, *lossy_verifiers.get(method, ())])


def lossy_lines(groups: Sequence[Group], *, rates: bool = True) -> list[str]:
  """What a reader must be told of a lossy run: a line a method, cells of several batch sizes in one; else nothing."""
  lines = []
  for method, names in lossy(groups).items():
    own = [group for group in groups if group["method"] == method and group["category"] == group["language"] == ALL]
    bounds = ", ".join(gap(group.get("total_variation_bound")) for group in own if rates) or DASH
    lines.append(f"LOSSY: {', '.join(names)}; {method}, bound per token: mean total variation {bounds}, the text is "
                 "not the target's")
  return lines


def speedup_cell(group: Group) -> Cell:
  """The speedup with its interval; it has a tone only where the interval leaves out 1."""
  interval = group["speedup_interval"]
  if group["speedup"] is None or interval is None:
    return Cell(times(group["speedup"]))
  low, high = interval
  tone = "good" if low > 1 else "bad" if high < 1 else ""
  return Cell(times(group["speedup"]), f"[{low:.2f}, {high:.2f}]", tone)


def _identical(group: Group) -> Cell:
  if group["identical_to_plain"] is None:
    return Cell(DASH)
  same, total = group["identical_to_plain"]
  return Cell(f"{same:g} of {total:g}", tone="bad" if same < total else "")


def _field(form: Callable[..., str], *path: str) -> Callable[[Group], Cell]:
  """The cell of one number of a group, found by its path."""
  def cell(group: Group) -> Cell:
    value = group
    for key in path:
      value = value.get(key)
    return Cell(form(value))
  return cell


def _count(name: str) -> Callable[[Group], Cell]:
  return _field(lambda value: decimal(value, 0), name)


def break_even_cell(group: Group) -> Cell:
  """Tokens a step that pay for a step; bad where the method makes fewer."""
  value, made = group["verify_cost_ratio"], group["tokens_per_step"]
  return Cell(short(value), tone="bad" if value and made and made < value and group["speedup"] is not None else "")


def _percentiles(name: str) -> Callable[[Group], Cell]:
  def cell(group: Group) -> Cell:
    return Cell(" / ".join(short(group[name].get(key)) for key in ("p50", "p95", "p99")) if group[name] else DASH)
  return cell


RESULTS = (
    Column("requests", "Requests measured.", _count("requests"), rate=False),
    Column("output tokens", "Tokens delivered, cut at the same stop for every method.", _count("output_tokens"),
           rate=False),
    Column("tokens/step", "Output tokens per verify pass of the target, the new token included.",
           _field(short, "tokens_per_step")),
    Column("break-even", "Tokens per step at which the method is as fast as plain decoding: its step over a plain step, "
           "as both ran. A method whose tokens/step lie below loses time.", break_even_cell),
    Column("acceptance", "Accepted over drafted tokens, pooled. A dash where nothing was drafted.",
           _field(percent, "acceptance_rate")),
    Column("tokens/s", "Output tokens per second.", _field(short, "tokens_per_second")),
    Column("speedup", "Against plain decoding, with the 95% interval over requests, paired: of a bootstrap, below 8 "
           "requests Student's, below 3 none. ▲ and ▼: the whole interval lies above or below 1.", speedup_cell),
    Column("without repeats", "The speedup without the requests that hold repeating output.",
           _field(times, "speedup_without_repeats")),
    Column("repeated", "Output tokens inside a span that repeats three times or more in a row.",
           _field(percent, "repeated_share")),
    Column("TTFT p50", "Time to the first token, milliseconds, median.",
           _field(short, "time_to_first_token_ms", "p50")),
    Column("TPOT p50", "Time per output token after the first, milliseconds, median.",
           _field(short, "time_per_output_token_ms", "p50")),
    Column("latency p50 / p95 / p99", "Time of the whole request, milliseconds.", _percentiles("latency_ms")),
    Column("identical", "Requests whose tokens equal those of plain decoding (greedy only).", _identical, rate=False),
    Column("gap", "Difference of the two largest logits where the first token differed from plain decoding.",
           _field(gap, "first_difference_gap"), rate=False))

# Only in the tables of a lossy run: elsewhere it is 0 in every row.
BOUND = Column("total variation", "total_variation_bound: the most by which the law of a token may differ from the "
               "target's, as total variation, mean over output tokens; times its length it bounds that of a text.",
               _field(gap, "total_variation_bound"))

# Only in the tables of a target with an encoder.
ENCODER = Column("encoder", "Share of all time that the target's encoder took, and milliseconds a request.",
                 lambda group: Cell(percent(group.get("encoder_share")), f"{short(group.get('encoder_ms'))} ms"),
                 rate=False)

def _windows(group: Group) -> Cell:
  found = group.get("windows")
  if not found:
    return Cell(DASH)
  tokens = ", ".join(short(size) for size in found["tokens"])
  return Cell(percent(found["beyond"]), f"{found['layers']} of {found['of_layers']} layers see {tokens} tokens")


# Only in the tables of a target some of whose layers see a window.
WINDOWS = Column("beyond windows", "Share of the output tokens that were written behind more tokens than a window "
                 "holds: for the others a window changes nothing.", _windows, rate=False)

COSTS = (
    Column("draft ms", "Drafting, milliseconds per step.", _field(short, "draft_ms")),
    Column("verify ms", "The target's pass, milliseconds per step.", _field(short, "verify_ms")),
    Column("commit ms", "Writing the accepted path into the cache, milliseconds per step.",
           _field(short, "commit_ms")),
    Column("other ms", "The rest of a step, milliseconds; below zero where the parts, measured apart, exceed it.",
           _field(short, "other_ms")),
    Column("step ms", "A step as it ran, milliseconds.", _field(short, "step_ms")),
    Column("plain step ms", "A step of plain decoding, milliseconds.", _field(short, "plain_step_ms")),
    Column("predicted", "The speedup that the cost model predicts from acceptance and step costs.",
           _field(times, "predicted_speedup")),
    Column("bandwidth", "Share of the device's memory bandwidth in use.",
           _field(percent, "utilization", "memory_bandwidth")),
    Column("arithmetic", "Share of the device's arithmetic peak in use.", _field(percent, "utilization", "arithmetic")),
    Column("weights", "Peak memory of the target's weights.", _field(size, "peak_memory_bytes", "weights")),
    Column("cache", "Peak memory of the cache.", _field(size, "peak_memory_bytes", "cache")),
    Column("without rings", "The same if layers with a window kept all tokens.",
           _field(size, "peak_memory_bytes", "cache_without_rings")),
    Column("draft", "Peak memory of the drafter.", _field(size, "peak_memory_bytes", "draft")))


def _distinct(row: Group) -> Cell:
  layers = [value for value in row["distinct_per_layer"] if value is not None]
  return Cell(short(row["distinct"]), f"[{short(min(layers))}, {short(max(layers))}]" if layers else "")


# Of a row of `summary.json`'s experts: one width of one method.
EXPERTS = (
    Column("width", "Nodes that a verify pass has room for.", _count("width"), rate=False),
    Column("passes", "Verify passes at that width.", _count("passes"), rate=False),
    Column("nodes", "Nodes of such a pass, all rows together, the mean; padding is a copy of the root and adds none.",
           _field(short, "nodes"), rate=False),
    Column("distinct", "Distinct experts that a pass goes through, mean over layers, with the least and the greatest "
           "layer: their weights are what a pass must read.", _distinct, rate=False),
    Column("at random", "Distinct experts if that many tokens chose at random, each for itself.",
           _field(short, "at_random"), rate=False),
    Column("imbalance", "Load of the busiest expert over the mean load, mean over layers, all widths together; 1 is "
           "even.", _field(short, "imbalance"), rate=False),
    Column("bytes / step", "Weights of experts that a verify pass reads, all widths together.",
           _field(size, "bytes_per_step"), rate=False),
    Column("bytes / token", "The same over output tokens.", _field(size, "bytes_per_token"), rate=False))


def experts(groups: Sequence[Group], methods: Sequence[str]) -> Table | None:
  """A line a method and width, over all categories (every category where the overall group is missing)."""
  groups = [group for group in groups if group.get("experts")]
  groups = [group for group in groups if group["category"] == ALL] or groups
  sections = []
  for category in dict.fromkeys(group["category"] for group in groups):
    rows = []
    for group in sorted(groups, key=lambda group: methods.index(group["method"])):
      if group["category"] == category:
        rows += [(group["method"], [column.cell(group["experts"] | row) for column in EXPERTS])
                 for row in group["experts"]["by_width"]]
    sections.append(Section("all categories" if category == ALL else category, rows))
  return Table(list(EXPERTS), sections) if any(section.rows for section in sections) else None


def expert_cost(groups: Sequence[Group]) -> str:
  """The fitted cost of a pass through experts, in words; "" where none was fitted."""
  cost = next((group["experts"]["cost"] for group in groups if group.get("experts") and group["experts"]["cost"]), None)
  if cost is None:
    return ""
  return (f"A pass over t tokens that goes through N distinct experts a layer took {short(cost['bias'])} ms + "
          f"{short(cost['dense'])} ms · G(t) + {short(cost['expert'])} ms · N + {short(cost['grouped'])} ms · G(tokens "
          f"an expert), with G(t) = {cost['scale']:g}^t up to {cost['ridge']:g} tokens and straight from there on: the "
          f"terms of MoESD, fitted to {len(cost['points'])} timed passes with a median error of "
          f"{percent(cost['error'])}.")


# Of a row of `summary.json`'s "by_language_pair" and "by_output_length".
BREAKDOWN = (
    Column("requests", "Requests of this pair or length, by the method's own outputs.", _count("requests")),
    Column("tokens / step", "Output tokens of a step.", _field(short, "tokens_per_step")),
    Column("accepted", "Share of the drafted tokens that were accepted.", _field(percent, "acceptance_rate")))


def breakdown(groups: Sequence[Group], methods: Sequence[str]) -> Table | None:
  """Language pairs and lengths of the output of a target with an encoder, over all categories."""
  groups = sorted((group for group in groups if group["category"] == ALL), key=lambda g: methods.index(g["method"]))
  sections = []
  for name, title in (("by_language_pair", "{}"), ("by_output_length", "outputs of {} tokens and more")):
    keys = {key for group in groups for key in group[name]}
    for key in sorted(keys, key=lambda key: (int(key), "") if key.isdecimal() else (0, key)):
      sections.append(Section(title.format(key), [
          (group["method"], [column.cell(group[name][key]) for column in BREAKDOWN])
          for group in groups if key in group[name]]))
  return Table(list(BREAKDOWN), sections) if sections else None


def build(groups: Sequence[Group], methods: Sequence[str], columns: Sequence[Column], *, rates: bool,
          keep_empty: bool = True) -> Table | None:
  """Lays the groups out by category and language, the overall rows first.

  Args:
    groups: the cells of one setting.
    methods: the order of the rows within a section.
    columns: the columns, in order.
    rates: False shows a dash in every column that means nothing with random weights.
    keep_empty: False leaves out the columns that hold nothing but dashes.

  Returns:
    The table; None where there is nothing to show.
  """
  titles = {}
  for group in groups:
    titles.setdefault((group["category"], group["language"]), []).append(group)
  sections = []
  for category, language in sorted(titles, key=lambda key: key[0] != ALL):
    title = category if language == ALL else f"{category} · {language}"
    members = sorted(titles[category, language], key=lambda group: methods.index(group["method"]))
    sections.append(Section("all categories" if title == ALL else title, [
        (group["method"], [column.cell(group) if rates or not column.rate else Cell(DASH) for column in columns])
        for group in members]))
  kept = [i for i in range(len(columns)) if keep_empty or any(
      row[i].text != DASH for section in sections for _, row in section.rows)]
  if not sections or not kept:
    return None
  return Table([columns[i] for i in kept], [
      Section(section.title, [(method, [row[i] for i in kept]) for method, row in section.rows])
      for section in sections])


@dataclasses.dataclass(frozen=True)
class Finding:
  """What one method gained: overall, and in the categories where it gained least and most."""
  method: str
  overall: Cell
  lowest: str
  highest: str


def findings(groups: Sequence[Group], methods: Sequence[str]) -> list[Finding]:
  """One line per drafting method; categories without a speedup are left out."""
  result = []
  for method in methods:
    own = [group for group in groups if group["method"] == method and group["speedup"] is not None]
    overall = next((speedup_cell(group) for group in own if group["category"] == ALL), Cell(DASH))
    ranked = sorted((group for group in own if group["category"] != ALL), key=lambda group: group["speedup"])
    ends = [f"{times(group['speedup'])} {group['category']}" for group in (ranked[:1] + ranked[-1:])] or [DASH, DASH]
    result.append(Finding(method, overall, *ends))
  return result


@dataclasses.dataclass(frozen=True)
class Best:
  """The method that was fastest in a category, and its speedup."""
  category: str
  method: str
  speedup: Cell


def best(groups: Sequence[Group], methods: Sequence[str]) -> list[Best]:
  """One line a category, all categories first: plain decoding where no method of `methods` is faster."""
  result = []
  for category in sorted(dict.fromkeys(group["category"] for group in groups), key=lambda name: name != ALL):
    own = [group for group in groups if group["category"] == category and group["method"] in methods
           and group["speedup"] is not None]
    if not own:
      continue
    fastest = max(own, key=lambda group: group["speedup"])
    name = "all categories" if category == ALL else category
    result.append(Best(name, fastest["method"], speedup_cell(fastest)) if fastest["speedup"] > 1
                  else Best(name, PLAIN, Cell(times(1.0))))
  return result


def prediction(groups: Sequence[Group]) -> str:
  """How far the cost model was from the measurement, in words; "" where it predicted nothing."""
  error = cost_model.prediction_error(groups)
  if error is None:
    return ""
  return (f"Predicted and measured speedup differ by {percent(error['median'])} in the median and "
          f"{percent(error['p90'])} at the 90th percentile, over {error['cells']} cells of a method and a category.")
