"""What several ablations share: exact acceptance through the library's verifiers, tables to enumerate, and speedups."""
from collections.abc import Sequence

import numpy as np

from specjax import sampling
from specjax.theory import closed_forms
from specjax.theory import drafts
from specjax.theory import oracle
from specjax.theory import speedup as speedup_lib
from specjax.theory import tables as tables_lib

BOUND = 1e-9  # greatest error of a lossless rule's text law in float64


def at_temperature(temperature: float) -> tables_lib.Setting:
  """A request that asks for a temperature and nothing else."""
  return tables_lib.Setting(sampling.SamplingParams(temperature=temperature))


def judge(verifier, tables: tables_lib.Tables, draft,
          setting: tables_lib.Setting = tables_lib.Setting()) -> oracle.Result:
  """The exact law of the text that a verifier makes of a draft.

  Raises:
    ValueError: a rule that calls itself lossless and is not; an ablation must not report on such a one.
  """
  found = oracle.text_law(verifier, tables, draft, setting)
  if verifier.lossless and found.max_error > BOUND:
    raise ValueError(f"{verifier} says that it is lossless, and its text law is off by {found.max_error:.1e}")
  return found


def accepted(verifier, tables: tables_lib.Tables, draft, setting: tables_lib.Setting = tables_lib.Setting()) -> float:
  """Drafted tokens that a step accepts in the mean, exactly; arguments and errors as of `judge`."""
  return judge(verifier, tables, draft, setting).expected_accepted


def chain(gamma: int) -> tuple[int, ...]:
  """The parents of a chain of `gamma` drafted tokens."""
  return (0, *range(gamma))


def several(seeds: Sequence[int], vocabulary: int, depth: int, sharpness: float = 2.0,
            agreement: float = 0.8) -> list[tables_lib.Tables]:
  """Context-dependent random tables, one a seed."""
  return [tables_lib.random_tables(seed, vocabulary, depth, sharpness=sharpness, agreement=agreement)
          for seed in seeds]


def noisy_logits(seed: int, count: int, vocabulary: int = 64, sharpness: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
  """Logits of a target, normal with that standard deviation, and of a draft that adds standard normal noise to them:
  f64[count, V] each."""
  rng = np.random.default_rng(seed)
  target = sharpness * rng.normal(size=(count, vocabulary))
  return target, target + rng.normal(size=target.shape)


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
  """The law that the processor pipeline makes of logits f64[R, V] at a temperature."""
  return tables_lib.conditionals((np.asarray(logits),), at_temperature(temperature))[0]


def with_acceptance(alpha: float, depth: int) -> tables_lib.Tables:
  """Context-free tables of two tokens whose laws overlap in `alpha`, of (.02, 1)."""
  return tables_lib.context_free((.98, .02), (alpha - .02, 1.02 - alpha), depth)


def iid(gamma: int) -> drafts.Draft:
  """A chain of `gamma` tokens drawn from the draft's law."""
  return drafts.named("iid", chain(gamma))


def tokens(alpha: float, gamma: int) -> float:
  """Tokens of a step, the new one included, if each drafted one is accepted with `alpha` (arXiv 2211.17192, (1))."""
  return 1 + closed_forms.expected_accepted(alpha, gamma)


def speedup(alpha: float, gamma: int, cost: float) -> float:
  """Over plain decoding, a drafted token costing `cost` target steps (arXiv 2211.17192, theorem 3.8)."""
  return speedup_lib.closed_speedup(alpha, gamma, cost)


def best_length(alpha: float, cost: float) -> int:
  """The draft length of the greatest `speedup`."""
  return speedup_lib.closed_best_length(alpha, cost)[0]
