"""One pure step for every method, and what it is made of: prefill, draft, verify, step.

A row with `length` known tokens has `length - 1` of them in the cache. A step drafts a tree below the pending token,
verifies it in one forward pass of the target, in the smallest width that holds it, and commits what the verifier
accepts. The drivers `generate` and `stream` stand in `drivers.py`.

Letters: B batch rows, T nodes, S slots, D greatest depth, V vocabulary, E model width,
L layers with a mixture of experts, X experts of each.
"""
import functools

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax import constraints
from specjax import counters as counters_lib
from specjax import expert_counters
from specjax import greatest
from specjax import keys as keys_lib
from specjax import logprobs as logprobs_lib
from specjax import processors
from specjax import sampling
from specjax import stopping
from specjax import tree as tree_lib
from specjax import vocabulary
from specjax.models import base as models
from specjax.proposers import base as proposers
from specjax.verifiers import base as verifiers

WIDTHS = (1, 4, 8, 16, 32, 64)  # multiples of 4: others cost a CPU more than the next of these


@struct.dataclass
class Control:
  """How drafting is held down for a step, row by row, by whoever knows what it costs: see `serving.control`.

  Rows with a limit of 0 look to the proposer as if they had ended, so that it does no work for them. What may still be
  drafted is drafted; then, of point drafts, the width is taken that brings most tokens for its cost. Sampled drafts are
  all verified: which of them are may not depend on what was drawn.
  """
  limit: jax.Array  # i32[B]; nodes that may be drafted
  gain: jax.Array   # f32[B, N + 1]; tokens that are expected of so many drafted nodes, besides the new one
  cost: jax.Array   # f32[W]; of a step at each of the proposer's widths, in any unit
  offered: jax.Array  # i32[B]; behind a step: nodes that were drafted within the limit, before that choice


@struct.dataclass
class Chunk:
  """What the target says of the next tokens of a prompt: all that `take_chunk` needs, whichever row has that text."""
  in_flight: cache_lib.Block
  hidden: jax.Array               # f[B, N, E]
  features: dict[int, jax.Array]  # f[B, N, E] by layer; those that the proposer reads

  def take(self, first: int, size: int) -> "Chunk":
    """The part of `size` tokens that begins with token `first`."""
    part = lambda x: x[:, first:first + size]
    path = jnp.broadcast_to(jnp.arange(first, first + size), (self.hidden.shape[0], size))
    return Chunk(in_flight=self.in_flight.take(path), hidden=part(self.hidden),
                 features={layer: part(x) for layer, x in self.features.items()})


@struct.dataclass
class DecodeState:
  """Everything that a step reads and writes, on the device. Rows are independent."""
  tokens: jax.Array                 # i32[B, S]; prompt and output
  drafted: jax.Array                # bool[B, S]; output tokens that were accepted drafts
  length: jax.Array                 # i32[B]; known tokens
  start: jax.Array                  # i32[B]; prompt tokens
  limit: jax.Array                  # i32[B]; prompt tokens and budget
  reason: jax.Array                 # i32[B]; stopping.RUNNING, STOP or LENGTH
  cache: cache_lib.Cache
  proposer: proposers.State
  keys: jax.Array                   # key[B]; the rows' keys
  params: sampling.SamplingParams
  rules: stopping.StopRules
  counters: counters_lib.Counters
  constraint: constraints.Constraint | None = None   # masks what may be emitted
  constraint_state: constraints.State = None         # behind all known tokens, a row each
  logprobs: logprobs_lib.Logprobs | None = None      # of the tokens in `tokens`, slot by slot; None: not asked for
  control: Control | None = None                     # holds drafting down; None: see `verify`

  @property
  def active(self) -> jax.Array:
    """bool[B]; rows that still run."""
    return self.reason == stopping.RUNNING

  def context(self) -> proposers.Context:
    """What a proposer sees."""
    given = {}
    if self.cache.cross is not None:
      given = {"inputs": self.cache.cross.inputs, "input_tokens": self.tokens[:, :self.cache.cross.slots]}
    active, budget = self.active, self.limit - self.length
    if self.control is not None:
      active, budget = active & (self.control.limit > 0), jnp.minimum(budget, self.control.limit + 1)
    return proposers.Context(tokens=self.tokens, length=self.length, start=self.start, active=active, budget=budget,
                             params=self.params, rules=self.rules, **given)


@struct.dataclass
class Outcome:
  """What the verify half hands on. The accepted path is padded to D + 1 nodes, whatever the width."""
  verdict: verifiers.Verdict
  tokens: jax.Array              # i32[B, D + 1]; tokens of the path's nodes, the pending one first
  hidden: jax.Array              # f[B, D + 1, E]
  in_flight: cache_lib.Block     # of the path's D + 1 nodes
  reach: jax.Array               # i32[B]; depth of the deepest drafted node
  drafted: jax.Array             # i32[B]; drafted nodes that were verified
  width_index: jax.Array         # i32; which of the widths was used
  logprobs: logprobs_lib.Logprobs | None  # of the token behind each of the path's nodes, if asked for
  node_ids: jax.Array | None     # i32[B, W, K]; see `proposers.Committed`
  features: dict[int, jax.Array]  # f[B, D + 1, E] by layer; see `proposers.Committed`
  loads: jax.Array | None = None  # i32[B, L, X]; see `expert_counters.count`
  offered: jax.Array | None = None  # i32[B]; see `Control`


def widths_for(max_nodes: int) -> tuple[int, ...]:
  """At most three widths that a proposer of `max_nodes` nodes can fill: 1, its own, and the one below that.

  Raises:
    ValueError: beyond the greatest width.
  """
  if max_nodes > WIDTHS[-1]:
    raise ValueError(f"a proposer of {max_nodes} nodes (root included) is wider than the widest step, {WIDTHS[-1]}")
  top = next(i for i, width in enumerate(WIDTHS) if width >= max_nodes)
  return tuple(sorted({WIDTHS[0], WIDTHS[max(top - 1, 0)], WIDTHS[top]}))


def draft(target, proposer, state: DecodeState) -> tuple[tree_lib.TokenTree, proposers.State]:
  """The first half of a step: a tree of `proposer.max_nodes` nodes a row, and the proposer's new state."""
  with jax.named_scope("draft"), vocabulary.divided(layout_of(target, proposer)):
    tree, proposer_state = proposer.propose(target, state.cache, state.proposer, state.context(), state.keys)
  if tree.sampled is not None and tree.q is None:
    raise ValueError(f"{type(proposer).__name__} marks drafts as sampled but gives no q, the law that they were drawn "
                     "from; a proposer that chooses its drafts leaves `sampled` out")
  return tree, proposer_state


def verify(target, proposer, verifier, state: DecodeState, tree: tree_lib.TokenTree,
           masks: jax.Array | None = None) -> Outcome:
  """The second half: one forward pass over the tree, in the smallest width that holds the batch's drafts.

  Rows that have ended draft nothing. With several rows and no `control`, drafts are verified only when at least half of
  the running rows have one, because in a batch the width costs every row.

  Args:
    target, proposer, verifier, state: as in `step`. tree: of `draft`.
    masks: u32[B, T, ceil(V / 32)], bit j of word i: whether id 32 i + j may follow the node; for constraints that are
      worked out on the host.
  """
  widths = widths_for(proposer.max_nodes)
  size, offered = jnp.where(state.active, tree.size, 1), None
  if state.control is not None:
    size = jnp.minimum(size, state.control.limit + 1)
    offered = size - 1
    if tree.sampled is None:
      size = jnp.minimum(size, _best_width(size, state, widths))
  elif size.shape[0] > 1:
    worth = 2 * jnp.sum(size > 1) >= jnp.sum(state.active)
    size = jnp.where(worth, size, 1)
  tree = tree.replace(size=size)
  mode = state.params.mode()
  branches = [functools.partial(verify_at, target, verifier, proposer.max_depth, width, proposer.node_ids,
                                proposer.features) for width in widths]
  index = jnp.sum(jnp.max(size) > jnp.array(widths[:-1], jnp.int32)).astype(jnp.int32)
  verdict, tokens, hidden, in_flight, reach, logprobs, node_ids, seen, loads = jax.lax.switch(
      index, branches, state, tree, mode, masks)
  if (layout := getattr(target, "layout", None)) is not None:  # decided where the rows are, from here on known to all
    verdict, tokens, reach, logprobs, node_ids, loads = layout.hold_everywhere(
        (verdict, tokens, reach, logprobs, node_ids, loads))
  return Outcome(verdict=verdict, tokens=tokens, hidden=hidden, in_flight=in_flight, reach=reach, drafted=size - 1,
                 width_index=index, logprobs=logprobs, node_ids=node_ids, features=seen, loads=loads, offered=offered)


def _best_width(size, state, widths):
  """The width at which trees of `size` i32[B] nodes bring most tokens for its cost, by `state.control`: i32."""
  control = state.control
  expected = lambda width: jnp.take_along_axis(control.gain, jnp.minimum(size, width)[:, None] - 1, axis=1)[:, 0]
  tokens = jnp.stack([jnp.sum(jnp.where(state.active, 1 + expected(width), 0)) for width in widths])
  return jnp.array(widths, jnp.int32)[jnp.argmax(tokens / control.cost)]


def step(target, proposer, verifier, state: DecodeState) -> DecodeState:
  """One step: draft, verify, commit. Pure; rows that have ended pass through unchanged.

  Args:
    target: see `models.base.Target`. proposer: see `proposers.base.Proposer`. verifier: see `verifiers.base.Verifier`.
    state: after `prefill` or another step; every running row must have room for D + 1 tokens or for its budget.
  """
  tree, proposer_state = draft(target, proposer, state)
  outcome = verify(target, proposer, verifier, state.replace(proposer=proposer_state), tree)
  return commit(target, proposer, state.replace(proposer=proposer_state), outcome)


def commit(target, proposer, state: DecodeState, outcome: Outcome) -> DecodeState:
  """Lets out what was accepted: cuts at a stop, writes cache and text, tells the proposer, counts."""
  with jax.named_scope("commit"):
    active, accepted = state.active, outcome.verdict.accepted
    place = jnp.arange(outcome.tokens.shape[1], dtype=jnp.int32)[None]
    emitted = _emitted(outcome.tokens, outcome.verdict)
    count, reason = stopping.cut(emitted, jnp.where(active, accepted + 1, 0), _history(state),
                                 state.limit - state.length, state.rules)
    cache = state.cache.commit(outcome.in_flight, count)
    committed = proposers.Committed(tokens=outcome.tokens, following=emitted,
                                    positions=state.length[:, None] - 1 + place, hidden=outcome.hidden, count=count,
                                    path=outcome.verdict.path, drafted=outcome.drafted, node_ids=outcome.node_ids,
                                    features=outcome.features)
    slots = state.tokens.shape[1]
    slot = jnp.where(place < count[:, None], state.length[:, None] + place, slots)
    row = jnp.arange(count.shape[0])[:, None]
    write = lambda old, new: old.at[row, slot].set(new, mode="drop")
    beyond = jnp.zeros_like(active)
    if proposer.draft_context is not None:
      known = state.length if not proposer.behind_inputs or cache.cross is None else state.length - cache.cross.inputs
      beyond = known >= proposer.draft_context
    constraint_state = state.constraint_state
    if state.constraint is not None:
      constraint_state = constraints.advance_by(state.constraint, constraint_state, emitted, count)
    return held(target, proposer, state.replace(
        tokens=write(state.tokens, emitted),
        drafted=write(state.drafted, place < accepted[:, None]),
        constraint_state=constraint_state,
        logprobs=jax.tree.map(write, state.logprobs, outcome.logprobs),
        length=state.length + count,
        reason=jnp.where(active, reason, state.reason),
        cache=cache,
        control=None if state.control is None else state.control.replace(offered=outcome.offered),
        proposer=proposer.observe(target, state.proposer, committed),
        counters=counters_lib.count_step(state.counters, active=active, drafted=outcome.drafted, reach=outcome.reach,
                                         accepted=accepted, emitted=count, strayed=outcome.verdict.strayed,
                                         width_index=outcome.width_index, beyond=beyond, loads=outcome.loads)))


def held(target, proposer, state: DecodeState) -> DecodeState:
  """The state where it belongs on the mesh of a target that lies on one; see `parallel.layout`."""
  layout, batch = getattr(target, "layout", None), state.length.shape[0]
  if layout is None:
    return state
  divided = ("cache", "tokens", "drafted", "logprobs")  # what grows with the text
  rows = layout.hold_rows({name: getattr(state, name) for name in divided}, batch)
  rows["proposer"] = layout_of(target, proposer).hold_rows(state.proposer, batch)
  return layout.hold_everywhere(state.replace(proposer=None, **dict.fromkeys(divided))).replace(**rows)


def layout_of(target, proposer):
  """How what a proposer computes lies on a mesh: as its own model does, if it has one there, or as the target; None on
  one device."""
  layout = getattr(target, "layout", None)
  return layout if layout is None else getattr(getattr(proposer, "model", target), "layout", None) or layout


def encode(target, state: DecodeState, inputs: jax.Array, sound: jax.Array | None = None) -> DecodeState:
  """Reads the first `inputs` i32[B] tokens of every row with the target's encoder, once, before any other pass; or
  `sound` f[B, M, F] in their place."""
  read = state.tokens[:, :state.cache.cross.slots] if sound is None else sound
  return held(target, None, state.replace(cache=target.encode(state.cache, read, inputs)))


def prefill_chunk(target, proposer, state: DecodeState, mask: jax.Array) -> DecodeState:
  """Commits the next chunk of every row's prompt, up to its last token but one.

  The last prompt token stays pending: it is the first root, so the first step drafts already and every output token
  belongs to a verify pass.

  Args:
    target, proposer, state: as in `step`.
    mask: bool[N, N], the causal mask of a chunk of N tokens. An argument, because XLA folds a constant one for every
      layer.
  """
  return take_chunk(target, proposer, state, read_chunk(target, proposer, state, mask))


def read_chunk(target, proposer, state: DecodeState, mask: jax.Array) -> Chunk:
  """The target's pass over the next N tokens of every row's prompt; arguments as in `prefill_chunk`."""
  with jax.named_scope("prefill"):
    chunk = mask.shape[0]
    tokens, positions = _next(state, chunk)
    out = target.forward(tokens, positions, jnp.broadcast_to(mask, (tokens.shape[0], chunk, chunk)), state.cache,
                         **_asked(proposer.features))
    return Chunk(in_flight=out.in_flight, hidden=out.hidden, features=dict(zip(proposer.features, out.features)))


def take_chunk(target, proposer, state: DecodeState, chunk: Chunk) -> DecodeState:
  """Commits a chunk and shows it to the proposer, up to the prompt's last token but one. The chunk may have been read
  for another row with the same text up to its end."""
  size = chunk.hidden.shape[1]
  tokens, positions = _next(state, size)
  count = jnp.clip(state.start - 1 - state.cache.length, 0, size)
  committed = proposers.Committed(tokens=tokens, following=_at(state, positions + 1), positions=positions,
                                  hidden=chunk.hidden, count=count, path=None, features=chunk.features)
  return held(target, proposer, state.replace(cache=state.cache.commit(chunk.in_flight, count),
                                              proposer=proposer.observe(target, state.proposer, committed)))


def _next(state, size):
  """The next `size` tokens behind what is committed, and their positions: i32[B, N] each."""
  positions = state.cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
  return _at(state, positions), positions


def _at(state, positions):
  return jnp.take_along_axis(state.tokens, jnp.minimum(positions, state.tokens.shape[1] - 1), axis=1)


def verify_at(target, verifier, depth: int, width: int, node_ids: int, features: tuple[int, ...], state: DecodeState,
              tree: tree_lib.TokenTree, mode, masks: jax.Array | None = None):
  """What `verify` does in one width: verdict, path tokens, hidden, in-flight block, reach, logprobs, node ids, features
  and loads, as in `Outcome`."""
  with vocabulary.divided(getattr(target, "layout", None)):
    return _verify_at(target, verifier, depth, width, node_ids, features, state, tree, mode, masks)


def _verify_at(target, verifier, depth, width, node_ids, features, state, tree, mode, masks):
  widest = widths_for(tree.width)[-1]
  tree = tree.narrow(width) if width <= tree.width else tree.widen(width)
  mask = tree_lib.ancestors(tree.parents, depth)
  counted = state.counters.experts is not None
  if counted:  # padding becomes copies of the root, which go through no expert that the root does not
    tree = tree.replace(tokens=jnp.where(tree.valid, tree.tokens, tree.tokens[:, :1]))
    mask = jnp.where(tree.valid[:, :, None], mask, jnp.eye(width, dtype=bool))
  node_depth = tree_lib.depths(mask)
  root = state.length - 1
  positions = root[:, None] + node_depth
  shared = {} if tree.resume is None else {"resume": tree.resume}
  out = target.forward(tree.tokens, positions, mask, state.cache, **shared, **_asked(features),
                       **({"experts": True} if counted else {}))
  logits = target.logits(out.hidden)
  if banned := models.banned_first(target):
    first = positions - state.cache.cross.inputs[:, None] == len(target.opening) - 1
    logits = jnp.where(first[..., None] & np.isin(np.arange(target.vocab_size), banned), -jnp.inf, logits)
  adjusted = processors.adjust(logits, state.params, _prefixes(state, tree, mask, _unpacked(masks, width, target),
                                                                       target.vocab_size))
  draws = keys_lib.uniforms(verifier.purposes, state.keys, root, positions + 1, target.vocab_size,
                            noisy=mode != sampling.GREEDY)
  verdict = verifier.draw(adjusted, tree, state.params, mode, draws, depth)
  tokens = jnp.take_along_axis(tree.tokens, verdict.path, axis=1)
  on_path = lambda x: jnp.take_along_axis(x, verdict.path[:, :, None], axis=1)
  hidden = on_path(out.hidden)
  seen = {layer: on_path(feature) for layer, feature in zip(features, out.features)}
  reach = jnp.max(jnp.where(tree.valid, node_depth, 0), axis=1)
  logprobs = None
  if state.logprobs is not None:
    logprobs = logprobs_lib.of_tokens(on_path(logits), on_path(adjusted), state.params, mode, _emitted(tokens, verdict),
                                      state.logprobs.top_ids.shape[-1])
  top = None
  if node_ids:
    top = sampling.argmax(adjusted)[..., None] if node_ids == 1 else greatest.greatest(adjusted, node_ids)[1]
    top = jnp.pad(top, ((0, 0), (0, widest - width), (0, 0)), constant_values=-1)
  loads = None
  if counted:
    loads = expert_counters.loads(out.experts, tree.valid, like=state.counters.experts.loads)
  return verdict, tokens, hidden, out.in_flight.take(verdict.path), reach, logprobs, top, seen, loads


def _asked(features):
  """The argument of `Target.forward`, for proposers that read features: other targets need not know of it."""
  return {"features": features} if features else {}


def _prefixes(state, tree, mask, allowed, vocab_size):
  """The text before each node, as the processors see it; `allowed` bool[B, T, V] or None, by masks of the host."""
  if state.constraint is not None:
    states = constraints.node_states(state.constraint, state.constraint_state, tree)
    own = constraints.allowed_at(state.constraint, states)
    own = jnp.pad(own, ((0, 0), (0, 0), (0, vocab_size - own.shape[-1])))
    allowed = own if allowed is None else own & allowed
  return processors.Prefixes(tokens=state.tokens, length=state.length, start=state.start, eos=state.rules.eos,
                             path_tokens=tree.tokens, mask=mask, allowed=allowed, begin=state.context().inputs)


def _unpacked(masks, width, target):
  """bool[B, T, V] of `masks` u32[B, N, words] for a tree of `width` T nodes; what has none allows everything."""
  if masks is None:
    return None
  bits = masks[:, :width, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
  allowed = bits.astype(bool).reshape(*bits.shape[:2], -1)[..., :target.vocab_size]
  return jnp.pad(allowed, ((0, 0), (0, width - allowed.shape[1]), (0, 0)), constant_values=True)


def _emitted(tokens, verdict):
  """The token behind each of the path's nodes, i32[B, D + 1]: the next node's, and the new one behind the last."""
  place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
  return jnp.where(place < verdict.accepted[:, None], following, verdict.token[:, None])


def _history(state):
  """The last output tokens of each row before the burst, -1 where there are fewer: i32[B, W - 1]."""
  reach = state.rules.sequences.shape[-1] - 1
  place = state.length[:, None] - reach + jnp.arange(reach, dtype=jnp.int32)[None]
  tokens = jnp.take_along_axis(state.tokens, jnp.maximum(place, 0), axis=1)
  return jnp.where(place >= state.start[:, None], tokens, -1)
