"""What learns online of each kind of drafter: its weights, and its logits at the places where its drafts were wrong.

A place is (text, token t, depth i): the i-th draft of a chain, for token t + 1, was wrong. The chain's pending token
was token t - i; Medusa's heads drafted from the hidden state before it, EAGLE's from the features before it, in pass i.

Letters: P places, B texts, S tokens, D width of the target, U draft ids, V vocabulary.
"""
import dataclasses
from typing import Callable

from flax import struct
import jax
import jax.numpy as jnp

from specjax import proposers
from specjax.models.decoder import Decoder
from specjax.models.eagle3 import Eagle3Head
from specjax.training import batches
from specjax.training import distill
from specjax.training import medusa
from specjax.training import own_passes
from specjax.training import rejections


@struct.dataclass
class Places:
  """Some places; those behind the real ones are (0, 0, 0) and do not count."""
  text: jax.Array     # i32[P]
  token: jax.Array    # i32[P]; t
  depth: jax.Array    # i32[P]; i
  counted: jax.Array  # bool[P]


@dataclasses.dataclass(frozen=True)
class Learner:
  """One kind of drafter.

  Attributes:
    part: proposer -> its weights that learn, a pytree of floats. put: (proposer, weights) -> the proposer with them.
    ids: proposer -> i32[U], the ids that it drafts, or None for all.
    logits: (weights, frozen, ids, texts, places, depths) -> f[P, U]; `frozen` a `shifts.Frozen` of these ids, `depths`
      the number of tokens of its longest chain.
  """
  part: Callable
  put: Callable
  ids: Callable
  logits: Callable


def of(proposer) -> str:
  """The name in `BY_NAME` of what learns in a proposer.

  Raises:
    ValueError: for a proposer of another kind, or one of trees.
  """
  kinds = {proposers.DraftModel: "draft_model", proposers.Medusa: "medusa", proposers.Eagle: "eagle3"}
  kind = kinds.get(type(proposer))
  fits = {"draft_model": lambda: isinstance(proposer.model, Decoder), "medusa": lambda: True,
          "eagle3": lambda: isinstance(proposer.head, Eagle3Head)}
  if kind is None or not fits[kind]():
    raise ValueError(f"{type(proposer).__name__} does not learn online here; a DraftModel with a decoder, Medusa and "
                     "Eagle with a head of EAGLE-3 do")
  if not proposer.chains:
    raise ValueError(f"{type(proposer).__name__} drafts trees here; only chains learn online")
  return kind


def _draft_model(weights, frozen, ids, texts: rejections.Rejections, places: Places, depths: int):
  del frozen, ids, depths
  hidden = distill.hidden(weights, texts.tokens)
  return weights.logits(hidden[places.text, places.token][None])[0]


def _medusa(weights, frozen, ids, texts, places, depths):
  hidden = texts.hidden[places.text, jnp.maximum(places.token - places.depth - 1, 0)]
  made = medusa.head_logits(weights, frozen.head, _batch(texts.replace(hidden=hidden[None]), 1))
  return jnp.stack(made[:depths], axis=2)[0, jnp.arange(len(places.token)), places.depth]


def _eagle3(weights, frozen, ids, texts, places, depths):
  made = own_passes.run(weights, frozen.embedding, _batch(texts, len(texts.tokens)), depths)
  at = jnp.maximum(places.token - places.depth - 1, 0)
  return weights.logits(jnp.stack(made)[places.depth, places.text, at][None])[0]


def _batch(texts, count):
  """As the training of heads reads texts; what the loss alone reads is left out."""
  nothing = jnp.zeros((count,), jnp.int32)
  return batches.Batch(tokens=texts.tokens, length=texts.length, start=nothing, features=texts.features,
                       hidden=texts.hidden, top=None)


def _of_head(proposer):
  return proposer.head.replace(ids=None)


def _put_head(proposer, weights):
  return proposer.replace(head=weights.replace(ids=proposer.head.ids))


BY_NAME = {
    "draft_model": Learner(part=lambda proposer: proposer.model,
                           put=lambda proposer, weights: proposer.replace(model=weights),
                           ids=lambda proposer: None, logits=_draft_model),
    "medusa": Learner(part=_of_head, put=_put_head, ids=lambda proposer: proposer.head.ids, logits=_medusa),
    "eagle3": Learner(part=_of_head, put=_put_head, ids=lambda proposer: proposer.head.ids, logits=_eagle3),
}
