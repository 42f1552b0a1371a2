"""Losses of models that are trained from nothing. They run the model's own `forward`, as decoding does, so what is
trained is what is served: the cache is empty, and a text is one block of nodes in flight under its mask.

A decoder learns every next token of its documents, a mixture of experts besides to use all experts alike, an
encoder-decoder every token of an answer given the inputs.

Letters: B rows, S tokens of a row, P inputs, T tokens of an answer, N tokens, X experts, k experts of a token.
"""
import jax
import jax.numpy as jnp

from specjax.training import losses
from specjax.training import packed
from specjax.training import pairs


def next_token(params, rows: packed.Rows, balance: float):
  """Cross entropy of the next token, where it is of the same document.

  Args:
    params: a `models.decoder.Decoder` in float32.
    balance: what `load_balance`, the mean over layers with mixtures, is multiplied by and added.

  Returns:
    The loss, and a dictionary: "cross_entropy" in nats a token, "accuracy" of the greatest logit, "counted" tokens;
    with mixtures of experts "balance" and "busiest", the load of a layer's busiest expert over the mean load, both
    averaged over layers.
  """
  size = rows.tokens.shape[1]
  order = jnp.arange(size, dtype=jnp.int32)
  mask = (order[:, None] >= order) & (rows.document[:, :, None] == rows.document[:, None])
  mixed = {} if params.routing is None else {"routers": True, "experts": True}
  out = params.forward(rows.tokens, jnp.broadcast_to(order, rows.tokens.shape), mask,
                       params.init_cache(len(rows.tokens), 1), **mixed)
  follows = (rows.document[:, 1:] == rows.document[:, :-1]) & (rows.document[:, 1:] > 0)
  loss, metrics = _cross_entropy(params.logits(out.hidden[:, :-1]), rows.tokens[:, 1:], follows)
  if mixed:
    flat = lambda x: x.reshape(-1, x.shape[-1])
    real = rows.document.reshape(-1) > 0
    found = [load_balance(flat(logits), flat(chosen), real) for logits, chosen in zip(out.routers, out.experts)]
    metrics["balance"], metrics["busiest"] = (jnp.mean(jnp.stack(values)) for values in zip(*found))
    loss = loss + balance * metrics["balance"]
  return loss, metrics


def load_balance(logits: jax.Array, chosen: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
  """X * sum f_i P_i of one layer: f_i the choices of expert i over the number of tokens, P_i its mean share of the
  router's softmax. It is k where all experts are alike, and more where the chosen ones have the greater shares.

  Source: Switch Transformers (arXiv 2101.03961), equation 4, for k choices a token instead of one, as Transformers'
  `load_balancing_loss_func` of Mixtral counts them. Here it is taken layer by layer, as in the paper; that function
  pools the tokens of all layers first, so that one layer's imbalance may hide another's.

  Args:
    logits: f[N, X] of the router. chosen: i32[N, k]. real: bool[N], tokens that count.

  Returns:
    The loss, and the load of the busiest expert over the mean load.
  """
  count = jnp.maximum(real.sum(), 1)
  experts = logits.shape[1]
  share = jnp.where(real[:, None], jax.nn.softmax(logits.astype(jnp.float32), axis=-1), 0).sum(0) / count
  loads = jnp.where(real[:, None, None], jax.nn.one_hot(chosen, experts), 0).sum((0, 1)) / count
  return experts * (loads * share).sum(), loads.max() * experts / chosen.shape[1]


def answer(params, batch: pairs.Pairs):
  """Cross entropy of the tokens of the answers.

  Args:
    params: a `models.encoder_decoder.EncoderDecoder` in float32.

  Returns:
    As `next_token`, without mixtures.
  """
  count, size = batch.answers.shape
  cache = params.init_cache(count, 1, inputs=batch.inputs.shape[1])
  cache = params.encode(cache, batch.inputs, batch.inputs_length)
  begin = jnp.full((count, 1), params.opening[-1], jnp.int32)
  tokens = jnp.concatenate([begin, batch.answers[:, :-1]], axis=1)
  order = jnp.arange(size, dtype=jnp.int32)
  # An argument of the barrier: XLA folds a constant mask once for every layer.
  mask = jax.lax.optimization_barrier(jnp.tril(jnp.ones((size, size), bool)))
  out = params.forward(tokens, batch.inputs_length[:, None] + order, jnp.broadcast_to(mask, (count, size, size)), cache)
  return _cross_entropy(params.logits(out.hidden), batch.answers, order < batch.answers_length[:, None])


def _cross_entropy(logits, labels, counted):
  """The mean over `counted` bool[B, S] of the labels' cross entropy under logits f[B, S, V]; and metrics."""
  of_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  loss = losses.mean(jax.nn.logsumexp(logits, -1) - of_label, counted)
  # Not argmax: what is compared is whether another logit is greater.
  right = of_label >= logits.max(-1)
  return loss, {"cross_entropy": loss, "accuracy": losses.mean(right.astype(jnp.float32), counted),
                "counted": counted.sum()}
