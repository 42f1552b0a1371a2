"""Bodies become requests or are refused by name; updates become answers, and a stream says what the whole says."""
import json

import numpy as np
import pytest

from specjax import logprobs as logprobs_lib
from specjax.serving import grammars
from specjax.serving import openai_answers
from specjax.serving import openai_fields
from specjax.serving import openai_protocol
from specjax.serving import requests
from specjax.serving import tool_calls
from specjax.serving.openai_fields import Refused
import tiny_tokenizers

TEMPLATE = ("{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}\n"
            "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
TOKENIZER = tiny_tokenizers.byte_level([bytes([byte]) for byte in range(256)], ["<eos>"], eos="<eos>",
                                       chat_template=TEMPLATE)
EOS = 256
MODEL = openai_protocol.Model("m", TOKENIZER, (EOS,), max_context=400)
ROOMY = openai_protocol.Model("m", TOKENIZER, (EOS,), max_context=2000)
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}
TIME = {"type": "function", "function": {"name": "time"}}


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
  """Grammars as what they were made of: what they mean is tested beside them."""
  for name in ("json_schema", "json_object", "regex", "choice", "lark", "tool_calls"):
    monkeypatch.setattr(grammars.Grammar, name, lambda *args, _name=name, **kwargs: (_name, args, kwargs),
                        raising=False)


def chat(**fields):
  return openai_protocol.chat({"model": "m", "messages": HELLO} | fields, ROOMY)


def complete(against=MODEL, **fields):
  return openai_protocol.completion({"model": "m", "prompt": "hello"} | fields, against)


def prompt_of(call):
  return TOKENIZER.decode(call.request.prompt)


def test_defaults_are_openais():
  call = chat()
  assert prompt_of(call) == "<user>hello\n<assistant>"
  request = call.request
  assert (request.params.temperature, request.params.top_p, request.params.seed) == (1.0, 1.0, None)
  assert request.max_new_tokens == 2000 - len(request.prompt) and request.logprobs is None and request.grammar is None
  assert (call.stream, call.include_usage, call.tools, call.model) == (False, False, (), "m")
  assert (request.stop, request.eos_ids, request.deadline, request.speculate) == ((), None, None, True)
  assert complete().request.max_new_tokens == 16


def test_every_sampling_parameter_arrives():
  call = complete(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, presence_penalty=0.25, max_tokens=9,
                  frequency_penalty=-0.5, repetition_penalty=1.25, min_tokens=2, logit_bias={"5": -100, "6": 1.5},
                  allowed_token_ids=[5, 6, 7], stop=["a", "bc"], logprobs=2, deadline=1.5, speculate=False,
                  stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
  params, request = call.request.params, call.request
  assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 7, 0.1, 3)
  assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.25, -0.5, 1.25)
  assert (params.min_new_tokens, params.logit_bias, params.allowed_ids) == (2, {5: -100, 6: 1.5}, [5, 6, 7])
  assert (request.stop, request.logprobs, request.deadline, request.speculate) == (("a", "bc"), 2, 1.5, False)
  assert request.max_new_tokens == 9 and call.stream and call.include_usage
  params.batch(1, TOKENIZER.vocab_size)
  assert complete(top_k=-1).request.params.top_k == 0 and complete(stop="x").request.stop == ("x",)


def test_end_ids():
  assert complete(ignore_eos=True).request.eos_ids == ()
  assert complete(stop_token_ids=[3]).request.eos_ids == (EOS, 3)
  assert complete(ignore_eos=True, stop_token_ids=[3]).request.eos_ids == (3,)


def test_prompts():
  assert complete(prompt=[1, 2, 3]).request.prompt == [1, 2, 3]
  assert complete(prompt=[[1, 2, 3]]).request.prompt == [1, 2, 3]
  assert complete(prompt=["hi"]).request.prompt == TOKENIZER.encode("hi")


def test_messages():
  call = chat(messages=[{"role": "developer", "content": "Be brief."},
                        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"},
                                                                   {"type": "text", "text": "b"}]},
                        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "tool_calls": None},
                        {"role": "user", "content": "d"}])
  assert prompt_of(call) == "<system>Be brief.\n<user ann>ab\n<assistant>c\n<user>d\n<assistant>"


def test_a_model_that_only_continues_text():
  bare = openai_protocol.Model("m", tiny_tokenizers.byte_level(["a"]), (), max_context=400)
  with pytest.raises(Refused, match="use /v1/completions"):
    openai_protocol.chat({"model": "m", "messages": HELLO}, bare)


def test_what_changes_nothing_is_accepted():
  chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="k", n=1, temperature=None,
       functions=[], modalities=["text"], response_format={"type": "text"}, tool_choice="none", tools=[],
       parallel_tool_calls=True, skip_special_tokens=True, stream_options=None, max_tokens=5, max_completion_tokens=5)
  complete(best_of=1, echo=False, suffix="")


@pytest.mark.parametrize("field, value", [
    ("temperature", -0.1), ("temperature", 2.5), ("temperature", "1"), ("temperature", True), ("top_p", 0),
    ("top_p", 1.5), ("top_k", -2), ("top_k", 1.0), ("min_p", 1.1), ("seed", -1), ("seed", 2**31), ("seed", 0.5),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("min_tokens", -1),
    ("max_tokens", 0), ("max_tokens", 1.5), ("stop", [""]), ("stop", 3), ("stop", ["x"] * 17), ("logit_bias", [1]),
    ("stop_token_ids", ["1"]), ("allowed_token_ids", [-1]), ("ignore_eos", 1), ("stream", "yes"), ("deadline", 0),
    ("speculate", "no"), ("n", 2), ("n", True), ("echo", True), ("best_of", 3), ("suffix", "end"),
    ("stream_options", {"include_usage": True}), ("use_beam_search", True), ("logprobs", 21), ("logprobs", True),
    ("response_format", {"type": "grammar"}), ("response_format", "json_object"), ("guided_regex", 3),
    ("guided_grammar", 3),
    ("guided_choice", []), ("guided_choice", [1]), ("guided_json", "{"), ("guided_json", [1]), ("prompt", None),
    ("prompt", ["a", "b"]), ("prompt", [[1], [2]]), ("prompt", [1.5]), ("prompt", [True]), ("prompt", {}),
    ("structured_outputs", {"json": {}, "grammar": "x"}), ("beams", 3), ("reasoning_effort", "low"), ("prompt", "")])
def test_refused_by_name(field, value):
  with pytest.raises(Refused) as error:
    complete(**{field: value})
  assert error.value.status == 400 and error.value.param.split(".")[0] == field and field in str(error.value)


@pytest.mark.parametrize("field, value", [
    ("messages", None), ("messages", []), ("messages", "hi"), ("messages", ["hi"]),
    ("messages", [{"role": "user"}]), ("messages", [{"role": "robot", "content": "a"}]),
    ("messages", [{"role": "user", "content": 3}]), ("messages", [{"role": "user", "content": "a", "weight": 1}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]),
    ("messages", [{"role": "tool", "content": "a"}]),
    ("messages", [{"role": "user", "content": "a", "tool_calls": []}]),
    ("messages", [{"role": "tool", "content": "a", "tool_call_id": "x"}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "3"}}]}]),
    ("top_logprobs", 2), ("max_tokens", 2000), ("max_completion_tokens", 2000), ("logprobs", 2),
    ("modalities", ["text", "audio"]), ("tools", {}), ("tools", [{"type": "custom"}]), ("tools", [WEATHER, WEATHER]),
    ("tools", [{"type": "function", "function": {"name": ""}}]), ("tool_choice", "auto"), ("tool_choice", "required"),
    ("functions", [1]), ("prediction", {"type": "content", "content": "x"}), ("add_generation_prompt", False)])
def test_refused_by_name_in_chats(field, value):
  with pytest.raises(Refused) as error:
    chat(**{field: value})
  assert error.value.status == 400 and error.value.param.startswith(field) and field in str(error.value)


def test_a_bias_is_refused_by_its_id():
  for biases, said in (({"x": 1}, "logit_bias.x"), ({"5": 101}, "logit_bias.5"), ({"5": "1"}, "logit_bias.5")):
    with pytest.raises(Refused, match=said):
      complete(logit_bias=biases)


def test_budgets():
  with pytest.raises(Refused, match="max_tokens is 396; .* it may be 395 at most") as error:
    complete(max_tokens=396)
  assert error.value.code == "context_length_exceeded"
  assert complete(max_tokens=395).request.max_new_tokens == 395
  with pytest.raises(Refused, match="prompt has 400 tokens; it must have 1 to 399"):
    complete(prompt=[1] * 400)
  # A default gives way where a wish is refused.
  assert complete(prompt=[1] * 395).request.max_new_tokens == 5
  limited = openai_protocol.Model("m", TOKENIZER, (EOS,), max_context=400, max_prompt=6, max_new=8)
  assert complete(limited).request.max_new_tokens == 8
  with pytest.raises(Refused, match="it may be 8 at most"):
    complete(limited, max_tokens=9)
  with pytest.raises(Refused, match="prompt has 7 tokens; it must have 1 to 6"):
    complete(limited, prompt=[1] * 7)
  with pytest.raises(Refused, match="max_completion_tokens is 6"):
    chat(max_tokens=5, max_completion_tokens=6)


def test_the_model_is_named():
  with pytest.raises(Refused, match="'x' does not exist; the one here is 'm'") as error:
    complete(model="x")
  assert (error.value.status, error.value.code) == (404, "model_not_found")
  with pytest.raises(Refused, match="model is missing"):
    complete(model=None)


@pytest.mark.parametrize("fields, made", [
    ({"response_format": {"type": "json_object"}}, ("json_object", ())),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
     ("json_schema", ({"type": "null"},))),
    ({"guided_json": '{"type": "null"}'}, ("json_schema", ({"type": "null"},))),
    ({"guided_json": {}}, ("json_schema", ({},))), ({"guided_regex": "a+"}, ("regex", ("a+",))),
    ({"guided_choice": ["a", "b"]}, ("choice", (["a", "b"],))),
    ({"guided_grammar": "start: /a/"}, ("lark", ("start: /a/",))),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", ("a+",))),
    ({"structured_outputs": {"json_object": True}}, ("json_object", ()))])
def test_what_the_text_must_be(fields, made):
  for call in (complete(**fields), chat(**fields)):
    name, args, kwargs = call.request.grammar
    assert (name, args) == made and not kwargs


def test_one_thing_that_the_text_must_be():
  with pytest.raises(Refused, match="response_format and guided_regex each say"):
    complete(response_format={"type": "json_object"}, guided_regex="a")
  with pytest.raises(Refused, match="tool_choice and guided_regex each say"):
    chat(tools=[TIME], tool_choice="required", guided_regex="a")


def test_a_grammar_says_what_it_cannot(monkeypatch):
  def refuse(schema):
    raise ValueError(f"no {schema}")
  monkeypatch.setattr(grammars.Grammar, "json_schema", refuse, raising=False)
  with pytest.raises(Refused, match="guided_json: no") as error:
    complete(guided_json={"type": "null"})
  assert error.value.param == "guided_json"


def test_tool_choices():
  free = chat(tools=[WEATHER, TIME])
  assert free.tools == ("weather", "time") and free.request.grammar is None
  assert json.dumps(WEATHER) in prompt_of(free) and prompt_of(free).startswith("<system># Tools")
  assert chat(tools=[WEATHER, TIME], tool_choice="required").request.grammar == (
      "tool_calls", ([WEATHER, TIME],), {"parallel": True})
  single = chat(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
  assert single.request.grammar[2] == {"parallel": False}
  named = chat(tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "time"}})
  assert named.request.grammar == ("tool_calls", ([TIME],), {"parallel": False})
  none = chat(tools=[WEATHER], tool_choice="none")
  assert none.tools == () and "Tools" not in prompt_of(none)
  for fields, said in (({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
                       ({"tool_choice": "any"}, "tool_choice"), ({"parallel_tool_calls": False}, "parallel_tool_calls"),
                       ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "strict")):
    with pytest.raises(Refused, match=said):
      chat(**{"tools": [WEATHER]} | fields)


def test_past_calls_are_laid_out_and_results_follow_the_calls():
  call = lambda ident, name, arguments: {"id": ident, "type": "function", "index": 0,
                                         "function": {"name": name, "arguments": arguments}}
  past = [{"role": "system", "content": "S"}, *HELLO,
          {"role": "assistant", "content": None, "tool_calls": [call("1", "weather", '{"city": "Ulm"}'),
                                                                call("2", "time", "{}")]},
          {"role": "tool", "tool_call_id": "2", "content": "noon"},
          {"role": "tool", "tool_call_id": "1", "content": "dry"}]
  text = prompt_of(chat(messages=past, tools=[TIME]))
  assert text.startswith("<system>S\n\n# Tools")
  assert text.endswith('<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
                       '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n'
                       "<user><tool_response>\ndry\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
                       "<assistant>")
  with pytest.raises(Refused, match=r"messages\[5\].tool_call_id is '1'"):
    chat(messages=[*past, past[-1]])


@pytest.mark.parametrize("body, said", [(b"{", "not JSON"), (b"\xff", "not JSON"), (b"[]", "a JSON object"),
                                        (b'{"temperature": NaN}', "NaN"), (b'{"a": "\\ud800"}', "not JSON"),
                                        (b"[" * 100_000, "not JSON"), (b"", "not JSON")])
def test_bodies_that_are_no_objects(body, said):
  with pytest.raises(Refused, match=said):
    openai_fields.parse(body)


def find(text, size, names=("f", "g")):
  """Text and calls found, given `size` characters at a time; neighbouring texts joined."""
  finder, found = tool_calls.Finder(names), []
  parts = [part for start in range(0, len(text), size) for part in finder.push(text[start:start + size])]
  for part in parts + finder.flush():
    if isinstance(part, str) and found and isinstance(found[-1], str):
      found[-1] += part
    else:
      found.append(part)
  return found


F = tool_calls.ToolCall("f", '{"x": "a b"}')
F_TEXT = '<tool_call>\n{"name": "f", "arguments": {"x": "a b"}}\n</tool_call>'
TAGGED = tool_calls.ToolCall("g", '{"x": "</tool_call>"}')
TAGGED_TEXT = '<tool_call>{"name": "g", "arguments": {"x": "</tool_call>"}}</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text, found", [
    ("no call <tool", ["no call <tool"]), ("a\n ", ["a\n "]), (" a", [" a"]), (F_TEXT, [F]),
    (f"I look.\n\n{F_TEXT}", ["I look.", F]), (f"{F_TEXT}\n{F_TEXT}\n", [F, F]),
    (f"{F_TEXT} then {F_TEXT}", [F, "then", F]),
    (F_TEXT.removesuffix("</tool_call>"), [F]), (f"{F_TEXT}\n{F_TEXT[:-20]}", [F, F_TEXT[:-20]]),
    (TAGGED_TEXT, [TAGGED]), (TAGGED_TEXT + F_TEXT, [TAGGED, F]),
    (F_TEXT.replace('"f"', '"h"'), [F_TEXT.replace('"f"', '"h"')]),
    ("<tool_call>nothing</tool_call> and " + F_TEXT, ["<tool_call>nothing</tool_call> and", F]),
    ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', ['<tool_call>{"name": "f", "arguments": 3}</tool_call>']),
    ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
     ['<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'])])
def test_calls_are_found_whatever_the_pieces(size, text, found):
  assert find(text, size) == found


def updates(texts, reason="stop", top=0, **speculation):
  """Updates of texts, byte by byte of token, the last with the outcome."""
  made, ids = [], []
  for text in texts:
    new = list(text.encode())
    stream = TOKENIZER.pieces(new)
    ids += new
    logprobs = logprobs_lib.Logprobs(
        processed=np.zeros(len(new), np.float32), raw=np.full(len(new), -0.5, np.float32),
        top_ids=np.tile(np.array([97, 233, 9999], np.int32)[:top], (len(new), 1)),
        top_raw=np.tile(np.array([-0.25, -2, -np.inf], np.float32)[:top], (len(new), 1)))
    made.append(requests.Update(0, new, stream, [False] * len(new), logprobs))
  outcome = requests.Outcome(
      id=0, category="all", token_ids=ids, text="".join(texts), finish_reason=reason, prompt_tokens=7, cached_tokens=3,
      speculation=requests.Speculation(4, 3, 9, 5, (3, 2)), submitted=0.0, admitted=0.0, finished=1.0, arrivals=())
  return [*made, requests.Update(0, [], [], [], None, outcome)]


def answered(kind, call, given):
  """The whole response and the chunks of the same updates."""
  answer = kind(call, TOKENIZER, ident="1", created=5)
  chunks = answer.opening() + [chunk for update in given for chunk in answer.push(update)]
  json.dumps(chunks, allow_nan=False)
  return answer.whole(), chunks


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3},
         "completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 4}}


def test_a_completion():
  whole, chunks = answered(openai_answers.Completion, complete(stream=True, stream_options={"include_usage": True}),
                           updates(["ab", "", "c"], "length"))
  assert whole == {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m", "usage": USAGE, "choices": [
      {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}]}
  assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["ab", "c", ""]
  assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, "length"]
  assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == USAGE
  assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in chunks[:-1])


def test_a_chat():
  whole, chunks = answered(openai_answers.Chat, chat(), updates(["ab", "c"]))
  assert whole["id"] == "chatcmpl-1" and whole["object"] == "chat.completion" and whole["usage"] == USAGE
  assert whole["choices"] == [{"index": 0, "message": {"role": "assistant", "content": "abc", "refusal": None},
                               "logprobs": None, "finish_reason": "stop"}]
  deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
  assert deltas == [{"role": "assistant", "content": "", "refusal": None}, {"content": "ab"}, {"content": "c"}, {}]
  assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and "usage" not in chunks[-1]


def test_logprobs_of_a_chat():
  whole, chunks = answered(openai_answers.Chat, chat(logprobs=True, top_logprobs=3), updates(["é", "a"], top=3))
  content = whole["choices"][0]["logprobs"]["content"]
  assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
  assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "éa"
  assert content[2]["logprob"] == -0.5 and content[2]["top_logprobs"] == [
      {"token": "a", "logprob": -0.25, "bytes": [97]}, {"token": "bytes:\\xe9", "logprob": -2.0, "bytes": [233]},
      {"token": "", "logprob": -9999.0, "bytes": []}]
  streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
  assert [entry for part in streamed if part for entry in part["content"]] == content
  bare = answered(openai_answers.Chat, chat(logprobs=True), updates(["a"]))[0]["choices"][0]["logprobs"]["content"]
  assert bare == [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]


def test_logprobs_of_a_completion():
  whole, chunks = answered(openai_answers.Completion, complete(logprobs=2), updates(["é", "ab"], top=2))
  found = whole["choices"][0]["logprobs"]
  assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a", "b"] and found["token_logprobs"] == [-0.5] * 4
  assert found["text_offset"] == [0, 0, 1, 2]
  # The alternatives and the token itself, the more probable value for those that read alike.
  assert found["top_logprobs"][2] == {"a": -0.25, "bytes:\\xe9": -2.0}
  assert found["top_logprobs"][3] == {"a": -0.25, "bytes:\\xe9": -2.0, "b": -0.5}
  streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
  assert [offset for part in streamed for offset in part["text_offset"]] == found["text_offset"]


def test_calls_in_an_answer():
  call = chat(tools=[{"type": "function", "function": {"name": "f"}}])
  whole, chunks = answered(openai_answers.Chat, call, updates(["So: ", F_TEXT[:20], F_TEXT[20:] + "\n" + F_TEXT]))
  choice = whole["choices"][0]
  assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "So:"
  calls = choice["message"]["tool_calls"]
  assert [made["function"] for made in calls] == [{"name": "f", "arguments": F.arguments}] * 2
  assert len({made["id"] for made in calls}) == 2
  deltas = [made for chunk in chunks for made in chunk["choices"][0]["delta"].get("tool_calls", ())]
  assert deltas == [{"index": index} | made for index, made in enumerate(calls)]
  only = answered(openai_answers.Chat, call, updates([F_TEXT]))[0]["choices"][0]
  assert only["message"]["content"] is None
  cut = answered(openai_answers.Chat, call, updates([F_TEXT, F_TEXT[:30]], "length"))[0]["choices"][0]
  assert cut["finish_reason"] == "length" and cut["message"]["content"] == F_TEXT[:30]
  # Where a tokenizer has the tags as control tokens, which no text shows, the calls are found all the same.
  ids = [257, *F_TEXT.removeprefix("<tool_call>").removesuffix("</tool_call>").encode(), 258]
  tagged = tiny_tokenizers.byte_level([bytes([byte]) for byte in range(256)], ["<eos>", "<tool_call>", "</tool_call>"])
  answer = openai_answers.Chat(call, tagged, ident="1", created=5)
  answer.push(requests.Update(0, ids, tagged.pieces(ids), [False] * len(ids), None, updates([""])[-1].outcome))
  assert answer.whole()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == F.arguments
  # Without tools the same text is text.
  assert answered(openai_answers.Chat, chat(), updates([F_TEXT]))[0]["choices"][0]["message"]["content"] == F_TEXT
