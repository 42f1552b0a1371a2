"""The trace of a run as the page embeds it: as many requests of `steps.jsonl` as fit, categories taking turns.

Model text is data here: it may hold `</script>`, and everything that could end a script element is written as an
escape of JSON.
"""

import collections
from collections.abc import Sequence
import json
import pathlib
from typing import Any

MAX_BYTES = 3_000_000  # of the page: a trace of a long run stays in its file
_PROMPT = 600  # last characters of a prompt that are shown
_OF_NODES = ("tokens", "pieces", "parents", "depths", "sampled", "p", "model_p", "q", "stop")
_OF_STEP = (*_OF_NODES, "path", "accepted", "end", "emitted", "finish_reason", "width", "offered")


def load(folder: pathlib.Path, requests: Sequence[dict[str, Any]], methods: Sequence[str], *,
         max_bytes: int = MAX_BYTES) -> tuple[str, int]:
  """The trace as JSON that may stand in a script element, and how many requests were left out.

  Args:
    folder: of a run. requests: lines of its `requests.jsonl`, for the prompts.
    methods: the order of the methods of a request.
    max_bytes: of the JSON, about; the first request is kept whatever its length.

  Returns:
    "" where the run has no trace. Else a list of {"id", "category", "prompt", "methods": [{"name", "steps"}]}, a step
    as `experiments.harness.tracing` writes it.
  """
  try:
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8", errors="replace").split("\n")
  except FileNotFoundError:
    return "", 0
  found = collections.defaultdict(lambda: collections.defaultdict(list))
  for line in lines:
    try:
      step = json.loads(line)
      found[step["category"], step["id"]][step["method"]].append({name: step[name] for name in _OF_STEP})
    except (ValueError, KeyError, TypeError):  # a line of an interrupted or older trace
      continue
  prompts = {line.get("id"): line.get("prompt") for line in reversed(requests) if not line.get("turn")}
  seen, turns = collections.Counter(), []
  for index, (category, name) in enumerate(found):
    turns.append((seen[category], index, category, name))
    seen[category] += 1
  chosen, room = [], max_bytes
  for _, index, category, name in sorted(turns):
    own = found[category, name]
    prompt = prompts.get(name)
    prompt = prompt if isinstance(prompt, str) else ""
    request = {"id": name, "category": category, "prompt": ("…" if len(prompt) > _PROMPT else "") + prompt[-_PROMPT:],
               "methods": [{"name": method, "steps": own[method]} for method in methods if method in own]}
    text = json.dumps(request, separators=(",", ":"))  # ASCII: no half character, no separator that ends a line
    room -= len(text)
    if chosen and room < 0:
      break
    chosen.append((index, text))
  if not chosen:
    return "", 0
  text = "[" + ",".join(text for _, text in sorted(chosen)) + "]"
  return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"), len(turns) - len(chosen)
