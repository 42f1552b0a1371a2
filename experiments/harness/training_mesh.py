"""Training over several devices and over several batches a step: the flags, and what the loop takes of them."""
from absl import flags

from experiments.harness import sharded
from specjax.parallel import placing
from specjax.parallel import rules as rules_lib
from specjax.parallel import training_places

_ACCUMULATE = flags.DEFINE_integer("gradient_accumulation_steps", 1, "Batches whose gradients make an optimizer step.",
                                   lower_bound=1)


def accumulate() -> int:
  """Batches of a step."""
  return sharded.value(_ACCUMULATE)


def steps(given: int | None, epochs: float, epoch_batches: int) -> int:
  """Optimizer steps: `given`, or as many as so many passes over the data make."""
  return given or max(round(epochs * epoch_batches / accumulate()), 1)


def facts(known: dict) -> dict:
  """Facts of a run with those of this module; a mesh is none of them, as a run may go on on another one."""
  return known | {"gradient_accumulation_steps": accumulate()} if accumulate() > 1 else known


def places() -> training_places.Places | None:
  """Where weights and batches lie; None on one device.

  Raises:
    ValueError: as `sharded.check`, and for flags of drafters that are not trained.
  """
  sharded.check(drafting=False)
  return None if sharded.mesh() is None else training_places.Places(sharded.mesh(), sharded.rules(rules_lib.TRAINING))


def target(name: str, *, whole_vocabulary: bool = False):
  """A target whose forward pass is divided, and its tokenizer.

  Args:
    whole_vocabulary: its logits are compared with those of a model that is not padded as a divided one is.
  """
  return sharded.load(name, rules_lib.without(rules_lib.TENSOR, "vocab") if whole_vocabulary else rules_lib.TENSOR)


def beginning(target):
  """The target as first weights are taken from it: the rows of its matrices as they are stored."""
  return target if target.layout is None else placing.in_stored_order(target)
