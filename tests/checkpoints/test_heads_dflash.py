"""Files of DFlash's drafters."""
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import head_files as files
from specjax import cache as cache_lib
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
IDS = [0, 3, 4, 9, 10, 11, 17, 19]
NESTED = {"nested": ["dflash_config"]}


def open_copy(tmp_path, **changes):
  return load_head(files.changed(tmp_path, "dflash", **changes), dtype=jnp.float32)


def some_ids():
  """The map of a drafter of 8 ids of 20."""
  mask = np.zeros(20, bool)
  mask[IDS] = True
  return {"d2t": np.array(IDS) - np.arange(8), "t2d": mask}


@pytest.mark.parametrize("causal", [False, True])
def test_forward_is_the_published_one(tmp_path, causal):
  head = open_copy(tmp_path, config={"causal_head": causal}, **NESTED)
  given = files.golden("dflash")
  assert np.abs(given["logits"] - given["causal"])[:3].max() > 0.1
  text = len(given["features"])
  block = head.text(jnp.asarray(given["features"])[None], jnp.arange(text)[None])
  # Of a cache with more room than text.
  room = head.init_cache(1, text + 3)
  cache = cache_lib.KVCache(
      keys=tuple(old.at[..., :text].set(new) for old, new in zip(room.keys, block.keys, strict=True)),
      values=tuple(old.at[..., :text, :].set(new) for old, new in zip(room.values, block.values, strict=True)),
      length=jnp.array([text], jnp.int32))
  places = text + jnp.arange(head.config.block)[None]
  hidden = head.forward(jnp.asarray(given["block"])[None], places, cache)
  found = head.logits(hidden, jnp.asarray(given["head"]))[0]
  np.testing.assert_allclose(found, given["causal" if causal else "logits"], atol=1e-4)


def test_layer_ids_name_outputs_of_layers(tmp_path):
  head = load_head(files.HEADS / "dflash")
  assert head.features == (2, 6)  # target_layer_ids 1 and 5
  assert (head.config.layers, head.config.block, head.config.mask_id, head.config.causal) == (2, 4, 19, False)
  assert (head.config.vocab_size, head.config.draft_vocab, head.config.max_context) == (20, 20, 64)
  assert head.ids is None and len(head.layers) == len(head.input_norms) == 2


@pytest.mark.parametrize("layers, drafter, wanted", [
  (36, 5, (2, 10, 18, 26, 34)), (24, 5, (2, 7, 12, 17, 22)), (32, 5, (2, 9, 16, 23, 30)), (36, 1, (19,)),
  (8, 2, (2, 6))])
def test_layers_follow_from_the_target_without_ids(tmp_path, layers, drafter, wanted):
  rng = np.random.default_rng(0)
  stored = files.tensors_of(files.HEADS / "dflash")
  tensors = {name.replace("layers.0.", f"layers.{i}."): value for i in range(drafter) for name, value in stored.items()
             if name.startswith("layers.0.")} | {"fc.weight": rng.standard_normal((8, 8 * drafter), np.float32)}
  drop = [name for name in stored if name.startswith("layers.") and int(name.split(".")[1]) >= drafter]
  config = {"num_hidden_layers": drafter, "num_target_layers": layers, "layer_types": None,
            "dflash_config": {"mask_token_id": 19}}
  assert open_copy(tmp_path, tensors=tensors, drop=drop, config=config).features == wanted
  folder = files.changed(tmp_path, "dflash", tensors=tensors, drop=drop, config=config | {"num_target_layers": None})
  with pytest.raises(CheckpointError, match="set num_target_layers, or pass target="):
    load_head(folder)
  target = tiny.decoder(vocab=20)
  target = target.replace(config=dataclasses.replace(target.config, width=8, layers=layers))
  assert load_head(folder, target=target).features == wanted


def test_keys_may_stand_at_the_top_or_inside(tmp_path):
  plain = load_head(files.HEADS / "dflash", dtype=jnp.float32)
  top = {"mask_token_id": 19, "target_layer_ids": [1, 5], "dflash_config": {}}
  files.assert_same(open_copy(tmp_path, config=top), plain)
  inside = {"mask_token_id": 19, "target_layer_ids": [1, 5], "block_size": 4}
  files.assert_same(open_copy(tmp_path, config={"dflash_config": inside}, without=["block_size"]), plain)
  files.assert_same(open_copy(tmp_path, config={"dflash_config": inside, "block_size": 16}), plain)
  assert open_copy(tmp_path, config={"is_causal": True}).config.causal
  # JetSpec's key.
  assert open_copy(tmp_path, config={"causal_head": True}, **NESTED).config.causal


def test_a_drafter_of_some_ids(tmp_path):
  head = open_copy(tmp_path, tensors=some_ids(), config={"draft_vocab_size": 8})
  assert head.ids.tolist() == IDS and head.config.draft_vocab == 8
  save_head(head, tmp_path / "written")
  files.assert_same(load_head(tmp_path / "written", dtype=jnp.float32), head)
  with pytest.raises(CheckpointError, match="tensor 'd2t' is missing"):
    open_copy(tmp_path, config={"draft_vocab_size": 8})
  # The configuration decides: a map that it does not speak of must be of all ids.
  with pytest.raises(CheckpointError, match=r"tensor 'd2t' has shape \(8,\); the configuration asks for \(20,\)"):
    open_copy(tmp_path, tensors=some_ids())


@pytest.mark.parametrize("causal", [False, True])
def test_written_tensors_are_those_read(tmp_path, causal):
  source = files.tensors_of(files.HEADS / "dflash")
  stored = source["fc.weight"].dtype
  folder = files.changed(tmp_path, "dflash", config={"causal_head": causal}, **NESTED)
  for kept, written in ((stored, None), (jnp.float32, stored)):
    head = load_head(folder, dtype=kept)
    save_head(head, tmp_path / "written", "z-lab", dtype=written)
    files.assert_written(tmp_path / "written", source)
    files.assert_same(load_head(tmp_path / "written", dtype=kept), head)
  config = json.loads((tmp_path / "written" / "config.json").read_text())
  assert config["dflash_config"] == {"mask_token_id": 19, "target_layer_ids": [1, 5], "causal_head": causal}


def test_what_the_format_cannot_say(tmp_path):
  head = load_head(files.HEADS / "dflash")
  low = head.replace(config=dataclasses.replace(head.config, features=(0, 6)))
  with pytest.raises(CheckpointError, match=r"cannot say that the layers \(0, 6\) are read"):
    save_head(low, tmp_path / "written")
  bare = head.replace(layers=tuple(layer.replace(query_norm=None) for layer in head.layers))
  with pytest.raises(CheckpointError, match="has norms of queries and keys in every layer; this drafter has none"):
    save_head(bare, tmp_path / "written")
  with pytest.raises(CheckpointError, match="dialect 'safeailab' is unknown; of DFlashHead there are z-lab"):
    save_head(head, tmp_path / "written", "safeailab")


def test_every_tensor_is_needed_and_no_other_is(tmp_path):
  for key, value in files.tensors_of(files.HEADS / "dflash").items():
    with pytest.raises(CheckpointError, match=f"tensor '{key}' is missing"):
      open_copy(tmp_path, drop=[key])
    with pytest.raises(CheckpointError, match=f"tensor '{key}' has shape .*; the configuration asks for "):
      open_copy(tmp_path, tensors={key: np.concatenate([value, value[:1]])})
  for name in ("embed_tokens.weight", "lm_head.weight", "layers.2.mlp.up_proj.weight", "markov_head.markov_w1.weight"):
    with pytest.raises(CheckpointError, match=f"extra tensor '{name}' of shape .20, 8."):
      open_copy(tmp_path, tensors={name: np.zeros((20, 8), np.float32)})


@pytest.mark.parametrize("key, value, why", [
  ("conv_kernel_size", 2, "nothing is known of this key"), ("selector_rank", 256, "nothing is known of this key"),
  ("projector_type", "markov", "supported: None"), ("shift_label", True, "supported: False or None"),
  ("input_embedding_scale", 2.0, "supported: 1.0"), ("final_logit_softcapping", 30.0, "supported: 0.0 or None"),
  ("mask_token_id", 20, "an id below vocab_size 20"), ("mask_token_id", None, "an id below vocab_size 20"),
  ("target_layer_ids", [1, -1], "a list of whole numbers from 0"), ("causal_head", 1, "true or false"),
  ("block_size", 1, "2 or more is required"),
])
def test_relatives_are_refused_by_name(tmp_path, key, value, why):
  with pytest.raises(CheckpointError, match=f"config.json: dflash_config.{key} is .*{why}"):
    open_copy(tmp_path, config={key: value}, **NESTED)


@pytest.mark.parametrize("key, value, why", [
  ("layer_types", ["sliding_attention", "full_attention"], "only 'full_attention'"),
  ("layer_types", 3, "a list of names"), ("architectures", "x", "a list of names"),
  ("attention_bias", True, "supported: False or None"),
  ("model_type", "llama", "supported: 'qwen3'"), ("rope_scaling", {"rope_type": "yarn"}, "only unscaled"),
  ("partial_rotary_factor", 0.5, "supported: 1.0"),  # speculators 613 and 738
  ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "only unscaled"),
  ("output_multiplier", 0.5, "supported: 1.0"), ("block_size", None, "a positive whole number is required"),
  ("dflash_config", 3, "an object is required")])
def test_unsupported_arithmetic_is_refused_by_name(tmp_path, key, value, why):
  with pytest.raises(CheckpointError, match=f"config.json: {key} is .*{why}"):
    open_copy(tmp_path, config={key: value})


def test_the_target_must_be_its_own():
  with pytest.raises(CheckpointError, match="dflash: the drafter is for a target of 20 token ids and width 8"):
    load_head(files.HEADS / "dflash", target=tiny.decoder())
