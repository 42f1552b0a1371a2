"""OpenAI's own client against a whole server: engine, service and HTTP, with a target whose text is a hash."""
import asyncio
import contextlib
import json
import threading
import time
import urllib.request

import pytest

import compiling
from specjax import proposers
from specjax import testing
from specjax.serving import control
from specjax.serving import engine as engine_lib
from specjax.serving import service as service_lib
import tiny_tokenizers

openai, parser = pytest.importorskip("openai"), pytest.importorskip("prometheus_client.parser")
http = pytest.importorskip("specjax.serving.http")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
LETTERS = [bytes([byte]) for byte in range(32, 127)] + [b"\n", b"\xc3", b"\xa9"]
TOKENIZER = tiny_tokenizers.byte_level(LETTERS, ["<eos>"], eos="<eos>", chat_template=TEMPLATE)
EOS = len(LETTERS)
MODEL = {"model": "dummy"}
HELLO = [{"role": "user", "content": "Say something."}]
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["left", "right"]}, "sure": {"type": "boolean"}},
          "required": ["kind", "sure"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"],
    "additionalProperties": False}}}


@contextlib.contextmanager
def served():
  """The URL of a server in a thread of its own, and its engine."""
  # The latest two tokens decide: texts repeat themselves, and lookup has drafts that are accepted. It always drafts:
  # how long steps took must not decide what is counted.
  target = testing.DummyTarget(vocab=EOS + 1, order=2, sharpness=6.0, eos_ids=(EOS,))
  engine = engine_lib.Engine(target, proposers.NGram(max_ngram=2, min_ngram=2, num_tokens=3), TOKENIZER,
                             config=engine_lib.Config(rows=4, max_tokens=1000), controller=control.Fixed())
  ready, found = threading.Event(), {}

  async def main():
    service = service_lib.Service(engine)
    service.start()
    try:
      async with http.listening(http.application(service, model_name="dummy"), port=0, patience=1.0) as url:
        found.update(url=url, ended=asyncio.Event(), loop=asyncio.get_running_loop())
        ready.set()
        await found["ended"].wait()
    finally:
      await service.close()
      ready.set()

  thread = threading.Thread(target=asyncio.run, args=(main(),))
  thread.start()
  assert ready.wait(60)
  try:
    yield found["url"], engine
  finally:
    found["loop"].call_soon_threadsafe(found["ended"].set)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server():
  with compiling.little_optimization(), served() as found:
    yield found


@pytest.fixture(scope="module")
def client(server):
  with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="-", max_retries=0, timeout=120) as made:
    yield made


def metrics(server):
  """{(name, the last label): value}"""
  with urllib.request.urlopen(f"{server[0]}/metrics", timeout=60) as response:
    text = response.read().decode()
  return {(sample.name, *[value for name, value in sample.labels.items() if name != "model_name"]): sample.value
          for family in parser.text_string_to_metric_families(text) for sample in family.samples}


def chat(client, **kwargs):
  return client.chat.completions.create(messages=kwargs.pop("messages", HELLO), **MODEL, **{"max_tokens": 24} | kwargs)


def complete(client, **kwargs):
  return client.completions.create(**MODEL, **{"prompt": "Once", "max_tokens": 24, "temperature": 0} | kwargs)


def text_of(answer):
  return answer.choices[0].message.content


def test_the_model_is_listed(client):
  assert [model.id for model in client.models.list()] == ["dummy"]


def test_a_stream_is_the_answer(client):
  whole = chat(client, seed=3)
  chunks = list(chat(client, seed=3, stream=True, stream_options={"include_usage": True}))
  assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text_of(whole)
  assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
  assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
  assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
  assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == len(TOKENIZER.chat(HELLO))


def test_usage_tells_drafts_by_their_fate(client):
  usage = complete(client, max_tokens=120, extra_body={"ignore_eos": True}).usage
  assert usage.completion_tokens == 120 and usage.total_tokens == usage.prompt_tokens + 120
  details = usage.completion_tokens_details
  assert 0 < details.accepted_prediction_tokens < 120 and details.rejected_prediction_tokens >= 0


def test_a_prompt_that_was_seen_is_cached(client):
  prompt = "A prompt that is long enough to be kept for others that begin alike. " * 2
  first, again = (complete(client, prompt=prompt, max_tokens=4).usage for _ in range(2))
  assert first.prompt_tokens == again.prompt_tokens == len(prompt)
  assert again.prompt_tokens_details.cached_tokens > first.prompt_tokens_details.cached_tokens


def test_seeds(client):
  first, again, other = (text_of(chat(client, seed=seed)) for seed in (5, 5, 6))
  assert first == again != other


def test_a_stop_string(client):
  text = complete(client).choices[0].text
  stop = text[8:10]
  answer = complete(client, stop=[stop, "never said"])
  assert answer.choices[0].text == text[:text.index(stop)] and answer.choices[0].finish_reason == "stop"
  chunks = complete(client, stop=stop, stream=True)
  assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_logprobs(client):
  answer = chat(client, logprobs=True, top_logprobs=3, temperature=0)
  content = answer.choices[0].logprobs.content
  spelt = b"".join(bytes(entry.bytes) for entry in content).removesuffix(b"<eos>")
  assert spelt.decode("utf-8", "replace") == text_of(answer) and len(content) == answer.usage.completion_tokens
  for entry in content:
    values = [other.logprob for other in entry.top_logprobs]
    assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] == entry.logprob < 0
  chunks = chat(client, logprobs=True, top_logprobs=3, temperature=0, stream=True)
  streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
  assert [entry.token for entry in streamed] == [entry.token for entry in content]
  older = complete(client, logprobs=2, max_tokens=6).choices[0]
  assert len(older.logprobs.tokens) == 6 and all(len(top) >= 2 for top in older.logprobs.top_logprobs)


def test_a_schema(client):
  pytest.importorskip("llguidance")
  form = {"type": "json_schema", "json_schema": {"name": "choice", "schema": SCHEMA, "strict": True}}
  answer = chat(client, response_format=form, max_tokens=100, seed=1)
  found = json.loads(text_of(answer))
  assert set(found) == {"kind", "sure"} and found["kind"] in ("left", "right") and isinstance(found["sure"], bool)
  assert answer.choices[0].finish_reason == "stop"
  chosen = complete(client, extra_body={"guided_choice": ["yes", "no"]})
  assert chosen.choices[0].text in ("yes", "no")
  with pytest.raises(openai.BadRequestError, match="regex grammar"):
    complete(client, extra_body={"guided_regex": "(?=a)"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call(client, choice):
  pytest.importorskip("llguidance")
  options = dict(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=100, seed=2)
  choice = chat(client, **options).choices[0]
  called, = choice.message.tool_calls
  assert choice.finish_reason == "tool_calls" and choice.message.content is None
  assert called.function.name == "weather" and json.loads(called.function.arguments)["city"] in ("Ulm", "Rom")
  *_, last, end = chat(client, **options, stream=True)
  streamed, = last.choices[0].delta.tool_calls
  assert streamed.function.arguments == called.function.arguments and end.choices[0].finish_reason == "tool_calls"
  # What was called goes back into the conversation, as the client has it.
  history = [*HELLO, choice.message, {"role": "tool", "tool_call_id": called.id, "content": "dry"}]
  assert chat(client, messages=history).usage.prompt_tokens > 100


@pytest.mark.parametrize("fields, param", [
    ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"), ({"n": 2}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"), ({"extra_body": {"beams": 2}}, "beams"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x")])
def test_bad_parameters(client, fields, param):
  with pytest.raises(openai.BadRequestError) as error:
    chat(client, **fields)
  assert error.value.param == param and param.split(".")[0] in str(error.value)


def test_what_the_engine_refuses(client):
  for fields in ({"logit_bias": {"500": 1}}, {"prompt": [500]}, {"extra_body": {"min_tokens": 30}}):
    with pytest.raises(openai.BadRequestError):
      complete(client, **fields)
  with pytest.raises(openai.NotFoundError):
    client.completions.create(model="x", prompt="a")


def test_neighbours_change_nothing(client, server):
  prompts = ["Once", "Twice upon", "Three", "Four times as", "Five", "Six"]
  ask = lambda ask, index: ask(**MODEL, prompt=prompts[index], max_tokens=20 + index, seed=index, temperature=0.8)
  alone = [ask(client.completions.create, index).choices[0].text for index in range(len(prompts))]

  async def together():
    async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key="-", max_retries=0, timeout=120) as several:
      return await asyncio.gather(*(ask(several.completions.create, index) for index in range(len(prompts))))
  assert [answer.choices[0].text for answer in asyncio.run(together())] == alone


def test_a_reader_that_leaves_frees_its_row(client, server):
  before = metrics(server)["vllm:request_success_total", "cancelled"]
  for _ in range(6):  # more than there are rows
    with chat(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True}) as stream:
      next(iter(stream))
  end = time.monotonic() + 60
  while metrics(server)["vllm:num_requests_running",] and time.monotonic() < end:
    time.sleep(0.02)
  found = metrics(server)
  assert found["vllm:num_requests_running",] == found["vllm:num_requests_waiting",] == 0
  assert found["vllm:request_success_total", "cancelled"] > before
  assert len(text_of(chat(client))) > 0


def test_the_counters_are_what_was_used(client, server):
  before = metrics(server)
  usages = [complete(client, prompt=f"{index} times", seed=index, temperature=0.7, max_tokens=40).usage
            for index in range(3)]
  after = metrics(server)
  grown = lambda name, *labels: after.get((name, *labels), 0) - before.get((name, *labels), 0)
  assert grown("vllm:generation_tokens_total") == sum(usage.completion_tokens for usage in usages)
  assert grown("vllm:prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
  ends = grown("vllm:request_success_total", "stop") + grown("vllm:request_success_total", "length")
  assert ends == grown("vllm:e2e_request_latency_seconds_count") == len(usages)
  accepted = sum(usage.completion_tokens_details.accepted_prediction_tokens for usage in usages)
  rejected = sum(usage.completion_tokens_details.rejected_prediction_tokens for usage in usages)
  assert grown("vllm:spec_decode_num_accepted_tokens_total") == accepted
  assert grown("vllm:spec_decode_num_draft_tokens_total") == accepted + rejected
  places = [grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place)) for place in range(3)]
  assert sum(places) == accepted and places == sorted(places, reverse=True)
  assert places[0] <= grown("vllm:spec_decode_num_drafts_total")
