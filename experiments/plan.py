"""A plan on paper: whether a model fits on a slice of accelerators, what a step costs there, how good drafts must be.

  python -m experiments.plan --model=llama-3.1-70b --hardware=v5p-32 --mesh=data:2,model:8 --batch_size=2,8,32
  python -m experiments.plan --model=qwen3-30b-a3b --hardware=8xh100 --mesh=model:2,expert:4 --tree_nodes=31

Nothing is run: every number is a closed form of configurations and published peaks (`specjax.theory.plan`).
"""
import pathlib

from absl import flags

from experiments.harness import cli
from experiments.harness import plan_report
from experiments.harness import run_folder
from specjax.parallel import mesh as mesh_lib
from specjax.theory import collectives
from specjax.theory import hardware
from specjax.theory import plan
from specjax.theory import public_models

_MODEL = flags.DEFINE_string("model", "llama-3.1-70b", f"The target: {', '.join(public_models.MODELS)}.")
_HARDWARE = flags.DEFINE_string("hardware", "v5p-32", f"One chip ({', '.join(hardware.TABLE)}), GPUs under one switch "
                                "(8xh100) or a slice of TPUs (v5p-32, which has 16 chips; v6e-8).")
_MESH = flags.DEFINE_string("mesh", "data:2,model:8", "Sizes of the axes data, model and expert: axis:size,axis:size.")
_BATCH = flags.DEFINE_list("batch_size", ["2", "8", "32", "128"], "Rows of all devices together; several with commas.")
_LENGTH = flags.DEFINE_integer("length", 4096, "Committed tokens of a row.", lower_bound=1)
_HEAD = flags.DEFINE_enum("head", "eagle3", ["eagle3", "draft", "lookup"], "What drafts: an EAGLE-3 head "
                          "of the target's width, the model --draft, or a lookup, which costs nothing.")
_DRAFT = flags.DEFINE_string("draft", None, "The draft model of --head=draft, by name.")
_TOKENS = flags.DEFINE_integer("draft_tokens", 7, "Drafted tokens of a chain; depth of a tree.", lower_bound=1)
_NODES = flags.DEFINE_integer("tree_nodes", None, "Drafted nodes of a tree; without it a chain is drafted.",
                              lower_bound=1)
_DIVIDED = flags.DEFINE_bool("draft_divided", False, "Divide the drafter over the axis model, or let every "
                              "device have it.")
_ATTENTION = flags.DEFINE_enum("attention", "heads", ["heads", "whole"], "Divide heads over the axis model, or "
                               "have all of them on every device.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights and cache; the "
                           "arithmetic is that of bfloat16.")
_MEMORY = flags.DEFINE_float("memory_efficiency", 1.0, "Share of the published memory bandwidth that is reached.")
_FLOPS = flags.DEFINE_float("flops_efficiency", 1.0, "Share of the published arithmetic peak that is reached.")
_ACCEPTANCE = flags.DEFINE_list("acceptance", ["0.6", "0.7", "0.8", "0.9"], "Acceptances of a position to "
                                "give speedups for.")
_OUTDIR = flags.DEFINE_string("outdir", None, "Writes plan.json and plan.md there.")


def main():
  run_folder.check_outdir(_OUTDIR.value or ".")
  model = public_models.find(_MODEL.value).config
  if (_HEAD.value == "draft") != (_DRAFT.value is not None):
    raise ValueError(f"--head={_HEAD.value}, --draft={_DRAFT.value}: --head=draft takes the name of a draft model, and "
                     "nothing else does")
  if _HEAD.value == "lookup" and _DIVIDED.value:
    raise ValueError("--draft_divided: a lookup has no weights to divide; leave one of the two out")
  drafter = {"eagle3": lambda: public_models.eagle3_head(model), "lookup": lambda: None,
             "draft": lambda: public_models.find(_DRAFT.value).config}[_HEAD.value]()
  axes = mesh_lib.parse(_MESH.value)
  if "fsdp" in axes:
    raise ValueError(f"--mesh={_MESH.value}: a plan is of decoding, whose axes are data, model and expert")
  deployment = plan.Deployment(
      model, hardware.find(_HARDWARE.value), collectives.Layout(collectives.Mesh(**axes), _ATTENTION.value),
      itemsize={"bfloat16": 2, "float32": 4}[_DTYPE.value], memory_efficiency=_MEMORY.value,
      flops_efficiency=_FLOPS.value)
  draft = plan.Draft(drafter, _TOKENS.value, _NODES.value or _TOKENS.value, _DIVIDED.value)
  report = plan_report.Report(_MODEL.value, deployment, draft, batches=cli.numbers(_BATCH, int),
                              length=_LENGTH.value, acceptances=cli.numbers(_ACCEPTANCE, float))
  print(report.text())
  if _OUTDIR.value:
    report.write(pathlib.Path(_OUTDIR.value))


if __name__ == "__main__":
  cli.run(main)
