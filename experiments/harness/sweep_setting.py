"""The settings that a sweep varies: `--vary=NAME:v1,v2,...`, checked by the flag of that name.

A setting of a request (temperature, length, batch) changes what plain decoding does too, so each of its values has a
plain arm of its own. A setting of a method changes drafts only, and all of its values share one plain arm.
"""
import dataclasses

from absl import flags

from experiments.harness import method_options

VARY = flags.DEFINE_multi_string("vary", None, "What is varied, as name:value,value,...; given twice, with two names, "
                                 "the grid of both. An unknown name lists those there are.")
# Of a request; their flags stand in `settings`, `rules`, `sweep_prompts` and the program.
REQUEST = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "min_new_tokens", "prompt_tokens", "batch_size",
           "repetition_penalty", "presence_penalty", "frequency_penalty", "verifier", "raw")
# Of a draft model; their flags stand in `sweep_arms`.
DRAFT = ("draft_layers", "draft_context", "chat_template", "system_prompt")
_SWITCH = {"on": "true", "off": "false"}


@dataclasses.dataclass(frozen=True)
class Setting:
  """A setting and its values, in the order given."""
  name: str
  values: tuple

  @property
  def of_request(self) -> bool:
    """Whether plain decoding depends on it."""
    return self.name in REQUEST

  @property
  def numeric(self) -> bool:
    """Whether a curve can be drawn over it."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


def names() -> tuple[str, ...]:
  """All settings that can be varied: those of one value, lists apart."""
  options = tuple(flag.name for flag in method_options.ALL
                  if not isinstance(flags.FLAGS[flag.name].parser, flags.ListParser))
  return REQUEST + DRAFT + options


def parse() -> tuple[Setting, ...]:
  """The settings of --vary, one or two.

  Raises:
    ValueError: there is none or there are more than two, a name is unknown or given twice, or given as a flag as well;
      or there are fewer than two values, one stands twice, or one is not what the flag takes.
  """
  if not VARY.value:
    raise ValueError("--vary is needed: what is varied, such as --vary=draft_tokens:1,2,4,8")
  found = tuple(map(_setting, VARY.value))
  given = [setting.name for setting in found]
  if len(set(given)) < len(given):
    raise ValueError(f"--vary={found[-1].name} is given twice; give all of its values in one --vary")
  if len(found) > 2:
    raise ValueError(f"--vary is given for {', '.join(given)}: one setting, or two for a grid; pin the others by their "
                     "flags")
  for name in given:
    flag = flags.FLAGS[name]
    if not flag.using_default_value:
      raise ValueError(f"--{name}={flag.value} pins what --vary={name} varies; leave one of the two out")
  return found


def _setting(text):
  name, colon, listed = text.partition(":")
  if name not in names():
    raise ValueError(f"--vary={text}: there is no setting {name!r}; it takes NAME:value,value,... of "
                     f"{', '.join(names())}")
  texts = [item.strip() for item in listed.split(",")] if colon else []
  if len(texts) < 2 or "" in texts:
    raise ValueError(f"--vary={text}: a sweep needs two or more values, such as --vary={name}:VALUE,VALUE")
  parser, values = flags.FLAGS[name].parser, []
  switches = isinstance(parser, flags.BooleanParser)
  for item in texts:
    try:
      values.append(parser.parse(_SWITCH.get(item, item) if switches else item))
    except (ValueError, TypeError) as error:
      allowed = "it takes on and off" if switches else str(error)
      raise ValueError(f"--vary={text}: {item!r} is no value of --{name}: {allowed}") from error
  if len(set(values)) < len(values):
    raise ValueError(f"--vary={text}: a value stands twice; give each once")
  return Setting(name, tuple(values))


def shown(value) -> str:
  """A value as it is given."""
  if isinstance(value, bool):
    return "on" if value else "off"
  return f"{value:g}" if isinstance(value, float) else str(value)


def label(values: dict) -> str:
  """Values by name, as words."""
  return ", ".join(f"{name}={shown(value)}" for name, value in values.items())
