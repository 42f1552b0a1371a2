"""Loading needs little more memory than the weights that it leaves: measured in a process of its own."""
import subprocess
import sys

import pytest

import checkpoint_files as files

# The peak of resident memory, mapped file pages included. ru_maxrss would start at the parent's size.
_SCRIPT = """
import sys
import jax, jax.numpy as jnp
from specjax.checkpoints import read_folder, read_gguf
def memory(key):
  with open("/proc/self/status") as status:
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))
path, warm, dtype = sys.argv[1:]
read = read_gguf if path.endswith(".gguf") else read_folder
read(warm, jnp.dtype(dtype))  # imports and the backend's own buffers are not loading
before = memory("VmRSS:")
config, weights = read(path, jnp.dtype(dtype))
jax.block_until_ready(weights)
kept = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
print(kept, memory("VmHWM:") - before)
"""


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("memory")
  # Two large tensors, so that reading a tensor whole would show.
  large = files.Model(tied=False, vocab=20000, width=768, layers=3, heads=12, kv_heads=6, mlp_width=2304)
  paths = {}
  for name, model in (("large", large), ("small", files.Model())):
    paths["gguf", name] = files.write_gguf(folder / f"{name}.gguf", model)
    paths["folder", name] = files.write_folder(folder / name, model)
  return paths


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind, dtype", [("gguf", "float32"), ("gguf", "bfloat16"), ("folder", "float32"),
                                         ("folder", "bfloat16")])
def test_peak_is_within_1_3_times_the_weights(model_files, kind, dtype):
  arguments = str(model_files[kind, "large"]), str(model_files[kind, "small"]), dtype
  done = subprocess.run([sys.executable, "-c", _SCRIPT, *arguments], capture_output=True, text=True, check=True)
  kept, peak = map(int, done.stdout.split())
  assert kept > 90e6
  assert peak <= 1.3 * kept, (peak / kept)
