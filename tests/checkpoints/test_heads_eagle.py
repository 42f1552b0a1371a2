"""Files of EAGLE-1's heads: what they mean, by an independent transcription, and every way that they can be wrong."""
import json

import jax.numpy as jnp
import numpy as np
import pytest

import head_files as files
from specjax.cache import InFlight
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.models.eagle import EagleHead
from specjax.models.eagle3 import Eagle3Head
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = ("eagle_vicuna", "eagle_deep")
IDS = [0, 3, 4, 9, 10, 11, 17, 19]


def open_copy(tmp_path, name, **changes):
  return load_head(files.changed(tmp_path, name, **changes), dtype=jnp.float32)


def computed(head, given):
  """What `head_reference.eagle` computes, by the head: T entries at once, then one a recurrent step."""
  cache = head.init_cache(1, 1)
  table, count = jnp.asarray(given["embedding"]), len(given["tokens"])
  hidden, recurring, block = head.forward(
      head.embed(table, jnp.asarray(given["tokens"])[None]), head.fused(jnp.asarray(given["hidden"])[None]),
      jnp.arange(count)[None], jnp.tril(jnp.ones((count, count), bool))[None], cache)
  found = [hidden]
  for i, token in enumerate(given["later"]):
    hidden, recurring, new = head.forward(
        head.embed(table, jnp.asarray([[token]])), recurring[:, -1:], jnp.asarray([[count + i]]),
        jnp.ones((1, 1, count + i + 1), bool), cache, before=block)
    join = lambda axis: lambda old, more: jnp.concatenate([old, more], axis)
    block = InFlight(tuple(map(join(3), block.keys, new.keys)), tuple(map(join(2), block.values, new.values)))
    found.append(hidden)
  features = jnp.concatenate(found, 1)
  return np.asarray(features)[0], np.asarray(head.logits(features, jnp.asarray(given["head"])))[0]


@pytest.mark.parametrize("name", FIXTURES)
def test_forward_is_the_published_one(name):
  head, given = load_head(files.HEADS / name, dtype=jnp.float32), files.golden(name)
  features, logits = computed(head, given)
  np.testing.assert_allclose(features, given["features"], atol=1e-4)
  np.testing.assert_allclose(logits, given["logits"], atol=1e-4)


@pytest.mark.parametrize("mistake", ["feature first", "no bias", "features one token late"])
def test_a_likely_mistake_gives_other_values(mistake):
  """The reference tells them apart: the order of `fc`'s columns, its bias, which token a feature belongs to."""
  head, given = load_head(files.HEADS / "eagle_vicuna", dtype=jnp.float32), files.golden("eagle_vicuna")
  if mistake == "feature first":
    head = head.replace(fuse=jnp.roll(head.fuse, 8, axis=1))
  elif mistake == "no bias":
    head = head.replace(fuse_bias=None)
  else:
    given = given | {"hidden": np.roll(given["hidden"], 1, axis=0)}
  assert np.abs(computed(head, given)[1] - given["logits"]).max() > 0.05


def test_what_the_files_say(tmp_path):
  first = load_head(files.HEADS / "eagle_vicuna")
  assert first.fuse_bias.shape == (8,) and first.embedding.shape == (20, 8) and first.depth == 1
  assert first.layers[0].qkv_bias is None and first.input_norms == () and first.ids is None and first.features == ()
  assert (first.config.vocab_size, first.config.draft_vocab, first.config.max_context) == (20, 20, 64)
  second = load_head(files.HEADS / "eagle_deep")
  assert second.fuse_bias is None and second.embedding is None and second.depth == 2 and len(second.input_norms) == 1
  assert second.layers[1].qkv_bias.shape == (32,)
  # Without the key there is a bias; the families of targets are all the same to the head.
  with pytest.raises(CheckpointError, match="tensor 'fc.bias' is missing"):
    open_copy(tmp_path, "eagle_deep", without=["bias"])
  for family in ("qwen2", "mixtral"):
    files.assert_same(open_copy(tmp_path, "eagle_deep", config={"model_type": family}),
                      load_head(files.HEADS / "eagle_deep", dtype=jnp.float32))


def test_heads_are_told_from_those_of_eagle3():
  for name, kind in (("eagle_vicuna", EagleHead), ("eagle_deep", EagleHead), ("eagle3_speculators", Eagle3Head)):
    assert type(load_head(files.HEADS / name)) is kind


@pytest.mark.parametrize("name", FIXTURES)
def test_written_tensors_are_those_read(tmp_path, name):
  source = files.tensors_of(files.HEADS / name)
  stored = source["fc.weight"].dtype
  head = load_head(files.HEADS / name, dtype=stored)
  save_head(head, tmp_path / "written")
  files.assert_written(tmp_path / "written", source)
  files.assert_same(load_head(tmp_path / "written", dtype=stored), head)
  config = json.loads((tmp_path / "written" / "config.json").read_text())
  assert config["torch_dtype"] == stored.name and config["bias"] == (name == "eagle_vicuna")


def test_a_draft_vocabulary_is_written_and_read(tmp_path):
  head = tiny.eagle(tiny.decoder(), (1, 2, 5, 23))
  save_head(head, tmp_path / "written")
  files.assert_same(load_head(tmp_path / "written", target=tiny.decoder()), head)
  config = json.loads((tmp_path / "written" / "config.json").read_text())
  assert config["draft_vocab_size"] == 4
  with pytest.raises(CheckpointError, match="tensor 'd2t' is missing"):
    open_copy(tmp_path, "eagle_vicuna", config={"draft_vocab_size": 8})


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_is_needed_and_no_other_is(tmp_path, name):
  for key, value in files.tensors_of(files.HEADS / name).items():
    if key not in ("embed_tokens.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"):  # two tell what it is
      with pytest.raises(CheckpointError, match=f"tensor '{key}' is missing"):
        open_copy(tmp_path, name, drop=[key])
    with pytest.raises(CheckpointError, match=f"tensor '{key}' has shape .*; the configuration asks for "):
      open_copy(tmp_path, name, tensors={key: np.concatenate([value, value[:1]])})
  # Of HASS's variants, of a head with a norm where this has none, of one with a vocabulary of its own.
  for extra, shape in (("embed_layernorm.weight", (8,)), ("layers.0.input_layernorm.weight", (8,)),
                       ("norm.weight", (8,)), ("lm_head.weight", (20, 8))):
    with pytest.raises(CheckpointError, match=f"extra tensor '{extra}'"):
      open_copy(tmp_path, name, tensors={extra: np.ones(shape, np.float32)})
  assert open_copy(tmp_path, "eagle_vicuna", drop=["embed_tokens.weight"]).embedding is None


@pytest.mark.parametrize("key, value, why", [
  ("rope_scaling", {"type": "linear", "factor": 2.0}, "only unscaled rotary positions"),
  ("attention_bias", True, "supported: False or None"), ("hidden_act", "gelu", "supported: 'silu'"),
  ("model_type", "eagle", "supported: 'llama' or 'qwen2' or 'mixtral'"), ("bias", "no", "true or false"),
  ("num_hidden_layers", 0, "a positive whole number"),
  ("speculators_model_type", "eagle", "only 'eagle3', 'mtp', 'peagle' are supported")])
def test_unsupported_arithmetic_is_refused_by_name(tmp_path, key, value, why):
  with pytest.raises(CheckpointError, match=f"config.json: {key} is .*{why}"):
    open_copy(tmp_path, "eagle_vicuna", config={key: value})


def test_a_head_for_another_target_is_refused():
  with pytest.raises(CheckpointError, match="the head is for a target of 20 token ids and width 8, .* 24 and 16"):
    load_head(files.HEADS / "eagle_deep", target=tiny.decoder())
