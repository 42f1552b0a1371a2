"""Targets with a draft model that goes with them, by name: what --pair stands for."""
import dataclasses

from absl import flags


@dataclasses.dataclass(frozen=True)
class Pair:
  """Names of two models, as --target and --draft take them."""
  target: str
  draft: str


PAIRS = {
    "qwen2.5-coder": Pair("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
    # Drafters of another vocabulary: for shared_tokens and retokenised.
    "qwen2.5-coder-smollm2": Pair("qwen2.5-coder-1.5b", "smollm2-135m"),
    "qwen2.5-coder-0.5b-smollm2": Pair("qwen2.5-coder-0.5b", "smollm2-135m"),
}
PAIR = flags.DEFINE_enum("pair", None, list(PAIRS), "A target and its draft model: short for --target and --draft.")


def apply() -> None:
  """Sets --target and --draft to those of --pair.

  Raises:
    ValueError: for one of them given beside it.
  """
  if PAIR.value is None:
    return
  pair = PAIRS[PAIR.value]
  for name in ("target", "draft"):
    flag = flags.FLAGS[name]
    if not flag.using_default_value:
      raise ValueError(f"--pair={PAIR.value} stands for --{name}={getattr(pair, name)}, and --{name}={flag.value} was "
                       "given as well; leave one of the two out")
    flag.value = getattr(pair, name)
