"""Mamba-2 from Hugging Face folders: what is refused by name, and which spellings mean the same."""
import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints import CheckpointError
from specjax.checkpoints import mamba2

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "recurrent"


@pytest.fixture
def edited(tmp_path):
  """`edited(name, config=.., tensors=..)`: a copy of a folder with some keys and tensors changed; None removes one."""
  def make(name, config=None, tensors=None):
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if tensors:
      held = load_file(folder / "model.safetensors") | tensors
      save_file({k: v for k, v in held.items() if v is not None}, folder / "model.safetensors")
    return str(folder)
  return make


@pytest.mark.parametrize("change, named", [
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
    ({"rms_norm": False}, "rms_norm is False"),
    ({"attn_layer_idx": [1]}, r"attn_layer_idx is \[1\]"),
    ({"quantization_config": {"bits": 8}}, "quantization_config"),
    ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]; supported: \[0.0, Infinity\]"),
    ({"time_step_limit": [0.001, float("inf")]}, "time_step_limit is"),
    ({"expand": 3}, "expand is 3; num_heads . head_dim = 64 must be expand . hidden_size = 96"),
    ({"n_groups": 3}, "heads=8 is not a multiple of groups=3"),
    ({"conv_kernel": 1}, "kernel=1"),
    ({"state_size": 0}, "state_size is 0"),
    ({"use_bias": "no"}, "use_bias is 'no'; true or false"),
    ({"use_bias": True}, "tensor 'backbone.layers.0.mixer.in_proj.bias' is missing"),
    ({"use_conv_bias": False}, "extra tensor 'backbone.layers.0.mixer.conv1d.bias'"),
    ({"n_groups": 2}, r"'backbone.layers.0.mixer.in_proj.weight' has shape \(168, 32\)"),
    ({"num_hidden_layers": 3}, "tensor 'backbone.layers.2.norm.weight' is missing"),
    ({"tie_word_embeddings": False}, "tensor 'lm_head.weight' is missing"),
    ({"model_type": "mamba"}, "model_type is 'mamba'.*and mamba2"),
    ({"model_type": None, "ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg is .*state-spaces/mamba is not read: convert it")])
def test_keys_that_are_refused(edited, change, named):
  with pytest.raises(CheckpointError, match=named):
    specjax.load(edited("mamba2", change))


def test_spellings_of_one_model(edited):
  """Steps without a bound as JSON has it and left out; an older name of the embedding; keys that nothing reads."""
  wanted = specjax.load(str(FIXTURES / "mamba2"))[0]
  embedding = load_file(FIXTURES / "mamba2" / "model.safetensors")["backbone.embeddings.weight"]
  for change, tensors in (({"time_step_limit": [0.0, float("inf")], "norm_before_gate": True}, None),
                          ({"time_step_limit": None, "rms_norm": True}, {"lm_head.weight": embedding}),
                          ({}, {"backbone.embedding.weight": embedding, "backbone.embeddings.weight": None,
                                "lm_head.weight": None})):
    target, _ = specjax.load(edited("mamba2", change, tensors))
    assert target.config == wanted.config and target.weights.head is None
    assert np.array_equal(target.weights.embedding, embedding)


def test_tensors_that_are_refused(edited):
  with pytest.raises(CheckpointError, match="'lm_head.weight' differs from 'backbone.embeddings.weight'"):
    specjax.load(edited("mamba2", tensors={"lm_head.weight": np.ones((96, 32), np.float32)}))
  with pytest.raises(CheckpointError, match="extra tensor 'backbone.layers.0.mixer.x_proj.weight'"):
    specjax.load(edited("mamba2", tensors={"lm_head.weight": None,
                                           "backbone.layers.0.mixer.x_proj.weight": np.ones((2, 2), np.float32)}))


def test_it_is_read_and_not_written(tmp_path):
  with pytest.raises(CheckpointError, match="a model of the family 'mamba2' is not written"):
    specjax.save(tmp_path / "out", *specjax.load(str(FIXTURES / "mamba2")))
  assert not (tmp_path / "out").exists()


def test_what_is_kept_in_which_type():
  """A state decays by products of many factors: what makes them stays float32."""
  config, weights = mamba2.read_folder(FIXTURES / "mamba2_groups", jnp.bfloat16)
  layer = weights.layers[0]
  assert {layer.step_bias.dtype, layer.decay_log.dtype, layer.skip.dtype} == {jnp.dtype(jnp.float32)}
  assert {layer.conv.dtype, layer.project_in.dtype, weights.head.dtype} == {jnp.dtype(jnp.bfloat16)}
  assert layer.conv.shape == (config.channels, config.kernel) == (128, 3)
  target = specjax.load(str(FIXTURES / "mamba2_groups"), dtype=jnp.bfloat16)[0]
  cache, tokens = target.init_cache(1, 8), jnp.zeros((1, 1), jnp.int32)
  out = target.forward(tokens, tokens, jnp.ones((1, 1, 1), bool), cache, features=(1,))
  assert cache.layers[0].state.dtype == jnp.float32 and cache.layers[0].tail.dtype == jnp.bfloat16
  assert out.hidden.dtype == jnp.bfloat16 and out.features[0].dtype == target.residual_dtype == jnp.float32
  after = cache.commit(out.in_flight, jnp.ones(1, jnp.int32))
  assert jax_types(after) == jax_types(cache)


def jax_types(cache):
  return [(layer.state.dtype, layer.tail.dtype) for layer in cache.layers]
