"""Families in GGUF files: what llama.cpp's converter would write of a folder loads as the folder does."""
import dataclasses
import json
import pathlib

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.checkpoints import CheckpointError
from specjax.checkpoints import gguf_families
from specjax.checkpoints import read_folder
from specjax.checkpoints import read_gguf
from specjax.models import rope

FOLDERS = pathlib.Path(__file__).parents[1] / "fixtures" / "families"
# Hugging Face's name inside a layer -> GGUF's; of Gemma where it differs.
ROLES = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
PHI3 = ROLES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
OLMO2 = ROLES | {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GPT2 = {"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
GEMMA = ROLES | {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                 "post_feedforward_layernorm": "post_ffw_norm"}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight", "wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight",
           "ln_f.weight": "output_norm.weight", "ln_f.bias": "output_norm.bias"}
EXTRA = {"gemma2": {"attention.sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0},
         "gemma3": {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 1000.0,
                    "rope.freq_base": 100000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
         "phi3": {"attention.sliding_window": 8, "rope.scaling.original_context_length": 256},
         "mixtral": {"expert_count": 6, "expert_used_count": 2},
         "qwen3_moe": {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 24},
         "olmoe": {"expert_count": 7, "expert_used_count": 2},
         "gpt2": {"rope.freq_base": None, "attention.layer_norm_rms_epsilon": None}}
ARCHITECTURES = {"llama3": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
TABLES = {"gemma2": GEMMA, "gemma3": GEMMA, "phi3": PHI3, "olmo2": OLMO2, "gpt2": GPT2}


def write(path, name, *, extra=(), tensors=()):
  """The model of a folder as a GGUF file."""
  config, arch = json.loads((FOLDERS / name / "config.json").read_text()), ARCHITECTURES.get(name, name)
  if name == "gpt2":  # its own words for the same
    config |= {"num_attention_heads": config["n_head"], "num_key_value_heads": config["n_head"],
               "hidden_size": config["n_embd"], "num_hidden_layers": config["n_layer"], "rms_norm_eps": None,
               "max_position_embeddings": config["n_positions"],
               "intermediate_size": config.get("n_inner") or 4 * config["n_embd"]}
    extra = dict(extra) | {"attention.layer_norm_epsilon": config["layer_norm_epsilon"]}
  heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
  size = config.get("head_dim") or config["hidden_size"] // heads
  metadata = {
      "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
      "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
      "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": size,
      "attention.value_length": size, "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
      "rope.freq_base": 10000.0, **EXTRA.get(name, {}), **dict(extra)}
  writer = gguf.GGUFWriter(path, arch)
  add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
  for key, value in metadata.items():
    if value is not None:
      add[type(value)](f"{arch}.{key}", value)
  for key, value in _without_experts(load_file(FOLDERS / name / "model.safetensors"), writer).items():
    if "gemma" in name and "norm" in key:
      value = value + 1
    if arch == "llama" and (".q_proj" in key or ".k_proj" in key):
      value = value.reshape(heads if ".q_proj" in key else kv, 2, size // 2, -1).swapaxes(1, 2).reshape(value.shape)
    key = key.removeprefix("transformer.")
    if name == "gpt2" and ".c_" in key and value.ndim == 2:
      value = value.T
    if key not in OUTSIDE:
      _, layer, role = key.removeprefix("model.").split(".", 2)
      role, kind = role.rsplit(".", 1)
      key = f"blk.{layer}.{TABLES.get(name, ROLES)[role]}.{kind}"
    writer.add_tensor(OUTSIDE.get(key, key), np.ascontiguousarray(value))
  for key, value in tensors:
    writer.add_tensor(key, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def _without_experts(loaded, writer):
  """The tensors but those of mixtures, which are written: each kind stacked over experts."""
  stacks, left = {}, {}
  for key, value in loaded.items():
    layer = key.split(".")[2] if key.startswith("model.layers.") else None
    if ".experts." in key:
      expert, kind, _ = key.partition(".experts.")[2].split(".")
      stacks.setdefault((layer, EXPERTS[kind]), {})[int(expert)] = value
    elif key.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
      writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", np.ascontiguousarray(value))
    else:
      left[key] = value
  for (layer, kind), experts in stacks.items():
    writer.add_tensor(f"blk.{layer}.ffn_{kind}_exps.weight", np.stack([experts[i] for i in range(len(experts))]))
  return left


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3", "olmo2", "phi3", "gpt2", "mixtral", "qwen3_moe",
                                  "olmoe"])
def test_both_formats_give_one_model(tmp_path, name):
  config, weights = read_gguf(write(tmp_path / "m.gguf", name))
  wanted, folder = read_folder(FOLDERS / name)
  # The file has no vocabulary; the size of heads, not the configuration's number, scales Gemma's queries in GGUF.
  same = dict(family=name, eos_ids=wanted.eos_ids)
  if name == "gemma2":
    same |= dict(query_scale=wanted.query_scale)
  if name == "mixtral":  # GGUF says nothing of its window
    same |= dict(windows=wanted.windows)
  assert dataclasses.replace(config, **same) == dataclasses.replace(wanted, family=name)
  assert jax.tree.structure(weights) == jax.tree.structure(folder)
  jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7), weights, folder)


def test_gemmas_largest_models_scale_queries_by_their_width(tmp_path):
  from specjax.checkpoints.gguf_header import read_header
  header = read_header(write(tmp_path / "m.gguf", "gemma3"))
  header.metadata["gemma3.block_count"], header.metadata["gemma3.attention.key_length"] = 62, 16
  header.tensors.update({f"x{i}": header.tensors["output_norm.weight"] for i in range(62)})
  assert gguf_families.read_config(header).query_scale == (32 // 4) ** -0.5


def test_rope_factors_are_llama3s_rule(tmp_path):
  """A file holds what the rule gives; frequencies are those of the folder."""
  wanted = read_folder(FOLDERS / "llama3")[0]
  plain = rope.frequencies(1e4, 8)[0]
  stretched = rope.frequencies(1e4, 8, wanted.rope_scaling)[0]
  factors = (plain / stretched).astype(np.float32)
  assert 1 < factors.min() < 2 and factors.max() == 8
  config, _ = read_gguf(write(tmp_path / "m.gguf", "llama3", tensors=[("rope_freqs.weight", factors)]))
  np.testing.assert_allclose(rope.frequencies(1e4, 8, config.rope_scaling)[0], stretched, rtol=1e-6)
  with pytest.raises(CheckpointError, match=r"'rope_freqs.weight' of shape \(3,\)"):
    read_gguf(write(tmp_path / "n.gguf", "llama3", tensors=[("rope_freqs.weight", factors[:3].copy())]))


@pytest.mark.parametrize("name, key, value, says", [
    ("qwen3", "attention.sliding_window", 8, "attention.sliding_window"),
    ("gemma3", "attention.sliding_window", None, "attention.sliding_window"),
    ("gemma2", "attn_logit_softcapping", 0.0, "attn_logit_softcapping"),
    ("gemma2", "rope.freq_base_swa", 5.0, "rope.freq_base_swa")])
def test_keys_of_a_family_are_checked(tmp_path, name, key, value, says):
  with pytest.raises(CheckpointError, match=says):
    read_gguf(write(tmp_path / "m.gguf", name, extra={key: value}))
