"""From the samples of `experiments.speed` to figures beside their bars."""
import statistics
import subprocess
import sys
import time

from experiments.harness import cli

_WIDTH_BARS = {1: 1.0, 4: 1.3, 8: 1.55, 16: 2.0}  # of the prototype's width-1 step


def figures(samples: dict, results: dict, prompts, *, prototype: bool) -> list[dict]:
  """Figures as {"figure", "value", "unit", "bar", "note"}; `bar` is ("<=" or ">=", number) or None."""
  median = {name: statistics.median(values) for name, values in samples.items()}
  spread = lambda name: f"{median[name]:.2f} ms ({min(samples[name]):.2f} to {max(samples[name]):.2f})"
  rows = []

  def add(figure, value, unit="x", bar=None, note=""):
    rows.append({"figure": figure, "value": value, "unit": unit, "bar": bar, "note": note})

  reference = "prototype step, width 1" if prototype else "step, width 1"
  for width, bar in _WIDTH_BARS.items():
    name = f"step, width {width}"
    add(f"{name}, of {reference}", median[name] / median[reference], bar=("<=", bar) if prototype else None,
        note=f"{spread(name)} / {spread(reference)}")
  step, model = median["step, width 1"], median["forward and head, width 1"]
  add("outside forward and head, of a width-1 step", 100 * (step - model) / step, "%", ("<=", 3.0),
      f"{step:.2f} - {model:.2f} ms")
  for name in prompts:
    if prototype:
      old = f"prototype plain, {name}"
      add(f"plain over prototype, {name}, end to end", median[old] / median[f"plain, {name}"], bar=(">=", 1.0),
          note=f"{spread(f'plain, {name}')} / {spread(old)} a token")
  rate = lambda method, name: statistics.median(
      (r.lengths[0] - r.timings.first_tokens[0]) / (r.timings.total - r.timings.first_token)
      for r in results[f"{method}, {name}"][1:])
  for name in prompts:
    bar = (">=", 0.97) if name == "chat" else None
    add(f"ngram over plain, {name}, end to end", median[f"plain, {name}"] / median[f"ngram, {name}"], bar=bar,
        note=f"{1e3 / median[f'ngram, {name}']:.1f} / {1e3 / median[f'plain, {name}']:.1f} tokens/s")
    add(f"ngram over plain, {name}, decode", rate("ngram", name) / rate("plain", name),
        bar=(">=", 1.8) if name == "summary" else None,
        note=f"{rate('ngram', name):.1f} / {rate('plain', name):.1f} tokens/s")
  second = max(results[f"{method}, {name}"][1].timings.first_token for method in ("plain", "ngram") for name in prompts)
  add("first token of a second request, slowest prompt", second, "s", ("<=", 0.5))
  return rows


def verification(samples: dict, bars: dict, memory: dict) -> list[dict]:
  """Figures of verification alone.

  Args:
    samples: milliseconds, by name; others than those of `bars` are left out.
    bars: greatest milliseconds allowed, or None, by name.
    memory: arrays [B, T, V] held beside the arguments, by name.
  """
  rows = []
  for name, bar in bars.items():
    rows.append({"figure": name, "value": statistics.median(samples[name]), "unit": "ms",
                 "bar": None if bar is None else ("<=", bar),
                 "note": f"{min(samples[name]):.2f} to {max(samples[name]):.2f}"})
  return rows + [{"figure": f"memory of {name}", "value": arrays, "unit": "arrays", "bar": None,
                  "note": "of the size of the logits, [B, T, V]"} for name, arrays in memory.items()]


def starts(target: str) -> list[dict]:
  """Two starts of `experiments.generate` in processes of their own; the second must find every program compiled."""
  programs = cli.programs_folder()
  count = lambda: len(list(programs.iterdir())) if programs.is_dir() else 0
  command = [sys.executable, "-m", "experiments.generate", f"--target={target}", "--prompt=Name three rivers.",
             "--max_new_tokens=16"]
  seconds, entries = [], []
  for _ in range(2):
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
      process.stdout.read(1)
      seconds.append(time.perf_counter() - begin)
      process.stdout.read()
    if process.returncode:
      raise ValueError(f"{' '.join(command)} ended with code {process.returncode}")
    entries.append(count())
  return [{"figure": "first process start, to the first text", "value": seconds[0], "unit": "s", "bar": None,
           "note": "programs may stand in the persistent cache already"},
          {"figure": "second process start, to the first text", "value": seconds[1], "unit": "s", "bar": ("<=", 8.0),
           "note": f"{entries[1] - entries[0]} programs compiled"}]


def table(rows: list[dict]) -> str:
  """Lines of figure, value, bar, whether it is met, and what the value was made of."""
  width = max(len(row["figure"]) for row in rows)
  values = [f"{row['value']:.2f} {row['unit']}" for row in rows]
  value_width = max(map(len, values))
  lines = []
  for row, value in zip(rows, values):
    bar, verdict = "", ""
    if row["bar"]:
      sign, number = row["bar"]
      met = row["value"] <= number if sign == "<=" else row["value"] >= number
      bar, verdict = f"{sign} {number:g}", "met" if met else "NOT met"
    lines.append(f"{row['figure']:<{width}}  {value:>{value_width}}  {bar:>8}  {verdict:<7}  {row['note']}".rstrip())
  return "\n".join(lines)
