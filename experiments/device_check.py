"""A machine's speculative decoding in minutes, without any checkpoint: is it exact, what does a step cost, what is won.

  python -m experiments.device_check --output=device.json
  python -m experiments.device_check --output=device.json --size=8b --acceptance=0.85,0.8,0.75,0.7

Environment, exactness of a tiny decoder, memory bandwidth, all-reduces where there are several devices, step time by
width, and plain against speculative tokens/s beside the bound of the bandwidth. The large model has random weights,
made on the device, and acceptance is SYNTHETIC: a law that is given and not measured. Writes one JSON file behind every
part and prints a table. A part that fails is recorded and stops no other. Exit code 1 if exactness was not shown.
"""
import json
import pathlib
import sys

from absl import flags

from experiments.harness import cli
from experiments.harness import device_check
from experiments.harness import device_model
from experiments.harness import device_table
from experiments.harness import run_folder

_OUTPUT = flags.DEFINE_string("output", None, "The JSON file that is written.", required=True)
_SIZE = flags.DEFINE_enum("size", "auto", list(device_model.SIZES), "Shapes of the random model; auto: the greatest of "
                          "1b, 3b and 8b that fits into the device's memory, on a CPU tiny.")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "bfloat16", "float32"], "Type of its weights; auto: bfloat16, on "
                           "a CPU float32.")
_ACCEPTANCE = flags.DEFINE_list("acceptance", ["0.8", "0.7", "0.6"], "Synthetic probability that each drafted token is "
                                "accepted, given those before it; as many tokens are drafted.")
_DRAFT_BYTES = flags.DEFINE_integer("draft_bytes", 0, "Bytes that drafting a token reads, a drafter's weights; 0: "
                                    "drafts cost nothing.", lower_bound=0)
_ROWS = flags.DEFINE_integer("rows", 1, "Batch rows.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 330, "Time for all parts. A compilation that has begun is not interrupted.",
                              lower_bound=1)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an output file that is there.")


def main():
  path = pathlib.Path(_OUTPUT.value)
  run_folder.check_outdir(str(path.parent))
  if path.is_dir() or path.exists() and not _OVERWRITE.value:
    raise ValueError(f"--output={path} is there already; name another file" + (
        "" if path.is_dir() else ", or add --overwrite to replace it"))
  settings = device_check.Settings(size=_SIZE.value, dtype=_DTYPE.value, acceptance=_law(), rows=_ROWS.value,
                                   draft_bytes=_DRAFT_BYTES.value, seconds=_SECONDS.value)
  settings.proposer()

  def save(found):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)

  found = device_check.Check(settings).run(save, lambda line: print(line, file=sys.stderr, flush=True))
  print(device_table.render(found))
  sys.exit(found["parts"]["exactness"]["status"] != "ok")


def _law():
  try:
    return tuple(float(x) for x in _ACCEPTANCE.value)
  except ValueError as error:
    raise ValueError(f"--acceptance={','.join(_ACCEPTANCE.value)}: it must be probabilities separated by commas, "
                     "such as 0.8,0.7,0.6") from error


if __name__ == "__main__":
  cli.run(main)
