"""Mixtures of experts in a decoder layer: which experts a token goes through, and the product.

Routing is that of Mixtral (arXiv 2401.04088), Qwen3-MoE and OLMoE (arXiv 2409.02060): a softmax over all experts in
float32, the k greatest of it, divided by their sum or not. No token is ever dropped: an expert takes as many as come.
Qwen2-MoE adds a feed-forward that every token goes through, times the sigmoid of one number a token.

The product sorts tokens by expert, so that every expert's lie side by side. Accelerators multiply them with
`lax.ragged_dot_general`. A CPU would compute every expert for every token with it, so there a loop goes over blocks of
tokens of one expert, and experts without tokens are not read (`block_size` has the measurements).

Letters: N tokens, E model width, X experts, k experts of a token, M feed-forward width of an expert, C tokens of a
block.
"""
import jax
import jax.numpy as jnp

from specjax.models import config as config_lib
from specjax.models import layers
from specjax.models import weights as weights_lib


def mixture(moe: config_lib.MoE, layer: weights_lib.LayerWeights, columns: jax.Array,
            activation: str) -> tuple[jax.Array, jax.Array]:
  """The feed-forward of f[E, N]: f[E, N], and the experts i32[N, k] of each token, the weightiest first."""
  share, chosen = route(layers.linear(layer.router, columns), moe.chosen, moe.renormalised)
  with jax.named_scope("experts"):
    size = block_size(chosen.size, moe.experts) if jax.default_backend() == "cpu" else None
    out = experts(layer.experts_gate_up, layer.experts_down, columns, chosen, share, activation, size)
  if layer.shared_gate_up is not None:
    with jax.named_scope("shared_expert"):
      gate, up = jnp.split(layers.linear(layer.shared_gate_up, columns), 2, axis=0)
      made = layers.linear(layer.shared_down, layers.activate(gate, activation) * up)
      out = out + jax.nn.sigmoid(layers.linear(layer.shared_share, columns)) * made
  return out, chosen


def route(logits: jax.Array, chosen: int, renormalised: bool) -> tuple[jax.Array, jax.Array]:
  """Weights f[N, k] and experts i32[N, k] from the router's logits f[X, N]; of equal ones the first expert."""
  share, index = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=0).T, chosen)
  if renormalised:
    share = share / share.sum(-1, keepdims=True)
  return share.astype(logits.dtype), index


def block_size(choices: int, experts: int) -> int:
  """C, tokens of one expert that a CPU multiplies at a time, for N * k choices among X experts.

  One at a time while experts have few tokens: products with one column read a slice of the stacked weights where it
  lies, others copy it first. Milliseconds of X = 8, k = 2, E = 512, M = 1024 in float32 on two cores that were not
  idle, the least of many: 16 tokens take 9.3, 7.8, 5.9 and 8.8 with C = 1, 4, 8, 16, and 12.8 with every expert for
  every token; 128 tokens take 55, 52, 58 and 77 with C = 4, 8, 16, 32, and 234. BUILD.md has the other forms.
  """
  return 1 if choices < 4 * experts else 8


def experts(gate_up: jax.Array, down: jax.Array, columns: jax.Array, chosen: jax.Array, share: jax.Array,
            activation: str, size: int | None) -> jax.Array:
  """The sum over a token's experts of their outputs, weighted.

  Args:
    gate_up: f[X, 2 * M, E]. down: f[X, E, M].
    columns: f[E, N]. chosen: i32[N, k], experts. share: f[N, k], their weights.
    activation: see `layers.activate`.
    size: C of the loop over blocks; None for `ragged_dot_general`.

  Returns:
    f[E, N]. A token's output depends on the others by rounding at most.
  """
  count, width = chosen.shape
  flat = chosen.reshape(-1)
  order = jnp.argsort(flat)  # stable, so an expert's tokens keep their order
  tokens = jnp.bincount(flat, length=gate_up.shape[0])
  rows = columns.T[order // width]
  if size is None:
    out = _ragged(gate_up, down, rows, tokens, activation)
  else:
    out = _blocks(gate_up, down, rows, tokens, activation, size)
  place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
  return jnp.einsum("nke,nk->en", out[place].reshape(count, width, -1), share)


def _ragged(gate_up, down, rows, tokens, activation):
  """Rows f[N * k, E], sorted by expert, each through its own; `tokens` i32[X] are how many each expert has."""
  grouped = jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
  gate, up = jnp.split(jax.lax.ragged_dot_general(rows, gate_up, tokens, grouped), 2, axis=1)
  return jax.lax.ragged_dot_general(layers.activate(gate, activation) * up, down, tokens, grouped)


def _blocks(gate_up, down, rows, tokens, activation, size):
  """The same, block by block. A block of fewer than C tokens runs into the rows of the next expert, whose own block is
  written later and over it."""
  blocks = -(-tokens // size)
  ends, first = jnp.cumsum(blocks), jnp.cumsum(tokens) - tokens
  total = rows.shape[0]
  rows = jnp.pad(rows, ((0, size - 1), (0, 0)))

  def block(index, out):
    expert = jnp.searchsorted(ends, index, side="right")
    at = first[expert] + (index - ends[expert] + blocks[expert]) * size
    of = lambda stack: jax.lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False)
    gate, up = jnp.split(layers.linear(of(gate_up), jax.lax.dynamic_slice_in_dim(rows, at, size).T), 2, axis=0)
    made = layers.linear(of(down), layers.activate(gate, activation) * up)
    return jax.lax.dynamic_update_slice_in_dim(out, made.T, at, 0)

  return jax.lax.fori_loop(0, ends[-1], block, jnp.zeros_like(rows))[:total]
