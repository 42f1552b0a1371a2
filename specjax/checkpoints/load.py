"""One door for every checkpoint: configuration, weights and tokenizer by name."""
import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from specjax.checkpoints import bart
from specjax.checkpoints import gguf
from specjax.checkpoints import mamba2
from specjax.checkpoints import safetensors
from specjax.checkpoints import shards
from specjax.checkpoints import t5
from specjax.checkpoints import whisper
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import read_header
from specjax.checkpoints.registry import resolve
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.models.encoder_decoder_weights import EncoderDecoderWeights
from specjax.models.mamba2_config import Mamba2Config
from specjax.models.mamba2_weights import Mamba2Weights
from specjax.models.weights import DecoderWeights


_OTHERS = (t5, bart, whisper, mamba2)  # families that are no decoders of `families`, each with a reader of its own

Config = DecoderConfig | EncoderDecoderConfig | Mamba2Config
Weights = DecoderWeights | EncoderDecoderWeights | Mamba2Weights


def load(name: str | pathlib.Path, *, dtype=None,
         place: shards.Placement | None = None) -> tuple[Config, Weights, Tokenizer]:
  """Finds and reads a model.

  Args:
    name: a known name, a .gguf file, a Hugging Face folder or a Hub id (see `registry.resolve`).
    dtype: of the weights kept; None is float32 on CPU, where bfloat16 is eight times slower, and bfloat16 elsewhere.
    place: `place(layer, field, shape)` is the sharding of a field of the weights (see `shards.Placement`), None for the
      default device, where all are when `place` is None. With one, this process reads the bytes that its own devices
      hold and no others, and keeps no more than their shards.

  Returns:
    The configuration (`eos_ids` and `num_tokens` from the tokenizer), the weights and the tokenizer.

  Raises:
    CheckpointError: the model cannot be found, read or honoured; the message says why and what to do.
  """
  path = resolve(name)
  if dtype is None:
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  # The tokenizer first: it is quick to read and quick to refuse.
  if path.is_dir():
    tokenizer = Tokenizer.from_folder(path)
    reader = next((other for other in _OTHERS if other.is_family(path)), safetensors)
    config, weights = reader.read_folder(path, dtype, place)
  else:
    header = read_header(path)
    tokenizer = Tokenizer.from_gguf(header)
    config, weights = gguf.read_gguf(path, dtype, place, header=header)
  known = tokenizer.vocab_size
  # BART's summarizers have no row for the mask that their tokenizer lists behind all others.
  if config.family == "bart" and all(map(tokenizer.is_special, range(config.vocab_size, known))):
    known = min(known, config.vocab_size)
  if known > config.vocab_size:
    raise CheckpointError(f"{path}: the tokenizer has {tokenizer.vocab_size} tokens and the embedding only "
                          f"{config.vocab_size} rows: they are not of the same model")
  eos_ids = tokenizer.eos_ids or config.eos_ids
  return dataclasses.replace(config, num_tokens=known, eos_ids=eos_ids), weights, tokenizer
