"""How far drafts agree with text that the target wrote, and how sure a difference between two drafters is.

A drafter is replayed on the text: behind every token of an answer stands the chain, or tree, that it would draft there,
from the true features of what comes before and its own outputs behind. Since the text is the target's own, what agrees
with it is what decoding accepts; steps that follow each other are those of a decoding run, no sampling is involved.

Differences carry the error of a paired bootstrap over sequences. It holds what another text would change, not what other
first weights would.

Letters: N sequences, S tokens, D places of a chain.
"""
from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.ablations import base
from specjax.training import shifts

_ROUNDS = 400
_SURE = 2.0  # errors that a difference is from 0 when it is called one


@dataclasses.dataclass(frozen=True)
class Replay:
  """Accepted drafts by entry; entry t drafts behind token t + 1, as in `specjax.training.by_depth`.

  Attributes:
    accepted: i32[N, S]; how many of a chain's drafts are the text's, one after the other. room: i32[N, S]; tokens of
      the answer that are left there, 0 where nothing is drafted. depth: D.
  """
  accepted: np.ndarray
  room: np.ndarray
  depth: int

  @functools.cached_property
  def hits(self) -> np.ndarray:
    """i64[N, D]: drafts that were accepted, by place."""
    return np.stack([((self.accepted > i) & (self.room > i)).sum(1) for i in range(self.depth)], 1)

  @functools.cached_property
  def tried(self) -> np.ndarray:
    """i64[N, D]: drafts whose chain was right up to them."""
    return np.stack([((self.accepted >= i) & (self.room > i)).sum(1) for i in range(self.depth)], 1)

  @functools.cached_property
  def steps(self) -> np.ndarray:
    """i64[N, 2]: steps that decoding the answer takes, and its tokens."""
    out = np.zeros((len(self.room), 2), np.int64)
    for row, (accepted, room) in enumerate(zip(self.accepted, self.room)):
      first, = np.nonzero(room)[0][:1]
      at, total = first, room[first]
      while at < first + total:
        at += min(accepted[at], room[at] - 1) + 1
        out[row, 0] += 1
      out[row, 1] = total
    return out

  def upto(self, depth: int) -> "Replay":
    """Of the first drafts of each chain alone."""
    return Replay(np.minimum(self.accepted, depth), self.room, depth)


def conditional(replay: Replay, rows=slice(None)) -> np.ndarray:
  """f[D]: the share of drafts accepted given all before in their chain; NaN where there were none."""
  hits, tried = replay.hits[rows].sum(0), replay.tried[rows].sum(0)
  return np.where(tried > 0, hits / np.maximum(tried, 1), np.nan)


def pooled(replay: Replay, rows=slice(None), first: int = 1) -> float:
  """That share over the places from `first` on."""
  return replay.hits[rows, first:].sum() / max(replay.tried[rows, first:].sum(), 1)


def tokens(replay: Replay, rows=slice(None)) -> float:
  """Tokens a step, the new one included."""
  steps, made = replay.steps[rows].sum(0)
  return made / steps


def ranks(made: list[jax.Array], text: jax.Array) -> jax.Array:
  """i32[B, S, D]: how many ids have a greater logit than the token of the text, ties won by the lower id, from logits
  D x f[B, S, V] whose entry t of place i stands for token t + 2 + i of `text` i32[B, S]."""
  found = []
  for i, logits in enumerate(made):
    label = shifts.ahead(text, 2 + i)[..., None]
    own, order = jnp.take_along_axis(logits, label, -1), jnp.arange(logits.shape[-1], dtype=jnp.int32)
    found.append(((logits > own) | ((logits == own) & (order < label))).sum(-1, dtype=jnp.int32))
  return jnp.stack(found, -1)


def of_chain(found: np.ndarray, room: np.ndarray) -> Replay:
  """Of the most probable drafts, from `ranks` i32[N, S, D]."""
  return Replay(np.minimum(np.cumprod(found == 0, axis=-1).sum(-1), room), room, found.shape[-1])


def of_tree(found: np.ndarray, room: np.ndarray, parents, chosen) -> Replay:
  """Of a static tree whose node has a parent and the rank `chosen` among its place's drafts; node 0 is the root."""
  depths, right = np.zeros(len(parents), np.int64), [np.ones(room.shape, bool)]
  accepted = np.zeros(room.shape, np.int64)
  for node in range(1, len(parents)):
    depths[node] = depths[parents[node]] + 1
    right.append(right[parents[node]] & (found[..., depths[node] - 1] == chosen[node]))
    accepted = np.maximum(accepted, depths[node] * right[node])
  return Replay(np.minimum(accepted, room), room, int(depths.max()))


def room_of(batch) -> np.ndarray:
  """i32[B, S]: the answer's tokens from token t + 2 on, where it is one of the answer's."""
  label = np.arange(batch.tokens.shape[1])[None] + 2
  left = batch.length[:, None] - label
  return np.where((label >= batch.start[:, None]) & (left > 0), left, 0)


def gap(difference: Callable[[np.ndarray], float], count: int) -> tuple[float, float]:
  """A difference over sequences and its standard error, from `difference` of indices of sequences, of `count`."""
  rng = np.random.default_rng(0)
  drawn = [difference(rng.integers(0, count, count)) for _ in range(_ROUNDS)]
  return float(difference(np.arange(count))), float(np.std(drawn))


def judge(claims: dict[str, tuple[float, float]]) -> tuple[str, str]:
  """The verdict on claims that a difference is above 0, from differences and errors of `gap`: "differs" if one is below
  0 by more than two errors, "cannot say" if one is within two errors of 0, else "agrees"; and, in words, which."""
  below = [claim for claim, (value, error) in claims.items() if value < -_SURE * error]
  unsure = [claim for claim, (value, error) in claims.items() if claim not in below and value <= _SURE * error]
  told = lambda names: "; ".join(f"{name} ({claims[name][0]:+.3f}, error {claims[name][1]:.3f})" for name in names)
  words = " ".join([f"Not so here: {told(below)}."] * bool(below)
                   + [f"Not told apart from chance: {told(unsure)}."] * bool(unsure))
  return (base.DIFFERS if below else base.CANNOT_SAY if unsure else base.AGREES), words
