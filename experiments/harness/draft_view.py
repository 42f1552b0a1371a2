"""What a draft model is given of a conversation: all that the target reads, or less of its chat template.

A drafter that was trained on bare text may draft better without the marks of a template, or without a system prompt
that it never saw. The view takes tokens out of the context, in front of the prompt and behind it; the draft is of the
same output, so the tree is, and verification goes on as ever.

Letters: B batch rows, S slots.
"""
from typing import Any

from flax import struct
import jax.numpy as jnp

from specjax.proposers import base


@struct.dataclass
class View(base.Defaults):
  """A proposer with a draft model of its own cache, which does not see some of the prompt.

  Attributes:
    inner: a proposer that reads `context` and nothing of the target, such as `DraftModel`.
    front: tokens that it does not see at the beginning. back: those it does not see at the end of the prompt.
  """
  inner: Any
  front: int = struct.field(pytree_node=False)
  back: int = struct.field(pytree_node=False)

  @property
  def max_nodes(self):
    return self.inner.max_nodes

  @property
  def max_depth(self):
    return self.inner.max_depth

  @property
  def chains(self):
    return self.inner.chains

  @property
  def samples(self):
    return self.inner.samples

  @property
  def draft_context(self):
    return self.inner.draft_context

  def init(self, target, batch, capacity):
    """See `base.Proposer.init`."""
    return self.inner.init(target, batch, capacity)

  def propose(self, target, cache, state, context, keys):
    """See `base.Proposer.propose`. The root is the pending token, also where that is one the drafter does not see."""
    start = context.start - self.front - self.back
    place = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
    place = place + self.front + jnp.where(place < start[:, None], 0, self.back)
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(place, context.tokens.shape[1] - 1), axis=1)
    seen = context.replace(tokens=tokens, start=start, length=context.length - self.front - self.back)
    tree, state = self.inner.propose(target, cache, state, seen, keys)
    return tree.replace(tokens=tree.tokens.at[:, 0].set(context.pending)), state

  def observe(self, target, state, committed):
    """See `base.Proposer.observe`."""
    return self.inner.observe(target, state, committed)


def template(tokenizer) -> tuple[list[int], list[int]]:
  """The ids that the chat template writes in front of a user's only message, and behind it."""
  first, second = (tokenizer.chat([{"role": "user", "content": text}]) for text in "7x")
  return _shared(first, second), _shared(first[::-1], second[::-1])[::-1]


def system(tokenizer) -> list[int]:
  """The ids of the system prompt that the template writes in front of a user's first message; [] without one.

  A later message has the same opening without it. Where a turn ends before the opening, what is left of that is the
  system prompt's own end.
  """
  front, _ = template(tokenizer)
  talk = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
  later = _shared(*(tokenizer.chat([*talk, {"role": "user", "content": text}]) for text in "7x"))
  opening = _shared(front[::-1], later[::-1])[::-1]
  ends = [i for i, token in enumerate(opening) if token in tokenizer.eos_ids]
  if ends:
    opening = opening[ends[-1] + 1:]
    while opening and not tokenizer.decode(opening[:1], skip_special_tokens=False).strip():
      opening = opening[1:]
  return front[:len(front) - len(opening)]


def _shared(a, b):
  count = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
  return a[:count]
