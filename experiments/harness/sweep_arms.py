"""The arms of a sweep: each method under each value of the settings of methods, and what draft models are cut to.

The flags here are settings of draft models that only a sweep has: how many of their layers they keep, how long a text
they read, and how much of the target's chat template they are given.
"""
import dataclasses
import itertools

from absl import flags
import jax
import numpy as np

from experiments.harness import draft_view
from experiments.harness import flag_values
from experiments.harness import methods
from experiments.harness import rules
from experiments.harness import settings as settings_lib
from experiments.harness import sharded
from experiments.harness import sweep_setting
from specjax import proposers

LAYERS = flags.DEFINE_integer("draft_layers", None, "Layers that a draft model keeps; all by default.", lower_bound=1)
_CUT = flags.DEFINE_enum("draft_cut", "spread", ["spread", "first"], "Which layers --draft_layers keeps: from the first "
                         "to the last, evenly, or the first ones.")
_CONTEXT = flags.DEFINE_integer("draft_context", None, "Tokens that a draft model's context holds, where it drafts no "
                                "more; its own by default.", lower_bound=2)
TEMPLATE = flags.DEFINE_bool("chat_template", True, "Draft models are given the target's chat template; else the "
                             "message and the answer alone.")
_SYSTEM = flags.DEFINE_bool("system_prompt", True, "Draft models are given the template's system prompt.")
_WITH_MODEL = ("draft_model", "draft_tree", "dynamic_tree")
_KINDS = (proposers.DraftModel, proposers.DraftTree, proposers.DynamicTree)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A method under values of settings of methods; "plain" has none."""
  method: str
  values: dict

  @property
  def name(self) -> str:
    """As records and summaries have it."""
    return f"{self.method}, {sweep_setting.label(self.values)}" if self.values else self.method


def combinations(varied) -> list[dict]:
  """Every combination of values, as {name: value}."""
  return [dict(zip([setting.name for setting in varied], values))
          for values in itertools.product(*(setting.values for setting in varied))]


def check(names: list[str], varied) -> None:
  """Refuses, before anything is loaded, methods and settings that do not go together under one of the values.

  Args:
    names: of --methods. varied: of `sweep_setting.parse`.

  Raises:
    ValueError: as `methods.check`, `rules.check` and `settings.sampling_params`, for each of the values; or for a
      setting that none of the methods reads.
  """
  if not names or "plain" in names or methods.ALL in names:
    raise ValueError(f"--methods={','.join(names)}: name the methods to sweep one by one; plain runs beside them "
                     "anyway")
  used = [LAYERS, _CONTEXT, TEMPLATE, _SYSTEM]
  given = [flag.name for flag in used if not flags.FLAGS[flag.name].using_default_value]
  for name in given + [setting.name for setting in varied if setting.name in sweep_setting.DRAFT]:
    wrong = [method for method in names if method not in _WITH_MODEL]
    if wrong:
      raise ValueError(f"--{'' if name in given else 'vary='}{name}: it is of draft models, and the method {wrong[0]} "
                       f"has none; those that have are {', '.join(_WITH_MODEL)}")
  if not flags.FLAGS[_CUT.name].using_default_value and LAYERS.name not in given + [s.name for s in varied]:
    raise ValueError(f"--draft_cut={_CUT.value} says which layers --draft_layers keeps; add that, or leave it out")
  for values in combinations(varied):
    with flag_values.applied(values):
      try:
        methods.check(names)
        settings_lib.sampling_params()
        rules.check({name: methods.outline(name) for name in names}, rules.build())
      except ValueError as error:
        raise ValueError(f"--vary, at {sweep_setting.label(values)}: {error}") from error


def build(names: list[str], varied, given: methods.Given) -> dict[str, tuple]:
  """(arm, proposer) by the name of the arm: plain decoding, and every method under every combination of the settings of
  methods.

  Raises:
    ValueError: as `methods.build_all`; or a setting changes nothing of a method.
  """
  of_methods = [setting for setting in varied if not setting.of_request]
  found = [(Arm("plain", {}), proposers.Plain())]
  for values in combinations(of_methods):
    with flag_values.applied(values):
      try:
        built = methods.build_all(names, given)
        found += [(Arm(name, values), sharded.drafter(_changed(proposer, given), given.target))
                  for name, proposer in built.items()]
      except ValueError as error:
        raise ValueError(f"--vary, at {sweep_setting.label(values)}: {error}") from error
  for (one, proposer), (other, another) in itertools.combinations(found, 2):
    if one.method == other.method and _same(proposer, another):
      raise ValueError(f"--vary: {one.name} and {other.name} are the same; the method {one.method} does not read what "
                       "is varied, or these values mean the same to it. Leave the method or a value out")
  return {arm.name: (arm, proposer) for arm, proposer in found}


def _changed(proposer, given):
  """A proposer with the draft model that the flags of this module ask for."""
  if not isinstance(proposer, _KINDS):
    return proposer
  model = proposer.model
  if LAYERS.value is not None:
    most = model.config.layers
    if LAYERS.value > most:
      raise ValueError(f"draft_layers={LAYERS.value}: the draft model has {most} layers")
    if LAYERS.value < most:
      model = model.keep(kept(most, LAYERS.value, _CUT.value))
  if _CONTEXT.value is not None:
    if _CONTEXT.value > model.max_context:
      raise ValueError(f"draft_context={_CONTEXT.value}: the draft model's own context holds {model.max_context}")
    model = model.replace(config=dataclasses.replace(model.config, max_context=_CONTEXT.value))
  proposer = proposer.replace(model=model)
  front, back = draft_view.template(given.tokenizer) if not TEMPLATE.value else ([], [])
  if TEMPLATE.value and not _SYSTEM.value:
    front = draft_view.system(given.tokenizer)
    if not front:
      raise ValueError("system_prompt=off: the target's chat template writes none; there is nothing to leave out")
  return draft_view.View(proposer, len(front), len(back)) if front or back else proposer


def kept(layers: int, count: int, cut: str) -> tuple[int, ...]:
  """Which `count` of `layers` layers are kept, in order."""
  if cut == "first" or count == 1:
    return tuple(range(count))
  return tuple(int(i) for i in np.round(np.linspace(0, layers - 1, count)))


def _same(a, b):
  """Whether two proposers are one program with the same numbers."""
  if jax.tree.structure(a) != jax.tree.structure(b):
    return False
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b))
  return all(x is y or (np.shape(x) == np.shape(y) and np.array_equal(np.asarray(x), np.asarray(y))) for x, y in pairs)
