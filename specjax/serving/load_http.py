"""Puts a load on a server that speaks OpenAI's /v1/completions, and keeps what its client sees: `load.run` over HTTP.

A prompt is sent as token ids, so that every server reads the same. Times are the client's: of the first byte of an
update, the network and the server's work on the answer included. A server tells how many tokens there were in all and
not how many an update had, so each update counts for an equal share of them; what drafting brought is read from its
Prometheus counters, under vLLM's names, before and after, if it has them.

The client needs the package aiohttp. It runs in one thread: keep it on other cores than the server.
"""
import asyncio
import codecs
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Sequence

import numpy as np

from specjax import sampling_params
from specjax.serving import arrivals as arrivals_lib
from specjax.serving import load
from specjax.serving import requests as requests_lib

_DEFAULTS = sampling_params.SamplingParams()
# By field of `SamplingParams`, the field of a body; sent where it is not the default, so that any server understands.
_FIELDS = {"top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed", "repetition_penalty":
           "repetition_penalty", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
           "min_new_tokens": "min_tokens", "allowed_ids": "allowed_token_ids"}
_UNSENT = ("stop_sequences", "logprobs", "grammar")
_COUNTER = re.compile(r"^vllm:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|num_accepted_tokens_per_pos)"
                      r"(?:_total)?(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


def run(base_url: str, requests: Sequence[requests_lib.Request], arrivals: arrivals_lib.Arrivals, *,
        model: str | None = None, cancellations: load.Cancellations | None = None, timeout: float = 600.0,
        report: Callable[[load.Served], None] = lambda served: None) -> load.Run:
  """Sends all requests and waits for the last answer.

  Args:
    base_url: of the server, such as http://localhost:8000; with or without /v1.
    requests, arrivals, report: as of `load.run`.
    model: the name to ask for; the first one that the server lists by default.
    cancellations: which connections are closed, after so many updates.
    timeout: seconds after which an answer is given up as failed.

  Returns:
    As `load.run`, without turns. An outcome's `admitted` is None, its `token_ids` are empty, and its `speculation` is
    zero: `Run.counts` has the drafts of all requests, if the server tells. A request that the server did not answer
    has its reason as `error`.

  Raises:
    ValueError: a request that cannot be sent as it is (the field is named), too few arrivals, a server that is not
      there or lists no model, or no package aiohttp.
  """
  bodies = [body(request) for request in requests]
  dues = load.due_times(arrivals, len(requests))
  places = cancellations.places(requests) if cancellations else [None] * len(requests)
  client = _Client(base_url, model, timeout)
  return asyncio.run(client.run(requests, bodies, dues, places, arrivals.concurrency, report))


def body(request: requests_lib.Request) -> dict:
  """What /v1/completions is sent for a request, the model's name apart.

  Raises:
    ValueError: names the field of the request that cannot be sent.
  """
  for name in _UNSENT:
    if getattr(request, name) not in (None, ()):
      raise ValueError(f"{name}={getattr(request, name)!r}: it cannot be sent to a server in a load test; leave it out")
  params = request.params
  if params.banned_ids is not None:
    raise ValueError(f"banned_ids={params.banned_ids!r}: a server takes a logit_bias of -100 instead; give that")
  found = {"prompt": np.asarray(request.prompt).tolist(), "max_tokens": request.max_new_tokens, "stream": True,
           "stream_options": {"include_usage": True}, "temperature": params.temperature}
  for name, sent in _FIELDS.items():
    if getattr(params, name) != getattr(_DEFAULTS, name):
      found[sent] = getattr(params, name)
  if params.logit_bias:
    found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
  if request.stop:
    found["stop"] = list(request.stop)
  if request.eos_ids is not None:
    found |= {"ignore_eos": True} | ({"stop_token_ids": list(request.eos_ids)} if request.eos_ids else {})
  if request.deadline is not None:
    found["deadline"] = request.deadline
  return found if request.speculate else found | {"speculate": False}


def counters(text: str) -> requests_lib.Speculation | None:
  """The counters of drafts in a Prometheus text, summed over labels; None if there are none. Steps are not told."""
  found, places = {}, {}
  for name, labels, value in _COUNTER.findall(text):
    if name == "num_accepted_tokens_per_pos":
      place = int(re.search(r'position="(\d+)"', labels)[1])
      places[place] = places.get(place, 0) + int(float(value))
    else:
      found[name] = found.get(name, 0) + int(float(value))
  if not found:
    return None
  get = lambda name: found.get(name, 0)
  return requests_lib.Speculation(
      steps=0, drafts=get("num_drafts"), drafted_tokens=get("num_draft_tokens"),
      accepted_tokens=get("num_accepted_tokens"),
      accepted_per_position=tuple(places.get(i, 0) for i in range(max(places, default=-1) + 1)))


class _Client:
  """One server."""

  def __init__(self, base_url, model, timeout):
    try:
      import aiohttp  # the one use of the package
    except ImportError as error:
      raise ValueError(f"a load over HTTP needs the package aiohttp ({error}); install it with: "
                       "pip install 'specjax[serve]'") from error
    self._http = aiohttp
    self._url, self._model, self._timeout = base_url.rstrip("/").removesuffix("/v1"), model, timeout
    key = os.environ.get("OPENAI_API_KEY")
    self._headers = {"Authorization": f"Bearer {key}"} if key else {}

  async def run(self, requests, bodies, dues, places, concurrency, report):
    """See the module's `run`."""
    timeout = self._http.ClientTimeout(total=self._timeout)
    connector = self._http.TCPConnector(limit=0)  # the arrivals alone decide how many there are at a time
    async with self._http.ClientSession(headers=self._headers, timeout=timeout, connector=connector) as session:
      model = self._model or await self._first_model(session)
      before = await self._counters(session)
      begin = time.perf_counter()
      room = asyncio.Semaphore(concurrency or len(requests))
      tasks = []
      for index, due in enumerate(dues):
        await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        await room.acquire()
        arrived = begin + due if concurrency is None else time.perf_counter()
        task = asyncio.create_task(self._ask(session, model, requests[index], bodies[index], index, arrived,
                                             places[index]))
        task.add_done_callback(lambda task: (room.release(), report(task.result())))
        tasks.append(task)
      served = await asyncio.gather(*tasks)
      end = max([begin, *(one.outcome.finished for one in served if one.outcome)])
      counts = _difference(before, await self._counters(session))
    return load.Run(tuple(served), begin, end, counts=counts)

  async def _first_model(self, session):
    where = f"{self._url}/v1/models"
    try:
      async with session.get(where) as response:
        response.raise_for_status()
        return (await response.json())["data"][0]["id"]
    except (self._http.ClientError, asyncio.TimeoutError, LookupError, ValueError) as error:
      raise ValueError(f"{where} names no model ({error or type(error).__name__}); is the server running there?"
                       ) from error

  async def _counters(self, session):
    try:
      async with session.get(f"{self._url}/metrics") as response:
        return counters(await response.text()) if response.status == 200 else None
    except (self._http.ClientError, asyncio.TimeoutError):
      return None

  async def _ask(self, session, model, request, body_, index, arrived, place):
    answer = _Answer()
    try:
      async with session.post(f"{self._url}/v1/completions", json={"model": model} | body_) as response:
        if response.status != 200:
          raise _Refused(f"{response.status}: {(await response.text())[:500]}")
        await answer.read(response.content.iter_any(), place)
      outcome, error = answer.outcome(index, request, arrived), None
    except (self._http.ClientError, asyncio.TimeoutError, _Refused, ValueError, LookupError) as problem:
      outcome, error = None, f"{type(problem).__name__}: {problem}"
    return load.Served(index, request.category, arrived, outcome, error)


class _Refused(Exception):
  """The server said no, or something that is no answer."""


@dataclasses.dataclass
class _Answer:
  """An answer as it comes in."""
  text: str = ""
  times: list = dataclasses.field(default_factory=list)  # of the updates
  reason: str | None = None
  usage: dict | None = None
  finished: float | None = None

  async def read(self, chunks, place):
    """Reads events to the end of the answer, or up to the update `place` if it is given up there."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    if place == 0:
      return self._give_up()
    async for chunk in chunks:
      now = time.perf_counter()
      *events, rest = (rest + decoder.decode(chunk)).replace("\r\n", "\n").split("\n\n")
      for event in events:
        data = "\n".join(line[5:].strip() for line in event.split("\n") if line.startswith("data:"))
        if data and data != "[DONE]":
          self._take(json.loads(data), now)
        if place is not None and len(self.times) >= place and not self.reason:
          return self._give_up()
    return None

  def _take(self, event, now):
    if "error" in event:
      raise _Refused(str(event["error"]))
    self.usage = event.get("usage") or self.usage
    for choice in event.get("choices") or ():
      text, self.reason, self.finished = choice.get("text") or "", choice.get("finish_reason"), now
      self.text += text
      if text or not self.reason:  # the one that only says why it ended has no token
        self.times.append(now)

  def _give_up(self):
    self.reason, self.finished = requests_lib.CANCELLED, time.perf_counter()

  def outcome(self, index, request, arrived):
    """What the client knows of it."""
    if self.reason not in requests_lib.FINISH_REASONS:
      raise _Refused(f"the answer ended with finish_reason {self.reason!r}")
    if self.usage is None and self.reason != requests_lib.CANCELLED:
      raise _Refused("the answer ended without `usage`, which was asked for by stream_options.include_usage")
    tokens = self.usage["completion_tokens"] if self.usage else len(self.times)  # given up: one an update, at least
    times = self.times or [self.finished]
    shares = [tokens * (i + 1) // len(times) - tokens * i // len(times) for i in range(len(times))]
    details = (self.usage or {}).get("prompt_tokens_details") or {}
    return requests_lib.Outcome(
        id=index, category=request.category, token_ids=[], text=self.text, finish_reason=self.reason,
        prompt_tokens=len(request.prompt), cached_tokens=details.get("cached_tokens") or 0,
        speculation=requests_lib.Speculation(0, 0, 0, 0, ()), submitted=arrived, admitted=None, finished=self.finished,
        arrivals=tuple((moment, share) for moment, share in zip(times, shares) if share))


def _difference(before, after):
  if before is None or after is None:
    return None
  places = [count - (before.accepted_per_position[i] if i < len(before.accepted_per_position) else 0)
            for i, count in enumerate(after.accepted_per_position)]
  minus = lambda name: getattr(after, name) - getattr(before, name)
  return requests_lib.Speculation(0, minus("drafts"), minus("drafted_tokens"), minus("accepted_tokens"), tuple(places))
