"""Writes small random models in both file formats, for the tests of this folder."""
import json

import gguf
import numpy as np
from safetensors.numpy import save_file

ROLES = {  # Hugging Face name -> GGUF name, inside a layer
  "input_layernorm.weight": "attn_norm.weight", "self_attn.q_proj.weight": "attn_q.weight",
  "self_attn.k_proj.weight": "attn_k.weight", "self_attn.v_proj.weight": "attn_v.weight",
  "self_attn.q_proj.bias": "attn_q.bias", "self_attn.k_proj.bias": "attn_k.bias",
  "self_attn.v_proj.bias": "attn_v.bias", "self_attn.o_proj.weight": "attn_output.weight",
  "post_attention_layernorm.weight": "ffn_norm.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
  "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
}
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}


class Model:
  """A random model under its Hugging Face names: `tensors` {name: f32[...]} and the sizes that made it."""

  def __init__(self, family="llama", *, tied=True, vocab=40, width=256, layers=2, heads=4, kv_heads=2, head_width=64,
               mlp_width=512, seed=0):
    self.family, self.tied = family, tied
    self.vocab, self.width, self.layers, self.heads, self.kv_heads = vocab, width, layers, heads, kv_heads
    self.head_width, self.mlp_width = head_width, mlp_width
    draw = np.random.default_rng(seed)
    e, q, k, m = width, heads * head_width, kv_heads * head_width, mlp_width
    shapes = {"model.embed_tokens.weight": (vocab, e), "model.norm.weight": (e,)}
    if not tied:
      shapes["lm_head.weight"] = (vocab, e)
    for layer in range(layers):
      sizes = [(e,), (q, e), (k, e), (k, e), (q,), (k,), (k,), (e, q), (e,), (m, e), (m, e), (e, m)]
      for role, size in zip(ROLES, sizes):
        if family == "qwen2" or not role.endswith("bias"):
          shapes[f"model.layers.{layer}.{role}"] = size
    self.tensors = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}

  def config_json(self):
    return {
      "model_type": self.family, "vocab_size": self.vocab, "hidden_size": self.width, "num_hidden_layers": self.layers,
      "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_width,
      "intermediate_size": self.mlp_width, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
      "max_position_embeddings": 512, "tie_word_embeddings": self.tied, "hidden_act": "silu"}

  def metadata(self):
    return {
      "block_count": self.layers, "context_length": 512, "embedding_length": self.width,
      "feed_forward_length": self.mlp_width, "attention.head_count": self.heads,
      "attention.head_count_kv": self.kv_heads, "attention.key_length": self.head_width,
      "attention.value_length": self.head_width, "attention.layer_norm_rms_epsilon": 1e-5,
      "rope.freq_base": 100000.0, "rope.dimension_count": self.head_width, "vocab_size": self.vocab}

  def gguf_name(self, name):
    if name in OUTSIDE:
      return OUTSIDE[name]
    _, _, layer, role = name.split(".", 3)
    return f"blk.{layer}.{ROLES[role]}"

  def stored_rows(self, name, value):
    """A tensor as llama.cpp's converter stores it: even-odd rotary pairs in the query and key rows of llama."""
    heads = self.heads if ".q_proj." in name else self.kv_heads if ".k_proj." in name else 0
    if self.family != "llama" or not heads:
      return value
    return value.reshape(heads, 2, self.head_width // 2, -1).swapaxes(1, 2).reshape(value.shape)


def write_folder(folder, model, *, tensors=None, config=(), shards=1):
  """Writes config.json and safetensors; `tensors` replaces the model's, `config` updates keys."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(model.config_json() | dict(config)))
  tensors = model.tensors if tensors is None else tensors
  if shards == 1:
    save_file(tensors, folder / "model.safetensors")
    return folder
  table = {}
  for shard in range(shards):
    names = sorted(tensors)[shard::shards]
    file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
    save_file({name: tensors[name] for name in names}, folder / file)
    table |= dict.fromkeys(names, file)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
  return folder


def write_gguf(path, model, *, kind="F32", tensors=None, metadata=(), raw=None, extra=()):
  """Writes a GGUF file.

  Args:
    path: of the file.
    model: what to write.
    kind: storage type of the matrices; norms and biases are F32.
    tensors: replaces the model's (Hugging Face names and order of rows).
    metadata: updates "<family>." keys; a value of None leaves the key out.
    raw: GGUF name -> blocks u8[rows, bytes] to store as they are.
    extra: (GGUF name, f32 array) pairs to add.
  """
  writer = gguf.GGUFWriter(path, model.family)
  add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
  for key, value in (model.metadata() | dict(metadata)).items():
    if value is not None:
      add[type(value)](f"{model.family}.{key}", value)
  kind = gguf.GGMLQuantizationType[kind]
  for name, value in (model.tensors if tensors is None else tensors).items():
    stored, target = model.stored_rows(name, value), model.gguf_name(name)
    if raw and target in raw:
      writer.add_tensor(target, raw[target], raw_dtype=kind)
    elif value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
      writer.add_tensor(target, np.ascontiguousarray(stored))
    else:
      writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(stored), kind), raw_dtype=kind)
  for name, value in extra:
    writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def expected_fields(model, tensors=None):
  """The fused weights that a model must load as: {(layer or None, field): array}."""
  tensors = model.tensors if tensors is None else tensors
  found = {(None, "embedding"): tensors["model.embed_tokens.weight"],
           (None, "final_norm"): tensors["model.norm.weight"],
           (None, "head"): tensors.get("lm_head.weight")}
  for layer in range(model.layers):
    def get(role, layer=layer):
      return tensors.get(f"model.layers.{layer}.{role}")
    biases = [get(f"self_attn.{part}_proj.bias") for part in "qkv"]
    found |= {
      (layer, "attention_norm"): get("input_layernorm.weight"),
      (layer, "qkv"): np.concatenate([get(f"self_attn.{part}_proj.weight") for part in "qkv"]),
      (layer, "qkv_bias"): None if biases[0] is None else np.concatenate(biases),
      (layer, "attention_out"): get("self_attn.o_proj.weight"),
      (layer, "mlp_norm"): get("post_attention_layernorm.weight"),
      (layer, "gate_up"): np.concatenate([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]),
      (layer, "down"): get("mlp.down_proj.weight")}
  return found


def assert_weights(weights, expected, *, atol=0.0):
  """Asserts that every field of the loaded weights is the expected array, bit for bit unless a tolerance is given."""
  for (layer, field), value in expected.items():
    got = getattr(weights if layer is None else weights.layers[layer], field)
    assert (got is None) == (value is None), (layer, field)
    if value is not None:
      assert got.shape == value.shape, (layer, field)
      np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(value, np.float32), rtol=0, atol=atol,
                                 err_msg=f"{layer} {field}")
