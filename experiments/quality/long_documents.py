"""How well a cache is used, by length of the prompt.

- `prompt_tokens`.
- `tokens_per_slot`: tokens that the cache held at the end over its slots. Slots come in buckets, 256 times a power of
  two, and attention goes over all of them: below 1 it reads what is not there.
`pool` gives both, the time to the first token and a token's own time, by the power of two below the prompt's length.
"""
import collections

from experiments.workloads import Request
from specjax import starting


def judge(request: Request, text: str, *, prompt_tokens: int, output_tokens: int, max_context: int
          ) -> dict[str, float | bool | None]:
  """See the module. `max_context` is the target's; the request and the text do not matter."""
  del request, text
  held = prompt_tokens + max(0, output_tokens - 1)  # the last token is never fed
  return {"prompt_tokens": prompt_tokens, "tokens_per_slot": held / starting.bucket(held, max_context)}


def pool(records: list[dict], found: list[dict]) -> dict[str, dict]:
  """By length: `answers` and means of the two metrics, of time to the first token and per output token (milliseconds).

  Args:
    records: lines of `requests.jsonl`.
    found: what `judge` said of each.
  """
  by_length = collections.defaultdict(list)
  for record, metrics in zip(records, found, strict=True):
    length = 1 << max(0, record["prompt_tokens"].bit_length() - 1)
    by_length[length].append(metrics | {name: record[name] for name in (
        "time_to_first_token_ms", "time_per_output_token_ms")})
  return {str(length): {"answers": len(rows)} | {name: _mean([row[name] for row in rows]) for name in rows[0]}
          for length, rows in sorted(by_length.items())}


def _mean(values):
  known = [value for value in values if value is not None]
  return sum(known) / len(known) if known else None
