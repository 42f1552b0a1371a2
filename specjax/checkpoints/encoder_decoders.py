"""What readers of encoder-decoders share: how weights are put together, the token that decoding begins with, and
ids that are never emitted."""
import dataclasses

from specjax.checkpoints.settings import Settings
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.models.encoder_decoder_weights import CrossWeights, EncoderDecoderWeights
from specjax.models.weights import LayerWeights

# Keys of either file that change the law, with the values that leave it as it is; `banned_ids` reads bad_words_ids.
NEUTRAL_GENERATION = {"forced_decoder_ids": (None,), "suppress_tokens": (None, []),
                      "begin_suppress_tokens": (None, []), "sequence_bias": (None,)}


def weights(config: EncoderDecoderConfig, built) -> EncoderDecoderWeights:
  """The weights of what `assemble.read` gives: fields of layers are under ("encoder", i) and ("decoder", i), those of
  `CrossWeights` with "cross_" in front, all others under None."""
  fields = lambda kind, layer, prefix="": kind(**{field.name: built.get((layer, prefix + field.name))
                                                  for field in dataclasses.fields(kind)})
  stack = lambda name, count: tuple(fields(LayerWeights, (name, i)) for i in range(count))
  outside = {field.name: built.get((None, field.name)) for field in dataclasses.fields(EncoderDecoderWeights)}
  return EncoderDecoderWeights(**(outside | {
      "encoder": stack("encoder", config.encoder_layers), "layers": stack("decoder", config.layers),
      "cross": tuple(fields(CrossWeights, ("decoder", i), "cross_") for i in range(config.layers))}))


def start_id(generation: Settings, s: Settings) -> int:
  """The token that decoding begins with: generation_config.json's, else config.json's."""
  value = either(generation, s, "decoder_start_token_id")
  if type(value) is not int or value < 0:
    raise s.error("decoder_start_token_id", "an id is required, from which decoding begins")
  return value


def either(generation: Settings, s: Settings, key: str):
  """What generation_config.json or config.json has under a key; None if neither has it.

  Raises:
    CheckpointError: they differ.
  """
  found = [value for source in (generation, s) if (value := source.get(key)) is not None]
  if len(found) > 1 and found[0] != found[1]:
    raise generation.error(key, f"config.json says {s.get(key)!r}; make them agree")
  return found[0] if found else None


def banned_ids(generation: Settings, s: Settings) -> tuple[int, ...]:
  """Ids that are never emitted, by `bad_words_ids`."""
  lists = either(generation, s, "bad_words_ids") or []
  if not isinstance(lists, list) or not all(
      isinstance(ids, list) and len(ids) == 1 and type(ids[0]) is int for ids in lists):
    raise s.error("bad_words_ids", f"lists of one id are supported, not {lists!r}: a banned sequence is not")
  return tuple(sorted({ids[0] for ids in lists}))
