"""How answers end, and whether they are cut where they must be.

- `stopped`: ended by an end of sequence or a stop sequence, not by the length.
- `cut_right`: an answer that ended by the length has exactly its budget of tokens; one that stopped has no more than
  that, and its end of sequence, if any, is its last token; no end stands anywhere before it. A method that went on
  behind a stop inside an accepted burst, or lost the tokens before it, is seen here.
- `same_reason`: it ended as plain decoding's did. Null for plain decoding itself and without it.
"""
from collections.abc import Collection

from experiments.workloads import Request


def judge(request: Request, text: str, *, token_ids: list[int], finish_reason: str, max_new_tokens: int,
          eos_ids: Collection[int] = (), plain_reason: str | None = None) -> dict[str, float | bool | None]:
  """See the module. `finish_reason` is "stop" or "length"; the request and the text do not matter."""
  del request, text
  stopped = finish_reason == "stop"
  early = any(token in eos_ids for token in token_ids[:-1])
  ended = bool(token_ids) and token_ids[-1] in eos_ids
  if stopped:
    right = 0 < len(token_ids) <= max_new_tokens and not early and (ended or not eos_ids)
  else:
    right = len(token_ids) == max_new_tokens and not early and not ended
  return {"stopped": stopped, "cut_right": right,
          "same_reason": None if plain_reason is None else finish_reason == plain_reason}
