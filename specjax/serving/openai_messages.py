"""Reads the messages of a chat: roles, texts, and the calls of functions that an assistant made before."""
from specjax.serving import openai_fields
from specjax.serving import tool_calls
from specjax.serving.openai_fields import Fields, Refused


def read(fields: Fields) -> list[dict]:
  """The conversation of a body as `tool_calls.lay_out` takes it; raises Refused."""
  given = fields.required("messages")
  if not isinstance(given, list) or not given:
    fields.refuse("messages", "it must be a list of one message or more")
  return [_message(Fields(message, f"messages[{index}]")) for index, message in enumerate(given)]


def _message(fields):
  role = fields.one_of("role", ("system", "developer", "user", "assistant", "tool"))
  found = {"role": "system" if role == "developer" else role}
  if "name" in fields:
    found["name"] = fields.text("name")  # the template's, which may use it
  if role == "assistant":
    # An answer of the server's own, sent back as it was.
    fields.only("refusal", "", why="there are no refusals here")
    fields.only("annotations", [], why="there are no annotations here")
    found["tool_calls"] = [_past_call(Fields(call, f"{fields.path('tool_calls')}[{index}]"))
                           for index, call in enumerate(fields.items("tool_calls", lambda _: True, "calls"))]
  if role == "tool":
    fields.required("tool_call_id")
    found["tool_call_id"] = fields.text("tool_call_id")
  found["content"] = "" if found.get("tool_calls") and "content" not in fields else _content(fields)
  fields.done()
  return found


def _content(fields):
  """The text of a message: a string, or parts of text."""
  given = fields.required("content")
  if isinstance(given, str):
    return given
  if not isinstance(given, list):
    fields.refuse("content", "it must be a string or a list of parts")
  texts = []
  for index, part in enumerate(given):
    part = Fields(part, f"{fields.path('content')}[{index}]")
    part.one_of("type", ("text",))
    part.required("text")
    texts.append(part.text("text"))
    part.done()
  return "".join(texts)


def _past_call(fields):
  """(id, ToolCall) of a call in an assistant's message."""
  fields.one_of("type", ("function",), "function")
  fields.value("index")  # left over by clients that put a streamed answer together
  function = Fields(fields.required("function"), fields.path("function"))
  fields.required("id")
  function.required("name")
  function.required("arguments")
  arguments = function.text("arguments")
  try:
    openai_fields.parse(arguments.encode())
  except Refused:
    function.refuse("arguments", "it must be a JSON object, as a string")
  call = fields.text("id"), tool_calls.ToolCall(function.text("name"), arguments)
  function.done()
  fields.done()
  return call
