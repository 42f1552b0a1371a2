"""What a run ran on: packages, devices, flags, revision. Written to `environment.json`."""
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import jax

from specjax.parallel import processes

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "chex", "optax", "orbax-checkpoint", "gguf", "safetensors", "tokenizers",
             "torch", "transformers")


def describe() -> dict:
  """A JSON-ready description of this process's environment."""
  return {
      "python": platform.python_version(),
      "system": platform.platform(),
      "packages": {name: _version(name) for name in _PACKAGES if _version(name)},
      "backend": jax.default_backend(),
      "devices": [device.device_kind for device in jax.devices()],
      "processes": processes.count(),
      "cpu_model": _cpu_model(),
      "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
      "xla_flags": os.environ.get("XLA_FLAGS", ""),
      "revision": _revision(),
  }


def _version(name):
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _cpu_model():
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()


def _revision():
  folder = pathlib.Path(__file__).parent
  git = lambda *args: subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout
  try:
    return git("rev-parse", "HEAD").strip() + (" (changed)" if git("status", "--porcelain").strip() else "")
  except (OSError, subprocess.CalledProcessError):
    return None
