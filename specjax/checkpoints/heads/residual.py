"""What files of Medusa's and Hydra's heads share: residual blocks that are one module, and the table of accuracy."""
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.heads import settings as settings_lib
from specjax.checkpoints.heads import tensors as tensors_lib


def read_tied(tensors: tensors_lib.Tensors, prefixes: list[str], width: int) -> list[jax.Array]:
  """Weight f[E, E] and bias f[E] of the module that stands under each of `prefixes`; E is `width`.

  Writers that store no tensor twice leave all but the first out.
  """
  found = []
  for kind, shape in {"weight": (width, width), "bias": (width,)}.items():
    name = f"{prefixes[0]}linear.{kind}"
    value = tensors.raw(name, shape)
    for prefix in prefixes[1:]:
      again = f"{prefix}linear.{kind}"
      if again in tensors.shapes and not np.array_equal(tensors.raw(again, shape), value):
        raise CheckpointError(f"{tensors.path}: tensor {again!r} differs from {name!r}; the blocks of a head are one "
                              "module, as Medusa makes them: the file is of another kind, or damaged")
    found.append(jnp.asarray(tensors.floats(name, shape)))
  return found


def write_tied(prefixes: list[str], linear: jax.Array, bias: jax.Array) -> dict[str, jax.Array]:
  """The tensors that `read_tied` reads, under every prefix."""
  return {f"{prefix}linear.{kind}": value for prefix in prefixes for kind, value in (("weight", linear), ("bias", bias))}


def rows(tensors: tensors_lib.Tensors, name: str, hint: str = "") -> int:
  """How many rows a tensor has; CheckpointError, with `hint`, if it is missing."""
  if name not in tensors.shapes:
    raise CheckpointError(f"{tensors.path}: tensor {name!r} is missing{hint}")
  return tensors.shapes[name][0]


def read_accuracy(settings: settings_lib.Settings, heads: int) -> tuple[tuple[float, ...], ...] | None:
  """The table of `models.medusa.MedusaConfig`, if the file has one."""
  table = settings.get("rank_accuracy")
  if table is None:
    return None
  try:
    made = np.asarray(table, np.float64)
    # Rounded numbers may add up to a little more.
    fits = made.ndim == 2 and len(made) == heads and made.min() >= 0 and made.sum(1).max() <= 1 + 1e-3
  except (ValueError, TypeError):
    fits = False
  if not fits:
    raise settings.error("rank_accuracy", f"{heads} lists of shares are required, one a head, each of a sum of 1 at most")
  return tuple(tuple(float(x) for x in row) for row in table)


def describe(config, shares_target_head: bool) -> dict[str, Any]:
  """Our own keys, the same for both: sizes, whose matrix is used, and the table."""
  return {"hidden_size": config.width, "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab,
          "shares_target_head": shares_target_head,
          **({} if config.accuracy is None else {"rank_accuracy": [list(row) for row in config.accuracy]})}
