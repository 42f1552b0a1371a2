"""Training of a P-EAGLE head: every entry of the text is an anchor, with the masks of all depths behind it.

P-EAGLE (arXiv 2602.01469; vllm-project/speculators). The mask of depth i behind entry t stands at position t + i and
sees the entries of the text up to t, the masks before it behind the same entry, and itself; its label is the target's
law behind token t + 1 + i (see `shifts`). The published trainer keeps a random part of the masks of each depth
(conditional drop-token: 0.7 ** i of them, 0.2 at least) and cuts long sequences in pieces, both to save memory. Here
all are kept, one depth after another, and depth i weighs what would be kept of it, 0.7 ** i; the least of 0.2 is left
out. The embedding of a mask is learned only with an embedding of the head's own, else it stays the target's of an id
that texts do not hold.

Letters: B sequences, S entries, D width of the target, E width of the head, F = features * D, U draft ids, N depths.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import draft_layer
from specjax.models import peagle
from specjax.training import batches
from specjax.training import by_depth
from specjax.training import eagle3
from specjax.training import own_passes
from specjax.training import shifts
from specjax.training import starting_layers


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a head is trained: depth i weighs decay ** i; see `eagle3.Recipe` for the others."""
  decay: float = 0.7
  loss: str = "soft_ce"
  answers_only: bool = True


def init(target, ids: np.ndarray, features: tuple[int, ...], *, layers: int, depths: int, mask_id: int,
         key: jax.Array) -> peagle.PEagleHead:
  """A head that starts from the target's last layers, norm and head rows; the deepest feature passes as it is.

  Args:
    target: a `models.decoder.Decoder`. ids: i32[U], ascending, or all of them. features: layers, the deepest last.
    layers: of the head, EAGLE-3's included. depths: N.
    mask_id: an id that texts do not hold.

  Raises:
    ValueError: the target has fewer layers.
  """
  c, w = target.config, target.weights
  if not 1 <= layers <= c.layers:
    raise ValueError(f"a head of {layers} layers begins as the target's last ones, and it has {c.layers}: take fewer "
                     "(--head_layers)")
  first_key, hidden_key = jax.random.split(key)
  first = eagle3.init(target.keep((c.layers - layers,)), ids, features, first_key)
  last = starting_layers.last(target, layers - 1) if layers > 1 else ()
  made = tuple(draft_layer.DraftLayer(qkv=x.qkv, attention_out=x.attention_out, mlp_norm=x.mlp_norm, gate_up=x.gate_up,
                                      down=x.down) for x in last)
  # As speculators draws it.
  hidden = jax.random.normal(hidden_key, (len(features) * c.width,)).astype(w.embedding.dtype)
  return peagle.PEagleHead(first=first.replace(ids=None), layers=made,
                           input_norms=tuple(x.attention_norm for x in last), hidden=hidden, ids=first.ids,
                           mask_id=mask_id, depths=depths)


def loss(params: peagle.PEagleHead, frozen: shifts.Frozen, ids: jax.Array, batch: batches.Batch, recipe: Recipe):
  """The loss of a batch and its metrics; arguments as of `eagle3.loss`."""
  made = depths(params, frozen.embedding, batch)
  return by_depth.loss(made, frozen.head, ids, batch, recipe, frozen.embedding.shape[0])


def depths(params: peagle.PEagleHead, embedding: jax.Array, batch: batches.Batch) -> list[jax.Array]:
  """The logits f[B, S, U] of every depth. Entry t of depth i is the i-th draft behind token t + 1, from 0 on.

  The masks of a depth are seen as the later passes of the training-time test are: see `own_passes.attend`.
  """
  count, size = batch.tokens.shape
  place = jnp.arange(size, dtype=jnp.int32)[None]
  feature = params.fused(batch.features.astype(jnp.float32))
  embedded = params.embed(embedding, shifts.ahead(batch.tokens, 1))
  token = params.embed(embedding, jnp.full((count, size), params.mask_id, jnp.int32))
  mask = jnp.broadcast_to(params.mask(), feature.shape)
  made, earlier = [], []
  for i in range(params.depths):
    attends = lambda layer: lambda query, keys, values: own_passes.attend(
        query, keys, values, [(block.keys[layer], block.values[layer]) for block in earlier])
    given = (token, mask) if i else (embedded, feature)
    hidden, _, block = params.apply(*given, jnp.broadcast_to(place + i, batch.tokens.shape), attends)
    earlier = [*earlier, block]
    made.append(params.logits(hidden))
  return made
