"""Mamba-2 as a target (arXiv 2405.21060): a recurrent state in place of keys and values.

The cache is a `recurrent_cache.RecurrentCache`. A pass never moves the state: nodes read it and their ancestors in
flight, whatever the tree (see `ssd`), and `commit` carries it along the accepted path. So rejected drafts leave no
trace, and a row that accepts nothing keeps its state to the bit.

As in github.com/state-spaces/mamba and Transformers 5.24, with one difference: the convolution is computed in float32
like all that follows up to the norm, where both round its output to the weights' type. In float32 there is none.

Inside, activations are columns f[E, B * T], one a token: see `layers`.

Letters: B batch rows, T nodes, V vocabulary, E model width, G groups of R heads each, P head width, N state width,
C channels of the convolution.
"""
import dataclasses
import functools
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp

from specjax import recurrent_cache
from specjax.models import base
from specjax.models import configured
from specjax.models import layers
from specjax.models import mamba2_config as config_lib
from specjax.models import mamba2_weights as weights_lib
from specjax.models import ssd


@struct.dataclass
class Mamba2(configured.Configured):
  """Weights are leaves, the configuration is static. Implements `base.Target`."""
  weights: weights_lib.Mamba2Weights
  config: config_lib.Mamba2Config = struct.field(pytree_node=False)
  layout: Any = struct.field(pytree_node=False, default=None)  # see `configured.Configured`

  @property
  def residual_dtype(self):
    """See `base.residual_dtype`."""
    return jnp.dtype(jnp.float32) if self.config.wide_residual else self.weights.embedding.dtype

  def init_cache(self, batch: int, slots: int) -> recurrent_cache.RecurrentCache:
    """See `base.Target.init_cache`. Its size is the same for any `slots`."""
    c = self.config
    return recurrent_cache.empty(batch, slots, c.layers, groups=c.groups, heads=c.heads, head_width=c.head_width,
                                 state_width=c.state_width, taps=c.kernel - 1, channels=c.channels,
                                 dtype=self.weights.embedding.dtype)

  def keep(self, layers: tuple[int, ...]) -> "Mamba2":
    """The same model with some of its layers only: weights are shared, in order of `layers`."""
    self.check_layers(layers)
    return self.replace(weights=self.weights.replace(layers=tuple(self.weights.layers[i] for i in layers)),
                        config=dataclasses.replace(self.config, layers=len(layers)))

  def forward(self, tokens, positions, mask, cache, *, before=None, resume=None, features=()) -> base.ForwardOutput:
    """See `base.Target.forward`. Positions are not looked at: what a node sees is ordered as the mask's columns are."""
    chex.assert_equal_shape([tokens, positions])
    earlier = 0 if before is None else before.nodes
    chex.assert_shape(mask, (*tokens.shape, earlier + tokens.shape[1]))
    c, w = self.config, self.weights
    rows = lambda x: x.T.reshape(*tokens.shape, c.width)
    with jax.named_scope("forward"):
      sources = ssd.sources(mask, c.kernel)
      nodes, seen = [], {}
      if resume is None:
        x = jnp.take(w.embedding, tokens.reshape(-1), axis=0, mode="clip").T.astype(self.residual_dtype)
      else:
        x, nodes = resume.hidden.reshape(-1, c.width).T, list(resume.in_flight.layers)
      below = [i for i in features if i < len(nodes) or i > c.layers]
      if below:
        raise ValueError(f"features={features}: layer {below[0]} is not run here; layers {len(nodes)} to {c.layers} "
                         "are")
      for i in range(len(nodes), c.layers):
        seen[i] = x
        above = None if before is None else before.layers[i]
        x, new = _block(c, w.layers[i], x, mask, sources, cache.layers[i], above)
        nodes.append(new)
      seen[c.layers] = x
      hidden = rows(_norm(c, x, w.final_norm))
    return base.ForwardOutput(hidden=hidden, in_flight=recurrent_cache.RecurrentInFlight(tuple(nodes)),
                              features=tuple(rows(seen[i]) for i in features))

  def logits(self, hidden: jax.Array) -> jax.Array:
    """See `base.Target.logits`."""
    with jax.named_scope("head"):
      columns = layers.linear(self.head, hidden.reshape(-1, hidden.shape[-1]).T)
      logits = self.of_known_ids(columns.T.reshape(*hidden.shape[:-1], -1).astype(jnp.float32))
      # Turned from columns once, not once for every reader.
      return jax.lax.optimization_barrier(logits)


def _norm(c, x, weight):
  """RMSNorm of the residual stream f[E, M], in the type of the weights."""
  return layers.rms_norm(x, weight.astype(x.dtype), c.norm_eps).astype(weight.dtype)


# One traced function that every layer calls: tracing and lowering a step costs one layer, not all of them.
@functools.partial(jax.jit, static_argnums=0)
def _block(c: config_lib.Mamba2Config, layer, x, mask, sources, committed, before=None):
  """One layer: x f[E, B * T] -> x, and what its nodes leave; `before` is what earlier nodes have left."""
  batch, width = mask.shape[:2]
  grouped = lambda rows, *shape: rows.reshape(batch, width, c.groups, *shape)
  by_row = lambda columns: columns.T.reshape(batch, width, -1)
  all_of = lambda name, new: new if before is None else jnp.concatenate(
      [getattr(before, name).astype(new.dtype), new], axis=1)
  with jax.named_scope("projection"):
    projected = layers.linear(layer.project_in, _norm(c, x, layer.norm), layer.project_in_bias)
    gate, taps, step = projected[:c.inner], by_row(projected[c.inner:-c.heads]), by_row(projected[-c.heads:])
  with jax.named_scope("convolution"):
    mixed = jax.nn.silu(ssd.convolve(committed.tail, all_of("taps", taps), sources, layer.conv, layer.conv_bias))
    entering, keys, queries = jnp.split(mixed, (c.inner, c.inner + c.groups * c.state_width), axis=-1)
  with jax.named_scope("state"):
    heads = c.heads // c.groups
    entering = grouped(entering, heads, c.head_width)
    keys, queries = grouped(keys, c.state_width), grouped(queries, c.state_width)
    step = jax.nn.softplus(step.astype(jnp.float32) + layer.step_bias)
    decay = grouped(-jnp.exp(layer.decay_log) * step, heads)
    nodes = recurrent_cache.Nodes(
        taps=taps, inputs=entering * grouped(step, heads)[..., None], keys=keys, decay=decay,
        reach=ssd.reach(all_of("decay", decay), mask))
    out = ssd.outputs(committed.state, queries, *(all_of(name, getattr(nodes, name)) for name in (
        "keys", "inputs", "reach")), mask)
    skip = layer.skip.reshape(c.groups, heads, 1, 1, 1)
    out = out.transpose(1, 2, 3, 0, 4) + skip * entering.transpose(2, 3, 4, 0, 1)
  with jax.named_scope("output"):
    out = out.reshape(c.inner, batch * width)
    out = ssd.gated_norm(out, gate, layer.gated_norm, c.groups, c.norm_eps)
    x = x + layers.linear(layer.project_out, out, layer.project_out_bias).astype(x.dtype)
  return x, nodes
