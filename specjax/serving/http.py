"""OpenAI's HTTP interface to a service, on aiohttp: /v1/completions, /v1/chat/completions, /v1/models, and /health,
/metrics and /version beside them.

Every request is a task of its own, so a reader that is slow or gone holds up nobody: what it does not read waits in
its connection's buffer, then its task waits, and when that takes too long, or the connection is lost, its request is
cancelled. Its updates meanwhile wait in the service, which holds no more than the request's budget of tokens.
"""
import asyncio
from collections.abc import AsyncIterator, Callable
import contextlib
import dataclasses
import logging
import signal
import time
import uuid

from aiohttp import web

import specjax
from specjax.serving import http_errors
from specjax.serving import openai_answers
from specjax.serving import openai_fields
from specjax.serving import openai_protocol
from specjax.serving import prometheus
from specjax.serving import requests
from specjax.serving.openai_fields import Refused

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one client may ask for, and for how long it may keep others waiting. All are positive.

  Attributes:
    body_bytes: of a request's body.
    prompt_tokens, max_tokens: of a prompt and of an answer; None: what the engine's context holds.
    concurrent: requests that are read, wait or run at once; more are told to come again.
    read_seconds: for a body to arrive.
    write_seconds: for what was written to be taken by a reader that has fallen behind.
  """
  body_bytes: int = 4 << 20
  prompt_tokens: int | None = None
  max_tokens: int | None = None
  concurrent: int = 1024
  read_seconds: float = 30.0
  write_seconds: float = 30.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None and not value > 0:
        raise ValueError(f"{field.name}={value}: it must be greater than 0")


def application(service, *, model_name: str, limits: Limits = Limits(), api_key: str | None = None) -> web.Application:
  """The interface to a service that was started; serve it with `listening`.

  Args:
    service: a `service.Service`.
    model_name: under which requests ask for the model.
    limits: see there.
    api_key: what the header "Authorization: Bearer ..." of everything below /v1 must give; None: nothing.

  Raises:
    ValueError: an engine without a tokenizer, or no package prometheus_client.
  """
  api = _Api(service, model_name, limits)
  middlewares = [http_errors.words, http_errors.authorized(api_key)]
  app = web.Application(middlewares=middlewares, client_max_size=limits.body_bytes)
  app.add_routes([
      web.post("/v1/completions", api.completion), web.post("/v1/chat/completions", api.chat),
      web.get("/v1/models", api.models), web.get("/v1/models/{name:.+}", api.model),
      web.get("/health", api.health), web.get("/metrics", api.metrics), web.get("/version", api.version)])
  return app


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str = "127.0.0.1", port: int = 8000,
                    patience: float = 5.0) -> AsyncIterator[str]:
  """Serves an application, and yields its URL. At the end nothing new is taken, and what runs has `patience` seconds.

  Args:
    app: of `application`. host, port: to listen at; port 0 takes a free one.

  Raises:
    OSError: the address is taken, or is not this machine's.
  """
  # A lost connection cancels its task, and that the request.
  runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=patience, access_log=None)
  await runner.setup()
  try:
    try:
      await web.TCPSite(runner, host, port).start()
    except OSError as error:
      raise OSError(f"cannot listen at {host} port {port}: {error}") from error
    name, port = runner.addresses[0][:2]
    yield f"http://{f'[{name}]' if ':' in name else name}:{port}"
  finally:
    await runner.cleanup()


async def run(service, app: web.Application, host: str, port: int, ready: Callable[[str], None]) -> None:
  """Starts a service and serves its application until SIGINT or SIGTERM; calls `ready` with the URL once it listens.

  For the main thread. Raises as `listening`.
  """
  ended, loop = asyncio.Event(), asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, ended.set)
  service.start()
  try:
    async with listening(app, host, port) as url:
      ready(url)
      await ended.wait()
  finally:
    await service.close()


class _Gone(Exception):
  """The client reads no more."""


class _Api:
  """The handlers."""

  def __init__(self, service, model_name, limits):
    engine = service.engine
    if engine.tokenizer is None:
      raise ValueError("this interface is about text: give the engine a tokenizer")
    self._service, self._limits, self._active, self._created = service, limits, 0, int(time.time())
    self._model = openai_protocol.Model(
        model_name, engine.tokenizer, tuple(engine.target.eos_ids), max_context=engine.config.max_tokens,
        max_prompt=limits.prompt_tokens, max_new=limits.max_tokens)
    self._prometheus = prometheus.Exposition(engine.stats, model_name)

  async def completion(self, request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await self._answer(request, openai_protocol.completion, openai_answers.Completion)

  async def chat(self, request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await self._answer(request, openai_protocol.chat, openai_answers.Chat)

  async def models(self, _) -> web.Response:
    """GET /v1/models."""
    return http_errors.json_response({"object": "list", "data": [self._card()]})

  async def model(self, request: web.Request) -> web.Response:
    """GET /v1/models/{name}."""
    name = request.match_info["name"]
    if name != self._model.name:
      raise openai_protocol.unknown_model(name, self._model)
    return http_errors.json_response(self._card())

  async def health(self, _) -> web.Response:
    """GET /health: 503 once the engine does not run any more."""
    if self._service.problem is not None:
      return web.Response(status=503, text=f"the engine does not run any more: {self._service.problem}")
    return web.Response()

  async def metrics(self, _) -> web.Response:
    """GET /metrics, for Prometheus."""
    return web.Response(body=self._prometheus.text(), headers={"Content-Type": self._prometheus.content_type})

  async def version(self, _) -> web.Response:
    """GET /version."""
    return http_errors.json_response({"version": specjax.__version__})

  def _card(self):
    return {"id": self._model.name, "object": "model", "created": self._created, "owned_by": "specjax",
            "max_model_len": self._model.max_context}

  async def _answer(self, request, read: Callable, kind: type[openai_answers.Answer]):
    with self._place():
      body = await self._body(request)
      # Reading a long text takes a while, in which the others go on.
      call = await asyncio.to_thread(lambda: read(openai_fields.parse(body), self._model))
      answer = kind(call, self._model.tokenizer, ident=uuid.uuid4().hex, created=int(time.time()))
      async with contextlib.aclosing(self._service.generate(call.request)) as updates:
        first = await _first(updates)
        write = self._stream if call.stream else self._whole
        return await write(request, answer, first, updates)

  @contextlib.contextmanager
  def _place(self):
    """Counts a request while it is here."""
    if self._active >= self._limits.concurrent:
      raise Refused(f"{self._active} requests are being served, as many as may be at once; try again later",
                    status=429, code="rate_limit_exceeded")
    self._active += 1
    try:
      yield
    finally:
      self._active -= 1

  async def _body(self, request):
    try:
      async with asyncio.timeout(self._limits.read_seconds):
        return await request.read()
    except TimeoutError as error:
      raise Refused(f"the body did not arrive within {self._limits.read_seconds:g} seconds", status=408) from error
    except web.HTTPRequestEntityTooLarge as error:
      raise Refused(f"the body is larger than {self._limits.body_bytes} bytes; send a shorter prompt", status=413,
                    code="request_too_large") from error
    except web.RequestPayloadError as error:
      raise Refused(f"the body is not what its headers say: {' '.join(str(error).split())}") from error

  async def _whole(self, request, answer, first, updates):
    update = first
    answer.push(update)
    while update.outcome is None:
      update = await _next(updates)
      answer.push(update)
    response = http_errors.json_response(answer.whole())
    try:
      await self._taken(response.prepare(request))
      await self._taken(response.write_eof())
    except _Gone as gone:
      _abort(request, gone)
    return response

  async def _stream(self, request, answer, first, updates):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache",
                                           "X-Accel-Buffering": "no"})
    try:
      await self._taken(response.prepare(request))
      await self._taken(response.write(_events(answer.opening() + answer.push(first))))
      try:
        update = first
        while update.outcome is None:
          update = await _next(updates)
          if chunks := answer.push(update):
            await self._taken(response.write(_events(chunks)))
        end = b"data: [DONE]\n\n"
      except _Gone:
        raise
      except Exception as error:  # the status is sent already: what went wrong is the last event
        end = _events([http_errors.of(error)[1]])
      await self._taken(response.write(end))
      await self._taken(response.write_eof())
    except _Gone as gone:
      _abort(request, gone)
    return response

  async def _taken(self, write):
    """Waits for a write; raises _Gone for a reader that is too slow or not there."""
    try:
      async with asyncio.timeout(self._limits.write_seconds):
        await write
    except TimeoutError as error:
      raise _Gone(f"nothing was read for {self._limits.write_seconds:g} seconds") from error
    except ConnectionError as error:
      raise _Gone("the connection is lost") from error


async def _first(updates):
  """The first update; what the engine finds wrong with a request it says here."""
  try:
    return await _next(updates)
  except requests.QueueFull as error:
    raise Refused(f"the queue is full: {error}", status=503, code="overloaded") from error
  except Refused:
    raise
  except ValueError as error:
    raise Refused(str(error)) from error


async def _next(updates):
  """The next update; raises Refused for a request that was cancelled by none of its client's doing."""
  try:
    update = await anext(updates)
  except StopAsyncIteration as error:
    raise RuntimeError("the service ended a request without an outcome") from error
  if update.outcome is not None and update.outcome.finish_reason == requests.CANCELLED:
    raise Refused("the server is going down and has cancelled the request", status=503, code="shutting_down")
  return update


def _abort(request, gone):
  _LOG.info("%s gave up %s: %s", request.remote, request.path, gone)
  if request.transport is not None:
    request.transport.abort()


def _events(chunks):
  """Server-sent events. They are ASCII, so that no reader can split a character or break a line within one."""
  return b"".join(b"data: " + http_errors.dump(chunk) + b"\n\n" for chunk in chunks)
