"""Training of Hydra's heads on a frozen target (arXiv 2402.05109), teacher-forced: a head sees the tokens of the text
where it will see drafted ones.

Head i meets the hidden state at token t and the embeddings of the tokens t + 1 to t + 1 + i with the target's law behind
token t + 1 + i (see `by_depth`). That law as a soft label is Hydra++'s *teacher loss*, "soft_ce"; Hydra's own label is
the next token of the data, "ce" here where a greedy answer is the data. Its code weighs all heads alike. It also drops
activations out and, in an ablation, adds noise to inputs; neither is done here.

Every head begins as the target's own head on the hidden state: first blocks pass it on and look at no token yet, blocks
behind change nothing, and the layer of prefix attention adds nothing to what it normalizes.

Letters: B sequences, S tokens, N heads, D width of the target, U draft ids.
"""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import draft_layer
from specjax.models import hydra
from specjax.training import batches
from specjax.training import by_depth
from specjax.training import own_passes
from specjax.training import shifts
from specjax.training import starting_layers


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How heads are trained; see `eagle3.Recipe` for those of the same name."""
  decay: float = 1.0
  loss: str = "soft_ce"
  answers_only: bool = True


def init(target, ids: np.ndarray, heads: int, *, blocks: int = 4, prefix: bool = True,
         own_vocabulary: bool = False) -> hydra.HydraHead:
  """Heads that draft as the target's head would from the hidden state alone.

  Args:
    target: a `models.decoder.Decoder`. ids: i32[U], ascending, or all of them. heads: N.
    blocks: of each head. prefix: with a layer of prefix attention. own_vocabulary: matrices over the vocabulary of their
      own, copies of the target's head at `ids`, with biases; else it is the target's.
  """
  c, dtype = target.config, target.weights.embedding.dtype
  # Hydra's code turns by base 10000 whatever the target does; in training anew the target's own is as good.
  config = hydra.HydraConfig(heads=heads, blocks=blocks, width=c.width, vocab_size=c.num_tokens, draft_vocab=len(ids),
                             prefix=starting_layers.shape(target) if prefix else None,
                             max_context=c.max_context if prefix else None)
  zeros = lambda *shape: jnp.zeros(shape, dtype)
  wide = [(c.width, (i + 2) * c.width) for i in range(heads)]
  behind, rows = heads if blocks > 1 else 0, shifts.head_rows(target, ids)
  return hydra.HydraHead(
      joining=tuple(hydra.Joining(linear=zeros(*shape), bias=zeros(c.width), residual=jnp.eye(*shape, dtype=dtype),
                                  residual_bias=zeros(c.width)) for shape in wide),
      linear=tuple(zeros(c.width, c.width) for _ in range(behind)), bias=tuple(zeros(c.width) for _ in range(behind)),
      vocabulary=tuple(rows for _ in range(heads)) if own_vocabulary else None,
      vocabulary_bias=tuple(zeros(len(ids)) for _ in range(heads)) if own_vocabulary else None,
      ids=None if len(ids) == c.num_tokens else jnp.asarray(ids, jnp.int32),
      prefix=_prefix(target) if prefix else None, config=config)


def loss(params: hydra.HydraHead, frozen: shifts.Frozen, ids: jax.Array, batch: batches.Batch, recipe: Recipe):
  """The loss of a batch and its metrics; arguments as of `eagle3.loss`."""
  return by_depth.loss(head_logits(params, frozen, batch), frozen.head, ids, batch, recipe, params.config.vocab_size)


def rank_hits(params: hydra.HydraHead, frozen: shifts.Frozen, ids: jax.Array, batch: batches.Batch, ranks: int):
  """See `by_depth.rank_hits`."""
  return by_depth.rank_hits(head_logits(params, frozen, batch), ids, batch, ranks)


def head_logits(params: hydra.HydraHead, frozen: shifts.Frozen, batch: batches.Batch) -> list[jax.Array]:
  """The logits f[B, S, U] of every head; entry t of head i is the i-th draft behind token t + 1, if the tokens drafted
  before it are those of the text."""
  hidden, tokens = jnp.asarray(batch.hidden, jnp.float32), batch.tokens
  if params.prefix is not None:
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    causal = lambda query, keys, values: own_passes.attend(query, keys, values, [])
    hidden = params.apply_prefix(hidden, place, causal)[0]
  # As `proposers.hydra` reads it.
  embedded = jnp.take(frozen.embedding, tokens, axis=0, mode="clip").astype(jnp.float32)
  read, made = [hidden], []
  for i in range(params.config.heads):
    read.append(shifts.ahead(embedded, 1 + i))
    states = params.state(i, jnp.concatenate(read, axis=-1).reshape(tokens.size, -1))
    made.append(params.logits(i, states, frozen.head).reshape(*tokens.shape, -1))
  return made


def _prefix(target):
  """The target's last layer without what it adds, and a norm that keeps the size of the hidden state."""
  (last,), final = starting_layers.last(target), target.weights.final_norm
  layer = draft_layer.DraftLayer(
      qkv=last.qkv, attention_out=jnp.zeros_like(last.attention_out), mlp_norm=last.mlp_norm, gate_up=last.gate_up,
      down=jnp.zeros_like(last.down))
  size = math.sqrt(float(jnp.mean(final.astype(jnp.float32) ** 2)))
  return hydra.Prefix(attention_norm=jnp.ones_like(final), layer=layer, norm=jnp.full_like(final, size))
