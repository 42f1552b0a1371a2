"""Weights loaded into shardings equal those loaded whole, and no process reads or keeps more than its shards."""
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint_files as files
import many_devices
import specjax
from specjax import checkpoints
from specjax.checkpoints import gguf as gguf_lib
from specjax.checkpoints import safetensors
from specjax.checkpoints.gguf_header import read_header

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
# Fused rows, matrices stored [in, out], heads one behind the other, norms less 1, experts; encoders and recurrences.
FOLDERS = ["families/llama3", "families/gpt2", "families/gpt_neox", "families/gemma2", "families/phi3",
           "families/mixtral", "families/qwen2_moe", "encoder_decoder/t5", "encoder_decoder/bart",
           "encoder_decoder/marian", "encoder_decoder/whisper", "recurrent/mamba2_groups"]


def mesh():
  return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def divided(mesh, shape, *wanted):
  """The sharding by mesh axes, without those along which the shape cannot be divided."""
  spec = []
  for size, axes in zip(shape, wanted):
    names = [axes] if isinstance(axes, str) else axes or ()
    spec.append(axes if size % np.prod([mesh.shape[name] for name in names]) == 0 else None)
  return NamedSharding(mesh, P(*spec))


def layouts(mesh):
  """Name -> a way of placing all fields."""
  def mixed(layer, field, shape):
    if "norm" in field:
      return None if layer == 0 else NamedSharding(mesh, P())
    wanted = {"qkv": ("b",), "attention_out": (None, "b"), "gate_up": (("a", "b"),), "experts_gate_up": ("a", "b"),
              "experts_down": ("a", None, "b"), "cross_key_value": ("b", "a"), "conv": ("a", "b")}
    return divided(mesh, shape, *wanted.get(field, (None, ("a", "b"))))

  return {
      "rows": lambda layer, field, shape: divided(mesh, shape, ("a", "b")),
      "columns": lambda layer, field, shape: divided(mesh, shape, None, ("b", "a")),
      "both": lambda layer, field, shape: divided(mesh, shape, "b", "a"),
      "shared": lambda layer, field, shape: divided(mesh, shape, "a"),
      "replicated": lambda layer, field, shape: NamedSharding(mesh, P()), "mixed": mixed}


def assert_same(whole, sharded, asked):
  assert jax.tree.structure(whole) == jax.tree.structure(sharded)
  for (path, wanted), found in zip(jax.tree.leaves_with_path(whole), jax.tree.leaves(sharded)):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, path
    for shard in found.addressable_shards:  # each of them: the array as a whole reads one of those that are equal
      np.testing.assert_array_equal(shard.data, np.asarray(wanted)[shard.index], err_msg=str(path))
  shardings = [leaf.sharding for leaf in jax.tree.leaves(sharded)]
  assert sorted(map(str, filter(None, asked))) == sorted(str(s) for s in shardings if isinstance(s, NamedSharding))


def check_every_layout(read):
  """Weights by `read(place)` are those of `read(None)`; most matrices are divided."""
  whole = read(None)
  for layout, place in layouts(mesh()).items():
    asked = []
    def ask(*field):
      asked.append(place(*field))
      return asked[-1]
    assert_same(whole, read(ask), asked)
    several = sum(not sharding.is_fully_replicated for sharding in asked if sharding)
    assert several == 0 if layout == "replicated" else several > len(asked) / 5, (layout, several, len(asked))


@many_devices.on(8)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_in_every_layout(name):
  check_every_layout(lambda place: specjax.load(str(FIXTURES / name), place=place)[0].weights)


@many_devices.on(8)
@pytest.mark.parametrize("kind, dtype", [("F32", "float32"), ("Q8_0", "bfloat16")])
def test_a_gguf_file_in_every_layout(tmp_path, kind, dtype):
  model = files.Model(heads=6, kv_heads=2, head_width=32, vocab=48, mlp_width=128)  # shards cut through rotary pairs
  path = files.write_gguf(tmp_path / "m.gguf", model, kind=kind)
  check_every_layout(lambda place: checkpoints.read_gguf(path, jnp.dtype(dtype), place)[1])


@many_devices.on(8)
def test_layers_and_fields_are_called_as_the_weights_have_them():
  seen = {}
  def place(layer, field, shape):
    seen[layer, field] = shape
  target, _ = specjax.load(str(FIXTURES / "encoder_decoder" / "bart"), place=place)
  weights = target.weights
  assert seen[None, "positions"] == weights.positions.shape
  assert seen[None, "logits_bias"] == weights.logits_bias.shape
  assert seen[("encoder", 1), "qkv"] == weights.encoder[1].qkv.shape
  assert seen[("decoder", 1), "cross_key_value"] == weights.cross[1].key_value.shape
  assert len(seen) == len(jax.tree.leaves(weights))


@many_devices.on(8)
def test_a_shard_that_devices_share_is_read_once(tmp_path, monkeypatch):
  read = []
  class Counting(safetensors.FolderSource):
    def rows(self, *args):
      found = super().rows(*args)
      read.append(found.nbytes)
      return found
  monkeypatch.setattr(safetensors, "FolderSource", Counting)
  model = files.Model()
  folder = files.write_folder(tmp_path, model)
  stored = sum(value.nbytes for value in model.tensors.values())
  for layout, place in layouts(mesh()).items():
    read.clear()
    checkpoints.read_folder(folder, place=place)
    assert sum(read) == stored, layout


@many_devices.on(8)
def test_shards_in_shared_memory_may_be_donated(tmp_path):
  """On CPU equal shards are one buffer, which no device may write to."""
  place = lambda layer, field, shape: NamedSharding(mesh(), P())
  _, weights = checkpoints.read_folder(files.write_folder(tmp_path, files.Model()), place=place)
  before = np.array(weights.embedding)
  after = jax.jit(lambda x: x + 1, donate_argnums=0)(weights.embedding)
  for shard in after.addressable_shards:
    np.testing.assert_array_equal(shard.data, before + 1)


@many_devices.on(8)
@pytest.mark.parametrize("given, says", [
    (lambda: NamedSharding(mesh(), P(("a", "b"))), r"field 'embedding' of the model, of shape \(42, 256\), cannot be"),
    (lambda: P("a"), r"field 'embedding' of the model: place\(\) gave .*Sharding or None is expected")])
def test_what_cannot_be_is_refused(tmp_path, given, says):
  folder = files.write_folder(tmp_path, files.Model(vocab=42))
  with pytest.raises(checkpoints.CheckpointError, match=says):
    checkpoints.read_folder(folder, place=lambda layer, field, shape: given() if field == "embedding" else None)


@pytest.mark.parametrize("kind, block, block_bytes", [("F32", 1, 4), ("BF16", 1, 2), ("Q8_0", 32, 34)])
def test_parts_of_rows_of_a_gguf_file(tmp_path, monkeypatch, kind, block, block_bytes):
  draw = np.random.default_rng(1).standard_normal((4, 6, 64), np.float32)
  path = files.write_gguf(tmp_path / "m.gguf", files.Model(), kind=kind, extra=[("experts", draw)])
  read, pread = [], os.pread
  def counting(*args):
    read.append(args[1])
    return pread(*args)
  monkeypatch.setattr(os, "pread", counting)
  with gguf_lib.GGUFSource(read_header(path)) as source:
    name = "blk.1.ffn_up.weight"
    whole = source.rows(name, 0, 512)
    for first, last in ((0, 64), (64, 128), (5, 6), (31, 97), (250, 256)):
      read.clear()
      np.testing.assert_array_equal(source.rows(name, 7, 12, (slice(first, last),)), whole[7:12, first:last])
      assert sum(read) == 5 * (-(-last // block) - first // block) * block_bytes
    for within in ((slice(2, 5),), (slice(2, 5), slice(0, 64)), (slice(1, 3), slice(9, 50)),
                   (slice(0, 6), slice(3, 4))):
      read.clear()
      expected = draw[1:3, *within]
      np.testing.assert_array_equal(source.rows("experts", 1, 3, within), expected)
      assert sum(read) == expected.nbytes


_PROCESS = """
import json, os, sys
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from specjax import checkpoints
address, index, count, *paths = sys.argv[1:]
warm, paths = paths[:2], paths[2:]
jax.distributed.initialize(address, int(count), int(index))
mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
place = lambda layer, field, shape: NamedSharding(
    mesh, P() if len(shape) < 2 else P(None, "model") if field in ("down", "attention_out") else P("model"))

def memory(key):
  with open("/proc/self/status") as status:
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

read, pread = [0], os.pread
def counting(*args):
  found = pread(*args)
  read[0] += len(found)
  return found
os.pread = counting

def load(path, place=None):
  reader = checkpoints.read_gguf if path.endswith(".gguf") else checkpoints.read_folder
  return jax.block_until_ready(reader(path, jnp.float32, place)[1])

for path in warm:  # imports, threads and what the runtime takes are not loading
  load(path, place)
loaded = []
for path in paths:
  with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the peak begins anew
  before, read[0] = memory("VmRSS:"), 0
  loaded.append(load(path, place))
  print(json.dumps({"peak": memory("VmHWM:") - before, "read": read[0], "kept": sum(
      shard.data.nbytes for leaf in jax.tree.leaves(loaded[-1]) for shard in leaf.addressable_shards)}), flush=True)
whole = load(paths[0])
assert sum(leaf.nbytes for leaf in jax.tree.leaves(whole)) > 200e6
for weights in loaded:  # both files hold the same
  for leaf, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(whole), strict=True):
    for shard in leaf.addressable_shards:
      np.testing.assert_array_equal(shard.data, np.asarray(wanted)[shard.index])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_reads_and_keeps_its_own_shards_only(tmp_path):
  """Two real processes: each is measured while it loads a half of a folder, and of a GGUF file."""
  large = files.Model(tied=False, vocab=20000, width=768, layers=3, heads=12, kv_heads=4, mlp_width=2304)
  paths = [write(tmp_path / (name + ending), model) for name, model in (("warm", files.Model()), ("large", large))
           for ending, write in (("", files.write_folder), (".gguf", files.write_gguf))]
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  command = lambda i: [sys.executable, "-c", _PROCESS, address, str(i), "2", *map(str, paths)]
  running = [subprocess.Popen(command(i), env=many_devices.environment(1), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) for i in range(2)]
  done = [process.communicate() for process in running]
  assert not any(process.returncode for process in running), "\n".join(errors for _, errors in done)
  measured = [json.loads(line) for lines, _ in done for line in lines.splitlines()]
  print(measured)
  assert len(measured) == 2 * 2
  for found in measured:
    assert 200e6 / 2 < found["kept"] == found["read"] < 206e6 / 2, found
    assert found["peak"] <= 1.1 * found["kept"], found
