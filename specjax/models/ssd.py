"""A state space layer over nodes in flight: a convolution along each node's path, and the recurrence in its dual form.

Unrolled, the recurrence S <- exp(a) S + x k' with output y = S q is (arXiv 2405.21060, section 6)

  y_t = exp(a_1 + .. + a_t) S_0 q_t + sum over s <= t of exp(a_{s+1} + .. + a_t) (k_s' q_t) x_s:

attention without a softmax, weighted by what is left of each token. Nothing in it needs a text to be a chain: with the
sums taken over a node's ancestors it holds for every node of a tree, each behind the same committed S_0. The published
algorithm computes chunks of a text so; here the chunk is the block in flight, and `recurrent_cache.carry` the step
between chunks.

Letters: B batch rows, T nodes, A nodes that may be seen, earlier ones first (A = T without any), G groups of R heads
each, P head width, N state width, W tokens of the convolution, C its channels.
"""
import jax
import jax.numpy as jnp

from specjax.models import windows

_EXACT = jax.lax.Precision.HIGHEST  # float32 is meant: the state carries an error on


def sources(mask: jax.Array, taps: int) -> jax.Array:
  """Where the convolution of each node finds its inputs, the latest last: i32[B, T, W].

  They are places in the committed tail's W - 1 inputs followed by the nodes: a node's own ancestors, which need not be
  its neighbours, and what is committed where they end.

  Args:
    mask: bool[B, T, A], ancestor-or-self with ancestors first. taps: W.
  """
  away = jnp.where(mask, windows.distances(mask), -1)
  back = jnp.arange(taps - 1, -1, -1, dtype=jnp.int32)
  nodes = jnp.argmax(away[:, :, None] == back[:, None], axis=-1).astype(jnp.int32)
  beyond = back - mask.sum(-1, dtype=jnp.int32)[:, :, None]  # 0: the last committed token
  return jnp.where(beyond < 0, taps - 1 + nodes, taps - 2 - beyond)


def convolve(tail: jax.Array, taps: jax.Array, sources: jax.Array, weight: jax.Array,
             bias: jax.Array | None) -> jax.Array:
  """The convolution's output at each node, in float32: f32[B, T, C].

  Args:
    tail: f[B, W - 1, C], committed inputs. taps: f[B, A, C], those of the nodes.
    sources: i32[B, T, W], see `sources`.
    weight: f[C, W], the latest last. bias: f[C].
  """
  batch, nodes, size = sources.shape
  text = jnp.concatenate([tail, taps.astype(tail.dtype)], axis=1)
  found = jnp.take_along_axis(text, sources.reshape(batch, nodes * size, 1), axis=1)
  found = found.reshape(batch, nodes, size, -1).astype(jnp.float32)
  out = (found * weight.T.astype(jnp.float32)).sum(2)
  return out if bias is None else out + bias.astype(jnp.float32)


def reach(decay: jax.Array, mask: jax.Array) -> jax.Array:
  """The logarithm of what is left of the committed state at each node, f32[B, T, G, R], of each node's own, `decay`
  f32[B, A, G, R], and who sees whom, `mask` bool[B, T, A]."""
  return jnp.einsum("bta,bagr->btgr", mask.astype(jnp.float32), decay, precision=_EXACT)


def outputs(state: jax.Array, queries: jax.Array, keys: jax.Array, inputs: jax.Array, reach: jax.Array,
            mask: jax.Array) -> jax.Array:
  """What each node reads of the committed state and of its ancestors: f32[B, G, R, P, T].

  Nodes come last, so that the state is the left factor of a product of columns (see `layers`).

  Args:
    state: f32[B, G, R, P, N]. queries: f32[B, T, G, N].
    keys: f32[B, A, G, N]. inputs: f32[B, A, G, R, P]. reach: f32[B, A, G, R], see `reach`.
    mask: bool[B, T, A], ancestor-or-self.
  """
  own = reach[:, -mask.shape[1]:]
  by_head = lambda x: x.transpose(0, 2, 3, 1)
  from_state = jnp.einsum("bgrpn,btgn->bgrpt", state, queries, precision=_EXACT) * jnp.exp(by_head(own))[..., None, :]
  left = by_head(own)[..., None] - by_head(reach)[..., None, :]
  # Sums of ancestors differ by what lies between, never above 0; of other nodes the difference may be anything.
  left = jnp.exp(jnp.where(mask[:, None, None], jnp.minimum(left, 0.0), -jnp.inf))
  scores = jnp.einsum("btgn,bagn->bgta", queries, keys, precision=_EXACT)
  return from_state + jnp.einsum("bgrta,bagrp->bgrpt", left * scores[:, :, None], inputs, precision=_EXACT)


def gated_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, groups: int, epsilon: float) -> jax.Array:
  """RMSNorm of x * silu(gate), f[width, M] both, every one of `groups` parts of a column alone, in float32.

  The gate comes before the norm (`norm_before_gate` false in the reference, github.com/state-spaces/mamba).
  """
  wide = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
  parts = wide.reshape(groups, -1, wide.shape[1])
  scale = jax.lax.rsqrt(jnp.mean(parts * parts, axis=1, keepdims=True) + epsilon)
  return (parts * scale).reshape(wide.shape).astype(gate.dtype) * weight[:, None]
