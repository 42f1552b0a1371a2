"""Hierarchical drafting: a small proposer drafts for a middle model, whose verified text is the draft for the target.

An inner loop is speculative decoding of the middle model by an exact rule, so what it collects is a sample of the
middle model, whoever drafted for it: staged speculative decoding (arXiv 2308.04623), cascade drafting (arXiv
2312.11462), TriForce (arXiv 2404.11912). Two things keep the outer rule exact as well. The loop ends at a number of
tokens and never at a number of rounds: where a round ends depends on what was drawn. And the law q of each token is the
middle model's own, also where the token came from a residual, which is only a way of drawing from it.

What is collected stays in flight in the middle model until the target accepts it. The small proposer
goes on from round to round on a copy of its state: to the next step it hands the state of the first round, in which
nothing but committed text is known, and of its first draft what the target accepted.

Letters: B batch rows, N collected tokens, W nodes of an inner tree, D their greatest depth, V vocabulary, S slots.
"""
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from specjax import cache as cache_lib
from specjax import draft_laws
from specjax import keys as keys_lib
from specjax import processors
from specjax import sampling
from specjax import tree as tree_lib
from specjax.proposers import autoregressive
from specjax.proposers import base
from specjax.proposers import own_cache
from specjax.verifiers import point
from specjax.verifiers import recursive
from specjax.verifiers import rejection


@struct.dataclass
class Held:
  """The root and the collected tokens but the last, in flight in the middle model."""
  block: cache_lib.Block  # of N nodes
  length: jax.Array       # i32[B]; the nodes of each row, the first ones

  def append(self, block: cache_lib.Block, count: jax.Array) -> "Held":
    """With the first `count` i32[B] nodes of a block behind those of each row; beyond N there is no room."""
    size = self.block.nodes
    both = self.block.widen(size + block.nodes).put(block, jnp.int32(size))
    place, length = jnp.arange(size, dtype=jnp.int32)[None], self.length[:, None]
    source = jnp.where(place < length, place, jnp.minimum(size + place - length, both.nodes - 1))
    return Held(block=both.take(source), length=self.length + count)

  def emptied(self) -> "Held":
    """Without nodes."""
    return self.replace(length=jnp.zeros_like(self.length))


@struct.dataclass
class State:
  """Of a batch."""
  cache: cache_lib.Cache  # the middle model's committed tokens, of each row as many as it was fed
  held: Held
  small: Any              # the small proposer's, behind its first draft
  first: "First"


@struct.dataclass
class First:
  """What became of the small proposer's first draft."""
  path: jax.Array      # i32[B, D + 1]; its nodes that the middle model accepted, from the root on
  accepted: jax.Array  # i32[B]; how many, the root apart
  drafted: jax.Array   # i32[B]; how many nodes it had, the root apart


@struct.dataclass
class Collected:
  """Verified tokens of the middle model, behind the known text."""
  text: jax.Array            # i32[B, S]; known tokens, and these behind them
  tokens: jax.Array          # i32[B, N]
  count: jax.Array           # i32[B]
  going: jax.Array           # bool[B]; rows that collect more
  q: jax.Array | None        # f[B, N, V]; the middle model's law of each, for sampled drafts
  held: Held


@struct.dataclass
class Hierarchical(autoregressive.Chained):
  """Drafts `num_tokens` tokens with `middle`, for which `small` drafts.

  Attributes:
    small: a proposer that drafts from the text or with a model of its own; chains or trees, points or samples.
    middle: a model with the target's ids, an instance of `models.base.Target`; its weights are leaves. Rows whose text
      is as long as its context draft nothing any more.
    num_tokens: N.
    drawing: greedy tokens of the middle model, which are points, or draws from its law q.

  Raises:
    ValueError: for a number of tokens below 1, or drawing options that make no sense; by `init` for another vocabulary,
      a small proposer that never drafts, one that drafts on the host, or one that reads the verifier's ids at every
      node; when drafts are traced, for one that runs layers of the model that it drafts for.
  """
  small: Any
  middle: Any
  num_tokens: int = struct.field(pytree_node=False, default=7)
  drawing: autoregressive.Drawing = autoregressive.Drawing()

  @property
  def draft_context(self) -> int:
    return self.middle.max_context

  @property
  def rule(self):
    """The exact rule of the inner loop."""
    if not self.drawing.sampled:
      return point.Point()
    return rejection.Rejection() if self.small.chains else recursive.Recursive()

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    base.same_vocabulary(target, self.middle)
    name = type(self.small).__name__
    if self.small.max_nodes < 2:
      raise ValueError(f"small={name} never drafts; to draft with the middle model alone use a draft model")
    if self.small.host:
      raise ValueError(f"small={name} drafts on the host, and all of a hierarchical draft is one program; use another "
                       "small proposer")
    if self.small.node_ids:
      raise ValueError(f"small={name} reads the verifier's most probable ids at every node, which are not handed on "
                       "inside a draft; use another small proposer")
    if self.small.features:
      raise ValueError(f"small={name} reads the target's features, and the middle model has others; use another small "
                       "proposer")
    none = lambda: jnp.zeros((batch,), jnp.int32)
    cache = self.middle.init_cache(batch, min(capacity, self.middle.max_context))
    return State(cache=cache, held=Held(block=cache.empty_block(self.num_tokens), length=none()),
                 small=self.small.init(self.middle, batch, capacity),
                 first=First(path=jnp.zeros((batch, self.small.max_depth + 1), jnp.int32), accepted=none(),
                             drafted=none()))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    del target, cache
    most = autoregressive.room(context, self.num_tokens, self.draft_context)
    # All but the pending token, which goes through the model together with the first inner draft.
    committed, _ = own_cache.catch_up(self.middle, state.cache, context.replace(length=context.length - 1), most > 0)
    round_of = lambda collected, index: self._round(context, keys, most, collected, index)

    def propose(collected, small, index):
      inner, inner_keys = round_of(collected, index)
      tree, small = self.small.propose(self.middle, _NoCache(), small, inner, inner_keys)
      if tree.resume is not None:
        raise ValueError(_NO_LAYERS)
      return tree.replace(size=jnp.where(inner.active, tree.size, 1)), small

    def body(loop):
      index, collected, small, tree, first = loop
      new, seen = self._verify(committed, *round_of(collected, index), collected, tree)
      latest = First(path=seen.path, accepted=jnp.minimum(new.count - collected.count, _accepted(seen)),
                     drafted=seen.drafted)
      first = jax.tree.map(lambda old, new: jnp.where(index == 0, new, old), first, latest)
      go_on = lambda: propose(new, self.small.observe(self.middle, small, seen), index + 1)
      tree, small = jax.lax.cond(new.going.any(), go_on, lambda: (tree, small))
      return index + 1, new, small, tree, first

    empty = self._empty(state, context, most)
    tree, small = propose(empty, state.small, jnp.int32(0))
    nothing = jax.tree.map(jnp.zeros_like, state.first)
    _, collected, _, _, first = jax.lax.while_loop(lambda loop: loop[1].going.any(), body,
                                                   (jnp.int32(0), empty, small, tree, nothing))
    q = None if collected.q is None else draft_laws.DenseLaw(collected.q)
    return (tree_lib.chain(context.pending, collected.tokens, collected.count, q),
            State(cache=committed, held=collected.held, small=small, first=first))

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`: what was accepted enters the middle model's cache."""
    if committed.path is None:
      return state.replace(small=self.small.observe(target, state.small, committed))
    accepted, first = base.accepted_of_chain(committed), state.first
    count = jnp.minimum(jnp.minimum(accepted + 1, committed.count), state.held.length)  # the root is held as well
    cache = state.cache.commit(state.held.block, count)
    # Of the small proposer's first draft the text has what both models accepted.
    places = committed.path.shape[1]
    path = jnp.pad(first.path, ((0, 0), (0, max(places - first.path.shape[1], 0))))[:, :places]
    path = jnp.where(jnp.arange(places) <= jnp.minimum(accepted, first.accepted)[:, None], path, 0)
    seen = committed.replace(path=path, drafted=jnp.where(committed.drafted > 0, first.drafted, 0), node_ids=None)
    return state.replace(cache=cache, held=state.held.emptied(), small=self.small.observe(target, state.small, seen))

  def remember(self, state, outputs):
    """See `base.Proposer.remember`."""
    return self.replace(small=self.small.remember(state.small, outputs))

  def forget(self):
    """See `base.Proposer.forget`."""
    return self.replace(small=self.small.forget())

  def _empty(self, state, context, most):
    """Nothing collected yet."""
    batch = most.shape[0]
    q = jnp.zeros((batch, self.num_tokens, self.middle.vocab_size), jnp.float32) if self.drawing.sampled else None
    return Collected(text=context.tokens, tokens=jnp.zeros((batch, self.num_tokens), jnp.int32), q=q,
                     held=state.held.emptied(), count=jnp.zeros_like(most), going=most > 0)

  def _round(self, context, keys, most, collected, index):
    """What is known in inner round `index`, and the keys of its draws.

    The known text ends with the last collected token. Keys are those of the step's root and of the round: a later step
    at the place of this round's root must not draw again what was drawn here.
    """
    if self.drawing.sampled:
      params = self.drawing.params(context.params)
    else:
      params = context.params.replace(temperature=jnp.zeros_like(context.params.temperature))
    inner = context.replace(tokens=collected.text, length=context.length + collected.count,
                            active=context.active & collected.going, budget=most - collected.count, params=params)
    fold = lambda key, root: keys_lib.step_key(key, root, keys_lib.DRAFT, index)
    return inner, jax.vmap(fold)(keys, context.length - 1)

  def _verify(self, committed, inner, keys, collected, tree):
    """One inner round: the middle model verifies `tree`. What is collected then, and what the small one is told."""
    width = -(-tree.width // 4) * 4
    at = lambda width: lambda: self._judge(committed, inner, keys, collected, tree, width)
    verdict, tokens, hidden, in_flight, laws = jax.lax.cond((tree.size > 1).any(), at(width), at(1))
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    emitted = jnp.where(place < verdict.accepted[:, None], following, verdict.token[:, None])
    # By the number of tokens: what is beyond the room is not drafted, whoever accepted it.
    fresh = jnp.where(inner.active, jnp.minimum(verdict.accepted + 1, inner.budget), 0)
    ends = (emitted[:, :, None] == inner.rules.eos[:, None]).any(-1) & (place < fresh[:, None])
    # As everywhere, a drawn end of sequence is the last token, and a chosen one is left out.
    until = jnp.where(ends.any(-1), jnp.argmax(ends, -1) + int(self.drawing.sampled), place.shape[1])
    taken = jnp.minimum(fresh, until).astype(jnp.int32)
    row, own = jnp.arange(taken.shape[0])[:, None], place < taken[:, None]
    slot = jnp.where(own, collected.count[:, None] + place, self.num_tokens)
    count = collected.count + taken
    new = Collected(
        text=collected.text.at[row, jnp.where(own, inner.length[:, None] + place, collected.text.shape[1])].set(
            emitted, mode="drop"),
        tokens=collected.tokens.at[row, slot].set(emitted, mode="drop"), count=count,
        going=inner.active & (taken < inner.budget) & ~ends.any(-1),
        q=None if laws is None else collected.q.at[row, slot].set(laws, mode="drop"),
        held=collected.held.append(in_flight, fresh))
    seen = base.Committed(tokens=tokens, following=emitted, positions=inner.length[:, None] - 1 + place, hidden=hidden,
                          count=taken, path=verdict.path, drafted=tree.size - 1)
    return new, seen

  def _judge(self, committed, inner, keys, collected, tree, width):
    """The middle model's verdict in one width, with what belongs to the accepted path's D + 1 nodes: their tokens,
    hidden states, keys and values, and the laws of the tokens behind them."""
    depth, rule = self.small.max_depth, self.rule
    tree = tree.narrow(width) if width <= tree.width else tree.widen(width)
    mask = tree_lib.ancestors(tree.parents, depth)
    root = inner.length - 1
    positions = root[:, None] + tree_lib.depths(mask)
    held = collected.held
    filled = jnp.arange(held.block.nodes)[None] < held.length[:, None]
    seen = jnp.concatenate([jnp.broadcast_to(filled[:, None], (*tree.tokens.shape, filled.shape[1])), mask], axis=2)
    out = self.middle.forward(tree.tokens, positions, seen, committed, before=held.block)
    prefixes = processors.Prefixes(tokens=inner.tokens, length=inner.length, start=inner.start, eos=inner.rules.eos,
                                   begin=inner.inputs, path_tokens=tree.tokens, mask=mask)
    logits = processors.adjust(self.middle.logits(out.hidden), inner.params, prefixes)
    mode = inner.params.mode()
    draws = keys_lib.uniforms(rule.purposes, keys, root, positions + 1, self.middle.vocab_size)
    verdict = rule.draw(logits, tree, inner.params, mode, draws, depth)
    on_path = lambda x: jnp.take_along_axis(x, verdict.path[:, :, None], axis=1)
    # The law of every emitted token is the middle model's, also of one that was drawn from a residual.
    laws = sampling.law(on_path(logits), inner.params, mode) if self.drawing.sampled else None
    return (verdict, jnp.take_along_axis(tree.tokens, verdict.path, axis=1), on_path(out.hidden),
            out.in_flight.take(verdict.path), laws)


_NO_LAYERS = ("the small proposer runs layers of the model that it drafts for, whose latest tokens are still in "
              "flight; use one that drafts from the text, or with a model of its own")


class _NoCache:
  """What a small proposer gets for the middle model's cache, which lacks the collected tokens."""

  def __getattr__(self, name):
    raise ValueError(_NO_LAYERS)


def _accepted(seen):
  """Drafted nodes on an accepted path: its last node is repeated, and all others stand once. i32[B]."""
  return (seen.path[:, 1:] != seen.path[:, :-1]).sum(1).astype(jnp.int32)
