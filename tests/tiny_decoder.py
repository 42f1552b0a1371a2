"""A decoder with random weights in which every layer changes little: a draft without some of them is often right.

Letters: E model width, L layers.
"""
import jax.numpy as jnp
import numpy as np

from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.weights import DecoderWeights
from specjax.models.weights import LayerWeights


def make(layers=4, seed=0, scale=0.3, vocab=24, max_context=128) -> Decoder:
  """`scale` is that of what a layer adds."""
  c = DecoderConfig(vocab_size=vocab, num_tokens=vocab, width=16, layers=layers, heads=2, kv_heads=1, head_width=6,
                    mlp_width=24, norm_eps=1e-5, rope_theta=10000.0, max_context=max_context, eos_ids=(), tied=False)
  rng = np.random.default_rng(seed)
  matrix = lambda size, *shape: jnp.asarray(rng.standard_normal(shape) * size, jnp.float32)
  norm = lambda: jnp.asarray(1 + 0.2 * rng.standard_normal(c.width), jnp.float32)
  blocks = tuple(LayerWeights(
      attention_norm=norm(), qkv=matrix(0.5, (c.heads + 2 * c.kv_heads) * c.head_width, c.width), qkv_bias=None,
      attention_out=matrix(scale, c.width, c.heads * c.head_width), mlp_norm=norm(),
      gate_up=matrix(0.5, 2 * c.mlp_width, c.width), down=matrix(scale, c.width, c.mlp_width)) for _ in range(layers))
  return Decoder(weights=DecoderWeights(embedding=matrix(0.5, vocab, c.width), layers=blocks, final_norm=norm(),
                                        head=matrix(0.5, vocab, c.width)), config=c)
