"""A drafter that learns between requests from the places where it was wrong: Online Speculative Decoding.

OSD (arXiv 2310.07177, LiuXiaoxuanPKU/OSD): while requests are served, the places whose draft the target replaced are
kept with the target's law there; after so many requests the drafter is trained on these places alone, and they are
dropped. As published the loss is the cross entropy with the target's law and an interval ends in one optimizer step;
here `steps` of them are taken on the same places, and heads learn like draft models. Within a request nothing changes,
so that the text stays the target's.

The weights that learn are float32. The optimizer is Adam at a constant rate.

Letters: B batch rows, K drafted tokens, P places, V vocabulary.
"""
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.proposers import base
from specjax.proposers import own_features
from specjax.training import learners
from specjax.training import losses
from specjax.training import rejections
from specjax.training import shifts

_PLACES = 64  # shapes of updates are multiples of it


@struct.dataclass
class State:
  """Of a batch."""
  inner: Any
  texts: rejections.Rejections
  drafted: jax.Array  # i32[B, K]; the latest chain


@struct.dataclass
class Online(base.Defaults):
  """Drafts as `inner` does, whose weights learn in `remember`; made by `online`.

  Attributes:
    inner: the drafter of chains as it is now. first: its weights at the start. moments: of the optimizer.
    frozen: what the learner reads of the target. kept: texts since the last update, of which `filled` i32[] are used.
    kind: a name of `learners.BY_NAME`. steps, learning_rate, loss: see `online`.
  """
  inner: Any
  first: Any
  moments: Any
  frozen: shifts.Frozen
  kept: rejections.Rejections
  filled: jax.Array
  kind: str = struct.field(pytree_node=False)
  steps: int = struct.field(pytree_node=False)
  learning_rate: float = struct.field(pytree_node=False)
  loss: str = struct.field(pytree_node=False)

  @property
  def max_nodes(self) -> int:
    return self.inner.max_nodes

  @property
  def max_depth(self) -> int:
    return self.inner.max_depth

  @property
  def samples(self) -> bool:
    return self.inner.samples

  @property
  def features(self) -> tuple[int, ...]:
    return self.inner.features

  @property
  def node_ids(self) -> int:
    return self.inner.node_ids

  @property
  def draft_context(self) -> int | None:
    return self.inner.draft_context

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    size, hidden, features = (self.kept.tokens.shape[1], self.kept.hidden, self.kept.features)
    return State(inner=self.inner.init(target, batch, capacity),
                 texts=rejections.empty(batch, size, hidden.shape[-1], features.shape[-1], hidden.dtype),
                 drafted=jnp.full((batch, self.max_depth), -1, jnp.int32))

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`."""
    tree, inner = self.inner.propose(target, cache, state.inner, context, keys)
    return tree, state.replace(inner=inner, drafted=tree.tokens[:, 1:self.max_depth + 1])

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    layers = _layers(self.inner)
    features = own_features.joined(committed, layers) if layers else jnp.zeros((*committed.tokens.shape, 0))
    return state.replace(inner=self.inner.observe(target, state.inner, committed),
                         texts=state.texts.observe(committed, features, state.drafted))

  def remember(self, state, outputs):
    """See `base.Proposer.remember`: keeps the texts, and learns when there are enough of them."""
    found = self.replace(inner=self.inner.remember(state.inner, outputs))
    for row in range(len(state.texts.tokens)):
      index = int(found.filled)
      found = found.replace(kept=found.kept.put(index, state.texts, row), filled=jnp.int32(index + 1))
      if index + 1 == len(found.kept.tokens):
        found = found.learned()
    return found

  def learned(self) -> "Online":
    """The proposer after `steps` optimizer steps on the places that are kept, of which none is left then."""
    depth = np.asarray(self.kept.depth) * (np.arange(len(self.kept.tokens)) < int(self.filled))[:, None]
    text, token = np.nonzero(depth)
    learner = learners.BY_NAME[self.kind]
    ids = learner.ids(self.inner)
    if ids is not None:  # as in the training of heads: nothing is learnt from a token that is never drafted
      tokens, length = np.asarray(self.kept.tokens), np.asarray(self.kept.length)
      taken = tokens[text, np.minimum(token + 1, tokens.shape[1] - 1)]
      drafted = (token + 1 < length[text]) & np.isin(taken, np.asarray(ids))
      text, token = text[drafted], token[drafted]
    count = len(text)
    after = self.replace(filled=jnp.int32(0), kept=self.kept.replace(depth=jnp.zeros_like(self.kept.depth)))
    if not count:
      return after
    pad = lambda x: jnp.asarray(np.pad(x, (0, -count % _PLACES)), jnp.int32)
    places = learners.Places(text=pad(text), token=pad(token), depth=pad(depth[text, token] - 1),
                             counted=pad(np.ones(count, np.int32)) > 0)
    weights, moments = _update(learner.part(self.inner), self.moments, self.frozen, ids, self.kept, places,
                               kind=self.kind, depths=self.max_depth, steps=self.steps, rate=self.learning_rate,
                               loss=self.loss)
    return after.replace(inner=learner.put(self.inner, weights), moments=moments)

  def forget(self):
    """See `base.Proposer.forget`: the drafter as it was at the start."""
    learner, zero = learners.BY_NAME[self.kind], lambda tree: jax.tree.map(jnp.zeros_like, tree)
    return self.replace(inner=learner.put(self.inner, self.first).forget(), moments=zero(self.moments),
                        kept=zero(self.kept), filled=jnp.int32(0))


def online(target, inner, *, requests: int = 8, steps: int = 4, learning_rate: float = 1e-4, max_tokens: int = 512,
           loss: str = "soft_ce") -> Online:
  """A proposer that learns.

  Args:
    target: a decoder; its head and embedding are shared.
    inner: a `DraftModel`, `Medusa` or `Eagle` with a head of EAGLE-3, of chains.
    requests: an update comes after so many. steps: of the optimizer in an update.
    max_tokens: of each text that is kept; what is behind teaches nothing.
    loss: a name of `losses.BY_NAME`.

  Raises:
    ValueError: for another proposer, or a number out of range.
  """
  for name, value in (("requests", requests), ("steps", steps), ("max_tokens", max_tokens)):
    if value < 1:
      raise ValueError(f"{name}={value}: it must be 1 or more")
  if not 0 < learning_rate < float("inf"):
    raise ValueError(f"learning_rate={learning_rate}: it must be positive")
  if loss not in losses.BY_NAME:
    raise ValueError(f"loss={loss!r}: allowed are {', '.join(losses.BY_NAME)}")
  kind = learners.of(inner)
  base.layers_of(target, "online")
  learner = learners.BY_NAME[kind]
  weights = jax.tree.map(lambda x: x.astype(jnp.float32), learner.part(inner))
  ids, count = learner.ids(inner), target.config.num_tokens
  if ids is None:
    head = target.head if len(target.head) == count else target.head[:count]  # the array itself where it can be
  else:
    head = shifts.head_rows(target, ids)
  frozen = shifts.Frozen(embedding=target.weights.embedding, head=head)
  kept = rejections.empty(requests, max_tokens, target.config.width, len(_layers(inner)) * target.config.width,
                          target.weights.embedding.dtype)
  return Online(inner=learner.put(inner, weights), first=weights, moments=optax.scale_by_adam().init(weights),
                frozen=frozen, kept=kept, filled=jnp.int32(0), kind=kind, steps=steps, learning_rate=learning_rate,
                loss=loss)


def divergence(weights, frozen: shifts.Frozen, ids, texts: rejections.Rejections, places: learners.Places, *, kind: str,
               depths: int, loss: str) -> jax.Array:
  """The mean loss over places between the drafter's law and the target's, both over the ids that are drafted: f32[]."""
  logits = learners.BY_NAME[kind].logits(weights, frozen, ids, texts, places, depths)
  hidden = texts.hidden[places.text, places.token].astype(jnp.float32)
  law = jax.nn.softmax(jnp.einsum("pd,ud->pu", hidden, frozen.head.astype(jnp.float32)))
  return losses.mean(losses.BY_NAME[loss](jax.nn.log_softmax(logits[:, :law.shape[1]]), law), places.counted)


@functools.partial(jax.jit, static_argnames=("kind", "depths", "steps", "rate", "loss"))
def _update(weights, moments, frozen, ids, texts, places, *, kind, depths, steps, rate, loss):
  """Weights and moments after some optimizer steps on the same places."""
  optimizer = optax.scale_by_adam()

  def turn(carry, _):
    weights, moments = carry
    gradient = jax.grad(divergence)(weights, frozen, ids, texts, places, kind=kind, depths=depths, loss=loss)
    changes, moments = optimizer.update(gradient, moments, weights)
    return (jax.tree.map(lambda w, change: w - rate * change, weights, changes), moments), None

  return jax.lax.scan(turn, (weights, moments), None, length=steps)[0]


def _layers(inner):
  """Layers whose features the learner reads, in the order that the head joins them."""
  return tuple(getattr(inner.head, "features", ())) if hasattr(inner, "head") else ()
