"""A trace of decoding: what every step drafted, what the target said of it, what was kept, and why it ended there.

Requests are run again on the host over the halves of the step that the drivers run: the verifier is wrapped in one that
draws by it and hands out, beside its verdict, the numbers that the verdict was made of. So a trace has no decoding of
its own that could differ, and its text is held against the measured one wherever the draft cannot change the text.

What a proposer remembers of other requests is empty in a trace: it may then draft less than it did when measured.

Letters: B batch rows, T nodes of a tree, W nodes of the widest step, D greatest depth, V vocabulary.
"""
import collections
from collections.abc import Iterator
import dataclasses
import functools
import json

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import measure
from experiments.harness import near_ties
from experiments.harness import settings
from specjax import decode
from specjax import drivers
from specjax import keys as keys_lib
from specjax import sampling
from specjax import starting
from specjax import stopping
from specjax.verifiers import base as verifiers

MAX_BYTES = 64 * 2**20  # of a trace: it ends behind the request that passes them
_DIGITS = 5


@struct.dataclass
class _Seen(verifiers.Verdict):
  """A verdict and what it was made of, padded to W nodes."""
  p: jax.Array        # f32[B, W]; the target's law at its parent of every node's token, after all processors
  model_p: jax.Array  # f32[B, W]; the same before temperature and filters
  q: jax.Array        # f32[B, W]; the law that the token was drawn from; 1 for a point
  stop: jax.Array     # f32[B, W]; the probability that the path ends at each node, given what was drafted
  new_p: jax.Array    # f32[B]; p of the new token
  u: jax.Array        # f32[B]; the draw that decided where the path ends; NaN for a rule without one


@dataclasses.dataclass(frozen=True)
class _Watched:
  """Verifies by `rule` and shows how."""
  rule: verifiers.Verifier
  width: int  # W

  lossless = property(lambda self: self.rule.lossless)
  chain_only = property(lambda self: self.rule.chain_only)
  needs_q = property(lambda self: self.rule.needs_q)
  purposes = property(lambda self: self.rule.purposes)

  def draw(self, logits, tree, params, mode, uniforms, depth):
    """See `Verifier.draw`; the verdict is a `_Seen`."""
    verdict = self.rule.draw(logits, tree, params, mode, uniforms, depth)
    law, given = sampling.law(logits, params, mode), self.rule.evidence(logits, tree, params)
    last = verdict.path[:, -1]
    pad = lambda x: jnp.pad(x.astype(jnp.float32), ((0, 0), (0, self.width - tree.width)))
    u = jnp.full(last.shape, jnp.nan, jnp.float32)
    if uniforms.stop is not None:
      u = uniforms.stop
    elif uniforms.token is not None:
      u = jnp.take_along_axis(uniforms.token, last[:, None], axis=1)[:, 0]
    return _Seen(**{field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict)},
                 p=pad(verifiers.at_parent(law, tree)),
                 model_p=pad(verifiers.at_parent(jax.nn.softmax(logits, axis=-1), tree)),
                 q=pad(verifiers.own_law(tree, jnp.float32)),
                 stop=pad(self.rule.law(law, tree, depth, **given)[0]),
                 new_p=jnp.take_along_axis(verifiers.at_node(law, last), verdict.token[:, None], axis=1)[:, 0],
                 u=jnp.where(params.temperature > 0, u, jnp.nan))


@functools.partial(jax.jit, static_argnames="verifier", donate_argnames="state")
def _conclude(target, proposer, state, tree, *, verifier):
  """As `drivers.conclude`; and the verdict, the drafted nodes that were verified, and which width it was."""
  outcome = decode.verify(target, proposer, verifier, state, tree)
  return decode.commit(target, proposer, state, outcome), (outcome.verdict, outcome.drafted, outcome.width_index)


@dataclasses.dataclass(frozen=True)
class Difference:
  """A traced text that should be the measured one and is not: what both share, and whether it is greedy."""
  name: str
  method: str
  prompt: list[int]
  shared: list[int]
  greedy: bool

  def __str__(self):
    return (f"request {self.name} under {self.method}: the traced text leaves the measured one at output token "
            f"{len(self.shared)}")


def trace(plan: measure.Plan, records: list[dict], requests: int, differing: list[Difference]) -> Iterator[dict]:
  """Runs the first requests of each category again, under every method, and yields a line for each step of each.

  Rows that were measured in one batch are run in one batch, the whole of it. Of a conversation the first turn is run.

  Args:
    plan: what was measured. records: lines of `requests.jsonl`, which hold the prompts and the measured texts.
    requests: of each category.
    differing: takes the texts that should be the measured ones and are not: those of a lossless rule at temperature 0,
      or of one whose draws belong to positions and not to steps.

  Yields:
    {"id", "category", "language", "method", "step", "width", "tokens", "pieces", "parents", "depths", "sampled", "p",
    "model_p", "q", "stop", "offered", "path", "accepted", "end", "emitted", "finish_reason", "driver"}. The lists from
    "tokens" to "stop" have an entry a node of the verified tree, the root first; "q" is null for points, "stop" null at
    temperature 0. "offered" counts the nodes that were drafted. "end" is {"reason", "node", "u", "token", "p"}: why the
    path ended behind `node`, with the uniform draw that decided (null where none did) and the new token; reasons are
    "rejected", "no_child", and "stop" or "budget" where the path was cut. "emitted" is a list of {"token", "piece",
    "origin"}, "drafted" or "new".
  """
  first = [r for r in records if r["repeat"] == 0 and r["turn"] == 0]
  chosen = collections.defaultdict(dict)
  for record in first:
    if len(chosen[record["category"]]) < requests:
      chosen[record["category"]][record["id"]] = None
  wanted = {name for names in chosen.values() for name in names}
  batches = collections.defaultdict(list)
  for record in first:
    batches[record["batch"], record["method"]].append(record)
  written = 0
  for (_, method), members in batches.items():
    if method not in plan.methods or not wanted & {r["id"] for r in members}:
      continue
    if written > MAX_BYTES:
      return
    for line in _trace_batch(plan, method, members, wanted, differing):
      written += len(json.dumps(line))
      yield line


def _trace_batch(plan, method, members, wanted, differing):
  lines, texts = _steps(plan, method, members)
  for row, record in enumerate(members):
    ids, pieces = texts[row], plan.tokenizer.pieces(texts[row])
    greedy = record["temperature"] == 0
    settled = plan.verifier.lossless and (greedy or keys_lib.STOP not in plan.verifier.purposes)
    if settled and ids != record["token_ids"]:
      differing.append(Difference(record["id"], method, record["prompt_ids"],
                                  ids[:near_ties.first_difference(ids, record["token_ids"])], greedy))
    if record["id"] not in wanted:
      continue
    done = 0
    for step, line in enumerate(lines[row]):
      for emitted in line["emitted"]:
        emitted["piece"] = pieces[done]
        done += 1
      yield {"id": record["id"], "category": record["category"], "language": record["language"], "method": method,
             "step": step} | line


def _steps(plan, method, members):
  """Lines of every row, and the output of every row."""
  target, proposer = plan.target, plan.methods[method].forget()
  widths = decode.widths_for(proposer.max_nodes)
  verifier = _Watched(plan.verifier, widths[-1])
  on_host = starting.on_host(proposer)
  draft = decode.draft if on_host else starting.draft
  params = settings.sampling_params([measure.seed_of(r["id"], 0) for r in members])
  state = drivers.start(target, proposer, [r["prompt_ids"] for r in members], params,
                        max_new_tokens=plan.max_new_tokens, key=settings.random_key(), verifier=plan.verifier)
  before, running = map(np.asarray, starting.read(target, (state.length, state.active)))
  begin, lines = before, [[] for _ in members]
  while (roomy := drivers.make_room(target, proposer, state)) is not None:
    tree, proposer_state = draft(target, proposer, roomy)
    nodes = starting.read(target, (tree.tokens, tree.parents, tree.size, tree.sampled))
    state, judged = _conclude(target, proposer, roomy.replace(proposer=proposer_state), tree, verifier=verifier)
    seen, drafted, index = starting.read(target, judged)
    length, reason, tokens, origin = starting.read(target, (state.length, state.reason, state.tokens, state.drafted))
    for row in np.flatnonzero(running):
      emitted = slice(int(before[row]), int(length[row]))
      lines[row].append(_line(
          plan, members[row]["temperature"] == 0, row, nodes, seen, 1 + int(drafted[row]),
          tokens[row, emitted].tolist(), origin[row, emitted].tolist(), stopping.REASONS[int(reason[row])]) | {
              "width": widths[int(index)], "driver": "host" if on_host else "device"})
    before, running = length, reason == stopping.RUNNING
  return lines, [tokens[row, begin[row]:length[row]].tolist() for row in range(len(members))]


def _line(plan, greedy, row, nodes, seen, size, emitted, origin, finish):
  tokens, parents, offered, sampled = (None if x is None else x[row] for x in nodes)
  tokens, parents = tokens[:size].tolist(), parents[:size].tolist()
  sampled = [False] * size if sampled is None else [i > 0 and bool(x) for i, x in enumerate(sampled[:size])]
  depths = [0]
  for parent in parents[1:]:
    depths.append(depths[parent] + 1)
  accepted = int(seen.accepted[row])
  last = int(seen.path[row, accepted])
  number = lambda x: None if np.isnan(x) else float(f"{x:.{_DIGITS}g}")
  numbers = lambda x: [number(value) for value in x[row, :size]]
  reason = "rejected" if last in parents[1:] else "no_child"
  if len(emitted) <= accepted:
    reason = "stop" if finish == "stop" else "budget"
  return {"tokens": tokens, "pieces": [plan.tokenizer.decode([token]) for token in tokens], "parents": parents,
          "depths": depths, "sampled": sampled, "p": [None, *numbers(seen.p)[1:]],
          "model_p": [None, *numbers(seen.model_p)[1:]],
          "q": [q if drawn else None for q, drawn in zip(numbers(seen.q), sampled)],
          "stop": None if greedy else numbers(seen.stop), "offered": int(offered) - 1,
          "path": seen.path[row, :accepted + 1].tolist(), "accepted": accepted,
          "end": {"reason": reason, "node": last, "u": number(seen.u[row]), "token": int(seen.token[row]),
                  "piece": plan.tokenizer.decode([int(seen.token[row])]), "p": number(seen.new_p[row])},
          "emitted": [{"token": token, "piece": "", "origin": "drafted" if drawn else "new"}
                      for token, drawn in zip(emitted, origin)],
          "finish_reason": finish}
