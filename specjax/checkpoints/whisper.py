"""Whisper from Hugging Face folders: what its config.json says, and which tensors there are.

Sources: arXiv 2212.04356; `configuration_whisper`, `modeling_whisper` and `generation_whisper` of Transformers 5.24,
and the folders published under openai and distil-whisper. Tensors are called as BART's are, and keys have no biases.

What the decoder begins with: the start token, and of models of many languages a language and a task, then the token
that leaves out times. `language` and `task` of generation_config.json choose them, then `forced_decoder_ids` there or
in config.json; a folder that says neither is read as English that is transcribed. `opening` gives another choice.
Differences from Transformers' `generate`: no language is detected, and sound is at most 30 seconds. `suppress_tokens` are never
emitted, and `begin_suppress_tokens` not as the first of an output.
"""
import pathlib

import jax.numpy as jnp

from specjax.checkpoints import assemble
from specjax.checkpoints import bart
from specjax.checkpoints import encoder_decoders
from specjax.checkpoints import fields
from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints import safetensors
from specjax.checkpoints import shards
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.settings import Settings
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.models.encoder_decoder_weights import EncoderDecoderWeights

FAMILIES = ("whisper",)
_PREFIX, _EMBEDDING, _HEAD = "model.", "model.decoder.embed_tokens.weight", "proj_out.weight"
_EPSILON = 1e-5  # of every norm; no key says so
_NEUTRAL = {"is_encoder_decoder": (True,), "is_decoder": (False,), "quantization_config": (None,),
            "scale_embedding": (False,), "tie_word_embeddings": (True,), "activation_function": ("gelu",),
            "use_weighted_layer_sum": (False,)}
_TASKS = ("transcribe", "translate")


def is_family(folder) -> bool:
  """Whether a folder's config.json is of this family; False where it has none."""
  return folder_vocabulary.read_json(pathlib.Path(folder) / "config.json").get("model_type") in FAMILIES


def opening(tokenizer, language: str | None = "en", task: str = "transcribe") -> tuple[int, ...]:
  """What a decoder begins with, for `EncoderDecoder.with_opening`.

  Args:
    tokenizer: of the model, a `checkpoints.Tokenizer`.
    language: its code, such as "de"; None for a model of English alone, which names neither language nor task.
    task: "transcribe", or "translate" into English.

  Raises:
    ValueError: a task that is none, or a language that the model does not know.
  """
  if task not in _TASKS:
    raise ValueError(f"task={task!r}: it is {' or '.join(map(repr, _TASKS))}")
  names = ["startoftranscript", *([] if language is None else [language, task]), "notimestamps"]
  found = {name: tokenizer.encode(f"<|{name}|>") for name in names}
  for name, ids in found.items():
    if len(ids) != 1:
      raise ValueError(f"language={language!r}, task={task!r}: the tokenizer has no token <|{name}|>; give the code of "
                       "a language that the model knows, None for a model of English alone")
  return tuple(ids[0] for ids in found.values())


def read_folder(folder, dtype=jnp.float32,
                place: shards.Placement | None = None) -> tuple[EncoderDecoderConfig, EncoderDecoderWeights]:
  """Reads the configuration and the weights of a folder; arguments, errors and remarks as `safetensors.read_folder`."""
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  config = _config(folder, Settings(path, folder_vocabulary.read_json(path, required=True)))
  source, table = safetensors.FolderSource(folder), _places(config)
  assemble.check(table, source, ignored={_HEAD})
  if _HEAD in source.shapes:
    assemble.check_equal(source, _HEAD, _EMBEDDING)
  source.check_types(table)
  return config, encoder_decoders.weights(config, assemble.read(table, source, dtype, place))


def _places(config: EncoderDecoderConfig) -> dict[str, fields.Place]:
  """Tensor name -> place; layers are ("encoder", i) and ("decoder", i)."""
  c, table = config, {}
  whole = lambda name, field, *shape: table.update({_PREFIX + name: fields.Place(field, None, 0, shape)})
  whole("decoder.embed_tokens.weight", "embedding", c.vocab_size, c.width)
  for name, entering in (("conv1", c.mels), ("conv2", c.width)):
    whole(f"encoder.{name}.weight", name, c.width, entering, 3)
    whole(f"encoder.{name}.bias", f"{name}_bias", c.width)
  for stack, own, norm, rows in (("encoder", "encoder_", "encoder_norm", c.max_inputs),
                                 ("decoder", "", "final_norm", c.max_outputs)):
    whole(f"{stack}.embed_positions.weight", f"{own}positions", rows, c.width)
    whole(f"{stack}.layer_norm.weight", norm, c.width)
    whole(f"{stack}.layer_norm.bias", f"{norm}_bias", c.width)
  # Keys have none, so those of fused biases become zeros.
  return table | {name: to for name, to in bart.layers(c, _PREFIX).items() if not name.endswith("k_proj.bias")}


def _config(folder, s) -> EncoderDecoderConfig:
  s.require(_NEUTRAL)
  path = folder / "generation_config.json"
  generation = Settings(path, folder_vocabulary.read_json(path))
  width, heads, vocab_size = s.count("d_model"), s.count("encoder_attention_heads"), s.count("vocab_size")
  for key, other in (("encoder_attention_heads", "decoder_attention_heads"), ("encoder_ffn_dim", "decoder_ffn_dim")):
    if s.count(key) != s.count(other):
      raise s.error(key, f"{other} is {s.get(other)!r}; encoder and decoder have the same here")
  if width % heads:
    raise s.error("encoder_attention_heads", f"d_model={width} must be a multiple of it")
  inputs, outputs = s.count("max_source_positions"), s.count("max_target_positions")
  banned = {key: generation.get(key) or [] for key in ("suppress_tokens", "begin_suppress_tokens")}
  for key, ids in banned.items():
    if not isinstance(ids, list) or not all(type(index) is int for index in ids):
      raise generation.error(key, "a list of ids is expected")
  try:
    return EncoderDecoderConfig(
        vocab_size=vocab_size, num_tokens=vocab_size, width=width, layers=s.count("decoder_layers"),
        encoder_layers=s.count("encoder_layers"), heads=heads, head_width=width // heads,
        mlp_width=s.count("encoder_ffn_dim"), norm_eps=_EPSILON, opening=_opening(generation, s),
        eos_ids=folder_vocabulary.eos_ids(folder), positions="table", norm="layer", activation="gelu",
        scaled_queries=True, banned_ids=tuple(sorted(set(banned["suppress_tokens"]))),
        banned_first=tuple(sorted(set(banned["begin_suppress_tokens"]))), max_inputs=inputs, max_outputs=outputs,
        max_context=inputs + outputs, mels=s.count("num_mel_bins"), family="whisper")
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{s.path}: {error}") from error


def _opening(generation, s) -> tuple[int, ...]:
  """As the module says, by the ids of generation_config.json."""
  begin = [encoder_decoders.start_id(generation, s)]
  languages, tasks = generation.object("lang_to_id"), generation.object("task_to_id")
  if languages.values:
    begin += [_chosen(generation, "language", languages, "<|en|>"), _chosen(generation, "task", tasks, "transcribe")]
  begin.append(generation.get("no_timestamps_token_id"))
  if not all(type(index) is int for index in begin):
    raise generation.error("no_timestamps_token_id", "an id is required, and lang_to_id and task_to_id must name "
                           "<|en|> and transcribe in a model of many languages")
  if generation.get("language") is None and generation.get("task") is None:
    source = s if generation.get("forced_decoder_ids") is None else generation
    for place, index in _forced(source, len(begin)):
      begin[place] = begin[place] if index is None else index
  return tuple(begin)


def _chosen(generation, key, ids, default):
  """The id that a key of generation_config.json names: of a language as "<|de|>" or "de", of a task by its name."""
  value = generation.get(key, default)
  name = value if value in ids.values or key == "task" else f"<|{value}|>"
  if key in generation.values and name not in ids.values:
    raise generation.error(key, f"allowed are {', '.join(ids.values)}")
  return ids.get(name)


def _forced(source, size) -> list:
  """Pairs of a place behind the start and its id, or None for what is not forced there."""
  pairs = source.get("forced_decoder_ids", [])
  if not isinstance(pairs, list) or not all(
      isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and 1 <= pair[0] < size and
      (pair[1] is None or type(pair[1]) is int) for pair in pairs):
    raise source.error("forced_decoder_ids", f"pairs of a place, 1 to {size - 1}, and an id or null are expected")
  return pairs
