"""What is tried, and in which order: the cheapest methods, draft models, learned heads."""
import dataclasses

from absl import flags

CHEAP = ("ngram", "suffix", "auto_lookup")
MODELS = ("draft_model",)
HEADS = ("eagle3", "eagle", "medusa", "hydra", "dflash", "dspark", "mtp", "peagle")


@dataclasses.dataclass(frozen=True)
class Arm:
  """A method with the values of its flags."""
  name: str
  method: str
  settings: dict = dataclasses.field(default_factory=dict)


def stages_of(names: list[str] | None, drafts: list[str], target_name: str, shipped) -> list[list[Arm]]:
  """The arms of each stage.

  Args:
    names: methods to keep; None: all that can be had. drafts: names of draft models.
    shipped: of (target's name, kind), whether a head comes with specjax for the target.

  Raises:
    ValueError: a method that is not known here, or a draft model without the method that uses it.
  """
  known = (*CHEAP, *MODELS, *HEADS)
  for name in names or ():
    if name not in known:
      raise ValueError(f"--methods: {name!r} is not tried by this program; it tries {', '.join(known)}")
  if names and "draft_model" in names and not drafts:
    raise ValueError("--methods=draft_model needs --drafts, the draft models to try")
  if drafts and names and "draft_model" not in names:
    raise ValueError(f"--drafts={','.join(drafts)} is for the method draft_model, and --methods={','.join(names)} does "
                     "not name it; leave one of the two out")
  wanted = lambda name: names is None or name in names
  has_head = lambda kind: (flags.FLAGS[f"{kind}_head"].value or shipped(target_name, kind)) and wanted(kind) or (
      names and kind in names)
  cheap = [Arm(name, name) for name in CHEAP if wanted(name)]
  models = [Arm(f"draft_model {draft}", "draft_model", {"draft": draft}) for draft in drafts]
  heads = [Arm(kind, kind, {f"{kind}_head": flags.FLAGS[f"{kind}_head"].value} if flags.FLAGS[f"{kind}_head"].value
               else {}) for kind in HEADS if has_head(kind)]
  return [arms for arms in (cheap, models, heads) if arms]
