"""A service without an engine: it says what a test tells it to say, when it is told to."""
import asyncio
import types

from specjax.serving import metrics
from specjax.serving import requests
import tiny_tokenizers

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TOKENIZER = tiny_tokenizers.byte_level([bytes([byte]) for byte in range(256)], ["<eos>"], eos="<eos>",
                                       chat_template=TEMPLATE)


class FakeService:
  """Says the texts of `script`, an update and a token each, then its end. An exception among them is raised, an event
  waited for.

  Attributes:
    asked: requests, in order. active: how many are being answered. ended: how many are no longer.
    problem: see `service.Service`.
  """

  def __init__(self, *script, reason="stop", max_tokens=100_000):
    self.engine = types.SimpleNamespace(
        target=types.SimpleNamespace(eos_ids=(256,)), tokenizer=TOKENIZER, stats=metrics.Stats(),
        config=types.SimpleNamespace(max_tokens=max_tokens, rows=4))
    self._script, self._reason = script, reason
    self.asked, self.active, self.ended, self.problem = [], 0, 0, None

  async def generate(self, request):
    """As `service.Service.generate`."""
    self.asked.append(request)
    self.active += 1
    try:
      ids = []
      for part in self._script:
        await asyncio.sleep(0)
        if isinstance(part, Exception):
          raise part
        if isinstance(part, asyncio.Event):
          await part.wait()
          continue
        ids.append(0)
        yield requests.Update(0, [0], [part], [False], None)
      yield requests.Update(0, [], [], [], None, self._outcome(ids, len(request.prompt)))
    finally:
      self.active -= 1
      self.ended += 1

  def _outcome(self, ids, prompt_tokens):
    return requests.Outcome(
        id=0, category="all", token_ids=ids, text="", finish_reason=self._reason,
        prompt_tokens=prompt_tokens, cached_tokens=0, speculation=requests.Speculation(1, 0, 0, 0, ()), submitted=0.0,
        admitted=0.0, finished=1.0, arrivals=((1.0, len(ids)),))
