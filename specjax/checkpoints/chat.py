"""Chat templates: Jinja programs that a model carries to lay out a conversation as text.

A template comes from a downloaded file, so it runs in Jinja's immutable sandbox. The settings and helpers are those
that templates are written against in Hugging Face Transformers (trim_blocks, lstrip_blocks, loop controls, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`).
"""
import functools
import json
from collections.abc import Mapping, Sequence


def render(template: str, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool,
           special_tokens: Mapping[str, str]) -> str:
  """The text of a conversation.

  Args:
    template: Jinja source.
    messages: each a mapping with "role" and "content", both strings.
    add_generation_prompt: end with the opening of the assistant's turn.
    special_tokens: names that the template may use, such as "bos_token", with their text.

  Returns:
    The text, special tokens spelt out.

  Raises:
    ValueError: a message that is not such a mapping, or a template that is wrong or refuses the conversation.
  """
  import jinja2
  messages = [dict(check_message(message, index)) for index, message in enumerate(messages)]
  try:
    return _compile(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **special_tokens)
  except (jinja2.exceptions.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
    raise ValueError(f"the model's chat template refuses this conversation: {error}") from error


def check_message(message, index: int):
  """Returns the message; raises ValueError unless it is a mapping of "role" and "content" to strings."""
  if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
    raise ValueError(f"message {index} is {str(message)[:80]!r}; a message is a mapping with 'role' and 'content', "
                     "both strings")
  return message


@functools.lru_cache(maxsize=8)
def _compile(template: str):
  import jinja2.ext
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words for training; here it is its body."""
    tags = {"generation"}

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
  environment.filters["tojson"] = _to_json
  environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
  return environment.from_string(template)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
  import jinja2
  raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form):
  import datetime
  return datetime.datetime.now().strftime(form)
