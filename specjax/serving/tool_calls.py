"""Functions that a model may call: how it is told of them, and how its calls are found in its text.

One layout for every model, that of Hermes and Qwen, whatever its chat template would write: the functions stand in the
system message as JSON between <tools> tags, a call is an object of "name" and "arguments" between <tool_call> tags,
and results come back as the user's, between <tool_response> tags.
"""
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json

BEGIN, END = "<tool_call>", "</tool_call>"

_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A call: the function's name, and its arguments as the text of a JSON object."""
  name: str
  arguments: str


def lay_out(messages: Sequence[Mapping], tools: Sequence[Mapping]) -> list[dict]:
  """The conversation in messages of role and content alone, which any chat template takes.

  Args:
    messages: "role" and "content", strings; an assistant's may have "tool_calls", pairs of (id, ToolCall), and one of
      the role "tool" has the "tool_call_id" that it answers.
    tools: what the model is told of; OpenAI's {"type": "function", "function": {...}}.

  Raises:
    ValueError: a result that answers no call of the assistant's message before it.
  """
  found, calls, results = [], [], {}
  for index, message in enumerate(messages):
    if message["role"] == "tool":
      if message["tool_call_id"] not in calls or message["tool_call_id"] in results:
        raise ValueError(f"messages[{index}].tool_call_id is {message['tool_call_id']!r}; it must be the id of a call "
                         f"of the assistant's message before it, one result each: {', '.join(calls) or 'none'}")
      results[message["tool_call_id"]] = message["content"]
      continue
    found += _answered(calls, results)
    calls, results = [ident for ident, _ in message.get("tool_calls", ())], {}
    found.append(_plain(message))
  return _told(found + _answered(calls, results), tools)


def _answered(calls, results):
  """One message of the user's with all results, in the order of the calls, as the model is not shown their ids."""
  texts = [f"<tool_response>\n{results[ident]}\n</tool_response>" for ident in calls if ident in results]
  return [{"role": "user", "content": "\n".join(texts)}] if texts else []


def _plain(message):
  calls = [f'{BEGIN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{END}'
           for _, call in message.get("tool_calls", ())]
  rest = {key: value for key, value in message.items() if key != "tool_calls"}
  return rest | {"content": "\n".join(([message["content"]] if message["content"] else []) + calls)}


def _told(messages, tools):
  if not tools:
    return messages
  told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
  if messages and messages[0]["role"] == "system":
    return [messages[0] | {"content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
  return [{"role": "system", "content": told}, *messages]


class Finder:
  """Finds calls in a text that comes in pieces of any size, and hands on the rest of it.

  What stands between the tags and is no call of a function in `names` stays text. White space beside a call is none
  of the text.
  """

  def __init__(self, names: Iterable[str]):
    """At the start of a text. Args: names: of the functions that may be called."""
    self._names, self._held, self._behind = frozenset(names), "", False

  def push(self, text: str) -> list[str | ToolCall]:
    """The text and the calls that are known now; what may yet begin a call is held back."""
    self._held += text
    found = []
    while (begin := self._held.find(BEGIN)) >= 0:
      call, after = self._call(begin)
      if after is None:
        return found + self._text(begin, ended=False)
      found += self._text(begin if call else after, ended=call is not None)
      if call:
        found.append(call)
        self._held, self._behind = self._held[after - begin:], True
    return found + self._text(len(self._held) - _unfinished(self._held), ended=False)

  def flush(self) -> list[str | ToolCall]:
    """What was held back, at the text's end; a last call without its closing tag counts if it is whole."""
    begin = self._held.find(BEGIN)
    call = self._parse(self._held[begin + len(BEGIN):]) if begin >= 0 else None
    found = self._text(begin if call else len(self._held), ended=call is not None, last=True)
    return found + [call] if call else found

  def _call(self, begin):
    """The call at `begin` and where it ends; (None, end) for tags around something else, (None, None) if unknown."""
    start = begin + len(BEGIN)
    end = self._held.find(END, start)
    while end >= 0 and _within_string(self._held[start:end]):  # arguments may spell the tag themselves
      end = self._held.find(END, end + len(END))
    return (None, None) if end < 0 else (self._parse(self._held[start:end]), end + len(END))

  def _parse(self, text):
    try:
      found = json.loads(text)
      if not isinstance(found, dict) or set(found) != {"name", "arguments"} or found["name"] not in self._names or (
          not isinstance(found["arguments"], dict)):
        return None
      return ToolCall(found["name"], json.dumps(found["arguments"], ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
      return None

  def _text(self, end, *, ended, last=False):
    """Takes the text up to `end`; `ended`: by a call. White space at its end waits to see what follows."""
    text = self._held[:end]
    if self._behind:
      text = text.lstrip()
    kept = text if last and not ended else text.rstrip()
    self._behind = self._behind and not kept
    self._held = ("" if ended else text[len(kept):]) + self._held[end:]
    return [kept] if kept else []


def _within_string(text: str) -> bool:
  """Whether JSON that begins with `text` is inside a string at its end."""
  try:
    json.JSONDecoder().raw_decode(text.lstrip())
  except json.JSONDecodeError as error:
    return error.msg.startswith("Unterminated string")
  except RecursionError:
    pass
  return False


def _unfinished(text: str) -> int:
  """How many characters at the end of `text` may begin a tag."""
  return next((size for size in range(min(len(BEGIN) - 1, len(text)), 0, -1) if BEGIN.startswith(text[-size:])), 0)
