"""What heads of one depth each, or passes of one head, are asked for: the loss that EAGLE-3, Medusa and Hydra share,
and the table of accuracy of the latter two.

Entry t of depth i is the i-th draft behind token t + 1: it meets the target's law behind token t + 1 + i, whose own
token is t + 2 + i.

Letters: B sequences, S tokens, N depths, K ranks, D width of the target, U draft ids.
"""
import jax
import jax.numpy as jnp

from specjax.training import batches
from specjax.training import losses
from specjax.training import shifts


def loss(made: list[jax.Array], rows: jax.Array, ids: jax.Array, batch: batches.Batch, recipe, vocab_size: int,
         bias: jax.Array | None = None):
  """The loss of a batch and its metrics, as of `eagle3.loss`.

  Args:
    made: N x f[B, S, U], the logits of every depth. rows: f[U, D], the target's head at `ids` i32[U].
    recipe: with `decay`, depth i weighs decay ** i, `loss`, a name of `losses.BY_NAME` or `losses.TEXT`, which asks for
      the token of the text where it is a draft id, and `answers_only`.
    bias: of the target's logits, see `shifts.Frozen`.
  """
  law = jnp.einsum("bsd,ud->bsu", batch.hidden.astype(jnp.float32), rows)
  law = jax.nn.softmax(law if bias is None else law + bias)
  drafted = shifts.is_drafted(ids, vocab_size)
  total, metrics, track = 0.0, {}, shifts.Track()
  for i, logits in enumerate(made):
    p, top = shifts.ahead(law, 1 + i), shifts.ahead(batch.top, 1 + i)
    log_q = jax.nn.log_softmax(logits)
    asked = shifts.asked(batch, 2 + i, recipe.answers_only)
    if recipe.loss == losses.TEXT:
      label = shifts.ahead(batch.tokens, 2 + i)
      value = losses.mean(losses.cross_entropy(log_q, ids == label[..., None]), asked & drafted[label])
    else:
      value = losses.mean(losses.BY_NAME[recipe.loss](log_q, p), asked & drafted[top])
    total = total + recipe.decay ** i * value
    metrics |= {f"loss_{i}": value, **track.add(i, asked, ids[jnp.argmax(log_q, -1)] == top)}
  return total, metrics


def rank_hits(made: list[jax.Array], ids: jax.Array, batch: batches.Batch, ranks: int):
  """How often the choice of each rank is the target's token: hits and places, i32[N, K] and i32[N].

  For `models.medusa.MedusaConfig.accuracy`, from which trees are made (Medusa's calibrated table). Heads that see
  drafted tokens see those of the text.
  """
  hits, places = [], []
  for i, logits in enumerate(made):
    asked = shifts.asked(batch, 2 + i, True)
    best = ids[jax.lax.top_k(logits, ranks)[1]]
    same = (best == shifts.ahead(batch.top, 1 + i)[..., None]) & asked[..., None]
    hits.append(same.sum((0, 1)))
    places.append(asked.sum())
  return jnp.stack(hits), jnp.stack(places)
