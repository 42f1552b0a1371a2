"""All ablations. A new one: write a module with `ABLATIONS`, a tuple of `base.Ablation`, and add it to `_MODULES`."""
from collections.abc import Sequence

from experiments.ablations import adaptive
from experiments.ablations import base
from experiments.ablations import chains
from experiments.ablations import drafters
from experiments.ablations import lengths
from experiments.ablations import lossy
from experiments.ablations import real_drafts
from experiments.ablations import real_requests
from experiments.ablations import serving
from experiments.ablations import siblings
from experiments.ablations import toy_drafting
from experiments.ablations import toy_training
from experiments.ablations import trees

_MODULES = (lengths, adaptive, chains, siblings, trees, lossy, drafters, serving, toy_drafting, toy_training,
            real_drafts, real_requests)

# What ablations in papers ask, as far as we have read them; several ask more than one paper does.
QUESTIONS = dict(enumerate((
    "draft length", "predicted and measured speedup", "draft size", "temperature", "draft rule over the temperature",
    "block against token verification", "verifiers at an equal budget", "traversal over the temperature",
    "number of candidates", "tree size", "trees and chains over the batch", "batch size", "lockstep and ragged batches",
    "inputs of EAGLE", "losses and features of EAGLE-3", "acceptance behind self-fed features", "training data",
    "calibration of confidence", "number of Medusa heads", "dependence between heads", "parallel drafting",
    "conditioning of DFlash", "selector of DFlash-2", "losses and vocabularies", "distillation losses",
    "adaptive length", "lossy rules", "long context", "mixtures of experts", "languages and tasks",
    "hidden drafting", "drafter invariance", "realism of prompts"), start=1))

ALL: dict[str, base.Ablation] = {ablation.name: ablation for module in _MODULES for ablation in module.ABLATIONS}


def choose(names: Sequence[str]) -> list[base.Ablation]:
  """The ablations of names and of kinds ("sim", "toy", "all"), each once, in the order of the registry.

  Raises:
    ValueError: names none, or one that there is not.
  """
  groups = {"all": list(ALL), **{kind: [name for name, a in ALL.items() if a.kind == kind] for kind in base.KINDS}}
  unknown = [name for name in names if name not in groups and name not in ALL]
  if unknown or not names:
    raise ValueError(f"--run={','.join(names)}: {', '.join(map(repr, unknown)) or 'nothing'} is no ablation; allowed "
                     f"are {', '.join(groups)}, {', '.join(ALL)}; --list says what they are")
  wanted = {one for name in names for one in groups.get(name, [name])}
  return [ablation for name, ablation in ALL.items() if name in wanted]
