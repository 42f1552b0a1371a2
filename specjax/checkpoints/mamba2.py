"""Mamba-2 from Hugging Face folders: what their config.json says, and which tensors there are.

Sources: `configuration_mamba2` and `modeling_mamba2` of Transformers 5.24, beside github.com/state-spaces/mamba. Three
things of these files are traps. `norm_before_gate`, which published files say true, is read by neither: the gate comes
before the norm. The norm behind the state is of each group alone. `time_step_limit` bounds the steps where Transformers
reads a prompt and does not where it decodes, so any but that which bounds nothing is refused.

Folders in the layout of state-spaces/mamba itself (`ssm_cfg`, pickled tensors, no tokenizer) are refused.

Letters: V vocabulary, E model width, I = H * P elements of all heads, C channels of the convolution, W its tokens.
"""
import dataclasses
import pathlib

import jax.numpy as jnp

from specjax.checkpoints import assemble
from specjax.checkpoints import fields
from specjax.checkpoints import folder_vocabulary
from specjax.checkpoints import safetensors
from specjax.checkpoints import shards
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.settings import Settings
from specjax.models.mamba2_config import Mamba2Config
from specjax.models.mamba2_weights import Mamba2Layer, Mamba2Weights

FAMILY = "mamba2"
_EMBEDDINGS = ("backbone.embeddings.weight", "backbone.embedding.weight")  # the second one of older files
_HEAD = "lm_head.weight"
_WIDE = ("step_bias", "decay_log", "skip")  # float32 whatever the others are
_NEUTRAL = {"hidden_act": ("silu", "swish"), "rms_norm": (True,), "attn_layer_idx": (None, []),
            "quantization_config": (None,)}
# As Python's JSON has it, and as Transformers 5 writes it.
_UNBOUNDED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


def is_family(folder) -> bool:
  """Whether a folder's config.json is of this family, or of Mamba-2 in the layout that is refused."""
  values = folder_vocabulary.read_json(pathlib.Path(folder) / "config.json")
  return values.get("model_type") == FAMILY or "ssm_cfg" in values


def read_folder(folder, dtype=jnp.float32,
                place: shards.Placement | None = None) -> tuple[Mamba2Config, Mamba2Weights]:
  """Reads the configuration and the weights of a folder; arguments, errors and remarks as `safetensors.read_folder`.

  Steps, decays and skips are float32 whatever `dtype` is.
  """
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  config = _config(folder, Settings(path, folder_vocabulary.read_json(path, required=True)))
  source = safetensors.FolderSource(folder)
  embedding = next((name for name in _EMBEDDINGS if name in source.shapes), _EMBEDDINGS[0])
  table = places(config, embedding)
  assemble.check(table, source, ignored={_HEAD} if config.tied else set())
  if config.tied and _HEAD in source.shapes:
    assemble.check_equal(source, _HEAD, embedding)
  source.check_types(table)
  of_kind = lambda wide: {name: to for name, to in table.items() if (to.field in _WIDE) == wide}
  built = (assemble.read(of_kind(True), source, jnp.float32, place) |
           assemble.read(of_kind(False), source, dtype, place))
  return config, _weights(config, built)


def places(config: Mamba2Config, embedding: str = _EMBEDDINGS[0]) -> dict[str, fields.Place]:
  """Tensor name -> place."""
  c, table = config, {}
  whole = lambda name, field, *shape: table.update({name: fields.Place(field, None, 0, shape)})
  whole(embedding, "embedding", c.vocab_size, c.width)
  whole("backbone.norm_f.weight", "final_norm", c.width)
  if not c.tied:
    whole(_HEAD, "head", c.vocab_size, c.width)
  for i in range(c.layers):
    for name, field, shape in _layer(c):
      table[f"backbone.layers.{i}.{name}"] = fields.Place(field, i, 0, shape, squeezed=1 if field == "conv" else None)
  return table


def _layer(c):
  yield "norm.weight", "norm", (c.width,)
  yield "mixer.in_proj.weight", "project_in", (c.projected, c.width)
  yield "mixer.conv1d.weight", "conv", (c.channels, 1, c.kernel)
  yield "mixer.dt_bias", "step_bias", (c.heads,)
  yield "mixer.A_log", "decay_log", (c.heads,)
  yield "mixer.D", "skip", (c.heads,)
  yield "mixer.norm.weight", "gated_norm", (c.inner,)
  yield "mixer.out_proj.weight", "project_out", (c.width, c.inner)
  if c.conv_bias:
    yield "mixer.conv1d.bias", "conv_bias", (c.channels,)
  if c.bias:
    yield "mixer.in_proj.bias", "project_in_bias", (c.projected,)
    yield "mixer.out_proj.bias", "project_out_bias", (c.width,)


def _weights(config, built):
  of = lambda kind, layer: {field.name: built.get((layer, field.name)) for field in dataclasses.fields(kind)}
  layers = tuple(Mamba2Layer(**of(Mamba2Layer, i)) for i in range(config.layers))
  return Mamba2Weights(**(of(Mamba2Weights, None) | {"layers": layers}))


def _config(folder, s) -> Mamba2Config:
  if "ssm_cfg" in s.values:
    raise s.error("ssm_cfg", "a folder in the layout of state-spaces/mamba is not read: convert it with Transformers' "
                  "convert_mamba2_ssm_checkpoint_to_pytorch.py, and put the model's tokenizer beside it")
  s.require(_NEUTRAL)
  if s.get("time_step_limit", _UNBOUNDED[0]) not in _UNBOUNDED:
    raise s.error("time_step_limit", "supported: [0.0, Infinity], or no such key. Transformers applies others to "
                  "prompts and not to what it decodes, so there is no one model that such a file means")
  width, heads, head_width = s.count("hidden_size", 4096), s.count("num_heads", 128), s.count("head_dim", 64)
  expand = s.real("expand", 2)
  if int(expand * width) != heads * head_width:
    raise s.error("expand", f"num_heads * head_dim = {heads * head_width} must be expand * hidden_size = "
                  f"{int(expand * width)}")
  try:
    return Mamba2Config(
        vocab_size=s.count("vocab_size", 32768), num_tokens=s.count("vocab_size", 32768), width=width,
        layers=s.count("num_hidden_layers", 64), heads=heads, head_width=head_width,
        state_width=s.count("state_size", 128), groups=s.count("n_groups", 8), kernel=s.count("conv_kernel", 4),
        norm_eps=s.real("layer_norm_epsilon", 1e-5), eos_ids=folder_vocabulary.eos_ids(folder),
        tied=s.flag("tie_word_embeddings", False), conv_bias=s.flag("use_conv_bias", True), bias=s.flag("use_bias"),
        wide_residual=s.flag("residual_in_fp32", True))
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{s.path}: {error}") from error
