"""Files of Medusa's heads: alone, beside a whole model, and without matrices of their own."""
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

pytestmark = pytest.mark.usefixtures("quick_compile")
FIXTURES = ("medusa_heads", "medusa_model", "medusa_shared")
IDS = [0, 3, 4, 9, 10, 11, 17, 19]


def open_copy(tmp_path, name, **changes):
  return load_head(files.changed(tmp_path, name, **changes), dtype=jnp.float32)


@pytest.mark.parametrize("name, heads, blocks", [
  ("medusa_heads", 3, 1), ("medusa_model", 2, 2), ("medusa_shared", 2, 1)])
def test_forward_is_the_published_one(name, heads, blocks):
  head = load_head(files.HEADS / name, dtype=jnp.float32)
  given = files.golden(name)
  assert (head.config.heads, head.config.blocks, head.config.width) == (heads, blocks, 8)
  states = head.states(jnp.asarray(given["hidden"]))
  shared = jnp.asarray(given["head"]) if head.vocabulary is None else None
  np.testing.assert_allclose(head.logits(states, shared), given["logits"], atol=1e-4)


def test_heads_are_counted_as_configurations_lie():
  assert files.config_of("medusa_heads")["medusa_num_heads"] == 2
  head = load_head(files.HEADS / "medusa_heads")
  assert head.config.heads == len(head.linear) == len(head.bias) == len(head.vocabulary) == 3
  assert (head.config.vocab_size, head.config.draft_vocab, head.ids) == (20, 20, None)
  files.assert_same(load_head(files.HEADS / "medusa_heads" / "medusa_lm_head.pt"), head)


def test_blocks_of_a_head_are_one_module(tmp_path):
  again = [f"medusa_head.{i}.1.linear.{kind}" for i in range(2) for kind in ("weight", "bias")]
  whole = open_copy(tmp_path, "medusa_model")
  files.assert_same(open_copy(tmp_path, "medusa_model", drop=again), whole)
  for name in again:
    other = files.tensors_of(files.HEADS / "medusa_model")[name].copy()
    other[-1] += 1
    with pytest.raises(CheckpointError, match=f"'{name}' differs from '{name.replace('.1.', '.0.', 1)}'; the blocks"
                       if name.startswith("medusa_head.0") else f"tensor '{name}' differs from "):
      open_copy(tmp_path, "medusa_model", tensors={name: other})


def test_beside_a_model_only_the_heads_are_read(tmp_path):
  more = {"model.layers.0.mlp.up_proj.weight": np.zeros((3, 3), np.int8), "lm_head.weight": np.zeros((1, 1), np.int8)}
  files.assert_same(open_copy(tmp_path, "medusa_model", tensors=more), open_copy(tmp_path, "medusa_model"))
  with pytest.raises(CheckpointError, match="extra tensor 'vision.weight' of shape .2,."):
    open_copy(tmp_path, "medusa_model", tensors={"vision.weight": np.zeros(2, np.float32)})
  # In a file of heads there is no model.
  with pytest.raises(CheckpointError, match="extra tensor 'lm_head.weight' of shape .1, 1."):
    open_copy(tmp_path, "medusa_heads", tensors=more)


def test_heads_through_the_targets_head_may_draft_some_ids(tmp_path):
  head = open_copy(tmp_path, "medusa_shared")
  assert head.vocabulary is None and head.ids.tolist() == IDS
  assert (head.config.vocab_size, head.config.draft_vocab) == (20, 8)
  whole = open_copy(tmp_path, "medusa_shared", drop=["d2t", "t2d"], without=["draft_vocab_size"])
  assert whole.vocabulary is None and whole.ids is None and whole.config.draft_vocab == 20
  with pytest.raises(CheckpointError, match="config.json: vocab_size is None; a positive whole number is required"):
    open_copy(tmp_path, "medusa_shared", without=["vocab_size"])
  with pytest.raises(CheckpointError, match="tensor 'd2t' is missing"):
    open_copy(tmp_path, "medusa_heads", tensors={"t2d": np.ones(20, bool)})


def test_heads_of_some_ids_with_matrices_of_their_own(tmp_path):
  maps = {name: files.tensors_of(files.HEADS / "medusa_shared")[name] for name in ("d2t", "t2d")}
  small = {f"{i}.1.weight": np.ones((8, 8), np.float16) for i in range(3)}
  head = open_copy(tmp_path, "medusa_heads", tensors=maps | small, config={"vocab_size": 20, "draft_vocab_size": 8})
  assert head.ids.tolist() == IDS and head.vocabulary[2].shape == (8, 8)
  save_head(head, tmp_path / "written")
  files.assert_same(load_head(tmp_path / "written", dtype=jnp.float32), head)


@pytest.mark.parametrize("name", FIXTURES)
def test_written_tensors_are_those_read(tmp_path, name):
  source = {key.removeprefix("medusa_head."): value for key, value in files.tensors_of(files.HEADS / name).items()
            if not key.startswith(("model.", "lm_head."))}
  stored = source["0.0.linear.weight"].dtype
  for kept, written in ((stored, None), (jnp.float32, stored)):
    head = load_head(files.HEADS / name, dtype=kept)
    save_head(head, tmp_path / "written", "medusa", dtype=written)
    files.assert_written(tmp_path / "written", source)
    files.assert_same(load_head(tmp_path / "written", dtype=kept), head)
  assert json.loads((tmp_path / "written" / "config.json").read_text())["medusa_num_heads"] == head.config.heads


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_is_needed_and_no_other_is(tmp_path, name):
  whole = files.tensors_of(files.HEADS / name)
  for key, value in whole.items():
    if key.startswith(("model.", "lm_head.")):
      continue
    if ".1.linear." not in key:
      with pytest.raises(CheckpointError, match=f"tensor '{key}' is missing"):
        open_copy(tmp_path, name, drop=[key])
    with pytest.raises(CheckpointError, match="tensor '.*' has shape .*; the configuration asks for |d2t and t2d"):
      open_copy(tmp_path, name, tensors={key: np.concatenate([value, value[:1]])})
  prefix = "medusa_head." if name == "medusa_model" else ""
  with pytest.raises(CheckpointError, match=f"extra tensor '{prefix}0.3.linear.weight' of shape .8, 8."):
    open_copy(tmp_path, name, tensors={f"{prefix}0.3.linear.weight": np.zeros((8, 8), np.float32)})
  missing = 3 if name == "medusa_heads" else 2  # heads are counted up to the last that is there
  with pytest.raises(CheckpointError, match=f"tensor '{prefix}{missing}.0.linear.weight' is missing"):
    open_copy(tmp_path, name, tensors={f"{prefix}4.0.linear.bias": np.zeros(8, np.float32)})


def test_heads_without_a_matrix_say_whose_they_use(tmp_path):
  """Medusa's legacy trainer writes none (Medusa 140): read as the other kind such heads draft something, and badly."""
  with pytest.raises(CheckpointError, match="'0.1.weight' is missing; .* write \"shares_target_head\": true"):
    open_copy(tmp_path, "medusa_shared", config={"shares_target_head": False})
  with pytest.raises(CheckpointError, match="'medusa_head.0.1.weight' is missing; with medusa_num_layers 1 it is"):
    open_copy(tmp_path, "medusa_model", config={"medusa_num_layers": 1})


def test_the_target_must_be_theirs(tmp_path):
  target = tiny.decoder(vocab=20)
  with pytest.raises(CheckpointError, match="medusa_lm_head.pt: the heads are for a target of 20 token ids and"):
    load_head(files.HEADS / "medusa_heads", target=target)
  fits = target.replace(config=dataclasses.replace(target.config, width=8))
  assert load_head(files.HEADS / "medusa_heads", target=fits).config.heads == 3
  with pytest.raises(CheckpointError, match="hidden_size is 'wide'; a positive whole number"):
    open_copy(tmp_path, "medusa_model", config={"hidden_size": "wide"})
