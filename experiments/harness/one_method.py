"""What a program of one method begins with: its target, and a proposer that goes with the verifier of the flags."""
from typing import Any, NamedTuple

from experiments.harness import methods
from experiments.harness import rules
from experiments.harness import settings
from experiments.harness import sharded


class Built(NamedTuple):
  """A target with its tokenizer, and what drafts for it and judges the drafts."""
  target: Any
  tokenizer: Any
  proposer: Any
  params: Any
  verifier: Any


def build(name: str, program: str) -> Built:
  """Loads the target of the flags and builds the method; what cannot be is refused before that, where it is known.

  Args:
    name: of the method. program: whose flags these are, for messages.

  Raises:
    ValueError: `all`, a method that there is not, or one whose drafts the verifier cannot judge.
  """
  if name == methods.ALL:
    raise ValueError(f"--method={name}: {program} has one method, of {', '.join(methods.NAMES)}")
  methods.check([name])
  params, verifier = settings.sampling_params(seeds=[settings.SEED.value]), rules.build()
  rules.check({name: methods.outline(name)}, verifier)
  target, tokenizer = sharded.load(settings.TARGET.value)
  built = methods.build_all([name], methods.Given(target, tokenizer, settings.TARGET.value))
  rules.check(built, verifier)
  return Built(target, tokenizer, built[name], params, verifier)
