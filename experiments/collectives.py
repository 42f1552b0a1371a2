"""What a step of a divided decoder sends: compiled bytes beside the closed form, and the time that it takes.

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.collectives --mesh=data:2,model:4
  python -m experiments.collectives --mesh=data:2,expert:2,model:2 --experts=8

The decoder has random weights: bytes and times are all that is looked at.
"""
import dataclasses
import json
import pathlib

from absl import flags

from experiments.harness import cli
from experiments.harness import collective_costs
from experiments.harness import environment
from experiments.harness import run_folder
from experiments.harness import sharded
from specjax.models import config as config_lib
from specjax.parallel import mesh as mesh_lib
from specjax.parallel import placing
from specjax.training import fresh

_WIDTH = flags.DEFINE_integer("width", 512, "Model width.", lower_bound=8)
_LAYERS = flags.DEFINE_integer("layers", 8, "Layers.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, "Query heads.", lower_bound=1)
_KV_HEADS = flags.DEFINE_integer("kv_heads", 2, "Key/value heads.", lower_bound=1)
_MLP = flags.DEFINE_integer("mlp_width", 1536, "Feed-forward width, of an expert as well.", lower_bound=1)
_EXPERTS = flags.DEFINE_integer("experts", 0, "Experts of every layer, two a token; 0 for a dense model.", lower_bound=0)
_VOCAB = flags.DEFINE_integer("vocab_size", 32768, "Vocabulary.", lower_bound=16)
_BATCH = flags.DEFINE_list("batch_size", ["1", "8", "32"], "Rows; several with commas.")
_NODES = flags.DEFINE_integer("nodes", 8, "Nodes of the pass whose bytes are counted.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 128, "Tokens of a row when steps are timed.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed steps of each batch.", lower_bound=1)
_OUTDIR = flags.DEFINE_string("outdir", None, "Folder for collectives.json; none by default.")


def main():
  if not sharded.MESH.value:
    raise ValueError("--mesh is missing: on one device nothing is sent; give axes and sizes, as in data:2,model:4")
  if "fsdp" in mesh_lib.parse(sharded.MESH.value):
    raise ValueError(f"--mesh={sharded.MESH.value}: a step of decoding has the axes data, model and expert")
  run_folder.check_outdir(_OUTDIR.value or ".")
  mesh = sharded.mesh()
  moe = None
  if _EXPERTS.value:
    moe = config_lib.MoE(experts=_EXPERTS.value, chosen=min(2, _EXPERTS.value), width=_MLP.value, renormalised=True)
  config = config_lib.DecoderConfig(
      vocab_size=_VOCAB.value, num_tokens=_VOCAB.value, width=_WIDTH.value, layers=_LAYERS.value, heads=_HEADS.value,
      kv_heads=_KV_HEADS.value, head_width=_WIDTH.value // _HEADS.value, mlp_width=_MLP.value, norm_eps=1e-5,
      rope_theta=1e4, max_context=4096, eos_ids=(), tied=False, moe=moe, family="mixtral" if moe else "llama")
  target = placing.shard(fresh.decoder(config, 0), mesh)
  batches = cli.numbers(_BATCH, int)
  sent = collective_costs.sent(target, max(batches), _NODES.value)
  times = [collective_costs.times(target, batch, _REPEATS.value, _LENGTH.value) for batch in batches]
  print(collective_costs.table_of_bytes(sent, max(batches), _NODES.value).text(), end="\n\n")
  print(collective_costs.table_of_times(times).text())
  if _OUTDIR.value:
    folder = pathlib.Path(_OUTDIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "collectives.json").write_text(json.dumps({
        "schema": 1, "mesh": sharded.MESH.value, "environment": environment.describe(), "notes": target.layout.notes,
        "bytes": [dataclasses.asdict(each) for each in sent], "times": [dataclasses.asdict(each) for each in times]},
        indent=1) + "\n")


if __name__ == "__main__":
  cli.run(main)
