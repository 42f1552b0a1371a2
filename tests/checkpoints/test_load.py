"""`load`: configuration, weights and tokenizer that belong together, from either format."""
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint_files as files
from specjax.checkpoints import CheckpointError, load

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


def test_real_weights():
  config, weights, tokenizer = load("smollm2-135m")
  assert (config.family, config.layers, config.width, config.heads, config.kv_heads) == ("llama", 30, 576, 9, 3)
  assert (config.head_width, config.mlp_width, config.vocab_size, config.num_tokens) == (64, 1536, 49152, 49152)
  assert (config.eos_ids, config.tied, config.max_context) == ((2,), True, 8192)
  assert (config.norm_eps, config.rope_theta, config.rope_layout) == (1e-5, 100000.0, "half")
  assert tokenizer.vocab_size == 49152
  assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == 134515008
  for leaf in jax.tree.leaves(weights):
    assert leaf.dtype == jnp.float32 and bool(jnp.isfinite(leaf).all())
  assert 0.01 < float(jnp.std(weights.layers[7].qkv)) < 1


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_untied", "tiny_qwen2"])
def test_folder(name):
  config, weights, tokenizer = load(FIXTURES / name, dtype=jnp.bfloat16)
  assert config.num_tokens == tokenizer.vocab_size == 96 and config.eos_ids == tokenizer.eos_ids == (2,)
  assert weights.embedding.dtype == jnp.bfloat16


def test_head_rows_beyond_the_tokenizer(tmp_path):
  model = files.Model(vocab=128)
  shutil.copy(FIXTURES / "tiny_llama" / "tokenizer.json", tmp_path)
  files.write_folder(tmp_path, model)
  config, weights, _ = load(tmp_path)
  assert (config.vocab_size, config.num_tokens, weights.embedding.shape[0]) == (128, 96, 128)
  files.write_folder(tmp_path, files.Model(vocab=95))
  with pytest.raises(CheckpointError, match="96 tokens.*only 95 rows"):
    load(tmp_path)


def test_default_dtype_follows_the_backend(monkeypatch):
  assert load(FIXTURES / "tiny_llama")[1].embedding.dtype == jnp.float32
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert load(FIXTURES / "tiny_llama")[1].embedding.dtype == jnp.bfloat16


def test_weights_equal_a_plain_reading_of_the_fixture():
  from safetensors.numpy import load_file
  tensors = load_file(FIXTURES / "tiny_qwen2" / "model.safetensors")
  _, weights, _ = load(FIXTURES / "tiny_qwen2")
  layer = weights.layers[1]
  np.testing.assert_array_equal(layer.qkv[:32], tensors["model.layers.1.self_attn.q_proj.weight"])
  np.testing.assert_array_equal(layer.qkv_bias[-16:], tensors["model.layers.1.self_attn.v_proj.bias"])
  np.testing.assert_array_equal(layer.gate_up[64:], tensors["model.layers.1.mlp.up_proj.weight"])


def test_importing_loads_none_of_the_optional_packages():
  script = ("import sys, specjax.checkpoints; "
            "print([name for name in ('gguf', 'jinja2', 'huggingface_hub', 'tokenizers', 'safetensors', 'torch',"
            " 'transformers') if name in sys.modules])")
  done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"
