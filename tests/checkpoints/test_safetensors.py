"""Hugging Face folders: shards, ties, and every way a folder can be wrong."""
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoint_files as files
from specjax.checkpoints import CheckpointError, read_folder
from specjax.checkpoints.safetensors import FolderSource

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_fused_weights(tmp_path, family, shards):
  model = files.Model(family, tied=family == "qwen2")
  config, weights = read_folder(files.write_folder(tmp_path, model, shards=shards))
  files.assert_weights(weights, files.expected_fields(model))
  assert (config.family, config.tied, config.qkv_bias) == (family, family == "qwen2", family == "qwen2")


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kept", [jnp.float32, jnp.bfloat16])
def test_half_precision(tmp_path, stored, kept):
  model = files.Model()
  tensors = {name: value.astype(stored) for name, value in model.tensors.items()}
  _, weights = read_folder(files.write_folder(tmp_path, model, tensors=tensors), kept)
  assert all(leaf.dtype == kept for leaf in jax.tree.leaves(weights))
  rounded = {name: value.astype(np.dtype(kept)).astype(np.float32) for name, value in tensors.items()}
  files.assert_weights(weights, files.expected_fields(model, rounded))


@pytest.mark.parametrize("name, family, tied, theta, eps, head_width", [
  ("tiny_llama", "llama", True, 1e5, 1e-5, 8), ("tiny_llama_untied", "llama", False, 1e4, 1e-6, 16),
  ("tiny_qwen2", "qwen2", False, 1e6, 1e-6, 8)])
def test_folders_written_by_transformers(name, family, tied, theta, eps, head_width):
  config, weights = read_folder(FIXTURES / name)
  assert (config.family, config.tied, config.rope_theta, config.norm_eps) == (family, tied, theta, eps)
  assert (config.vocab_size, config.eos_ids, config.head_width) == (96, (2,), head_width)
  assert (weights.head is None) == tied
  # Biases that loaded as zeros would go unnoticed in many models; the fixtures' are random.
  if family == "qwen2":
    assert all(np.abs(layer.qkv_bias).min() > 0 for layer in weights.layers)


def test_tied_head_may_be_stored_when_equal(tmp_path):
  model = files.Model(tied=True)
  embedding = model.tensors["model.embed_tokens.weight"]
  folder = files.write_folder(tmp_path, model, tensors=model.tensors | {"lm_head.weight": embedding.copy()})
  assert read_folder(folder)[1].head is None
  other = embedding.copy()
  other[-1, -1] += 1
  files.write_folder(tmp_path, model, tensors=model.tensors | {"lm_head.weight": other})
  with pytest.raises(CheckpointError, match="'lm_head.weight' differs from 'model.embed_tokens.weight'"):
    read_folder(folder)
  files.write_folder(tmp_path, model, tensors=model.tensors | {"lm_head.weight": embedding[:-1].copy()})
  with pytest.raises(CheckpointError, match="'lm_head.weight' has shape"):
    read_folder(folder)


def test_rotary_buffers_are_ignored(tmp_path):
  model = files.Model()
  extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32)}
  folder = files.write_folder(tmp_path, model, tensors=model.tensors | extra)
  files.assert_weights(read_folder(folder)[1], files.expected_fields(model))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_missing_tensor_is_named(tmp_path, name):
  model = files.Model(tied=False)
  tensors = {key: value for key, value in model.tensors.items() if key != name}
  with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
    read_folder(files.write_folder(tmp_path, model, tensors=tensors))


def test_extra_tensor_is_named(tmp_path):
  model = files.Model()
  name = "model.layers.0.self_attn.q_norm.weight"
  with pytest.raises(CheckpointError, match=f"extra tensor '{name}'"):
    read_folder(files.write_folder(tmp_path, model, tensors=model.tensors | {name: np.ones(64, np.float32)}))


def test_misshapen_tensor_is_named(tmp_path):
  model = files.Model()
  name = "model.layers.1.self_attn.k_proj.weight"
  with pytest.raises(CheckpointError, match=rf"'{name}' has shape \(64, 256\).*\(128, 256\)"):
    read_folder(files.write_folder(tmp_path, model, tensors=model.tensors | {name: np.ones((64, 256), np.float32)}))


def test_unsupported_storage_type_is_named(tmp_path):
  model = files.Model()
  name = "model.norm.weight"
  with pytest.raises(CheckpointError, match=f"'{name}' has type I32"):
    read_folder(files.write_folder(tmp_path, model, tensors=model.tensors | {name: np.ones(256, np.int32)}))


@pytest.mark.parametrize("change, says", [
  ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.original_max_position_embeddings"),
  ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_scaling.rope_type is 'longrope'"),
  ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
  ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "rope_scaling.factor is -2.0"),
  ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7}}, "rope_parameters.mscale"),
  ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters.factor"),
  ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
  ({"hidden_act": "relu2"}, "hidden_act"), ({"attention_bias": True}, "attention_bias"),
  ({"mlp_bias": True}, "mlp_bias"), ({"sliding_window": 64, "use_sliding_window": True}, "sliding_window is 64"),
  ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types.*each of the 2 layers"),
  ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
  ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
  ({"sliding_window": 4096}, "sliding_window"),
  ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
  ({"quantization_config": {"bits": 4}}, "quantization_config"), ({"rope_interleaved": True}, "rope_interleaved"),
  ({"model_type": "gemma4"}, "gemma4.*llama, mistral, qwen2"), ({"hidden_size": "256"}, "hidden_size"),
  ({"num_key_value_heads": 3}, "not a multiple"), ({"rms_norm_eps": 0}, "rms_norm_eps"),
  ({"eos_token_id": "2"}, "eos_token_id"),
])
def test_unsupported_configuration_is_refused_by_name(tmp_path, change, says):
  with pytest.raises(CheckpointError, match=says):
    read_folder(files.write_folder(tmp_path, files.Model(), config=change))


@pytest.mark.parametrize("change", [
  {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, {"head_dim": None},
  {"sliding_window": None}, {"layer_types": ["full_attention"] * 2}, {"rope_interleaved": False}])
def test_neutral_configuration_is_accepted(tmp_path, change):
  config, _ = read_folder(files.write_folder(tmp_path, files.Model(), config=change))
  assert (config.rope_theta, config.head_width) == (1e5, 64)


@pytest.mark.parametrize("change, windows", [
  ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, ()),
  ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, ()),
  ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (None, 64)),
  ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, (64, None))])
def test_windows_are_those_of_the_configuration(tmp_path, change, windows):
  assert read_folder(files.write_folder(tmp_path, files.Model("qwen2"), config=change))[0].windows == windows


@pytest.mark.parametrize("change, found", [
  ({"rope_scaling": {"type": "linear", "factor": 2.0}}, dict(kind="linear", factor=2.0)),
  ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64}},
   dict(kind="llama3", factor=8.0, original_context=64, low=1.0, high=4.0)),
  ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0}},
   dict(kind="yarn", factor=4.0, original_context=512, low=1.0, high=32.0))])
def test_stretched_rotary_angles_are_read_in_both_spellings(tmp_path, change, found):
  config = read_folder(files.write_folder(tmp_path, files.Model(), config=change))[0]
  assert config.rope_theta == 1e5 and {key: getattr(config.rope_scaling, key) for key in found} == found


def test_generation_config_says_what_ends_an_answer(tmp_path):
  folder = files.write_folder(tmp_path, files.Model(), config={"eos_token_id": 2})
  assert read_folder(folder)[0].eos_ids == (2,)
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
  assert read_folder(folder)[0].eos_ids == (5, 7)


def test_damaged_files_are_named(tmp_path):
  folder = files.write_folder(tmp_path, files.Model())
  weights = folder / "model.safetensors"
  whole = weights.read_bytes()
  for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
    weights.write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match="model.safetensors: is not a whole"):
      read_folder(folder)
  weights.unlink()
  with pytest.raises(CheckpointError, match="0 .*safetensors files"):
    read_folder(folder)
  (folder / "config.json").write_text("{")
  with pytest.raises(CheckpointError, match="config.json: is not readable JSON"):
    read_folder(folder)
  (folder / "config.json").unlink()
  with pytest.raises(CheckpointError, match="config.json: is not there"):
    read_folder(folder)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
  folder = files.write_folder(tmp_path, files.Model())
  source, weights = FolderSource(folder), folder / "model.safetensors"
  weights.write_bytes(weights.read_bytes()[:-10000])
  with pytest.raises(CheckpointError, match="model.safetensors: tensor '.*' could not be read whole"):
    [source.rows(name, 0, shape[0]) for name, shape in source.shapes.items()]
  weights.unlink()
  with pytest.raises(CheckpointError, match="model.safetensors: tensor 'model.norm.weight' could not be read whole"):
    source.rows("model.norm.weight", 0, 1)


def test_every_type_of_numpy_is_read_as_it_is_stored(tmp_path):
  draw = np.random.default_rng(0).integers(0, 100, (4, 3))
  types = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.bool_, *(
      np.dtype(f"{sign}{size}") for sign in "iu" for size in (1, 2, 4, 8))]
  tensors = {np.dtype(kind).name: (draw % 2 if kind == np.bool_ else draw).astype(kind) for kind in types}
  save_file(tensors | {"small": draw.astype(ml_dtypes.float8_e4m3fn)}, tmp_path / "model.safetensors")
  source = FolderSource(tmp_path)
  for name, value in tensors.items():
    found = source.rows(name, 1, 3)
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value[1:3])
  with pytest.raises(CheckpointError, match="tensor 'small' has type F8_E4M3, which is not read"):
    source.rows("small", 0, 4)


def test_absent_shard_and_foreign_path_are_named(tmp_path):
  folder = files.write_folder(tmp_path / "m", files.Model(), shards=2)
  (folder / "model-00002-of-00002.safetensors").rename(tmp_path / "away.safetensors")
  with pytest.raises(CheckpointError, match="model-00002-of-00002"):
    read_folder(folder)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../away.safetensors"}}))
  with pytest.raises(CheckpointError, match="away"):
    read_folder(folder)
