"""BART, mBART and Marian from Hugging Face folders: what their config.json says, and which tensors there are.

Sources: `configuration_*` and `modeling_*` of bart, mbart and marian of Transformers 5.24, and the folders published
under facebook and Helsinki-NLP. A family is a choice of parts:

- BART: norms behind each sum, a norm of the embeddings, learned positions.
- mBART: norms in front and one behind the last layer, a norm of the embeddings, learned positions.
- Marian: norms behind each sum, sinusoidal positions, which newer files leave out; ids that are never emitted
  (`bad_words_ids`, the padding that decoding begins with).

`forced_bos_token_id` is the first token of every output, so it belongs to the decoder's opening. `forced_eos_token_id`
is not applied: it replaces the last token of a text that is cut at its greatest length, and here such a text is left
as the model wrote it. Nor are beams, length penalties and other ways of searching applied that a file suggests.

Letters: V vocabulary, E model width, M feed-forward width, P positions.
"""
import pathlib

import jax.numpy as jnp
import numpy as np

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

# model_type -> parts, under the names that older configurations have for them.
FAMILIES = {
    "bart": {"normalize_before": False, "add_final_layer_norm": False, "normalize_embedding": True,
             "static_position_embeddings": False},
    "mbart": {"normalize_before": True, "add_final_layer_norm": True, "normalize_embedding": True,
              "static_position_embeddings": False},
    "marian": {"normalize_before": False, "add_final_layer_norm": False, "normalize_embedding": False,
               "static_position_embeddings": True}}
OFFSET = 2  # rows in front of the first learned position
_EPSILON = 1e-5  # of every norm; no key says so
_SHARED, _HEAD, _LOGITS_BIAS = "shared.weight", "lm_head.weight", "final_logits_bias"
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNUSED = ("encoder.version", "decoder.version")  # of old folders; never read
_NEUTRAL = {"is_encoder_decoder": (True,), "is_decoder": (False,), "quantization_config": (None,),
            "add_bias_logits": (False,), "share_encoder_decoder_embeddings": (True,)}
_ACTIVATIONS = {"relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh"}


def is_family(folder) -> bool:
  """Whether a folder's config.json is of one of these families; False where it has none."""
  return folder_vocabulary.read_json(pathlib.Path(folder) / "config.json").get("model_type") in FAMILIES


def read_folder(folder, dtype=jnp.float32,
                place: shards.Placement | None = None) -> tuple[EncoderDecoderConfig, EncoderDecoderWeights]:
  """Reads the configuration and the weights of a folder; arguments, errors and remarks as `safetensors.read_folder`."""
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  config = _config(folder, Settings(path, folder_vocabulary.read_json(path, required=True)))
  source = safetensors.FolderSource(folder)
  prefix = "model." if any(name.startswith("model.") for name in source.shapes) else ""
  embedding = next((name for name in (prefix + _SHARED, *(prefix + name for name in _COPIES), _HEAD)
                    if name in source.shapes), prefix + _SHARED)
  table = _places(config, prefix, embedding)
  optional = {_LOGITS_BIAS}
  if FAMILIES[config.family]["static_position_embeddings"]:
    optional |= {name for name, to in table.items() if to.field.endswith("positions")}
  table = {name: to for name, to in table.items() if name in source.shapes or name not in optional}
  copies = [name for name in (prefix + _SHARED, *(prefix + name for name in _COPIES), *[_HEAD] * config.tied)
            if name in source.shapes and name != embedding]
  assemble.check(table, source, ignored={*copies, *(prefix + name for name in _UNUSED)})
  for name in copies:
    assemble.check_equal(source, name, embedding)
  source.check_types(table)
  weights = encoder_decoders.weights(config, assemble.read(table, source, dtype, place))
  return config, _with_positions(config, weights, dtype, place)


def _places(config: EncoderDecoderConfig, prefix: str, embedding: str) -> dict[str, fields.Place]:
  """Tensor name -> place; layers are ("encoder", i) and ("decoder", i)."""
  c, parts, table = config, FAMILIES[config.family], {}
  whole = lambda name, field, *shape, **kept: table.update({name: fields.Place(field, None, 0, shape, **kept)})
  whole(embedding, "embedding", c.vocab_size, c.width)
  for stack, own in (("encoder", "encoder_"), ("decoder", "")):
    offset = 0 if parts["static_position_embeddings"] else OFFSET
    rows = c.max_inputs if own else c.max_outputs
    whole(f"{prefix}{stack}.embed_positions.weight", f"{own}positions", rows + offset, c.width, skipped=offset)
    norms = {"layernorm_embedding": f"{own}embedding_norm"} if parts["normalize_embedding"] else {}
    if parts["add_final_layer_norm"]:
      norms["layer_norm"] = "encoder_norm" if own else "final_norm"
    for name, field in norms.items():
      whole(f"{prefix}{stack}.{name}.weight", field, c.width)
      whole(f"{prefix}{stack}.{name}.bias", f"{field}_bias", c.width)
  table |= layers(c, prefix)
  if not c.tied:
    whole(_HEAD, "head", c.vocab_size, c.width)
  whole(_LOGITS_BIAS, "logits_bias", 1, c.vocab_size, squeezed=0)
  return table


def layers(config: EncoderDecoderConfig, prefix: str) -> dict[str, fields.Place]:
  """Tensor name -> place of all layers of both stacks, each projection and norm with a bias.

  Args:
    config: of the model.
    prefix: in front of "encoder." and "decoder.".
  """
  e, m, table = config.width, config.mlp_width, {}

  def put(name, field, start, *shape):
    """A weight and its bias, which lies in the same rows."""
    table[f"{where}.{name}.weight"] = fields.Place(field, layer, start, shape)
    table[f"{where}.{name}.bias"] = fields.Place(f"{field}_bias", layer, start, shape[:1])

  for stack, count in (("encoder", config.encoder_layers), ("decoder", config.layers)):
    for i in range(count):
      layer, where = (stack, i), f"{prefix}{stack}.layers.{i}"
      for place, name in enumerate("qkv"):
        put(f"self_attn.{name}_proj", "qkv", place * e, e, e)
      put("self_attn.out_proj", "attention_out", 0, e, e)
      put("self_attn_layer_norm", "attention_norm", 0, e)
      if stack == "decoder":
        put("encoder_attn.q_proj", "cross_query", 0, e, e)
        put("encoder_attn.k_proj", "cross_key_value", 0, e, e)
        put("encoder_attn.v_proj", "cross_key_value", e, e, e)
        put("encoder_attn.out_proj", "cross_out", 0, e, e)
        put("encoder_attn_layer_norm", "cross_norm", 0, e)
      put("fc1", "gate_up", 0, m, e)
      put("fc2", "down", 0, e, m)
      put("final_layer_norm", "mlp_norm", 0, e)
  return table


def sinusoids(positions: int, width: int) -> np.ndarray:
  """Marian's positions, f32[P, E]: element j of the first half is sin(p * 10000 ** (-2 j / E)), and behind it the
  cosines of the same angles. (arXiv 1706.03762 has sines and cosines in turn.)"""
  angle = np.arange(positions)[:, None] / 10000.0 ** (2 * np.arange((width + 1) // 2) / width)
  return np.concatenate([np.sin(angle), np.cos(angle[:, :width // 2])], axis=1).astype(np.float32)


def _with_positions(c, weights, dtype, place):
  """With those positions that the file left out."""
  absent = {field: rows for field, rows in (("encoder_positions", c.max_inputs), ("positions", c.max_outputs))
            if getattr(weights, field) is None}
  return weights.replace(**{field: shards.put(place, None, field, sinusoids(rows, c.width).astype(dtype))
                            for field, rows in absent.items()})


def _config(folder, s) -> EncoderDecoderConfig:
  parts = FAMILIES[s.get("model_type")]
  s.require(_NEUTRAL | {key: (value,) for key, value in parts.items()})
  path = folder / "generation_config.json"
  generation = Settings(path, folder_vocabulary.read_json(path))
  for source in (generation, s):
    source.require(encoder_decoders.NEUTRAL_GENERATION)
  kind, vocab_size = s.get("activation_function", "gelu"), s.count("vocab_size")
  if kind not in _ACTIVATIONS:
    raise s.error("activation_function", f"supported are {', '.join(_ACTIVATIONS)}")
  if s.count("decoder_vocab_size", vocab_size) != vocab_size:
    raise s.error("decoder_vocab_size", f"encoder and decoder share a vocabulary here, of vocab_size={vocab_size}")
  for key, other in (("encoder_attention_heads", "decoder_attention_heads"), ("encoder_ffn_dim", "decoder_ffn_dim")):
    if s.count(key) != s.count(other):
      raise s.error(key, f"{other} is {s.get(other)!r}; encoder and decoder have the same here")
  width, heads, positions = s.count("d_model"), s.count("encoder_attention_heads"), s.count("max_position_embeddings")
  if width % heads:
    raise s.error("encoder_attention_heads", f"d_model={width} must be a multiple of it")
  try:
    return EncoderDecoderConfig(
        vocab_size=vocab_size, num_tokens=vocab_size, width=width, layers=s.count("decoder_layers"),
        encoder_layers=s.count("encoder_layers"), heads=heads, head_width=width // heads,
        mlp_width=s.count("encoder_ffn_dim"), norm_eps=_EPSILON, opening=_opening(generation, s),
        eos_ids=folder_vocabulary.eos_ids(folder), positions="table", norm="layer",
        post_norm=not parts["normalize_before"], activation=_ACTIVATIONS[kind], scaled_queries=True,
        embedding_scale=width ** 0.5 if s.flag("scale_embedding") else 1.0,
        tied=s.flag("tie_word_embeddings", True), banned_ids=encoder_decoders.banned_ids(generation, s), max_inputs=positions,
        max_outputs=positions, max_context=2 * positions, family=s.get("model_type"))
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{s.path}: {error}") from error


def _opening(generation, s) -> tuple[int, ...]:
  """The token that decoding begins with, and the first that is forced behind it."""
  start = encoder_decoders.start_id(generation, s)
  forced = encoder_decoders.either(generation, s, "forced_bos_token_id")
  if forced is None and s.flag("force_bos_token_to_be_generated"):  # older than the key that says which
    raise s.error("force_bos_token_to_be_generated", "say which by forced_bos_token_id, as newer folders do")
  if forced is None:
    return (start,)
  if type(forced) is not int:
    raise s.error("forced_bos_token_id", "an id is expected")
  return start, forced
