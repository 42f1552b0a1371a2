"""The measuring loop: every request under every method, interleaved, after everything is compiled.

Drift of a shared machine hits all methods alike, because a request is run by each of them before the next one starts,
in an order that rotates. A measurement during which anything compiled is thrown away and made again.

A later turn of a conversation goes on behind the caches of the turn before, if all methods can. Sampled, a method may
have written another text than the first one's, which all continue; and in another bucket of slots, a drafter's own cache
would have to grow. Such a method would run the prompt anew, so all do: else times to the first token would compare that.
"""
import collections.abc
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import mappings
from experiments.harness import rules
from experiments.harness import settings
from experiments.workloads import Request
from specjax import drivers
from specjax.models import base as models
from specjax.verifiers import point


_AGAIN = 16  # tokens that a reply may grow by when it is decoded and encoded again


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is measured: `methods` are proposers by name, the first one's replies continue a conversation.

  A target with an encoder reads each turn alone, as it is.
  """
  target: object
  tokenizer: object
  methods: dict
  batches: list[list[Request]]
  repeats: int
  max_new_tokens: int
  raw: bool = False  # prompts are not put into the chat template
  verifier: object = point.Point()  # judges the drafts of all methods

  @property
  def runs(self) -> int:
    """Calls of `generate` in all, warm-up apart."""
    turns = sum(max(len(r.turns) for r in batch) for batch in self.batches)
    return turns * self.repeats * len(self.methods)


def batches(requests: list[Request], size: int) -> list[list[Request]]:
  """Requests in groups of at most `size`, each of one category, in the order listed."""
  groups = {}
  for request in requests:
    groups.setdefault(request.category, []).append(request)
  return [group[i:i + size] for group in groups.values() for i in range(0, len(group), size)]


def check(plan: Plan) -> None:
  """Refuses what cannot be measured before anything runs.

  Raises:
    ValueError: names the request, its file and line: a conversation that may outgrow the target's context, or one
      under `raw`, which has no turns; or sampling parameters that the target cannot honour, or a verifier that cannot
      judge the drafts of a method.
  """
  for request in itertools.chain(*plan.batches):
    turns = len(request.turns)
    if plan.raw and turns > 1 and not models.encodes(plan.target):
      raise ValueError(f"{request.source}: request {request.id} has {turns} turns, and --raw gives a model its prompt "
                       "without the chat template that separates them; leave one of the two out")
    # Replies that are not there yet count with their full budget, and a few tokens for being encoded again.
    conversation = []
    for message in request.turns:
      conversation += [{"role": "user", "content": message}, {"role": "assistant", "content": ""}]
    size, limit = len(_encode(plan, conversation[:-1])), f"the target's context of {plan.target.max_context}"
    if models.encodes(plan.target):  # which reads every turn alone
      size = max(len(_encode(plan, conversation[i:i + 1])) for i in range(0, 2 * turns, 2))
      limit = f"the {plan.target.max_inputs} and {plan.target.max_outputs} that the target's encoder and decoder hold"
    else:
      size += (turns - 1) * (plan.max_new_tokens + _AGAIN)
    if plan.max_new_tokens > models.room(plan.target, size):
      raise ValueError(f"{request.source}: request {request.id} has up to {size} tokens in {turns} turn(s) and "
                       f"max_new_tokens={plan.max_new_tokens}, together more than {limit}; leave it out or lower "
                       "--max_new_tokens")
  for proposer in plan.methods.values():  # a prompt of one token: the driver's own checks, without a prefill
    drivers.start(plan.target, proposer, [[0]], settings.sampling_params(), max_new_tokens=plan.max_new_tokens,
                  verifier=plan.verifier)


def split_done(plan: Plan, records: list[dict]) -> tuple[list[dict], list[list[Request]]]:
  """What an earlier run finished: its records of whole batches, and the batches that are left to do."""
  have = {(r["id"], r["method"], r["repeat"], r["turn"]) for r in records}
  whole = lambda request: all((request.id, method, repeat, turn) in have for method in plan.methods
                              for repeat in range(plan.repeats) for turn in range(len(request.turns)))
  left = [batch for batch in plan.batches if not all(map(whole, batch))]
  again = {request.id for batch in left for request in batch}
  return [r for r in records if r["id"] not in again], left


def warm_up(plan: Plan, report=lambda done, total: None) -> None:
  """Compiles what the first turns need; later turns may still reach a longer bucket (see `measure`).

  Raises:
    ValueError: the programs are more than the system has memory mappings for, see `mappings.check`.
  """
  shapes = {}
  for batch in plan.batches:
    prompts = [_first_prompt(plan, r) for r in batch]
    sizes = [len(p) for p in prompts]
    for name, proposer in plan.methods.items():
      first = drivers.bucket(max(sizes) + proposer.max_depth + 1, plan.target.max_context)
      last = drivers.bucket(max(sizes) + plan.max_new_tokens, plan.target.max_context)
      shapes[name, len(batch), first, last, frozenset(drivers.chunks(max(sizes) - 1))] = (proposer, prompts)
  for done, (proposer, prompts) in enumerate(shapes.values()):
    report(done, len(shapes))
    mappings.check()
    drivers.warm_up(plan.target, proposer, prompts, settings.sampling_params(),
                    max_new_tokens=plan.max_new_tokens, key=settings.random_key(), verifier=plan.verifier)
  report(len(shapes), len(shapes))


def estimate(plan: Plan) -> float:
  """Seconds that `measure` takes about, if no draft is accepted and every answer uses its budget; from one short run
  of a text that is no request of the workload."""
  longest = [max(len(_first_prompt(plan, r)) for r in batch) for batch in plan.batches]
  result = _timed(plan, next(iter(plan.methods.values())), [[0] * longest[0]] * len(plan.batches[0]),
                  [0] * len(plan.batches[0]), eos_ids=())
  step = (result.timings.total - result.timings.first_token) / max(1, int(result.counters.steps.max()) - 1)
  prefill = result.timings.first_token / longest[0]
  turns = [max(len(r.turns) for r in batch) for batch in plan.batches]
  once = sum(n * (size * prefill + plan.max_new_tokens * step) for n, size in zip(turns, longest))
  return once * plan.repeats * len(plan.methods)


def _first_prompt(plan, request):
  return _encode(plan, [{"role": "user", "content": request.turns[0]}])


def measure(plan: Plan, report=lambda: None) -> collections.abc.Iterator[list[dict]]:
  """Yields the records of one batch under all methods and repeats, batch by batch; `report` is called after a run.

  What a proposer keeps between requests is its own in every repeat, empty at first, and holds the batches that came
  before: a request is never drafted from an earlier repeat of itself.
  """
  memory = {(name, repeat): proposer.forget() for name, proposer in plan.methods.items()
            for repeat in range(plan.repeats)}
  known = 0
  for index, batch in enumerate(plan.batches):
    yield [record | {"requests_before": known} for record in _measure_batch(plan, memory, batch, index, report)]
    known += len(batch)


def _measure_batch(plan, memory, batch, index, report):
  records, names, learnt, kept, before = [], list(plan.methods), {}, {}, None
  conversations, texts = [[] for _ in batch], [[] for _ in batch]
  turns, room = max(len(request.turns) for request in batch), None
  keeps = not models.encodes(plan.target)  # an encoder reads each turn alone
  for turn in range(turns):
    rows = [i for i, request in enumerate(batch) if turn < len(request.turns)]
    for i in rows:
      conversations[i].append({"role": "user", "content": batch[i].turns[turn]})
    prompts = [_encode(plan, conversations[i], texts[i]) for i in rows]
    # Proposers whose state would have to grow begin anew: then all methods do.
    last, room = room, drivers.bucket(max(map(len, prompts)) + plan.max_new_tokens, plan.target.max_context)
    alike = (rows, room) == (before, last) and all(
        ids == texts[i] for _, written in kept.values() for i, ids in zip(rows, written))
    going_on, kept, before = kept if alike else {}, {}, rows
    seeds = [seed_of(batch[i].id, turn) for i in rows]
    replies = {}
    for repeat in range(plan.repeats):
      shift = (index + repeat) % len(names)
      for name in names[shift:] + names[:shift]:
        # Repeats write one text, so the first one's state serves all of them: caches are large.
        result = _timed(plan, memory[name, repeat], prompts, seeds, keep=keeps and turn + 1 < turns and not repeat,
                        kept=going_on.get(name, (None,))[0])
        if repeat == 0:
          kept[name] = result.kept, [prompt + ids for prompt, ids in zip(prompts, result.token_ids)]
        # Of a conversation the outputs of all turns and the last turn's state: the others began from the same memory.
        outputs = learnt.get((name, repeat), (None, []))[1]
        learnt[name, repeat] = result.proposer_state, outputs + result.token_ids
        report()
        made = [_record(plan, batch[i], batch, name, repeat, turn, prompts[k], result, k, len(rows))
                for k, i in enumerate(rows)]
        replies.setdefault(name, [(record["text"], record["token_ids"]) for record in made])
        records.extend(made)
    # Equal terms: every method continues the same conversation, with the first method's replies in it.
    for i, prompt, (reply, ids) in zip(rows, prompts, replies[names[0]], strict=True):
      conversations[i].append({"role": "assistant", "content": reply})
      texts[i] = prompt + ids
  for arm, (state, outputs) in learnt.items():
    memory[arm] = memory[arm].remember(state, outputs)
  return records


def _timed(plan, proposer, prompts, seeds, *, kept=None, **kwargs):
  while True:
    before = drivers.compiled_programs()
    if kept is not None:  # it serves once, and this may have to be done again
      kwargs["kept"] = jax.block_until_ready(jax.tree.map(jnp.copy, kept))
    result = drivers.generate(plan.target, proposer, prompts, settings.sampling_params(seeds),
                              max_new_tokens=plan.max_new_tokens, key=settings.random_key(), verifier=plan.verifier,
                              **kwargs)
    if drivers.compiled_programs() == before:
      return result


def _record(plan, request, batch, method, repeat, turn, prompt, result, row, rows):
  count = int(result.lengths[row])
  ids = result.tokens[row, :count].tolist()
  first, total = result.timings.first_token, result.timings.total
  later = count - int(result.timings.first_tokens[row])
  counters = jax.tree.map(lambda x: np.asarray(x)[row].tolist(), result.counters)
  return {
      "id": request.id, "category": request.category, "language": request.language, "method": method,
      "repeat": repeat, "turn": turn, "batch": batch[0].id, "batch_size": len(batch),
      "temperature": settings.TEMPERATURE.value, "verifier": rules.name_of(plan.verifier),
      "lossless": rules.keeps_the_law(plan.verifier, plan.methods[method]), "driver": result.driver,
      "prompt": request.turns[turn], "prompt_tokens": len(prompt), "prompt_ids": list(prompt),
      "reused_tokens": int(result.reused[row]),
      "token_ids": ids,
      "pieces": plan.tokenizer.pieces(ids), "from_draft": result.drafted[row, :count].tolist(),
      "text": plan.tokenizer.decode(ids), "finish_reason": result.finish_reasons[row],
      "counters": dataclasses.asdict(counters),
      "time_to_first_token_ms": first * 1e3, "latency_ms": total * 1e3,
      "time_per_output_token_ms": (total - first) * 1e3 / later if later else None,
      # Rows of a batch share its time, so that sums over records are wall-clock time.
      "seconds": total / rows, "decode_seconds": (total - first) / rows, "decode_tokens": later,
      "draft_seconds": result.timings.draft_seconds / rows,
      "encode_seconds": result.timings.encode_seconds / rows,
      "decode_steps": (int(np.max(result.counters.steps)) - 1) / rows,
  }


def _encode(plan, conversation, text=()):
  """The prompt of a conversation's next turn; `text` are the ids so far, of prompts and replies."""
  if plan.raw or models.encodes(plan.target):
    return plan.tokenizer.encode(conversation[-1]["content"], add_special_tokens=True)
  return plan.tokenizer.chat_behind(text, conversation)


def seed_of(identity: str, turn: int) -> int:
  """A seed that depends on the request only, not on its place in the workload (FNV-1a of the id)."""
  value = 2166136261
  for byte in f"{identity}/{turn}".encode():
    value = (value ^ byte) * 16777619 % 2**32
  return value >> 1
