"""From a name to a model, weights, configuration and tokenizer put together as a target; and from it to a folder."""
from specjax import checkpoints
from specjax.checkpoints import folder_writer
from specjax.checkpoints import shards
from specjax.checkpoints import t5_writer
from specjax.models import decoder
from specjax.models import encoder_decoder
from specjax.models import mamba2
from specjax.models.encoder_decoder_config import EncoderDecoderConfig
from specjax.models.mamba2_config import Mamba2Config

_OTHERS = {EncoderDecoderConfig: encoder_decoder.EncoderDecoder, Mamba2Config: mamba2.Mamba2}


def load(name: str, *, dtype=None, place: shards.Placement | None = None):
  """Loads a target and its tokenizer.

  Args:
    name: a known name such as "smollm2-135m", a path to a GGUF file or to a Hugging Face style folder, or a Hub id.
    dtype: of the weights; float32 on a CPU and bfloat16 on an accelerator by default.
    place: `place(layer, field, shape)` is the sharding of a field of the weights; this process then reads what its own
      devices hold and nothing else. See `checkpoints.load`.

  Returns:
    (target, tokenizer): a `models.decoder.Decoder`, a `models.encoder_decoder.EncoderDecoder` for T5, BART and kin, or a
    `models.mamba2.Mamba2`; and a `checkpoints.Tokenizer`.

  Raises:
    ValueError: names what is missing, foreign or broken, and what to do (`checkpoints.CheckpointError`).
  """
  config, weights, tokenizer = checkpoints.load(name, dtype=dtype, place=place)
  return _OTHERS.get(type(config), decoder.Decoder)(weights=weights, config=config), tokenizer


def save(folder, model: decoder.Decoder | encoder_decoder.EncoderDecoder, tokenizer: checkpoints.Tokenizer, *,
         dtype=None) -> None:
  """Writes a model and its tokenizer as a Hugging Face folder, which `load` reads.

  Args:
    folder: made if need be.
    dtype: of the weights written; as they are by default.

  Raises:
    ValueError: what cannot be written, and why; see `checkpoints.folder_writer` and `checkpoints.t5_writer`.
  """
  writer = t5_writer if isinstance(model.config, EncoderDecoderConfig) else folder_writer
  writer.write_folder(folder, model.config, model.weights, tokenizer, dtype=dtype)
