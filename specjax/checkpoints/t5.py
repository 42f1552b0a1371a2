"""T5, T5 v1.1 and mT5 from Hugging Face folders: what their config.json says, and which tensors there are.

Sources: `configuration_t5`, `modeling_t5` and `modeling_mt5` of Transformers 5.24, and the folders published under
google-t5 and google. Versions differ in what `tie_word_embeddings` means. Here, as in those folders: with T5 true, the
default, makes the embedding the head and scales what enters it by E ** -0.5; false leaves both out. A folder that
Transformers 5 has written says true always, and `scale_decoder_outputs` beside it; its head is its own if the file has
one. mT5 is read untied only, since whether it scales a tied head changed from version 4 to 5.

Letters: V vocabulary, E model width, Q = H * C query rows, M feed-forward width.
"""
import dataclasses
import pathlib

import jax.numpy as jnp

from specjax.checkpoints import assemble
from specjax.checkpoints import encoder_decoders
from specjax.checkpoints import fields
from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints import safetensors
from specjax.checkpoints import shards
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.settings import Settings
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.models.encoder_decoder_weights import EncoderDecoderWeights

FAMILIES = ("t5", "mt5")
_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # of old folders; never read
_NEUTRAL = {"is_encoder_decoder": (True,), "is_decoder": (False,), "quantization_config": (None,)}
_NEUTRAL_GENERATION = {"forced_bos_token_id": (None,)}
# feed_forward_proj -> activation, gated; gated-gelu means the approximation, whatever `dense_act_fn` an old file says.
_FEED_FORWARD = {"relu": ("relu", False), "silu": ("silu", False), "gelu_new": ("gelu_tanh", False),
                 "gated-relu": ("relu", True), "gated-silu": ("silu", True), "gated-gelu": ("gelu_tanh", True)}
_ACTIVATIONS = {"relu": "relu", "silu": "silu", "gelu_new": "gelu_tanh"}


def is_family(folder) -> bool:
  """Whether a folder's config.json is of this family; False where it has none."""
  return folder_vocabulary.read_json(pathlib.Path(folder) / "config.json").get("model_type") in FAMILIES


def read_folder(folder, dtype=jnp.float32,
                place: shards.Placement | None = None) -> tuple[EncoderDecoderConfig, EncoderDecoderWeights]:
  """Reads the configuration and the weights of a folder; arguments, errors and remarks as `safetensors.read_folder`."""
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  settings = Settings(path, folder_vocabulary.read_json(path, required=True))
  config = _config(folder, settings)
  source = safetensors.FolderSource(folder)
  own_head = not config.tied
  if config.tied and _HEAD in source.shapes:
    own_head = "scale_decoder_outputs" in settings.values
    if not own_head:
      assemble.check_equal(source, _HEAD, _SHARED)
  config = dataclasses.replace(config, tied=not own_head)
  table = places(config)
  assemble.check(table, source, ignored={*_COPIES, _UNUSED} | (set() if own_head else {_HEAD}))
  for name in _COPIES:
    if name in source.shapes:
      assemble.check_equal(source, name, _SHARED)
  source.check_types(table)
  return config, encoder_decoders.weights(config, assemble.read(table, source, dtype, place))


def feed_forward_name(config: EncoderDecoderConfig) -> str:
  """`feed_forward_proj` of a configuration. Raises CheckpointError where no name means it."""
  for name, found in _FEED_FORWARD.items():
    if found == (config.activation, config.gated):
      return name
  raise CheckpointError(f"activation={config.activation!r}, gated={config.gated}: no feed_forward_proj means it; there "
                        f"are {', '.join(_FEED_FORWARD)}")


def places(config: EncoderDecoderConfig) -> dict[str, fields.Place]:
  """Tensor name -> place; layers are ("encoder", i) and ("decoder", i)."""
  c, table = config, {}
  whole = lambda name, field, *shape: table.update({name: fields.Place(field, None, 0, shape)})
  whole(_SHARED, "embedding", c.vocab_size, c.width)
  for stack, prefix, layers in (("encoder", "encoder_", c.encoder_layers), ("decoder", "", c.layers)):
    bias = "encoder_bias" if stack == "encoder" else "bias"
    whole(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", bias, c.buckets, c.heads)
    whole(f"{stack}.final_layer_norm.weight", "encoder_norm" if prefix else "final_norm", c.width)
    for i in range(layers):
      table |= _layer(c, stack, i)
  if not c.tied:
    whole(_HEAD, "head", c.vocab_size, c.width)
  return table


def _layer(c, stack, index):
  q, e, m, table = c.heads * c.head_width, c.width, c.mlp_width, {}

  def put(name, field, start, *shape):
    table[f"{stack}.block.{index}.layer.{name}.weight"] = fields.Place(field, (stack, index), start, shape)

  put("0.layer_norm", "attention_norm", 0, e)
  for place, name in enumerate("qkv"):
    put(f"0.SelfAttention.{name}", "qkv", place * q, q, e)
  put("0.SelfAttention.o", "attention_out", 0, e, q)
  if stack == "decoder":
    put("1.layer_norm", "cross_norm", 0, e)
    put("1.EncDecAttention.q", "cross_query", 0, q, e)
    put("1.EncDecAttention.k", "cross_key_value", 0, q, e)
    put("1.EncDecAttention.v", "cross_key_value", q, q, e)
    put("1.EncDecAttention.o", "cross_out", 0, e, q)
  last = 2 if stack == "decoder" else 1
  put(f"{last}.layer_norm", "mlp_norm", 0, e)
  if c.gated:
    put(f"{last}.DenseReluDense.wi_0", "gate_up", 0, m, e)
    put(f"{last}.DenseReluDense.wi_1", "gate_up", m, m, e)
  else:
    put(f"{last}.DenseReluDense.wi", "gate_up", 0, m, e)
  put(f"{last}.DenseReluDense.wo", "down", 0, e, m)
  return table


def _config(folder, s) -> EncoderDecoderConfig:
  s.require(_NEUTRAL)
  path = folder / "generation_config.json"
  generation = Settings(path, folder_vocabulary.read_json(path))
  for source in (generation, s):
    source.require(_NEUTRAL_GENERATION | encoder_decoders.NEUTRAL_GENERATION)
  family, tied = s.get("model_type"), s.flag("tie_word_embeddings", True)
  if family == "mt5" and tied:
    raise s.error("tie_word_embeddings", "false is supported with mt5, and an lm_head of its own: versions of "
                  "Transformers differ about a tied one")
  kind = s.get("feed_forward_proj", "relu" if family == "t5" else "gated-gelu")
  if kind not in _FEED_FORWARD:
    raise s.error("feed_forward_proj", f"supported are {', '.join(_FEED_FORWARD)}")
  activation, gated = _FEED_FORWARD[kind]
  if s.get("dense_act_fn") is not None and _ACTIVATIONS.get(s.get("dense_act_fn")) != activation:
    raise s.error("dense_act_fn", f"feed_forward_proj {kind!r} has another activation; leave it out")
  if s.flag("is_gated_act", gated) != gated:
    raise s.error("is_gated_act", f"feed_forward_proj {kind!r} says otherwise; leave it out")
  layers = s.count("num_layers")
  try:
    return EncoderDecoderConfig(
        vocab_size=s.count("vocab_size"), num_tokens=s.count("vocab_size"), width=s.count("d_model"),
        layers=s.count("num_decoder_layers", layers), encoder_layers=layers, heads=s.count("num_heads"),
        head_width=s.count("d_kv"), mlp_width=s.count("d_ff"), norm_eps=s.real("layer_norm_epsilon", 1e-6),
        buckets=s.count("relative_attention_num_buckets", 32),
        max_distance=s.count("relative_attention_max_distance", 128),
        opening=(encoder_decoders.start_id(generation, s),), banned_ids=encoder_decoders.banned_ids(generation, s),
        eos_ids=folder_vocabulary.eos_ids(folder), activation=activation, gated=gated, tied=tied,
        scaled_head=family == "t5" and s.flag("scale_decoder_outputs", tied), family=family)
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{s.path}: {error}") from error
