"""What the layers of a draft head begin as: the target's last ones, where they are of the kind that heads have."""
import jax
import jax.numpy as jnp

from specjax.models import draft_layer
from specjax.models.weights import LayerWeights

_THETA = 10000.0  # of targets without rotary positions


def last(target, count: int = 1) -> tuple[LayerWeights, ...]:
  """The target's last `count` layers, in their order.

  Heads have Llama's layers. A target of another kind (norms behind what a layer adds, LayerNorm, feed-forwards without a
  gate: `config.plain_layers`; an encoder) gives their sizes only: matrices are drawn at 0.02, norms are 1.

  Args:
    target: a `models.decoder.Decoder` or `models.encoder_decoder.EncoderDecoder`.
  """
  c, w = target.config, target.weights
  if getattr(c, "plain_layers", False):
    return w.layers[-count:]
  return tuple(_drawn(shape(target), w.embedding.dtype, jax.random.key(i)) for i in range(count))


def shape(target) -> draft_layer.LayerShape:
  """The sizes of a head's layers: those of the target's."""
  c = target.config
  return draft_layer.LayerShape(width=c.width, heads=c.heads, kv_heads=getattr(c, "kv_heads", c.heads),
                                head_width=c.head_width, mlp_width=c.mlp_width, norm_eps=c.norm_eps,
                                rope_theta=getattr(c, "rope_theta", _THETA))


def _drawn(c, dtype, key):
  qkv, out, gate_up, down = jax.random.split(key, 4)
  matrix = lambda key, *shape: 0.02 * jax.random.normal(key, shape, dtype)
  ones = jnp.ones((c.width,), dtype)
  return LayerWeights(
      attention_norm=ones, qkv=matrix(qkv, (c.heads + 2 * c.kv_heads) * c.head_width, c.width), qkv_bias=None,
      attention_out=matrix(out, c.width, c.heads * c.head_width), mlp_norm=ones,
      gate_up=matrix(gate_up, 2 * c.mlp_width, c.width), down=matrix(down, c.width, c.mlp_width))
