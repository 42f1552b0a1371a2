"""What proposers that are made of others share: their sizes, and what they read and keep, follow from their parts."""
from specjax.proposers import base


class Several(base.Defaults):
  """A mixin for proposers with a field `proposers`, a tuple of two or more; their state has the parts' as `states`."""

  def __post_init__(self):
    """Raises ValueError for fewer than two proposers, or one that drafts on the host."""
    if not isinstance(self.proposers, tuple):
      return  # put together from something else inside a transformation
    if len(self.proposers) < 2:
      raise ValueError(f"proposers={self.proposers}: two or more are needed")
    for proposer in self.proposers:
      if proposer.host:
        raise ValueError(f"{type(proposer).__name__} drafts on the host and cannot be one of several; use it alone")

  @property
  def max_depth(self) -> int:
    return max(p.max_depth for p in self.proposers)

  @property
  def node_ids(self) -> int:
    return max(p.node_ids for p in self.proposers)

  @property
  def features(self) -> tuple[int, ...]:
    return tuple(sorted({layer for p in self.proposers for layer in p.features}))

  @property
  def samples(self) -> bool:
    return any(p.samples for p in self.proposers)

  @property
  def draft_context(self) -> int | None:
    limits = [p.draft_context for p in self.proposers if p.draft_context is not None]
    return min(limits) if limits else None

  def remember(self, state, outputs):
    """See `base.Proposer.remember`."""
    return self.replace(proposers=tuple(p.remember(own, outputs) for p, own in zip(self.proposers, state.states)))

  def forget(self):
    """See `base.Proposer.forget`."""
    return self.replace(proposers=tuple(p.forget() for p in self.proposers))


def first_ids(node_ids, count):
  """Of the ids that were computed for all, as many as one proposer reads: `node_ids` i32[B, W, K] -> i32[B, W, count]."""
  return None if node_ids is None or not count else node_ids[..., :count]
