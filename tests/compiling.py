"""Compilations at a quarter of their time, for tests of logic: in this process and in those that tests start."""
import contextlib
import functools
from unittest import mock

import jax
from jax._src import compiler

# In XLA's words a "fusion emitter" brings a loop to machine code by way of MLIR, which takes half of the time of a
# compilation on a CPU; without them it does so at once. And one piece a program: other tests keep the cores busy.
_WANTED = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@functools.cache
def options() -> dict:
  """XLA's options that make a compilation cheap, as far as this jaxlib knows them."""
  known = {}
  for name, value in _WANTED.items():
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      jax.jit(lambda x: x, compiler_options={name: value})(0)
      known[name] = value
  return known


@contextlib.contextmanager
def little_optimization():
  """Halves the time of a compilation by JAX's own setting, and halves it again by `options`, for which it has none."""
  before, real, more = jax.config.read("jax_disable_most_optimizations"), compiler.get_compile_options, options()

  def with_options(*args, **kwargs):
    made = real(*args, **kwargs)
    made.env_option_overrides = [*more.items(), *made.env_option_overrides]
    return made

  jax.config.update("jax_disable_most_optimizations", True)
  with mock.patch.object(compiler, "get_compile_options", with_options):
    yield
  jax.config.update("jax_disable_most_optimizations", before)


def environment(inherited: dict) -> dict:
  """What the environment of a process needs for the same."""
  flags = [f"--{name}={str(value).lower()}" for name, value in options().items()]
  return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join([inherited.get("XLA_FLAGS", ""), *flags])}
