"""How much is accepted of what is drafted for an encoder-decoder: by language pair, and by length of the output.

Records have the language of the answer alone. The pair is read from the request's id, where it is a part of its own
between slashes ("tico/en-ar/17"); requests without one are in no pair.
"""
import collections
import re

_PAIR = re.compile(r"(?:^|/)([a-z]{2,3}-[a-z]{2,3})(?=/|$)")
NAMES = "by_language_pair", "by_output_length"


def of(records: list[dict]) -> dict:
  """For the records of a method, each request once; null for a target without an encoder.

  Returns:
    "by_language_pair", of translations, and "by_output_length", by the power of two below and from 8: dictionaries of
    {"requests", "tokens_per_step", "acceptance_rate"}, the last one null where nothing was drafted.
  """
  if not any(record.get("encode_seconds") for record in records):
    return dict.fromkeys(NAMES)
  pairs, lengths = collections.defaultdict(list), collections.defaultdict(list)
  for record in records:
    found = _PAIR.search(record["id"]) if record["category"] == "translation" else None
    if found:
      pairs[found[1]].append(record)
    lengths[1 << max(3, len(record["token_ids"]).bit_length() - 1)].append(record)
  return dict(zip(NAMES, ({str(key): _rates(groups[key]) for key in sorted(groups)} for groups in (pairs, lengths))))


def _rates(records):
  total = lambda name: sum(record["counters"][name] for record in records)
  drafted = total("drafted_tokens")
  return {"requests": len({record["id"] for record in records}),
          "tokens_per_step": total("output_tokens") / max(total("steps"), 1),
          "acceptance_rate": total("accepted_tokens") / drafted if drafted else None}
