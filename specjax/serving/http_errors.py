"""Errors over HTTP, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Nothing of the inside is in them; what was not foreseen is logged.
"""
import hmac
import json
import logging

from aiohttp import web

from specjax.serving.openai_fields import Refused

_LOG = logging.getLogger(__name__)
_SECONDS_TO_RETRY = "1"
_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def dump(value) -> bytes:
  """JSON in ASCII."""
  return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def json_response(value, status: int = 200, headers: dict | None = None) -> web.Response:
  """A response that is JSON."""
  return web.Response(body=dump(value), status=status, headers=headers, content_type="application/json")


def of(error: Exception) -> tuple[int, dict]:
  """(status, OpenAI's error object) of an exception; one that was not foreseen is logged."""
  if isinstance(error, Refused):
    return error.status, _error(str(error), error.status, error.param, error.code)
  if isinstance(error, web.HTTPException):
    return error.status, _error(f"{error.status}: {error.reason}", error.status)
  _LOG.error("a request failed", exc_info=error)
  return 500, _error("the server failed to answer; its log says why", 500)


def _error(message, status, param=None, code=None):
  return {"error": {"message": message, "type": _KINDS.get(status, "invalid_request_error"), "param": param,
                    "code": code}}


@web.middleware
async def words(request, handler):
  """Answers with an error object where the handler raises."""
  try:
    return await handler(request)
  except ConnectionError:  # nobody is there to be told
    raise
  except Exception as error:
    status, body = of(error)
    headers = {"Retry-After": _SECONDS_TO_RETRY} if status in (429, 503) else {}
    if isinstance(error, web.HTTPMethodNotAllowed):
      headers["Allow"] = error.headers["Allow"]
    response = json_response(body, status, headers)
    if status in (408, 413):
      response.force_close()  # the rest of the body is still on its way
    return response


def authorized(api_key: str | None):
  """A middleware that asks for the key on everything below /v1, if there is one."""
  wanted = None if api_key is None else f"Bearer {api_key}".encode()

  @web.middleware
  async def check(request, handler):
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if wanted is not None and request.path.startswith("/v1/") and not hmac.compare_digest(given, wanted):
      raise Refused("the header Authorization does not give the server's API key", status=401, code="invalid_api_key")
    return await handler(request)
  return check
