"""The kept speed benchmark: what a step costs by width, what stands around the model, what requests and starts take.

  python -m experiments.speed --prototype=PATH/decode_loop.py

All figures are ratios of medians taken interleaved in one run, with the least and greatest sample beside them.
`--prototype` adds the single-file loop that is the floor for speed; without it ratios are relative to our width 1.
"""
import json
import pathlib

from absl import flags
from tqdm import tqdm

from experiments.harness import cli
from experiments.harness import settings
from experiments.harness import speed
from experiments.harness import speed_report
from specjax import checkpoints
from specjax import proposers
import specjax

_PROTOTYPE = flags.DEFINE_string("prototype", None, "Path of the prototype's decode_loop.py.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Samples of every figure.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 48, "Steps of one sample of a step's cost.", lower_bound=1)
_STARTS = flags.DEFINE_bool("starts", True, "Time two starts of a process as well.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Writes speed.json there.")
_PROMPTS = pathlib.Path(__file__).parent / "workloads" / "prototype_prompts.json"


def main():
  target, tokenizer = specjax.load(settings.TARGET.value)
  listed = json.loads(_PROMPTS.read_text(encoding="utf-8"))
  prompts = {name: tokenizer.chat(entry["messages"]) for name, entry in listed.items()}
  chat, plain, ngram, results = prompts["chat"], proposers.Plain(), proposers.NGram(), {}
  timers = {"step, width 1": speed.step_timer(target, plain, chat, _STEPS.value)}
  timers |= {f"step, width {w}": speed.step_timer(target, speed.Filler(w - 1), chat, _STEPS.value) for w in (4, 8, 16)}
  timers["forward and head, width 1"] = speed.forward_timer(target, plain, chat, _STEPS.value)
  for name, ids in prompts.items():
    for method, proposer in (("plain", plain), ("ngram", ngram)):
      timers[f"{method}, {name}"] = speed.request_timer(target, proposer, ids, 96, results, f"{method}, {name}")
  if _PROTOTYPE.value:
    old = speed.Prototype(_PROTOTYPE.value, str(checkpoints.resolve(settings.TARGET.value)))
    timers["prototype step, width 1"] = old.timer(chat, (1,), 96, whole=False)
    timers |= {f"prototype plain, {name}": old.timer(ids, (1,), 96, whole=True) for name, ids in prompts.items()}
  with tqdm(total=len(timers) * (_REPEATS.value + 1), desc="timing", leave=False) as bar:
    samples = speed.interleave(timers, _REPEATS.value, lambda: bar.update(1))
  report = speed_report.figures(samples, results, prompts, prototype=bool(_PROTOTYPE.value))
  for method, proposer in (("plain", plain), ("ngram", ngram)):
    seconds, size = speed.compile_cost(target, proposer, chat, 96)
    report.append({"figure": f"compile the {method} loop", "value": seconds, "unit": "s", "bar": None,
                   "note": f"compiled text of {size / 2**20:.1f} MiB"})
  if _STARTS.value:
    report += speed_report.starts(settings.TARGET.value)
  print(speed_report.table(report))
  if _OUTDIR.value:
    folder = pathlib.Path(_OUTDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.json").write_text(json.dumps({"figures": report, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
  cli.run(main)
