"""Files of P-EAGLE heads."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import head_files as files
from specjax.checkpoints import CheckpointError
from specjax.checkpoints.heads import load_head
from specjax.checkpoints.heads import save_head
from specjax.models.peagle import PEagleHead
from specjax.proposers import masked_pass
from specjax.testing import tiny

pytestmark = pytest.mark.usefixtures("quick_compile")


def open_copy(tmp_path, **changes):
  return load_head(files.changed(tmp_path, "peagle", **changes), dtype=jnp.float32)


def test_forward_is_the_published_one():
  """One pass over five entries, of which three stand in the cache and two are new, and three masks."""
  head, given = load_head(files.HEADS / "peagle", dtype=jnp.float32), files.golden("peagle")
  embedded = head.embed(None, jnp.asarray(given["tokens"])[None])
  feature = head.fused(jnp.asarray(given["features"])[None])
  cache = head.init_cache(1, 8)
  place = jnp.arange(3, dtype=jnp.int32)[None]
  block = head.forward(embedded[:, :3], feature[:, :3], place, jnp.tril(jnp.ones((1, 3, 3), bool)), cache)[2]
  cache = cache.commit(block, jnp.array([3]))
  # Four entries in the pass, two of them known: the others are padding that nobody may see.
  pad = lambda x: jnp.concatenate([x[:, 3:], 9 * jnp.ones((1, 2, x.shape[2]))], 1)
  mask = head.embed(None, jnp.full((1, 3), head.mask_id)), jnp.broadcast_to(head.mask(), (1, 3, feature.shape[2]))
  positions, seen = masked_pass.layout(cache.length, jnp.array([2]), 4, 3)
  into = jnp.concatenate([pad(embedded), mask[0]], 1), jnp.concatenate([pad(feature), mask[1]], 1)
  hidden, _, made = head.forward(*into, positions, seen, cache)
  found = head.logits(masked_pass.depths(hidden, jnp.array([2]), 3))
  np.testing.assert_allclose(found[0], given["logits"], atol=1e-4)
  assert made.narrow(4).keys[1].shape[3] == 4


def test_what_the_configuration_says():
  head = load_head(files.HEADS / "peagle")
  assert isinstance(head, PEagleHead) and head.features == (2, 4, 5)
  assert (head.depth, head.depths, head.mask_id, head.ids.shape) == (2, 4, 18, (8,))
  assert head.embedding.shape == (20, 8) and head.config.residual_normed and not head.config.recurs_normed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("ids", [(0, 3, 4, 9), tuple(range(24))], ids=["some ids", "all ids"])
def test_round_trip_is_exact(tmp_path, ids, dtype):
  head = jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                      tiny.peagle(tiny.decoder(vocab=24), ids))
  save_head(head, tmp_path / "head")
  again = load_head(tmp_path / "head", dtype=dtype)
  first = again.first.replace(config=dataclasses.replace(again.config, first_position=0))  # which is the dialect's
  assert jax.tree.structure(again.replace(first=first)) == jax.tree.structure(head)
  jax.tree.map(np.testing.assert_array_equal, again.replace(first=first), head)
  config = json.loads((tmp_path / "head" / "config.json").read_text())
  assert config["speculators_model_type"] == "peagle" and config["speculators_config"]["algorithm"] == "peagle"
  assert config["transformer_layer_config"]["num_hidden_layers"] == 2


def test_a_published_head_is_written_again(tmp_path):
  head = load_head(files.HEADS / "peagle", dtype=jnp.bfloat16)
  save_head(head, tmp_path / "head")
  jax.tree.map(np.testing.assert_array_equal, load_head(tmp_path / "head", dtype=jnp.bfloat16), head)


@pytest.mark.parametrize("change, named", [
    ({"mask_token_id": None}, "mask_token_id is None"), ({"mask_token_id": 20}, "mask_token_id is 20"),
    ({"speculators_config": {"proposal_methods": []}}, "proposal_methods"),
    ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}}, "speculative_tokens is 0"),
    ({"fc_norm": False}, "extra tensor"), ({"speculators_model_type": "eagle3"}, "peagle"),
    ({"speculators_model_type": None, "ptd_token_id": 18}, "ptd_token_id"),
    ({"norm_before_fc": True}, "fc_norm")])
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, named):
  with pytest.raises(CheckpointError, match=named):
    open_copy(tmp_path, config=change)


def test_layers_of_which_some_have_norms_of_heads_are_not_written(tmp_path):
  head = tiny.peagle(tiny.decoder(vocab=24), (0, 3))
  ones = jnp.ones((head.config.shape.head_width,))
  layers = tuple(dataclasses.replace(layer, query_norm=ones, key_norm=ones) for layer in head.layers)
  with pytest.raises(CheckpointError, match="norms of queries and keys in every layer or in none"):
    save_head(head.replace(layers=layers), tmp_path / "head")


def test_a_mask_beyond_the_embedding_is_refused():
  target = tiny.decoder(vocab=24)
  with pytest.raises(ValueError, match="token id 24, and the embedding has 24 rows"):
    tiny.peagle(target, (0, 3)).replace(mask_id=24).check(target)
