"""Training of a DSpark drafter: DFlash's blocks, every place of which drafts, with the token of the text before it.

DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec). The Markov head is told the tokens of the text (teacher forcing). The
confidence head learns the chance of acceptance, 1 - TV(p, q), of the law as it is at that step; its gradient does not
reach that chance. Of a drafter of some ids only, p is the target's law among these, where the most probable id is one of
them: what it says is then too high by what the target puts on the others. The paper's loss of the law is `--loss=dspark`.

Letters: B sequences, A anchors of each, J places of a block, E width, R rank of the Markov head, U draft ids,
V vocabulary.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import dspark
from specjax.training import dflash


@dataclasses.dataclass(frozen=True)
class Recipe(dflash.Recipe):
  """As of DFlash; the loss of the confidence head weighs `confidence` beside that of the law."""
  confidence: float = 1.0


def init(target, ids: np.ndarray, features: tuple[int, ...], *, layers: int, block: int, mask_id: int, rank: int,
         key: jax.Array) -> dspark.DSparkHead:
  """DFlash's first drafter; the Markov head knows tokens by the greatest `rank` directions of the target's embedding
  and says nothing of them yet. Arguments as of `dflash.init`.

  Raises:
    ValueError: for a rank outside 1 to E, or as `dflash.init`.
  """
  embedding = target.weights.embedding.astype(jnp.float32)
  if not 1 <= rank <= embedding.shape[1]:
    raise ValueError(f"rank={rank}: the Markov head begins from the target's embedding, so it is 1 to its width, "
                     f"{embedding.shape[1]}")
  drafter = dflash.init(target, ids, features, layers=layers, block=block, mask_id=mask_id, key=key)
  _, directions = jnp.linalg.eigh(embedding.T @ embedding)
  first = embedding @ directions[:, -rank:]
  first = first / jnp.sqrt(jnp.mean(first * first, axis=0))
  dtype = target.weights.embedding.dtype
  return dspark.DSparkHead(
      drafter=drafter.replace(ids=None), first=first.astype(dtype), second=jnp.zeros((len(ids), rank), dtype),
      confidence=jnp.zeros((embedding.shape[1] + rank,), dtype), confidence_bias=jnp.zeros((), dtype), ids=drafter.ids)


def loss(params: dspark.DSparkHead, embedding: jax.Array, rows: jax.Array, ids: jax.Array, given: dflash.Anchored,
         recipe: Recipe):
  """The loss of a batch and its metrics; arguments as of `dflash.loss`."""
  hidden, previous = places(params, embedding, given)
  logits = lambda i: params.follow(jnp.einsum("bad,ud->bau", hidden[:, :, i], rows), previous[:, :, i])

  def confidence(i, log_q, p):
    said = params.acceptance(hidden[:, :, i], previous[:, :, i])
    chance = jax.lax.stop_gradient(jnp.minimum(p, jnp.exp(log_q)).sum(-1))
    return -recipe.confidence * (chance * jax.nn.log_sigmoid(said) + (1 - chance) * jax.nn.log_sigmoid(-said))

  return dflash.over_depths(given, params.config.block, logits, embedding.shape[0], rows, ids, recipe,
                            None if params.confidence is None else confidence)


def places(params: dspark.DSparkHead, embedding: jax.Array, given: dflash.Anchored) -> tuple[jax.Array, jax.Array]:
  """The hidden states f[B, A, J, E] of all places, and the token of the text that each is told, i32[B, A, J]."""
  at = given.anchors[:, :, None] + jnp.arange(params.config.block, dtype=jnp.int32)
  return dflash.blocks(params.drafter, embedding, given), dflash.pick(given.batch.tokens, at)
