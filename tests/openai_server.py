"""A server of OpenAI's /v1/completions without a model, which says what a test tells it to say. Needs aiohttp."""
import asyncio
import contextlib
import json
import threading

from aiohttp import web

METRICS = """# HELP vllm:spec_decode_num_drafts_total Drafts.
vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}.0
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="1"}} 0.0
vllm:spec_decode_num_drafts_created{{model_name="m"}} 1.7e+09
vllm:generation_tokens_total{{model_name="m"}} 12.0
"""


class Server:
  """Answers every completion with two updates a request and its usage; `seen` are the bodies."""

  def __init__(self, *, updates=("He", "llö"), metrics=True, tail=None, error=None, chunk=None, usage=True):
    self.seen, self.most, self._now = [], 0, 0
    self._updates, self._metrics, self._tail, self._error, self._usage = updates, metrics, tail, error, usage
    self._chunk = chunk

  async def models(self, request):
    del request
    return web.json_response({"data": [{"id": "the-model"}, {"id": "other"}]})

  async def metrics(self, request):
    del request
    if not self._metrics:
      raise web.HTTPNotFound
    n = len(self.seen) + 5
    return web.Response(text=METRICS.format(drafts=2 * n, drafted=8 * n, accepted=3 * n))

  async def completions(self, request):
    body = await request.json()
    self.seen.append(body)
    if self._error:
      return web.json_response({"error": {"message": self._error}}, status=429)
    self._now += 1
    self.most = max(self.most, self._now)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    try:
      for i, text in enumerate(self._updates):
        await asyncio.sleep(0.02)
        last = i + 1 == len(self._updates)
        await self._send(response, {"choices": [{"text": text, "finish_reason": "length" if last else None}]})
      if self._usage:
        await self._send(response, self._tail or {"choices": [], "usage": {
            "prompt_tokens": 3, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}})
      await response.write(b": a comment\n\ndata: [DONE]\n\n")
    finally:
      self._now -= 1
    return response

  async def _send(self, response, event):
    data = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"
    size = self._chunk or len(data)
    for i in range(0, len(data), size):  # cut anywhere, characters too
      await response.write(data[i:i + size])
      if self._chunk:
        await asyncio.sleep(0.001)


  @contextlib.asynccontextmanager
  async def listening(self):
    """Listens at a free port, and yields the URL."""
    app = web.Application()
    app.router.add_get("/v1/models", self.models)
    app.router.add_get("/metrics", self.metrics)
    app.router.add_post("/v1/completions", self.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
      await web.TCPSite(runner, "127.0.0.1", 0).start()
      yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
      await runner.cleanup()


@contextlib.contextmanager
def serving(server):
  """The URL of a server, which has a thread of its own: anything with `listening`, as `Server` has it."""
  ready, found, loop, done = threading.Event(), {}, asyncio.new_event_loop(), asyncio.Event()

  async def serve():
    async with server.listening() as found["url"]:
      ready.set()
      await done.wait()

  def work():
    try:
      loop.run_until_complete(serve())
    finally:
      loop.close()
      ready.set()

  thread = threading.Thread(target=work)
  thread.start()
  try:
    ready.wait()
    yield found["url"]
  finally:
    loop.call_soon_threadsafe(done.set)
    thread.join()
