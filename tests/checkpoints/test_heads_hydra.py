"""Files of Hydra's heads: the published architectures, and what specjax adds to them."""
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import head_files as files
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.testing import tiny
from specjax.training import own_passes

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = {"hydra_mlp": (3, 2), "hydra_prefix": (2, 3), "hydra_shared": (2, 1)}
IDS = [0, 3, 4, 9, 10, 11, 17, 19]
UNUSED = "prefix_embeding_layer.embed_tokens.weight"
TINY = tiny.decoder(vocab=20)
# Of the sizes of the fixtures, whose weights nobody asks for.
TARGET = TINY.replace(config=dataclasses.replace(TINY.config, width=8, heads=4, kv_heads=2, head_width=2, max_context=64))


def open_copy(tmp_path, name, target=TARGET, **changes):
  return load_head(files.changed(tmp_path, name, **changes), dtype=jnp.float32, target=target)


@pytest.mark.parametrize("name", FIXTURES)
def test_forward_is_the_published_one(name):
  head = load_head(files.HEADS / name, dtype=jnp.float32, target=TARGET)
  given = files.golden(name)
  assert (head.config.heads, head.config.blocks, head.config.width) == (*FIXTURES[name], 8)
  read = jnp.asarray(given["hidden"])
  if head.prefix is not None:
    attend = lambda query, keys, values: own_passes.attend(query, keys, values, [])
    place = jnp.arange(5, dtype=jnp.int32)[None]
    whole = head.apply_prefix(read[None], place, attend)[0]
    # Three tokens, and then two more that see them in the cache.
    cache, parts = head.init_cache(1, 8), []
    for begin, end in ((0, 3), (3, 5)):
      mask = jnp.tril(jnp.ones((1, end - begin, end - begin), bool))
      out, block = head.forward_prefix(read[None, begin:end], place[:, begin:end], mask, cache)
      cache = cache.commit(block, jnp.array([end - begin], jnp.int32))
      parts.append(out)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-5)
    read = whole[0]
  shared = jnp.asarray(given["head"]) if head.vocabulary is None else None
  for i in range(head.config.heads):
    tokens = np.stack([given["tokens"][t:t + i + 1] for t in range(5)])
    inputs = jnp.concatenate([read, given["embedding"][tokens].reshape(5, -1)], axis=1)
    found = head.logits(i, head.state(i, inputs), shared)
    np.testing.assert_allclose(found, given["logits"][:, i], atol=1e-4)


def test_the_file_alone_and_its_folder_are_the_same():
  head = load_head(files.HEADS / "hydra_mlp")
  assert head.prefix is None and head.ids is None and head.config.max_context is None
  assert [x.linear.shape for x in head.joining] == [(8, 16), (8, 24), (8, 32)]
  files.assert_same(load_head(files.HEADS / "hydra_mlp" / "hydra_lm_head.pt"), head)


def test_constants_of_prefix_attention_are_the_targets_but_for_the_rotary_base(tmp_path):
  """Hydra's copy of Llama turns by base 10000, whatever the target's configuration says."""
  other = TARGET.replace(config=dataclasses.replace(TARGET.config, rope_theta=500.0, norm_eps=1e-3))
  shape = open_copy(tmp_path, "hydra_prefix", other).config.prefix
  assert (shape.heads, shape.kv_heads, shape.head_width, shape.mlp_width) == (4, 2, 2, 12)
  assert (shape.rope_theta, shape.norm_eps) == (10000.0, 1e-3)
  with pytest.raises(CheckpointError, match="config.json: says nothing of the heads of prefix attention.*pass target="):
    open_copy(tmp_path, "hydra_prefix", None)
  uneven = TARGET.replace(config=dataclasses.replace(TARGET.config, head_width=4))
  with pytest.raises(CheckpointError, match="the target's 4 heads of 4 are not 8 together"):
    open_copy(tmp_path, "hydra_prefix", uneven)
  assert load_head(files.HEADS / "hydra_shared").config.prefix.norm_eps == 1e-5


@pytest.mark.parametrize("key, value", [
    ("hydra_head_arch", "cross-attn"), ("hydra_head_arch", "eagle-attn"), ("grounded_heads", False),
    ("hidden_state_offset", 1)])
def test_what_is_not_supported_is_refused_by_name(tmp_path, key, value):
  with pytest.raises(CheckpointError, match=f"config.json: {key} is {value!r}; "):
    open_copy(tmp_path, "hydra_mlp", config={key: value})


def test_a_file_that_does_not_say_is_what_the_published_loader_takes_it_for(tmp_path):
  with pytest.raises(CheckpointError, match="grounded_heads is None; true is required"):
    open_copy(tmp_path, "hydra_mlp", without=["grounded_heads"])
  whole = open_copy(tmp_path, "hydra_mlp")
  files.assert_same(open_copy(tmp_path, "hydra_mlp", without=["hydra_head_arch", "hidden_state_offset"]), whole)
  with pytest.raises(CheckpointError, match="tensor 'hydra_mlp.0.1.linear.weight'.*nothing in this kind|extra tensor"):
    open_copy(tmp_path, "hydra_mlp", without=["hydra_num_layers"])


def test_blocks_behind_the_first_are_one_module(tmp_path):
  again = [f"hydra_mlp.{i}.5.linear.{kind}" for i in range(2) for kind in ("weight", "bias")]
  files.assert_same(open_copy(tmp_path, "hydra_prefix", drop=again), open_copy(tmp_path, "hydra_prefix"))
  for name in again:
    other = files.tensors_of(files.HEADS / "hydra_prefix")[name].copy()
    other[-1] += 1
    with pytest.raises(CheckpointError, match=f"'{name}' differs from '{name.replace('.5.', '.3.')}'"):
      open_copy(tmp_path, "hydra_prefix", tensors={name: other})


def test_the_embedding_beside_prefix_attention_is_not_read(tmp_path):
  whole = open_copy(tmp_path, "hydra_prefix")
  files.assert_same(open_copy(tmp_path, "hydra_prefix", drop=[UNUSED]), whole)
  with pytest.raises(CheckpointError, match=f"tensor '{UNUSED}' has shape .20, 7.; 8 columns"):
    open_copy(tmp_path, "hydra_prefix", tensors={UNUSED: np.zeros((20, 7), np.float32)})
  with pytest.raises(CheckpointError, match=f"extra tensor '{UNUSED}'"):
    open_copy(tmp_path, "hydra_mlp", tensors={UNUSED: np.zeros((20, 8), np.float32)})


def test_heads_of_some_ids(tmp_path):
  head = open_copy(tmp_path, "hydra_shared")
  assert head.vocabulary is None and head.vocabulary_bias is None and head.ids.tolist() == IDS
  maps = {name: files.tensors_of(files.HEADS / "hydra_shared")[name] for name in ("d2t", "t2d")}
  small = {f"hydra_lm_head.{i}.{kind}": np.ones((8, 8)[:2 - (kind == "bias")], np.float16)
           for i in range(3) for kind in ("weight", "bias")}
  own = open_copy(tmp_path, "hydra_mlp", tensors=maps | small, config={"vocab_size": 20, "draft_vocab_size": 8})
  assert own.ids.tolist() == IDS and own.vocabulary[2].shape == (8, 8) and own.vocabulary_bias[2].shape == (8,)
  save_head(own, tmp_path / "written")
  files.assert_same(load_head(tmp_path / "written", dtype=jnp.float32), own)


@pytest.mark.parametrize("name", FIXTURES)
def test_written_tensors_are_those_read(tmp_path, name):
  source = files.tensors_of(files.HEADS / name)
  source.pop(UNUSED, None)
  stored = next(value.dtype for key, value in source.items() if key.endswith("linear.weight"))
  for kept, written in ((stored, None), (jnp.float32, stored)):
    head = load_head(files.HEADS / name, dtype=kept, target=TARGET)
    save_head(head, tmp_path / "written", "hydra", dtype=written)
    files.assert_written(tmp_path / "written", source)
    files.assert_same(load_head(tmp_path / "written", dtype=kept), head)
  config = json.loads((tmp_path / "written" / "config.json").read_text())
  keys = ("hydra_head_arch", "hydra_num_heads", "hydra_num_layers", "grounded_heads", "hidden_state_offset")
  assert {key: config[key] for key in keys} == {key: files.config_of(name)[key] for key in keys}


def test_the_table_of_accuracy_is_kept(tmp_path):
  head = open_copy(tmp_path, "hydra_shared")
  head = head.replace(config=dataclasses.replace(head.config, accuracy=((0.5, 0.25), (0.25, 0.125))))
  save_head(head, tmp_path / "written")
  files.assert_same(load_head(tmp_path / "written", dtype=jnp.float32), head)
  with pytest.raises(CheckpointError, match="rank_accuracy is .*; 2 lists of shares are required"):
    open_copy(tmp_path, "hydra_shared", config={"rank_accuracy": [[0.5]]})


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_is_needed_and_no_other_is(tmp_path, name):
  whole = files.tensors_of(files.HEADS / name)
  for key, value in whole.items():
    if key == UNUSED:
      continue
    if ".5.linear." not in key:  # a module that stands there once more
      with pytest.raises(CheckpointError, match=f"tensor '{key}' is missing"):
        open_copy(tmp_path, name, drop=[key])
    with pytest.raises(CheckpointError, match="has shape .*; the configuration asks for |d2t and t2d|9 together"):
      open_copy(tmp_path, name, tensors={key: np.concatenate([value, value[:1]])})
  for key in ("hydra_mlp.0.9.linear.weight", "hydra_mlp.0.3.res_connection.weight", "hydra_lm_head.9.weight",
              "prefix_embeding_layer.layers.1.input_layernorm.weight", "lm_head.weight"):
    with pytest.raises(CheckpointError, match=f"extra tensor '{key}' of shape .8, 8."):
      open_copy(tmp_path, name, tensors={key: np.zeros((8, 8), np.float32)})


def test_the_target_must_be_theirs(tmp_path):
  with pytest.raises(CheckpointError, match="hydra_lm_head.pt: the heads are for a target of 20 token ids and width 8"):
    load_head(files.HEADS / "hydra_mlp", target=TINY)
  with pytest.raises(CheckpointError, match="hydra_num_heads is 0; a positive whole number"):
    open_copy(tmp_path, "hydra_mlp", config={"hydra_num_heads": 0})
