"""The kept speed benchmark: what a step costs by width, what stands around the model, what requests and starts take.

  python -m experiments.speed --prototype=PATH/decode_loop.py
  python -m experiments.speed --only=verify

All figures are medians or ratios of medians taken interleaved in one run, with the least and greatest sample beside
them. `--prototype` adds the single-file loop that is the floor for speed; else ratios are relative to our width 1.
Verification is timed apart from a model, in milliseconds; `--only=verify` times nothing else and loads no weights.
"""
import json
import pathlib

from absl import flags
from tqdm import tqdm

from experiments.harness import cli
from experiments.harness import run_folder
from experiments.harness import settings
from experiments.harness import speed
from experiments.harness import speed_report
from experiments.harness import verifier_speed
from specjax import checkpoints
from specjax.models import base as models
import specjax

_PROTOTYPE = flags.DEFINE_string("prototype", None, "Path of the prototype's decode_loop.py.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Samples of every figure.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 48, "Steps of one sample of a step's cost.", lower_bound=1)
_STARTS = flags.DEFINE_bool("starts", True, "Time two starts of a process as well.")
_ONLY = flags.DEFINE_enum("only", None, ["verify"], "Time one part alone; verify: the draws of the verifiers.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Writes speed.json there.")
_PROMPTS = pathlib.Path(__file__).parent / "workloads" / "prototype_prompts.json"


def main():
  settings.uses_only(settings.TARGET)
  run_folder.check_outdir(_OUTDIR.value or ".")
  speed.check_prototype(_PROTOTYPE.value)
  if _PROTOTYPE.value and _ONLY.value:
    raise ValueError(f"--prototype is a whole loop, and --only={_ONLY.value} leaves such out; give one of the two")
  timers, results, prompts, report = verifier_speed.timers(), {}, {}, []
  if _ONLY.value != "verify":
    target, tokenizer = specjax.load(settings.TARGET.value)
    models.decoder_only(target, "this measurement")
    listed = json.loads(_PROMPTS.read_text(encoding="utf-8"))
    prompts = {name: tokenizer.chat(entry["messages"]) for name, entry in listed.items()}
    timers = speed.model_timers(target, prompts, results, steps=_STEPS.value) | timers
    if _PROTOTYPE.value:
      old = speed.Prototype(_PROTOTYPE.value, str(checkpoints.resolve(settings.TARGET.value)))
      timers |= speed.prototype_timers(old, prompts)
  with tqdm(total=len(timers) * (_REPEATS.value + 1), desc="timing", leave=False) as bar:
    samples = speed.interleave(timers, _REPEATS.value, lambda: bar.update(1))
  if _ONLY.value != "verify":
    report += speed_report.figures(samples, results, prompts, prototype=bool(_PROTOTYPE.value))
  report += speed_report.verification(samples, verifier_speed.bars(), speed.verify_memory())
  if _ONLY.value != "verify":
    for method, proposer in speed.METHODS.items():
      seconds, size = speed.compile_cost(target, proposer, prompts["chat"], speed.NEW_TOKENS)
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
