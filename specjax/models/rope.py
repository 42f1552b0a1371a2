"""Rotary frequencies, and the rules by which models stretch them to longer texts. All of it is constants of a model.

Sources: rotary positions arXiv 2104.09864; linear arXiv 2306.15595; YaRN arXiv 2309.00071 with the reading of its
released code; Llama 3.1's rule as its model card and Transformers' `modeling_rope_utils` have it.
"""
import dataclasses
import math

import numpy as np

KINDS = ("linear", "llama3", "yarn", "factors")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How frequencies are stretched.

  Attributes:
    kind: "linear" (all alike), "llama3" (long waves, short ones not, a ramp between), "yarn" (likewise, by the number of
      turns, and scores are sharpened), or "factors" (each frequency is divided by its own number, as GGUF files keep
      llama3's rule).
    factor: how many times longer.
    original_context: tokens that the model was first trained on. Of llama3 and yarn.
    low, high: llama3: waves that turn fewer than `low` times in the original context are stretched whole, more than
      `high` times not at all. yarn: the same with `beta_slow` and `beta_fast`.
    attention_factor: yarn: cosines and sines are multiplied by it; None is 0.1 ln(factor) + 1.
    truncate: yarn: whether the ends of the ramp are whole dimensions.
    factors: of "factors", one a frequency.
  """
  kind: str
  factor: float = 1.0
  original_context: int = 0
  low: float = 1.0
  high: float = 4.0
  attention_factor: float | None = None
  truncate: bool = True
  factors: tuple[float, ...] = ()

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"rope scaling {self.kind!r} is not supported; {', '.join(KINDS)} are")
    if self.kind in ("llama3", "yarn") and self.original_context < 1:
      raise ValueError(f"rope scaling {self.kind!r} needs the original context, a positive number of tokens")


def frequencies(theta: float, width: int, scaling: RopeScaling | None = None) -> tuple[np.ndarray, float]:
  """Turns of `width` / 2 pairs, in radians a token (f32[width / 2]), and the number that cosines and sines take."""
  plain = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
  if scaling is None:
    return plain.astype(np.float32), 1.0
  if scaling.kind == "linear":
    return (plain / scaling.factor).astype(np.float32), 1.0
  if scaling.kind == "factors":
    if len(scaling.factors) != width // 2:
      raise ValueError(f"{len(scaling.factors)} rope factors for {width // 2} frequencies")
    return (plain / np.asarray(scaling.factors)).astype(np.float32), 1.0
  if scaling.kind == "llama3":
    turns = scaling.original_context * plain / (2 * math.pi)
    kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)  # 1: as it is, 0: stretched
    return (plain * kept + plain / scaling.factor * (1 - kept)).astype(np.float32), 1.0
  dimension = lambda turned: width * math.log(scaling.original_context / (turned * 2 * math.pi)) / (2 * math.log(theta))
  first, last = dimension(scaling.high), dimension(scaling.low)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, width - 1)
  ramp = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
  attention = scaling.attention_factor
  if attention is None:
    attention = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
  return (plain * (1 - ramp) + plain / scaling.factor * ramp).astype(np.float32), attention
