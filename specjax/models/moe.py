"""Mixtures of experts in a decoder layer: which experts a token goes through, and the product.

Routing is that of Mixtral (arXiv 2401.04088), Qwen3-MoE and OLMoE (arXiv 2409.02060): a softmax over all experts in
float32, the k greatest of it, divided by their sum or not. No token is ever dropped: an expert takes as many as come.
Qwen2-MoE adds a feed-forward that every token goes through, times the sigmoid of one number a token.

The product sorts tokens by expert, so that every expert's lie side by side. Accelerators multiply them with
`lax.ragged_dot_general`. A CPU would compute every expert for every token with it, so there a loop goes over blocks of
tokens of one expert, and experts without tokens are not read (`block_size` has the measurements). That loop has as many
turns as there are blocks, which JAX cannot turn round; its gradient is another loop over the same blocks.

Letters: N tokens, E model width, X experts, k experts of a token, M feed-forward width of an expert, C tokens of a
block.
"""
import functools

import jax
import jax.numpy as jnp

from specjax.models import config as config_lib
from specjax.models import layers
from specjax.models import splits as splits_lib
from specjax.models import weights as weights_lib


def mixture(moe: config_lib.MoE, layer: weights_lib.LayerWeights, columns: jax.Array, activation: str,
            splits: splits_lib.Splits = splits_lib.WHOLE) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The feed-forward of f[E, N]: f[E, N], the experts i32[N, k] of each token, the weightiest first, and the router's
  logits f[X, N]. Where experts are divided among devices, each runs the choices that fall on its own."""
  logits = layers.linear(layer.router, columns)
  share, chosen = route(logits, moe.chosen, moe.renormalised)
  with jax.named_scope("experts"):
    size = block_size(chosen.size, moe.experts) if jax.default_backend() == "cpu" else None
    own = chosen - splits_lib.first(layer.experts_down.shape[0], splits.experts)
    out = experts(layer.experts_gate_up, layer.experts_down, columns, own, share, activation, size)
    out = splits_lib.total(out, splits.experts, splits.mlp)
  if layer.shared_gate_up is not None:
    with jax.named_scope("shared_expert"):
      gate, up = jnp.split(layers.linear(layer.shared_gate_up, columns), 2, axis=0)
      made = splits_lib.total(layers.linear(layer.shared_down, layers.activate(gate, activation) * up), splits.shared)
      out = out + jax.nn.sigmoid(layers.linear(layer.shared_share, columns)) * made
  return out, chosen, logits


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
  Batches that are trained on: with E = 256, M = 512 and 2048 tokens the product and its gradient take 1411, 372, 260
  and 679 with C = 8, 32, 64, 128, the product alone 176, 212, 169 and 100.
  """
  if choices >= 64 * experts:
    return 64
  return 1 if choices < 4 * experts else 8


def experts(gate_up: jax.Array, down: jax.Array, columns: jax.Array, chosen: jax.Array, share: jax.Array,
            activation: str, size: int | None) -> jax.Array:
  """The sum over a token's experts of their outputs, weighted.

  Args:
    gate_up: f[X, 2 * M, E]. down: f[X, E, M].
    columns: f[E, N]. chosen: i32[N, k], experts; what is outside 0 .. X - 1 adds nothing. share: f[N, k], their weights.
    activation: see `layers.activate`.
    size: C of the loop over blocks; None for `ragged_dot_general`.

  Returns:
    f[E, N]. A token's output depends on the others by rounding at most.
  """
  (count, width), total = chosen.shape, gate_up.shape[0]
  here = (chosen >= 0) & (chosen < total)
  flat = jnp.where(here, chosen, total).reshape(-1)
  order = jnp.argsort(flat)  # stable, so an expert's tokens keep their order
  tokens = jnp.bincount(flat, length=total + 1)[:total]
  rows = columns.T[order // width]
  if size is None:
    out = _ragged(gate_up, down, rows, tokens, activation)
  else:
    out = _blocks(gate_up, down, rows, tokens, activation, size)
  place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
  made = jnp.where(here[..., None], out[place].reshape(count, width, -1), 0)
  return jnp.einsum("nke,nk->en", made, share)


def _ragged(gate_up, down, rows, tokens, activation):
  """Rows f[N * k, E], sorted by expert, each through its own; `tokens` i32[X] are how many each expert has."""
  grouped = jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
  gate, up = jnp.split(jax.lax.ragged_dot_general(rows, gate_up, tokens, grouped), 2, axis=1)
  return jax.lax.ragged_dot_general(layers.activate(gate, activation) * up, down, tokens, grouped)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blocks(gate_up, down, rows, tokens, activation, size):
  """The same, block by block. A block of fewer than C tokens runs into the rows of the next expert, whose own block is
  written later and over it."""
  plan, count = _plan(tokens, size), rows.shape[0]
  rows = jnp.pad(rows, ((0, size - 1), (0, 0)))

  def block(index, out):
    expert, at, _ = _place(plan, size, index)
    made = _expert(_of(gate_up, expert), _of(down, expert), jax.lax.dynamic_slice_in_dim(rows, at, size), activation)
    return jax.lax.dynamic_update_slice_in_dim(out, made, at, 0)

  return jax.lax.fori_loop(0, plan[0][-1], block, jnp.zeros_like(rows))[:count]


def _blocks_forward(gate_up, down, rows, tokens, activation, size):
  return _blocks(gate_up, down, rows, tokens, activation, size), (gate_up, down, rows, tokens)


def _blocks_backward(activation, size, kept, given):
  """Gradients of weights and rows from `given` f[N * k, E]. What a block computes is computed again; of rows that are
  the next expert's it takes nothing."""
  gate_up, down, rows, tokens = kept
  plan, count = _plan(tokens, size), rows.shape[0]
  rows, given = (jnp.pad(x, ((0, size - 1), (0, 0))) for x in (rows, given))

  def block(index, found):
    expert, at, own = _place(plan, size, index)
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, at, size)
    _, back = jax.vjp(functools.partial(_expert, activation=activation), _of(gate_up, expert), _of(down, expert),
                      cut(rows))
    of_gate_up, of_down, of_rows = back(jnp.where(own[:, None], cut(given), 0))
    return (found[0].at[expert].add(of_gate_up), found[1].at[expert].add(of_down),
            jax.lax.dynamic_update_slice_in_dim(found[2], cut(found[2]) + of_rows, at, 0))

  nothing = tuple(map(jnp.zeros_like, (gate_up, down, rows)))
  of_gate_up, of_down, of_rows = jax.lax.fori_loop(0, plan[0][-1], block, nothing)
  return of_gate_up, of_down, of_rows[:count], None


_blocks.defvjp(_blocks_forward, _blocks_backward)


def _plan(tokens, size):
  """Of every expert, i32[X] each: the block behind its last one, its blocks, its first row, the row behind its last."""
  blocks, behind = -(-tokens // size), jnp.cumsum(tokens)
  return jnp.cumsum(blocks), blocks, behind - tokens, behind


def _place(plan, size, index):
  """Of a block: its expert, its first row, and bool[C], which of its rows are the expert's."""
  ends, blocks, first, behind = plan
  expert = jnp.searchsorted(ends, index, side="right")
  at = first[expert] + (index - ends[expert] + blocks[expert]) * size
  return expert, at, at + jnp.arange(size) < behind[expert]


def _of(stack, expert):
  return jax.lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False)


def _expert(gate_up, down, rows, activation):
  """One expert's feed-forward of rows f[C, E]."""
  gate, up = jnp.split(layers.linear(gate_up, rows.T), 2, axis=0)
  return layers.linear(down, layers.activate(gate, activation) * up).T
