"""Public models to plan with, by name: the numbers of their config.json, without weights.

What no size depends on (the scaling of rotary angles, ids that end an answer) is left out, so that these are for
planning and not for loading.
"""
import dataclasses

from specjax.models import draft_layer
from specjax.models import eagle3
from specjax.models.config import DecoderConfig
from specjax.models.config import MoE

_DRAFT_VOCAB = 32000


@dataclasses.dataclass(frozen=True)
class PublicModel:
  """A model: its configuration, the parameters that its publisher's weights have, and where both are from."""
  config: DecoderConfig
  parameters: int
  source: str


def _config(vocab, width, layers, heads, kv_heads, head_width, mlp_width, context, theta, **different):
  return DecoderConfig(
      vocab_size=vocab, num_tokens=vocab, width=width, layers=layers, heads=heads, kv_heads=kv_heads,
      head_width=head_width, mlp_width=mlp_width, norm_eps=1e-5, rope_theta=theta, max_context=context, eos_ids=(),
      **{"tied": False} | different)


MODELS = {
    "llama-3.2-1b": PublicModel(
        _config(128256, 2048, 16, 32, 8, 64, 8192, 131072, 500000.0, tied=True), 1_235_814_400,
        "meta-llama/Llama-3.2-1B: config.json, model.safetensors"),
    "llama-3.1-8b": PublicModel(
        _config(128256, 4096, 32, 32, 8, 128, 14336, 131072, 500000.0), 8_030_261_248,
        "meta-llama/Llama-3.1-8B: config.json, model.safetensors.index.json"),
    "llama-3.1-70b": PublicModel(
        _config(128256, 8192, 80, 64, 8, 128, 28672, 131072, 500000.0), 70_553_706_496,
        "meta-llama/Llama-3.1-70B: config.json, model.safetensors.index.json"),
    "qwen3-30b-a3b": PublicModel(
        _config(151936, 2048, 48, 32, 4, 128, 6144, 40960, 1e6, family="qwen3_moe", qk_norm="head",
                moe=MoE(experts=128, chosen=8, width=768, renormalised=True)), 30_532_122_624,
        "Qwen/Qwen3-30B-A3B: config.json, model.safetensors.index.json"),
    "mixtral-8x7b": PublicModel(
        _config(32000, 4096, 32, 32, 8, 128, 14336, 32768, 1e6, family="mixtral",
                moe=MoE(experts=8, chosen=2, width=14336, renormalised=True)), 46_702_792_704,
        "mistralai/Mixtral-8x7B-v0.1: config.json, model.safetensors.index.json"),
}


def find(name: str) -> PublicModel:
  """The model of a name.

  Raises:
    ValueError: names those that are known.
  """
  if name.lower() not in MODELS:
    raise ValueError(f"model {name!r} is not in the table; known are {', '.join(MODELS)}")
  return MODELS[name.lower()]


def eagle3_head(target: DecoderConfig) -> eagle3.Eagle3Config:
  """The EAGLE-3 head that a target usually gets: a layer of its own shape and 32000 draft ids.

  So are the heads of Llama 3.1 8B, Llama 3 70B and Qwen3 30B-A3B in SpecForge (configs/llama3-8B-eagle3.json,
  llama3-70B-ealge3.json and qwen3-30B-eagle3.json); of a mixture of experts the layer has the dense width.
  """
  shape = draft_layer.LayerShape(target.width, target.heads, target.kv_heads, target.head_width, target.mlp_width,
                                 target.norm_eps, target.rope_theta)
  return eagle3.Eagle3Config(
      shape=shape, target_width=target.width, features=(2, target.layers // 2, target.layers - 3),
      vocab_size=target.vocab_size, draft_vocab=min(_DRAFT_VOCAB, target.vocab_size), max_context=target.max_context)
