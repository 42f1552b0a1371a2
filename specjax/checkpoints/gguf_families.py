"""Families of decoders as GGUF files have them: which keys say what, and what tensors are called.

Files of Gemma hold the weights of norms as they are used (the converter has added the 1), and queries and keys of llama
are stored for even-odd rotary pairs, which `assemble` puts back. Facts are those of llama.cpp's converter and loader
(convert_hf_to_gguf.py, llama-model.cpp).
"""
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from specjax.checkpoints import gguf_vocabulary
from specjax.checkpoints.errors import CheckpointError
from specjax.checkpoints.gguf_header import GGUFHeader
from specjax.models import rope
from specjax.models.config import DecoderConfig
from specjax.models.config import MoE

NAMES = {
  "embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight",
  "attention_norm": "blk.{}.attn_norm.weight", "query": "blk.{}.attn_q.weight", "key": "blk.{}.attn_k.weight",
  "value": "blk.{}.attn_v.weight", "query_bias": "blk.{}.attn_q.bias", "key_bias": "blk.{}.attn_k.bias",
  "value_bias": "blk.{}.attn_v.bias", "query_norm": "blk.{}.attn_q_norm.weight",
  "key_norm": "blk.{}.attn_k_norm.weight", "attention_out": "blk.{}.attn_output.weight",
  "attention_post_norm": "blk.{}.post_attention_norm.weight", "mlp_norm": "blk.{}.ffn_norm.weight",
  "gate": "blk.{}.ffn_gate.weight", "up": "blk.{}.ffn_up.weight", "down": "blk.{}.ffn_down.weight",
  "mlp_post_norm": "blk.{}.post_ffw_norm.weight"}
_ROUTER = "blk.{}.ffn_gate_inp.weight"
_EXPERTS = NAMES | {
  "router": _ROUTER, "experts_gate": "blk.{}.ffn_gate_exps.weight", "experts_up": "blk.{}.ffn_up_exps.weight",
  "experts_down": "blk.{}.ffn_down_exps.weight"}
_PHI3 = NAMES | {"qkv": "blk.{}.attn_qkv.weight", "gate_up": "blk.{}.ffn_up.weight"}
_GPT2 = NAMES | {
  "positions": "position_embd.weight", "final_norm_bias": "output_norm.bias",
  "attention_norm_bias": "blk.{}.attn_norm.bias", "qkv": "blk.{}.attn_qkv.weight", "qkv_bias": "blk.{}.attn_qkv.bias",
  "attention_out_bias": "blk.{}.attn_output.bias", "mlp_norm_bias": "blk.{}.ffn_norm.bias",
  "up_bias": "blk.{}.ffn_up.bias", "down_bias": "blk.{}.ffn_down.bias"}
ROPE_FACTORS = "rope_freqs.weight"  # what frequencies are divided by: llama3's rule, worked out by the converter

# Keys below "<architecture>." that every family reads, and those that change the arithmetic, with the one value that
# leaves it as it is.
_READ = frozenset([
  "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
  "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
  "rope.dimension_count", "vocab_size"])
_SCALING = frozenset(["rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"])
_NEUTRAL = {"rope.scaling.finetuned": False, "rope.scale_linear": 1.0, "expert_count": 0, "expert_used_count": 0,
            "attention.causal": True, "attention.sliding_window": 0}


@dataclasses.dataclass(frozen=True)
class Family:
  """One `general.architecture`: what its configuration has beside Llama's, which keys that reads, the order of rows,
  what tensors are called, and the key of its norms' epsilon."""
  different: Callable[["Keys"], dict] = lambda keys: {}
  read: frozenset = frozenset()
  interleaved: bool = False
  names: Mapping[str, str] = dataclasses.field(default_factory=lambda: NAMES)
  norm_eps: str = "attention.layer_norm_rms_epsilon"


class Keys:
  """The keys of one architecture in a header, checked as they are read."""

  def __init__(self, header: GGUFHeader):
    self.path, self.family = header.path, header.metadata.get("general.architecture")
    prefix = f"{self.family}."
    self.tensors = header.tensors
    self.values = {key[len(prefix):]: value for key, value in header.metadata.items() if key.startswith(prefix)}

  def refuse(self, key, says):
    raise CheckpointError(f"{self.path}: {self.family}.{key} is {str(self.values.get(key))[:60]}; {says}")

  def count(self, key, default=None):
    """A positive whole number."""
    value = self.values.get(key, default)
    if type(value) is not int or value < 1:
      self.refuse(key, "a positive whole number is required")
    return value

  def real(self, key, default=None):
    """A positive number."""
    value = self.values.get(key, default)
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
      self.refuse(key, "a positive number is required")
    # The shortest decimal of the stored float32 is what the model's author wrote: 1e-05, not 9.999999747378752e-06.
    return float(str(np.float32(value)))


def read_config(header: GGUFHeader) -> DecoderConfig:
  """The decoder that a GGUF header describes; raises CheckpointError naming a key that is absent or unsupported."""
  keys = Keys(header)
  if keys.family not in FAMILIES:
    raise CheckpointError(f"{keys.path}: architecture {keys.family!r} is not supported (supported: "
                          f"{', '.join(FAMILIES)})")
  family = FAMILIES[keys.family]
  read = _READ | _SCALING | family.read | {family.norm_eps}
  for key, value in keys.values.items():
    if key in _NEUTRAL and key not in family.read and value != _NEUTRAL[key]:
      keys.refuse(key, f"not supported (only {_NEUTRAL[key]!r} is)")
    if key not in read and key not in _NEUTRAL:
      raise CheckpointError(f"{keys.path}: configuration key '{keys.family}.{key}' (= {str(value)[:60]}) is not known, "
                            "so it cannot be honoured; convert the model without it")
  layers, width, heads = keys.count("block_count"), keys.count("embedding_length"), keys.count("attention.head_count")
  head_width = keys.count("attention.key_length", width // heads)
  for key in ("attention.value_length", "rope.dimension_count"):
    if keys.count(key, head_width) != head_width:
      keys.refuse(key, f"not supported: it must equal the head width {head_width}")
  if layers > len(header.tensors):
    raise CheckpointError(f"{keys.path}: {keys.family}.block_count = {layers}, but the file holds "
                          f"{len(header.tensors)} tensors")
  embedding = header.tensors.get(NAMES["embedding"])
  vocab_size = keys.count("vocab_size", embedding.shape[0] if embedding else None)
  num_tokens, eos_ids = gguf_vocabulary.token_count(header.metadata), gguf_vocabulary.eos_ids(header.metadata)
  if num_tokens > vocab_size:
    raise CheckpointError(f"{keys.path}: the tokenizer has {num_tokens} tokens and the embedding only {vocab_size} rows")
  values = dict(
      vocab_size=vocab_size, num_tokens=num_tokens or vocab_size, width=width, layers=layers, heads=heads,
      kv_heads=keys.count("attention.head_count_kv", heads), head_width=head_width,
      mlp_width=keys.count("feed_forward_length"), norm_eps=keys.real(family.norm_eps),
      rope_theta=keys.real("rope.freq_base", 10000.0), max_context=keys.count("context_length"), eos_ids=eos_ids,
      tied=NAMES["head"] not in header.tensors, family=keys.family, rope_scaling=_scaling(keys))
  try:
    return DecoderConfig(**(values | family.different(keys)))
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{keys.path}: {error}") from error


def _scaling(keys) -> rope.RopeScaling | None:
  kind = keys.values.get("rope.scaling.type", "none")
  if kind == "none":
    if keys.values.get("rope.scaling.factor", 1.0) != 1.0:
      keys.refuse("rope.scaling.factor", "without rope.scaling.type only 1.0 is supported")
    return None
  if kind == "linear":
    return rope.RopeScaling("linear", keys.real("rope.scaling.factor"))
  if kind == "yarn":
    return rope.RopeScaling("yarn", keys.real("rope.scaling.factor"), keys.count("rope.scaling.original_context_length"),
                            low=1.0, high=32.0)
  keys.refuse("rope.scaling.type", "supported are none, linear and yarn")


def _gemma(keys, every, largest):
  """Gemma 2 and 3: windows in all layers but the last of each `every`; the largest model, known by its number of layers,
  scales queries by the model's width."""
  layers, width, heads = keys.count("block_count"), keys.count("embedding_length"), keys.count("attention.head_count")
  window = keys.count("attention.sliding_window", 4096 if every == 2 else None)
  size = width // heads if layers == largest else keys.count("attention.key_length", width // heads)
  return dict(windows=tuple(window if (i + 1) % every else None for i in range(layers)), post_norm=True,
              activation="gelu_tanh", query_scale=size ** -0.5, embedding_scale=width ** 0.5)


def _gemma2(keys):
  return _gemma(keys, 2, 46) | dict(attention_cap=keys.real("attn_logit_softcapping", 50.0),
                                    logit_cap=keys.real("final_logit_softcapping", 30.0))


def _gemma3(keys):
  # The pattern and the base of layers with a window are constants of the architecture in files that do not say them.
  every = keys.count("attention.sliding_window_pattern", 6)
  return _gemma(keys, every, 62) | dict(qk_norm="head", local_rope_theta=keys.real("rope.freq_base_swa", 10000.0))


def _mixture(keys, width="feed_forward_length", *, renormalised) -> MoE | None:
  """Whether a token's weights add up to 1 is a constant of each architecture in llama.cpp. A layer without a router is
  dense."""
  if not keys.values.get("expert_count"):
    return None
  layers, chosen = keys.count("block_count"), keys.count("expert_used_count")
  if chosen > keys.count("expert_count"):
    keys.refuse("expert_used_count", f"at most expert_count, {keys.count('expert_count')}, is required")
  dense = tuple(i for i in range(layers) if _ROUTER.format(i) not in keys.tensors)
  return MoE(experts=keys.count("expert_count"), chosen=chosen, width=keys.count(width), renormalised=renormalised,
             dense=dense)


def _qwen3_moe(keys):
  return dict(qk_norm="head", moe=_mixture(keys, "expert_feed_forward_length", renormalised=True))


def _olmoe(keys):
  return dict(qk_norm="whole", moe=_mixture(keys, renormalised=False))


def _phi3(keys):
  window = keys.values.get("attention.sliding_window", 0)
  return {} if window == 0 else dict(windows=(keys.count("attention.sliding_window"),) * keys.count("block_count"))


def _gpt2(keys):
  return dict(positions="learned", norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, gated=False,
              activation="gelu_tanh")


_EXPERT_KEYS = frozenset(["expert_count", "expert_used_count"])
FAMILIES = {
  # Mixtral is a llama with experts.
  "llama": Family(lambda keys: dict(moe=_mixture(keys, renormalised=True)), _EXPERT_KEYS, interleaved=True,
                  names=_EXPERTS),
  "qwen2": Family(lambda keys: dict(qkv_bias=True)),
  "qwen3": Family(lambda keys: dict(qk_norm="head")),
  "qwen3moe": Family(_qwen3_moe, _EXPERT_KEYS | {"expert_feed_forward_length"}, names=_EXPERTS),
  "olmoe": Family(_olmoe, _EXPERT_KEYS, names=_EXPERTS),
  "gemma2": Family(_gemma2, frozenset(["attention.sliding_window", "attn_logit_softcapping",
                                       "final_logit_softcapping"])),
  "gemma3": Family(_gemma3, frozenset(["attention.sliding_window", "attention.sliding_window_pattern",
                                       "rope.freq_base_swa"])),
  "olmo2": Family(lambda keys: dict(pre_norm=False, post_norm=True, qk_norm="whole")),
  "phi3": Family(_phi3, frozenset(["attention.sliding_window"]), names=_PHI3),
  "gpt2": Family(_gpt2, names=_GPT2, norm_eps="attention.layer_norm_epsilon"),
}
