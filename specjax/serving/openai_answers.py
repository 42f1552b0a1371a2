"""Writes OpenAI's answers and their chunks from the engine's updates. No I/O.

An answer is one object: it is given every update, hands back the chunks of a stream, and at the end makes the response
of everything it was given. So a stream says what a whole response says.

Log-probabilities are those of the target's own law, before penalties, masks, temperature and filters. Usage counts
accepted and rejected drafts as OpenAI counts those of predicted outputs.
"""
from specjax.checkpoints import tokenizer as tokenizers
from specjax.serving import openai_protocol
from specjax.serving import requests
from specjax.serving import tool_calls

_LEAST = -9999.0  # stands for minus infinity, which JSON has not; OpenAI's number


class Answer:
  """What both endpoints have in common; see `Completion` and `Chat`."""
  object = chunk_object = ""

  def __init__(self, call: openai_protocol.Call, tokenizer: tokenizers.Tokenizer, *, ident: str, created: int):
    """Nothing was said yet.

    Args:
      call: what is answered. tokenizer: the target's.
      ident: without the prefix of its kind. created: seconds since 1970.
    """
    self._call, self._tokenizer, self._ident, self._created = call, tokenizer, ident, created
    self._outcome: requests.Outcome | None = None

  def opening(self) -> list[dict]:
    """Chunks before any text."""
    return []

  def push(self, update: requests.Update) -> list[dict]:
    """Chunks of one update; behind the last one also those that close the answer."""
    raise NotImplementedError

  def whole(self) -> dict:
    """The response, once the last update is in."""
    return self._frame(self.object, [self._whole_choice()]) | {"usage": usage(self._outcome)}

  def _whole_choice(self):
    raise NotImplementedError

  def _frame(self, kind, choices):
    return {"id": self._ident, "object": kind, "created": self._created, "model": self._call.model, "choices": choices}

  def _chunk(self, choice):
    # With the usage asked for, every chunk has the field, as OpenAI's have.
    return self._frame(self.chunk_object, [choice]) | ({"usage": None} if self._call.include_usage else {})

  def _closing(self):
    if not self._call.include_usage:
      return []
    return [self._frame(self.chunk_object, []) | {"usage": usage(self._outcome)}]


class Completion(Answer):
  """An answer of /v1/completions."""
  object = chunk_object = "text_completion"

  def __init__(self, call, tokenizer, *, ident, created):
    """As `Answer`."""
    super().__init__(call, tokenizer, ident=f"cmpl-{ident}", created=created)
    self._text, self._logprobs = "", None

  def push(self, update):
    logprobs = self._new_logprobs(update)
    self._text += update.text
    self._outcome = update.outcome
    if not (update.text or logprobs or update.outcome):
      return []
    chunk = self._chunk(_choice({"text": update.text}, logprobs, update.outcome and update.outcome.finish_reason))
    return [chunk, *(self._closing() if update.outcome else [])]

  def _whole_choice(self):
    return _choice({"text": self._text}, self._logprobs, self._outcome.finish_reason)

  def _new_logprobs(self, update):
    """Those of an update as this endpoint has them, which are also added to those of the answer."""
    if self._call.request.logprobs is None or not update.token_ids:
      return None
    offsets, place = [], len(self._text)
    for piece in update.pieces:
      offsets.append(place)
      place += len(piece)
    entries = list(_entries(update, self._tokenizer, self._call.request.logprobs))
    found = {"tokens": [token["token"] for token, _ in entries],
             "token_logprobs": [token["logprob"] for token, _ in entries],
             "top_logprobs": [_by_text([*top, token]) for token, top in entries], "text_offset": offsets}
    if self._logprobs is None:
      self._logprobs = {name: [] for name in found}
    for name, values in found.items():
      self._logprobs[name] += values
    return found


class Chat(Answer):
  """An answer of /v1/chat/completions."""
  object, chunk_object = "chat.completion", "chat.completion.chunk"

  def __init__(self, call, tokenizer, *, ident, created):
    """As `Answer`."""
    super().__init__(call, tokenizer, ident=f"chatcmpl-{ident}", created=created)
    self._finder = tool_calls.Finder(call.tools) if call.tools else None
    self._text, self._calls = "", []
    self._logprobs = None if call.request.logprobs is None else {"content": [], "refusal": None}

  def opening(self):
    return [self._chunk(_choice({"delta": {"role": "assistant", "content": "", "refusal": None}}))]

  def push(self, update):
    logprobs = self._new_logprobs(update)
    self._outcome = update.outcome
    deltas = [self._delta(part) for part in self._parts(update)]
    if logprobs and not deltas:
      deltas = [{"content": ""}]
    chunks = [self._chunk(_choice({"delta": delta}, None if index else logprobs))
              for index, delta in enumerate(deltas)]
    if update.outcome is None:
      return chunks
    return [*chunks, self._chunk(_choice({"delta": {}}, None, self._finish_reason())), *self._closing()]

  def _parts(self, update):
    """New text, and calls that are complete."""
    if self._finder is None:
      return [update.text] if update.text else []
    text = "".join(map(self._with_tags, update.token_ids, update.pieces))
    return self._finder.push(text) + (self._finder.flush() if update.outcome else [])

  def _with_tags(self, index, piece):
    """A token's text; also that of a tag that is a control token, which no text shows."""
    if not self._tokenizer.is_special(index):
      return piece
    spelt = self._tokenizer.token_bytes(index, skip_special_tokens=False).decode()
    return spelt if spelt in (tool_calls.BEGIN, tool_calls.END) else piece

  def _delta(self, part):
    """What a chunk says of a part, which is also added to the answer."""
    if isinstance(part, str):
      self._text += part
      return {"content": part}
    call = {"id": f"call_{self._ident.removeprefix('chatcmpl-')}_{len(self._calls)}", "type": "function",
            "function": {"name": part.name, "arguments": part.arguments}}
    self._calls.append(call)
    return {"tool_calls": [{"index": len(self._calls) - 1} | call]}

  def _new_logprobs(self, update):
    if self._logprobs is None or not update.token_ids:
      return None
    found = [token | {"top_logprobs": top}
             for token, top in _entries(update, self._tokenizer, self._call.request.logprobs)]
    self._logprobs["content"] += found
    return {"content": found, "refusal": None}

  def _finish_reason(self):
    """An answer of calls ends in them, unless its budget ended it."""
    reason = self._outcome.finish_reason
    return "tool_calls" if self._calls and reason == requests.STOP else reason

  def _whole_choice(self):
    message = {"role": "assistant", "content": self._text if self._text or not self._calls else None, "refusal": None}
    return _choice({"message": message | ({"tool_calls": self._calls} if self._calls else {})}, self._logprobs,
                   self._finish_reason())


def usage(outcome: requests.Outcome) -> dict:
  """OpenAI's usage object: tokens, those of the prompt that were not run again, and drafts by their fate."""
  speculation = outcome.speculation
  return {"prompt_tokens": outcome.prompt_tokens, "completion_tokens": len(outcome.token_ids),
          "total_tokens": outcome.prompt_tokens + len(outcome.token_ids),
          "prompt_tokens_details": {"cached_tokens": outcome.cached_tokens},
          "completion_tokens_details": {
              "accepted_prediction_tokens": speculation.accepted_tokens,
              "rejected_prediction_tokens": speculation.drafted_tokens - speculation.accepted_tokens}}


def _choice(content, logprobs=None, finish_reason=None):
  return {"index": 0} | content | {"logprobs": logprobs, "finish_reason": finish_reason}


def _entries(update, tokenizer, alternatives):
  """Of each token of an update: its entry, and those of the most probable ids."""
  logprobs = update.logprobs
  for place, index in enumerate(update.token_ids):
    top = zip(logprobs.top_ids[place][:alternatives], logprobs.top_raw[place][:alternatives])
    yield (_entry(tokenizer, index, logprobs.raw[place]),
           [_entry(tokenizer, other, value) for other, value in top])


def _entry(tokenizer, index, logprob):
  # A head may have rows beyond the tokenizer's ids, which are alternatives like any other and have no spelling.
  raw = tokenizer.token_bytes(int(index), skip_special_tokens=False) if index < tokenizer.vocab_size else b""
  return {"token": _text(raw), "logprob": max(_LEAST, float(logprob)), "bytes": list(raw)}


def _text(raw: bytes) -> str:
  """A token as text; one that is part of a character is spelt in bytes, as OpenAI spells it."""
  try:
    return raw.decode()
  except UnicodeDecodeError:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _by_text(entries):
  """{text: logprob}, the most probable of those that read alike."""
  found = {}
  for entry in entries:
    found.setdefault(entry["token"], entry["logprob"])
  return found
