"""Flags that have other values for a while: how one process builds and runs what several command lines would."""
import contextlib

from absl import flags


@contextlib.contextmanager
def applied(values: dict):
  """Within, the flags have these values, as if they had been given.

  Args:
    values: by name of flag.
  """
  before = {name: (flags.FLAGS[name].value, flags.FLAGS[name].using_default_value) for name in values}
  try:
    for name, value in values.items():
      flags.FLAGS[name].value, flags.FLAGS[name].using_default_value = value, False
    yield
  finally:
    for name, (value, default) in before.items():
      flags.FLAGS[name].value, flags.FLAGS[name].using_default_value = value, default
