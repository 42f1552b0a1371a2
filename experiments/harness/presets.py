"""--preset=advice.json: a program takes its methods and their flags from the advice of `experiments.advise`."""
import json
import pathlib

from absl import flags

from experiments.harness import methods as methods_lib
from experiments import pairs

PRESET = flags.DEFINE_string("preset", None, "advice.json of experiments.advise: stands for --target, the method or "
                             "methods that it recommends, and their flags.")
_FIELDS = ("schema", "target", "overall", "types")


def read(path: str) -> dict:
  """The advice of a file.

  Raises:
    ValueError: it cannot be read, or is no advice; names the flag and the file.
  """
  try:
    found = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"--preset={path} is not an advice.json that can be read: {error}") from error
  if not isinstance(found, dict) or set(_FIELDS) - set(found) or found["schema"] != 1:
    raise ValueError(f"--preset={path} is no advice of experiments.advise; it needs {', '.join(_FIELDS)}")
  return found


def apply_overall(method_flag: str = "method") -> None:
  """For a program of one method, such as serve: sets --target, --method and its flags to the best of all requests; then
  what --pair stands for.

  Raises:
    ValueError: as of `read` and `pairs.apply`; or one of these flags was given as well.
  """
  pairs.apply()
  if PRESET.value is None:
    return
  advice = read(PRESET.value)
  best = advice["overall"]
  _set({"target": advice["target"], method_flag: best["method"]} | best["settings"])


def apply_target() -> dict:
  """For a program that takes the advice apart itself: sets --target, and returns the advice. Errors as of
  `apply_overall`; --preset is given."""
  pairs.apply()
  advice = read(PRESET.value)
  _set({"target": advice["target"]})
  return advice


def apply_by_category() -> None:
  """For the benchmark: --methods becomes plain decoding and what is recommended for the kinds of request of
  --categories (all by default) and overall, each method with its own flags (`methods.give`). And what --pair stands
  for.

  Raises:
    ValueError: as of `read` and `pairs.apply`; one of these flags was given as well; a category of which nothing is
      known; or one method is recommended with other settings for some requests than for others.
  """
  pairs.apply()
  if PRESET.value is None:
    return
  advice, wanted = read(PRESET.value), flags.FLAGS["categories"].value
  unknown = set(wanted or ()) - {each["category"] for each in advice["types"]}
  if unknown:
    raise ValueError(f"--preset={PRESET.value} has no advice on --categories={','.join(sorted(unknown))}; it knows "
                     f"{', '.join(dict.fromkeys(each['category'] for each in advice['types']))}")
  kept = [each for each in advice["types"] if not wanted or each["category"] in wanted]
  kept += [] if wanted else [advice["overall"]]
  own = {}
  for each in kept:
    if own.setdefault(each["method"], each["settings"]) != each["settings"]:
      raise ValueError(f"--preset={PRESET.value} recommends {each['method']} with {_flags(own[each['method']])} for "
                       f"some requests and with {_flags(each['settings'])} for others; choose some by --categories")
  _check({name: value for settings in own.values() for name, value in settings.items()})
  _set({"target": advice["target"], "methods": list(dict.fromkeys(["plain", *own]))})
  methods_lib.give(own)


def _flags(settings):
  return " ".join(f"--{name}={_shown(value)}" for name, value in settings.items()) or "its defaults"


def _shown(value):
  return ",".join(value) if isinstance(value, list) else value


def _set(values):
  """As if the flags had been given: some mean something only then."""
  _check(values)
  for name, value in values.items():
    flags.FLAGS[name].value = value
    flags.FLAGS[name].using_default_value = False


def _check(values):
  """Refuses what is no flag here, or was given beside the preset."""
  if pairs.PAIR.value is not None:
    raise ValueError(f"--preset={PRESET.value} and --pair={pairs.PAIR.value} both name a target; leave one of them out")
  for name, value in values.items():
    if name not in flags.FLAGS:
      raise ValueError(f"--preset={PRESET.value} has a setting {name!r} that is no flag of this program")
    if not flags.FLAGS[name].using_default_value:
      raise ValueError(f"--preset={PRESET.value} stands for --{name}={_shown(value)}, and --{name} was given as well; "
                       "leave one of the two out")
