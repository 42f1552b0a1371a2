"""Real decoders with random weights, small enough for any test, and a tokenizer for them.

Every layer changes little, so a draft without some of them is often right: the first layers of a target are a draft
model that is neither always right nor always wrong. Rates measured on them say nothing about real models.

Letters: E model width, L layers.
"""
import string

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from specjax import checkpoints
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.weights import DecoderWeights
from specjax.models.weights import LayerWeights
from specjax.training import dflash as training_dflash
from specjax.training import dspark as training_dspark
from specjax.training import eagle as training_eagle
from specjax.training import eagle3 as training_eagle3
from specjax.training import hydra as training_hydra
from specjax.training import medusa as training_medusa
from specjax.training import mtp as training_mtp
from specjax.training import peagle as training_peagle


def decoder(layers=4, seed=0, scale=0.3, vocab=24, max_context=128) -> Decoder:
  """A decoder of `layers` layers over `vocab` ids; `scale` is that of what a layer adds."""
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


def tokenizer() -> checkpoints.Tokenizer:
  """24 ids: the first letters of the alphabet, and the last id an end of sequence."""
  letters = string.ascii_lowercase[:23]
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True, normalized=False)])
  return checkpoints.Tokenizer(backend, byte_level=True, eos_ids=[23])


def pair() -> tuple[Decoder, Decoder, checkpoints.Tokenizer]:
  """A target, a draft model for it and the tokenizer of both: four layers and the first three of them."""
  target = decoder()
  return target, target.keep((0, 1, 2)), tokenizer()


def eagle3(target: Decoder, ids: tuple[int, ...], seed: int = 0):
  """An EAGLE-3 head for a target, made of its last layer and of noise: right now and then."""
  return _noisy(training_eagle3.init(target, np.asarray(ids), _layers(target), jax.random.key(seed)), seed)


def eagle(target: Decoder, ids: tuple[int, ...], seed: int = 0):
  """EAGLE-1's head for a target, of two layers, made of its last layer and of noise."""
  head = training_eagle.init(target, np.asarray(ids), jax.random.key(seed))
  norm = target.weights.layers[-1].attention_norm
  return _noisy(head.replace(layers=head.layers * 2, input_norms=(norm,)), seed)


def mtp(target: Decoder, ids: tuple[int, ...], seed: int = 0):
  """A module of multi-token prediction for a target, made of its last layer and of noise."""
  return _noisy(training_mtp.init(target, np.asarray(ids), jax.random.key(seed)), seed)


def medusa(target: Decoder, ids: tuple[int, ...], heads: int = 3, seed: int = 0):
  """Medusa's heads for a target, of noise."""
  return _noisy(training_medusa.init(target, np.asarray(ids), heads), seed)


def hydra(target: Decoder, ids: tuple[int, ...], heads: int = 3, blocks: int = 2, prefix: bool = True, seed: int = 0):
  """Hydra's heads for a target, of noise."""
  return _noisy(training_hydra.init(target, np.asarray(ids), heads, blocks=blocks, prefix=prefix), seed)


def dflash(target: Decoder, ids: tuple[int, ...], block: int = 4, seed: int = 0):
  """A DFlash drafter for a target, made of its last layers and of noise."""
  return _noisy(training_dflash.init(target, np.asarray(ids), _layers(target), layers=2, block=block,
                                     mask_id=target.config.num_tokens - 1, key=jax.random.key(seed)), seed)


def dspark(target: Decoder, ids: tuple[int, ...], block: int = 3, seed: int = 0):
  """A DSpark drafter for a target, likewise."""
  return _noisy(training_dspark.init(target, np.asarray(ids), _layers(target), layers=2, block=block, rank=4,
                                     mask_id=target.config.num_tokens - 1, key=jax.random.key(seed)), seed)


def peagle(target: Decoder, ids: tuple[int, ...], depths: int = 3, seed: int = 0):
  """A P-EAGLE head for a target, of its last two layers and of noise."""
  return _noisy(training_peagle.init(target, np.asarray(ids), _layers(target), layers=2, depths=depths,
                                     mask_id=target.config.num_tokens - 1, key=jax.random.key(seed)), seed)


def _layers(target):
  """Three layers that heads read; some are the same where there are few."""
  return tuple(min(layer, target.config.layers - 1) for layer in (1, 2, target.config.layers - 1))


def _noisy(head, seed):
  """Zeros and identities of a first head would hide mistakes."""
  keys = iter(jax.random.split(jax.random.key(seed + 1), len(jax.tree.leaves(head))))
  noise = lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape) if jnp.issubdtype(x.dtype, jnp.floating) else x
  return jax.tree.map(noise, head)
