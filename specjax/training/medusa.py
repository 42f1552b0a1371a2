"""Training of Medusa's heads on a frozen target (Medusa-1, arXiv 2401.10774).

Head i meets the hidden state at token t with the target's law behind token t + 1 + i, whose own token is t + 2 + i. The
paper's weights fall by 0.8 a head; its label is the next token of the data, "ce" here where a greedy answer is the data.
Blocks start as the identity: every head begins as the target's own head.

Letters: B sequences, S tokens, N heads, D width of the target, U draft ids.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import medusa
from specjax.training import batches
from specjax.training import by_depth
from specjax.training import shifts


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How heads are trained; see `eagle3.Recipe` for those of the same name."""
  decay: float = 0.8
  loss: str = "soft_ce"
  answers_only: bool = True


def init(target, ids: np.ndarray, heads: int, *, blocks: int = 1, own_vocabulary: bool = False) -> medusa.MedusaHead:
  """Heads whose blocks change nothing yet; their matrix is the target's head at `ids`, or a copy of it."""
  c = target.config
  config = medusa.MedusaConfig(heads=heads, blocks=blocks, width=c.width, vocab_size=c.num_tokens, draft_vocab=len(ids))
  dtype = target.weights.embedding.dtype
  rows = shifts.head_rows(target, ids)
  return medusa.MedusaHead(linear=tuple(jnp.zeros((c.width, c.width), dtype) for _ in range(heads)),
                           bias=tuple(jnp.zeros((c.width,), dtype) for _ in range(heads)),
                           vocabulary=tuple(rows for _ in range(heads)) if own_vocabulary else None,
                           ids=None if len(ids) == c.num_tokens else jnp.asarray(ids, jnp.int32), config=config)


def loss(params: medusa.MedusaHead, rows: jax.Array, ids: jax.Array, batch: batches.Batch, recipe: Recipe):
  """The loss of a batch and its metrics, as of `eagle3.loss`; `rows` f[U, D] are the target's head at `ids`."""
  return by_depth.loss(head_logits(params, rows, batch), rows, ids, batch, recipe, params.config.vocab_size)


def rank_hits(params: medusa.MedusaHead, rows: jax.Array, ids: jax.Array, batch: batches.Batch, ranks: int):
  """See `by_depth.rank_hits`."""
  return by_depth.rank_hits(head_logits(params, rows, batch), ids, batch, ranks)


def head_logits(params: medusa.MedusaHead, rows: jax.Array, batch: batches.Batch) -> list[jax.Array]:
  """The logits f[B, S, U] of every head; entry t of head i is the i-th draft behind token t + 1."""
  hidden = batch.hidden.astype(jnp.float32)
  shape = hidden.shape
  states = params.states(hidden.reshape(-1, shape[-1]))
  matrices = params.vocabulary or [rows] * params.config.heads
  return [jnp.einsum("nd,ud->nu", states[:, i], matrix).reshape(*shape[:2], -1) for i, matrix in enumerate(matrices)]
