"""What a device's memory and links allow: bandwidth measured and as published, and what an all-reduce takes.

A decode step of few tokens reads all weights and the cache once, so bytes over bandwidth bound its time from below.
"""
import functools
import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.theory import hardware

# What the kinds that JAX names begin with are called in `theory.hardware`, or, of those that it has not, bytes a second
# by the vendors' data sheets; the first that fits. A TPU v2 or v3 chip is two JAX devices, each with half of it.
_PUBLISHED = (
    ("NVIDIA H200", "h200"), ("NVIDIA H100 PCIe", 2.0e12), ("NVIDIA H100 NVL", 3.9e12), ("NVIDIA H100", "h100"),
    ("NVIDIA B200", "b200"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100 80GB PCIe", 1.935e12),
    ("NVIDIA A100", 1.555e12), ("NVIDIA L40S", 864e9), ("NVIDIA L40", 864e9), ("NVIDIA L4", 300e9),
    ("NVIDIA A10G", 600e9), ("NVIDIA A10", 600e9), ("Tesla V100", 900e9), ("Tesla T4", 320e9),
    ("NVIDIA GeForce RTX 3090", 936e9), ("NVIDIA GeForce RTX 4090", 1008e9),
    ("TPU v2", 350e9), ("TPU v3", 450e9), ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"),
    ("TPU v5", "v5p"),
    ("TPU v5p", "v5p"), ("TPU v6", "v6e"),
)
_TURNS, _REPEATS = 4, 5
_NODES = ((1, 1), (1, 8), (8, 8), (32, 8), (128, 8))  # rows and nodes of what is reduced


def published(kind: str) -> float | None:
  """Memory bandwidth of a device kind as its vendor has it, bytes a second; None if it is not in the table."""
  # Whole words: an A10 is no A100, and an "L4" no "L40".
  fits = lambda name: re.match(rf"{re.escape(name)}(?![0-9A-Za-z])", kind, re.IGNORECASE)
  found = next((value for name, value in _PUBLISHED if fits(name)), None)
  return hardware.TABLE[found].memory_bandwidth if isinstance(found, str) else found


def bandwidth(size: int, kind: str) -> dict:
  """Bytes a second, the best of several runs: "sum" of the columns of a matrix of `size` bytes, "multiply" with a
  vector, as decoding reads weights, and "copy", adding to it (read and written); "measured" is the greatest,
  "published" see there."""
  side = int((size // 4) ** 0.5) // 128 * 128
  matrix = jnp.zeros((side, side), jnp.float32)
  # Each turn needs the result of the one before, inside an absolute value: nothing is hoisted or taken together.
  sums = jax.jit(lambda x: jax.lax.fori_loop(0, _TURNS, lambda _, last: jnp.abs(x - last).sum(0), x[0]))
  multiply = jax.jit(lambda x: jax.lax.fori_loop(0, _TURNS, lambda _, last: x @ last, x[0]))
  copy = jax.jit(lambda x: jax.lax.fori_loop(0, _TURNS, lambda i, y: y + i.astype(y.dtype), x))
  best = lambda function: min(_samples(function, matrix, _REPEATS)) / _TURNS
  found = {"sum": matrix.nbytes / best(sums), "multiply": matrix.nbytes / best(multiply),
           "copy": 2 * matrix.nbytes / best(copy)}
  return found | {"measured": max(found.values()), "published": published(kind), "bytes": matrix.nbytes,
                  "unit": "bytes/s"}


def collectives(width: int, dtype, passed) -> dict:
  """What an all-reduce of f[B, T, E] over all devices takes, by size: as after attention and feed-forward of layers
  whose matrices are spread over devices.

  Args:
    width: E. dtype: of the activations.
    passed: () -> whether time is up; then further sizes are left out.
  """
  devices = jax.device_count()
  if devices == 1:
    return {"status": "skipped", "reason": "one device: there is nothing to reduce over"}
  mesh = jax.make_mesh((devices,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
  lines, left_out = [], []
  for rows, nodes in _NODES:
    name = {"rows": rows, "nodes": nodes, "bytes": rows * nodes * width * jnp.dtype(dtype).itemsize}
    if lines and passed():
      left_out.append(name)
      continue
    part = jnp.ones((devices, rows, nodes, width), dtype, device=sharding)
    loop = functools.partial(_reduce_loop, mesh=mesh)
    jax.block_until_ready(loop(part))
    times = [seconds * 1e6 / _REDUCED for seconds in _samples(loop, part, _REPEATS, warm=False)]
    lines.append(name | {"microseconds": statistics.median(times), "least": min(times), "greatest": max(times)})
  return {"devices": devices, "width": width, "dtype": jnp.dtype(dtype).name, "all_reduce": lines,
          "left_out": left_out}


_REDUCED = 32  # all-reduces in one dispatch, each of the result of the one before


@functools.partial(jax.jit, static_argnames="mesh")
def _reduce_loop(part, *, mesh):
  spec = jax.sharding.PartitionSpec("model")

  def reduce(own):
    share = jnp.asarray(1 / mesh.size, own.dtype)
    return jax.lax.fori_loop(0, _REDUCED, lambda _, x: jax.lax.psum(x * share, "model"), own)

  return jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(part)


def _samples(function, argument, repeats, warm=True):
  """Seconds of every one of so many runs."""
  if warm:
    jax.block_until_ready(function(argument))
  seconds = np.zeros(repeats)
  for i in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(function(argument))
    seconds[i] = time.perf_counter() - begin
  return seconds.tolist()
