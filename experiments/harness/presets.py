"""--preset=advice.json: a program takes its methods and their flags from the advice of `experiments.advise`."""
import json
import pathlib

from absl import flags

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


def apply_by_category() -> None:
  """For the benchmark: --methods becomes plain decoding and what is recommended for the kinds of request of
  --categories (all by default) and overall, with their flags. And what --pair stands for.

  Raises:
    ValueError: as of `read` and `pairs.apply`; one of these flags was given as well; a category of which nothing is
      known; or two methods want one flag with different values.
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
  values = {}
  for each in kept:
    for name, value in each["settings"].items():
      if values.setdefault(name, value) != value:
        raise ValueError(f"--preset={PRESET.value} recommends --{name}={values[name]} for some requests and --{name}="
                         f"{value} for others; choose some by --categories")
  methods = list(dict.fromkeys(["plain", *(each["method"] for each in kept)]))
  _set({"target": advice["target"], "methods": methods} | values)


def _set(values):
  if pairs.PAIR.value is not None:
    raise ValueError(f"--preset={PRESET.value} and --pair={pairs.PAIR.value} both name a target; leave one of them out")
  for name, value in values.items():
    if name not in flags.FLAGS:
      raise ValueError(f"--preset={PRESET.value} has a setting {name!r} that is no flag of this program")
    flag = flags.FLAGS[name]
    shown = ",".join(value) if isinstance(value, list) else value
    if not flag.using_default_value:
      raise ValueError(f"--preset={PRESET.value} stands for --{name}={shown}, and --{name} was given as well; leave "
                       "one of the two out")
  for name, value in values.items():
    # As if it had been given: some flags mean something only then.
    flags.FLAGS[name].value = value
    flags.FLAGS[name].using_default_value = False
