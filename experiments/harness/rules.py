"""Verifiers by name: which rule a flag value means, the flags of its options, and whose drafts it can judge."""
import math
import sys

from absl import flags

from experiments.harness import methods
from specjax import verifiers
from specjax.verifiers import cascade

VERIFIER = flags.DEFINE_enum("verifier", "point", list(verifiers.BY_NAME), "The rule that judges drafts. Under "
                             "the lossy ones the text is not the target's.")
# By verifier, the flag of each of its fields.
_OPTIONS = {
    "lossy_typical": {
        "epsilon": flags.DEFINE_float(
            "typical_epsilon", verifiers.LossyTypical.epsilon, "--verifier=lossy_typical: greatest probability that a "
            "drafted token must exceed, in (0, 1]."),
        "alpha": flags.DEFINE_float(
            "typical_alpha", verifiers.LossyTypical.alpha, "--verifier=lossy_typical: factor of exp of minus the "
            "entropy, which may ask for less, in (0, 1].")},
    "lossy_lenient": {
        "lenience": flags.DEFINE_float(
            "lenience", verifiers.LossyLenient.lenience, "--verifier=lossy_lenient: a drafted token passes with its "
            "chance over this, in (0, 1]; 1 is plain rejection.")},
    "lossy_cascade": {
        "rule": flags.DEFINE_enum(
            "cascade_rule", verifiers.LossyCascade.rule, list(cascade.RULES), "--verifier=lossy_cascade: how drafter "
            "and target are mixed."),
        "alpha": flags.DEFINE_float(
            "cascade_alpha", verifiers.LossyCascade.alpha, "--verifier=lossy_cascade: how far the drafter may go, 0 or "
            "more.")},
}


def build() -> verifiers.Verifier:
  """The verifier that the flags ask for.

  Raises:
    ValueError: for an option of another verifier, or one out of its range; names both, or the flag.
  """
  name = VERIFIER.value
  for owner, options in _OPTIONS.items():
    for flag in options.values():
      if owner != name and not flags.FLAGS[flag.name].using_default_value:
        raise ValueError(f"--{flag.name}={flag.value} is an option of --verifier={owner}, and --verifier={name} has no "
                         f"use for it; leave it out or set --verifier={owner}")
  options = _OPTIONS.get(name, {})
  for flag in options.values():
    if isinstance(flag.value, float) and not math.isfinite(flag.value):
      raise ValueError(f"--{flag.name}={flag.value}: it must be a finite number")
  try:
    return verifiers.BY_NAME[name](**{field: flag.value for field, flag in options.items()})
  except ValueError as error:
    given = ", ".join(f"--{flag.name}={flag.value}" for flag in options.values())
    raise ValueError(f"--verifier={name} with {given}: {error}") from error


def name_of(verifier: verifiers.Verifier) -> str:
  """The name of a verifier in flags, records and reports; its class's, for one that has none."""
  kind = type(verifier)
  return next((name for name, known in verifiers.BY_NAME.items() if known is kind), kind.__name__)


def keeps_the_law(verifier: verifiers.Verifier, proposer) -> bool:
  """Whether text has the target's law: plain decoding's does whatever the verifier, which has nothing to judge."""
  return verifier.lossless or proposer.max_nodes == 1


def check(proposers: dict, verifier: verifiers.Verifier) -> None:
  """Refuses a method whose drafts the verifier cannot judge, before anything is compiled.

  Args:
    proposers: by method name, as of `methods.build_all`.

  Raises:
    ValueError: names the verifier, the method and the verifiers that do.
  """
  for name, proposer in proposers.items():
    trees, points = not proposer.chains, not proposer.samples
    if proposer.max_nodes == 1 or _judges(verifier, trees, points):  # plain decoding drafts nothing: any rule will do
      continue
    takes, makes = (("takes chains only", "trees") if verifier.chain_only and trees else
                    ("needs sampled drafts and the law that they were drawn from", "point drafts"))
    others = ", ".join(other for other, kind in verifiers.BY_NAME.items() if _judges(kind, trees, points))
    raise ValueError(f"--verifier={name_of(verifier)} {takes}, and the method {name} makes {makes}; leave {name} out, "
                     f"or set --verifier to one of {others}")


def judged(names: list[str], verifier: verifiers.Verifier) -> list[str]:
  """Of the methods those whose drafts, as flags say, the verifier can judge; says which it leaves out."""
  kept = []
  for name in names:
    try:
      check({name: methods.outline(name)}, verifier)
      kept.append(name)
    except ValueError as error:
      print(f"--methods=all leaves out {name}: {error}", file=sys.stderr)
  return kept


def _judges(verifier, trees, points):
  return not (verifier.chain_only and trees) and not (verifier.needs_q and points)
