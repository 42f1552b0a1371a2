"""Reads the bodies of OpenAI's /v1/completions and /v1/chat/completions into requests of the engine. No I/O.

What cannot be honoured is refused by name. What changes no answer (`user`, `metadata`, `store` and their like) is
accepted. Fields beyond OpenAI's are named as vLLM names them: top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, allowed_token_ids, structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar. Two are
specjax's own: `speculate` and `deadline`, of `requests.Request`.

Where nothing is given, OpenAI's defaults hold: temperature 1, and 16 tokens for a completion; a chat's answer may take
what is left of the context. Without `seed` the engine takes the request's number, so that an answer is drawn anew each
time. One request has one prompt and one answer: several prompts are several requests, which the engine runs together.
"""
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from specjax import sampling_params
from specjax.serving import openai_constraints
from specjax.serving import openai_fields
from specjax.serving import openai_messages
from specjax.serving import requests
from specjax.serving import tool_calls
from specjax.serving.openai_fields import Fields, Refused

MOST_LOGPROBS = 20
MOST_STOPS = 16
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_GREATEST_SEED = 2**31 - 1

# Accepted whatever they say: no answer depends on them.
_HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
             "prompt_cache_retention")
# Accepted with the values that change nothing, and what to do otherwise.
_NEUTRAL = {
    "n": ((1,), "one answer a request: send several requests, which run together"),
    "best_of": ((1,), "one answer a request: send several requests, which run together"),
    "echo": ((False,), "the prompt is not returned"),
    "suffix": (("",), "a text is only continued; there is no filling in"),
    "modalities": ((["text"],), "answers are text"),
    "use_beam_search": ((False,), "tokens are drawn; there are no beams"),
    "skip_special_tokens": ((True,), "control tokens are no part of the text"),
    "include_stop_str_in_output": ((False,), "stop strings are no part of the text"),
    "functions": (([],), "give `tools` instead"),
    "function_call": (("none",), "give `tool_choice` instead"),
}


@dataclasses.dataclass(frozen=True)
class Model:
  """What a body is read against.

  Attributes:
    name: of the model, which a body must give.
    tokenizer: the target's. eos_ids: ids that end its answers.
    max_context: prompt and output of a request, at most.
    max_prompt, max_new: of either, at most; None: what the context holds.
  """
  name: str
  tokenizer: Any
  eos_ids: tuple[int, ...]
  max_context: int
  max_prompt: int | None = None
  max_new: int | None = None


@dataclasses.dataclass(frozen=True)
class Call:
  """A body that has been read.

  Attributes:
    request: for the engine.
    model: the name that was asked for, for the answer.
    stream, include_usage: as `stream` and `stream_options.include_usage` say.
    tools: names of the functions whose calls are looked for in the answer.
  """
  request: requests.Request
  model: str
  stream: bool = False
  include_usage: bool = False
  tools: tuple[str, ...] = ()


def completion(body: Mapping, model: Model) -> Call:
  """A call of /v1/completions.

  Raises:
    Refused: names the field, what it holds and what is allowed.
  """
  fields = _open(body, model)
  prompt = _prompt(fields.required("prompt"), model.tokenizer)
  logprobs = fields.whole("logprobs", None, 0, MOST_LOGPROBS)
  most = fields.whole("max_tokens", _COMPLETION_TOKENS, 1)
  grammar = openai_constraints.grammar(fields)
  return _call(fields, model, prompt, most, logprobs, grammar, fitted="max_tokens" not in fields)


def chat(body: Mapping, model: Model) -> Call:
  """A call of /v1/chat/completions.

  With `tool_choice` "auto" calls are found in what the model writes; "required" and a named function are enforced;
  "none" leaves the functions out of the prompt. Special tokens spelt inside a message become special ids, as
  `Tokenizer.chat` says: whoever passes on the words of strangers must remove such spellings first.

  Raises:
    Refused: names the field, what it holds and what is allowed.
  """
  fields = _open(body, model)
  if not model.tokenizer.has_chat_template:
    raise Refused("this model has no chat template: it continues text rather than answering; use /v1/completions",
                  "messages")
  tools, forced = openai_constraints.tools(fields)
  grammar = openai_constraints.grammar(fields, forced)
  try:
    prompt = model.tokenizer.chat(tool_calls.lay_out(openai_messages.read(fields), tools))
  except Refused:
    raise
  except ValueError as error:
    raise Refused(str(error), "messages") from error
  most = fields.whole("max_completion_tokens", None, 1)
  older = fields.whole("max_tokens", most, 1)
  if most is not None and older != most:
    fields.refuse("max_tokens", f"max_completion_tokens is {most}; give one of the two")
  logprobs = _chat_logprobs(fields)
  names = tuple(tool["function"]["name"] for tool in tools)
  return _call(fields, model, prompt, older, logprobs, grammar, fitted=older is None, tools=names)


def unknown_model(name: str, model: Model) -> Refused:
  """What is said to who asks for another model than there is."""
  return Refused(f"the model {name!r} does not exist; the one here is {model.name!r}", "model", status=404,
                 code="model_not_found")


def _open(body, model):
  """The fields of a body for this model, those that change nothing read already."""
  fields = Fields(body)
  name = fields.text("model")
  if name is None:
    fields.refuse("model", f"it must be {model.name!r}")
  if name != model.name:
    raise unknown_model(name, model)
  for harmless in _HARMLESS:
    fields.value(harmless)
  for neutral, (values, why) in _NEUTRAL.items():
    fields.only(neutral, *values, why=why)
  return fields


def _call(fields, model, prompt, max_new, logprobs, grammar, *, fitted, tools=()):
  """What both endpoints have in common; `fitted`: the output's budget was not asked for, and gives way."""
  stream = fields.flag("stream")
  request = requests.Request(
      prompt=prompt, params=_params(fields), max_new_tokens=_budget(fields, model, len(prompt), max_new, fitted),
      stop=_stop(fields), eos_ids=_eos_ids(fields, model), logprobs=logprobs, grammar=grammar,
      deadline=fields.real("deadline", None, 0, math.inf, above=True), speculate=fields.flag("speculate", True))
  include_usage = _stream_options(fields, stream)
  fields.done()
  return Call(request, model.name, stream=stream, include_usage=include_usage, tools=tools)


def _budget(fields, model, prompt_tokens, max_new, fitted):
  """The output's budget: as asked for, or what the context and the server allow."""
  longest = model.max_context - 1 if model.max_prompt is None else min(model.max_prompt, model.max_context - 1)
  if not 1 <= prompt_tokens <= longest:
    where = "messages" if "messages" in fields else "prompt"
    raise Refused(f"{where} has {prompt_tokens} tokens; it must have 1 to {longest}", where,
                     code="context_length_exceeded" if prompt_tokens else None)
  left = model.max_context - prompt_tokens
  most = left if model.max_new is None else min(left, model.max_new)
  if fitted:
    return most if max_new is None else min(max_new, most)
  if max_new > most:
    field = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    raise Refused(f"{field} is {max_new}; behind the {prompt_tokens} tokens of the prompt it may be {most} at most "
                     f"(prompt and output: {model.max_context})", field, code="context_length_exceeded")
  return max_new


def _params(fields):
  """The sampling parameters. Those that do nothing are left to their defaults, as None or 0."""
  return sampling_params.SamplingParams(
      temperature=fields.real("temperature", 1.0, 0, 2), top_p=fields.real("top_p", 1.0, 0, 1, above=True),
      top_k=max(0, fields.whole("top_k", 0, -1, _GREATEST_SEED)), min_p=fields.real("min_p", 0.0, 0, 1),
      seed=fields.whole("seed", None, 0, _GREATEST_SEED),
      repetition_penalty=fields.real("repetition_penalty", 1.0, 0, math.inf, above=True),
      presence_penalty=fields.real("presence_penalty", 0.0, -2, 2),
      frequency_penalty=fields.real("frequency_penalty", 0.0, -2, 2), logit_bias=_biases(fields),
      allowed_ids=_ids(fields, "allowed_token_ids") or None,
      min_new_tokens=fields.whole("min_tokens", 0, 0, _GREATEST_SEED))


def _biases(fields):
  given = fields.value("logit_bias")
  if not given:
    return None
  biases = Fields(given, "logit_bias")
  for token in given:
    if not (token.isascii() and token.isdecimal()):
      biases.refuse(token, "keys are token ids, whole numbers in quotes")
  return {int(token): biases.real(token, 0.0, -100, 100) for token in given}


def _ids(fields, name):
  return fields.items(name, lambda token: openai_fields.is_whole(token) and token >= 0, "token ids")


def _stop(fields):
  given = fields.value("stop", [])
  given = [given] if isinstance(given, str) else given
  if not isinstance(given, list) or len(given) > MOST_STOPS or not all(isinstance(x, str) and x for x in given):
    fields.refuse("stop", f"it must be a string or up to {MOST_STOPS} of them, none empty")
  return tuple(given)


def _eos_ids(fields, model):
  """The ids that end the answer, or None for the model's own."""
  more, ignored = _ids(fields, "stop_token_ids"), fields.flag("ignore_eos")
  return (() if ignored else model.eos_ids) + tuple(more) if more or ignored else None


def _chat_logprobs(fields):
  wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, 0, MOST_LOGPROBS)
  if "top_logprobs" in fields and not wanted:
    fields.refuse("top_logprobs", "it needs logprobs=true")
  return top if wanted else None


def _stream_options(fields, stream):
  if "stream_options" not in fields:
    return False
  if not stream:
    fields.refuse("stream_options", "it needs stream=true")
  options = Fields(fields.value("stream_options"), "stream_options")
  include_usage = options.flag("include_usage")
  options.only("include_obfuscation", False, why="nothing is padded here")
  options.done()
  return include_usage


def _prompt(given, tokenizer):
  """Token ids of a completion's prompt; a text gets what the tokenizer puts around a document."""
  if isinstance(given, list) and len(given) == 1 and isinstance(given[0], (str, list)):
    given = given[0]
  if isinstance(given, str):
    return tokenizer.encode(given, add_special_tokens=True)
  if isinstance(given, list) and all(map(openai_fields.is_whole, given)):
    return given
  raise Refused("prompt must be a string or a list of token ids; of several prompts, send one a request: they run "
                   "together", "prompt")
