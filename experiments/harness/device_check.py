"""The parts of a device check, one after another, each with a share of the time and an answer of its own.

A part that fails is recorded with its error and stops none of the others; what has been found is saved behind every
part, so that a run that is cut short loses one part at most. Compilations cannot be interrupted: a part looks at the
clock between two of them, and what does not fit is named as left out.
"""
from collections.abc import Callable
import dataclasses
import os
import time
import traceback

import jax
import jax.numpy as jnp

from experiments.harness import device_bounds
from experiments.harness import device_model
from experiments.harness import device_smoke
from experiments.harness import device_steps
from experiments.harness import environment
from specjax.proposers import synthetic

SCHEMA = 1
# By part, its share of the time that is left for it and all behind it. Left-over time goes to the next ones.
SHARES = {"environment": 1, "exactness": 20, "bandwidth": 5, "collectives": 8, "model": 10, "widths": 35, "speed": 30}
_ACCELERATOR = {"context": 700, "steps": 32, "repeats": 7, "bytes": 2**30}
_CPU = {"context": 128, "steps": 8, "repeats": 3, "bytes": 2**27}


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is checked: see the flags of `experiments.device_check`.

  Raises:
    ValueError: for an acceptance that is no law, or rows that are none.
  """
  size: str = "auto"
  dtype: str = "auto"
  acceptance: tuple[float, ...] = (0.8, 0.7, 0.6)
  draft_bytes: int = 0
  rows: int = 1
  seconds: float = 330.0

  def __post_init__(self):
    if self.size not in device_model.SIZES:
      raise ValueError(f"size={self.size}: allowed are {', '.join(device_model.SIZES)}")
    if self.rows < 1:
      raise ValueError(f"rows={self.rows}: it must be 1 or more")
    synthetic.Synthetic(acceptance=self.acceptance)

  def proposer(self) -> synthetic.Synthetic:
    """The synthetic drafter."""
    if not self.draft_bytes:
      return synthetic.Synthetic(acceptance=self.acceptance)
    return synthetic.with_cost(self.acceptance, self.draft_bytes)


class Clock:
  """The time of a part."""

  def __init__(self, seconds: float):
    self._end = time.monotonic() + seconds

  def passed(self) -> bool:
    """Whether it is up."""
    return time.monotonic() >= self._end


class Check:
  """One run. `found` is what is written: see `run`."""

  def __init__(self, settings: Settings):
    self._settings = settings
    self._target = None
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    self._backend, self._kind = device.platform, device.device_kind
    self._sizes = _CPU if on_cpu else _ACCELERATOR
    # bfloat16 is what accelerators multiply in; a CPU takes several times as long for it as for float32.
    kinds = {"auto": jnp.float32 if on_cpu else jnp.bfloat16, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
    self._dtype = jnp.dtype(kinds[settings.dtype])
    self._memory = memory(device)
    size = device_model.choose(settings.size, self._memory["limit"], device.platform, self._dtype)
    self._config = device_model.CONFIGS[size]
    self.found = {
        "schema": SCHEMA, "kind": "specjax device check", "synthetic": device_steps.LABEL,
        "settings": dataclasses.asdict(settings) | self._sizes | {"size": size, "dtype": self._dtype.name}, "parts": {}}

  def run(self, save: Callable[[dict], None], report: Callable[[str], None]) -> dict:
    """Runs all parts.

    Args:
      save: takes `found` behind every part. report: takes a line behind every part.

    Returns:
      `found`: "parts" has by name a part's figures, its "seconds" and its "status": "ok", "failed" (exactness alone),
      "skipped" with a "reason", or "error" with an "error".
    """
    end = time.monotonic() + self._settings.seconds
    names = list(SHARES)
    for place, name in enumerate(names):
      begin = time.monotonic()
      share = SHARES[name] / sum(SHARES[other] for other in names[place:])
      part = self.found["parts"][name] = self._run_part(name, Clock(max(end - begin, 0) * share))
      part["seconds"] = time.monotonic() - begin
      save(self.found)
      report(f"{name}: {part['status']}{_why(part)}, {part['seconds']:.1f} s")
    return self.found

  def _run_part(self, name, clock):
    try:
      return {"status": "ok"} | getattr(self, f"_{name}")(clock)
    except Exception as error:  # whatever a device, its driver or its compiler comes up with must not end the check
      return {"status": "error", "error": f"{type(error).__name__}: {error}"[:2000],
              "trace": traceback.format_exc(limit=-3)[-2000:]}

  def _environment(self, clock):
    del clock
    return environment.describe() | {
        "device_count": jax.device_count(), "process_count": jax.process_count(), "memory": self._memory,
        "devices_of_the_model": 1,
        "jax_variables": {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "LIBTPU_", "JAX_"))}}

  def _exactness(self, clock):
    del clock
    found = device_smoke.run()
    return found | ({} if found["exact"] else {"status": "failed"})

  def _bandwidth(self, clock):
    del clock
    return device_bounds.bandwidth(self._sizes["bytes"], self._kind)

  def _collectives(self, clock):
    return device_bounds.collectives(self._config.width, self._dtype, clock.passed)

  def _model(self, clock):
    del clock
    self._target = jax.block_until_ready(device_model.make(self._config, self._dtype))
    leaves = jax.tree.leaves(self._target)
    return {"synthetic": device_steps.LABEL, "size": self.found["settings"]["size"], "dtype": self._dtype.name,
            "parameters": sum(x.size for x in leaves), "weight_bytes": sum(x.nbytes for x in leaves),
            "config": dataclasses.asdict(self._config), "memory": memory(jax.local_devices()[0])}

  def _widths(self, clock):
    return device_steps.widths(self._made(), **self._how(clock))

  def _speed(self, clock):
    found = self.found["parts"]
    return device_steps.arms(self._made(), self._settings.proposer(), **self._how(clock), bandwidth=found["bandwidth"],
                             curve=found["widths"].get("curve", []))

  def _made(self):
    if self._target is None:
      raise RuntimeError("there is no model: see the part of that name")
    return self._target

  def _how(self, clock):
    return {"rows": self._settings.rows, "passed": clock.passed,
            **{name: self._sizes[name] for name in ("context", "steps", "repeats")}}


def memory(device) -> dict:
  """Bytes of a device's memory that this process may use, uses, and has used at most; None where it does not say."""
  stats = device.memory_stats() or {}
  return {"limit": stats.get("bytes_limit"), "in_use": stats.get("bytes_in_use"),
          "peak": stats.get("peak_bytes_in_use")}


def _why(part):
  return "".join(f" ({part[name].splitlines()[0][:150]})" for name in ("error", "reason") if name in part)
