"""The HTTP interface on its own: what is refused and how, and that no reader holds up another. Nothing is decoded."""
import asyncio
import contextlib
import gzip
import json
import logging
import socket

import pytest

from fake_service import FakeService
from specjax.serving import requests

aiohttp, openai = pytest.importorskip("aiohttp"), pytest.importorskip("openai")
pytest.importorskip("prometheus_client")
http = pytest.importorskip("specjax.serving.http")

BODY = {"model": "m", "prompt": "hello", "max_tokens": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@contextlib.asynccontextmanager
async def served(service, **kwargs):
  """(a client's session, the URL) of a service; `kwargs` are limits and the API key."""
  key = kwargs.pop("api_key", None)
  app = http.application(service, model_name="m", limits=http.Limits(**kwargs), api_key=key)
  async with http.listening(app, port=0, patience=0.2) as url, aiohttp.ClientSession(url) as session:
    yield session, url


async def post(session, body=None, path="/v1/completions", **kwargs):
  """(status, JSON, headers) of an answer."""
  async with session.post(path, **({"json": BODY if body is None else body} | kwargs)) as response:
    return response.status, await response.json(), response.headers


async def until(condition):
  """Waits for something that happens soon."""
  async with asyncio.timeout(20):
    while not condition():
      await asyncio.sleep(0.005)


def events(text):
  return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def test_streams_are_ascii_events_and_lose_no_letter():
  said = ("é", "日本\u2028", " 🙂", "")

  async def run():
    async with served(FakeService(*said)) as (session, _):
      async with session.post("/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        raw = await response.read()
      assert raw.isascii()
      *chunks, done = events(raw.decode())
      assert done == "[DONE]"
      assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "".join(said)
      assert (await post(session))[1]["choices"][0]["text"] == "".join(said)
  asyncio.run(run())


@pytest.mark.parametrize("body, status, said, param", [
    (b"{", 400, "not JSON", None), (b"[1]", 400, "a JSON object", None),
    (json.dumps(BODY | {"model": "x"}).encode(), 404, "'x' does not exist", "model"),
    (json.dumps(BODY | {"temperature": 3}).encode(), 400, "temperature is 3; it must be", "temperature"),
    (json.dumps(BODY | {"n": 2}).encode(), 400, "one answer a request", "n"),
    (json.dumps(BODY | {"max_tokens": 10**6}).encode(), 400, "max_tokens is 1000000", "max_tokens"),
    (json.dumps(BODY | {"stop": "x" * 3000}).encode(), 413, "larger than 2000 bytes", None)])
def test_bad_bodies(body, status, said, param):
  async def run():
    service = FakeService("a")
    async with served(service, body_bytes=2000) as (session, _):
      found, answer, _ = await post(session, None, json=None, data=body)
      assert found == status and said in answer["error"]["message"] and not service.asked
      assert answer["error"]["param"] == param and answer["error"]["type"] == "invalid_request_error"
      assert (await post(session))[0] == 200
  asyncio.run(run())


def test_a_body_that_is_not_what_its_headers_say():
  async def run():
    async with served(FakeService("a")) as (session, _):
      headers = {"Content-Encoding": "gzip"}
      packed = gzip.compress(json.dumps(BODY).encode())
      assert (await post(session, None, json=None, data=packed, headers=headers))[0] == 200
      found, answer, _ = await post(session, None, json=None, data=b"no gzip", headers=headers)
      assert found == 400 and "not what its headers say" in answer["error"]["message"]
  asyncio.run(run())


def test_other_paths_and_methods():
  async def run():
    service = FakeService("a")
    async with served(service) as (session, _):
      for path in ("/v1/embeddings", "/nothing"):
        found, answer, _ = await post(session, path=path)
        assert found == 404 and answer["error"]["message"] == "404: Not Found"
      async with session.get("/v1/completions") as response:
        assert response.status == 405 and response.headers["Allow"] == "POST"
        assert "error" in await response.json()
      async with session.get("/health") as response:
        assert response.status == 200
      service.problem = "OSError: out of memory"
      async with session.get("/health") as response:
        assert response.status == 503 and "out of memory" in await response.text()
      async with session.get("/version") as response:
        assert (await response.json())["version"]
  asyncio.run(run())


def test_models():
  async def run():
    async with served(FakeService("a")) as (_, url):
      async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == ["m"]
        assert (await client.models.retrieve("m")).owned_by == "specjax"
        with pytest.raises(openai.NotFoundError, match="'x' does not exist"):
          await client.models.retrieve("x")
  asyncio.run(run())


def test_a_key():
  async def run():
    async with served(FakeService("a"), api_key="sécret") as (session, _):
      assert (await post(session))[1]["error"]["code"] == "invalid_api_key"
      for given, status in (("Bearer sécret", 200), ("Bearer secret", 401), ("sécret", 401), ("Bearer sécre", 401)):
        assert (await post(session, headers={"Authorization": given}))[0] == status
      async with session.get("/health") as response:
        assert response.status == 200
  asyncio.run(run())


@pytest.mark.parametrize("error, status, said", [
    (requests.QueueFull("8 wait"), 503, "the queue is full: 8 wait"), (ValueError("prompt: id 9"), 400, "prompt: id 9"),
    (RuntimeError("secret"), 500, "its log says why"), (KeyError("secret"), 500, "its log says why")])
def test_what_the_service_raises(error, status, said, caplog):
  async def run():
    async with served(FakeService(error)) as (session, _):
      for more in ({}, {"stream": True}):
        found, answer, headers = await post(session, BODY | more)
        assert found == status and said in answer["error"]["message"] and "secret" not in str(answer)
        assert ("Retry-After" in headers) == (status == 503)
  with caplog.at_level(logging.ERROR):
    asyncio.run(run())
  assert ("secret" in caplog.text) == (status == 500)


def test_a_failure_behind_the_first_words_is_the_last_event(caplog):
  async def run():
    async with served(FakeService("a", RuntimeError("secret"))) as (session, url):
      assert (await post(session))[0] == 500
      async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        seen = []
        with pytest.raises(openai.APIError, match="its log says why"):
          async for chunk in await client.completions.create(**BODY, stream=True):
            seen.append(chunk.choices[0].text)
        assert seen == ["a"]
  with caplog.at_level(logging.CRITICAL):
    asyncio.run(run())


def test_a_request_that_the_server_cancels():
  async def run():
    async with served(FakeService("a", reason="cancelled")) as (session, _):
      found, answer, _ = await post(session)
      assert found == 503 and answer["error"]["code"] == "shutting_down"
      async with session.post("/v1/completions", json=BODY | {"stream": True}) as response:
        assert json.loads(events(await response.text())[-1])["error"]["code"] == "shutting_down"
  asyncio.run(run())


def test_too_many_at_once():
  async def run():
    go = asyncio.Event()
    service = FakeService(go, "a")
    async with served(service, concurrent=2) as (session, _):
      first = [asyncio.create_task(post(session)) for _ in range(2)]
      await until(lambda: service.active == 2)
      found, answer, headers = await post(session)
      assert found == 429 and headers["Retry-After"] and answer["error"]["type"] == "rate_limit_error"
      go.set()
      assert [status for status, _, _ in await asyncio.gather(*first)] == [200, 200]
      assert (await post(session))[0] == 200
  asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("said", [(), ("a",)])
def test_a_reader_that_leaves_is_cancelled(stream, said):
  """Before the first word and behind it, streamed or not."""
  async def run():
    service = FakeService(*said, asyncio.Event(), "never")
    async with served(service, concurrent=1) as (_, url):
      host, port = url.removeprefix("http://").split(":")
      reader, writer = await asyncio.open_connection(host, int(port))
      body = json.dumps(BODY | {"stream": stream}).encode()
      writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
      if stream and said:
        await reader.readuntil(b"data: ")
      await until(lambda: service.active == 1)
      assert service.ended == 0
      writer.transport.abort()
      await until(lambda: service.ended == 1)
      assert service.active == 0
      with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
  asyncio.run(run())


def test_a_slow_reader_holds_up_nobody_and_is_given_up(caplog):
  async def run():
    # More than the buffers of a loopback connection hold.
    service = FakeService(*["x" * 100_000] * 100, max_tokens=10**8)
    async with served(service, write_seconds=1.5) as (session, url):
      host, port = url.removeprefix("http://").split(":")
      with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, (host, int(port)))
        body = json.dumps(BODY | {"stream": True}).encode()
        await loop.sock_sendall(slow, b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" %
                                len(body) + body)
        await until(lambda: service.active == 1)
        async with session.get("/health") as response:  # while it stalls
          assert response.status == 200 and service.active == 1
        await until(lambda: service.ended == 1)
      # One that reads gets all of it.
      async with session.post("/v1/completions", json=BODY | {"stream": True}) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
  with caplog.at_level(logging.INFO, http.__name__):
    asyncio.run(run())
  assert caplog.text.count("nothing was read for 1.5 seconds") == 1


def test_a_slow_body_is_given_up():
  async def run():
    service = FakeService("a")
    async with served(service, read_seconds=0.2) as (_, url):
      host, port = url.removeprefix("http://").split(":")
      reader, writer = await asyncio.open_connection(host, int(port))
      writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
      assert (await reader.readline()).split()[1] == b"408" and not service.asked
      writer.close()
      await writer.wait_closed()
  asyncio.run(run())


def test_the_end_waits_a_little_and_then_cancels():
  async def run():
    service = FakeService("a", asyncio.Event())
    async with aiohttp.ClientSession() as session:
      async with http.listening(http.application(service, model_name="m"), port=0, patience=0.2) as url:
        task = asyncio.create_task(session.post(f"{url}/v1/completions", json=BODY))
        await until(lambda: service.active == 1)
      assert service.ended == 1
      with pytest.raises(aiohttp.ClientError):
        await task
  asyncio.run(run())


def test_limits_and_engines_that_make_no_sense():
  with pytest.raises(ValueError, match="write_seconds=0"):
    http.Limits(write_seconds=0)
  mute = FakeService()
  mute.engine.tokenizer = None
  with pytest.raises(ValueError, match="tokenizer"):
    http.application(mute, model_name="m")


def test_prompts_and_answers_have_limits():
  async def run():
    async with served(FakeService("a"), prompt_tokens=4, max_tokens=6) as (session, _):
      assert "it must have 1 to 4" in (await post(session))[1]["error"]["message"]
      assert "may be 6 at most" in (await post(session, BODY | {"prompt": "hi"}))[1]["error"]["message"]
      assert (await post(session, BODY | {"prompt": "hi", "max_tokens": 6}))[0] == 200
  asyncio.run(run())


def test_a_taken_port():
  async def run():
    with socket.socket() as taken:
      taken.bind(("127.0.0.1", 0))
      taken.listen()
      with pytest.raises(OSError, match=f"port {taken.getsockname()[1]}"):
        async with http.listening(http.application(FakeService(), model_name="m"), port=taken.getsockname()[1]):
          pass
  asyncio.run(run())
