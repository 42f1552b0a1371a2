"""Files of DSpark's drafters."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import head_files as files
from specjax import cache as cache_lib
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.models.dspark import DSparkHead
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")


def open_copy(tmp_path, **changes):
  return load_head(files.changed(tmp_path, "dspark", **changes), dtype=jnp.float32)


def test_forward_is_the_published_one():
  head, given = load_head(files.HEADS / "dspark", dtype=jnp.float32), files.golden("dspark")
  text, size = len(given["features"]), head.config.block
  block = head.drafter.text(jnp.asarray(given["features"])[None], jnp.arange(text)[None])
  cache = cache_lib.KVCache(keys=block.keys, values=block.values, length=jnp.array([text], jnp.int32))
  hidden = head.drafter.forward(jnp.asarray(given["block"])[None], text + jnp.arange(size)[None], cache)
  previous = jnp.asarray(given["previous"], jnp.int32)[None]
  plain = head.drafter.logits(hidden, jnp.asarray(given["head"]))
  found = head.follow(plain, previous)
  np.testing.assert_allclose(found[0], given["logits"], atol=1e-4)
  assert np.abs(found - plain).max() > 0.1  # the Markov head says something
  np.testing.assert_allclose(jax.nn.sigmoid(head.acceptance(hidden, previous))[0], given["chances"], atol=1e-4)


def test_what_the_configuration_says():
  head = load_head(files.HEADS / "dspark")
  assert isinstance(head, DSparkHead) and head.features == (0, 6)  # the embedding, and the output of layer 5
  assert (head.config.block, head.config.mask_id, head.rank, head.ids) == (4, 19, 3, None)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("ids", [(0, 3, 4, 9), tuple(range(24))], ids=["some ids", "all ids"])
def test_round_trip_is_exact(tmp_path, ids, dtype):
  head = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                      tiny.dspark(tiny.decoder(vocab=24), ids))
  save_head(head, tmp_path / "head")
  again = load_head(tmp_path / "head", dtype=dtype)
  assert jax.tree.structure(again) == jax.tree.structure(head)
  jax.tree.map(np.testing.assert_array_equal, again, head)
  config = json.loads((tmp_path / "head" / "config.json").read_text())
  for name in ("target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank",
               "markov_head_type", "confidence_head_with_markov"):  # which DeepSpec's model asserts
    assert name in config


@pytest.mark.parametrize("parts", [{"first": None, "second": None, "confidence": None, "confidence_bias": None},
                                   {"confidence": None, "confidence_bias": None}], ids=["DeepSpec's DFlash", "Markov alone"])
def test_heads_may_be_absent(tmp_path, parts):
  head = tiny.dspark(tiny.decoder(vocab=24), (0, 3, 4, 9)).replace(**parts)
  save_head(head, tmp_path / "head")
  again = load_head(tmp_path / "head", dtype=jnp.float32)
  assert jax.tree.structure(again) == jax.tree.structure(head) and again.rank == head.rank


def test_copies_of_the_targets_matrices_are_compared_with_it(tmp_path):
  """A file whose embedding was trained, or that belongs to another target, would draft something else in silence."""
  tensors = safetensors_numpy.load_file(files.HEADS / "dspark" / "model.safetensors")
  own = {name: jnp.asarray(tensors[name], jnp.float32) for name in ("embed_tokens.weight", "lm_head.weight")}
  tiny_one = tiny.decoder(vocab=20)
  weights = tiny_one.weights.replace(embedding=own["embed_tokens.weight"], head=own["lm_head.weight"])
  target = tiny_one.replace(weights=weights, config=dataclasses.replace(tiny_one.config, width=8, layers=8))
  assert load_head(files.HEADS / "dspark", target=target).rank == 3
  for field, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
    other = target.replace(weights=weights.replace(**{field: own[name].at[7].add(1.0)}))
    with pytest.raises(CheckpointError, match=f"{name} is not the target's"):
      load_head(files.HEADS / "dspark", target=other)
  with pytest.raises(CheckpointError, match="embed_tokens.weight is not the target's"):
    load_head(files.HEADS / "dspark", target=tiny_one)  # of another width


@pytest.mark.parametrize("change, named", [
    ({"markov_head_type": "gated"}, "markov_head_type"), ({"markov_head_type": "rnn"}, "markov_head_type"),
    ({"markov_rank": -1}, "markov_rank"), ({"markov_rank": 5}, "markov_w1"), ({"mask_token_id": 20}, "mask_token_id"),
    ({"target_layer_ids": [-2]}, "target_layer_ids"), ({"target_layer_ids": None}, "target_layer_ids"),
    ({"confidence_head_with_markov": False}, "confidence_head.proj.weight"),
    ({"markov_rank": 0}, "confidence_head.proj.weight"), ({"markov_rank": None, "markov_head_type": None}, "confidence"),
    ({"enable_confidence_head": False}, "extra tensor"), ({"model_type": "gemma4"}, "model_type")])
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, named):
  with pytest.raises(CheckpointError, match=named):
    open_copy(tmp_path, config=change)


def test_a_drafter_without_norms_of_heads_is_not_written(tmp_path):
  head = tiny.dspark(tiny.decoder(vocab=24), (0, 3))
  layers = tuple(dataclasses.replace(layer, query_norm=None) for layer in head.drafter.layers)
  with pytest.raises(CheckpointError, match="norms of queries"):
    save_head(head.replace(drafter=head.drafter.replace(layers=layers)), tmp_path / "head")
