"""How far drafts go on text that the target wrote, and how sure a difference between two drafters is.

A drafter is replayed on the text: behind every token of an answer stands the chain, or tree, that it would draft there,
from the true features of what comes before and its own outputs behind. What follows is exact given the text, with
nothing drawn anew. Of drafts that are drawn from q and judged by Leviathan's rule the text's own path is accepted with
the product of min(1, q / p) of its tokens: over texts that is the sum of min(p, q) over all paths. Drafts that are
chosen are accepted where they are the text's. From the chance that a step ends at each place follow those of the steps
behind it, and so the steps that decoding this text takes.

Differences carry the error of a paired bootstrap over sequences. It holds what another text would change, not what
other first weights would.

Letters: B, N sequences, S tokens, D places of a chain, V ids.
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
    survival: f[N, S, D]; the chance that the first i + 1 drafts are accepted, given the text.
    room: i32[N, S]; tokens of the answer that are left there, 0 where nothing is drafted.
  """
  survival: np.ndarray
  room: np.ndarray

  @functools.cached_property
  def hits(self) -> np.ndarray:
    """f[N, D]: drafts that are accepted, by place."""
    return np.where(self._inside, self.survival, 0).sum(1)

  @functools.cached_property
  def tried(self) -> np.ndarray:
    """f[N, D]: drafts whose chain is accepted up to them."""
    before = np.concatenate([np.ones_like(self.survival[..., :1]), self.survival[..., :-1]], -1)
    return np.where(self._inside, before, 0).sum(1)

  @functools.cached_property
  def steps(self) -> np.ndarray:
    """f[N, 2]: steps that decoding the answer takes, and its tokens."""
    rows, size, depth = self.survival.shape
    # A step ends with a new token, so the last one of the text is not a draft.
    last = np.arange(depth) >= self.room[..., None] - 1
    reach = np.concatenate([np.ones((rows, size, 1)), np.where(last, 0, self.survival), np.zeros((rows, size, 1))], -1)
    begins = np.zeros((rows, size + depth + 1))
    begins[np.arange(rows), (self.room > 0).argmax(1)] = 1
    for t in range(size):
      begins[:, t] *= self.room[:, t] > 0
      begins[:, t + 1:t + depth + 2] += begins[:, t, None] * -np.diff(reach[:, t])
    return np.stack([begins[:, :size].sum(1), self.room.max(1)], 1)

  @property
  def _inside(self):
    return np.arange(self.survival.shape[-1]) < self.room[..., None]

  def upto(self, depth: int) -> "Replay":
    """Of the first drafts of each chain alone."""
    return Replay(self.survival[..., :depth], self.room)


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


def ratios(made: list[jax.Array], theirs: jax.Array, text: jax.Array) -> jax.Array:
  """f32[B, S, D]: min(1, q / p) of the token of the text, as `ranks` has it; the target's logits are `theirs`
  f[B, S, V], entry t behind token t."""
  of_next = lambda logits, by: jnp.take_along_axis(jax.nn.log_softmax(logits), shifts.ahead(text, by)[..., None], -1)
  log_p = of_next(theirs, 1)[..., 0]
  return jnp.stack([jnp.exp(jnp.minimum(of_next(logits, 2 + i)[..., 0] - shifts.ahead(log_p, 1 + i), 0))
                    for i, logits in enumerate(made)], -1)


def of_drawn(found: np.ndarray, room: np.ndarray) -> Replay:
  """Of drafts that are drawn, from `ratios` f[N, S, D]."""
  return Replay(np.cumprod(found, axis=-1, dtype=np.float64), room)


def of_chain(found: np.ndarray, room: np.ndarray) -> Replay:
  """Of the most probable drafts, from `ranks` i32[N, S, D]."""
  return Replay(np.cumprod(found == 0, axis=-1, dtype=np.float64), room)


def of_tree(found: np.ndarray, room: np.ndarray, parents, chosen) -> Replay:
  """Of a static tree whose node has a parent and the rank `chosen` among its place's drafts; node 0 is the root."""
  right, depths = [np.ones(room.shape, bool)], [0]
  accepted = np.zeros(room.shape, np.int64)
  for node in range(1, len(parents)):
    depths.append(depths[parents[node]] + 1)
    right.append(right[parents[node]] & (found[..., depths[node] - 1] == chosen[node]))
    accepted = np.maximum(accepted, depths[node] * right[node])
  return Replay((accepted[..., None] > np.arange(max(depths))).astype(np.float64), room)


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
