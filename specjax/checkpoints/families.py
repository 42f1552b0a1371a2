"""Families of decoders as Hugging Face folders have them: how a config.json reads, and what tensors are called.

A family is a table of names and a function from configuration keys to a `DecoderConfig`; what it does not name is as in
Llama. Keys that change the arithmetic and that no family reads are refused by name.
"""
import dataclasses
from collections.abc import Callable, Mapping

from specjax.checkpoints import rope_keys
from specjax.checkpoints.settings import Settings
from specjax.models.config import DecoderConfig
from specjax.models.config import MoE

_LAYER = "model.layers.{}."
_LLAMA = {
  "embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight",
  "attention_norm": _LAYER + "input_layernorm.weight", "query": _LAYER + "self_attn.q_proj.weight",
  "key": _LAYER + "self_attn.k_proj.weight", "value": _LAYER + "self_attn.v_proj.weight",
  "query_bias": _LAYER + "self_attn.q_proj.bias", "key_bias": _LAYER + "self_attn.k_proj.bias",
  "value_bias": _LAYER + "self_attn.v_proj.bias", "attention_out": _LAYER + "self_attn.o_proj.weight",
  "attention_out_bias": _LAYER + "self_attn.o_proj.bias", "mlp_norm": _LAYER + "post_attention_layernorm.weight",
  "gate": _LAYER + "mlp.gate_proj.weight", "up": _LAYER + "mlp.up_proj.weight",
  "down": _LAYER + "mlp.down_proj.weight", "gate_bias": _LAYER + "mlp.gate_proj.bias",
  "up_bias": _LAYER + "mlp.up_proj.bias", "down_bias": _LAYER + "mlp.down_proj.bias"}
_QK_NORMS = {"query_norm": _LAYER + "self_attn.q_norm.weight", "key_norm": _LAYER + "self_attn.k_norm.weight"}
_GEMMA = _LLAMA | _QK_NORMS | {
  "attention_post_norm": _LAYER + "post_attention_layernorm.weight",
  "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
  "mlp_post_norm": _LAYER + "post_feedforward_layernorm.weight"}
_OLMO2 = _LLAMA | _QK_NORMS | {
  "attention_post_norm": _LAYER + "post_attention_layernorm.weight",
  "mlp_post_norm": _LAYER + "post_feedforward_layernorm.weight"}
_EXPERTS = {
  "router": _LAYER + "mlp.gate.weight", "expert_gate": _LAYER + "mlp.experts.{}.gate_proj.weight",
  "expert_up": _LAYER + "mlp.experts.{}.up_proj.weight", "expert_down": _LAYER + "mlp.experts.{}.down_proj.weight"}
_SHARED = {
  "shared_gate": _LAYER + "mlp.shared_expert.gate_proj.weight",
  "shared_up": _LAYER + "mlp.shared_expert.up_proj.weight",
  "shared_down": _LAYER + "mlp.shared_expert.down_proj.weight",
  "shared_share": _LAYER + "mlp.shared_expert_gate.weight"}
_STACKED = {"router": _LAYER + "mlp.gate.weight", "experts_gate_up": _LAYER + "mlp.experts.gate_up_proj",
            "experts_down": _LAYER + "mlp.experts.down_proj"}
_MIXTRAL_MIXTURE = _LAYER + "block_sparse_moe."
_MIXTRAL = _LLAMA | {
  "router": _MIXTRAL_MIXTURE + "gate.weight", "expert_gate": _MIXTRAL_MIXTURE + "experts.{}.w1.weight",
  "expert_up": _MIXTRAL_MIXTURE + "experts.{}.w3.weight", "expert_down": _MIXTRAL_MIXTURE + "experts.{}.w2.weight"}
_PHI3 = _LLAMA | {"qkv": _LAYER + "self_attn.qkv_proj.weight", "gate_up": _LAYER + "mlp.gate_up_proj.weight"}
_GPT2 = {
  "embedding": "wte.weight", "positions": "wpe.weight", "final_norm": "ln_f.weight", "final_norm_bias": "ln_f.bias",
  "head": "lm_head.weight", "attention_norm": "h.{}.ln_1.weight", "attention_norm_bias": "h.{}.ln_1.bias",
  "qkv": "h.{}.attn.c_attn.weight", "qkv_bias": "h.{}.attn.c_attn.bias", "attention_out": "h.{}.attn.c_proj.weight",
  "attention_out_bias": "h.{}.attn.c_proj.bias", "mlp_norm": "h.{}.ln_2.weight", "mlp_norm_bias": "h.{}.ln_2.bias",
  "up": "h.{}.mlp.c_fc.weight", "up_bias": "h.{}.mlp.c_fc.bias", "down": "h.{}.mlp.c_proj.weight",
  "down_bias": "h.{}.mlp.c_proj.bias"}
_NEOX_LAYER = "gpt_neox.layers.{}."
_NEOX = {
  "embedding": "gpt_neox.embed_in.weight", "head": "embed_out.weight", "final_norm": "gpt_neox.final_layer_norm.weight",
  "final_norm_bias": "gpt_neox.final_layer_norm.bias", "attention_norm": _NEOX_LAYER + "input_layernorm.weight",
  "attention_norm_bias": _NEOX_LAYER + "input_layernorm.bias",
  "qkv": _NEOX_LAYER + "attention.query_key_value.weight", "qkv_bias": _NEOX_LAYER + "attention.query_key_value.bias",
  "attention_out": _NEOX_LAYER + "attention.dense.weight", "attention_out_bias": _NEOX_LAYER + "attention.dense.bias",
  "mlp_norm": _NEOX_LAYER + "post_attention_layernorm.weight",
  "mlp_norm_bias": _NEOX_LAYER + "post_attention_layernorm.bias", "up": _NEOX_LAYER + "mlp.dense_h_to_4h.weight",
  "up_bias": _NEOX_LAYER + "mlp.dense_h_to_4h.bias", "down": _NEOX_LAYER + "mlp.dense_4h_to_h.weight",
  "down_bias": _NEOX_LAYER + "mlp.dense_4h_to_h.bias"}

# Keys that change the arithmetic, with the values that leave it as it is. Absent is always allowed.
_NEUTRAL = {"quantization_config": (None,), "rope_interleaved": (False, None), "add_cross_attention": (False,),
            "is_encoder_decoder": (False,)}
_NO_EXPERTS = {"num_experts": (0, None), "num_local_experts": (0, None)}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh"}


@dataclasses.dataclass(frozen=True)
class Family:
  """One `model_type`.

  Attributes:
    names: part -> name of the tensor (see `assemble.places`).
    read: configuration -> what `DecoderConfig` takes of it.
    prefixes: what may stand before every name; the first under which the embedding is found.
    ignored: ends of names that may be there and hold nothing of the model.
    by_head, transposed, norm_offset: see `assemble.places`.
    stacked: names of experts that are stored as one array for all, as Transformers 5 has them in memory; {} without
      mixtures of experts.
  """
  names: Mapping[str, str]
  read: Callable[[Settings], dict]
  prefixes: tuple[str, ...] = ("",)
  ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)  # which follows from the configuration
  by_head: bool = False
  transposed: bool = False
  norm_offset: float = 0.0
  stacked: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_config(settings: Settings, eos_ids: tuple[int, ...]) -> DecoderConfig:
  """The decoder of a config.json.

  Args:
    settings: its keys.
    eos_ids: that end an answer.

  Raises:
    CheckpointError: names a key that is absent, wrong or not supported.
  """
  family = settings.get("model_type")
  if family not in FAMILIES:
    raise settings.error("model_type", f"supported are {', '.join(FAMILIES)}, with an encoder t5, mt5, bart, "
                         "mbart, marian and whisper, and mamba2")
  settings.require(_NEUTRAL if FAMILIES[family].stacked else _NEUTRAL | _NO_EXPERTS)
  values = FAMILIES[family].read(settings)
  try:
    return DecoderConfig(num_tokens=values["vocab_size"], eos_ids=eos_ids, family=family, **values)
  except settings.Error:
    raise
  except ValueError as error:
    raise settings.Error(f"{settings.path}: {error}") from error


def _llama(s: Settings, *, windows=False, theta=10000.0, **different) -> dict:
  """What Llama and its kin say, with a default `theta`; `different` replaces it."""
  width, heads, layers = s.count("hidden_size"), s.count("num_attention_heads"), s.count("num_hidden_layers")
  head_width = s.count("head_dim", width // heads)
  found = dict(
      vocab_size=s.count("vocab_size"), width=width, layers=layers, heads=heads,
      kv_heads=s.count("num_key_value_heads", heads), head_width=head_width, mlp_width=s.count("intermediate_size"),
      norm_eps=s.real("rms_norm_eps", 1e-6), max_context=s.count("max_position_embeddings"),
      tied=s.flag("tie_word_embeddings"), activation=_activation(s, "hidden_act", "silu"))
  found |= rope_keys.read(s, head_width, default_theta=theta)
  if windows:
    found["windows"] = _windows(s, layers)
  else:
    _refuse_windows(s)
  return found | different


def _read_llama(s):
  s.require({"attention_bias": (False, None), "mlp_bias": (False, None)})
  return _llama(s)


def _read_mistral(s, **different):
  window = None if s.get("sliding_window") is None else s.count("sliding_window")
  found = _llama(s, windows=True, **different)
  return found if s.get("layer_types") else found | {"windows": _or_none((window,) * found["layers"])}


def _read_qwen2(s):
  return _llama(s, windows=True, qkv_bias=True)


def _read_qwen3(s):
  s.require({"attention_bias": (False, None)})
  return _llama(s, windows=True, qk_norm="head")


def _read_mixtral(s):
  """Noise on the router's input (`router_jitter_noise`) is of training only."""
  s.require({"attention_bias": (False, None)})
  return _read_mistral(s, theta=1e6, norm_eps=s.real("rms_norm_eps", 1e-5), moe=_mixture(
      s, s.count("intermediate_size"), chosen=2, renormalised=True))


def _read_qwen2_moe(s):
  s.require({"use_sliding_window": (False, None)})
  return _some_mixtures(s, 1408, chosen=4, shared=s.count("shared_expert_intermediate_size", 5632)) | {
      "qkv_bias": s.flag("qkv_bias", True)}


def _read_qwen3_moe(s):
  s.require({"attention_bias": (False, None), "use_sliding_window": (False, None)})
  return _some_mixtures(s, 768) | {"qk_norm": "head"}


def _some_mixtures(s, width, chosen=8, shared=0):
  """Qwen's: mixtures in every so many layers, but for those of a list."""
  layers, step, named = s.count("num_hidden_layers"), s.count("decoder_sparse_step", 1), s.indices("mlp_only_layers")
  dense = tuple(i for i in range(layers) if i in (named or ()) or (i + 1) % step)
  mixture = _mixture(s, s.count("moe_intermediate_size", width), chosen=chosen, dense=dense, shared=shared)
  return _llama(s, windows=True, moe=None if len(dense) == layers else mixture)


def _read_olmoe(s):
  s.require({"attention_bias": (False, None), "clip_qkv": (None,)})
  return _llama(s, norm_eps=s.real("rms_norm_eps", 1e-5), qk_norm="whole",
                moe=_mixture(s, s.count("intermediate_size")))


def _mixture(s, width, chosen=8, dense=(), renormalised=None, shared=0) -> MoE:
  """The number of experts has two names: `num_local_experts` and `num_experts`, of which Transformers writes either."""
  key = "num_local_experts" if s.get("num_experts") is None else "num_experts"
  experts = s.count(key)
  if s.get("num_local_experts", experts) != experts:
    raise s.error("num_local_experts", f"num_experts is {experts}: they are two names of one number")
  chosen = s.count("num_experts_per_tok", chosen)
  if chosen > experts:
    raise s.error("num_experts_per_tok", f"at most {key}, {experts}, is required")
  return MoE(experts=experts, chosen=chosen, width=width, dense=dense, shared=shared,
             renormalised=s.flag("norm_topk_prob") if renormalised is None else renormalised)


def _read_gemma2(s):
  return _gemma(s, every=2, attention_cap=_cap(s, "attn_logit_softcapping", 50.0),
                logit_cap=_cap(s, "final_logit_softcapping", 30.0))


def _read_gemma3(s):
  s.require({"use_bidirectional_attention": (False, None)})
  found = _gemma(s, every=s.count("sliding_window_pattern", 6), theta=1e6, qk_norm="head",
                 attention_cap=_cap(s, "attn_logit_softcapping", None),
                 logit_cap=_cap(s, "final_logit_softcapping", None))
  return {"local_rope_theta": 10000.0} | found


def _gemma(s, every, theta=10000.0, **different):
  """Gemma 2 and 3: windows in all layers but the last of each `every`."""
  s.require({"attention_bias": (False, None), "use_bidirectional_attention": (False, None)})
  layers, window = s.count("num_hidden_layers"), s.count("sliding_window", 4096)
  windows = _windows(s, layers) if s.get("layer_types") else tuple(
      window if (i + 1) % every else None for i in range(layers))
  # Older files say hidden_act, which is not what these models compute.
  activation = _activation(s, "hidden_activation", "gelu_pytorch_tanh")
  found = _llama(s, windows=True, theta=theta, activation=activation, tied=s.flag("tie_word_embeddings", True),
                 head_width=s.count("head_dim", 256), pre_norm=True, post_norm=True,
                 query_scale=s.real("query_pre_attn_scalar", 256) ** -0.5, embedding_scale=s.count("hidden_size") ** 0.5)
  return found | {"windows": windows} | different


def _read_olmo2(s):
  s.require({"attention_bias": (False, None)})
  return _llama(s, norm_eps=s.real("rms_norm_eps", 1e-5), pre_norm=False, post_norm=True, qk_norm="whole")


def _read_phi3(s):
  window = None if s.get("sliding_window") is None else s.count("sliding_window")
  s.require({"attention_bias": (False, None)})
  return _llama(s, windows=True, norm_eps=s.real("rms_norm_eps", 1e-5)) | {
      "windows": _or_none((window,) * s.count("num_hidden_layers"))}


def _read_gpt2(s):
  s.require({"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
             "reorder_and_upcast_attn": (False, True)})
  width, heads = s.count("n_embd"), s.count("n_head")
  return dict(
      vocab_size=s.count("vocab_size"), width=width, layers=s.count("n_layer"), heads=heads, kv_heads=heads,
      head_width=width // heads, mlp_width=s.count("n_inner", 4 * width), norm_eps=s.real("layer_norm_epsilon", 1e-5),
      max_context=s.count("n_positions"), tied=s.flag("tie_word_embeddings", True), rope_theta=10000.0,
      positions="learned", norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, gated=False,
      activation=_activation(s, "activation_function", "gelu_new"))


def _read_gpt_neox(s):
  width, heads = s.count("hidden_size"), s.count("num_attention_heads")
  bias = s.flag("attention_bias", True)
  return dict(
      vocab_size=s.count("vocab_size"), width=width, layers=s.count("num_hidden_layers"), heads=heads, kv_heads=heads,
      head_width=width // heads, mlp_width=s.count("intermediate_size"), norm_eps=s.real("layer_norm_eps", 1e-5),
      max_context=s.count("max_position_embeddings"), tied=s.flag("tie_word_embeddings", False), norm="layer",
      qkv_bias=bias, out_bias=bias, mlp_bias=True, gated=False, parallel=s.flag("use_parallel_residual", True),
      activation=_activation(s, "hidden_act", "gelu"),
      **rope_keys.read(s, width // heads, part="rotary_pct", default_part=0.25, theta_key="rotary_emb_base"))


def _activation(s, key, default):
  name = s.get(key, default)
  if name not in _ACTIVATIONS:
    raise s.error(key, f"supported are {', '.join(_ACTIVATIONS)}")
  return _ACTIVATIONS[name]


def _cap(s, key, default):
  if key in s.values and s.values[key] is None:
    return None
  return default if default is None and key not in s.values else s.real(key, default)


def _windows(s, layers) -> tuple[int | None, ...]:
  """Windows by `layer_types`, or by Qwen's `use_sliding_window` and `max_window_layers`."""
  kinds = s.names("layer_types")
  if not kinds:
    on = s.get("sliding_window") is not None and s.flag("use_sliding_window", False)
    first = s.get("max_window_layers", layers)
    if type(first) is not int or first < 0:
      raise s.error("max_window_layers", "a whole number from 0 is required")
    return _or_none(tuple(s.count("sliding_window") if on and i >= first else None for i in range(layers)))
  if len(kinds) != layers:
    raise s.error("layer_types", f"one entry for each of the {layers} layers is required")
  if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
    raise s.error("layer_types", f"{min(unknown)!r} is not supported; full_attention and sliding_attention are")
  window = s.count("sliding_window") if "sliding_attention" in kinds else None
  return _or_none(tuple(window if kind == "sliding_attention" else None for kind in kinds))


def _or_none(windows):
  return windows if any(windows) else ()


def _refuse_windows(s):
  if set(s.names("layer_types")) - {"full_attention"}:
    raise s.error("layer_types", "only 'full_attention' is supported")
  if s.get("sliding_window") is not None:
    raise s.error("sliding_window", f"a window is not supported for {s.get('model_type')}: null, or no such key")


FAMILIES = {
  "llama": Family(_LLAMA, _read_llama), "mistral": Family(_LLAMA, _read_mistral),
  "qwen2": Family(_LLAMA, _read_qwen2), "qwen3": Family(_LLAMA | _QK_NORMS, _read_qwen3),
  "gemma2": Family(_GEMMA, _read_gemma2, norm_offset=1.0), "gemma3_text": Family(_GEMMA, _read_gemma3, norm_offset=1.0),
  "mixtral": Family(_MIXTRAL, _read_mixtral, stacked=_STACKED),
  "qwen2_moe": Family(_LLAMA | _EXPERTS | _SHARED, _read_qwen2_moe, stacked=_STACKED | _SHARED),
  "qwen3_moe": Family(_LLAMA | _QK_NORMS | _EXPERTS, _read_qwen3_moe, stacked=_STACKED),
  "olmoe": Family(_LLAMA | _QK_NORMS | _EXPERTS, _read_olmoe, stacked=_STACKED),
  "olmo2": Family(_OLMO2, _read_olmo2), "phi3": Family(_PHI3, _read_phi3),
  "gpt2": Family(_GPT2, _read_gpt2, prefixes=("", "transformer."), ignored=(".attn.bias", ".attn.masked_bias"),
                 transposed=True),
  "gpt_neox": Family(_NEOX, _read_gpt_neox, by_head=True, ignored=(
      ".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")),
}
